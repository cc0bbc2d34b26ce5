"""Activation offload: keeps the input of each layer in host memory until the backward pass.

Layers are the iterations of loops (`jax.lax.scan`) that slice stacked parameters. The
floating-point arrays of two or more dimensions that a loop carries into a layer move to pinned host
memory in the forward pass, and back in the backward pass, which recomputes the rest of the layer.
Checkpoints of the model inside a layer are removed: nested checkpoints would compute the layer
three times, and the values that they save would stay on the device. A checkpoint inside a loop
within a layer stays, because it limits the memory of that loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from zerojax.config import MeshConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, HOST, HOST_KIND
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import evaluate_in_pieces, is_checkpoint, program_of, split_scan
from zerojax.tracing.trees import format_bytes

LAYER_INPUT = "zerojax.layer_input"
"""Name (as for `jax.ad_checkpoint.checkpoint_name`) of the offloaded arrays in a traced program."""
_CALLS = ("jit", "pjit")
# Primitives that are allowed between a parameter and the loop that slices it.
_ROW_BY_ROW = ("convert_element_type", "copy", "name")
_POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst=HOST_KIND,
)
_REMEDY = (
    "use zerojax.Stages(embed, block, head), flax.linen.scan, or stack the layers with nnx.vmap "
    "and scan them; or leave activations on the device (offload activations=device)"
)


@dataclass(frozen=True, eq=False)
class LayerScan:
    """Loop over layers in a traced loss: a `scan` that slices stacked parameters.

    Attributes:
      equation: the `scan`.
      inside: name of the primitive (such as "cond") around the loop; "" at the top level, and
        inside calls.
      parameters: for each array that the loop slices, whether it is a stacked parameter.
    """

    equation: Equation
    inside: str
    parameters: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        return self.equation.params["length"]

    @property
    def waiting(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of one layer's inputs that are stored on the host until the backward pass."""
        num_consts, num_carry = split_scan(self.equation)
        carried = self.equation.invars[num_consts : num_consts + num_carry]
        return tuple(
            jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
            for atom in carried
            if _waits(atom.aval)
        )

    @property
    def bytes(self) -> int:
        """Bytes of the inputs that are stored on the host, over all layers."""
        return self.num_layers * sum(x.size * x.dtype.itemsize for x in self.waiting)


def find_layer_scans(closed: ClosedJaxpr, parameters: Sequence[bool]) -> list[LayerScan]:
    """Returns the loops over layers in a traced loss whose layers' inputs can be offloaded.

    Args:
      closed: traced loss.
      parameters: for each input of the program, whether it is a parameter (or a part of one).

    Raises:
      ValueError: there is no such loop, or one that cannot be rewritten.
    """
    return _checked(find_loops_over_layers(closed, parameters))


def find_loops_over_layers(closed: ClosedJaxpr, parameters: Sequence[bool]) -> list[LayerScan]:
    """Returns all loops over layers, also those that `find_layer_scans` refuses."""
    inputs = closed.jaxpr.invars
    held = {v for v, is_parameter in zip(inputs, parameters, strict=True) if is_parameter}
    return list(_find(closed.jaxpr, held, ""))


def check_no_stages(settings: MeshConfig) -> None:
    """Raises if activations are offloaded in a pipeline.

    Raises:
      ValueError: the message states both remedies.
    """
    tier = settings.offload.activations
    if tier != DEVICE and settings.stage > 1:
        raise ValueError(
            f"offload activations={tier} cannot be combined with stage={settings.stage}, because "
            "a pipeline stores the inputs of each stage itself; use stage=1, or leave activations "
            "on the device (offload activations=device)"
        )


def describe_layer_inputs(
    settings: MeshConfig, forward: ClosedJaxpr, num_parameters: int
) -> tuple[str, ...]:
    """Returns a plan's lines about offloaded activations, one for each loop; () without offload.

    Args:
      settings: mesh options of the plan.
      forward: traced loss of one microbatch on one data shard; its first inputs are parameters.
      num_parameters: number of inputs that are parameters.

    Raises:
      ValueError: activations cannot be offloaded for this model.
    """
    tier = settings.offload.activations
    if tier == DEVICE:
        return ()
    inputs = len(forward.jaxpr.invars)
    scans = find_layer_scans(forward, [place < num_parameters for place in range(inputs)])
    place = "the host" if tier == HOST else "files"
    return tuple(
        f"activations are offloaded to {place}: {_texts(scan.waiting)} of each of "
        f"{scan.num_layers} layers ({format_bytes(scan.bytes)} per microbatch and data shard); the "
        "backward pass recomputes the rest of each layer, regardless of the model's remat"
        for scan in scans
    )


