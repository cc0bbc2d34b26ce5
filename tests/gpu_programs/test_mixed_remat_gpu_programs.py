"""A model with two lists of layers: a recomputation of each is faster than one of both, compiled
for H100.

Needs the compile-only client (extra `plan`) and no GPU.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import zerojax
from zerojax.config.loader import load_dataclass
from zerojax.forecasting.roofline import memory_fraction
from zerojax.forecasting.settings_search import chosen_words
from zerojax.hardware import gpus

pytestmark = pytest.mark.gpu_programs
WIDTH, LAYERS, TOKENS, DEVICES = 2048, 4, 2**17, 2
BATCH = {name: jax.ShapeDtypeStruct((DEVICES, TOKENS, WIDTH), jnp.bfloat16) for name in ("x", "y")}
H100 = gpus.find_gpu("h100")
VALUES = ("none", "elementwise", "dots", "full")


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, dtype=jnp.bfloat16)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, dtype=jnp.bfloat16)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, x: jax.Array, more: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x + more))))


class EncoderDecoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.decoder = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        memory, x = batch["x"], batch["y"]
        for layer in self.encoder:
            memory = layer(memory, x)
        for layer in self.decoder:
            x = layer(x, memory)
        return jnp.mean(jnp.square((x - batch["y"]).astype(jnp.float32)))


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROJAX_CACHE", str(tmp_path_factory.mktemp("forecasts")))
        yield


@functools.cache
def forecast(roll_remat: Any, gpu: gpus.Gpu = H100, zero: int = 3) -> zerojax.forecasting.Forecast:
    mesh = zerojax.make_abstract_mesh(zerojax.MeshConfig(data=DEVICES), DEVICES)
    plan = zerojax.make_plan(
        EncoderDecoder, mesh, example_batch=BATCH, precision="bf16", zero=zero,
        roll_remat=roll_remat,
    )  # fmt: skip
    return zerojax.forecast(plan, gpu=gpu, fast=True)


def test_a_mix_is_faster_than_every_single_value_that_fits() -> None:
    """The card has memory for the values of one list, not of both; a batch of one row per device
    has no smaller microbatches."""
    most, least = (forecast(value).memory.peak for value in ("dots", "full"))
    assert most is not None
    assert least is not None
    limit = (least + 0.75 * (most - least)) / memory_fraction()[0]
    gpu = dataclasses.replace(H100, memory_bytes=round(limit))
    found = zerojax.search(
        EncoderDecoder, gpu=gpu, devices=DEVICES, example_batch=BATCH, precision="bf16", budget=1000
    )
    assert found.mesh is not None, found.page()
    assert not isinstance(found.mesh.roll_remat, str), found.page()
    assert len(set(dict(found.mesh.roll_remat).values())) == 2
    trial = found.result.chosen
    assert trial is not None
    assert trial.seconds is not None
    for value in VALUES:
        single = forecast(value, gpu, found.mesh.zero)
        seconds = single.estimate.step_seconds
        assert seconds is not None
        assert not single.verdict.fits or trial.seconds < 0.95 * seconds, (value, found.page())
    words = [word.removeprefix("mesh.") for word in chosen_words(found.result)]
    (word,) = [word for word in words if word.startswith("roll_remat=")]
    mesh = load_dataclass(zerojax.MeshConfig, None, [word])
    assert mesh.roll_remat == found.mesh.roll_remat
    assert forecast(mesh.roll_remat, gpu, found.mesh.zero).verdict.fits
