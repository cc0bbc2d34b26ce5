"""Copies of the weights that follow their masters by codes of what changed (`wire.weights`).

Every device encodes (master - copy) of its shard, all gather the codes, and each adds to its copy
what they say. All add the same, so that copies stay the same bits; what a code misses is in the
next difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.parallel import collectives
from zerojax.plan.kept_parts import copies_key, followed_leaves
from zerojax.plan.make import Plan
from zerojax.plan.state import COPIES, fit

Arrays = dict[str, Any]


def build_following(plan: Plan) -> Callable[[Any], Arrays] | None:
    """`state -> {name: copy that a step reads}`, to be traced; None where no copies are kept.

    No value is off from its master, rounded to the compute dtype, by more than half a step of the
    code of its block and the rounding of the sum. A block of masters with NaN or an infinity has no
    finite copy.
    """
    leaves = followed_leaves(plan.placement)
    if not leaves:
        return None
    table = {
        name: collectives.leaf_collectives(
            leaf,
            plan.placement.num_shards(leaf),
            compute_dtype=jnp.float32,
            reduce_dtype=jnp.float32,
            wire_codes=leaf.delta_codes,
        )
        for name, leaf in leaves.items()
    }
    key, limit = copies_key(plan.placement, plan.precision), plan.settings.allgather_bucket_size
    masters = {name: leaf.stored_spec for name, leaf in leaves.items()}
    copies = {name: P(*leaf.axes) for name, leaf in leaves.items()}

    def local(masters: Arrays, copies: Arrays) -> Arrays:
        behind = {}
        for name, copy in copies.items():
            own = table[name].piece(copy, lax.axis_index(leaves[name].zero_axes))
            behind[name] = _rounded(masters[name], copy.dtype) - own.astype(jnp.float32)
        wholes = collectives.gather_buckets(behind, table, limit)
        return {
            name: (copy.astype(jnp.float32) + wholes[name]).astype(copy.dtype)
            for name, copy in copies.items()
        }

    mapped = jax.shard_map(
        local, mesh=plan.mesh, in_specs=(masters, copies), out_specs=copies, check_vma=False
    )

    def follow(state: Any) -> Arrays:
        return mapped({name: state["params"][name] for name in leaves}, state[COPIES][key])

    return follow


def _rounded(master: jax.Array, dtype: Any) -> jax.Array:
    """float32, with the digits that `dtype` has."""
    if dtype == jnp.bfloat16:
        # XLA may take out a cast that is turned back at once (xla_allow_excess_precision).
        return lax.reduce_precision(master.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return master.astype(dtype).astype(jnp.float32)


def first_copies(plan: Plan, params: Arrays) -> dict[str, Any]:
    """Traced: what a state has under `COPIES` when it begins: masters in the compute dtype."""
    return {
        key: {
            name: fit(params[name].astype(x.dtype), x.shape, None, to_rows=False)
            for name, x in part.items()
        }
        for key, part in plan.abstract_stored["copies"].items()
    }


def new_copies(plan: Plan, params: Arrays) -> dict[str, Any]:
    """`first_copies` of arrays, as they are stored, which stay valid."""
    shardings = jax.tree.map(lambda x: x.sharding, plan.abstract_stored["copies"])
    return jax.jit(functools.partial(first_copies, plan), out_shardings=shardings)(params)
