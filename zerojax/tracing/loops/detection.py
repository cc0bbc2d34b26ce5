"""Finds the loop over layers in a traced loss: the `scan` that slices stacked parameters.

Raises an error if the loss does not have exactly one such loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.tracing.dependence import LabelsOf, follow_labels, inline_calls_with_loops
from zerojax.tracing.jaxpr import Piece, cut_piece, has_side_effects, is_checkpoint, split_scan

_REMEDY = (
    "but pipeline stages need one jax.lax.scan over the stacked parameters of all layers; use "
    "zerojax.Stages(embed, block, head), flax.linen.scan, or stack the layers with nnx.vmap and "
    "scan them, or train without pipeline stages (stage=1)"
)

# Operations that are allowed between a stacked parameter and the loop, because they act on each row
# separately.
_ROW_BY_ROW = frozenset(["convert_element_type", "copy", "name"])


@dataclass(frozen=True, eq=False)
class Stack:
    """Stacked parameter (or one of its arrays), with the equations applied before the loop slices
    it.

    Attributes:
      input: position of the parameter among the inputs of the program.
      steps: equations between the parameter and the loop, in order; each acts on each row
        separately.
    """

    input: int
    steps: tuple[Any, ...]

    def apply(self, rows: jax.Array) -> jax.Array:
        """Applies `steps` to some rows [n, ...] of the parameter; returns the rows that the loop
        slices.
        """
        for step in self.steps:
            rows = step.primitive.bind(rows, **step.params)
        return rows


def keeps_products(equation: Equation) -> bool:
    """Returns whether an equation has matrix products whose results may be saved for the backward
    pass.
    """
    # Without a policy a checkpoint saves only its inputs.
    if is_checkpoint(equation) and equation.params["policy"] is None:
        return False
    return equation.primitive.name in ("dot_general", "conv_general_dilated") or any(
        keeps_products(inner)
        for program in inner_programs(equation.params)
        for inner in program.eqns
    )


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """Loop over layers in a program.

    Attributes:
      program: the traced loss, with the loop as an equation at the top level.
      names: for each input of the program, the name of the parameter it belongs to, or None.
      equation: the loop.
      slices: for each array that the loop slices, the stacked parameter, or None if it is another
        array.
    """

    program: ClosedJaxpr
    names: tuple[str | None, ...]
    equation: Equation
    slices: tuple[Stack | None, ...]

    @property
    def num_layers(self) -> int:
        return self.equation.params["length"]

    @cached_property
    def stacked(self) -> frozenset[str]:
        """Names of the parameters that have one row for each layer."""
        return self.names_of(stack.input for stack in self.slices if stack is not None)

    @property
    def activations(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Values that go from layer to layer."""
        return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._carry[0])

    @property
    def embed(self) -> ClosedJaxpr:
        """Program that computes the inputs of the first layer."""
        return self.embed_piece.closed

    @property
    def layer(self) -> ClosedJaxpr:
        """Program of one layer: (constants, activations, slices) -> (activations, slices)."""
        return self.equation.params["jaxpr"]

    @cached_property
    def is_checkpointed(self) -> bool:
        """Whether all matrix products of a layer are in checkpoints that save no product."""
        return not any(map(keeps_products, self.layer.jaxpr.eqns))

    @property
    def head(self) -> ClosedJaxpr:
        """Program that computes all outputs of the loss from the results of the last layer."""
        return self.cut_after(self.program.jaxpr.outvars).closed

    @cached_property
    def embed_piece(self) -> Piece:
        return cut_piece(self.program, self._carry[0])

    def cut_after(self, outputs: Sequence[Any]) -> Piece:
        """Returns the part of the program that computes `outputs` from the results of the last
        layer.
        """
        return cut_piece(self.program, outputs, self._carry[1])

    @property
    def consts(self) -> list[Any]:
        """Values of the program that every layer takes without slicing."""
        return self.equation.invars[: split_scan(self.equation)[0]]

    @property
    def others(self) -> list[Any]:
        """Values of the program, other than parameters, that the loop slices."""
        sliced = self.equation.invars[sum(split_scan(self.equation)) :]
        return [a for a, stack in zip(sliced, self.slices, strict=True) if stack is None]

    @property
    def _carry(self) -> tuple[list[Any], list[Any]]:
        """Carried inputs of the first layer, and carried results of the last layer."""
        num_consts, num_carry = split_scan(self.equation)
        before = self.equation.invars[num_consts : num_consts + num_carry]
        return before, self.equation.outvars[:num_carry]

    def row_outputs(self) -> list[Any]:
        """Returns the outputs of the loop that have one row per layer."""
        return self.equation.outvars[split_scan(self.equation)[1] :]

    def names_of(self, inputs: Iterable[int]) -> frozenset[str]:
        """Returns the names of the parameters among inputs at these positions."""
        return frozenset(name for i in inputs if (name := self.names[i]) is not None)

    def dependence(self) -> LabelsOf:
        """Returns a function that maps a value to the loop results that it depends on.

        The labels are "activations" (carried values) and "rows" (values returned for each layer).
        """
        sources = {variable: frozenset(["activations"]) for variable in self._carry[1]}
        sources |= {variable: frozenset(["rows"]) for variable in self.row_outputs()}
        return follow_labels(_without(self.program.jaxpr, self.equation), sources)


