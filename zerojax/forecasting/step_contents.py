"""Reads from a compiled step what program rules ask: arrays that are sent, loops, attention.

A rule names a collective, the parameters whose numbers it sends, and the user's line, all of which
are read from the compiled program; loops over layers and scores of attention are read from the
traced one.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.hlo.communication import Collective
from zerojax.forecasting.hlo.dataflow import Dataflow, Edge, Value
from zerojax.forecasting.hlo.live_buffers import LiveAtPeak
from zerojax.forecasting.hlo.program import Instruction, Program
from zerojax.forecasting.hlo.source_frames import Frame
from zerojax.forecasting.roles import Roles, argument_roles, unescape
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs
from zerojax.plan.make import Plan
from zerojax.tracing.flops import without_waste
from zerojax.tracing.loops import find_stack_loops
from zerojax.tracing.reads import line_of_read
from zerojax.tracing.rolling import find_lists
from zerojax.tracing.source_lines import innermost_line, line_of_equation
from zerojax.tracing.stored_scores import (
    StoredScores,
    count_attention_kernels,
    find_stored_scores,
)

_WEIGHTS = ("params", "masters", "copies", "frozen")
"""Parts of the state that hold numbers of parameters."""
_ARGUMENT = re.compile(r"state\['(\w+)'\]\['([^']*)'\]")
_FRAMES = 100
"""Frames of Python that a lowered program keeps for each operation; JAX's own default."""
_STEP = str(Path("zerojax", "step", "build.py"))
"""End of the path of the file whose functions are the step; frames around it called zerojax."""
_NAMES = 3
"""Parameters of a collective that are named in a text."""
_NUM_LARGEST = 3
"""Number of values at the peak that are read."""
_NEAR = 50
"""Values that are searched for a user's line around a collective that has none."""


@dataclass(frozen=True, kw_only=True)
class SentArray:
    """One array that a collective of the compiled step sends.

    Attributes:
      collective: name of the instruction; kind, axis: as in `TrafficRow`.
      dtype: of the array, as XLA writes it.
      times: executions per step.
      elements, num_bytes: of the whole array in one execution: gathered for an all-gather, before
        it is scattered for a reduce-scatter, else what one device holds.
      role: what it is, one of `roles.ROLES`.
      parameters: names of parameters that it holds numbers of, moved but not computed with.
      line: line of the user's code, as "file:line: source"; None if unknown.
      scope: its origin in the traced program.
    """

    collective: str
    kind: str
    axis: str
    dtype: str
    times: int
    elements: int
    num_bytes: int
    role: str
    parameters: tuple[str, ...]
    line: str | None
    scope: str

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> SentArray:
        """Returns the array whose fields are in `row`, in which JSON has lists for tuples."""
        fields: dict[str, Any] = {**row, "parameters": tuple(row["parameters"])}
        return cls(**fields)

    def describe(self) -> str:
        """Returns the collective in words, such as "all-gather.3 over data, bf16, 2 times"."""
        times = "once" if self.times == 1 else f"{self.times} times"
        return f"{self.collective} ({self.kind} over {self.axis}, {self.dtype}, {times} per step)"


@dataclass(frozen=True, kw_only=True)
class LoopOfLayers:
    """A loop over layers, or layers of a list that run one after the other outside of loops.

    Attributes:
      num_layers: number of layers.
      title: of the layers: names of stacks, or "layers/0..5".
      is_loop: whether the step has a loop for them.
      why: reason why there is no loop, if there is none; "" if the plan gives none.
      line: as in `SentArray`.
    """

    num_layers: int
    title: str
    is_loop: bool
    why: str
    line: str | None


@dataclass(frozen=True, kw_only=True)
class ValueAtPeak:
    """One temporary value that is in device memory at the peak.

    Attributes:
      shape: dtype and shape as XLA prints them, without the layout, such as `bf16[8,512]`.
      num_bytes: bytes of this value alone.
      role, line: as in `SentArray`.
    """

    shape: str
    num_bytes: int
    role: str
    line: str | None


@dataclass(frozen=True, kw_only=True)
class StepContents:
    """What program rules read of a step.

    Attributes:
      sent: every array that a collective sends.
      peak: bytes of device memory at the peak.
      largest: largest temporary values at the peak, largest first; empty for CPU devices, whose
        compiler does not report them.
      wire_bytes: bytes that one device sends per step.
      network_bytes: part of them between nodes; None if the nodes are not known.
      scores: scores that attention stores.
      attention_kernels: calls of attention kernels; a call in a loop counts once.
      layers: loops over layers, and layers outside of loops.
      on_gpus: whether the step is compiled for GPUs.
    """

    sent: tuple[SentArray, ...]
    peak: int
    largest: tuple[ValueAtPeak, ...]
    wire_bytes: int
    network_bytes: int | None
    scores: tuple[StoredScores, ...]
    attention_kernels: int
    layers: tuple[LoopOfLayers, ...]
    on_gpus: bool


