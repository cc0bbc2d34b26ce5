"""Activation offload: the input of each layer, kept in host memory until the backward pass.

The layers of a model are the loops (`jax.lax.scan`) that slice stacked parameters. Of each layer
the floating-point arrays that the loop carries into it leave the device for pinned host memory in
the forward pass and come back in the backward pass, which computes everything else of the layer
again. A checkpoint that the model puts into a layer is dissolved: one inside of the other would
compute the layer three times, and what it keeps would stay on the device. One inside of a loop
within a layer stays, since it bounds what that loop keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from zerojax.config import MeshConfig
from zerojax.config.mesh import HOST, HOST_KIND
from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import evaluate_in_pieces, is_checkpoint, program_of, split_scan
from zerojax.tracing.trees import format_bytes

LAYER_INPUT = "zerojax.layer_input"
"""What a traced program calls the arrays that wait on the host."""
_CALLS = ("jit", "pjit")
# What may stand between a parameter and the loop that slices it.
_ROW_BY_ROW = ("convert_element_type", "copy", "name")
_POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst=HOST_KIND,
)
_REMEDY = (
    "offload activations=host needs a model whose layers run in a jax.lax.scan over stacked "
    "parameters: use zerojax.Stages(embed, block, head), flax.linen.scan, or stack the layers with "
    "nnx.vmap and scan them; or leave activations on the device"
)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerScan:
    """A loop over layers.

    Attributes:
      equation: the `scan`.
      inside: the operation that it is inside of, "" for none but calls.
    """

    equation: Any
    inside: str

    @property
    def num_layers(self) -> int:
        return self.equation.params["length"]

    @property
    def waiting(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What of each layer's inputs waits on the host."""
        num_consts, num_carry = split_scan(self.equation)
        carried = self.equation.invars[num_consts : num_consts + num_carry]
        return tuple(
            jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
            for atom in carried
            if _waits(atom.aval)
        )

    @property
    def bytes(self) -> int:
        """Of all that waits, of all layers."""
        return self.num_layers * sum(x.size * x.dtype.itemsize for x in self.waiting)


def find_layer_scans(closed: ClosedJaxpr, parameters: Sequence[bool]) -> list[LayerScan]:
    """The loops over layers of a traced loss.

    Args:
      closed: the loss.
      parameters: for each input of the program, whether it is a parameter (or a part of one).

    Raises:
      ValueError: there are none, or one that cannot be rewritten; with the remedy.
    """
    return _checked(find_loops_over_layers(closed, parameters))


def find_loops_over_layers(closed: ClosedJaxpr, parameters: Sequence[bool]) -> list[LayerScan]:
    """Returns all loops over layers, also those that `find_layer_scans` refuses."""
    inputs = closed.jaxpr.invars
    held = {v for v, is_one in zip(inputs, parameters, strict=True) if is_one}
    return list(_find(closed.jaxpr, held, ""))


def describe_layer_inputs(
    settings: MeshConfig, forward: ClosedJaxpr, num_parameters: int
) -> tuple[str, ...]:
    """What a plan says of activations on the host: one line per loop; () where they stay.

    Args:
      settings: the mesh options.
      forward: the loss of one microbatch on one data shard; its first inputs are parameters.
      num_parameters: how many.

    Raises:
      ValueError: it cannot be done with this model or with stages; with the remedy.
    """
    if settings.offload.activations != HOST:
        return ()
    if settings.stage > 1:
        raise ValueError(
            f"offload activations=host cannot be combined with stage={settings.stage}: a pipeline "
            "keeps its own stash of what each stage is given; use stage=1, or leave activations on "
            "the device"
        )
    inputs = len(forward.jaxpr.invars)
    scans = find_layer_scans(forward, [place < num_parameters for place in range(inputs)])
    return tuple(
        f"activations wait on the host: {_texts(scan.waiting)} of each of {scan.num_layers} layers "
        f"({format_bytes(scan.bytes)} of one microbatch on one data shard); everything else of a "
        "layer is computed again in the backward pass, whatever the model's remat is"
        for scan in scans
    )


def _texts(arrays: Sequence[jax.ShapeDtypeStruct]) -> str:
    return ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in arrays)


def keep_inputs_on_host(
    function: Callable[..., Any], constants: Sequence[Any] = ()
) -> Callable[..., Any]:
    """`function(parameters, *others)` with the same values and derivatives, whose layers' inputs
    wait for the backward pass in pinned host memory.

    Args:
      constants: arrays that it closes over and that are parameters, too.

    Raises:
      ValueError: when it is traced: see `find_layer_scans`.
    """

    def rewritten(parameters: Any, *others: Any) -> Any:
        closed, shape, scans = trace_with_loops(function, (parameters, *others), constants)
        chosen = {id(scan.equation) for scan in _checked(scans)}
        inputs = jax.tree.leaves((parameters, *others))
        outputs = evaluate_loops(closed, inputs, chosen, _run_layers)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten


