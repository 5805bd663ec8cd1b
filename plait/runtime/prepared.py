"""A program that is enqueued again and again with other tensors, at little cost to the host.

Preparing compiles and loads every kernel and turns each command into a step whose arguments are
complete but for the addresses of the tensors that change, the *roles* (x, the weights, results).
A role's tensors are laid out alike in all calls: shape, strides, dtype, and address modulo 16.
Everything else (regions, signal words, tables) stays where it is and is kept alive. Steps go to raw
streams and so cost neither a stream switch nor an event object; they are captured into CUDA graphs
as the ordinary commands are. Docs: docs/design/host_time.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from plait.backends.commands import Call, Command, Copy, Launch, Program, Signal, StreamWait
from plait.backends.nvidia.driver import Driver, Lane
from plait.runtime.launcher import BoundLaunch
from plait.runtime.relocation import CannotPrepareError, Place, Roles, as_rows, joined

Step: TypeAlias = Callable[[Sequence[int], Sequence[Lane]], None]
_LANES = ("main", "comm", "peers")


class PreparedProgram:
    """The steps of one program. `roles` names the tensors that `run` gets anew.

    `executor` is a `CudaExecutor` with a driver; its `transform` is applied here, once. Nothing of
    the roles' tensors is kept. CannotPrepareError says why a program can only run the ordinary way.
    """

    def __init__(
        self,
        program: Program,
        roles: Mapping[str, torch.Tensor],
        executor: Any,
        bind: Callable[[Launch], Any] = BoundLaunch,
    ) -> None:
        self.operator = program.operator
        self._executor = executor
        self._roles = Roles(roles)
        self._driver: Driver = executor.driver
        self._constants: list[Any] = []  # what the steps' addresses lie in
        self._steps: list[Step] = []
        if executor.is_current():
            self._prepare(executor.transform(program), bind)
        else:
            with torch.cuda.device(executor.device):
                self._prepare(executor.transform(program), bind)

    def _prepare(self, program: Program, bind: Callable[[Launch], Any]) -> None:
        executor = self._executor
        self._driver.enter_thread(executor.index)
        names = {name for each in program.commands for name in _streams_of(each)}
        self._lanes = [self._lane(name) if name in names else None for name in _LANES[1:]]
        # Kernels first: nothing may be compiled or loaded once a kernel waits.
        bound = {id(launch): bind(launch) for launch in program.launches()}
        for command in program.commands:
            step = self._step(command, bound)
            if step is not None:
                self._steps.append(step)
        # A tensor may be freed and used anew by `main` once the call is over: `main` must have
        # waited for every stream that reads or writes it, or the allocator must know.
        self._unjoined = [
            (role, executor.stream(name)) for role, name in joined(program, self._roles)
        ]

    def _lane(self, name: Any) -> Lane:
        return self._driver.lane(self._executor.stream(name).cuda_stream)

    @property
    def num_steps(self) -> int:
        """Steps that the host enqueues a call."""
        return len(self._steps)

    def run(self, roles: Mapping[str, torch.Tensor]) -> None:
        """Enqueue with these tensors; `main` is the current stream of the executor's device."""
        executor = self._executor
        if not executor.is_current():
            with torch.cuda.device(executor.device):
                self._run(roles)
            return
        self._run(roles)

    def _run(self, roles: Mapping[str, torch.Tensor]) -> None:
        driver, executor = self._driver, self._executor
        executor.keep_if_captured(self)
        driver.enter_thread(executor.index)
        bases = [roles[name].data_ptr() for name in self._roles.names]
        lanes = (driver.lane(executor.current_raw_stream()), *self._lanes)
        for step in self._steps:
            step(bases, lanes)  # type: ignore[arg-type]  # no step uses a lane that is not there
        for role, stream in self._unjoined:
            roles[role].record_stream(stream)

    # --- from commands to steps
    def _step(self, command: Command, bound: Mapping[int, Any]) -> Step | None:
        if isinstance(command, Launch):
            return self._launch(command, bound[id(command)])
        if isinstance(command, Copy):
            return self._copy(command)
        if isinstance(command, Signal):
            return self._signal(command)
        if isinstance(command, StreamWait):
            return self._wait(command)
        return self._call(command)

    def _place(self, tensor: torch.Tensor) -> Place:
        place = self._roles.place(tensor)
        if place.role is None:
            self._constants.append(tensor)
        return place

    def _launch(self, command: Launch, bound: Any) -> Step:
        raw, stream, lane = bound.raw, bound.STREAM, _LANES.index(command.stream)
        if raw is None:
            raise CannotPrepareError(f"Triton's launcher of {command.kernel} is not known")
        plain: list[tuple[int, int, int]] = []  # (slot, role, offset)
        described: list[tuple[int, int, int, Callable[[int], Any]]] = []
        for name, slot in bound.slots.items():
            value = command.args.get(name)
            place = self._place(value if isinstance(value, torch.Tensor) else value.base)  # type: ignore[union-attr]
            if place.role is None:
                continue
            encode = bound.encoders.get(name)
            if encode is None:
                plain.append((slot, place.role, place.offset))
            else:
                described.append((slot, place.role, place.offset, encode))
        template = bound.arguments
        self._constants.append(bound.compiled)

        def step(bases: Sequence[int], lanes: Sequence[Lane]) -> None:
            arguments = template.copy()
            arguments[stream] = lanes[lane].raw
            for slot, role, offset in plain:
                arguments[slot] = bases[role] + offset
            for slot, role, offset, encode in described:
                arguments[slot] = encode(bases[role] + offset)
            raw(*arguments)

        return step

    def _copy(self, command: Copy) -> Step | None:
        dst, src, lane = command.dst.detach(), command.src.detach(), _LANES.index(command.stream)
        if dst.numel() == 0 and dst.shape == src.shape:
            return None
        rows = as_rows(dst, src)
        driver = self._driver
        if rows is None or not (driver.reaches(dst) and driver.reaches(src)):
            return self._torch_copy(command)
        to, of = self._place(dst), self._place(src)
        if rows.height == 1:
            return self._flat_copy(to, of, rows.width, lane)
        box = driver.box(rows.dst_pitch, rows.src_pitch, rows.width, rows.height)
        copy_rows, place, raise_for = driver.copy_rows, driver.place, driver.raise_for

        def step(bases: Sequence[int], lanes: Sequence[Lane]) -> None:
            place(box, to.address(bases), of.address(bases))
            error = copy_rows(box, lanes[lane].handle)[0]
            if error:
                raise_for(error, "cuMemcpy2DAsync")

        return step

    def _flat_copy(self, to: Place, of: Place, num_bytes: int, lane: int) -> Step:
        copy, raise_for = self._driver.copy, self._driver.raise_for
        if to.role is None and of.role is None:
            dst, src = self._driver.pointer(to.offset), self._driver.pointer(of.offset)

            def step(bases: Sequence[int], lanes: Sequence[Lane]) -> None:
                error = copy(dst, src, num_bytes, lanes[lane].handle)[0]
                if error:
                    raise_for(error, "cuMemcpyAsync")

        elif to.role is None:
            assert of.role is not None
            dst, role, offset = self._driver.pointer(to.offset), of.role, of.offset

            def step(bases: Sequence[int], lanes: Sequence[Lane]) -> None:
                error = copy(dst, bases[role] + offset, num_bytes, lanes[lane].handle)[0]
                if error:
                    raise_for(error, "cuMemcpyAsync")

        else:

            def step(bases: Sequence[int], lanes: Sequence[Lane]) -> None:
                dst, src = to.address(bases), of.address(bases)
                error = copy(dst, src, num_bytes, lanes[lane].handle)[0]
                if error:
                    raise_for(error, "cuMemcpyAsync")

        return step

    def _torch_copy(self, command: Copy) -> Step:
        """Strides that are no rows, or another dtype: only between tensors that stay."""
        dst, src = command.dst.detach(), command.src.detach()
        if self._place(dst).role is not None or self._place(src).role is not None:
            raise CannotPrepareError("a copy of a changing tensor with strides that are no rows")
        return self._on_stream(lambda: dst.copy_(src, non_blocking=True), command.stream)

    def _signal(self, command: Signal) -> Step:
        to, of = self._place(command.word), self._place(command.mirror)
        return self._flat_copy(to, of, 4, _LANES.index(command.stream))

    def _wait(self, command: StreamWait) -> Step:
        driver, event = self._driver, self._driver.event(self)
        record, wait, raise_for = driver.record, driver.wait, driver.raise_for
        waits, on = _LANES.index(command.stream), _LANES.index(command.on)

        # One event is enough: a wait is for the record before it, whatever is recorded later.
        def step(bases: Sequence[int], lanes: Sequence[Lane]) -> None:
            error = record(event, lanes[on].handle)[0] or wait(lanes[waits].handle, event, 0)[0]
            if error:
                raise_for(error, "cuEventRecord or cuStreamWaitEvent")

        return step

    def _call(self, command: Call) -> Step:
        tensors = (*command.reads, *command.writes)
        if not tensors or any(self._place(each).role is not None for each in tensors):
            raise CannotPrepareError(f"{command.label!r} holds tensors of one call")
        return self._on_stream(command.fn, "main")

    def _on_stream(self, fn: Callable[[], Any], name: Any) -> Step:
        stream = None if name == "main" else self._executor.stream(name)

        def step(bases: Sequence[int], lanes: Sequence[Lane]) -> None:
            with torch.no_grad(), torch.cuda.stream(stream):
                fn()

        return step


def _streams_of(command: Command) -> tuple[str, ...]:
    if isinstance(command, StreamWait):
        return command.stream, command.on
    return (getattr(command, "stream", "main"),)


__all__ = ["PreparedProgram"]