@contextlib.contextmanager
def lines_in_programs() -> Iterator[None]:
    """Lowers programs with the lines that traced them, whatever JAX is set to, in this context."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    # A negative limit means all frames, so it must not be lowered.
    jax.config.update(name, max(before, _FRAMES) if before >= 0 else before)
    try:
        yield
    finally:
        jax.config.update(name, before)


# --- the compiled program -------------------------------------------------------------------------


def read_sent(
    program: Program, collectives: Sequence[Collective], axes: Mapping[str, str], plan: Plan
) -> list[SentArray]:
    """Returns every array that a collective of a compiled step sends.

    Args:
      program: of the plan's step.
      collectives: of `find_collectives`.
      axes: name of a collective -> the mesh axes it runs over.
      plan: of the step; names the arguments.
    """
    flow = Dataflow(program)
    roles, names = Roles(flow, argument_roles(plan)), _Names(flow)
    found = []
    for one in collectives:
        instruction, operands = flow.instructions[one.name], flow.operands(one.name)
        gathers = one.kind == "all-gather"
        # The other operands of a `send` are tokens.
        for value in operands[:1] if instruction.opcode == "send" else operands:
            array = flow.array(value)
            if array is None or not array.bits:
                continue
            # Operands of a gather are shards; the text speaks of the whole array.
            copies = one.group_size if gathers else 1
            found.append(
                SentArray(
                    collective=one.name,
                    kind=one.kind,
                    axis=axes[one.name],
                    dtype=array.dtype,
                    times=one.times,
                    elements=array.size * copies,
                    num_bytes=array.bytes * copies,
                    role=roles.of(value),
                    parameters=names.of(value),
                    line=_line(flow, instruction),
                    scope=one.op_name,
                )
            )
    return found


def read_largest(live: LiveAtPeak, plan: Plan) -> list[ValueAtPeak]:
    """Returns the largest temporary values at the peak of a compiled step, largest first.

    Args:
      live: values at the peak of the plan's step.
      plan: of the step; names the arguments.
    """
    flow = Dataflow(live.program)
    roles = Roles(flow, argument_roles(plan))
    return [
        ValueAtPeak(
            shape=value.shape.split("{")[0],
            num_bytes=value.bytes,
            role=roles.of((value.name, value.index)),
            line=_line(flow, flow.instructions[value.name]),
        )
        for value in live.values[:_NUM_LARGEST]
    ]


def by_collective(sent: Iterable[SentArray]) -> dict[str, list[SentArray]]:
    """Returns {name of a collective: the arrays that it sends}, in the order of the step."""
    found: dict[str, list[SentArray]] = {}
    for array in sent:
        found.setdefault(array.collective, []).append(array)
    return found


def describe_sent(arrays: Sequence[SentArray]) -> str:
    """Returns a collective in words: what it sends, of which parameters, from which line.

    Args:
      arrays: all arrays of one collective.
    """
    first = arrays[0]
    names = list(dict.fromkeys(name for array in arrays for name in array.parameters))
    more = f" and {len(names) - _NAMES} more" * (len(names) > _NAMES)
    what = f"{first.role} {', '.join(names[:_NAMES])}{more}".rstrip()
    line = next((array.line for array in arrays if array.line), None)
    return f"{first.describe()} of {what}" + (f", from {line}" if line else "")


class _Names:
    """Names of the parameters whose numbers each value holds, moved but not computed with."""

    def __init__(self, flow: Dataflow):
        self._names: list[str] = []
        self._marks: dict[Value, int] = collections.defaultdict(int)
        bits: dict[str, int] = {}
        for parameter in flow.program.entry.parameters:
            found = _ARGUMENT.match(unescape(parameter.op_name))
            if found is None or found[1] not in _WEIGHTS:
                continue
            # One parameter may be in several parts of the state, such as its master copy.
            if found[2] not in bits:
                bits[found[2]] = 1 << len(self._names)
                self._names.append(found[2])
            self._marks[parameter.name, ()] = bits[found[2]]
        # Sets of names are bits of a number, because programs have many values and joining is
        # frequent.
        waiting = list(self._marks)
        while waiting:
            value = waiting.pop()
            for target, edge in flow.targets(value):
                joined = self._marks[target] | self._marks[value]
                if edge is Edge.SAME and joined != self._marks[target]:
                    self._marks[target] = joined
                    waiting.append(target)

    def of(self, value: Value) -> tuple[str, ...]:
        marks = self._marks.get(value, 0)
        return tuple(name for place, name in enumerate(self._names) if marks >> place & 1)


def line_of_instruction(program: Program, instruction: Instruction) -> str | None:
    """Returns the user's line that traced an instruction, as "file:line: source"; None if the text
    of the program has none. Frames around the step called zerojax, and are not looked at."""
    frames = program.frames_of(instruction)
    return innermost_line(itertools.takewhile(_is_in_step, frames))


def _is_in_step(frame: Frame) -> bool:
    """Returns whether a frame was called by the step, and not the step by it."""
    return not frame[0].endswith(_STEP)


def _line(flow: Dataflow, instruction: Instruction) -> str | None:
    """Returns the user's line of an instruction, or of the nearest one that moves its values."""
    values = flow.values_of(instruction.name)
    seen = set(values)
    # The list grows while it is read, so nearer values are asked first.
    for value in values:
        line = line_of_instruction(flow.program, flow.instructions[value[0]])
        # Values far away belong to other lines, which would mislead.
        if line is not None or len(seen) > _NEAR:
            return line
        for target, edge in [*flow.targets(value), *flow.sources(value)]:
            if edge is not Edge.USED and target not in seen:
                seen.add(target)
                values.append(target)
    return None