def trace_with_loops(
    function: Callable[..., Any], given: Sequence[Any], constants: Sequence[Any]
) -> tuple[ClosedJaxpr, Any, list[LayerScan]]:
    """Traces `function(*given)`, whose first argument holds parameters.

    Args:
      constants: arrays that it closes over and that are parameters, too.

    Returns:
      (the program, the shapes of its result, its loops over layers).
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*given)
    fixed = {id(leaf) for leaf in jax.tree.leaves(list(constants))}
    held = set(closed.jaxpr.invars[: len(jax.tree.leaves(given[0]))])
    pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    held |= {variable for variable, value in pairs if id(value) in fixed}
    return closed, shape, list(_find(closed.jaxpr, held, ""))


def _checked(scans: list[LayerScan]) -> list[LayerScan]:
    if not scans:
        raise ValueError(f"{_REMEDY}. The loss has no such loop")
    for scan in scans:
        what = f"the loop of {scan.num_layers} layers"
        if scan.inside:
            raise ValueError(
                f"{_REMEDY}. {what.capitalize()} is inside of a `{scan.inside}`: run it in the "
                "loss itself (jax.checkpoint belongs around the layer, or nowhere: with "
                "activations=host layers are computed again as it is)"
            )
        if not scan.waiting:
            raise ValueError(
                f"{_REMEDY}. {what.capitalize()} carries no floating-point array of two or more "
                "dimensions from layer to layer, so nothing could wait on the host"
            )
    return scans


def _waits(aval: Any) -> bool:
    # A single number or a row of them costs a transfer each and saves nothing.
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.ndim >= 2


# --- which loops ----------------------------------------------------------------------------------


def _find(program: Jaxpr, held: set[Any], inside: str) -> Iterator[LayerScan]:
    """Loops that slice what is held; not those over what another loop slices."""
    held = set(held)
    for equation in program.eqns:
        kind = equation.primitive.name
        given: list[Any] = list(equation.invars)
        if kind in _ROW_BY_ROW:
            held.update(equation.outvars if _holds(held, given[0]) else ())
            continue
        if kind == "scan":
            first = sum(split_scan(equation))
            if any(_holds(held, atom) for atom in given[first:]):
                yield LayerScan(equation, inside)
                continue
            given[first:] = [None] * (len(given) - first)
        elif kind == "cond":
            given = given[1:]
        for inner in inner_programs(equation.params):
            if len(inner.invars) == len(given):
                pairs = zip(inner.invars, given, strict=True)
                passed = {variable for variable, atom in pairs if _holds(held, atom)}
                if passed:
                    yield from _find(inner, passed, inside or ("" if kind in _CALLS else kind))


def _holds(held: set[Any], atom: Any) -> bool:
    return atom is not None and not isinstance(atom, Literal) and atom in held


# --- the program, rewritten -----------------------------------------------------------------------

_Run = Callable[[Sequence[Any]], Sequence[Any]]


def evaluate_loops(
    closed: ClosedJaxpr,
    inputs: Sequence[Any],
    chosen: Set[int],
    run_loop: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """The outputs of a program, some of whose loops run otherwise.

    Args:
      closed: the program; inputs: what it is given.
      chosen: `id` of the equations of these loops, in the program or in calls.
      run_loop: (equation, its inputs) -> its outputs, for these.
    """

    def rewrite(equation: Any) -> _Run | None:
        if id(equation) in chosen:
            return lambda given: run_loop(equation, given)
        if equation.primitive.name in _CALLS and contains(equation, lambda e: id(e) in chosen):
            inner = program_of(equation)
            return lambda given: _evaluate(inner, given, rewrite)
        return None

    return _evaluate(closed, inputs, rewrite)


def _run_layers(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    params, (num_consts, num_carry) = equation.params, split_scan(equation)
    consts, carry = given[:num_consts], given[num_consts : num_consts + num_carry]

    def layer(carry: Sequence[Any], items: Sequence[Any]) -> list[Any]:
        named = [checkpoint_name(x, LAYER_INPUT) if _waits(x) else x for x in carry]
        return _evaluate(params["jaxpr"], [*consts, *named, *items], _dissolve)

    layer = jax.checkpoint(layer, policy=_POLICY, prevent_cse=False)

    def body(carry: Sequence[Any], items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = layer(carry, items)
        return outputs[:num_carry], outputs[num_carry:]

    # Unrolled, XLA fails on slices of host memory (openxla/xla issue 47362).
    carry, items = lax.scan(
        body,
        list(carry),
        list(given[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *items]


def _dissolve(equation: Any) -> _Run | None:
    """Checkpoints of a layer, without those in loops of its own."""
    is_call = equation.primitive.name in _CALLS and contains(equation, is_checkpoint)
    if is_call or is_checkpoint(equation):
        inner = program_of(equation)
        return lambda given: _evaluate(inner, given, _dissolve)
    return None


def contains(equation: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a call holds such an equation, directly or in calls of its own."""
    return any(
        wanted(inner) or (inner.primitive.name in _CALLS and contains(inner, wanted))
        for program in inner_programs(equation.params)
        for inner in program.eqns
    )


def _evaluate(
    closed: ClosedJaxpr, inputs: Sequence[Any], rewrite: Callable[[Any], _Run | None]
) -> list[Any]:
    """The outputs of a program, some of whose equations run otherwise."""

    def run_apart(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
        run = rewrite(equation)
        assert run is not None
        return run(given)

    return evaluate_in_pieces(
        closed, inputs, is_apart=lambda equation: rewrite(equation) is not None, run_apart=run_apart
    )
