"""Finds layers that a traced loss calls in sequence, and the loops that can replace them."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.marks import inner_programs, read_name
from zerojax.tracing.jaxpr import is_checkpoint
from zerojax.tracing.loops import keeps_products
from zerojax.tracing.rolling.equality import Equality
from zerojax.tracing.rolling.flat_program import LayerProgram, Mismatch, Place, open_calls
from zerojax.tracing.rolling.iteration_search import roll
from zerojax.tracing.rolling.layer_names import LayerList, find_lists, join_lists, stack_name
from zerojax.tracing.rolling.rolled import Rolled
from zerojax.tracing.trace import ModelTrace

MIN_ITERATIONS = 2
"""Minimum number of iterations of a loop; other modules decide whether a loop is worthwhile."""
MIN_LAYERS = 4
"""Minimum length of a list whose reason against a loop is reported."""
MAX_PERIOD = 8
MAX_TRIES = 48
"""Maximum number of runs of consecutive layers that are tried as a loop in one list."""
ROW_SHARE = 0.25
"""Largest size of stacked values other than parameters, as a fraction of the carried values of all
iterations. Above it, loops with more layers per iteration are tried.
"""
Run = tuple[int, int, int]
"""(first layer, layers per iteration, iterations) of a candidate for a loop."""


@dataclass(frozen=True)
class Loop:
    """Consecutive layers of a list that run as one loop.

    Attributes:
      layers: list of layers.
      start, period, count: the loop has layers `start` to `start + period * count - 1` in `count`
        iterations with `period` layers each.
      stacks: {name of a stack [count, ...]: names of the parameters that are its rows, in order}.
      row_bytes: bytes, over all iterations, of values with one row for each iteration that are not
        parameters.
      num_other_rows: number of values with one row for each iteration that are not parameters.
      carry_bytes: bytes of the carried values.
      is_checkpointed: whether all matrix products of an iteration are in checkpoints that save no
        product.
      body: program of an iteration (see `rolled.Rolled`).
      why_not_more: reason why other layers of the list are not in the loop; "" if there are none.
      remat: remat policy of an iteration (see `rolled.Rolled.build`).
    """

    layers: LayerList
    start: int
    period: int
    count: int
    stacks: Mapping[str, tuple[str, ...]]
    row_bytes: int
    num_other_rows: int
    carry_bytes: int
    is_checkpointed: bool
    body: ClosedJaxpr
    why_not_more: str = ""
    remat: str = "model"

    @property
    def prefix(self) -> str:
        """Common prefix of the layers' names, such as "layers/" or "blocks_"."""
        return self.layers.prefix

    @property
    def title(self) -> str:
        """Name of the layers for messages, such as "layers/0..23"."""
        return self.layers.title_of(name for names in self.stacks.values() for name in names)

    @property
    def has_small_rows(self) -> bool:
        """Whether stacked values other than parameters are small compared with the carried
        values.
        """
        return self.row_bytes <= ROW_SHARE * self.carry_bytes * self.count

    def describe(self) -> str:
        """Returns one sentence about the loop.

        Example: "layers/0..23 as one loop of 24 iterations; 2 values differ by layer".
        """
        text = f"{self.title} as one loop of {self.count} iterations"
        if self.period > 1:
            text += f" of {self.period} layers"
        if self.num_other_rows:
            text += f"; {self.num_other_rows} values differ by layer"
        return (
            f"{text}; the other layers stay separate: {self.why_not_more}"
            if self.why_not_more
            else text
        )


