"""A row that is computed alone has the bits of that row of the whole stack."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from tests.support.small_models import LinenBlock
from zerojax.tracing.rolling.flat_program import open_calls
from zerojax.tracing.rolling.single_rows import NotByRow, SingleRow, find_rows

ROWS, SHAPE = 5, (16, 32)
LIMIT = 1024
"""Bytes: keys and numbers of all rows, and no row."""
STACK = (ROWS, *SHAPE)


def each(draw: Callable[..., jax.Array]) -> Callable[[jax.Array], Any]:
    """Draws with one key for each row."""
    return lambda key: jax.vmap(draw)(jax.random.split(key, ROWS))


def of_list(draw: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Any]:
    """Draws row after row, as a Python list of layers does."""
    return lambda key: jnp.stack([draw(jax.random.fold_in(key, i)) for i in range(ROWS)])


def loop(key: jax.Array) -> jax.Array:
    def body(x: jax.Array, own: jax.Array) -> Any:
        return x + 1.0, (jax.random.uniform(own, SHAPE) - 0.5) * 3.0

    return jax.lax.scan(body, jnp.zeros(()), jax.random.split(key, ROWS))[1]


def linen_scan(key: jax.Array) -> jax.Array:
    scanned = nn.scan(
        LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=ROWS
    )
    params = scanned(16).init(key, jnp.zeros((2, 16)), None)["params"]
    return params["Dense_0"]["kernel"]


def scaled_by_depth(key: jax.Array) -> jax.Array:
    depths = jnp.arange(1, ROWS + 1, dtype=jnp.float32)[:, None, None]
    return jax.random.normal(key, STACK) / jnp.sqrt(2 * depths)


def by_iota(key: jax.Array) -> jax.Array:
    return jnp.log(1.0 + jax.lax.broadcasted_iota(jnp.float32, STACK, 1)) + jnp.ones(STACK)


def joined(key: jax.Array) -> jax.Array:
    halves = jax.random.normal(key, (ROWS, 2, 16, 16))
    wide = jnp.concatenate([halves[:, 0], jnp.zeros((ROWS, 16, 8)), halves[:, 1, :, :8]], axis=2)
    return jnp.pad(wide.transpose(0, 2, 1), ((0, 0), (0, 0), (3, 1)))


INIT = jax.nn.initializers
DRAWS: dict[str, Callable[[jax.Array], Any]] = {
    "normal": each(lambda key: jax.random.normal(key, SHAPE) * 0.02),
    "lecun": each(lambda key: INIT.lecun_normal()(key, SHAPE)),
    "bfloat16": each(lambda key: jax.random.normal(key, SHAPE, jnp.bfloat16)),
    "orthogonal": each(lambda key: INIT.orthogonal()(key, SHAPE)),
    "norms of rows": each(lambda key: _unit(jax.random.normal(key, SHAPE))),
    "one draw": lambda key: jax.random.normal(key, STACK),
    "one draw, truncated": lambda key: jax.random.truncated_normal(key, -2.0, 2.0, STACK),
    "one draw, bytes": lambda key: jax.random.bits(key, STACK, jnp.uint8),
    "two draws": lambda key: _two(key, jax.random.split(key)),
    "depth": scaled_by_depth,
    "loop": loop,
    "linen": linen_scan,
    "iota": by_iota,
    "joined": joined,
    "list": of_list(lambda key: jax.random.normal(key, SHAPE)),
    "list, orthogonal": of_list(lambda key: INIT.orthogonal()(key, SHAPE)),
    "zeros": lambda key: jnp.zeros(STACK),
}


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))


def _two(key: jax.Array, keys: jax.Array) -> jax.Array:
    return jnp.where(
        jax.random.bernoulli(keys[0], 0.5, STACK), jax.random.normal(keys[1], STACK), 1
    )


QUICK = {"normal", "one draw", "list", "loop"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n not in QUICK)) for n in DRAWS]
)
def test_a_row_has_the_bits_of_the_stack(name):
    draw, key = DRAWS[name], jax.random.key(7)
    whole = np.asarray(jax.jit(draw)(key))
    row = jax.jit(SingleRow(open_calls(jax.make_jaxpr(draw)(key)), 0, limit=LIMIT))
    for number in range(ROWS):
        one = np.asarray(row(jnp.int32(number), key))
        assert (one.dtype, one.shape) == (whole.dtype, (1, *whole.shape[1:]))
        assert one[0].tobytes() == whole[number].tobytes()
    assert row._cache_size() == 1


def carried(key: jax.Array) -> jax.Array:
    def body(x: jax.Array, own: jax.Array) -> Any:
        x = x + jax.random.normal(own, SHAPE)
        return x, x

    return jax.lax.scan(body, jnp.zeros(SHAPE), jax.random.split(key, ROWS))[1]


def normalised(key: jax.Array) -> jax.Array:
    drawn = jax.random.normal(key, STACK)
    return drawn / jnp.sqrt(jnp.sum(drawn * drawn))


def of_another_generator(key: jax.Array) -> jax.Array:
    data = jnp.concatenate([jax.random.key_data(key)] * 2)
    return jax.random.normal(jax.random.wrap_key_data(data, impl="rbg"), STACK)


WHOLE = {
    "carried": (carried, "scan"),
    "summed": (lambda key: jnp.cumsum(jax.random.normal(key, STACK), axis=0), "bits|cumsum"),
    "normalised": (normalised, "sqrt|div"),
    "mixed": (lambda key: jax.random.normal(key, STACK)[::-1], "bits|rev"),
    "another generator": (of_another_generator, "random_bits"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WHOLE)
def test_rows_that_depend_on_each_other_are_not_computed_alone(name):
    draw, word = WHOLE[name]
    program = jax.make_jaxpr(draw)(jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))
    with pytest.raises(NotByRow, match=word):
        jax.eval_shape(SingleRow(open_calls(program), 0, limit=LIMIT), jnp.int32(1), key)


def test_rows_of_bits_that_are_not_partitionable_are_not_computed_alone():
    with jax.threefry_partitionable(False):
        program = jax.make_jaxpr(DRAWS["one draw"])(jax.random.key(0))
        key = jax.eval_shape(lambda: jax.random.key(0))
        with pytest.raises(NotByRow, match="random_bits"):
            jax.eval_shape(SingleRow(open_calls(program), 0, limit=LIMIT), jnp.int32(1), key)


def test_positions_beyond_32_bits():
    """Row 262,128 of 16,385 elements each begins before element 2**32 and ends behind it."""
    rows, width = 2**20, 2**14 + 1
    number = 2**32 // width
    key = jax.random.key(3)
    program = jax.make_jaxpr(lambda key: jax.random.bits(key, (rows, width)))(key)
    found = SingleRow(open_calls(program), 0)(jnp.int32(number), key)
    counter = np.arange(number * width, (number + 1) * width, dtype=np.uint64)
    assert counter[0] < 2**32 < counter[-1]
    words = (counter >> np.uint64(32)).astype(np.uint32), counter.astype(np.uint32)
    bits = threefry2x32_p.bind(*jax.random.key_data(key), *words)
    np.testing.assert_array_equal(found[0], bits[0] ^ bits[1])


def test_a_program_of_several_results_says_which_are_whole():
    def draw(key: jax.Array) -> list[jax.Array]:
        wide = (ROWS, 512, 512)  # above the values of all rows that are always computed whole
        return [jax.random.normal(key, wide), jnp.cumsum(jax.random.normal(key, wide), 0)]

    rows, whole = find_rows(jax.make_jaxpr(draw)(jax.random.key(0)), ["own", "summed"])
    assert (rows.keys(), whole.keys()) == ({"own"}, {"summed"})
