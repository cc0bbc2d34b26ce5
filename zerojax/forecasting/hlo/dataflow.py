"""Builds the dataflow graph of an HLO program: which values are moved, summed, or computed from
which other values."""

from __future__ import annotations

import enum
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

from zerojax.forecasting.hlo.program import Array, Instruction, Program, Type

Value: TypeAlias = tuple[str, tuple[int, ...]]
"""A value of the program: (name of an instruction, element of its result); element () is the whole
result."""


class Edge(enum.Enum):
    """Kinds of edges in the dataflow graph: how a value contributes to another value."""

    SAME = "same"
    """The same numbers: moved, cut, joined, cast, scaled, repeated, gathered, or device sums."""
    ADDED = "added"
    """A term of a sum, or the value that an operation accumulates into."""
    USED = "used"
    """Anything else: the result has other numbers."""


_OPERAND = re.compile(r"%([\w.\-]+)((?:#\d+)*)")
_ALIASED = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+),")
_SOURCES = frozenset({"parameter", "constant", "iota", "partition-id", "replica-id"})
_MOVES_ALL = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-reduce-done",
        "all-reduce-start",
        "all-to-all",
        "bitcast",
        "bitcast-convert",
        "collective-broadcast",
        "collective-permute",
        "concatenate",
        "convert",
        "copy",
        "optimization-barrier",
        "reduce-precision",
        "reduce-scatter",
        "reshape",
        "reverse",
        "slice",
        "transpose",
    }
)
_MOVES_FIRST = {"dynamic-slice": 1, "pad": 1, "dynamic-update-slice": 2}
"""Opcode -> number of leading operands whose values it moves; the others are positions."""
MOVES = _MOVES_ALL | _MOVES_FIRST.keys()
_SCALES = frozenset({"multiply", "divide"})
MATMULS = frozenset({"dot", "convolution", "custom-call"})


