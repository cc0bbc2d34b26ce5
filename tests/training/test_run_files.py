"""The run files of configs/ are what their names say, on devices that need not be here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import zerojax
from benchmarks.plans import OFFLOADED
from zerojax.config import RunConfig, load
from zerojax.hardware.gpus import find_gpu
from zerojax.plan.counts import role_tiers
from zerojax.plan.inputs import plan_options
from zerojax.plan.offload_costs import all_file_bytes, buffer_bytes, file_bytes, hiding
from zerojax.runtime.memory import Room
from zerojax.training import run_file

ROOT = Path(__file__).resolve().parents[2]
H100, H200 = 80 * 2**30, 139 * 2**30
# File -> devices, bytes of one device, parameters in millions.
EXPECTED = {
    "tiny_shakespeare": (8, 2**30, 1.9),
    "gpt2_124m_zero1_1xh200": (1, H200, 124),
    "llama_1b_zero1_8xh100": (8, H100, 1126),
    "llama_7b_zero2_8xh100": (8, H100, 6738),
    "llama_8b_zero2_8xh100": (8, H100, 8030),
    "llama_8b_zero3_8xh100": (8, H100, 8030),
    "llama_8b_1m_tokens_8xh100": (8, H100, 8030),
    "llama_13b_host_offload_1xh200": (1, H200, 13_016),
    "llama_13b_host_offload_1xa100_40gb": (1, 40 * 2**30, 13_016),
    "llama_13b_host_offload_1xrtx4090": (1, 24 * 2**30, 13_016),
    "gpt_20b_host_offload_1xh200": (1, H200, 20_254),
    "gpt_175b_files_8xh200": (8, H200, 174_600),
    "gpt_1t_files_8xh200": (8, H200, 1_008_016),
    "llama_70b_zero3_64xh200": (64, H200, 70_554),
    "llama_70b_pipeline_64xh200": (64, H200, 70_554),
    "llama_405b_zero3_512xh200": (512, H200, 405_853),
    "olmoe_7b_expert_8xh100": (8, H100, 6919),
    "mixtral_8x22b_expert_64xh200": (64, H200, 140_630),
}
# Parameters of the published weights, and the base of their rotary positions.
PUBLISHED = {
    "llama_7b_zero2_8xh100": (6_738_415_616, 10_000),
    "llama_8b_zero2_8xh100": (8_030_261_248, 500_000),
    "llama_8b_zero3_8xh100": (8_030_261_248, 500_000),
    "llama_8b_1m_tokens_8xh100": (8_030_261_248, 500_000),
    "llama_13b_host_offload_1xh200": (13_015_864_320, 10_000),
    "llama_13b_host_offload_1xa100_40gb": (13_015_864_320, 10_000),
    "llama_13b_host_offload_1xrtx4090": (13_015_864_320, 10_000),
    "llama_70b_zero3_64xh200": (70_553_706_496, 500_000),
    "llama_70b_pipeline_64xh200": (70_553_706_496, 500_000),
    "llama_405b_zero3_512xh200": (405_853_388_800, 500_000),
    # Less 16 layers' norms of queries and keys, 2 x 2048.
    "olmoe_7b_expert_8xh100": (6_919_161_856 - 65_536, 10_000),
    "mixtral_8x22b_expert_64xh200": (140_630_071_296, 1_000_000),
}
# Adapters beside frozen weights: devices, bytes of one, the run file whose weights they are.
TUNED = {
    "llama_7b_qlora_1xrtx4090": (1, 24 * 2**30, "llama_7b_zero2_8xh100"),
    "llama_70b_qlora_8xh100": (8, H100, "llama_70b_zero3_64xh200"),
}
# Those that only `data` splits, so that any number of devices will do.
LARGE = [name for name in PUBLISHED if "_zero3_" in name and "_7b_" not in name]


def read(name):
    return load(RunConfig, ROOT / "configs" / f"{name}.yaml")


def plan_on(config, devices, **changes):
    config = dataclasses.replace(config, **changes)
    shape = config.global_batch_size, config.data.seq_len
    tokens = jax.ShapeDtypeStruct(shape, np.int32)
    return zerojax.make_plan(
        zerojax.zoo.build_model(config.model, config.model.vocab_size or 256),
        zerojax.make_abstract_mesh(config.mesh, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=config.optimizer,
        precision=config.precision,
        num_microbatches=config.num_microbatches,
        zero=config.mesh.zero,
        steps=config.steps,
        **plan_options(config.mesh),
    )


def count_parameters(plan):
    return sum(leaf.size for leaf in jax.tree.leaves(plan.abstract_portable["params"]))


def state_bytes(plan, kind="device"):
    """Of one device, in its own memory or in another kind."""
    return sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(plan.abstract_state)
        if (leaf.sharding.memory_kind or "device") == kind
    )


def test_every_run_file_is_looked_at():
    files = {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    assert files == EXPECTED.keys() | TUNED.keys()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_plan_of_a_run_file_fits_its_devices(name):
    devices, memory, millions = EXPECTED[name]
    plan = plan_on(read(name), devices)
    parameters = count_parameters(plan)
    assert parameters == pytest.approx(millions * 1e6, rel=0.02)
    if name in PUBLISHED:
        assert parameters == PUBLISHED[name][0]
    held, on_host = state_bytes(plan), state_bytes(plan, "pinned_host")
    in_files, offload = file_bytes(plan, devices) / devices, plan.settings.offload
    # Masters and two moments in float32, split over the devices; small leaves may stay whole. Where
    # some are not on the device, bfloat16 weights are kept beside them.
    weights = 2 * parameters / devices if {"host", "nvme"} & offload.shares.keys() else 0
    if offload.params == "nvme":
        weights = 0  # in files of their own
    state = 12 * parameters / devices
    assert held + on_host + in_files - weights == pytest.approx(state, rel=0.02)
    waiting = weights if offload.params == "host" else 0
    assert on_host - waiting == pytest.approx(
        offload.shares.get("host", 0) * state, rel=0.02, abs=0.002 * state
    )
    assert in_files == pytest.approx(offload.shares.get("nvme", 0) * state, rel=0.001)
    weights -= waiting
    assert held - weights < memory / 2, "the rest is for activations, gradients and weights"


@pytest.mark.parametrize("name", TUNED)
def test_frozen_weights_in_codes_fit_their_devices(name):
    """By the plan, and with activations by the record of the compiled step."""
    devices, memory, base = TUNED[name]
    plan = run_file.plan_from_config(read(name), devices)
    frozen = plan.placement.num_parameters(frozen=True)
    assert frozen == PUBLISHED[base][0]
    for field in ("num_layers", "num_heads", "embed_dim", "mlp_dim", "rope_theta", "vocab_size"):
        assert getattr(read(name).model, field) == getattr(read(base).model, field)
    trained = plan.placement.num_parameters(frozen=False)
    assert trained < 0.01 * frozen
    # Codes of 0.53 bytes, tables in bfloat16; masters and two moments of the adapters.
    assert state_bytes(plan) < (0.57 * frozen + 12 * trained) / devices * 1.01
    record = json.loads((ROOT / "benchmarks/results/plans.json").read_text())
    rows = [row for row in record["rows"] if row["config"] == name]
    assert {row["attention"] for row in rows} == {"xla", "auto"}
    for row in rows:
        assert row["state_GiB"] * 2**30 == pytest.approx(state_bytes(plan), rel=0.01)
        assert row["state_GiB"] < row["peak_GiB"] < row["limit_GiB"] < memory / 2**30


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", OFFLOADED, ids=lambda case: case[0])
def test_large_models_on_few_devices_fit_and_need_what_the_page_says(case, tmp_path, monkeypatch):
    """Compiled peaks by the record; host memory, files and tokens by the plan, too."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))  # rates of the card, not of this machine
    name, card, devices = case
    plan = run_file.plan_from_config(read(name), devices, gpu=find_gpu(card))
    record = json.loads((ROOT / "benchmarks/results/plans.json").read_text())
    [row] = [row for row in record["rows"] if row["config"] == name]
    assert row["peak_GiB"] < row["limit_GiB"] < find_gpu(card).memory_bytes / 2**30
    assert row["machine_files_GiB"] * 2**30 == all_file_bytes(plan, devices)
    on_host = sum(tiers.get("host", 0) for tiers in role_tiers(plan).values())
    needed = devices * on_host + buffer_bytes(plan, plan.offload, devices)
    assert row["machine_host_GiB"] * 2**30 == pytest.approx(needed, rel=1e-6)
    found = hiding(plan, find_gpu(card))
    assert row["hiding_tokens"] == pytest.approx(found.tokens)
    line = next(x for x in (ROOT / "docs/offload.md").read_text().splitlines() if f"`{name}`" in x)
    assert row["expected_s"] >= row["roofline_s"] * (1 - 1e-9)
    hours = 1e9 / row["expected_tokens_per_s"] / 3600
    for value in (row["peak_GiB"], row["machine_host_GiB"], row["machine_files_GiB"], hours):
        assert f" {value:.0f} " in line


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in EXPECTED if "llama" in name or "expert" in name])
def test_devices_that_are_not_here_are_told_before_data_is_opened(name, monkeypatch):
    """As on a machine without GPUs and with 8 GiB of memory."""
    room = Room(limit=8 * 2**30, free=8 * 2**30, source="a test")
    monkeypatch.setattr(run_file, "least_room", lambda: room)
    monkeypatch.setattr(run_file, "as_source", lambda *_, **__: pytest.fail("data was opened"))
    with pytest.raises(ValueError, match=r"\d+ (devices|data shards)|[\d.]+ GiB") as raised:
        zerojax.run_from_config(read(name))
    if read(name).mesh.offload.is_off:  # else what helps an offloaded run
        assert "no GPU" in str(raised.value)
        assert "zerojax plan FILE --gpu" in str(raised.value)


@pytest.mark.parametrize(
    ("mesh", "needed"),
    [({"expert": 16}, "16 devices or a multiple"), ({"data": 4, "stage": 16}, "64")],
)
def test_a_mesh_of_more_devices_says_how_many(mesh, needed):
    with pytest.raises(ValueError, match=f"needs {needed}.*found 8 devices; use {needed}"):
        zerojax.make_mesh(mesh)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_parameters_do_not_show_is_as_published(name):
    model = read(name).model
    assert model.rope_theta == PUBLISHED[name][1]
    assert model.embed_dim / model.num_heads == 128
    assert model.norm_eps == 1e-5
    assert not model.tie_embeddings


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, 64, 512])
@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_is_planned_on_other_device_counts(name, devices):
    """The same rows per device at a time; whether that fits is then read off the plan."""
    config = read(name)
    parts = max(1, config.num_microbatches * EXPECTED[name][0] // devices)
    plan = plan_on(config, devices, num_microbatches=parts)
    assert count_parameters(plan) == PUBLISHED[name][0]
    assert state_bytes(plan) == pytest.approx(12 * PUBLISHED[name][0] / devices, rel=0.02)
    assert not any(leaf.is_padded for leaf in plan.placement.leaves.values())
