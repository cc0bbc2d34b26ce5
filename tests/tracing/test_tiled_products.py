"""A product whose weight is gathered tile by tile: its values, its gradients, and its memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.tracing.tiled_products import TiledProduct, WeightProduct, find_product
from zerojax.tracing.tiled_programs import ShardedWeight, run_with_tiles

DEVICES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer with one weight, the dimension that is sharded, and the one that tiles cut."""

    layer: Callable[[jax.Array, jax.Array], jax.Array]
    weight: tuple[int, ...]
    width: int
    sharded: int
    tiled: int
    dtype: Any = jnp.float32

    def arrays(self) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (DEVICES, 2, 3, self.width), self.dtype)
        return x, jax.random.normal(keys[1], self.weight, self.dtype)


def heads(x, w):
    return jnp.tanh(jnp.einsum("bsd,dhk->bshk", x, w))


def on_the_left(x, w):
    cast = (w.T * 1.0 if w.dtype == x.dtype else w.T).astype(x.dtype)
    return jnp.sin(lax.dot_general(cast, x, (((1,), (2,)), ((), ()))))


def checkpointed(x, w):
    return jnp.tanh(jax.checkpoint(lambda x, w: x @ w[None][0])(x, w))


CASES = {
    "kept": Case(layer=heads, weight=(8, 12, 5), width=8, sharded=0, tiled=1),
    "kept and sharded": Case(layer=heads, weight=(8, 24, 5), width=8, sharded=1, tiled=1),
    "summed": Case(layer=checkpointed, weight=(12, 8), width=12, sharded=1, tiled=0),
    "summed and sharded": Case(layer=checkpointed, weight=(24, 8), width=24, sharded=0, tiled=0),
    "bfloat16": Case(
        layer=heads, weight=(24, 8, 5), width=24, sharded=0, tiled=0, dtype=jnp.bfloat16
    ),
}


def product_of(case: Case) -> tuple[Any, Any]:
    x, w = case.arrays()
    closed = jax.make_jaxpr(case.layer)(x[0], w)
    return closed, find_product(closed.jaxpr, closed.jaxpr.invars[1])


def on_devices(case: Case, tiles: int) -> Callable[..., Any]:
    """The layer's outputs, and the gradients of (shard, x), on DEVICES devices; 1 tile: whole."""
    mesh = jax.make_mesh(
        (DEVICES,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:DEVICES],
    )
    gather = lambda x: lax.all_gather(x, "data", axis=case.sharded, tiled=True)  # noqa: E731
    closed, product = product_of(case)
    assert isinstance(product, WeightProduct), product

    def scatter(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return lax.psum_scatter(wide, "data", scatter_dimension=case.sharded, tiled=True)

    def layer(shard: jax.Array, sink: jax.Array, x: jax.Array) -> jax.Array:
        groups = DEVICES if case.sharded == case.tiled else 1
        tiled = TiledProduct(product, gather, scatter, case.tiled, tiles, groups)
        return run_with_tiles(closed, [x, ShardedWeight(shard, sink, tiled)])[0]

    def local(shard: jax.Array, x: jax.Array) -> Any:
        x, sink = x[0], jnp.zeros(shard.shape, jnp.float32)
        if tiles == 1:
            y, pull = jax.vjp(case.layer, x, gather(shard))
            of_x, of_whole = pull(jnp.cos(y))
            of_shard = scatter(of_whole)
        else:
            y, pull = jax.vjp(lambda sink, x: layer(shard, sink, x), sink, x)
            of_shard, of_x = pull(jnp.cos(y))
        return y[None], of_shard, of_x[None]

    spec = P(*(["data" if dim == case.sharded else None for dim in range(len(case.weight))]))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, P("data")),
        out_specs=(P("data"), spec, P("data")),
        check_vma=False,
    )
    return jax.jit(mapped)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_tiles_give_the_values_and_gradients_of_the_whole_weight(name):
    """Sums are in another order: 2e-6 of sums of about 10; in bfloat16 one rounding of them."""
    case = CASES[name]
    x, w = case.arrays()
    found, expected = on_devices(case, 2)(w, x), on_devices(case, 1)(w, x)
    tolerance = 2e-6 if case.dtype == jnp.float32 else 2e-2
    for mine, whole in zip(found, expected, strict=True):
        assert mine.dtype == whole.dtype
        mine, whole = (np.asarray(a, np.float32) for a in (mine, whole))
        np.testing.assert_allclose(mine, whole, rtol=0, atol=tolerance * np.abs(whole).max())


@pytest.mark.thorough
def test_a_weight_on_the_left_is_cast_and_turned():
    x, w = (
        jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(2, 3, 8), (8, 6)])
    )
    w = w.astype(jnp.bfloat16)
    closed = jax.make_jaxpr(on_the_left)(x, w)
    product = find_product(closed.jaxpr, closed.jaxpr.invars[1])
    assert isinstance(product, WeightProduct)
    assert (product.side, product.free, product.contracted) == (0, [1], [0])

    def run(x: jax.Array, w: jax.Array, dim: int | None) -> jax.Array:
        if dim is None:
            return on_the_left(x, w)
        tiled = TiledProduct(product, lambda x: x, lambda x: x, dim, 2, 1)
        return run_with_tiles(closed, [x, ShardedWeight(w, None, tiled)])[0]

    for dim in (0, 1):
        for arguments in ((0,), (1,)):
            grads = [
                jax.grad(lambda x, w, at=at: run(x, w, at).sum(), arguments)(x, w)[0]
                for at in (dim, None)
            ]
            assert grads[0].dtype == grads[1].dtype
            np.testing.assert_allclose(
                *(np.asarray(g, np.float32) for g in grads), rtol=1e-2, atol=1e-5
            )


@pytest.mark.thorough
def test_memory_falls_with_the_tiles():
    """Of a matrix of 4 MiB; whole, it and its gradient are in memory."""
    case = Case(layer=checkpointed, weight=(1024, 1024), width=1024, sharded=1, tiled=1)
    x, w = case.arrays()
    sizes = [
        on_devices(case, tiles).lower(w, x).compile().memory_analysis().temp_size_in_bytes
        for tiles in (1, 4, 16)
    ]
    assert sizes[0] > 1.9 * w.nbytes
    assert sizes[1] < 0.7 * sizes[0]
    assert sizes[2] < 0.5 * sizes[1]


READERS = {
    "2 readers": lambda x, w: x @ w + (x * 2) @ w,
    "0 readers": lambda x, w: x,
    "sin": lambda x, w: x @ jnp.sin(w),
    "batch": lambda x, w: jnp.einsum("bsd,sd->bs", x, w),
    "reshape": lambda x, w: x @ w.reshape(4, 3, 3).reshape(4, 9),
    "returns": lambda x, w: (x, w),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("word", READERS)
def test_what_is_not_read_by_one_product_has_a_reason(word):
    x, w = jnp.zeros((2, 3, 4)), jnp.zeros((3, 4) if word == "batch" else (4, 9))
    closed = jax.make_jaxpr(READERS[word])(x, w)
    found = find_product(closed.jaxpr, closed.jaxpr.invars[1])
    assert isinstance(found, str)
    assert word in found
