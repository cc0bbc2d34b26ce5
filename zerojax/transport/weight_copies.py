"""Updates compute-dtype copies of weights by quantized differences from the masters
(`wire.weights`).

Each device encodes (master - copy) of its shard; the codes are all-gathered, and every device adds
the decoded differences to its copy. All devices add the same values, so the copies stay equal bit
by bit. The error of a code is part of the next difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.tree_types import Tree
from zerojax.placement.decisions import Decisions
from zerojax.placement.optional_parts import copies_key, followed_leaves
from zerojax.placement.state import COPIES, fit
from zerojax.transport import collectives

Arrays = dict[str, Any]


def build_following(plan: Decisions) -> Callable[[Any], Arrays] | None:
    """Builds the traced refresh of copies, `state -> {name: copy that a step reads}`.

    The result is None if the plan has no copies. A copied value differs from its master, rounded to
    the compute dtype, by at most half a quantization step of its block plus the rounding of the
    sum. If a block of master weights contains NaN or an infinity, its copy is not finite.
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

    def follow(state: Tree) -> Arrays:
        return mapped({name: state["params"][name] for name in leaves}, state[COPIES][key])

    return follow


def _rounded(master: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds values to the precision of `dtype`; returns float32."""
    if dtype == jnp.bfloat16:
        # XLA may remove a cast that is undone at once (xla_allow_excess_precision).
        return lax.reduce_precision(master.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return master.astype(dtype).astype(jnp.float32)


def first_copies(plan: Decisions, params: Arrays) -> dict[str, Any]:
    """Returns the `COPIES` part of a new state: the master weights, cast to the compute dtype;
    traced.
    """
    return {
        key: {
            name: fit(params[name].astype(x.dtype), x.shape, None, to_rows=False)
            for name, x in part.items()
        }
        for key, part in plan.abstract_stored["copies"].items()
    }


def new_copies(plan: Decisions, params: Arrays) -> dict[str, Any]:
    """Runs `first_copies` as a jitted function on stored arrays, which stay valid."""
    shardings = jax.tree.map(lambda x: x.sharding, plan.abstract_stored["copies"])
    return jax.jit(functools.partial(first_copies, plan), out_shardings=shardings)(params)
