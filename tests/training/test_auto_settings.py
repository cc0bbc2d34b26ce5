"""`zerojax.train(model, "auto")`: the mesh options of a search for the devices that are here."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax.config import LogConfig
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import Gpu, find_gpu
from zerojax.training import auto_settings, entry
from zerojax.training.run_spec import RunSpec
from zerojax.training.search_runs import PlannedCall, SettingsFound, find_for, searched_run

H100 = find_gpu("h100")
needs_compiler = pytest.mark.skipif(
    compile_client.missing() is not None, reason=str(compile_client.missing())
)


def auto(**options: Any) -> zerojax.Trainer:
    batches = [text_batch(step) for step in range(3)]
    return zerojax.train(
        reference_model("gpt2"),
        "auto",
        batches,
        optimizer=zerojax.adamw(1e-2),
        precision="fp32",
        run_dir=None,
        log=LogConfig(console="quiet", every=1),
        **options,
    )


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """The resolved runs, as `train` gets them."""
    found: list[RunSpec] = []

    def recorded(spec: RunSpec) -> RunSpec:
        found.append(auto_settings.with_found_settings(spec))
        return found[-1]

    monkeypatch.setattr(entry, "with_found_settings", recorded)
    return found


def losses(trainer: zerojax.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.history]


@pytest.mark.slow
@needs_compiler
def test_a_run_takes_the_settings_of_the_search(
    monkeypatch: pytest.MonkeyPatch, specs: list[RunSpec]
) -> None:
    """The devices are CPUs that are taken for H100s, so that the plan found for these can run."""
    monkeypatch.setattr(auto_settings, "gpu_of_device", lambda kind: H100)
    monkeypatch.setattr(auto_settings, "SECONDS", 5.0)
    results = []

    def recorded(call: PlannedCall, *rest: Any, **options: Any) -> SettingsFound:
        results.append(find_for(call, *rest, **options))
        return results[0]

    monkeypatch.setattr(auto_settings, "find_for", recorded)
    trainer = auto()
    plan, (found,) = trainer.plan, results
    assert dataclasses.replace(plan.settings, data=-1) == dataclasses.replace(found.mesh, data=-1)
    assert plan.num_microbatches == found.num_microbatches
    assert any(found.result.sentence in reason for reason in specs[0].reasons)
    alone = zerojax.train(
        reference_model("gpt2"),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        [text_batch(step) for step in range(3)],
        optimizer=zerojax.adamw(1e-2),
        precision="fp32",
        run_dir=None,
        log=LogConfig(console="quiet", every=1),
    )
    np.testing.assert_allclose(losses(trainer), losses(alone), rtol=1e-5)


@pytest.mark.thorough
@needs_compiler
def test_a_model_that_fits_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(H100, memory_bytes=2**14, memory_gb=1e-5)
    monkeypatch.setattr(auto_settings, "gpu_of_device", lambda kind: tiny)
    with pytest.raises(ValueError, match='"auto".*fit'):
        auto()


@needs_compiler
def test_a_number_of_microbatches_of_the_call_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def listed(call: PlannedCall, gpu: Gpu, devices: int, **options: Any) -> SettingsFound:
        del options["budget"]
        candidates = searched_run(call, gpu, devices, **options).candidates
        assert {candidate.num_microbatches for candidate in candidates} == {2}
        raise Stopped

    monkeypatch.setattr(auto_settings, "gpu_of_device", lambda kind: H100)
    monkeypatch.setattr(auto_settings, "find_for", listed)
    with pytest.raises(Stopped):
        auto(num_microbatches=2)


@pytest.mark.thorough
def test_devices_without_a_description_keep_the_defaults(specs: list[RunSpec]) -> None:
    trainer = auto()
    assert dataclasses.replace(trainer.plan.settings, data=-1) == zerojax.MeshConfig()
    assert any('"auto"' in reason and "cpu" in reason for reason in specs[0].reasons)