def _texts(arrays: Sequence[jax.ShapeDtypeStruct]) -> str:
    return ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in arrays)


def keep_inputs_on_host(
    function: Callable[..., Any], constants: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Returns `function(parameters, *others)` with the inputs of its layers offloaded to host
    memory.

    Values and derivatives are the same. The inputs stay in pinned host memory until the backward
    pass.

    Args:
      function: function whose first argument holds the parameters.
      constants: arrays in the closure of `function` that are parameters as well.

    Raises:
      ValueError: raised when the result is traced, for the reasons of `find_layer_scans`.
    """

    def rewritten(parameters: dict[str, jax.Array], *others: Tree) -> Any:
        closed, shape, scans = trace_with_loops(function, (parameters, *others), constants)
        chosen = {id(scan.equation) for scan in _checked(scans)}
        inputs = jax.tree.leaves((parameters, *others))
        outputs = evaluate_loops(closed, inputs, chosen, _run_layers)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten


def trace_with_loops(
    function: Callable[..., Any], arguments: Sequence[Any], constants: Sequence[Any]
) -> tuple[ClosedJaxpr, Any, list[LayerScan]]:
    """Traces `function(*arguments)`, whose first argument holds parameters.

    Args:
      function: function whose first argument holds the parameters.
      arguments: arguments of `function`.
      constants: arrays in the closure of `function` that are parameters as well.

    Returns:
      (traced program, shapes of its result, its loops over layers).
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return closed, shape, loops_of_trace(closed, len(jax.tree.leaves(arguments[0])), constants)


def loops_of_trace(
    closed: ClosedJaxpr, num_parameters: int, constants: Sequence[Any]
) -> list[LayerScan]:
    """Returns the loops over layers of a program whose first inputs are parameters.

    Args:
      closed: traced program.
      num_parameters: number of inputs that are parameters.
      constants: arrays in the closure of the traced function that are parameters as well.
    """
    # A program holds the arrays of a closure themselves, so they are told by identity.
    fixed = {id(leaf) for leaf in jax.tree.leaves(list(constants))}
    held = set(closed.jaxpr.invars[:num_parameters])
    pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    held |= {variable for variable, value in pairs if id(value) in fixed}
    return list(_find(closed.jaxpr, held, ""))


def _checked(scans: list[LayerScan]) -> list[LayerScan]:
    if not scans:
        raise ValueError(
            "offload activations=host needs layers that run in a jax.lax.scan over stacked "
            f"parameters, but the loss has no such loop; {_REMEDY}"
        )
    for scan in scans:
        description = f"the loop of {scan.num_layers} layers"
        if scan.inside:
            raise ValueError(
                "offload activations=host needs a loop over layers at the top level of the loss. "
                f"{description.capitalize()} is inside of a `{scan.inside}`; move it out of it "
                "(a jax.checkpoint around the loop can be removed, because activations=host "
                f"recomputes layers anyway), or {_REMEDY}"
            )
        if not scan.waiting:
            raise ValueError(
                f"offload activations=host has nothing to offload: {description} carries no "
                "floating-point array of two or more dimensions from layer to layer; leave "
                "activations on the device (offload activations=device)"
            )
    return scans


def _waits(aval: jax.core.ShapedArray) -> bool:
    # The transfer of a scalar or a vector costs more than its memory is worth.
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.ndim >= 2


# --- search for loops -----------------------------------------------------------------------------


def _find(program: Jaxpr, held: set[Any], inside: str) -> Iterator[LayerScan]:
    # A copy, because the caller goes on with its own set.
    """Yields loops that slice parameters; omits loops over slices of another loop."""
    held = set(held)
    for equation in program.eqns:
        kind = equation.primitive.name
        operands: list[Any] = list(equation.invars)
        if kind in _ROW_BY_ROW:
            held.update(equation.outvars if _holds(held, operands[0]) else ())
            continue
        if kind == "scan":
            first = sum(split_scan(equation))
            parameters = tuple(_holds(held, atom) for atom in operands[first:])
            if any(parameters):
                yield LayerScan(equation, inside, parameters)
                continue
            # Inside of the loop these are slices of other arrays, not parameters.
            operands[first:] = [None] * (len(operands) - first)
        elif kind == "cond":
            # The first operand chooses the branch, and branches do not get it.
            operands = operands[1:]
        for inner in inner_programs(equation.params):
            # Programs that get other values, such as rows of a scanned array, cannot be followed.
            if len(inner.invars) == len(operands):
                pairs = zip(inner.invars, operands, strict=True)
                passed = {variable for variable, atom in pairs if _holds(held, atom)}
                if passed:
                    yield from _find(inner, passed, inside or ("" if kind in _CALLS else kind))


def _holds(held: set[Any], atom: Operand) -> bool:
    return atom is not None and not isinstance(atom, Literal) and atom in held


# --- the program, rewritten -----------------------------------------------------------------------

_Run = Callable[[Sequence[Any]], Sequence[Any]]


def evaluate_loops(
    closed: ClosedJaxpr,
    inputs: Sequence[Any],
    chosen: Set[int],
    run_loop: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """Evaluates a program, with another implementation for some of its loops.

    Args:
      closed: program to evaluate.
      inputs: values of the inputs of the program.
      chosen: `id` of the equations of the loops to replace, at the top level or inside calls.
      run_loop: `(equation, values of its inputs) -> values of its outputs`, used for the chosen
        loops.

    Returns:
      The outputs of the program.
    """

    def rewrite(equation: Equation) -> _Run | None:
        if id(equation) in chosen:
            return lambda operands: run_loop(equation, operands)
        if equation.primitive.name in _CALLS and contains(equation, lambda e: id(e) in chosen):
            inner = program_of(equation)
            return lambda operands: _evaluate(inner, operands, rewrite)
        return None

    return _evaluate(closed, inputs, rewrite)


def _run_layers(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    params, (num_consts, num_carry) = equation.params, split_scan(equation)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]

    def layer(carry: Sequence[Any], items: Sequence[Any]) -> list[Any]:
        named = [checkpoint_name(x, LAYER_INPUT) if _waits(x) else x for x in carry]
        return _evaluate(params["jaxpr"], [*consts, *named, *items], _dissolve)

    # The forward and the backward loop are separate, so there is nothing for XLA to merge.
    layer = jax.checkpoint(layer, policy=_POLICY, prevent_cse=False)

    def body(carry: Sequence[Any], items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = layer(carry, items)
        return outputs[:num_carry], outputs[num_carry:]

    # The loop is not unrolled: XLA fails on unrolled slices of host memory (openxla/xla 47362).
    carry, items = lax.scan(
        body,
        list(carry),
        list(operands[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *items]


def without_checkpoints(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` without its checkpoints; those inside loops stay."""

    def rewritten(*arguments: Tree) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outputs = _evaluate(closed, jax.tree.leaves(arguments), _dissolve)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten


def _dissolve(equation: Equation) -> _Run | None:
    """Returns a function that evaluates a checkpoint, or a call that contains one, without the
    checkpoint.

    For other equations it returns None. Checkpoints inside loops of the layer are not removed.
    """
    is_call = equation.primitive.name in _CALLS and contains(equation, is_checkpoint)
    if is_call or is_checkpoint(equation):
        inner = program_of(equation)
        return lambda operands: _evaluate(inner, operands, _dissolve)
    return None


def contains(equation: Equation, predicate: Callable[[Any], bool]) -> bool:
    """Returns whether a call contains a matching equation, directly or in nested calls."""
    return any(
        predicate(inner) or (inner.primitive.name in _CALLS and contains(inner, predicate))
        for program in inner_programs(equation.params)
        for inner in program.eqns
    )


def _evaluate(
    closed: ClosedJaxpr, inputs: Sequence[Any], rewrite: Callable[[Any], _Run | None]
) -> list[Any]:
    """Evaluates a program; `rewrite` may return another implementation for an equation, or None."""

    def run_apart(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        run = rewrite(equation)
        assert run is not None
        return run(operands)

    return evaluate_in_pieces(
        closed, inputs, is_apart=lambda equation: rewrite(equation) is not None, run_apart=run_apart
    )
