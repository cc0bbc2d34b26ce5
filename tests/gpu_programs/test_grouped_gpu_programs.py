"""Grouped products of experts as they compile for H100s: kernels, rows, buffers, what travels.

Needs the compile-only client (extra `plan`), jax >= 0.11 and no GPU: pytest -m gpu_programs.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from pallas_kernels.grouped import grouped_product, segments_of
from tests.gpu_programs.test_experts_gpu_programs import EXPERTS, HIDDEN, TOKENS, WIDTH, K
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.marks import needs_kernels
from zerojax.config import MoEConfig
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.operators.routed_experts import slots_per_expert
from zerojax.zoo.llama import Llama, LlamaConfig
from zerojax.zoo.moe import _GatedMlps

pytestmark = [pytest.mark.gpu_programs, needs_kernels]
CHOICES = TOKENS * K


def kernels_of(text):
    """What each kernel gives, sorted."""
    return sorted(re.findall(r"(\w+\[[\d,]*\])\{[\d,]*\} custom-call\(.*mosaic_gpu", text))


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(function, *args):
    """For one H100, as a step does: inside a mesh whose axes are manual."""
    mesh = Mesh(np.array(compile_client.gpu_devices(gpus.find_gpu("h100"), 1)), ("data",))
    run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    sharding = NamedSharding(mesh, P())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return compile_client.compile_for_gpus(jax.jit(run), *jax.tree.map(place, args))


B, F = jnp.bfloat16, jnp.float32


@functools.cache
def layer():
    """Result and derivatives of one layer of OLMoE's size, as in test_experts_gpu_programs."""

    def both(x, gates, ids, weights, slope):
        def result(x, gates, weights):
            mlps = _GatedMlps("silu")
            return zerojax.experts(x, gates, ids, weights, mlps, products="grouped")

        out, pull = jax.vjp(result, x, gates, weights)
        out, slope = jax.lax.optimization_barrier((out, slope))
        return out, pull(slope)

    wide = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return compiled(
        both,
        struct(B, TOKENS, WIDTH),
        struct(F, TOKENS, K),
        struct(jnp.int32, TOKENS, K),
        {name: struct(B, EXPERTS, *shape) for name, shape in wide.items()},
        struct(B, TOKENS, WIDTH),
    )


def test_nine_kernels_multiply_the_rows_that_there_are():
    """Three forward, of tokens x k rows and no slot more, and two backward for each of them."""
    rows = [f"bf16[{CHOICES},{HIDDEN}]"] * 3 + [f"bf16[{CHOICES},{WIDTH}]"] * 3
    weights = [f"bf16[{EXPERTS},{WIDTH},{HIDDEN}]"] * 2 + [f"bf16[{EXPERTS},{HIDDEN},{WIDTH}]"]
    assert kernels_of(layer().text) == sorted(rows + weights)
    assert not re.search(r" dot\(|custom_call_target=\"__cublas", layer().text)
    assert " while(" not in layer().text, "no further rounds"


def test_temporaries_are_those_of_the_rows():
    """1.5 times what experts read and write of each row, of which batched products have 1.25."""
    assert layer().memory.temporary <= 1.5 * CHOICES * (WIDTH + 2 * HIDDEN) * 2 + 2**20


@pytest.mark.parametrize("shape", [(16, 1024, 512, 65536), (64, 512, 192, 4096)], ids=str)
def test_the_kernels_spill_nothing(shape, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    groups, width, result, rows = shape

    def both(x, w, sizes, slope):
        out, pull = jax.vjp(lambda x, w: grouped_product(x, w, segments_of(sizes)), x, w)
        return out, pull(slope)

    found = compiled(
        both,
        struct(B, rows, width),
        struct(B, groups, width, result),
        struct(jnp.int32, groups),
        struct(B, rows, result),
    )
    said = "".join(path.read_text() for path in tmp_path.glob("*.ptxas"))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) == 3
    assert {int(n) for pair in spills for n in pair} == {0}
    assert found.memory.temporary <= 2**17  # tables of tiles


@functools.cache
def step(products):
    moe = MoEConfig(num_experts=16, experts_per_token=2, expert_dim=256, products=products)
    sizes = {"num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "embed_dim": 512}
    config = LlamaConfig(vocab_size=512, max_seq_len=2048, remat="full", moe=moe, **sizes)
    plan = text_plan(
        lambda rngs: Llama(config, rngs=rngs),
        8,
        2048,
        axes={"data": 2, "expert": 4},
        precision="bf16",
        zero=3,
        persistence_threshold=1,
    )
    return plan, compile_step(plan).text


def test_a_step_over_8_devices_holds_the_kernels_and_sends_the_same_rows():
    """Data x expert 2 x 4, stage 3, remat: the same bytes, but for how many rows each slot has."""
    sent, whole = {}, slots_per_expert(2048, 2, 16, 1.25)
    assert whole % 16 == 0, "no slot more for whole tiles"
    for products in ("batched", "grouped"):
        program = hlo.read_program(step(products)[1])
        kinds = [one for one in hlo.find_collectives(program, 8) if one.kind == "all-to-all"]
        sent[products] = sum(one.times * one.wire_bytes for one in kinds)
    assert sent["batched"] <= sent["grouped"] <= 1.001 * sent["batched"]
    assert len(kernels_of(step("grouped")[1])) >= 12
    assert not kernels_of(step("batched")[1])
