"""The roofline against arithmetic done by hand, JAX's share of a card, and what would help."""

import dataclasses
import re

import pytest

from tests.support.forecast_samples import GIB, sample_memory, sample_plan, sample_row
from zerojax.forecasting import forecast_page
from zerojax.forecasting.remedies import accumulation_bytes
from zerojax.forecasting.roofline import (
    estimate,
    link_bandwidth,
    members_per_node,
    memory_fraction,
    network_share,
    verdict,
    with_network_bytes,
)
from zerojax.hardware.gpus import find_gpu
from zerojax.plan.counts import role_bytes
from zerojax.plan.offload_costs import Hiding, TierRates
from zerojax.schedules import lower, make_schedule

MESH = {"replica": 1, "data": 8, "stage": 1, "model": 1}
# 1e12 FLOP/s, 1e9 B/s of memory, 1e8 B/s in a node, 1e7 B/s between nodes: seconds by hand.
CARD = dataclasses.replace(
    find_gpu("h100"),
    bf16_flops=1e12,
    fp32_flops=None,
    memory_bandwidth=1e9,
    node_bandwidth=1e8,
    network_bandwidth=1e7,
    node_devices=4,
    memory_bytes=64 * GIB,
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """JAX's own share of a card, whatever the shell says."""
    for name in (
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_ALLOCATOR",
    ):
        monkeypatch.delenv(name, raising=False)


def roofline(**changes):
    arguments = {
        "mesh": MESH,
        "dtype": "bfloat16",
        "flops": 4e12,
        "model_flops": 3e12,
        "hbm_bytes": 2_000_000_000,
        "rows": (),
        "tokens": 1000,
    }
    return estimate(CARD, **{**arguments, **changes})


# Time


def test_compute_bound_without_traffic():
    result = roofline()
    assert result.compute_seconds == 4.0
    assert result.memory_seconds == 2.0
    assert result.wire_seconds == result.exposed_wire_seconds == 0.0
    assert result.step_seconds == 4.0
    assert result.bound_by == "compute"
    assert result.mfu == pytest.approx(3 / 4)  # model FLOPs alone: what is repeated does not count
    assert result.tokens_per_second == 250.0


def test_what_the_schedule_does_not_hide_comes_on_top():
    rows = [sample_row(wire_bytes=100_000_000, hidden=0.75)]  # 1 s inside a node
    result = roofline(rows=rows)
    assert result.wire_seconds == 1.0
    assert result.exposed_wire_seconds == 0.25
    assert result.step_seconds == 4.25


def test_wire_cannot_hide_behind_less_work_than_it_takes():
    rows = [sample_row(wire_bytes=1_000_000_000, hidden=1.0)]  # 10 s beside 4 s of work
    result = roofline(rows=rows)
    assert result.exposed_wire_seconds == 6.0
    assert result.step_seconds == 10.0
    assert result.bound_by == "wire"


def test_memory_bound():
    result = roofline(hbm_bytes=9_000_000_000)
    assert (result.step_seconds, result.bound_by) == (9.0, "memory")


def test_without_a_compiled_program_the_formula_sends_and_hides_all_it_can():
    result = roofline(hbm_bytes=None, formula_bytes=1_000_000_000)
    # 8 devices on nodes of 4: 4 rings of 1e7 B/s each.
    assert result.wire_seconds == 25.0
    assert result.step_seconds == 25.0
    assert result.memory_seconds is None


def test_by_formula_a_pipeline_sends_to_its_neighbours():
    mesh = {**MESH, "data": 2, "stage": 4}
    result = roofline(hbm_bytes=None, formula_bytes=10**8, message_bytes=3 * 10**8, mesh=mesh)
    # A stage is a neighbour in the node: 3 s. A ring of `data` leaves it, one device in each.
    assert result.wire_seconds == 3.0 + 10.0
    outside = roofline(hbm_bytes=None, message_bytes=10**8, mesh={**MESH, "data": 1, "stage": 8})
    assert outside.wire_seconds == 10.0, "a message has the network card of its sender alone"


@pytest.mark.parametrize(
    ("update", "stream", "disk", "expected"),
    [
        (9.0, 3.0, 0.0, (13.0, "link")),
        (9.0, 3.0, 9.0, (13.0, "disk")),
        (0.0, 9.0, 0.0, (9.0, "link")),  # 5 s of it are longer than the products
        (1.0, 3.0, 1.0, (5.0, "compute")),
    ],
)
def test_offload_comes_on_top_and_may_bound_the_step(update, stream, disk, expected):
    hiding = Hiding(
        rates=TierRates(to_device=1, to_host=1, both=2, link="", disk=1, disk_source=""),
        update_seconds=update,
        stream_seconds=stream,
        disk_seconds=disk,
        flops=1.0,
        tokens=None,
    )
    result = roofline(hiding=hiding)
    assert (result.step_seconds, result.bound_by) == expected
    lines = [" ".join(row) for row in forecast_page._step_rows(result, scale=1.0, digits=1)]
    assert f"step {expected[0]:.1f}" in lines[-1]


def test_no_peak_is_no_estimate():
    result = roofline(dtype="float32")
    assert result.compute_seconds is None
    assert (result.step_seconds, result.bound_by, result.mfu) == (None, None, None)
    assert result.tokens_per_second is None


@pytest.mark.parametrize(
    ("mesh", "axis", "members"),
    [
        ({"data": 8, "model": 1}, "data", 4),
        ({"data": 4, "model": 2}, "data", 2),
        ({"data": 2, "model": 4}, "data", 1),
        ({"data": 2, "model": 4}, "model", 4),
        ({"data": 2, "model": 8}, "model", 4),
        ({"data": 4, "model": 2}, "data+model", 4),
        ({"replica": 2, "data": 4, "model": 1}, "replica", 1),
        ({"data": 2, "model": 1}, "data", 2),
        ({"data": 8}, "elsewhere", 1),
    ],
)
def test_members_per_node(mesh, axis, members):
    assert members_per_node(mesh, axis, 4) == members


@pytest.mark.parametrize(
    ("row", "bandwidth"),
    [
        (sample_row(crosses_nodes=False), 1e8),
        (sample_row(crosses_nodes=True), 4e7),
        # 4 of 7 parts leave the node
        (sample_row(crosses_nodes=True, kind="all-to-all"), 1.75e7),
        (sample_row(crosses_nodes=True, kind="collective-permute"), 1e7),
        (sample_row(crosses_nodes=True, kind="all-to-all", axis="model"), 1e7),
        (sample_row(crosses_nodes=True, axis="model"), 1e7),
    ],
)
def test_links(row, bandwidth):
    assert link_bandwidth(CARD, MESH, row) == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all-gather", 1 / 8),
        ("reduce-scatter", 1 / 8),
        ("all-to-all", 56 / 63),
        ("collective-permute", 1),
    ],
)
def test_shares_between_nodes(kind, share):
    eight = dataclasses.replace(CARD, node_devices=8)
    mesh = {"data": 64, "model": 1}
    row = sample_row(kind=kind, crosses_nodes=True)
    assert network_share(eight, mesh, row) == pytest.approx(share)
    assert with_network_bytes(eight, mesh, row).network_bytes == round(row.wire_bytes * share)
    assert network_share(eight, mesh, sample_row(kind=kind, crosses_nodes=False)) == 0


