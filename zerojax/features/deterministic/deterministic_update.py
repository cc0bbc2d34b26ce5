"""Computes gradient norm and update reproducibly, in pieces independent of the device count.

The sharded dimension of a parameter is cut into `virtual_shards` pieces; each device has several.
The sum of squares of each piece is computed by the same code inside fusion barriers, and the sums
are added in the tree order of `transport.sums`. Each piece is updated in a loop of one iteration,
but the compiler does not know that number. So XLA neither unrolls the loop nor fuses it with the
code around it, and it updates the piece in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.optim import Optimizer, StepNumbers, UpdateContext
from zerojax.passes.update import (
    GradientNorm,
    describe_squares,
    map_update,
    specs_of_leaves,
    true_shapes,
)
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import DATA, DATA_AXES
from zerojax.placement.state import TrainState
from zerojax.transport.sums import (
    TreeOrder,
    barrier_kind,
    run_in_barriers,
    tree_sum,
    zero_at_run_time,
)

Arrays = dict[str, jax.Array]


class ParameterPieces:
    """Cuts each parameter of a plan into `virtual_shards` pieces of one shape."""

    def __init__(self, plan: Decisions):
        self.names = list(plan.abstract_state["params"])
        leaves = plan.placement.leaves
        shapes = {name: leaf.shape for name, leaf in plan.abstract_state["params"].items()}
        dims = {name: leaves[name].zero_dim for name in self.names}
        self.dims = {name: dim for name, dim in dims.items() if dim is not None}
        total = plan.settings.virtual_shards
        self.sizes = {n: shapes[n][dim] // total for n, dim in self.dims.items()}
        self.count = total // plan.mesh.shape[DATA]
        """Number of pieces of each parameter on each device."""

    def split(self, arrays: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        """Separates arrays into (arrays that are divided into pieces, arrays on every device)."""
        cut = {name: x for name, x in arrays.items() if name in self.dims}
        return cut, {name: x for name, x in arrays.items() if name not in self.dims}

    def take(self, shards: Arrays, number: jax.Array) -> Arrays:
        """Returns {name: piece number `number` of this device's shard of the parameter}."""
        return {
            name: lax.dynamic_slice_in_dim(
                x, number * self.sizes[name], self.sizes[name], x.ndim + self.dims[name]
            )
            for name, x in shards.items()
        }

    def put(self, shards: Arrays, pieces: Arrays, number: jax.Array) -> Arrays:
        """Returns this device's shards with piece number `number` of each replaced by `pieces`."""
        return {
            name: lax.dynamic_update_slice_in_dim(
                x, pieces[name], number * self.sizes[name], x.ndim + self.dims[name]
            )
            for name, x in shards.items()
        }


def build_fixed_norm(plan: Decisions) -> Callable[..., GradientNorm]:
    """Builds the gradient norm for `deterministic`: `update.build_norm`, with equal bits on every
    mesh.
    """
    pieces, specs = ParameterPieces(plan), specs_of_leaves(plan.abstract_state["params"])
    kind, order = barrier_kind(plan.mesh), list(specs)

    def squares_of(grads: Arrays, scale: jax.Array) -> jax.Array:
        scaled = [grad * scale for grad in grads.values()]
        return jnp.stack([jnp.sum(x * x) for x in scaled])

    def finish(each: jax.Array) -> GradientNorm:
        total = jnp.sum(each)
        return describe_squares(each, total, jnp.isfinite(total))

    def local(grads: Arrays, scale: jax.Array) -> GradientNorm:
        cut, whole = pieces.split(grads)
        by_name: Arrays = {}
        if cut:

            def one(number: jax.Array, sums: jax.Array) -> jax.Array:
                piece = pieces.take(cut, number)
                row = run_in_barriers(kind, scale, squares_of, piece, scale)
                return lax.dynamic_update_index_in_dim(sums, row, number, 0)

            zeros = jnp.zeros((pieces.count, len(cut)), jnp.float32)
            sums = lax.fori_loop(0, pieces.count, one, zeros)
            sums = lax.all_gather(sums, DATA_AXES, axis=0, tiled=True)
            by_name |= zip(cut, tree_sum(sums, TreeOrder.LOWEST_FIRST), strict=True)
        if whole:
            by_name |= zip(
                whole, run_in_barriers(kind, scale, squares_of, whole, scale), strict=True
            )
        return run_in_barriers(kind, scale, finish, jnp.stack([by_name[name] for name in order]))

    def norm(grads: Arrays, scale: jax.Array, squares: Arrays | None = None) -> GradientNorm:
        assert not squares, "only an update in the backward pass gives squares; it is refused here"
        mapped = jax.shard_map(
            local, mesh=plan.mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False
        )
        return mapped(grads, scale)

    return norm


def build_chunked_update(plan: Decisions) -> Callable[..., tuple[Arrays, Any]]:
    """Builds the update for `deterministic`: `update.build_update` with equal bits on every
    mesh.
    """
    tx = plan.tx
    assert isinstance(tx, Optimizer)
    assert tx.begin is not None
    begin, pieces = tx.begin, ParameterPieces(plan)
    shapes = true_shapes(plan)
    whole_shapes = {
        name: jax.ShapeDtypeStruct(shapes[name], leaf.dtype)
        for name, leaf in plan.abstract_state["params"].items()
    }
    choice = plan.program.kernels["update"]

    def local(
        grads: Arrays,
        state: TrainState,
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
            axes=dict.fromkeys(shards, ()),  # the piece's number separates random bits
            shapes=shapes,
            choice=choice,
            numbers=numbers,
        )
        begun = begin(state, whole_shapes, context)
        nothing = zero_at_run_time(key_data)
        cut, whole = pieces.split(shards)
        cut_grads, whole_grads = pieces.split(grads)
        moments = [pieces.split(moment) for moment in begun.moments]
        first = lax.axis_index(DATA) * pieces.count

        def run_once(arrays: list[Arrays], grads: Arrays, number: jax.Array | None) -> list[Arrays]:
            def run(_: jax.Array, carry: list[Arrays]) -> list[Arrays]:
                new, after = begun.run(carry[0], tuple(carry[1:]), grads, number)
                return [new, *after]

            return lax.fori_loop(0, 1 + nothing, run, arrays)

        def update_piece(number: jax.Array, carry: list[Arrays]) -> list[Arrays]:
            given = [pieces.take(arrays, number) for arrays in carry]
            new = run_once(given, pieces.take(cut_grads, number), first + number)
            return [pieces.put(old, x, number) for old, x in zip(carry, new, strict=True)]

        if cut:
            carry = [cut, *(moment[0] for moment in moments)]
            cut, *cut_moments = lax.fori_loop(0, pieces.count, update_piece, carry)
        else:
            cut_moments = [moment[0] for moment in moments]
        carry = [whole, *(moment[1] for moment in moments)]
        if whole:
            carry = run_once(carry, whole_grads, None)
        whole, *whole_moments = carry
        joined = [
            {name: (one | other)[name] for name in shards}
            for one, other in zip([cut, *cut_moments], [whole, *whole_moments], strict=True)
        ]
        return joined[0], begun.end(tuple(joined[1:]))

    return map_update(plan, tx, local)
