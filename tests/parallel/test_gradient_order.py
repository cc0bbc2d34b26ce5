"""Gradients of what is read behind a loop over layers are there before the loop's backward pass."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.rolled_layers import ROLLED, SCANNED, TINY, UNROLLED, Listed, plan_form
from zerojax.operators.marks import inner_programs, mark_read
from zerojax.passes.gradient_order import shards_read_once, with_gradients_first
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step

SIZES = dataclasses.replace(TINY, vocab=48)
"""No other array of a device has the shape of the head's piece, [16, 48 / 8] or [16 / 8, 48]."""
CARRY = (SIZES.rows, SIZES.tokens, SIZES.width)


def test_values_and_derivatives_are_those_of_the_function() -> None:
    def run(x: jax.Array, w: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x) @ w, times + 1

    x, w, times = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4), jnp.int32(3)
    ordered = with_gradients_first(run, [0], [1])
    losses = [lambda x, w, run=run: (run(x, w, times)[0] ** 2).sum() for run in (run, ordered)]
    plain, other = (jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w) for loss in losses)
    jax.tree.map(np.testing.assert_array_equal, plain, other)
    assert ordered(x, w, times)[1] == 4


def barriers(plan: Plan) -> list[list[tuple[int, ...]]]:
    """The shapes that each barrier of a step takes."""

    def find(program: Any) -> Iterator[list[tuple[int, ...]]]:
        for equation in program.eqns:
            if equation.primitive.name == "optimization_barrier":
                yield [atom.aval.shape for atom in equation.invars]
            for inner in inner_programs(equation.params):
                yield from find(inner)

    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    return list(find(traced.jaxpr.jaxpr))


def waits_for_the_head(plan: Plan) -> bool:
    """Whether the cotangent of what the loop gives and the head's scattered gradient meet."""
    (leaf,) = (x for x in plan.placement.leaves.values() if x.name.endswith("head/kernel"))
    piece = list(leaf.shape)
    piece[leaf.zero_dim] //= 8
    return {CARRY, tuple(piece)} in map(set, barriers(plan))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("form", [ROLLED, SCANNED])
def test_the_loop_waits_for_the_heads_gradient(form: str, zero: int) -> None:
    """Else the cotangents of the logits live until the backward loop has ended."""
    assert waits_for_the_head(plan_form(form, 4, SIZES, jax.devices()[:8], zero=zero))


def test_nothing_waits_without_a_loop() -> None:
    """The control of the test above."""
    assert not waits_for_the_head(plan_form(UNROLLED, 4, SIZES, jax.devices()[:8], zero=3))


def test_nothing_waits_for_what_is_frozen() -> None:
    """It has no gradient, and none is computed for the sake of an order."""
    tokens = jax.ShapeDtypeStruct((8 * SIZES.rows, SIZES.tokens), np.int32)
    plan = make_plan(
        lambda rngs: Listed(SIZES, 4, rngs),
        make_mesh({"data": 8}, jax.devices()[:8]),
        example_batch={"tokens": tokens, "targets": tokens},
        precision="fp32",
        zero=3,
        freeze="head/.*",
        persistence_threshold=0,
    )
    assert plan.stacks
    assert not waits_for_the_head(plan)


def test_nothing_waits_for_a_table_that_is_read_at_both_ends() -> None:
    """Its two gradients are added before they are scattered, which an order would forbid."""
    mark = lambda name, x: mark_read(x + 0, name)  # noqa: E731

    def loss(shard: jax.Array, other: jax.Array) -> jax.Array:
        return (mark("table", shard) * mark("head", other) + mark("table", shard)).sum()

    program = jax.make_jaxpr(loss)(jnp.ones(3), jnp.ones(3)).jaxpr
    first, second = program.eqns[:4], program.eqns[4:]
    names = {"table", "head"}
    assert shards_read_once(program, program.eqns, names, 0) == {program.invars[1]}
    assert shards_read_once(program, first, names, 0) == {program.invars[1]}
    assert shards_read_once(program, second, names, 0) == set()
    assert shards_read_once(program, first, {"table"}, 0) == set()
