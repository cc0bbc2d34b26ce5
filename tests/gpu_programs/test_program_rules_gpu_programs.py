"""Program rules in steps compiled for H100: attention, bytes between nodes, no false alarm."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from zerojax.config import ModelConfig
from zerojax.errors import ExpectationError
from zerojax.forecasting.program_rules import check_step
from zerojax.hardware import compile_client
from zerojax.zoo import build_model

pytestmark = pytest.mark.gpu_programs

SEQ, WIDTH = 128, 256
SOUND = {
    "max_gather_mb": 0.0,
    "max_replicated_mb": 0.001,
    "max_peak_gib": 1.0,
    "gradients_in": "bf16",
    "layer_loops": 1,
    "fused_attention": True,
}


@pytest.fixture(autouse=True)
def quick_to_compile(monkeypatch):
    """With the least work: collectives are exact, and no test depends on the memory."""
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    monkeypatch.setattr(compile_client, "FAST_OPTIONS", compile_client.SKETCH_OPTIONS)


def text_plan(zero, devices=8, microbatches=1, mesh=None, **changes):
    config = ModelConfig(
        name="gpt2", num_layers=2, num_heads=4, embed_dim=WIDTH, max_seq_len=SEQ, **changes
    )
    tokens = np.zeros((2 * devices * microbatches, SEQ), np.int32)
    return zerojax.make_plan(
        build_model(config, 512),
        zerojax.make_abstract_mesh(mesh or {}, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        precision="bf16",
        zero=zero,
        num_microbatches=microbatches,
        persistence_threshold=1000,
    )


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 1), (2, 2), (3, 1), (3, 2)])
def test_a_sound_step_keeps_every_rule(zero, parts):
    checked = zerojax.expect(
        text_plan(zero, microbatches=parts), gpu="h100", devices=8, max_network_gb=0, **SOUND
    )
    assert checked.contents.attention_kernels
    assert checked.forecast is not None
    assert checked.plan.mesh.size == 8


@pytest.mark.parametrize("zero", [1, 3])
def test_a_sound_step_with_tensor_parallelism(zero):
    plan = text_plan(zero, mesh={"model": 2})
    checked = zerojax.expect(plan, gpu="h100", devices=8, rules_split=True, **SOUND)
    assert len(checked.rules) == len(SOUND) + 1


def test_attention_that_stores_its_scores():
    """And gradients that are summed in bfloat16: both are named, with their lines."""
    with pytest.raises(ExpectationError) as caught:
        zerojax.expect(
            text_plan(2, attention="xla"), gpu="h100", fused_attention=True, gradients_in="fp32"
        )
    narrow, stored = caught.value.violations
    assert narrow.rule == "gradients_in"
    assert "bf16" in str(narrow.collective)
    assert f"[2, 4, {SEQ}, 1, {SEQ}] in float32" in stored.found
    assert "zerojax/zoo" in str(stored.line)


class Scaled(nnx.Module):
    """Scales hidden units that are split over `model` by numbers that are not."""

    def __init__(self, rngs: nnx.Rngs, *, dtype=None):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(32))
        self.dtype = dtype

    def loss(self, batch):
        groups, scale = self.up(batch["x"]).reshape(-1, 8, 32), self.scale[...][None, None]
        if self.dtype is not None:
            groups, scale = groups.astype(self.dtype), scale.astype(self.dtype)
        hidden = groups * scale
        output = self.down(nnx.gelu(hidden).reshape(-1, 256))
        return zerojax.losses.mean_squared_error(output, batch["x"])


def test_gradients_that_are_summed_in_16_bits_along_another_axis():
    """Reported as pytorch #190626: reduce_dtype holds for the axes of the batch alone."""
    rules = (
        ("up/kernel", (None, "model")),
        ("up/bias", ("model",)),
        ("down/kernel", ("model", None)),
    )
    plan, *remedied = (
        zerojax.make_plan(
            functools.partial(Scaled, dtype=dtype),
            {"data": 2, "model": 4, "rules": rules, "zero": 2, "persistence_threshold": 0},
            example_batch={"x": np.zeros((32, 64), np.float32)},
            precision=precision,
            reduce_dtype="fp32",
        )
        for precision, dtype in (("bf16", None), ("bf16", jnp.float32), ("fp32", None))
    )
    with pytest.raises(ExpectationError) as caught:
        zerojax.expect(plan, gpu="h100", gradients_in="fp32")
    (found,) = caught.value.violations
    assert "bf16" in found.found
    assert "all-reduce over model" in str(found.collective)
    assert re.search(r"gpu_programs\.py:\d+: hidden = groups \* scale", str(found.line))
    for remedied_plan in remedied:
        zerojax.expect(remedied_plan, gpu="h100", gradients_in="fp32")


def test_bytes_between_nodes():
    with pytest.raises(ExpectationError, match="between nodes") as caught:
        zerojax.expect(
            text_plan(1, devices=16), gpu="h100", devices=16, max_network_gb=1e-6, max_wire_gb=1
        )
    (found,) = caught.value.violations
    assert found.rule == "max_network_gb"
    checked = check_step(text_plan(1, devices=16), zerojax.ExpectConfig(), "h100", 16)
    # A ring over two nodes of eight crosses between them with one eighth of its bytes.
    contents = checked.contents
    assert contents.network_bytes == pytest.approx(contents.wire_bytes / 8, rel=0.01)


class Wide(nnx.Module):
    """A model whose activations exceed its weights."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 4096, rngs=rngs)
        self.down = nnx.Linear(4096, 8, rngs=rngs)

    def loss(self, batch):
        hidden = self.up(batch["x"])
        return zerojax.losses.mean_squared_error(self.down(nnx.gelu(hidden)), batch["x"])


def test_a_peak_above_its_limit_names_the_largest_values_and_a_line():
    plan = zerojax.make_plan(
        Wide,
        zerojax.make_abstract_mesh({}, 8),
        example_batch={"x": np.zeros((8 * 8192, 8), np.float32)},
        precision="fp32",
    )
    rules = zerojax.ExpectConfig(max_peak_gib=0.01)
    checked = check_step(plan, rules, gpu="h100", devices=8)
    (violation,) = checked.violations
    largest = checked.contents.largest[0]
    assert (largest.shape, largest.role) == ("f32[8192,4096]", "activations")
    assert largest.num_bytes == 8192 * 4096 * 4
    assert "f32[8192,4096]" in violation.found
    assert violation.line is not None
    assert any(word in violation.line for word in ("self.up(", "self.down("))
