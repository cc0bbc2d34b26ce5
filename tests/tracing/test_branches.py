"""Collectives inside conditionals are found, in the traced program and in the compiled one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.program_claims import collectives_in_branches
from zerojax.forecasting.hlo import find_collectives, find_in_branches, read_program

DEVICES = 4
NEIGHBOURS = [(0, 1), (1, 2), (2, 3)]


def jitted(function):
    mesh = jax.make_mesh((DEVICES,), ("a",), axis_types=(AxisType.Auto,))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    ).trace(jnp.ones((DEVICES * DEVICES, 8)))


def without(x):
    """Collectives in the open and in a loop; a branch that has none."""
    x = lax.ppermute(x, "a", NEIGHBOURS) + lax.psum(x, "a")
    x, _ = lax.scan(lambda x, _: (lax.pmax(x, "a") * 0.5, None), x, None, length=3)
    return lax.cond(lax.axis_index("a") == 0, jnp.sin, lambda x: x, x)


def in_the_cheaper_branch(x):
    return lax.cond(
        lax.axis_index("a") == 0,
        lambda x: lax.psum_scatter(jnp.tile(x, (DEVICES, 1)), "a", tiled=True),
        lambda x: lax.psum(lax.all_gather(x, "a"), "a").sum(0),
        x,
    )


def in_a_loop_in_a_branch(x):
    def looped(x):
        return lax.scan(lambda x, _: (lax.ppermute(x, "a", NEIGHBOURS), None), x, None, length=3)[0]

    return lax.switch(lax.axis_index("a"), [jnp.sin, looped, jnp.cos, lambda x: x], x)


def in_a_branch_in_a_loop(x):
    def body(x, _):
        return lax.cond(
            x.sum() > 0, lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True), jnp.sin, x
        ), None

    return lax.scan(body, x, None, length=3)[0]


CASES = {
    without: ([], []),
    in_the_cheaper_branch: (
        ["all_gather", "psum", "reduce_scatter"],
        ["all-gather", "all-reduce", "reduce-scatter"],
    ),
    in_a_loop_in_a_branch: (["ppermute"], ["collective-permute"]),
    in_a_branch_in_a_loop: (["all_to_all"], ["all-to-all"]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_collectives_inside_conditionals(function):
    traced = jitted(function)
    written, compiled = CASES[function]
    assert sorted(collectives_in_branches(traced.jaxpr)) == written
    program = read_program(traced.lower().compile().as_text())
    found = find_in_branches(program, DEVICES)
    assert sorted(one.kind for one in found) == compiled
    assert all(one.in_branch and one.op_name for one in found)
    assert bool(find_collectives(program, DEVICES))  # also those outside


def test_reductions_gathers_and_permutes_are_all_seen():
    """Each under the name that it has in a traced program."""

    def everything(x):
        x = lax.psum(x, "a") + lax.pmax(x, "a") + lax.pmin(x, "a") + lax.pmean(x, "a")
        x = x + lax.all_gather(x, "a").sum(0) + lax.pshuffle(x, "a", [1, 2, 3, 0])
        return x + lax.psum_scatter(jnp.tile(x, (DEVICES, 1)), "a", tiled=True)

    traced = jitted(lambda x: lax.cond(x.sum() > 0, everything, lambda x: x, x))
    assert len(collectives_in_branches(traced.jaxpr)) == 7
