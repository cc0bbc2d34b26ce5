"""Finds the work that the schedule runs while collectives and copies are in progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.hlo.costs import HbmTraffic, Matmuls, ScheduleSum
from zerojax.forecasting.hlo.program import Computation, Instruction, Program

_Path = tuple[int, ...]
# Opcodes whose result is their operand, which may be a started collective.
_SAME_VALUE = ("copy", "bitcast", "opt-barrier")


class Started(Protocol):
    """Interface of an asynchronous operation; `Collective` and `HostCopy` have it."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> str | None: ...
    @property
    def loop_depth(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Work that a device does between the start and the done of a collective or copy.

    Attributes:
      matmuls: number of matrix products.
      matmul_flops: FLOPs of these products.
      eight_bit_flops: FLOPs of the products of 8-bit floats.
      hbm_bytes: bytes of device memory that all instructions between start and done read and write.
      done: name of the instruction that waits for the operation. None for a synchronous operation,
        or if none was found; then no work is counted.
      pipelined: whether a loop runs the operation one iteration ahead: the compiler says so, or
        start and done are in different iterations.
      crosses_iterations: whether start and done are in different iterations of a loop. Then the
        work counts from the start to the end of its iteration (or, before the loop, to the loop),
        and from the beginning of the next iteration to the done.
      stretches: parts of the schedule in which the operation is in progress: (computation, first
        instruction, instruction after the last).
    """

    matmuls: int = 0
    matmul_flops: int = 0
    eight_bit_flops: int = 0
    hbm_bytes: int = 0
    done: str | None = None
    pipelined: bool = False
    crosses_iterations: bool = False
    stretches: tuple[tuple[str, int, int], ...] = dataclasses.field(
        default=(), repr=False, compare=False
    )


def find_overlap(program: Program, collectives: Iterable[Started]) -> dict[str, Overlap]:
    """Finds the work that is scheduled while one execution of a collective or copy is in progress.

    Args:
      program: scheduled program, as compilers return it.
      collectives: results of `find_collectives(program, ...)` or `find_host_copies(program)`.

    Returns:
      {name of the collective or copy: its `Overlap`}.

    Raises:
      ValueError: the program is not scheduled, so the order of its text has no meaning.
    """
    if not program.is_scheduled:
        raise ValueError(
            "the program has no schedule (is_scheduled=true is missing in its first line), so it "
            "does not show what overlaps; pass the result of compiled.as_text()"
        )
    finder = _Finder(program)
    return {collective.name: finder.overlap(collective) for collective in collectives}


@dataclass(frozen=True)
class _Flight:
    """Instructions that are scheduled between a start and its done, as successive ranges."""

    done: str
    stretches: list[tuple[Computation, int, int]]
    crosses: bool


class _Finder:
    def __init__(self, program: Program):
        self._program = program
        matmuls, traffic = Matmuls(program), HbmTraffic(program)
        self._count, self._flops = matmuls.total_count, matmuls.total_flops
        self._eight_bit_flops = matmuls.total_eight_bit_flops
        self._bytes = traffic.total

    def overlap(self, collective: Started) -> Overlap:
        if collective.start is None:
            return Overlap()
        where, start = self._program.find(collective.start)
        settings = start.backend_config.get("collective_backend_config", {})
        # The compiler marks operations outside of loops too, where nothing is one iteration ahead.
        marked = bool(settings.get("is_pipelined")) and collective.loop_depth > 0
        flight = self._flight(where, start)
        if flight is None:
            return Overlap(pipelined=marked)
        return Overlap(
            matmuls=self._sum(self._count, flight),
            matmul_flops=self._sum(self._flops, flight),
            eight_bit_flops=self._sum(self._eight_bit_flops, flight),
            hbm_bytes=self._sum(self._bytes, flight),
            done=flight.done,
            pipelined=marked or flight.crosses,
            crosses_iterations=flight.crosses,
            stretches=tuple((where.name, begin, end) for where, begin, end in flight.stretches),
        )

    def _sum(self, total: ScheduleSum, flight: _Flight) -> int:
        return sum(
            total.of_instruction(where, instruction)
            for where, begin, end in flight.stretches
            for instruction in where.instructions[begin:end]
        )

    def _flight(self, where: Computation, start: Instruction) -> _Flight | None:
        begin = where.positions[start.name] + 1
        found, carried = self._follow(where, begin, start.name, ())
        # Only a body has a next iteration; the result of any other computation leaves it for good.
        if found or carried is None or not self._is_loop_body(where):
            return found
        # The value leaves the body through its root: its done is in the next iteration.
        again, _ = self._follow(where, 0, where.parameters[0].name, carried)
        if again is None:
            return None
        rest_of_body = (where, begin, len(where.instructions))
        return _Flight(again.done, [rest_of_body, *again.stretches], crosses=True)

    def _follow(
        self, where: Computation, begin: int, value: str, path: _Path
    ) -> tuple[_Flight | None, _Path | None]:
        """Follows element `path` of the started value through the schedule, from position `begin`
        on.

        Returns:
          (ranges up to the done, if the done is in this computation or in a loop that it runs, else
          None; position of the value in the computation's result, if it is there, else None).
        """
        held = {value: path}
        for position in range(begin, len(where.instructions)):
            user = where.instructions[position]
            for index, operand in enumerate(user.operands):
                if operand not in held:
                    continue
                path = held[operand]
                # A done of a part belongs to another operation: a done waits for the whole value
                # of its start.
                if user.opcode.endswith("-done") and not path:
                    return _Flight(user.name, [(where, begin, position)], crosses=False), None
                if user.opcode == "while":
                    flight = self._into_loop(user, path)
                    if flight:
                        before = (where, begin, position)
                        return _Flight(flight.done, [before, *flight.stretches], True), None
                # A loop that does not wait for the value carries it on at the same place of its
                # tuple.
                moved = _path_in_user(user, index, path)
                if moved is not None:
                    held[user.name] = moved
        return None, held.get(where.root.name)

    def _into_loop(self, loop: Instruction, path: _Path) -> _Flight | None:
        body = self._program.computations[loop.callees["body"][0]]
        return self._follow(body, 0, body.parameters[0].name, path)[0]

    def _is_loop_body(self, computation: Computation) -> bool:
        return any(
            computation.name in instruction.callees.get("body", ())
            for caller in self._program.computations.values()
            for instruction in caller.instructions
            if instruction.opcode == "while"
        )


def _path_in_user(user: Instruction, index: int, path: _Path) -> _Path | None:
    """Follows a value through one instruction: returns its tuple path in the result of `user`, from
    its tuple path in operand number `index`; None if the result does not contain the value."""
    if user.opcode == "tuple":
        return (index, *path)
    if user.opcode == "get-tuple-element":
        wanted = int(user.attributes["index"])
        return path[1:] if path and path[0] == wanted else None
    if user.opcode in _SAME_VALUE or user.opcode == "while" or user.opcode.endswith("-update"):
        return path
    return None
