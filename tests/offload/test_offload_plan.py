"""What a plan says of offload: bytes by tier and role, what moves, what hides it, what helps."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.support.forecast_samples import sample_card
from zerojax.config import ModelConfig, OffloadConfig
from zerojax.config.mesh import DEVICE, HOST, NVME
from zerojax.forecasting.remedies import find_remedies
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.hardware.machine_rates import MeasuredDisk, MeasuredLink, disk_name, keep_rates
from zerojax.optim import adamw
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.counts import (
    kept_activation_bytes,
    model_flops,
    role_bytes,
    role_tiers,
    shard_bytes,
    state_bytes,
    tokens_per_step,
)
from zerojax.plan.make import Plan, make_plan
from zerojax.plan.offload_costs import (
    ATTAINED,
    TierRates,
    hiding,
    link_seconds,
    moved_bytes,
    rates_of,
    slice_bytes,
)
from zerojax.plan.wire import wire_bytes
from zerojax.zoo import build_model

WIDTH = 100
LAYERS, EMBED, SEQ, ROWS = 4, 64, 32, 64
MASTER, MOMENTS, COPY = 4, 8, 2
"""Bytes of one element: of the float32 master, of Adam's moments, of the copy in bfloat16."""


@functools.cache
def offload_plan(
    opt_state: str = DEVICE,
    params: str = DEVICE,
    activations: str = DEVICE,
    zero: int = 3,
    num_microbatches: int = 1,
    devices: int = 8,
    clip_norm: float | None = 1.0,
    **settings: bool | str,
) -> Plan:
    """A Llama on an abstract mesh, whose smallest arrays stay on the device."""
    config = ModelConfig(
        name="llama", num_layers=LAYERS, num_heads=4, embed_dim=EMBED, max_seq_len=SEQ, remat="full"
    )
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
    return make_plan(
        build_model(config, 64),
        make_abstract_mesh({}, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        zero=zero,
        num_microbatches=num_microbatches,
        optimizer=adamw(1e-3, clip_norm=clip_norm),
        persistence_threshold=5000,
        offload=OffloadConfig(
            opt_state=opt_state,
            params=params,  # type: ignore[arg-type]
            activations=activations,  # type: ignore[arg-type]
            min_elements=100,
            slice_elements=2000,
            **settings,  # type: ignore[arg-type]
        ),
    )


def sliced_elements(plan: Plan, tier: str | None = None) -> int:
    """Of one device."""
    assert plan.offload is not None
    return sum(
        (leaf.num_slices if tier is None else leaf.counts[tier]) * leaf.slice_elements
        for leaf in plan.offload.leaves.values()
    )


# Bytes by tier and role


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("shares", ["host", "nvme", "{device: 0.3, host: 0.4, nvme: 0.3}"])
def test_nothing_of_the_state_is_lost_between_tiers(shares, zero):
    plan, without = offload_plan(shares, zero=zero), offload_plan(zero=zero)
    tiers, before = role_tiers(plan), role_tiers(without)
    for role in ("master weights", "optimizer state"):
        assert sum(tiers[role].values()) == before[role][DEVICE], role
    for tier in (HOST, NVME):
        elements = sliced_elements(plan, tier)
        assert tiers["master weights"].get(tier, 0) == MASTER * elements
        assert tiers["optimizer state"].get(tier, 0) == MOMENTS * elements
    # The copy in the compute dtype that is kept beside the masters.
    assert tiers["weights"] == {DEVICE: COPY * sliced_elements(plan)}


def test_bytes_on_the_host_are_not_bytes_of_the_device():
    plan = offload_plan("{device: 0.5, host: 0.5}", params="host")
    state = plan.abstract_state
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}
    assert "pinned_host" in kinds
    assert state_bytes(plan, DEVICE) == shard_bytes(state)
    every = sum(
        leaf.dtype.itemsize * jnp.prod(jnp.array(leaf.sharding.shard_shape(leaf.shape))).item()
        for leaf in jax.tree.leaves(state)
    )
    assert state_bytes(plan, DEVICE) + state_bytes(plan, HOST) == every
    assert role_bytes(plan) == {role: t.get(DEVICE, 0) for role, t in role_tiers(plan).items()}


