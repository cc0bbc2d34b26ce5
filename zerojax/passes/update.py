"""Builds the optimizer update: the gradient norm, then one in-place update per parameter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import Choice
from pallas_kernels.gradients import GRADIENT_STATS, StatsScalars
from pallas_kernels.update import update as update_leaf
from zerojax.config.tree_types import Tree
from zerojax.optim import Optimizer, StepNumbers, UpdateContext, extra_arguments
from zerojax.passes.guarded_update import guarded_update
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import PASS_AXES
from zerojax.placement.state import TrainState
from zerojax.placement.table import axes_of_dims, shared_axes
from zerojax.tracing.loops import find_stacks

Arrays = dict[str, jax.Array]


class GradientNorm(NamedTuple):
    """The norm and other statistics of all gradients together.

    Attributes:
      norm: float32 []; l2 norm of the scaled gradients, infinite or NaN if a gradient is.
      bad_leaf: int32 []; number (in `leaf_names`) of the first parameter whose gradient is not
        finite; -1 if all are finite.
      read_finite: bool []; whether all gradients that were read here are finite.
      largest_leaf: int32 []; number (in `leaf_names`) of the parameter whose gradient has the
        largest norm.
      largest_share: float32 []; share of this gradient in the sum of squares of all gradients.
      sums: float32 [number of `layer_norms.layer_rows`]; sum of squares of each of these gradients.
        None unless they were asked for.
    """

    norm: jax.Array
    bad_leaf: jax.Array
    read_finite: jax.Array
    largest_leaf: jax.Array
    largest_share: jax.Array
    sums: jax.Array | None = None


class ThisStep(NamedTuple):
    """Inputs of an update besides gradients and state.

    Attributes:
      scale: float32 []; factor by which gradients are multiplied.
      norm: float32 []; norm of the scaled gradients, by which the optimizer may clip them.
      skip: bool []; True leaves parameters and optimizer state unchanged.
      key: the step's typed PRNG key.
      loss: float32 []; the mean loss of the global batch.
      numbers: `StepNumbers` that the program takes as inputs; None: they are constants.
    """

    scale: jax.Array
    norm: jax.Array
    skip: jax.Array
    key: jax.Array
    loss: jax.Array
    numbers: StepNumbers | None = None


def build_norm(
    plan: Decisions,
    *,
    unsummed: frozenset[str] = frozenset(),
    rows: Mapping[str, int] | None = None,
) -> Callable[..., GradientNorm]:
    """Builds the traced `(gradients, scale, squares) -> GradientNorm` of gradients times `scale`.

    `squares` {name: float32 []} is optional: already known sums of squares of unscaled gradients.
    The gradients with these names are not read and may be missing.

    Every gradient is read once, and one collective sums the squares of all gradients. Without this,
    the compiler would run one collective per gradient on backends that cannot group collectives
    (gloo).

    Args:
      plan: plan of the step.
      unsummed: names of gradients that are not summed over devices; they have shape [devices, ...],
        one entry from each data shard. Their sum of squares is taken as the mean over devices of
        the squares of devices x gradient. It is never below the sum of squares of the summed
        gradient.
      rows: {stack: number of its rows} of the stacks whose rows have sums of their own; the result
        then has `sums`, one for each row and each other parameter, in the order of the state.
    """
    specs = specs_of_leaves(plan.abstract_stored["params"])
    axes = axes_of_leaves(plan.mesh, plan.abstract_stored["params"])
    devices = math.prod(plan.mesh.shape[axis] for axis in PASS_AXES)
    for name in unsummed:
        specs[name], axes[name] = P(PASS_AXES), shared_axes(plan.mesh, P(PASS_AXES))
    over = tuple(name for name in plan.mesh.axis_names if any(name in a for a in axes.values()))
    choice = plan.program.kernels["statistics"]
    order, named = list(specs), _named_rows(plan)
    num_rows = {name: len(names) for name, names in named.items()} if rows is None else dict(rows)
    first_axes = {name: shared_axes(plan.mesh, P(*specs[name][:1])) for name in num_rows}
    first_axes |= dict.fromkeys(first_axes.keys() & unsummed, ())

    def local(grads: Arrays, scale: jax.Array, known: Arrays) -> GradientNorm:
        grads = {name: grad[0] if name in unsummed else grad for name, grad in grads.items()}
        split = [name for name in grads if name in num_rows]
        read = sums_of_squares({n: g for n, g in grads.items() if n not in num_rows}, scale, choice)
        for name in split:
            read[name] = squares_of_rows(grads[name], scale, first_axes[name], num_rows[name])
        squares = {}
        for name in grads:
            copies = math.prod(plan.mesh.shape[axis] for axis in set(over) - set(axes[name]))
            squares[name] = read[name] / copies
            if name in unsummed:
                squares[name] = squares[name] * devices
        joined, places, total = summed(squares, over)
        read_finite = jnp.isfinite(total)
        more = {name: square * scale * scale for name, square in known.items()}
        for number, (name, square) in enumerate(more.items()):
            places[name] = np.array([joined.size + number])
            total = total + square
        joined = _joined([joined, *more.values()])
        each = joined[np.concatenate([places[name] for name in order])]
        if rows is None:
            return describe_squares(each, total, read_finite)
        # Rows that only this list of sums has are one parameter in the description.
        by_name = [joined[places[name]] for name in order]
        merged = [
            sums if name in named or sums.size == 1 else jnp.sum(sums, keepdims=True)
            for name, sums in zip(order, by_name, strict=True)
        ]
        return describe_squares(_joined(merged), total, read_finite)._replace(sums=each)

    def norm(grads: Arrays, scale: jax.Array, squares: Arrays | None = None) -> GradientNorm:
        squares = squares or {}
        read = {name: grad for name, grad in grads.items() if name not in squares}
        given = {name: specs[name] for name in read}, P(), P()
        mapped = jax.shard_map(
            local, mesh=plan.mesh, in_specs=given, out_specs=P(), check_vma=False
        )
        return mapped(read, scale, squares)

    return norm


def summed(
    squares: Arrays, over: tuple[str, ...]
) -> tuple[jax.Array, dict[str, np.ndarray], jax.Array]:
    """Sums squares over mesh axes.

    Args:
      squares: {name: float32 sums of squares, [] for a parameter or [rows] for a stack}.

    Returns:
      (float32 sums of all names, {name: places of its sums}, total over all names).
    """
    # The array is summed in two halves: a sum of one small array over 64 GPUs would become a
    # Triton kernel that XLA 0.12 cannot compile ("size mismatch when packing elements").
    zero = [jnp.float32(0)]
    first, second = [*squares][::2], [*squares][1::2]
    halves = [
        _joined([squares[name] for name in first] or zero),
        _joined([squares[name] for name in second] + zero),
    ]
    if over:
        halves = lax.psum(halves, over)
    places: dict[str, np.ndarray] = {}
    for names, start in ((first, 0), (second, halves[0].size)):
        for name in names:
            places[name] = np.arange(start, start := start + squares[name].size)
    return _joined(halves), places, jnp.sum(halves[0]) + jnp.sum(halves[1])


def _joined(squares: Sequence[jax.Array]) -> jax.Array:
    """Concatenates scalars and vectors to one float32 vector."""
    return jnp.concatenate([square.reshape(-1) for square in squares])


def squares_of_rows(
    grad: jax.Array, scale: jax.Array, split_over: tuple[str, ...], num_rows: int
) -> jax.Array:
    """Returns the sum of squares of each row of a stack's gradient: float32 [num_rows].

    Entries for rows that are on other devices are 0.

    Args:
      grad: this device's shard of the gradient, [rows, ...].
      scale: factor by which the gradient is multiplied first.
      split_over: mesh axes that split the rows.
    """
    scaled = grad.astype(jnp.float32) * scale
    own = jnp.sum(scaled * scaled, axis=tuple(range(1, grad.ndim)))
    if not split_over:
        return own
    start = lax.axis_index(split_over) * own.shape[0]
    return lax.dynamic_update_slice_in_dim(jnp.zeros(num_rows, jnp.float32), own, start, 0)


def leaf_names(plan: Decisions) -> list[str]:
    """Returns the names, in the user's model, of the parameters that `GradientNorm` numbers.

    Each layer of a stack has its own entry, except in deterministic runs and if a kernel reads the
    stack as a whole.
    """
    rows = _named_rows(plan)
    return [one for name in plan.abstract_stored["params"] for one in rows.get(name, (name,))]


def _named_rows(plan: Decisions) -> dict[str, tuple[str, ...]]:
    """Returns {stack: user's names of its layers}, for stacks whose layers are reported
    separately.
    """
    if not plan.stacks or plan.settings.fixed_pieces is not None:
        return {}
    if plan.program.kernels["statistics"].implementation != "xla":
        return {}
    found = {}
    for name in plan.stacks.keys() & plan.abstract_stored["params"].keys():
        names, stored = plan.stacks[name], plan.placement.leaves[name].layer_rows
        # The gradient of a row without a layer (padding) is 0, so the row is never reported.
        order = range(len(names)) if stored is None else stored
        found[name] = tuple(names[row] if row >= 0 else name for row in order)
    return found


def sums_of_squares(grads: Arrays, scale: jax.Array, choice: Choice) -> Arrays:
    """Returns {name: sum of squares of the gradient times `scale`, float32 []}.

    One fusion per gradient computes it, or one kernel and a sum of its programs' sums (`choice`).
    """
    leaf = functools.partial(
        update_leaf, GRADIENT_STATS, (), scalars=StatsScalars(scale), impl=choice
    )
    return {name: leaf((grad,)).sums[0] for name, grad in grads.items()}


def describe_squares(each: jax.Array, total: jax.Array, read_finite: jax.Array) -> GradientNorm:
    """Computes a `GradientNorm` from the sums of squares of all gradients.

    Args:
      each: sum of squares of each gradient, float32 [number of gradients].
      total: sum of `each`, float32 [].
      read_finite: bool []; whether all gradients that were read are finite.
    """
    bad = ~jnp.isfinite(each)
    first = jnp.where(jnp.any(bad), jnp.argmax(bad).astype(jnp.int32), jnp.int32(-1))
    largest = jnp.argmax(each).astype(jnp.int32)
    return GradientNorm(jnp.sqrt(total), first, read_finite, largest, each[largest] / total)


def build_update(plan: Decisions) -> Callable[..., tuple[Arrays, Any]]:
    """Builds the traced update, `(gradients, state, ThisStep) -> (parameters, optimizer state)`."""
    if isinstance(plan.tx, Optimizer):
        return _build_in_place(plan, plan.tx)
    tx = optax.with_extra_args_support(plan.tx)
    layers = frozenset(stacks_of(plan))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.abstract_state["params"])

    def update(grads: Arrays, state: TrainState, now: ThisStep) -> tuple[Arrays, Any]:
        grads = {
            name: lax.with_sharding_constraint(grad * now.scale, shardings[name])
            for name, grad in grads.items()
        }
        extra = extra_arguments(grads, now.norm, now.loss, layers)
        before = grads, state["opt_state"], state["params"]
        return guarded_update(tx, *before, skip=now.skip, extra=extra)

    return update


def _build_in_place(plan: Decisions, tx: Optimizer) -> Callable[..., tuple[Arrays, Any]]:
    """Builds an update in which each device updates its own shards, reading and writing each array
    once.
    """
    axes = axes_of_leaves(plan.mesh, plan.abstract_state["params"])
    shapes, dims = true_shapes(plan), axes_of_dims(plan.mesh, plan.abstract_state["params"])
    choice, layers = plan.program.kernels["update"], stacks_of(plan)

    def local(
        grads: Arrays,
        state: Tree,
        shards: Arrays,
        scale: jax.Array,
        skip: jax.Array,
        key_data: jax.Array,
        numbers: StepNumbers | None,
    ) -> tuple[Arrays, Any]:
        context = UpdateContext(
            gradient_scale=scale,
            skip=skip,
            key=jax.random.wrap_key_data(key_data),
            axes=axes,
            shapes=shapes,
            choice=choice,
            layers=layers,
            dims=dims,
            numbers=numbers,
        )
        return tx.apply(grads, state, shards, context)

    return map_update(plan, tx, local)


def map_update(
    plan: Decisions, tx: Optimizer, local: Callable[..., tuple[Arrays, Any]]
) -> Callable[..., tuple[Arrays, Any]]:
    """Maps an update of one device's shards over the mesh by `shard_map`.

    Args:
      local: `(gradients, optimizer state, parameters, scale, skip, key_data, numbers) ->
        (parameters, optimizer state)` of one device.

    Returns:
      `(gradients, state, ThisStep) -> (parameters, optimizer state)`.
    """
    params, opt_state = (specs_of_leaves(plan.abstract_state[n]) for n in ("params", "opt_state"))
    mapped = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(params, opt_state, params, P(), P(), P(), P()),
        out_specs=(params, opt_state),
        check_vma=False,
    )

    def update(grads: Arrays, state: TrainState, now: ThisStep) -> tuple[Arrays, Any]:
        scale, key_data = clipped_scale(tx, now), jax.random.key_data(now.key)
        old = state["opt_state"], state["params"]
        return mapped(grads, *old, scale, now.skip, key_data, now.numbers)

    return update


def clipped_scale(tx: Optimizer, now: ThisStep) -> jax.Array:
    """Returns the factor by which gradients are multiplied, clipping included: float32 []."""
    if tx.clip_norm is None:
        return now.scale
    limit = tx.clip_norm if now.numbers is None else now.numbers.clip_norm
    assert limit is not None
    return now.scale * jnp.where(now.norm < limit, 1.0, limit / now.norm)


def axes_of_leaves(
    mesh: Mesh | AbstractMesh, leaves: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Returns {name: mesh axes that shard this array and have more than one device}."""
    return {name: shared_axes(mesh, leaf.sharding.spec) for name, leaf in leaves.items()}


def true_shapes(plan: Decisions) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape of a trained parameter in the user's model}, for masks that need it."""
    return {name: plan.placement.leaves[name].shape for name in plan.abstract_stored["params"]}


def stacks_of(plan: Decisions) -> dict[str, tuple[str, ...]]:
    """Returns {stack: mesh axes that shard its layer dimension and have more than one device}."""
    stacks = find_stacks(plan.traced.forward, sorted(plan.placement.leaves))
    return {
        name: shared_axes(plan.mesh, P(*leaf.sharding.spec[:1]))
        for name, leaf in plan.abstract_stored["params"].items()
        if name in stacks
    }


def specs_of_leaves(tree: Tree) -> Any:
    """Returns a tree of the `PartitionSpec` of each leaf of `tree`."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
