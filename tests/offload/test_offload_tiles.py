"""Layers whose weights are gathered in tiles (`offload.tile_bytes`) train as with whole weights.

Tiles add up the same products in another order, so runs are equal up to rounding: `TOLERANCE`.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.offload.test_offload_params import make_optimizer
from tests.support.listed_decoders import build_decoder
from tests.support.offload_disk_runs import close, portable
from tests.support.refusals import refused
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, plan_for, text_batch, train_for
from zerojax.hardware import compile_client
from zerojax.optim.precision import LossScale, as_precision
from zerojax.plan.counts import role_tiers
from zerojax.plan.wire import wire_bytes
from zerojax.step.build import build_evaluation
from zerojax.step.initialization import init_state

WIDTH, TILE = 64, 8192
"""A layer's largest matrices have 64 KiB in float32, so they have 8 tiles."""


def text_model(name: str = "gpt2", **changes: Any) -> Any:
    return reference_model(name, **{"embed_dim": WIDTH, "remat": "full", **changes})


HOST = {"params": "host", "opt_state": "host"}
DEVICE: dict[str, Any] = {}
"""Nothing is offloaded: layers gather tiles where they read their weights."""


def options_of(
    place: dict[str, Any] = HOST, tile_bytes: int | None = TILE, **more: Any
) -> dict[str, Any]:
    """Of a run at stage 3 on 8 devices, with layers in the memory `place`."""
    sizes = {"min_elements": 100, "slice_elements": 2048, "tile_bytes": tile_bytes}
    return {
        "offload": {**place, **sizes},
        "zero": 3,
        "persistence_threshold": 1000,
        "optimizer": make_optimizer(0.5),
        **more,
    }


CASES = [
    ("gpt2", "nvme", {"num_microbatches": 2}, "full"),
    ("gpt2", "device", {"num_microbatches": 2}, "none"),
    ("llama", "host", {}, "dots"),
    ("llama", "nvme", {}, "full"),
    ("gpt2", "host", {"num_microbatches": 2}, "none"),
    ("gpt2", "host", {"mesh": {"replica": 2, "data": 4}}, "full"),
    ("gpt2", "host", {"zero": 1}, "attention"),
    ("llama", "device", {}, "dots"),
    ("llama", "device", {"freeze": ("query", "up/")}, "full"),
    ("gpt2", "device", {"mesh": {"replica": 2, "data": 4}}, "attention"),
    ("llama", "inputs on the host", {"num_microbatches": 2}, "none"),
]


def place_of(tier: str, folder: Any) -> dict[str, Any]:
    if tier == "nvme":
        return {"params": "nvme", "folder": str(folder)}
    return {"host": HOST, "device": DEVICE, "inputs on the host": {"activations": "host"}}[tier]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "tier", "more", "remat"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (at > 1)) for at, case in enumerate(CASES)],
)
def test_tiles_train_as_whole_weights(tmp_path, name, tier, more, remat):
    """With dropout, whose masks are those of the same keys."""
    model = text_model(name, dropout=0.1, remat=remat)
    runs = []
    for limit in (TILE, None):
        place = place_of(tier, tmp_path / str(limit))
        runs.append(train_for(model, steps=6, **options_of(place, limit, **more)))
    found, expected = runs
    assert found.plan.tiles.cut
    assert not expected.plan.tiles.cut
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=4 * TOLERANCE)
    mine, other = (portable(one.plan, one.state) for one in runs)
    for key, value in mine.items():
        np.testing.assert_allclose(value, other[key], rtol=0, atol=100 * TOLERANCE, err_msg=key)
    assert expected.losses[0] - expected.losses[-1] > 0.01
    for run in runs:
        close(run.state)


