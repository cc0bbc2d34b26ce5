"""Parses the text of optimized HLO programs: computations, instructions, numbers of executions, and
types."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from zerojax.forecasting.hlo.source_frames import Frame, SourceFrames
from zerojax.forecasting.hlo.trip_counts import derive_trip_count
from zerojax.operators.marks import FURTHER_ROUNDS, share_of_branch

_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_COMPUTATION = re.compile(r"(ENTRY )?%?([A-Za-z_][\w.\-]*)[^\"]*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\S.*?) ([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEE_KEYS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "true_computation",
    "false_computation",
    "branch_computations",
    "called_computations",
)
_MAY_CALL = re.compile(rf"\b(?:{'|'.join(_CALLEE_KEYS)})=")
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[({]|[\])}]|,|[^"\[({\])},]+')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

HOST_MEMORY_SPACE = 5
"""Number of the memory space of `pinned_host` in a layout, as in `{1,0:S(5)}`."""
_BITS = {
    **dict.fromkeys(("token", "opaque"), 0),
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
    # An element below one byte takes a whole byte, unless its layout says `E(4)`: packed.
    **dict.fromkeys(("s1", "u1", "s2", "u2", "s4", "u4", "f4e2m1fn"), 8),
}
_FLOAT8 = re.compile(r"f8e\dm\d\w*")
_TOKEN = re.compile(r"[()]|([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_PACKED = re.compile(r"E\((\d+)\)")
Type: TypeAlias = "Array | tuple[Type, ...]"


def split_outside_brackets(text: str) -> list[str]:
    """Splits `text` at commas that are outside of brackets and quotation marks; returns the
    stripped parts."""
    parts, current, depth = [], [], 0
    for piece in _PIECE.findall(text):
        if piece == "," and not depth:
            parts.append("".join(current).strip())
            current = []
            continue
        depth += (piece in "[({") - (piece in "])}")
        current.append(piece)
    parts.append("".join(current).strip())
    return [part for part in parts if part]


class Instruction:
    """One instruction of a computation, which is one line of the text. Properties are parsed when
    they are first read.

    Attributes:
      name: name without the leading %.
      opcode: opcode as written: "fusion", "all-gather-start", "custom-call".
      is_root: whether the instruction's value is the computation's result.
    """

    def __init__(self, name: str, opcode: str, *, is_root: bool, type_text: str, rest: str):
        self.name = name
        self.opcode = opcode
        self.is_root = is_root
        self._type_text = type_text
        # From the first character after the opcode's bracket to the end of the line.
        self._rest = rest
        self.derived_trip_count: int | None = None

    def __repr__(self) -> str:
        return f"<{self.name} = {self._type_text[:60]} {self.opcode}>"

    @property
    def is_allocation(self) -> bool:
        """Whether the instruction only names memory (a custom call of `AllocateBuffer`) that later
        instructions write to."""
        is_call = self.opcode == "custom-call"
        return is_call and "AllocateBuffer" in self.attributes.get("custom_call_target", "")

    @functools.cached_property
    def _end_of_operands(self) -> int:
        # Few operands have brackets of their own, and counting every bracket of a long line is
        # slow.
        end = self._rest.find(")")
        if self._rest.find("(", 0, end) < 0:
            return end
        depth = 1
        for bracket in re.finditer("[()]", self._rest):
            depth += 1 if bracket[0] == "(" else -1
            if not depth:
                return bracket.start()
        raise ValueError(f"the operands of {self!r} have no closing bracket: {self._rest[:200]!r}")

    @property
    def operand_text(self) -> str:
        """Text inside the brackets: the operands, the value of a constant, or the number of a
        parameter."""
        return self._rest[: self._end_of_operands]

    @property
    def attribute_text(self) -> str:
        return self._rest[self._end_of_operands + 1 :]

    @property
    def type(self) -> Type:
        return read_type(self._type_text)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of the result, with nested tuples flattened."""
        return arrays_of(self._type_text)

    @property
    def bytes(self) -> int:
        """Size of the result in bytes."""
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self.opcode in ("constant", "parameter"):
            return ()
        text = self.operand_text
        # With signs the names are marked; without them the name is the last word of each part.
        if "%" in text:
            return tuple(_NAME.findall(text))
        return tuple(part.split()[-1] for part in split_outside_brackets(text))

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """{attribute: its text, with brackets and quotation marks}."""
        parts = (part.partition("=") for part in split_outside_brackets(self.attribute_text))
        return {key: value for key, _, value in parts}

    @property
    def op_name(self) -> str:
        """Name of the traced operation from which the instruction was compiled; "" if the text does
        not state it."""
        found = _OP_NAME.search(self.attribute_text)
        return found[1] if found else ""

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """Settings of the backend as a dict; {} if there are none or they are not JSON (some custom
        calls store a program there)."""
        text = self.attributes.get("backend_config", "{}")
        try:
            # Some backends print their settings as a JSON text inside of a JSON text.
            value = json.loads(text)
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    @functools.cached_property
    def callees(self) -> dict[str, tuple[str, ...]]:
        """{attribute: names of the computations that it refers to}, such as {"body":
        ("region_0.5",)}."""
        # Most instructions call nothing, and a search of the text is faster than to parse
        # attributes.
        if not _MAY_CALL.search(self.attribute_text):
            return {}
        return {
            key: tuple(name.strip().lstrip("%") for name in value.strip("{}").split(","))
            for key, value in self.attributes.items()
            if key in _CALLEE_KEYS and value.strip("{}")
        }

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the computations among which a conditional chooses."""
        keys = ("branch_computations", "true_computation", "false_computation")
        return tuple(name for key in keys for name in self.callees.get(key, ()))

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of a loop; None if neither the compiler nor the loop's condition
        states it; 0 for a loop of `FURTHER_ROUNDS` whose number the compiler does not state."""
        known = self.backend_config.get("known_trip_count")
        return int(known["n"]) if known else self.derived_trip_count

    def integers(self, attribute: str) -> tuple[int, ...]:
        """Returns the integers in the text of an attribute, such as (0, 2) for `dimensions={0,2}`;
        () if the attribute is missing."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attributes.get(attribute, "")))

    def runs(self) -> Iterator[tuple[str, int]]:
        """Yields (computation that the instruction calls, number of runs); each branch of a
        conditional counts once.

        The condition of a loop runs once more often than its body. A loop whose number of
        iterations is unknown counts as one iteration.
        """
        trips = self.trip_count if self.opcode == "while" else None
        # One iteration is a lower bound; `unknown_loops` names these loops, and pages say so.
        trips = 1 if trips is None else trips
        for key, names in self.callees.items():
            times = {"body": trips, "condition": trips + 1}.get(key, 1)
            yield from ((name, times) for name in names)


class Computation:
    """A computation of a program as a list of instructions; in a scheduled program they are in the
    order of execution."""

    def __init__(self, name: str):
        self.name = name
        self.instructions: list[Instruction] = []
        self.positions: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.positions

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[self.positions[name]]

    def append(self, instruction: Instruction) -> None:
        self.positions[instruction.name] = len(self.instructions)
        self.instructions.append(instruction)

    @functools.cached_property
    def root(self) -> Instruction:
        marked = (instruction for instruction in self.instructions if instruction.is_root)
        # Without a mark the root is the last instruction of the computation.
        return next(marked, self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Parameters of the computation, in the order of the caller's operands."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.operand_text))

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        return [self[name] for name in instruction.operands]

    def operand_arrays(self, instruction: Instruction) -> list[Array]:
        """Returns the arrays of all operands of an instruction."""
        return [array for operand in self.operands_of(instruction) for array in operand.arrays]


class Program:
    """A parsed HLO program.

    Attributes:
      computations: {name: computation}.
      entry: computation that a step runs.
      is_scheduled: whether the order of instructions is the order of execution.
      num_partitions, num_replicas: numbers whose product is the number of devices; 1 if the text
        does not state them.
    """

    def __init__(
        self,
        header: str,
        computations: dict[str, Computation],
        entry: Computation,
        frames: SourceFrames | None = None,
    ):
        # Programs for one device may leave these numbers out.
        def number(key: str) -> int:
            found = re.search(rf"\b{key}=(\d+)", header)
            return int(found[1]) if found else 1

        self.computations = computations
        self.entry = entry
        self._frames = frames or SourceFrames([])
        self.is_scheduled = "is_scheduled=true" in header
        self.num_partitions = number("num_partitions")
        self.num_replicas = number("replica_count")

    @functools.cached_property
    def _calls(self) -> dict[str, list[tuple[str, int]]]:
        """{computation: [(computation that calls it, number of calls per run of the caller)]}."""
        calls: dict[str, list[tuple[str, int]]] = {name: [] for name in self.computations}
        for caller in self.computations.values():
            for instruction in caller.instructions:
                for callee, times in instruction.runs():
                    calls[callee].append((caller.name, times))
        return calls

    @functools.cached_property
    def _times(self) -> dict[str, int]:
        return {self.entry.name: 1}

    def times_run(self, name: str) -> int:
        """Returns how often one step executes the computation `name`.

        The number is the product of the iterations of all enclosing loops, summed over the
        instructions that call the computation. Each branch of a conditional counts as taken. A loop
        of `unknown_loops` counts as one iteration. A reduction function (`to_apply`) counts once
        per instruction.

        Raises:
          KeyError: the program has no such computation.
        """
        # A computation can be called from thousands of places, and each asks for the times of its
        # callers.
        if name not in self._times:
            self._times[name] = sum(
                self.times_run(caller) * times for caller, times in self._calls[name]
            )
        return self._times[name]

    def shares_of(self, instruction: Instruction) -> list[float | None]:
        """Returns one number per branch of a conditional, in the order of `instruction.branches`:
        the fraction of layers that take the branch; None if the fraction is unknown."""
        return [
            share_of_branch(
                (inner.op_name for inner in self.computations[name].instructions),
                around=instruction.op_name,
            )
            for name in instruction.branches
        ]

    def frames_of(self, instruction: Instruction) -> list[Frame]:
        """Returns (file, line) of the Python frames that traced an instruction, innermost first."""
        return self._frames.of(instruction.attribute_text)

    @functools.cached_property
    def unknown_loops(self) -> tuple[str, ...]:
        """Names of executed loops whose number of iterations is unknown; all counts assume one
        iteration."""
        return tuple(
            instruction.name
            for computation in self.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "while"
            # A loop of 0 iterations has a number, so only None means unknown.
            and instruction.trip_count is None
            and self.times_run(computation.name)
        )

    def find(self, instruction: str) -> tuple[Computation, Instruction]:
        """Returns the computation that contains an instruction, and the instruction itself.

        Args:
          instruction: name of the instruction.

        Raises:
          KeyError: the program has no instruction of this name.
        """
        for computation in self.computations.values():
            if instruction in computation:
                return computation, computation[instruction]
        raise KeyError(f"the program has no instruction {instruction!r}")


def read_program(text: str) -> Program:
    """Parses the text of an HLO program: the result of `compiled.as_text()` or a text dump of XLA.

    Args:
      text: text of one HLO module; 10 MB take less than a second.

    Raises:
      ValueError: the text is not an HLO module, or a line of a computation is not an instruction.
    """
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry: Computation | None = None
    header, tables = "", []
    # The comments number long tuples, and their text would be taken for a part of the type.
    for line in _INDEX_COMMENT.sub("", text).splitlines():
        if current is None:
            if line.startswith("HloModule"):
                header = line
            elif line.endswith("{") and (opening := _COMPUTATION.match(line)):
                current = computations[opening[2]] = Computation(opening[2])
                entry = current if opening[1] else entry
            else:
                # Tables of files and frames stand before the first computation, in the order of
                # their use.
                tables.append(line)
        elif line.startswith("}"):
            current = None
        elif line.strip():
            current.append(_read_instruction(line, current))
    if not header or entry is None:
        raise ValueError(
            f"a text of {len(text)} characters has no HLO module with an ENTRY computation; it "
            f"begins with "
            f"{text[:60]!r}; pass the result of compiled.as_text()"
        )
    # A condition may be printed after its loop, so loops are counted when the whole text is read.
    for computation in computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "while" and instruction.trip_count is None:
                count = derive_trip_count(computations, computation, instruction)
                # Exchange rounds that are not needed if experts have equal loads.
                count = 0 if FURTHER_ROUNDS in instruction.op_name else count
                instruction.derived_trip_count = count
    return Program(header, computations, entry, SourceFrames(tables))


def _read_instruction(line: str, computation: Computation) -> Instruction:
    found = _INSTRUCTION.match(line)
    if found is None:
        raise ValueError(
            f"a line of computation {computation.name!r} is not an HLO instruction: "
            f"{line[:200]!r}; pass the unchanged result of compiled.as_text()"
        )
    return Instruction(
        found[2],
        found[4],
        is_root=bool(found[1]),
        type_text=found[3],
        rest=line[found.end() :],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Type of an array: dtype, shape and memory space.

    Attributes:
      dtype: dtype as XLA writes it: "bf16", "f32", "pred", "f8e4m3fn"; "token" for a value without
        bytes.
      shape: sizes of the dimensions; for a dynamic dimension its upper bound.
      bits: number of bits of one element in memory.
      memory_space: 0 for the device's own memory, `HOST_MEMORY_SPACE` for host memory.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: int
    memory_space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.size * self.bits // 8)


def _array(dtype: str, dims: str, layout: str | None) -> Array:
    bits = _BITS.get(dtype, 8 if _FLOAT8.fullmatch(dtype) else None)
    if bits is None:
        raise ValueError(
            f"dtype {dtype!r} in the type {dtype}[{dims}] is unknown to zerojax "
            f"({', '.join(sorted(_BITS))}, f8e*); add its size to "
            "zerojax/forecasting/hlo/program.py"
        )
    # The size of a dynamic dimension is printed as its upper bound, `<=8`.
    shape = tuple(int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim.strip())
    packed = _PACKED.search(layout or "")
    space = _MEMORY_SPACE.search(layout or "")
    return Array(
        dtype, shape, int(packed[1]) if packed else bits, memory_space=int(space[1]) if space else 0
    )


# A step has thousands of instructions, but few different texts of types.
@functools.lru_cache(maxsize=1 << 16)
def read_type(text: str) -> Type:
    """Parses the type in `text`: an `Array`, or a tuple of types, nested as in the text.

    Args:
      text: text such as `f32[16,64]{1,0}` or `((bf16[8]{0}, s32[]), bf16[64]{0}, u32[])`.

    Raises:
      ValueError: the text is not a type, or has an unknown dtype.
    """
    levels: list[list[Type]] = [[]]
    for token in _TOKEN.finditer(text):
        if token[0] == "(":
            levels.append([])
        elif token[0] == ")":
            inner = tuple(levels.pop())
            levels[-1].append(inner)
        else:
            levels[-1].append(_array(token[1], token[2], token[3]))
    if len(levels) != 1 or len(levels[0]) != 1:
        raise ValueError(f"{text!r} is not a type in XLA's HLO notation")
    return levels[0][0]


@functools.lru_cache(maxsize=1 << 16)
def arrays_of(text: str) -> tuple[Array, ...]:
    """Returns all arrays of the type in `text`, in order; tokens are left out."""

    def flatten(value: Type) -> list[Array]:
        if isinstance(value, Array):
            return [value] if value.bits else []
        return [array for part in value for array in flatten(part)]

    return tuple(flatten(read_type(text)))
