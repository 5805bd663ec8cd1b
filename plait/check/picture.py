"""Draws a recorded timeline as a PNG: who computed, waited and copied, rank by rank."""

from __future__ import annotations

from os import PathLike
from typing import Any

from plait.check.timeline import Span, SpanKind, TimelineRecorder, lane_order
from plait.errors import MissingDependencyError

# Distinct in lightness too, so that a grey print can be read.
_COLOURS: dict[SpanKind, str] = {
    "compute": "#2b6cb0",
    "call": "#63b3ed",
    "wait": "#f6ad55",
    "signal": "#a0aec0",
    "copy": "#38a169",
}
_ROW_INCHES = 0.3
_FONT_POINTS = 9
_MIN_WIDTH_SHARE = 0.002  # of the window: a shorter span would be thinner than a pixel


def save_png(
    recorder: TimelineRecorder,
    path: str | PathLike[str],
    *,
    operator: str | None = None,
    call: int = -1,
    max_blocks: int = 4,
) -> None:
    """Draw one operator call, one row for each rank and lane, into `path`.

    The call is the `call`-th (from 0; -1 is the last) of `operator`, or of any operator if that is
    None. At most the first `max_blocks` block lanes of each rank and stream are drawn. Raises
    `MissingDependencyError` without matplotlib and `ArgumentError` if there is no such call.
    """
    start_ns, end_ns = recorder.window_ns(operator, call)
    spans = [
        span
        for span in recorder.spans
        if span.kind in _COLOURS
        and span.end_ns >= start_ns
        and span.start_ns <= end_ns
        and _block_number(span) < max_blocks
    ]
    figure = _draw(spans, start_ns, end_ns)
    figure.savefig(path, dpi=150, format="png")


def _draw(spans: list[Span], start_ns: int, end_ns: int) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MissingDependencyError(
            "matplotlib", "plait.check.picture.save_png", "pip install matplotlib"
        ) from error

    lanes = sorted({(span.rank, span.lane) for span in spans}, key=lane_order)
    rows = {lane: row for row, lane in enumerate(lanes)}
    # A figure of its own canvas: pyplot would keep global state and ask for a display.
    figure = Figure(figsize=(12, 1.6 + _ROW_INCHES * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = end_ns - start_ns or 1
    for kind, colour in _COLOURS.items():  # later kinds on top: waits lie inside compute spans
        drawn = [span for span in spans if span.kind == kind]
        begins = [max(span.start_ns, start_ns) - start_ns for span in drawn]
        ends = [min(span.end_ns, end_ns) - start_ns for span in drawn]
        lengths = [
            max(end - begin, width * _MIN_WIDTH_SHARE) / 1000
            for begin, end in zip(begins, ends, strict=True)
        ]
        at = [rows[span.rank, span.lane] for span in drawn]
        axes.barh(at, lengths, 0.72, [begin / 1000 for begin in begins], color=colour)
    for row in range(1, len(lanes)):
        if lanes[row][0] != lanes[row - 1][0]:
            axes.axhline(row - 0.5, color="#718096", linewidth=0.8)
    labels = [f"rank {rank} · {lane}" for rank, lane in lanes]
    axes.set_yticks(range(len(lanes)), labels, fontsize=_FONT_POINTS)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, width / 1000)
    axes.set_xlabel("virtual microseconds since the call began", fontsize=_FONT_POINTS + 1)
    axes.tick_params(axis="x", labelsize=_FONT_POINTS)
    axes.set_title(_title(spans), fontsize=_FONT_POINTS + 2, loc="left")
    shown = {span.kind for span in spans}
    handles = [
        Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in shown
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles) or 1, fontsize=_FONT_POINTS
    )
    return figure


def _title(spans: list[Span]) -> str:
    operators = sorted({span.operator for span in spans})
    ranks = {span.rank for span in spans}
    return f"{', '.join(operators)} on {len(ranks)} virtual rank{'s' if len(ranks) != 1 else ''}"


def _block_number(span: Span) -> int:
    _, _, number = span.lane.partition(" block ")
    return int(number) if number else -1


__all__ = ["save_png"]