@pytest.mark.thorough
@pytest.mark.slow
def test_two_lists_of_layers_train_as_with_whole_weights():
    """Each becomes a loop; streamed layers need one loop.

    Gradients of this model are large (norms of 60), so steps are small. Two runs with whole weights
    were seen to differ by 2.2e-6 of the loss.
    """
    model = build_decoder("encoder_decoder", layers=4, width=WIDTH, vocab=64)
    more = {"roll_remat": "full", "devices": 2, "optimizer": zerojax.adamw(1e-4, eps=1e-5)}
    options = [options_of(DEVICE, limit, **more) for limit in (TILE, None)]
    found, expected = (train_for(model, steps=4, **each) for each in options)
    loops = {name.split("/")[0] for name in found.plan.tiles.cut}
    assert loops == {"encoder", "decoder"}
    assert expected.losses[0] - expected.losses[-1] > 1
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
    np.testing.assert_allclose(found.norms[0], expected.norms[0], rtol=1e-4)


@pytest.mark.parametrize("place", [HOST, DEVICE], ids=["host", "device"])
def test_the_plan_says_what_is_cut(place):
    """The largest matrices have 43 KiB; keys and values of Llama's grouped heads have 8 KiB."""
    plan = plan_for(text_model("llama"), **options_of(place))
    counts = {name.split("/")[-2]: tiles.count for name, tiles in plan.tiles.cut.items()}
    assert counts == {"query": 2, "output": 2, "gate": 8, "up": 8, "down": 8}
    again = {name.split("/")[-2] for name, tiles in plan.tiles.cut.items() if tiles.again}
    assert again == {"query", "output", "gate", "up"}, "the last product's result is not needed"
    line = next(line for line in plan.reasons if "tile_bytes" in line)
    assert "2 to 8 tiles" in line
    assert "4 of them once more" in line


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("remat", "more", "again"),
    [
        ("none", {}, set()),
        ("none", {"offload": {"activations": "host"}}, {"query", "key", "value", "output", "up"}),
        ("dots", {}, set()),
        ("full", {}, {"query", "key", "value", "output", "up"}),
        ("full", {"freeze": ("attention", "norm")}, {"query", "key", "value", "output", "up"}),
    ],
)
def test_layers_on_the_device_gather_again_what_they_compute_again(remat, more, again):
    options = options_of(more.get("offload", DEVICE), freeze=more.get("freeze", ()))
    plan = plan_for(text_model(remat=remat), **options)
    assert {n.split("/")[-2] for n, tiles in plan.tiles.cut.items() if tiles.again} == again
    assert len(plan.tiles.cut) == 6


def test_what_no_loop_slices_is_gathered_whole():
    plan = plan_for(text_model("llama"), **options_of(DEVICE, persistence_threshold=0))
    reasons = dict(plan.tiles.whole)
    assert reasons.keys() == {"lm_head/kernel", "token_embedding/embedding"}
    assert all("no loop" in reason for reason in reasons.values())


@pytest.mark.parametrize("place", [HOST, DEVICE], ids=["host", "device"])
def test_what_cannot_be_cut_is_named(place):
    plan = plan_for(text_model(matmul_dtype="fake_int8"), **options_of(place))
    assert not plan.tiles.cut
    reasons = dict(plan.tiles.whole)
    assert sum("custom_vjp_call" in reason for reason in reasons.values()) == 6
    assert any("cuts nothing" in line for line in plan.reasons)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", [HOST, DEVICE], ids=["host", "device"])
def test_memory_of_the_plan_falls_with_the_tiles(place):
    def gathered(limit: int | None) -> int:
        plan = plan_for(text_model(), **options_of(place, limit))
        return role_tiers(plan)["gathered weights"]["device"]

    whole, some, many = gathered(None), gathered(16384), gathered(4096)
    assert whole > 1.5 * some > 1.5 * many