@dataclass(frozen=True)
class FoundLoops:
    """Loops over layers in a traced loss.

    Attributes:
      loops: loops in the order in which they are rolled.
      left: one sentence for each list of at least `MIN_LAYERS` layers that was not rolled, with the
        first difference found.
    """

    loops: tuple[Loop, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NamedProgram:
    """Program, and for each input the name of the parameter that it is, or None."""

    closed: ClosedJaxpr
    names: tuple[str | None, ...]


def find_loops(
    trace: ModelTrace, params: Mapping[str, Any], kind_of: Callable[[str], Any] = lambda name: ()
) -> FoundLoops:
    """Finds layers that a Python loop calls, and loops that compute the same.

    Args:
      trace: trace of the loss, with a mark at every read of a parameter.
      params: {name: parameter of the model}.
      kind_of: function that maps the name of a parameter to pairs (option, its setting) that must
        be equal for all rows of a stack, for example whether the parameter is frozen.
    """
    names = sorted(params)
    program = trace.program
    rest = [None] * (len(program.jaxpr.invars) - len(names))
    named = NamedProgram(open_calls(program), (*names, *rest))
    loops: list[Loop] = []
    left: list[str] = []
    lists = find_lists(names)
    while lists:
        first, gone, why = lists[0], set[str](), ""
        for layers in _joined(named, lists):
            loop, why = _find(named, layers, kind_of)
            if loop is not None:
                loops.append(loop)
                named = roll_program(named, loop)
                gone = {name for names in loop.stacks.values() for name in names}
                break
        else:
            if first.num_layers >= MIN_LAYERS:
                left.append(f"{first.title_of(first.places)} cannot become one loop: {why}")
        lists = [layers for layers in lists[1:] if gone.isdisjoint(layers.places)]
    return FoundLoops(tuple(loops), tuple(left))


def _joined(named: NamedProgram, lists: Sequence[LayerList]) -> list[LayerList]:
    """Returns the first list merged with the lists of the same Python loop, then the first list
    alone.
    """
    first, together = lists[0], [lists[0]]
    # Lists inside the layers of the first list, such as two norms of each, are not merged with it.
    others = [other for other in lists[1:] if first.places.keys().isdisjoint(other.places)]
    low, high = _program(named, first).span if others else (0, 0)
    for other in others:
        own = _program(named, other).span
        # Lists that use their parameters between each other's are called by one Python loop.
        if max(low, own[0]) < min(high, own[1]):
            together.append(other)
    try:
        return [join_lists(together), first] if len(together) > 1 else [first]
    except ValueError:  # a list within the layers of another one
        return [first]


def _find(
    named: NamedProgram, layers: LayerList, kind_of: Callable[[str], Any]
) -> tuple[Loop | None, str]:
    """Returns (loop that covers most layers, or None; reason why there is no loop over all
    layers).
    """
    program, equality = _program(named, layers), Equality(_within(layers))
    effect = next((e.primitive.name for e in program.equations if e.effects), None)
    if effect is not None:
        return None, f"`{effect}` has side effects, whose order a loop may change"
    why, best = "", None
    runs = _Runs(_kinds(named, layers, kind_of), layers.numbers)
    for run in runs:
        start, period, count = run
        # Only a loop over as many layers can still be better, by smaller rows.
        if best is not None and period * count < best.period * best.count:
            continue
        try:
            rolled = roll(program, equality, start, period, count)
            _check_reads(rolled)
            loop = _loop(layers, start, period, rolled, named)
        except Mismatch as mismatch:
            why = why or str(mismatch)
            runs.split(run, mismatch.iteration)
            continue
        if period * count < layers.num_layers:
            loop = dataclasses.replace(loop, why_not_more=why or runs.why_not_all)
        if loop.has_small_rows:
            return loop, ""
        if best is None or loop.row_bytes < best.row_bytes:
            best = loop
    return best, why or runs.why_not_all


class _Runs:
    """Queue of runs of consecutive layers to try.

    The runs of which a loop saves most layers (those of all iterations but one) come first, then
    those with the shortest period, then those that begin first.

    Attributes:
      why_not_all: first difference between the parameters of layers, if any.
    """

    def __init__(self, kinds: Sequence[frozenset[Any]], numbers: Sequence[int]) -> None:
        """Collects the runs of layers of equal kinds.

        Args:
          kinds: for each layer, the properties that must be equal in all layers of a loop.
          numbers: numbers of the layers in their names, for messages.
        """
        self._waiting: list[tuple[int, int, int, int]] = []
        self._seen: set[Run] = set()
        other = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), 0)
        self.why_not_all = _describe_difference(kinds[0], kinds[other], numbers[0], numbers[other])
        for period in range(1, MAX_PERIOD + 1):
            start = 0
            while start < len(kinds):
                end = start + period
                while end < len(kinds) and kinds[end] == kinds[end - period]:
                    end += 1
                # A run whose length is no multiple of the period can begin at several layers.
                for shift in range(min(period, (end - start) % period + 1)):
                    self._add(start + shift, period, (end - start - shift) // period)
                # The next run may share up to a period less one layer with this one.
                start = max(end - period + 1, start + 1)

    def _add(self, start: int, period: int, count: int) -> None:
        if count >= MIN_ITERATIONS and (start, period, count) not in self._seen:
            self._seen.add((start, period, count))
            # A loop leaves one iteration in the program, so this is how many layers it saves; of
            # equal runs the one with the shortest period comes first.
            heapq.heappush(self._waiting, (-period * (count - 1), period, start, count))

    def __iter__(self) -> Iterator[Run]:
        for _ in range(MAX_TRIES):
            if not self._waiting:
                return
            _, period, start, count = heapq.heappop(self._waiting)
            yield start, period, count

    def split(self, run: Run, iteration: int | None) -> None:
        """Splits a run of layers that form no loop, and adds the parts to the queue.

        Args:
          run: run to split.
          iteration: first iteration that differs from the earlier ones; None if unknown.
        """
        start, period, count = run
        if iteration is not None:
            self._add(start, period, iteration)
            self._add(start + iteration * period, period, count - iteration)
        # Nothing says which end differs, so the run is also tried without the last and the first
        # layer.
        if iteration is None or count - iteration <= 1:
            self._add(start, period, count - 1)
        if iteration is None or iteration <= 1:
            self._add(start + 1, period, (count * period - 1) // period)


def _describe_difference(
    first: frozenset[Any], second: frozenset[Any], number: int, other: int
) -> str:
    """Describes how the parameters of two layers differ, from their entries in `_kinds`."""
    both = [{within: kind for within, *kind in layer} for layer in (first - second, second - first)]
    within = min((*both[0], *both[1]), default="")
    if not (within in both[0] and within in both[1]):
        has, lacks = (number, other) if within in both[0] else (other, number)
        return f"layer {has} has {within}, but layer {lacks} does not"
    (form, settings), (other_form, other_settings) = both[0][within], both[1][within]
    if form != other_form:
        return f"{within} is {form} in layer {number} and {other_form} in layer {other}"
    pairs = zip(settings, other_settings, strict=True)
    option = next(first[0] for first, second in pairs if first != second)
    return f"{option} treats {within} of layers {number} and {other} differently"


def _kinds(
    named: NamedProgram, layers: LayerList, kind_of: Callable[[str], Any]
) -> list[frozenset[Any]]:
    """Returns, for each layer, the name in the layer, shape, dtype and settings of its
    parameters.
    """
    kinds: list[set[Any]] = [set() for _ in range(layers.num_layers)]
    for variable, name in zip(named.closed.jaxpr.invars, named.names, strict=True):
        place = layers.places.get(name) if name is not None else None
        if place is not None:
            assert name is not None
            kinds[place.layer].add((place.within, str(variable.aval), kind_of(name)))
    return [frozenset(kind) for kind in kinds]


def roll_program(named: NamedProgram, loop: Loop) -> NamedProgram:
    """Rewrites a program so that the layers of `loop` run as one loop.

    Raises:
      Mismatch: the layers of this program do not form that loop.
    """
    program, equality = _program(named, loop.layers), Equality(_within(loop.layers))
    rolled = roll(program, equality, loop.start, loop.period, loop.count)
    stacks = _stacks(rolled, named)
    if stacks != list(loop.stacks.values()):
        raise Mismatch(f"{loop.title} read other parameters here than when the plan was made")
    gone = {name for names in stacks for name in names}
    rest = [name for name in named.names if name not in gone]
    return NamedProgram(open_calls(rolled.build(loop.remat)), (*loop.stacks, *rest))


def _program(named: NamedProgram, layers: LayerList) -> LayerProgram:
    pairs = zip(named.closed.jaxpr.invars, named.names, strict=True)
    places: dict[Any, Place] = {
        variable: layers.places[name] for variable, name in pairs if name in layers.places
    }
    return LayerProgram(named.closed, places, layers.numbers)


def _within(layers: LayerList) -> dict[str, str]:
    return {name: place.within for name, place in layers.places.items()}


def _stacks(rolled: Rolled, named: NamedProgram) -> list[tuple[str, ...]]:
    names = dict(zip(named.closed.jaxpr.invars, named.names, strict=True))
    return [tuple(names[variable] for variable in row) for row in rolled.stacks]  # type: ignore


def _loop(layers: LayerList, start: int, period: int, rolled: Rolled, named: NamedProgram) -> Loop:
    return Loop(
        layers=layers,
        start=start,
        period=period,
        count=rolled.num_iterations,
        stacks={stack_name(names): names for names in _stacks(rolled, named)},
        row_bytes=rolled.row_bytes,
        num_other_rows=len(rolled.other_rows),
        carry_bytes=rolled.carry_bytes,
        is_checkpointed=not any(map(keeps_products, rolled.body.jaxpr.eqns)),
        body=rolled.body,
    )


# --- reads ----------------------------------------------------------------------------------------


def _check_reads(rolled: Rolled) -> None:
    """Raises `Mismatch` if layers read parameters where a loop cannot read them.

    Raises:
      Mismatch: a parameter is read inside of an operation that is no loop, call or checkpoint.
    """
    for inside in _reads_inside(rolled.body.jaxpr, ""):
        raise Mismatch(
            f"layers read parameters inside of `{inside}`, where a loop cannot read its parameters"
        )


def _reads_inside(program: Jaxpr, around: str) -> Iterator[str]:
    """Yields the operations, other than loops and checkpoints, that enclose reads of parameters."""
    for equation in program.eqns:
        if read_name(equation) is not None and around:
            yield around
        kind = equation.primitive.name
        passes = kind == "scan" or is_checkpoint(equation)
        for inner in inner_programs(equation.params):
            yield from _reads_inside(inner, around or ("" if passes else kind))


def read_stacks(loops: Sequence[Loop]) -> dict[str, str]:
    """Returns {name of a parameter: name of the stack of which it is a row}."""
    return {name: stack for loop in loops for stack, names in loop.stacks.items() for name in names}
