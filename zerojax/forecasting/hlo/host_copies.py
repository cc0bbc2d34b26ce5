"""Finds the copies between host memory and device memory in a program: their bytes, executions,
kind and overlap.

XLA's GPU compiler copies whole arrays with `copy-start`, and slices inside loops with a fusion that
contains only the slice. If the slice's position is linear in the loop counter, the compiler records
that (`dynamic_slice_config`), and the GPU's copy engine moves the slice. Otherwise a kernel reads
or writes host memory, on the processors that matrix products need.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.hlo.overlap import Overlap, find_overlap
from zerojax.forecasting.hlo.program import (
    HOST_MEMORY_SPACE,
    Array,
    Computation,
    Instruction,
    Program,
)

TO_DEVICE, TO_HOST = "to device", "to host"

_CONTROL_FLOW = ("while", "conditional", "call", "call-start", "async-start")
# Opcodes that only name or order values.
_MOVE_NOTHING = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
    "add-dependency",
)
_WRAPPERS = ("fusion", "fusion-start", "async-start")
_SLICES = ("dynamic-slice", "slice")
_RENAMES = ("bitcast", "reshape", "copy")


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """One instruction that moves bytes between host and device.

    Attributes:
      name: name of the instruction. An instruction that moves bytes in both directions is
        represented by two `HostCopy`s.
      direction: TO_DEVICE or TO_HOST.
      bytes: number of bytes of one execution on one device.
      times: number of executions per step; loops of `Program.unknown_loops` count as one iteration.
      loop_depth: number of loops around the instruction.
      is_linear: whether the copy engine moves the bytes: a whole array, or a slice whose position
        is constant or linear in a loop counter. Otherwise a kernel moves them.
      start: name of the instruction that starts the copy asynchronously; None if the program waits
        for it.
      op_name: name of the traced operation from which the instruction was compiled.
      overlap: work that is scheduled while the copy is in progress.
      opposite_bytes: bytes, of one execution each, of the copies in the other direction that are in
        progress at the same time.
    """

    name: str
    direction: str
    bytes: int
    times: int
    loop_depth: int
    is_linear: bool
    start: str | None
    op_name: str
    overlap: Overlap = dataclasses.field(default_factory=Overlap)
    opposite_bytes: int = 0

    @property
    def is_async(self) -> bool:
        return self.start is not None


def find_host_copies(program: Program) -> list[HostCopy]:
    """Finds all copies between host and device that a step executes, in the program's order.

    Copies in loops, calls and branches are included, and every branch of a conditional counts as
    taken.

    Args:
      program: optimized program for GPUs. A program for CPUs has no such copies, because all its
        memory is host memory.
    """
    found: dict[tuple[str, str], HostCopy] = {}
    for where, instruction, times, depth in _executed(program, program.entry, 1, 0):
        for copy in _copies_of(program, where, instruction):
            # A computation that is called twice yields the same instruction twice.
            key = copy.name, copy.direction
            earlier = found[key].times if key in found else 0
            found[key] = dataclasses.replace(copy, times=earlier + times, loop_depth=depth)
    copies = list(found.values())
    # Without a schedule the order of the text says nothing about what runs at the same time.
    if not copies or not program.is_scheduled:
        return copies
    overlap = find_overlap(program, copies)
    # Overlap must be known for all copies before their opposites can be compared.
    copies = [dataclasses.replace(copy, overlap=overlap[copy.name]) for copy in copies]
    return [dataclasses.replace(copy, opposite_bytes=_opposite(copy, copies)) for copy in copies]


def link_bytes(copies: list[HostCopy]) -> dict[str, int]:
    """Sums the copied bytes: returns {direction: bytes per step on one device} for both
    directions."""
    total = defaultdict(int, {TO_DEVICE: 0, TO_HOST: 0})
    for copy in copies:
        total[copy.direction] += copy.bytes * copy.times
    return dict(total)


def bytes_within_host(program: Program) -> int:
    """Counts the bytes per step that a program copies from host memory to host memory.

    XLA inserts such a copy if the old values of an array are read after new values were written in
    place, or if it merged two arrays. On an H100 507 MB took 89 ms (JAX 0.11.2).
    """
    return sum(
        times * instruction.arrays[0].bytes
        for where, instruction, times, _ in _executed(program, program.entry, 1, 0)
        if _is_within_host(where, instruction)
    )


def _is_within_host(where: Computation, instruction: Instruction) -> bool:
    if instruction.opcode == "copy-start":
        return all(_on_host(array) for array in instruction.arrays[:2])
    if instruction.opcode != "copy":
        return False
    return all(_on_host(x) for x in (*where.operand_arrays(instruction), instruction.arrays[0]))


def _executed(
    program: Program, where: Computation, times: int, depth: int
) -> Iterator[tuple[Computation, Instruction, int, int]]:
    """Yields (computation, instruction, executions per step, number of enclosing loops) for every
    executed instruction; a kernel is one instruction."""
    for instruction in where.instructions:
        opcode = instruction.opcode
        # A kernel may contain control flow in its text, but the program sees one launch.
        if opcode in _CONTROL_FLOW and not _is_kernel(program, instruction):
            deeper = depth + (opcode == "while")
            for name, often in instruction.runs():
                inner = program.computations[name]
                yield from _executed(program, inner, times * often, deeper)
        elif opcode not in _MOVE_NOTHING and not opcode.endswith(("-done", "-update")):
            yield where, instruction, times, depth


def _is_kernel(program: Program, instruction: Instruction) -> bool:
    """Returns whether an instruction runs as one kernel, and not as separate instructions."""
    if instruction.opcode != "async-start":
        return instruction.opcode in _WRAPPERS
    inner = program.computations[instruction.callees["calls"][0]]
    # A wrapper of one instruction is that kernel; with more, each of them is launched.
    return all(one.is_root or one.opcode == "parameter" for one in inner.instructions)


def _copies_of(program: Program, where: Computation, instruction: Instruction) -> list[HostCopy]:
    """Returns the copies between host and device that one instruction makes, at most one per
    direction."""
    if _is_kernel(program, instruction):
        inner = program.computations[instruction.callees["calls"][0]]
        moved = _moved_by_kernel(inner)
    else:
        moved = _moved_by_one(where, instruction)
    is_started = instruction.opcode.endswith("-start")
    return [
        HostCopy(
            name=instruction.name,
            direction=direction,
            bytes=sum(size for size, _ in parts),
            times=1,
            loop_depth=0,
            is_linear=all(linear for _, linear in parts),
            start=instruction.name if is_started else None,
            op_name=instruction.op_name,
        )
        for direction, parts in moved.items()
    ]


_Moved = dict[str, list[tuple[int, bool]]]
"""{direction: [(bytes, whether the copy engine moves them) of each part]}."""


def _moved_by_one(where: Computation, instruction: Instruction) -> _Moved:
    """Returns {direction: bytes of each part} that an instruction outside of a fusion copies
    between host and device; {} if it copies none."""
    if instruction.opcode == "copy-start":  # (target, source, context)
        target, source = instruction.arrays[:2]
        return _between(source, target, linear=True)
    if instruction.opcode == "copy":
        (source,) = where.operand_arrays(instruction)
        return _between(source, instruction.arrays[0], linear=True)
    operands = where.operand_arrays(instruction)
    to_device = [(x.bytes, False) for x in operands if _on_host(x)]
    to_host = [(x.bytes, False) for x in instruction.arrays if _on_host(x)]
    if instruction.opcode in ("dynamic-slice", "dynamic-update-slice", "slice"):
        return _moved_by_slices(where, [instruction])
    if instruction.is_allocation:
        return {}
    return _without_empty({TO_DEVICE: to_device, TO_HOST: to_host})


def _between(source: Array, target: Array, *, linear: bool) -> _Moved:
    if _on_host(source) == _on_host(target):
        return {}
    return {TO_DEVICE if _on_host(source) else TO_HOST: [(target.bytes, linear)]}


def _moved_by_kernel(inner: Computation) -> _Moved:
    """Returns the bytes that a fusion copies: slices that it reads from host arrays, and updates
    that it writes to them."""
    # Most fusions touch no host memory, and the following reads every operand.
    if not any(_on_host(array) for one in inner.instructions for array in one.arrays):
        return {}
    slices = [i for i in inner.instructions if i.opcode in (*_SLICES, "dynamic-update-slice")]
    moved = defaultdict(list, _moved_by_slices(inner, slices))
    # An array that is read in slices must not count a second time as a whole.
    seen = {_source(inner, one).name for one in slices}
    for parameter in inner.parameters:
        if parameter.name not in seen:
            moved[TO_DEVICE] += [(x.bytes, False) for x in parameter.arrays if _on_host(x)]
    results = inner.operands_of(inner.root) if inner.root.opcode == "tuple" else [inner.root]
    for result in results:
        # Of an updated array only the update crosses the link, which the slices counted.
        if _unnamed(inner, result).opcode not in ("dynamic-update-slice", "parameter"):
            moved[TO_HOST] += [(x.bytes, False) for x in result.arrays if _on_host(x)]
    alone = len(slices) == 1 and all(
        one in slices or one.opcode in ("parameter", "constant", *_RENAMES)
        for one in inner.instructions
    )
    if not alone:  # the fusion also computes, so a kernel moves the bytes
        moved = {way: [(size, False) for size, _ in parts] for way, parts in moved.items()}
    return _without_empty(moved)


def _moved_by_slices(where: Computation, slices: list[Instruction]) -> _Moved:
    moved: _Moved = {TO_DEVICE: [], TO_HOST: []}
    for one in slices:
        source, linear = _source(where, one).arrays[0], "dynamic_slice_config" in one.backend_config
        if one.opcode in _SLICES:
            # A slice from host memory into host memory does not cross the link.
            if _on_host(source) and not _on_host(one.arrays[0]):
                moved[TO_DEVICE].append((one.bytes, linear))
        elif _on_host(one.arrays[0]):
            update = where[one.operands[1]].arrays[0]
            if not _on_host(update):
                moved[TO_HOST].append((update.bytes, linear))
    return _without_empty(moved)


def _source(where: Computation, one: Instruction) -> Instruction:
    """Returns the instruction whose array a slice is read from or an update is written into, with
    bitcasts, reshapes and copies skipped."""
    return _unnamed(where, where[one.operands[0]])


def _unnamed(where: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _RENAMES:
        instruction = where[instruction.operands[0]]
    return instruction


def _without_empty(moved: _Moved) -> _Moved:
    return {direction: parts for direction, parts in moved.items() if parts}


def _on_host(array: Array) -> bool:
    return array.memory_space == HOST_MEMORY_SPACE


def _opposite(copy: HostCopy, copies: list[HostCopy]) -> int:
    """Returns the bytes, of one execution each, of those `copies` that go in the opposite direction
    of `copy` and are in progress at the same time."""
    return sum(
        other.bytes
        for other in copies
        if other.direction != copy.direction and _meet(copy.overlap, other.overlap)
    )


def _meet(one: Overlap, other: Overlap) -> bool:
    # A start is just before its range and a done just after it: of two adjacent ranges, one ends
    # before the other begins.
    return any(
        where == there and max(first, begin) <= min(last, end)
        for where, first, last in one.stretches
        for there, begin, end in other.stretches
    )
