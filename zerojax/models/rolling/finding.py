"""Search for layers that a traced loss calls one after the other, and their loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.models.jaxpr import inner_programs, is_checkpoint, read_name
from zerojax.models.loops import keeps_products
from zerojax.models.rolling.equality import Equality
from zerojax.models.rolling.flat_program import LayerProgram, Mismatch, Place, open_calls
from zerojax.models.rolling.layer_names import LayerList, find_lists, stack_name
from zerojax.models.rolling.rolled import Rolled, roll
from zerojax.models.trace import ModelTrace

MIN_TURNS = 2
"""A loop has at least so many turns; whether it is worth it is decided elsewhere."""
MIN_LAYERS = 4
"""Shorter lists are not mentioned when they are left as they are."""
MAX_PERIOD = 8
MAX_START = 4
ROW_SHARE = 0.25
"""A longer period is looked for where values stacked per turn that are no parameters take more than
this share of what is carried through all turns."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """One list of layers, or a run of it, as one loop.

    Attributes:
      prefix: name of the list: "layers/", "blocks_".
      start, period, count: layers `start` to `start + period * count - 1`, `period` in each turn.
      stacks: {name of a stack [count, ...]: names of the parameters that are its rows, in order}.
      row_bytes: bytes of values with one row for each turn that are no parameters.
      num_other_rows: how many such values there are.
      carry_bytes: bytes of what goes from turn to turn.
      is_checkpointed: whether all products of a turn are in checkpoints that keep none of them.
    """

    prefix: str
    start: int
    period: int
    count: int
    stacks: Mapping[str, tuple[str, ...]]
    row_bytes: int
    num_other_rows: int
    carry_bytes: int
    is_checkpointed: bool

    @property
    def title(self) -> str:
        """The layers, for people: "layers/0..23"."""
        return f"{self.prefix}{self.start}..{self.start + self.period * self.count - 1}"

    @property
    def has_small_rows(self) -> bool:
        """Whether stacked values that are no parameters are small beside what is carried."""
        return self.row_bytes <= ROW_SHARE * self.carry_bytes * self.count

    def describe(self) -> str:
        """One sentence.

        Example: "layers/0..23 as one loop of 24 turns; 2 values differ by layer".
        """
        text = f"{self.title} as one loop of {self.count} turns"
        if self.period > 1:
            text += f" of {self.period} layers"
        if self.num_other_rows:
            text += f"; {self.num_other_rows} values differ by layer"
        return text


@dataclasses.dataclass(frozen=True)
class FoundLoops:
    """Attributes:
    loops: in the order in which they are rolled.
    left: one sentence for each list of layers that was not rolled, with the first difference.
    """

    loops: tuple[Loop, ...]
    left: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class NamedProgram:
    """A program and for each of its inputs the parameter that it is, or None."""

    closed: ClosedJaxpr
    names: tuple[str | None, ...]


def find_loops(trace: ModelTrace, params: Mapping[str, Any]) -> FoundLoops:
    """The loops over layers that a Python loop called.

    Args:
      trace: of the loss, with a mark at every read; params: of the model, by name.
    """
    names = sorted(params)
    program = trace.program
    rest = [None] * (len(program.jaxpr.invars) - len(names))
    named = NamedProgram(open_calls(program), (*names, *rest))
    loops: list[Loop] = []
    left: list[str] = []
    for found in find_lists(names):
        if any(found.prefix.startswith(loop.prefix) for loop in loops):
            continue  # a list within a layer
        taken, why = _find(named, found)
        if taken is not None:
            loops.append(taken)
            named = roll_program(named, taken)
        elif found.num_layers >= MIN_LAYERS:
            left.append(f"{found.title}/0..{found.num_layers - 1} are not one loop: {why}")
    return FoundLoops(tuple(loops), tuple(left))


def _find(named: NamedProgram, layers: LayerList) -> tuple[Loop | None, str]:
    """(the loop that covers most layers, or why there is none)."""
    program, equality = _prepared(named, layers)
    why, best = "", None
    for start, period, count in _tries(layers.num_layers):
        if best is not None and period * count < best.period * best.count:
            break
        try:
            rolled = roll(program, equality, start, period, count)
            _check_reads(rolled)
            loop = _loop(layers.prefix, start, period, rolled, named)
        except Mismatch as mismatch:
            why = why or str(mismatch)
            continue
        if loop.has_small_rows:
            return loop, ""
        if best is None or loop.row_bytes < best.row_bytes:
            best = loop
    return best, why


def _tries(num_layers: int) -> list[tuple[int, int, int]]:
    """(start, period, count), most layers first, then short periods and early starts."""
    found = [
        (start, period, (num_layers - start) // period)
        for start in range(MAX_START)
        for period in range(1, MAX_PERIOD + 1)
        if (num_layers - start) // period >= MIN_TURNS
    ]
    return sorted(found, key=lambda one: (-one[1] * one[2], one[1], one[0]))


def roll_program(named: NamedProgram, loop: Loop, remat: str = "model") -> NamedProgram:
    """The program with one of its lists of layers as this loop.

    Args:
      remat: as `Rolled.build` takes it.

    Raises:
      Mismatch: the layers of this program are not that loop.
    """
    names = [name for name in named.names if name is not None]
    (layers,) = (one for one in find_lists(names) if one.prefix == loop.prefix)
    program, equality = _prepared(named, layers)
    rolled = roll(program, equality, loop.start, loop.period, loop.count)
    stacks = _stacks(rolled, named)
    if stacks != list(loop.stacks.values()):
        raise Mismatch(f"{loop.title} reads other parameters than when it was planned")
    gone = {name for names in stacks for name in names}
    rest = [name for name in named.names if name not in gone]
    return NamedProgram(open_calls(rolled.build(remat)), (*loop.stacks, *rest))


def _prepared(named: NamedProgram, layers: LayerList) -> tuple[LayerProgram, Equality]:
    pairs = zip(named.closed.jaxpr.invars, named.names, strict=True)
    places: dict[Any, Place] = {
        variable: layers.places[name] for variable, name in pairs if name in layers.places
    }
    within = {name: place.within for name, place in layers.places.items()}
    return LayerProgram(named.closed, places), Equality(within)


def _stacks(rolled: Rolled, named: NamedProgram) -> list[tuple[str, ...]]:
    names = dict(zip(named.closed.jaxpr.invars, named.names, strict=True))
    return [tuple(names[variable] for variable in row) for row in rolled.stacks]  # type: ignore


def _loop(prefix: str, start: int, period: int, rolled: Rolled, named: NamedProgram) -> Loop:
    return Loop(
        prefix=prefix,
        start=start,
        period=period,
        count=rolled.num_turns,
        stacks={stack_name(names): names for names in _stacks(rolled, named)},
        row_bytes=rolled.row_bytes,
        num_other_rows=len(rolled.other_rows),
        carry_bytes=rolled.carry_bytes,
        is_checkpointed=not any(map(keeps_products, rolled.body.jaxpr.eqns)),
    )


# --- reads ----------------------------------------------------------------------------------------


def _check_reads(rolled: Rolled) -> None:
    """Refuses layers whose parameters are read where a loop cannot read them.

    Raises:
      Mismatch: with the operation around the read.
    """
    for inside in _reads_inside(rolled.body.jaxpr, ""):
        raise Mismatch(f"layers read parameters inside of `{inside}`")


def _reads_inside(program: Jaxpr, around: str) -> Iterator[str]:
    """The operations around reads, other than loops and checkpoints."""
    for equation in program.eqns:
        if read_name(equation) is not None and around:
            yield around
        kind = equation.primitive.name
        passes = kind == "scan" or is_checkpoint(equation)
        for inner in inner_programs(equation.params):
            yield from _reads_inside(inner, around or ("" if passes else kind))


def read_stacks(loops: Sequence[Loop]) -> dict[str, str]:
    """{name of a parameter: the stack of which it is a row}."""
    return {name: stack for loop in loops for stack, names in loop.stacks.items() for name in names}