REFUSED: dict[str, dict[str, Any]] = {
    "zero=0 zero=3": {"zero": 0},
    "model=2 model=1": {"mesh": {"data": 4, "model": 2}},
    "context=2 context=1": {"mesh": {"data": 4, "context": 2}},
}
REFUSED_ON_THE_DEVICE: dict[str, dict[str, Any]] = {
    "zero=2 zero=3": {"zero": 2},
    "lookup=owners lookup=gather": {"lookup": "owners"},
    "stage=2 stage=1": {"mesh": {"data": 4, "stage": 2}, "num_microbatches": 2},
    "deterministic=mesh deterministic": {"deterministic": "mesh", "virtual_shards": 8},
    "wire.weights=int8 wire.weights=compute": {"wire": {"weights": "int8"}},
    "wire.gradients=int8 wire.gradients=reduce": {"wire": {"gradients": "int8"}},
    "wire.secondary=true wire.secondary=false": {"wire": {"secondary": True}, "node": 4},
}


@pytest.mark.parametrize(
    ("place", "words"),
    [(HOST, words) for words in REFUSED]
    + [(DEVICE, words) for words in [*REFUSED, *REFUSED_ON_THE_DEVICE]],
)
def test_what_tiles_do_not_do_is_refused(place, words):
    more = {**REFUSED, **REFUSED_ON_THE_DEVICE}[words]
    call = functools.partial(plan_for, text_model(), **{**options_of(place), **more})
    refused(call, f"offload.tile_bytes={TILE}", words)


def test_update_in_backward_is_refused():
    options = options_of(optimizer=make_optimizer(None))
    options["offload"]["update_in_backward"] = True
    refused(lambda: plan_for(text_model(), **options), f"{TILE}", "update_in_backward tile_bytes")


@pytest.mark.thorough
@pytest.mark.parametrize("place", [HOST, DEVICE], ids=["host", "device"])
def test_an_evaluation_gathers_in_tiles(place):
    batch = text_batch(3)
    sums = []
    for limit in (TILE, None):
        plan = plan_for(text_model(), **options_of(place, limit))
        given = jax.device_put(batch, plan.batch_sharding)
        sums.append(float(build_evaluation(plan)(init_state(plan), given)["loss"]))
    np.testing.assert_allclose(*sums, rtol=1e-6)


@pytest.mark.thorough
def test_steps_that_overflow_in_float16_are_skipped_alike():
    """The first scale overflows. Weights have 11 bits."""
    precision = as_precision("fp16", loss_scale=LossScale(initial=2.0**20, hysteresis=1))
    options = [options_of(DEVICE, limit, precision=precision) for limit in (TILE, None)]
    found, expected = (train_for(text_model(), steps=10, **each) for each in options)
    assert int(found.state["skipped"]) == int(expected.state["skipped"]) > 0
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=2e-2)


@pytest.mark.gpu_programs
@pytest.mark.parametrize(
    ("place", "remat"),
    [(HOST, "full"), (DEVICE, "full"), (DEVICE, "none")],
    ids=["host", "device", "device-none"],
)
def test_compiled_for_gpus_a_step_sends_what_the_formula_says(monkeypatch, place, remat):
    """And its memory falls with the tiles."""
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    monkeypatch.setattr(compile_client, "FAST_OPTIONS", compile_client.SKETCH_OPTIONS)
    wide = {"embed_dim": 1024, "num_heads": 8, "num_layers": 3, "remat": remat}
    peaks = []
    for limit in (None, 2**18):
        options = options_of(place, limit, precision="bf16")
        plan = plan_for(text_model(**wide), **options)
        forecast = zerojax.forecast(plan, gpu="h200", fast=True)
        sent, expected = forecast.traffic.data_wire_bytes, forecast.traffic.formula_bytes
        assert expected == wire_bytes(plan)
        # The compiler leaves out the gather of the positions for their gradient, 6e-4 of all. One
        # matrix that is gathered once more, or once less, is 1e-2.
        assert sent == pytest.approx(expected, rel=1e-3)
        peaks.append(forecast.memory.peak)
    layer = 12 * 1024**2 * 2
    assert peaks[0] - peaks[1] > 1.5 * layer