def test_the_group_that_was_compiled_counts_where_it_is_known():
    """Of the second of two levels each of 8 devices is in a node of its own."""
    eight = dataclasses.replace(CARD, node_devices=8)
    row = sample_row(kind="all-to-all", crosses_nodes=True, group=(8, 1))
    assert network_share(eight, {"data": 64}, row) == 1
    ring = sample_row(crosses_nodes=True, group=(16, 2))
    assert network_share(eight, {"data": 64}, ring) == 1 / 2


def test_a_flat_sum_in_8_bits_sends_more_between_nodes_than_one_in_16():
    """For each parameter and GPU of 64: 0.875 bytes against 0.246, though half in all."""
    eight = dataclasses.replace(CARD, node_devices=8)
    parameters = 64 * 10**6
    rows = [
        sample_row(kind=kind, crosses_nodes=True, wire_bytes=bytes_each * parameters * 63 // 64)
        for kind, bytes_each in (("all-to-all", 1), ("reduce-scatter", 2))
    ]
    codes, sums = (with_network_bytes(eight, {"data": 64}, row) for row in rows)
    assert codes.wire_bytes == sums.wire_bytes / 2
    assert codes.network_bytes / parameters == pytest.approx(0.875)
    assert sums.network_bytes / parameters == pytest.approx(0.246, abs=5e-4)


def test_rings_are_never_faster_than_the_fabric():
    fast = dataclasses.replace(CARD, network_bandwidth=9e7)
    assert link_bandwidth(fast, MESH, sample_row(crosses_nodes=True)) == 1e8


# JAX's share


@pytest.mark.parametrize(
    ("environ", "fraction"),
    [
        ({}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, 0.9),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, 0.5),
        ({"XLA_CLIENT_MEM_FRACTION": "1.2"}, 1.0),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 1.0),
    ],
)
def test_the_share_that_jax_takes(environ, fraction):
    found, source = memory_fraction(environ)
    assert found == fraction
    assert all(name in source for name in environ)


