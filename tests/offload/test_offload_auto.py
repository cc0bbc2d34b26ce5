"""`offload.auto`: the least offload with which the compiled step fits, and what it is equal to."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zerojax
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax.config import LogConfig, OffloadConfig
from zerojax.config.loader import ConfigError
from zerojax.forecasting import forecast
from zerojax.forecasting.offload_choice import OffloadChoice, choose_offload
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.make import Plan, make_plan, plan_of
from zerojax.training import run_spec

H100 = find_gpu("h100")
AUTO = {"auto": True, "min_elements": 1}
needs_compiler = pytest.mark.skipif(
    compile_client.missing() is not None, reason=str(compile_client.missing())
)


def plan_with(offload: OffloadConfig) -> Plan:
    return make_plan(
        reference_model("gpt2", remat="full"),
        make_abstract_mesh({}, 2, gpu=H100),
        example_batch=text_batch(0),
        zero=3,
        offload=offload,
        precision="bf16",
    )


def chosen(
    fits: Callable[[OffloadConfig], bool],
    seconds: Callable[[OffloadConfig], float] = lambda offload: 1.0,
    **options: Any,
) -> OffloadChoice:
    """The choice if the compiler said that the step fits with the offload for which `fits`, and
    takes these seconds."""

    def compile_plan(plan: Plan) -> Any:
        found = forecast(plan, gpu=H100, why_formula="a test")
        verdict = dataclasses.replace(
            found.verdict, fits=fits(plan.settings.offload), headroom=2**14
        )
        time = dataclasses.replace(found.estimate, step_seconds=seconds(plan.settings.offload))
        return dataclasses.replace(found, verdict=verdict, estimate=time)

    asked = OffloadConfig(**AUTO)
    return choose_offload(
        plan_with, asked, H100, compile_plan=compile_plan, **{"files": False, **options}
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fits", "places"),
    [
        (lambda offload: True, ("device", "device", "device")),
        (lambda offload: offload.opt_state == "host", ("host", "device", "device")),
        (lambda offload: offload.activations == "host", ("host", "device", "host")),
        (lambda offload: offload.params != "device", ("host", "host", "device")),
        (lambda offload: offload.params == "nvme", ("nvme", "nvme", "device")),
    ],
)
def test_the_first_offload_that_fits_is_chosen(fits, places):
    found = chosen(fits, files=True)
    offload = found.plan.settings.offload
    assert (offload.opt_state, offload.params, offload.activations) == places
    assert found.sentence in found.plan.reasons
    assert found.plan.remake(make_abstract_mesh({}, 4)).reasons.count(found.sentence) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("slow", ["activations", "params"])
def test_of_two_that_fit_the_faster_one_is_chosen(slow: str) -> None:
    found = chosen(
        lambda offload: offload.on_host and (offload.activations, offload.params).count("host"),
        lambda offload: 2.0 if getattr(offload, slow) == "host" else 1.0,
    )
    assert getattr(found.plan.settings.offload, slow) == "device"
    assert f"mesh.offload.{slow}" in found.sentence


@pytest.mark.thorough
def test_a_share_of_the_state_that_fits_stays_on_the_device() -> None:
    found = chosen(lambda offload: offload.moves_opt_state)
    shares = found.plan.settings.offload.shares
    assert 0.05 <= shares["device"] < 1
    assert shares["device"] + shares["host"] == pytest.approx(1)


@pytest.mark.thorough
def test_what_the_host_cannot_hold_goes_to_files() -> None:
    def check(plan: Plan) -> None:
        if plan.settings.offload.on_host:
            raise ValueError("offload needs 9 GiB of host memory")

    fits = lambda offload: not offload.is_off  # noqa: E731
    found = chosen(fits, files=True, check=check)
    assert found.plan.settings.offload.params == "nvme"
    assert "9 GiB" in found.sentence
    with pytest.raises(ValueError, match=r"9 GiB.*offload\.folder"):
        chosen(fits, check=check)


@pytest.mark.thorough
def test_formulas_rule_out_without_a_compilation() -> None:
    tiny = dataclasses.replace(H100, memory_bytes=2**10, memory_gb=1e-6)

    def compile_plan(plan: Plan) -> Any:
        raise AssertionError("compiled")

    with pytest.raises(ValueError, match="does not fit"):
        choose_offload(
            plan_with, OffloadConfig(**AUTO), tiny, files=False, compile_plan=compile_plan
        )


@pytest.mark.parametrize("other", [{"opt_state": "host"}, {"params": "host"}])
def test_auto_excludes_what_it_chooses(other: dict[str, str]) -> None:
    (name,) = other
    with pytest.raises(ConfigError, match=f"{name}.*auto"):
        OffloadConfig(auto=True, **other)


def test_a_plan_alone_does_not_choose() -> None:
    with pytest.raises(ValueError, match=r"zerojax\.search"):
        plan_with(OffloadConfig(auto=True))


def train(offload: dict[str, Any], **model: Any) -> zerojax.Trainer:
    return zerojax.train(
        reference_model("gpt2", remat="full", **model),
        {"zero": 3, "offload": offload},
        [text_batch(step) for step in range(3)],
        optimizer=zerojax.adamw(1e-2),
        precision="fp32",
        run_dir=None,
        log=LogConfig(console="quiet", every=1),
    )


def losses(trainer: zerojax.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.history]


@pytest.mark.thorough
def test_on_a_cpu_nothing_is_offloaded() -> None:
    trainer = train(AUTO)
    assert trainer.plan.settings.offload.is_off
    assert any("offload.auto" in reason for reason in trainer.plan.reasons)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@needs_compiler
def test_a_run_takes_the_offload_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices are taken for GPUs whose memory lies between two compiled peaks.

    It is hardly more than the smaller one, since the compiler recomputes where memory is tight.
    """
    wide = {"embed_dim": 256, "num_layers": 4}
    without = train({}, **wide).plan
    planned = lambda offload: plan_of(  # noqa: E731
        without.inputs, without.mesh, zero=3, offload=offload
    )
    peaks = [
        forecast(planned(offload), gpu=H100, fast=True)
        for offload in (OffloadConfig(), OffloadConfig(opt_state="host", min_elements=1))
    ]
    needed, less = (found.memory.peak for found in peaks)
    assert needed is not None
    assert less is not None
    assert less < 0.9 * needed
    fraction = peaks[0].verdict.limit / H100.memory_bytes
    card = dataclasses.replace(H100, memory_bytes=int(1.01 * less / fraction))
    monkeypatch.setattr(run_spec, "gpu_of_device", lambda kind: card)
    trainer = train(AUTO, **wide)
    offload = trainer.plan.settings.offload
    assert "host" in offload.shares
    assert offload.params == "device"
    np.testing.assert_allclose(losses(trainer), losses(train({}, **wide)), rtol=1e-6)
