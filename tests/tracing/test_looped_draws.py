"""Draws in loops: one program for each shape, the same bits, and a limit of memory."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import equal_trees
from zerojax import make_mesh, make_plan
from zerojax.placement.state import run_key_data
from zerojax.step import initialization
from zerojax.tracing.rolling.looped_draws import LOOP_BYTES, loop_draws

WIDTH, LAYERS = 24, 4
BATCH = {"x": np.ones((8, WIDTH), np.float32)}
KEY = jax.random.key(5)
_FLAGS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")


class Blocks(nnx.Module):
    """A list of blocks with two matrices each; no two blocks share a key."""

    def __init__(self, number: int, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.up = nnx.List([nnx.Linear(WIDTH, 40, rngs=rngs) for _ in range(number)])
        self.down = nnx.List(
            [nnx.Linear(40, WIDTH, kernel_init=small, rngs=rngs) for _ in range(number)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(jnp.tanh(up(x)))
        return x


def initialiser_of(devices: int, zero: int, number: int = LAYERS) -> Any:
    """Lowers the program that makes the first state."""
    plan = make_plan(
        lambda rngs: Blocks(number, rngs),
        make_mesh({"data": devices}, devices=jax.devices()[:devices]),
        example_batch=BATCH,
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        zero=zero,
        precision="fp32",
        persistence_threshold=0,
    )
    return initialization.build_initialiser(plan).lower(np.asarray(run_key_data(3)))


def loops_of(function: Callable[..., Any], **options: Any) -> list[int]:
    """Returns the numbers of iterations of the loops over parameters, not over keys."""
    closed = jax.make_jaxpr(loop_draws(function, **options))(KEY)
    scans = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    return [
        scan.params["length"]
        for scan in scans
        if not any(jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key) for v in scan.outvars)
    ]


def count_threefry(program: str) -> int:
    """Returns how often StableHLO draws bits or keys once the compiler has inlined its calls."""
    parts = re.split(r"func\.func \w+ @", program)[1:]
    calls = {part.split("(")[0]: re.findall(r"call @(\w+)\(", part) for part in parts}

    def count(name: str) -> int:
        return name.startswith("threefry2x32") or sum(map(count, calls[name]))

    return count("main")


@pytest.mark.thorough
def test_the_first_state_holds_one_program_for_each_shape(monkeypatch: Any) -> None:
    keys, shapes = 1, 2
    assert count_threefry(initialiser_of(1, 0).as_text()) == keys + shapes
    monkeypatch.setattr(initialization, "loop_draws", lambda function: function)
    assert count_threefry(initialiser_of(1, 0).as_text()) > 4 * LAYERS


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "zero"), [(1, 0), (8, 3)])
def test_loops_change_no_bit_and_take_no_memory(devices: int, zero: int, monkeypatch: Any) -> None:
    looped = initialiser_of(devices, zero, 3).compile()
    monkeypatch.setattr(initialization, "loop_draws", lambda function: function)
    plain = initialiser_of(devices, zero, 3).compile()
    key_data = np.asarray(run_key_data(3))
    equal_trees.assert_same(looped(key_data), plain(key_data))
    one, many = looped.memory_analysis(), plain.memory_analysis()
    assert one.output_size_in_bytes == many.output_size_in_bytes
    assert one.temp_size_in_bytes <= many.temp_size_in_bytes


def of_pairs(key: jax.Array) -> list[jax.Array]:
    """Splits each key off the last; `normal` ends in a product, which a sum may join."""
    found = []
    for _ in range(LAYERS):
        key, first, second = jax.random.split(key, 3)
        found.append((jax.random.normal(first, (7, 33)) + 0.1) * 0.3)
        limit = jnp.sqrt(3.0 / 7)
        found.append(jax.random.uniform(second, (7, 9), minval=-limit, maxval=limit))
    return found


def of_norms(key: jax.Array) -> list[jax.Array]:
    """Divides each draw by its norm: more than arithmetic of one element."""
    draws = [jax.random.normal(k, (65,)) for k in jax.random.split(key, LAYERS)]
    return [x / jnp.linalg.norm(x) for x in draws]


def of_chain(key: jax.Array) -> list[jax.Array]:
    """Makes each key of the draw before."""
    found = []
    for _ in range(LAYERS):
        found.append(jax.random.normal(key, (9,)))
        key = jax.random.fold_in(key, (found[-1][0] * 1000).astype(jnp.uint32))
    return found


def of_scales(key: jax.Array) -> list[jax.Array]:
    keys = jax.random.split(key, LAYERS)
    return [jax.random.normal(k, (9,)) * (number + 1) for number, k in enumerate(keys)]


def of_other_keys(key: jax.Array) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), LAYERS)
    return [jax.random.normal(k, (9,)) for k in keys]


@pytest.mark.thorough
def test_draws_of_one_shape_are_one_loop_with_the_same_bits() -> None:
    assert loops_of(of_pairs) == loops_of(jax.jit(of_pairs)) == [LAYERS, LAYERS]
    equal_trees.assert_same(jax.jit(loop_draws(of_pairs))(KEY), jax.jit(of_pairs)(KEY))


def test_a_loop_takes_in_the_arithmetic_that_follows_a_draw() -> None:
    closed = jax.make_jaxpr(loop_draws(of_pairs))(KEY)
    outside = [e for e in closed.jaxpr.eqns if e.outvars[0].aval.shape[-2:] in ((7, 33), (7, 9))]
    assert {e.primitive.name for e in outside} == {"scan", "slice", "squeeze"}


@pytest.mark.thorough
def test_bits_are_the_same_if_products_and_sums_are_rounded_once() -> None:
    """Fused multiplication and addition, which this process's processor flags rule out."""
    code = "from tests.tracing import test_looped_draws; test_looped_draws.compare_pairs()"
    env = {k: v for k, v in os.environ.items() if k not in _FLAGS}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], env=env, cwd=root, check=True)


def compare_pairs() -> None:
    equal_trees.assert_same(jax.jit(loop_draws(of_pairs))(KEY), jax.jit(of_pairs)(KEY))


def test_keys_of_few_numbers_are_made_one_by_one() -> None:
    two = lambda key: [jax.random.key_data(jax.random.fold_in(key, n)) for n in (5, 9)]  # noqa: E731
    equal_trees.assert_same(jax.jit(loop_draws(two))(KEY), two(KEY))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [of_norms, of_chain, of_scales, of_other_keys])
def test_other_draws_stay_apart(function: Any) -> None:
    assert loops_of(function) == []


def test_a_loop_holds_no_more_than_its_limit() -> None:
    one = 4 * 7 * 33
    assert loops_of(of_pairs, limit=4 * one) == [LAYERS, 3]  # with keys; the fourth stays alone
    assert loops_of(of_pairs, limit=2 * one) == [LAYERS]
    assert LOOP_BYTES <= 16 * 2**20

    def large(key: jax.Array) -> list[jax.Array]:
        size = LOOP_BYTES // 4 // 2
        return [jax.random.normal(k, (size,)) for k in jax.random.split(key, LAYERS)]

    assert loops_of(large) == []


def test_a_program_with_side_effects_stays_as_it_is() -> None:
    def told(key: jax.Array) -> list[jax.Array]:
        jax.debug.print("{}", jnp.int32(0))
        return of_pairs(key)

    assert loops_of(told) == []


def test_draws_that_nothing_needs_are_left_out() -> None:
    assert loops_of(lambda key: of_pairs(key)[:2]) == []