# --- the traced program ---------------------------------------------------------------------------


def read_layers(plan: Plan, step: Jaxpr) -> tuple[LoopOfLayers, ...]:
    """Returns the loops over layers of a step, and its layers of lists outside of loops.

    Layers of a list are numbered parameters, with at least one matrix, whose shapes are equal in at
    least two numbers.

    Args:
      plan: of the step.
      step: the traced step, without dead code.
    """
    names = sorted(plan.placement.leaves)
    forward = plan.traced.forward
    # Only a plan that unrolls can remove a loop of the model, so only then lengths are compared.
    lengths = set(_lengths_of_loops(step)) if plan.program.unroll else None
    loops = find_stack_loops(forward, names)
    found = []
    for loop in loops:
        stays = _stays(loop.equation) and (lengths is None or loop.num_layers in lengths)
        found.append(
            LoopOfLayers(
                num_layers=loop.num_layers,
                title=", ".join(sorted(set(loop.stacked))[:3]),
                is_loop=stays,
                why="" if stays else "unroll is set",
                line=line_of_equation(loop.equation),
            )
        )
    stacked = {name for loop in loops for name in loop.stacked}
    return (*found, *_straight_layers(plan, forward, stacked))


def _straight_layers(
    plan: Plan, forward: ClosedJaxpr, stacked: Collection[str]
) -> Iterator[LoopOfLayers]:
    leaves = {name: leaf for name, leaf in plan.placement.leaves.items() if name not in stacked}
    listed: set[str] = set()
    for layers in find_lists(leaves):
        shapes: dict[int, list[Any]] = collections.defaultdict(list)
        for name, place in layers.places.items():
            shapes[place.layer].append((place.within, leaves[name].shape))
        # Layers of a list may differ; the most frequent kind is counted.
        kinds = collections.Counter(tuple(sorted(shape)) for shape in shapes.values())
        (kind, count) = kinds.most_common(1)[0]
        equal = {layer for layer, shape in shapes.items() if tuple(sorted(shape)) == kind}
        members = {name for name, place in layers.places.items() if place.layer in equal}
        has_matrix = any(len(shape) > 1 for _, shape in kind)
        if count < 2 or not has_matrix or members & listed:
            continue  # norms, or a list inside of the layers of another list
        listed |= members
        title = layers.title_of(members)
        prefix = layers.prefix.split("+")[0]
        yield LoopOfLayers(
            num_layers=count,
            title=title,
            is_loop=False,
            why=next((reason for reason in plan.reasons if reason.startswith(prefix)), ""),
            line=line_of_read(forward.jaxpr, members),
        )


def _lengths_of_loops(program: Jaxpr) -> Iterator[int]:
    """Yields the number of iterations of every loop that computes a product."""
    for equation in program.eqns:
        inner = list(inner_programs(equation.params))
        is_loop = equation.primitive.name == "scan" and _stays(equation)
        if is_loop and any(map(_multiplies, inner)):
            yield equation.params["length"]
        for one in inner:
            yield from _lengths_of_loops(one)


def _stays(scan: Equation) -> bool:
    """Returns whether a `scan` is compiled as a loop; with `unroll` it is straight code."""
    return scan.params["unroll"] < scan.params["length"]


def _multiplies(program: Jaxpr) -> bool:
    return any(
        equation.primitive.name == "dot_general"
        or any(map(_multiplies, inner_programs(equation.params)))
        for equation in program.eqns
    )


def contents_of(
    plan: Plan,
    step: ClosedJaxpr,
    sent: Iterable[SentArray],
    *,
    peak: int,
    largest: Iterable[ValueAtPeak] = (),
    wire_bytes: int,
    network_bytes: int | None,
    calls_cudnn: bool,
    on_gpus: bool,
) -> StepContents:
    """Returns the contents of a step from its compiled and its traced program.

    Args:
      plan: of the step; step: the traced step; sent: of `read_sent`.
      peak, largest, wire_bytes, network_bytes, on_gpus: as in `StepContents`.
      calls_cudnn: whether the compiled program calls cuDNN's attention.
    """
    # Dead equations are not in the compiled step, and must not break a rule.
    needed = without_waste(step)
    return StepContents(
        sent=tuple(sent),
        peak=peak,
        largest=tuple(largest),
        wire_bytes=wire_bytes,
        network_bytes=network_bytes,
        scores=find_stored_scores(needed),
        attention_kernels=max(count_attention_kernels(needed), int(calls_cudnn)),
        layers=read_layers(plan, needed),
        on_gpus=on_gpus,
    )
