"""Layers whose weights are gathered in tiles (`offload.tile_bytes`) train as with whole weights.

Tiles add up the same products in another order, so runs are equal up to rounding: `TOLERANCE`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.offload.test_offload_params import make_optimizer
from tests.support.offload_disk_runs import close, portable
from tests.support.refusals import refused
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, plan_for, text_batch, train_for
from zerojax.hardware import compile_client
from zerojax.parallel.initialization import init_state
from zerojax.parallel.step import build_evaluation
from zerojax.plan.counts import role_tiers
from zerojax.plan.wire import wire_bytes

WIDTH, TILE = 64, 8192
"""A layer's largest matrices have 64 KiB in float32, so they have 8 tiles."""


def text_model(name: str = "gpt2", **changes: Any) -> Any:
    return reference_model(name, **{"embed_dim": WIDTH, "remat": "full", **changes})


def options_of(folder: Any = None, tile_bytes: int | None = TILE, **more: Any) -> dict[str, Any]:
    """Of a run at stage 3 on 8 devices, with layers in host memory, or in files in `folder`."""
    place = {"params": "host", "opt_state": "host"} if folder is None else {"params": "nvme"}
    place |= {} if folder is None else {"folder": str(folder)}
    place |= {"min_elements": 100, "slice_elements": 2048, "tile_bytes": tile_bytes}
    return {
        "offload": place,
        "zero": 3,
        "persistence_threshold": 1000,
        "optimizer": make_optimizer(0.5),
        **more,
    }


CASES = [
    ("gpt2", "nvme", {"num_microbatches": 2}, "full"),
    ("llama", "host", {}, "dots"),
    ("llama", "nvme", {}, "full"),
    ("gpt2", "host", {"num_microbatches": 2}, "none"),
    ("gpt2", "host", {"mesh": {"replica": 2, "data": 4}}, "full"),
    ("gpt2", "host", {"zero": 1}, "attention"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "tier", "more", "remat"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (at > 0)) for at, case in enumerate(CASES)],
)
def test_tiles_train_as_whole_weights(tmp_path, name, tier, more, remat):
    """With dropout, whose masks are those of the same keys."""
    model = text_model(name, dropout=0.1, remat=remat)
    runs = []
    for limit in (TILE, None):
        folder = tmp_path / str(limit) if tier == "nvme" else None
        runs.append(train_for(model, steps=6, **options_of(folder, limit, **more)))
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


def test_the_plan_says_what_is_cut():
    """The largest matrices have 43 KiB; keys and values of Llama's grouped heads have 8 KiB."""
    plan = plan_for(text_model("llama"), **options_of())
    counts = {name.split("/")[-2]: tiles.count for name, tiles in plan.tiles.cut.items()}
    assert counts == {"query": 2, "output": 2, "gate": 8, "up": 8, "down": 8}
    again = {name.split("/")[-2] for name, tiles in plan.tiles.cut.items() if tiles.again}
    assert again == {"query", "output", "gate", "up"}, "the last product's result is not needed"
    (line,) = [line for line in plan.reasons if "tile_bytes" in line]
    assert "2 to 8 tiles" in line
    assert "4 of them once more" in line


def test_what_cannot_be_cut_is_named():
    plan = plan_for(text_model(matmul_dtype="fake_int8"), **options_of())
    assert not plan.tiles.cut
    reasons = dict(plan.tiles.whole)
    assert len(reasons) == 6
    assert all("custom_vjp_call" in reason for reason in reasons.values())
    assert any("cuts nothing" in line for line in plan.reasons)


def test_memory_of_the_plan_falls_with_the_tiles():
    def gathered(limit: int | None) -> int:
        plan = plan_for(text_model(), **options_of(None, limit))
        return role_tiers(plan)["gathered weights"]["device"]

    whole, some, many = gathered(None), gathered(16384), gathered(4096)
    assert whole > 1.5 * some > 1.5 * many


REFUSED: dict[str, dict[str, Any]] = {
    "zero=0 zero=3": {"zero": 0},
    "model=2 model=1": {"mesh": {"data": 4, "model": 2}},
    "context=2 context=1": {"mesh": {"data": 4, "context": 2}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_tiles_do_not_do_is_refused(words):
    call = functools.partial(plan_for, text_model(), **{**options_of(), **REFUSED[words]})
    refused(call, f"offload.tile_bytes={TILE}", words)


def test_update_in_backward_is_refused():
    options = options_of(optimizer=make_optimizer(None))
    options["offload"]["update_in_backward"] = True
    refused(lambda: plan_for(text_model(), **options), f"{TILE}", "update_in_backward tile_bytes")


@pytest.mark.thorough
def test_an_evaluation_gathers_in_tiles():
    batch = text_batch(3)
    sums = []
    for limit in (TILE, None):
        plan = plan_for(text_model(), **options_of(None, limit))
        given = jax.device_put(batch, plan.batch_sharding)
        sums.append(float(build_evaluation(plan)(init_state(plan), given)["loss"]))
    np.testing.assert_allclose(*sums, rtol=1e-6)


@pytest.mark.gpu_programs
@pytest.mark.skipif(compile_client.missing() is not None, reason=str(compile_client.missing()))
def test_compiled_for_gpus_a_step_sends_what_the_formula_says(monkeypatch):
    """And its memory falls with the tiles."""
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    monkeypatch.setattr(compile_client, "FAST_OPTIONS", compile_client.SKETCH_OPTIONS)
    wide = {"embed_dim": 1024, "num_heads": 8, "num_layers": 3}
    peaks = []
    for limit in (None, 2**18):
        options = options_of(None, limit, precision="bf16")
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