def test_layers_on_the_host_are_on_the_device_two_at_a_time():
    near, far = offload_plan("host", zero=0), offload_plan("host", params="host", zero=0)
    assert far.offload is not None
    leaves = [far.placement.leaves[name] for name in far.offload.streamed]
    layers = sum(far.placement.shard_elements(leaf) for leaf in leaves)
    tiers = role_tiers(far)
    assert tiers["weights"][HOST] == COPY * layers
    assert tiers["gradients"][HOST] == COPY * layers
    saved = role_tiers(near)["gradients"][DEVICE] - tiers["gradients"][DEVICE]
    assert saved == COPY * (layers - layers // LAYERS), "those of one layer are on the device"
    added = tiers["gathered weights"][DEVICE] - role_tiers(near)["gathered weights"][DEVICE]
    assert added == 2 * COPY * layers // LAYERS, "two layers"


def test_gradients_of_several_microbatches_are_summed_on_the_host():
    plan = offload_plan("host", params="host", num_microbatches=4)
    one = offload_plan("host", params="host")
    # In the accumulate dtype, float32, in place of the reduce dtype, bfloat16.
    assert role_tiers(plan)["gradients"][HOST] == 2 * role_tiers(one)["gradients"][HOST]


def test_activations_on_the_host_are_what_the_layers_are_given():
    plan = offload_plan(activations="host", num_microbatches=2)
    expected = LAYERS * (ROWS // 8 // 2) * SEQ * EMBED * 2
    assert kept_activation_bytes(plan) == expected
    assert role_tiers(plan)["activations"] == {HOST: 2 * expected}, "two buffers in a loop"
    streamed = offload_plan("host", params="host", activations="host", num_microbatches=2)
    assert kept_activation_bytes(streamed) == expected * 3 // 4, "the last one stays"
    assert "activations" not in role_bytes(plan), "those of the device no formula knows"


# What moves


def moved(plan: Plan) -> dict[str, tuple[int, int]]:
    return {part.what: (part.to_device, part.to_host) for part in moved_bytes(plan)}


def test_the_update_moves_each_slice_there_and_back():
    plan = offload_plan("{device: 0.3, host: 0.4, nvme: 0.3}")
    far, on_disk = sliced_elements(plan, HOST), sliced_elements(plan, NVME)
    (part,) = moved_bytes(plan)
    assert part.to_device == part.to_host == (MASTER + MOMENTS) * (far + on_disk)
    assert part.read == part.written == (MASTER + MOMENTS) * on_disk
    assert moved_bytes(offload_plan()) == ()


@pytest.mark.parametrize("number", [1, 4])
def test_streamed_layers_move_with_every_microbatch(number):
    plan = offload_plan("host", params="host", activations="host", num_microbatches=number)
    tiers, parts = role_tiers(plan), moved(plan)
    weights, left = tiers["weights"][HOST], tiers["gradients"][HOST]
    # The last of four layers comes once for forward and backward.
    assert parts["weights"] == (number * weights * 7 // 4, weights)
    added = number if number > 1 else 0
    assert parts["gradients"] == ((added + 1) * left, number * left)
    kept = number * (kept_activation_bytes(plan) or 0)
    assert parts["activations"] == (kept, kept)


def test_streamed_layers_are_gathered_and_reduced_in_every_microbatch():
    plan = offload_plan("host", params="host", zero=1, num_microbatches=2)
    near = offload_plan("host", zero=1, num_microbatches=2)
    assert plan.offload is not None
    leaves = [plan.placement.leaves[name] for name in plan.offload.streamed]
    ring = 7 / 8 * COPY * sum(8 * plan.placement.shard_elements(leaf) for leaf in leaves)
    more = (2 * 7 / 4 - 1) + (2 - 1)  # gathers, reductions, in place of one each
    assert wire_bytes(plan) - wire_bytes(near) == pytest.approx(more * ring)


# What hides it


RATES = TierRates(to_device=4e9, to_host=2e9, both=5e9, link="by hand", disk=1e9, disk_source="too")
CARD = dataclasses.replace(sample_card(), bf16_flops=1e12, host_bandwidth=1e9)


@pytest.mark.parametrize(
    ("to_device", "to_host", "seconds"),
    [(4e9, 0, 1.0), (0, 4e9, 2.0), (4e9, 4e9, 2.0), (9e9, 1e9, 2.25)],
)
def test_both_directions_share_the_link(to_device, to_host, seconds):
    assert link_seconds(RATES, to_device, to_host) == seconds


def test_tokens_that_hide_the_update_are_those_whose_products_last_as_long():
    plan = offload_plan("host")
    found = hiding(plan, CARD)
    tokens = tokens_per_step(plan)
    assert found is not None
    assert tokens == ROWS * SEQ
    (part,) = moved_bytes(plan)
    assert found.update_seconds == part.to_host / 1e9
    assert found.flops == ATTAINED * 1e12
    # With so many tokens all products take as long as the update does now.
    products = found.tokens * model_flops(plan) / tokens / 8 / found.flops
    assert products == pytest.approx(found.update_seconds)


def test_a_disk_without_a_rate_hides_behind_no_number_of_tokens():
    plan = offload_plan("nvme")
    unknown = hiding(plan, CARD, dataclasses.replace(RATES, disk=None))
    assert unknown is not None
    assert unknown.disk_seconds is unknown.tokens is None
    known = hiding(plan, CARD, RATES)
    assert known is not None
    (part,) = moved_bytes(plan)
    eight = 8 * (part.read + part.written)
    assert known.disk_seconds == known.update_seconds == eight / 1e9, "a machine has one disk"
    copies = hiding(offload_plan("nvme", zero=0), CARD, RATES)
    assert copies is not None
    # Copies of a shard share their files; of whole norms more are large enough to be offloaded.
    assert copies.disk_seconds == pytest.approx(known.disk_seconds, rel=0.01)


def test_an_update_in_the_backward_pass_travels_beside_its_products():
    plan = functools.partial(offload_plan, "host", params="host", clip_norm=None)
    after, within = hiding(plan(), CARD, RATES), hiding(plan(update_in_backward=True), CARD, RATES)
    assert after is not None
    assert within is not None
    assert after.update_seconds > within.update_seconds == 0
    assert within.stream_seconds > after.update_seconds


def test_activations_that_take_longer_than_the_products_are_never_hidden():
    plan = offload_plan("host", activations="host")
    slow = hiding(plan, CARD, dataclasses.replace(RATES, to_device=1e3))
    fast = hiding(plan, CARD, dataclasses.replace(RATES, to_device=1e12, to_host=1e12, both=1e12))
    assert slow is not None
    assert slow.tokens is None
    assert fast is not None
    assert fast.tokens is not None


def test_rates_of_this_machine_take_the_place_of_published_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    card = find_gpu("h200")
    published = rates_of(card, str(tmp_path))
    assert (published.to_host, published.both) == (64e9, 128e9)
    assert "as published for NVIDIA H200" in published.link
    assert published.disk == card.disk_bandwidth
    assert f"zerojax bench io {tmp_path}" in published.disk_source
    assert rates_of(find_gpu("l4"), str(tmp_path)).disk is None, "nothing is assumed"
    keep_rates(MeasuredLink(device_kind="NVIDIA H200", to_device=5.0, to_host=6.0, both=7.0))
    keep_rates(MeasuredDisk(disk=disk_name(tmp_path), write=1.0, read=2.0, both=3.0))
    measured = rates_of(card, str(tmp_path))
    assert (measured.to_device, measured.both, measured.disk) == (5.0, 7.0, 3.0)
    assert "measured here on" in measured.link
    assert "as published" in rates_of(find_gpu("h100"), str(tmp_path)).link, "another card"


# How it is shown


def test_the_table_shows_tiers_and_what_moves():
    plan = offload_plan("{host: 0.6, nvme: 0.4}", params="host", activations="host")
    page = plan.table()
    head, _, rest = page.partition("\n\nparameter ")
    assert max(map(len, head.splitlines()[1:])) <= WIDTH
    assert re.search(r"^bytes per device +device +host +disk$", head, re.MULTILINE)
    rows = {line[2:20].strip(): line[20:].split("  ") for line in head.splitlines()}
    assert {"master weights", "weights", "gradients", "activations", "sum"} <= rows.keys()
    assert re.search(r"^offload, per step +to device +to host$", head, re.MULTILINE)
    assert re.search(r"files: \S+ KiB read, \S+ KiB written", head)
    assert "slices of master, mu, nu" in head
    assert re.search(r"\d+ parameters? .*offload.* \(\S+: ", " ".join(head.split()))
    assert re.search(
        r"KiB of state per device, \S+ KiB in host memory, \S+ KiB on disk$", plan.describe()
    )
    assert rest


def test_a_plan_without_offload_says_nothing_of_it():
    plan = offload_plan()
    assert "host" not in plan.table()
    assert plan.as_dict()["offload"] is None


def test_json_has_every_number():
    plan = offload_plan("{host: 0.6, nvme: 0.4}", params="host")
    values = json.loads(json.dumps(plan.as_dict()))["offload"]
    assert values["bytes_by_tier"] == role_tiers(plan)
    assert [part["what"] for part in values["moved"]] == [p.what for p in moved_bytes(plan)]
    assert plan.offload is not None
    assert values["slices"].keys() == plan.offload.leaves.keys()
    assert values["kept"][0][1].endswith("stays on the device")
    assert values["hiding"] is None, "the card is not known"


@pytest.mark.thorough
def test_the_forecast_shows_it_and_counts_its_time(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    plan = offload_plan("host", params="host")
    forecast = zerojax.forecast(plan, gpu="h200", why_formula="by hand")
    offload = forecast.offload
    assert offload is not None
    assert offload.hiding is not None
    assert forecast.memory.host == sum(t.get(HOST, 0) for t in offload.tiers.values())
    assert forecast.memory.state == state_bytes(plan, DEVICE)
    time = forecast.estimate
    assert time.offload_seconds >= offload.hiding.update_seconds > 0
    busy = max(time.compute_seconds or 0.0, time.memory_seconds or 0.0)
    total = busy + time.exposed_wire_seconds + time.offload_seconds
    assert time.step_seconds == pytest.approx(total)
    page = forecast.page()
    assert max(map(len, page.splitlines())) <= WIDTH
    assert "\nOFFLOAD, by formula\n" in page
    assert re.search(r"\n    a machine with 8 GPUs needs \S+ MiB of host memory\n", page)
    assert "link at 64 GB/s and 64 GB/s (as published for NVIDIA H200 SXM 141 GB)" in page
    assert re.search(r"\n  offload +\d+\.\d+  \S.*update", page)
    assert "take as long as the transfers with" in page
    values = json.loads(json.dumps(forecast.as_dict()))["offload"]
    assert values["hiding"]["tokens"] == offload.hiding.tokens


@pytest.mark.thorough
def test_a_machine_needs_host_memory_for_what_lies_in_files_too(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    plan = offload_plan("nvme")
    offload = zerojax.forecast(plan, gpu="h200", why_formula="by hand").offload
    assert offload is not None
    assert plan.offload is not None
    slices = {leaf.slice_elements for leaf in plan.offload.on_disk}
    assert offload.machine_host == 3 * 8 * max(slices) * (MASTER + MOMENTS), "three buffers"


@pytest.mark.parametrize(("moments", "size"), [(jnp.float32, 8), (jnp.bfloat16, 4)])
def test_a_slice_has_the_bytes_of_its_own_moments(moments, size):
    plan = make_plan(
        (lambda key: {"w": jnp.zeros(400)}, lambda params, batch: jnp.sum(params["w"]) * batch[0]),
        make_abstract_mesh({}, 1),
        example_batch=jax.ShapeDtypeStruct((1,), jnp.float32),
        loss=lambda model, batch: model(batch),
        precision=Precision(moments_dtype=moments),
        offload=OffloadConfig(opt_state="host", min_elements=1, slice_elements=100),
    )
    assert plan.offload is not None
    assert slice_bytes(plan, plan.offload) == {"w": 100 * (MASTER + size)}
    assert moved_bytes(plan)[0].to_device == 400 * (MASTER + size)


# What helps


def remedies(plan: Plan) -> dict[str, str]:
    forecast = zerojax.forecast(plan, gpu=sample_card(), why_formula="by hand")
    lines = find_remedies(plan, CARD, forecast.memory, excess=1, fraction=0.95)
    return {line.removeprefix("try ").partition(" (")[0]: line for line in lines}


@pytest.mark.thorough
def test_offload_is_proposed_and_what_it_frees():
    plan = offload_plan(zero=3)
    found = remedies(plan)
    state = sum(role_tiers(plan)[role][DEVICE] for role in ("master weights", "optimizer state"))
    assert "move to host memory" in found["mesh.offload.opt_state=host"]
    assert f"saves about {state / 1024:.1f} KiB" in found["mesh.offload.opt_state=host"]
    assert "as published for" in found["mesh.offload.opt_state=host"]
    assert "mesh.offload.params=host" not in found, "masters go first"
    params = remedies(offload_plan("host"))
    assert "mesh.offload.params=host" in params
    assert "mesh.offload.opt_state=host" not in params


@pytest.mark.thorough
def test_a_remedy_takes_the_rate_that_was_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    plan, card = offload_plan(zero=3), find_gpu("h200")
    memory = zerojax.forecast(plan, gpu=card, why_formula="by hand").memory
    keep_rates(MeasuredLink(device_kind="NVIDIA H200", to_device=50.0, to_host=50.0, both=50.0))
    lines = find_remedies(plan, card, memory, excess=1, fraction=0.95)
    line = next(line for line in lines if line.startswith("try mesh.offload.opt_state=host"))
    state = sum(role_tiers(plan)[role][DEVICE] for role in ("master weights", "optimizer state"))
    assert re.search(re.escape(f"{2 * state / 50:.2g} s ") + ".* link measured here on", line)


def test_offload_is_not_proposed_to_an_optimizer_that_needs_whole_parameters():
    plan = offload_plan()
    tx = jax.tree_util.Partial  # anything that is not an optimizer of zerojax
    assert not [w for w in remedies(dataclasses.replace(plan, tx=tx)) if "opt_state" in w]


# Against the compiler


@pytest.mark.gpu_programs
def test_the_compiled_program_moves_what_the_formulas_say(monkeypatch):
    """At stage 1; at stage 3 it takes twice as long to compile, and agreed as well."""
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    monkeypatch.setattr(
        compile_client, "FAST_OPTIONS", compile_client.SKETCH_OPTIONS
    )  # for less work
    plan = offload_plan("host", params="host", activations="host", zero=1, num_microbatches=2)
    forecast = zerojax.forecast(plan, gpu="h200", fast=True)
    offload = forecast.offload
    assert offload is not None
    assert offload.compiled_to_device == sum(part.to_device for part in offload.moved)
    assert offload.compiled_to_host == sum(part.to_host for part in offload.moved)
    # Compiled at stage 3 there are two buffers for activations, at stage 1 there is one.
    expected = sum(tiers.get(HOST, 0) for tiers in offload.tiers.values())
    assert expected - (kept_activation_bytes(plan) or 0) <= forecast.memory.host <= expected
    sent, expected = forecast.traffic.data_wire_bytes, forecast.traffic.formula_bytes
    # The loss, its weight and the norm are sums of single numbers.
    assert 0 <= sent - expected < 1000
    roles = {row.role: row.bytes for row in forecast.memory.roles}
    assert roles["weights"] == role_tiers(plan)["weights"][DEVICE]
