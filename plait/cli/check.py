"""The command `plait check`: an operator's protocol under many schedules, and its mutants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.errors import MissingDependencyError

if TYPE_CHECKING:
    from plait.check.explore import MutantResult, Outcome


def command(operator: str, ranks: int = 3, schedules: int = 20, mutants: bool = False) -> None:
    """Look for races, deadlocks and wrong values of an operator on virtual ranks of the CPU.

    Runs OPERATOR under SCHEDULES different orders of blocks, copies and hosts; with --mutants also
    breaks each step of its protocol in turn, and each must be noticed. Exits with 1 otherwise.
    """
    try:
        from rich.console import Console
    except ImportError:
        raise MissingDependencyError("rich", "plait check", 'pip install "plait[cli]"') from None
    from plait.check.explore import check_mutants, explore, record
    from plait.check.mutants import mutants_of
    from plait.cli.check_cases import get_case

    case = get_case(operator)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log has no width of its own
    outcome = explore(case.run, schedules, case.rounds, ranks, min_slots=case.min_slots)
    console.print(_schedule_table(operator, ranks, case.rounds, outcome))
    if outcome.finding is not None:
        console.print(f"FAILED: {outcome.finding.found}\n{outcome.finding.report}", markup=False)
        raise SystemExit(1)
    if not mutants:
        return
    results = check_mutants(
        case.run,
        mutants_of(record(case.run, case.rounds, ranks)),
        case.equivalents,
        schedules,
        case.rounds,
        ranks,
        min_slots=case.min_slots,
    )
    console.print(_mutant_table(operator, results))
    wrong = [result for result in results if not result.as_expected]
    if wrong:
        console.print(f"FAILED: {len(wrong)} of {len(results)} mutants are not as the table says")
        raise SystemExit(1)
    console.print(f"all {len(results)} mutants are as they should be")


def _schedule_table(operator: str, ranks: int, rounds: int, outcome: Outcome) -> Any:
    from rich.table import Table

    title = f"{operator}: {rounds} rounds on {ranks} virtual ranks"
    table = Table(title=title, title_justify="left")
    table.add_column("schedule")
    for name in ("steps", "races", "found"):
        table.add_column(name, justify="right")
    for each in outcome.attempts:
        table.add_row(
            str(each.plan), f"{each.steps:,}", str(each.num_races), each.found or "nothing"
        )
    return table


def _mutant_table(operator: str, results: list[MutantResult]) -> Any:
    from rich.table import Table

    table = Table(title=f"Mutants of {operator}", title_justify="left")
    for name in ("mutant", "verdict", "by", "schedule or reason"):
        table.add_column(name, overflow="fold")
    for result in results:
        finding = result.outcome.finding
        if finding is None:
            row = ("", result.reason or f"not in {len(result.outcome.attempts)} schedules")
        else:
            row = (str(finding.found), f"{finding.plan}, number {finding.index + 1}")
        table.add_row(result.mutant.name, result.verdict, *row)
    return table


__all__ = ["command"]