class Dataflow:
    """Dataflow graph of all values of a program, through fusions, calls and loops.

    In a loop, the carried value, its initial value and the result of each iteration are linked as
    the same value.

    Attributes:
      values: all values, including values inside fusions; a tuple is represented by its elements.
    """

    def __init__(self, program: Program):
        self.program = program
        # Names are unique in a program, so one table serves all computations.
        self.instructions = {
            instruction.name: instruction
            for computation in program.computations.values()
            for instruction in computation.instructions
        }
        self._into: dict[Value, list[tuple[Value, Edge]]] = defaultdict(list)
        self._out_of: dict[Value, list[tuple[Value, Edge]]] = defaultdict(list)
        self.values = tuple(
            (name, index)
            for name, instruction in self.instructions.items()
            for index, _ in _elements(instruction.type)
        )
        for instruction in self.instructions.values():
            self._connect(instruction)

    def sources(self, value: Value) -> list[tuple[Value, Edge]]:
        """Returns the values that contribute to a value, each with the kind of the contribution."""
        return self._into.get(value, [])

    def targets(self, value: Value) -> list[tuple[Value, Edge]]:
        """Returns the values to which a value contributes, each with the kind of the
        contribution."""
        return self._out_of.get(value, [])

    def values_of(self, name: str) -> list[Value]:
        """Returns the values that an instruction computes: one per array of its result."""
        return [(name, index) for index, _ in _elements(self.instructions[name].type)]

    def operands(self, name: str) -> list[Value]:
        """Returns the values that an instruction reads, in the order of its operands."""
        return self._operands(name)

    def array(self, value: Value) -> Array | None:
        """Returns the array type (dtype and shape) of a value; None for tuples and unknown
        values."""
        name, index = value
        found: Type | None = self.instructions[name].type if name in self.instructions else None
        for position in index:
            found = found[position] if isinstance(found, tuple) and position < len(found) else None
        return found if isinstance(found, Array) else None

    def is_workspace(self, value: Value) -> bool:
        """Returns whether a value is scratch memory of a library: the last element of the tuple
        that a custom call returns, if its dtype is s8 or u8."""
        name, index = value
        if self.instructions[name].opcode != "custom-call" or not index:
            return False
        array, last = self.array(value), len(_parts(self.instructions[name].type)) - 1
        return array is not None and array.dtype in ("s8", "u8") and index == (last,)

    # --- links ------------------------------------------------------------------------------------

    def _add_edge(self, source: Value, target: Value, edge: Edge) -> None:
        self._into[target].append((source, edge))
        self._out_of[source].append((target, edge))

    def _pass_on(self, source: Value, target: Value) -> None:
        """Adds an edge from every element of `source` to the same element of `target`."""
        name, index = source
        # A tuple has no edges of its own; only its elements are values.
        for element, _ in _elements(self.instructions[name].type):
            if element[: len(index)] == index:
                rest = element[len(index) :]
                self._add_edge((name, element), (target[0], target[1] + rest), Edge.SAME)

    def _connect(self, instruction: Instruction) -> None:
        opcode, operands = instruction.opcode, self._operands(instruction.name)
        result = instruction.name, ()
        if opcode in _SOURCES:
            return
        if opcode == "tuple":
            for position, operand in enumerate(operands):
                self._pass_on(operand, (instruction.name, (position,)))
        elif opcode == "get-tuple-element":
            (position,) = instruction.integers("index")
            name, index = operands[0]
            self._pass_on((name, (*index, position)), result)
        elif opcode == "while":
            self._connect_loop(instruction, operands[0])
        elif opcode == "conditional":
            for branch, operand in zip(instruction.branches, operands[1:], strict=True):
                self._call(branch, [operand], result)
        elif opcode.endswith(("-start", "-done", "-update")):
            self._connect_asynchronous(instruction, operands)
        elif opcode in ("fusion", "call"):
            (callee,) = instruction.callees.get("calls") or instruction.callees["to_apply"]
            self._call(callee, operands, result)
        else:
            self._connect_operation(instruction, operands)

    def _call(self, callee: str, operands: list[Value], result: Value) -> None:
        computation = self.program.computations[callee]
        for parameter, operand in zip(computation.parameters, operands, strict=True):
            self._pass_on(operand, (parameter.name, ()))
        self._pass_on((computation.root.name, ()), result)

    def _connect_loop(self, instruction: Instruction, operand: Value) -> None:
        (body,) = instruction.callees["body"]
        (condition,) = instruction.callees["condition"]
        carried = self.program.computations[body].parameters[0].name, ()
        self._pass_on(operand, carried)
        # The body's result is the carried value of the next iteration, which closes the circle.
        self._pass_on((self.program.computations[body].root.name, ()), carried)
        tested = self.program.computations[condition].parameters[0].name
        # The condition has a parameter of its own, and its uses count as uses of the carried
        # value.
        self._pass_on(carried, (tested, ()))
        self._pass_on(carried, (instruction.name, ()))

    def _connect_asynchronous(self, instruction: Instruction, operands: list[Value]) -> None:
        """Adds the edges of an asynchronous instruction.

        A start returns (operands, result, ...). The start of an all-reduce returns only its result,
        unless the text prints its operands as a tuple of their own.
        """
        name, opcode = instruction.name, instruction.opcode
        if opcode.startswith("all-reduce-"):
            self._connect_all_reduce(instruction, operands)
        elif opcode.endswith("-update"):
            self._pass_on(operands[0], (name, ()))
        elif opcode.endswith("-done"):
            source, index = operands[0]
            # A copy returns (result, operand, ...).
            self._pass_on((source, (*index, 0 if opcode == "copy-done" else 1)), (name, ()))
        elif callees := instruction.callees.get("calls"):
            for position, operand in enumerate(operands):
                self._pass_on(operand, (name, (0, position)))
            self._call(callees[0], operands, (name, (1,)))
        elif opcode == "copy-start":
            # Of (result, operand, context) only the result is a new value.
            self._add_edge(operands[0], (name, (0,)), Edge.SAME)
        else:
            for position, operand in enumerate(operands):
                place = (position,) if len(operands) > 1 else ()
                self._add_edge(operand, (name, (0, *place)), Edge.SAME)
                self._add_edge(operand, (name, (1, *place)), Edge.SAME)

    def _connect_all_reduce(self, instruction: Instruction, operands: list[Value]) -> None:
        """Adds the edges of an all-reduce-start, whose value is `result` or `((operands), result)`,
        or of the all-reduce-done that belongs to it."""
        is_start = instruction.opcode == "all-reduce-start"
        start = instruction if is_start else self.instructions[operands[0][0]]
        has_operands = not isinstance(_parts(start.type)[0], Array)
        if not is_start:
            self._pass_on((start.name, (1,) if has_operands else ()), (instruction.name, ()))
        elif not has_operands:
            self._connect_operation(instruction, operands)
        else:
            for position, operand in enumerate(operands):
                place = (position,) if len(operands) > 1 else ()
                self._add_edge(operand, (start.name, (1, *place)), Edge.SAME)

    def _connect_operation(self, instruction: Instruction, operands: list[Value]) -> None:
        name, opcode = instruction.name, instruction.opcode
        elements = [index for index, _ in _elements(instruction.type)]
        # A combined collective has one result per operand, and each result comes from its own
        # operand only.
        if opcode in _MOVES_ALL and len(elements) > 1:
            for index, operand in zip(elements, operands, strict=True):
                self._add_edge(operand, (name, index), Edge.SAME)
            return
        for position, operand in enumerate(operands):
            for index in elements:
                edge = self._kind(instruction, position, index)
                if edge is not None:
                    self._add_edge(operand, (name, index), edge)

    def _kind(self, instruction: Instruction, position: int, index: tuple[int, ...]) -> Edge | None:
        """Returns how operand number `position` contributes to element `index` of the instruction's
        result; None if it does not."""
        opcode = instruction.opcode
        if opcode in _MOVES_ALL or position < _MOVES_FIRST.get(opcode, 0):
            return Edge.SAME
        if opcode == "broadcast":
            return Edge.SAME if self._is_scalar((instruction.name, ())) else Edge.USED
        if opcode == "select" and (kept := self._kept_by_select(instruction)) is not None:
            return Edge.SAME if position == kept else None
        if opcode in ("add", "subtract") or (opcode == "scatter" and position == 0):
            return Edge.ADDED
        if opcode in _SCALES:
            first, second = (self._is_scalar(value) for value in self._operands(instruction.name))
            # Two arrays multiplied are not a scaling: the result has other numbers.
            scaled = {(True, False): 1, (False, True): 0}.get((first, second))
            return Edge.SAME if position == scaled else Edge.USED
        if opcode == "custom-call":
            if self.is_workspace((instruction.name, index)):
                return None
            # Such a call, as cuBLAS, adds its product to the array whose memory it writes.
            into = self._accumulates(instruction).get(position)
            if into is not None:
                return Edge.ADDED if into == index else None
        return Edge.USED

    def _kept_by_select(self, instruction: Instruction) -> int | None:
        """Returns the number (1 or 2) of the operand whose numbers a `select` passes on; None if
        both operands may be passed on.

        One condition for the whole array chooses between the array and a number. So
        `transport.collective_order` lets a collective wait for others; a user's `where(flag, x, 0)`
        moves `x` in the same way.
        """
        chosen, *given = (self._is_scalar(value) for value in self._operands(instruction.name))
        if not chosen or given[0] == given[1]:
            return None
        return 1 + given.index(False)

    def _accumulates(self, instruction: Instruction) -> dict[int, tuple[int, ...]]:
        """Returns {operand of a custom call: element of the result that is written into the memory
        of this operand}."""
        text = instruction.attributes.get("output_to_operand_aliasing", "")
        return {
            int(operand): tuple(int(n) for n in index.split(",") if n.strip())
            for index, operand in _ALIASED.findall(text)
        }

    def _is_scalar(self, value: Value) -> bool:
        """Returns whether a value is a scalar, a constant, or computed from these only by
        broadcasts, bitcasts, reshapes and casts. A constant array counts, even if its elements
        differ."""
        array = self.array(value)
        if array is not None and not array.shape:
            return True
        instruction = self.instructions[value[0]]
        if instruction.opcode in ("broadcast", "bitcast", "reshape", "convert"):
            return all(self._is_scalar(operand) for operand in self._operands(instruction.name))
        return instruction.opcode == "constant"

    def _operands(self, name: str) -> list[Value]:
        return _operands(self.instructions[name])


def _operands(instruction: Instruction) -> list[Value]:
    """Returns the operands of an instruction, each with the tuple element that the instruction
    reads: `%fusion#1` is element 1 of fusion."""
    if instruction.opcode in ("constant", "parameter"):
        return []
    text = instruction.operand_text
    if "%" not in text:  # some printers omit the signs, and then they print no elements
        return [(name, ()) for name in instruction.operands]
    return [
        (name, tuple(int(n) for n in index.split("#")[1:]))
        for name, index in _OPERAND.findall(text)
    ]


# The same types occur in thousands of instructions of a step.
@functools.lru_cache(maxsize=1 << 16)
def _elements(type_: Type) -> tuple[tuple[tuple[int, ...], Array], ...]:
    return tuple(_walk(type_, ()))


def _walk(type_: Type, index: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Array]]:
    if isinstance(type_, Array):
        yield index, type_
        return
    for position, part in enumerate(type_):
        yield from _walk(part, (*index, position))


def _parts(type_: Type) -> tuple[Type, ...]:
    return (type_,) if isinstance(type_, Array) else type_
