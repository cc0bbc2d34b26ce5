"""A search of a user's model: its choice fits by compilation, on several GPUs and with offload.

Needs the compile-only client (extra `plan`) and no GPU.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import zerojax
from zerojax.hardware import gpus

pytestmark = pytest.mark.gpu_programs
WIDTH, LAYERS, ROWS = 512, 6, 1024
BATCH = {name: jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32) for name in ("x", "y")}
MIB = 2**20


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return jnp.mean(jnp.square(x - batch["y"]))


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROJAX_CACHE", str(tmp_path_factory.mktemp("forecasts")))
        yield


def card(mebibytes: int) -> gpus.Gpu:
    """An H100 with less memory than one, all of which JAX may use."""
    return dataclasses.replace(gpus.find_gpu("h100"), memory_bytes=mebibytes * MIB)


@pytest.mark.parametrize(("devices", "mebibytes", "offloads"), [(8, 1024, False), (1, 300, True)])
def test_settings_of_a_list_of_layers_fit(devices: int, mebibytes: int, offloads: bool) -> None:
    """12.6 million parameters: 200 MB with AdamW on one device, and up to 100 MB of activations."""
    gpu = card(mebibytes)
    found = zerojax.search(
        Layers, gpu=gpu, devices=devices, example_batch=BATCH, precision="bf16", budget=200
    )
    assert found.mesh is not None, found.page()
    assert found.result.forecast is not None
    assert found.result.forecast.verdict.fits
    assert found.mesh.offload.is_off != offloads, found.page()
    plan = zerojax.make_plan(
        Layers,
        zerojax.make_abstract_mesh(found.mesh, devices),
        example_batch=BATCH,
        precision="bf16",
        zero=found.mesh.zero,
        num_microbatches=found.num_microbatches,
        offload=found.mesh.offload,
        roll_remat=found.mesh.roll_remat,
    )
    forecast = zerojax.forecast(plan, gpu=gpu, fast=True)
    assert forecast.verdict.fits
    assert found.page().startswith("SEARCH: ")