# Verdict


def test_it_fits():
    result = verdict(sample_plan(), CARD, sample_memory())
    assert result.fits is True
    assert result.limit == 48 * GIB
    assert result.headroom == result.limit - result.needed > 0
    assert not [line for line in result.reasons if line.startswith(("try", "tight"))]


def test_a_tight_fit_is_said():
    spare = sample_memory(activations=32 * GIB)  # 47.04 of 48
    result = verdict(sample_plan(), CARD, spare)
    assert result.fits is True
    assert any(line.startswith("tight: less than 3%") for line in result.reasons)


def test_formulas_can_refuse_but_not_approve():
    small = verdict(sample_plan(), CARD, sample_memory(compiled=False))
    assert small.fits is None
    large = verdict(sample_plan(), CARD, sample_memory(compiled=False, scale=10))
    assert large.fits is False
    assert large.needed == sample_memory(compiled=False, scale=10).formula_peak


def remedies(plan, memory=None, card=CARD):
    result = verdict(plan, card, memory or sample_memory(activations=45 * GIB))
    assert result.fits is False
    assert result.reasons[1].startswith("most of it: activations, 45.0 GiB (75%)") or memory
    return [line.removeprefix("try ") for line in result.reasons if line.startswith("try ")]


def words(lines):
    return [re.split(r" \(| in ", line)[0] for line in lines]


def test_remedies_stand_in_order_and_each_is_for_this_plan():
    assert words(remedies(sample_plan(devices=8, zero=1, rows=64))) == [
        "--devices 16",
        "mesh.zero=2",
        "mesh.zero=3",
        "num_microbatches=2",
        "num_microbatches=8",
        "model.remat=full",
        "mesh.offload.opt_state=host",
        "mesh.data=-1 mesh.model=2",
        "XLA_CLIENT_MEM_FRACTION=0.95",
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("settings", "absent"),
    [
        ({"zero": 3}, "mesh.zero"),
        ({"devices": 1, "zero": 1}, "mesh.zero"),
        ({"remat": "full"}, "model.remat"),
        ({"rows": 8}, "num_microbatches"),
        ({"rows": 8}, "--devices"),
        ({"model": 4}, "mesh.model"),  # a node of this card has 4
        ({"delayed": True}, "offload.params"),  # which it excludes
    ],
)
def test_a_remedy_that_cannot_help_this_plan_is_not_named(settings, absent):
    lines = words(remedies(sample_plan(**settings)))
    assert lines
    assert not [line for line in lines if absent in line]


def test_what_is_known_to_be_enough_is_said():
    lines = remedies(sample_plan(devices=8, zero=1, rows=64))  # 60 of 48 GiB: 12 too much
    by_words = dict(zip(words(lines), lines, strict=True))
    # activations are 45 GiB; (3 + 6) of state is split already, so half of both goes
    assert "(saves about 27.0 GiB, enough)" in by_words["--devices 16"]
    assert "(saves about 3.5 GiB)" in by_words["mesh.zero=2"]  # 4 GiB x 7/8
    assert "(saves about 5.3 GiB)" in by_words["mesh.zero=3"]  # (4 + 2) GiB x 7/8


