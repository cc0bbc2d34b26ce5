"""Derives the number of iterations of a loop from its condition, for loops without XLA's
annotation.

XLA drops the annotation `known_trip_count` from loops that it has peeled or pipelined (seen with
jaxlib 0.12 and `xla_gpu_pipeline_all_gather`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_SAME_VALUE = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape")
_STEPS = 64  # limit of a chain of copies: more than any program has


class _Instruction(Protocol):
    """What this module reads of `program.Instruction`, which imports this module."""

    name: str
    opcode: str

    @property
    def operands(self) -> Sequence[str]: ...

    @property
    def operand_text(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, str]: ...

    @property
    def callees(self) -> Mapping[str, Sequence[str]]: ...

    def integers(self, attribute: str) -> Sequence[int]: ...


class _Computation(Protocol):
    """What this module reads of `program.Computation`."""

    @property
    def root(self) -> _Instruction: ...

    def __contains__(self, name: str) -> bool: ...

    def __getitem__(self, name: str) -> _Instruction: ...

    def operands_of(self, instruction: Any) -> Sequence[_Instruction]: ...


def derive_trip_count(
    computations: Mapping[str, _Computation], where: _Computation, loop: _Instruction
) -> int | None:
    """Computes the number of iterations of a loop of the form `for (i = init; i < bound; i +=
    step)` with constants; returns None for any other loop.

    Args:
      computations: {name: `Computation`} of the whole program.
      where: computation that contains the loop.
      loop: the `while` instruction.
    """
    condition = computations[loop.callees["condition"][0]]
    body = computations[loop.callees["body"][0]]
    bound = _less_than(computations, condition)
    if bound is None:
        return None
    index, limit = bound
    step = _increment(computations, body, index)
    start = _element(computations, where, loop.operands[0], index)
    # A loop that does not step forward would not end, so its condition was read wrongly.
    if step is None or start is None or step <= 0:
        return None
    return max(0, -(-(limit - start) // step))


def _less_than(
    computations: Mapping[str, _Computation], condition: _Computation
) -> tuple[int, int] | None:
    """Matches a loop condition `counter < constant`; returns (index of the counter in the loop's
    tuple, the constant), or None."""
    found = _binary(computations, condition, condition.root, "compare")
    if found is None:
        return None
    comparison, (left, right) = found
    direction = comparison.attributes.get("direction")
    # Compilers also write `constant > counter`.
    if direction == "GT":
        left, right, direction = right, left, "LT"
    index = _tuple_index(condition, left)
    limit = _constant(computations, condition, right)
    if direction != "LT" or index is None or limit is None:
        return None
    return index, limit


def _increment(
    computations: Mapping[str, _Computation], body: _Computation, index: int
) -> int | None:
    """Returns the constant c if the loop's body adds c to element `index` of the loop's tuple; else
    None."""
    root = body.root
    if root.opcode != "tuple":
        return None
    value = _same_value(body, body[root.operands[index]])
    found = _binary(computations, body, value, "add")
    if found is None:
        return None
    _, operands = found
    # The counter may be either operand of the sum.
    for one, other in (operands, operands[::-1]):
        if _tuple_index(body, one) == index:
            return _constant(computations, body, other)
    return None


def _binary(
    computations: Mapping[str, _Computation],
    where: _Computation,
    instruction: _Instruction,
    opcode: str,
) -> tuple[_Instruction, tuple[_Instruction, _Instruction]] | None:
    """Matches a binary instruction, which may be the only operation of a fusion; returns it and its
    two operands, or None.

    An operand is an instruction of the computation `where`, or a constant inside the fusion.
    """
    if instruction.opcode == opcode:
        left, right = where.operands_of(instruction)
        return instruction, (left, right)
    if instruction.opcode != "fusion":
        return None
    inner = computations[instruction.callees["calls"][0]]
    root = _same_value(inner, inner.root)
    if root.opcode != opcode:
        return None
    outside = where.operands_of(instruction)
    # The comparison may be fused with copies of its operands, which are parameters of the fusion.
    seen = []
    for operand in inner.operands_of(root):
        operand = _same_value(inner, operand)
        if operand.opcode == "parameter":
            operand = outside[int(operand.operand_text)]
        seen.append(operand)
    return root, (seen[0], seen[1])


def _same_value(where: _Computation, instruction: _Instruction) -> _Instruction:
    for _ in range(_STEPS):
        if instruction.opcode not in _SAME_VALUE:
            break
        instruction = where[instruction.operands[0]]
    return instruction


def _tuple_index(where: _Computation, instruction: _Instruction) -> int | None:
    """Returns the index of the element of the computation's only parameter that a value is; None
    for other values."""
    # Operands of a fusion's root may be constants inside the fusion, which `where` does not
    # contain.
    if instruction.name in where:
        instruction = _same_value(where, instruction)
    if instruction.opcode != "get-tuple-element":
        return None
    source = where[instruction.operands[0]]
    return instruction.integers("index")[0] if source.opcode == "parameter" else None


def _element(
    computations: Mapping[str, _Computation], where: _Computation, name: str, index: int
) -> int | None:
    """Returns the constant that a loop's initial tuple has at `index`; None if it is not a
    constant."""
    start = _same_value(where, where[name])
    if start.opcode != "tuple":
        return None
    return _constant(computations, where, where[start.operands[index]])


def _constant(
    computations: Mapping[str, _Computation], where: _Computation, instruction: _Instruction
) -> int | None:
    if instruction.name in where:
        instruction = _same_value(where, instruction)
    if instruction.opcode == "fusion":
        inner = computations[instruction.callees["calls"][0]]
        instruction = _same_value(inner, inner.root)
        # A fusion may hand on its constant as a broadcast.
        if instruction.opcode == "broadcast":
            instruction = inner[instruction.operands[0]]
    if instruction.opcode != "constant":
        return None
    text = instruction.operand_text.strip()
    # A constant of several elements is printed with brackets and is no bound of a counter.
    return int(text) if re.fullmatch(r"-?\d+", text) else None