def find_layer_loop(closed: ClosedJaxpr, names: Sequence[str | None]) -> LayerLoop:
    """Returns the loop over layers in a loss.

    Args:
      closed: loss of a batch, traced with all layers of the model. Its first output is the loss.
      names: for each input, the name of the parameter to which it belongs, or None.

    Raises:
      ValueError: there is not exactly one such loop, or it cannot be split into layers that run on
        different devices.
    """
    _check_effects(closed)
    inlined = inline_calls_with_loops(closed)
    program = _without_dead_code(inlined)
    holders = {v: i for i, v in enumerate(program.jaxpr.invars) if names[i] is not None}
    loops = list(_find_loops(program.jaxpr, holders, ""))
    loop = _the_only_one(loops, inlined, names)
    num_before = sum(split_scan(loop.equation))
    held = _hold(program.jaxpr, holders)
    made_by = {v: equation for equation in program.jaxpr.eqns for v in equation.outvars}
    slices = tuple(_stack(atom, held, made_by) for atom in loop.equation.invars[num_before:])
    layers = LayerLoop(program, tuple(names), loop.equation, slices)
    _check_slices(layers)
    _check_uses(layers, held)
    if loop.equation.params["reverse"]:
        raise ValueError(
            f"{_loop_text(layers.num_layers, layers.stacked)} runs backwards (reverse=True), but a "
            "pipeline runs layers in the order of their rows; stack the layers in the order in "
            "which they run, and scan forwards"
        )
    loss = program.jaxpr.outvars[0]
    depends = layers.dependence()(loss)
    if "rows" in depends:
        raise ValueError(
            f"the loss uses values that {_loop_text(layers.num_layers, layers.stacked)} returns "
            "for each layer (the second result of jax.lax.scan), but pipeline stages exchange "
            "only carried values; sum them in the carried value instead"
        )
    if not depends:
        raise ValueError(_unused_text(layers.num_layers, layers.stacked))
    return layers


def find_stacks(closed: ClosedJaxpr, names: Sequence[str]) -> frozenset[str]:
    """Returns the names of the parameters that any loop in a loss slices along dimension 0.

    Args:
      closed: traced loss.
      names: names of the parameters, which are the first inputs of the loss.
    """
    loops = find_stack_loops(closed, names)
    return frozenset(name for loop in loops for name in loop.stacked)


@dataclass(frozen=True, eq=False)
class StackLoop:
    """Loop of a loss that slices parameters along dimension 0.

    Attributes:
      equation: the loop.
      stacked: names of these parameters.
    """

    equation: Equation
    stacked: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        return self.equation.params["length"]


def find_stack_loops(closed: ClosedJaxpr, names: Sequence[str]) -> list[StackLoop]:
    """Returns the loops of a loss that slice parameters; arguments as in `find_stacks`."""
    holders = {v: i for i, v in enumerate(closed.jaxpr.invars[: len(names)])}
    return [
        StackLoop(loop.equation, tuple(names[i] for i in loop.inputs))
        for loop in _find_loops(closed.jaxpr, holders, "")
    ]