def test_the_peak_may_move_to_a_moment_with_more_gradients():
    memory = sample_memory(activations=45 * GIB)  # 60 of 48 GiB
    whole = [
        dataclasses.replace(row, formula=14 * GIB) if row.role == "gradients" else row
        for row in memory.roles  # 4 GiB of them are there at the peak
    ]
    lines = remedies(
        sample_plan(devices=8, zero=1, rows=64), dataclasses.replace(memory, roles=tuple(whole))
    )
    by_words = dict(zip(words(lines), lines, strict=True))
    # 12 GiB too much; 4.8 more, a tenth of the limit, would be sure.
    assert "(saves about 17.0 GiB, enough)" in by_words["--devices 16"]
    assert "(saves about 12.5 GiB, perhaps enough)" in by_words["num_microbatches=2"]
    assert ", enough)" in by_words["num_microbatches=8"]


def test_formulas_do_not_know_what_is_enough():
    """They leave out activations, so what they call enough may still not fit."""
    lines = remedies(sample_plan(), sample_memory(compiled=False, scale=4))
    assert any("mesh.zero=3" in line and ", enough without activations)" in line for line in lines)
    assert not [line for line in lines if "enough)" in line]


def test_formulas_propose_nothing_about_activations():
    lines = words(remedies(sample_plan(), sample_memory(compiled=False, scale=10)))
    assert "mesh.zero=3" in lines
    assert not [line for line in lines if "microbatches" in line or "remat" in line]


def test_a_pipeline_can_keep_less_or_have_more_stages():
    plan = sample_plan(devices=8, zero=1, rows=64, num_microbatches=8, stage=2)
    lines = remedies(plan, sample_memory(activations=45 * GIB))
    found = words(lines)
    assert "mesh.data=-1 mesh.stage=4" in found, "four layers"
    assert "mesh.stash=input" not in found, "its buffers are some MiB: not worth a line"
    layout = dataclasses.replace(plan.pipeline, stash_bytes=2 * GIB)
    lines = remedies(
        dataclasses.replace(plan, pipeline=layout), sample_memory(activations=45 * GIB)
    )
    by_words = dict(zip(words(lines), lines, strict=True))
    # Three microbatches in flight, and a spare slot.
    assert "saves about 8.0 GiB" in by_words["mesh.stash=input"]
    assert "mesh.pipeline_schedule=1f1b" not in by_words


def test_gpipe_keeps_all_microbatches():
    plan = sample_plan(devices=8, zero=1, rows=64, num_microbatches=8, stage=2)
    table = lower(make_schedule("gpipe", stages=2, microbatches=8))
    layout = dataclasses.replace(plan.pipeline, table=table, stash_bytes=GIB)
    lines = remedies(
        dataclasses.replace(plan, pipeline=layout), sample_memory(activations=45 * GIB)
    )
    by_words = dict(zip(words(lines), lines, strict=True))
    assert "saves about 5.0 GiB" in by_words["mesh.pipeline_schedule=1f1b"], "8 in place of 3"
    assert not [line for line in by_words if line.startswith("num_microbatches")]


def test_without_a_pipeline_stages_are_a_remedy_where_they_divide_the_layers():
    two = sample_plan(devices=8, zero=1, rows=64, num_microbatches=2)
    assert "mesh.data=-1 mesh.stage=2" in words(remedies(two))
    one = sample_plan(devices=8, zero=1, rows=64)
    assert not [line for line in words(remedies(one)) if "mesh.stage" in line]


def test_nothing_helps():
    activations = {"master_weights": 0, "optimizer_state": 0, "gathered_weights": 0, "gradients": 0}
    memory = sample_memory(activations=900 * GIB, **activations)
    plan = sample_plan(zero=3, rows=8, remat="full")
    result = verdict(plan, CARD, memory)
    assert result.reasons[-1].startswith("no setting of this plan makes it fit")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_accumulation_adds_is_what_the_plan_counts(zero):
    one, two = (sample_plan(zero=zero, num_microbatches=number) for number in (1, 2))
    added = role_bytes(two)["gradients"] - role_bytes(one)["gradients"]
    assert accumulation_bytes(one) == added > 0