# --- search for the loop --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _ParameterLoop:
    """Loop that slices parameters.

    Attributes:
      equation: the loop.
      inputs: positions of the parameters among the inputs.
      inside: primitive of the enclosing equation; "" at the top level.
    """

    equation: Equation
    inputs: tuple[int, ...]
    inside: str

    def text(self, names: Sequence[str | None]) -> str:
        stacked = (names[i] for i in self.inputs)
        return _loop_text(self.equation.params["length"], [name for name in stacked if name])


def _hold(program: Jaxpr, holders: Mapping[Any, int]) -> dict[Any, int]:
    """Returns {variable: position of the program input whose rows it contains}."""
    held = dict(holders)
    for equation in program.eqns:
        if equation.primitive.name in _ROW_BY_ROW and _get(held, equation.invars[0]) is not None:
            held[equation.outvars[0]] = held[equation.invars[0]]
    return held


def _get(held: Mapping[Any, int], atom: Operand | None) -> int | None:
    return None if isinstance(atom, Literal) else held.get(atom)


def _find_loops(
    program: Jaxpr, holders: Mapping[Any, int], inside: str
) -> Iterator[_ParameterLoop]:
    """Yields the loops, also in nested programs, that slice parameters.

    Loops over slices of another loop belong to one layer and do not count.
    """
    held = _hold(program, holders)
    for equation in program.eqns:
        kind = equation.primitive.name
        passed: list[Operand | None] = list(equation.invars)
        if kind == "scan":
            first = sum(split_scan(equation))
            inputs = [_get(held, atom) for atom in passed[first:]]
            sliced = tuple(i for i in inputs if i is not None)
            if sliced:
                yield _ParameterLoop(equation, sliced, inside)
            passed[first:] = [None] * (len(passed) - first)
        elif kind == "cond":
            passed = passed[1:]
        elif kind == "while":
            passed = passed[equation.params["cond_nconsts"] :]
        for inner in inner_programs(equation.params):
            if len(inner.invars) == len(passed):
                pairs = zip(inner.invars, passed, strict=True)
                passed_inputs = {v: i for v, atom in pairs if (i := _get(held, atom)) is not None}
                yield from _find_loops(inner, passed_inputs, inside or kind)


def _the_only_one(
    loops: Sequence[_ParameterLoop], inlined: ClosedJaxpr, names: Sequence[str | None]
) -> _ParameterLoop:
    if len(loops) > 1:
        texts = "; ".join(loop.text(names) for loop in loops)
        raise ValueError(
            f"the loss has {len(loops)} loops over stacked parameters ({texts}), {_REMEDY}"
        )
    if not loops:
        # The loop may have been removed with dead code; then the message says so.
        holders = {v: i for i, v in enumerate(inlined.jaxpr.invars) if names[i] is not None}
        for dead in _find_loops(inlined.jaxpr, holders, ""):
            stacked = [name for i in dead.inputs if (name := names[i])]
            raise ValueError(_unused_text(dead.equation.params["length"], stacked))
        raise ValueError(f"{_describe_loops(inlined, names)}, {_REMEDY}")
    (loop,) = loops
    if loop.inside:
        raise ValueError(
            f"{loop.text(names)} is inside of a `{loop.inside}`, which a pipeline cannot split; "
            "run the loop at the top level of the loss. To recompute layers in the backward pass, "
            "put jax.checkpoint around the layer, inside of the loop"
        )
    return loop


def _describe_loops(closed: ClosedJaxpr, names: Sequence[str | None]) -> str:
    """Returns a description of the loops of a program without a loop over stacked parameters."""
    labels_of = _parameters(closed.jaxpr, names)
    loops = []
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "scan":
            sliced = equation.invars[sum(split_scan(equation)) :]
            touched = frozenset[str]().union(*map(labels_of, sliced))
            description = f"values computed from {_list(touched)}" if touched else "no parameters"
            loops.append(f"one of {equation.params['length']} steps that slices {description}")
    if not loops:
        return "the loss has no loop (layers that a Python loop calls are unrolled)"
    return (
        f"the loss has no loop that slices the parameters themselves, only {'; '.join(loops)} "
        "(a cast is allowed; move other computations with parameters into the layer)"
    )


# --- sliced values --------------------------------------------------------------------------------


def _stack(atom: Operand, held: Mapping[Any, int], made_by: Mapping[Any, Any]) -> Stack | None:
    """Returns the `Stack` of a value that the loop slices; None if the value is not a parameter."""
    place = _get(held, atom)
    if place is None:
        return None
    steps: list[Any] = []
    # That `atom` is held means that each of these equations acts on each row separately.
    while atom in made_by:
        steps.append(made_by[atom])
        atom = made_by[atom].invars[0]
    return Stack(place, tuple(reversed(steps)))


def _check_effects(closed: ClosedJaxpr) -> None:
    """Raises ValueError for callbacks, which a pipeline would run in idle ticks, twice, or
    never.
    """
    if not has_side_effects(closed.effects):
        return
    names = (e.primitive.name for e in closed.jaxpr.eqns if has_side_effects(e.effects))
    raise ValueError(
        f"the loss has a side effect, `{next(names)}` (such as jax.debug.print), which pipeline "
        "stages and streamed layers would repeat or lose; remove it, or debug without pipeline "
        "stages (stage=1) and with offload.params=None"
    )


def _check_slices(loop: LayerLoop) -> None:
    """Raises ValueError if the loop slices values that are computed from parameters."""
    labels_of = _parameters(loop.program.jaxpr, loop.names)
    for atom in loop.others:
        if labels_of(atom):
            raise ValueError(
                f"{_loop_text(loop.num_layers, loop.stacked)} also slices values that are computed "
                f"from {_list(labels_of(atom))}; but a pipeline stage has only its own rows of a "
                "parameter, so the loop must slice the parameter itself (a cast is allowed); move "
                "the computation into the layer"
            )


def _check_uses(loop: LayerLoop, held: Mapping[Any, int]) -> None:
    """Raises ValueError if a stacked parameter is used other than by the slices of the loop."""
    stacks = {v: i for v, i in held.items() if loop.names[i] in loop.stacked}
    program = loop.program.jaxpr
    first = sum(split_scan(loop.equation))
    uses = [("the result", program.outvars)]
    for equation in program.eqns:
        if equation is loop.equation:
            uses.append(("the loop as an unsliced value", equation.invars[:first]))
        elif equation.primitive.name not in _ROW_BY_ROW:
            uses.append((f"`{equation.primitive.name}`", equation.invars))
    for user, atoms in uses:
        for atom in atoms:
            if (place := _get(stacks, atom)) is not None:
                raise ValueError(
                    f"{loop.names[place]}, which {_loop_text(loop.num_layers, ())} slices, is also "
                    f"read outside of the layers, by {user}, but a pipeline stage has only the "
                    "rows of its own layers; use a separate parameter outside of the layers"
                )


# --- helpers and texts ----------------------------------------------------------------------------


def _parameters(program: Jaxpr, names: Sequence[str | None]) -> LabelsOf:
    """Returns a function that maps a value to the names of the parameters that it depends on."""
    pairs = zip(program.invars, names, strict=True)
    return follow_labels(program, {v: frozenset([name]) for v, name in pairs if name is not None})


def _without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    kept = {id(e) for e in cut_piece(closed, closed.jaxpr.outvars).closed.jaxpr.eqns}
    equations = [equation for equation in closed.jaxpr.eqns if id(equation) in kept]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)


def _without(program: Jaxpr, equation: Equation) -> Any:
    return program.replace(eqns=[other for other in program.eqns if other is not equation])


def _unused_text(num_layers: int, stacked: Collection[str]) -> str:
    return (
        f"the loss does not depend on {_loop_text(num_layers, stacked)}, so its layers would not "
        "be trained; compute the loss from the final carried value of the loop"
    )


def _loop_text(num_layers: int, stacked: Collection[str]) -> str:
    of = f" over {_list(stacked)}" if stacked else ""
    return f"the loop of {num_layers} layers{of}"


def _list(names: Collection[str]) -> str:
    """Returns a text with at most three names, and the number of the remaining names."""
    chosen = sorted(set(names))
    more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    return ", ".join(chosen[:3]) + more
