"""Inputs of layers that wait in files for the backward pass (`offload.activations: nvme`).

They are read back to the bit, so a run is that with inputs in host memory, to the bit.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.offload.test_offload_pages import DROPOUT, batch_on, one_device, options_of, paged
from tests.support.offload_disk_runs import close, steps_as_undisturbed
from tests.support.pipeline_runs import small
from tests.support.refusals import refused
from tests.support.trajectories import plan_for, train_for
from zerojax.checkpoint.store import StoreError
from zerojax.config import OffloadConfig
from zerojax.config.loader import ConfigError
from zerojax.plan.counts import ACTIVATIONS, kept_activation_bytes, role_tiers
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state


@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "microbatches"), [(3, 2), (1, 1)])
def test_the_bits_of_inputs_in_host_memory(tmp_path, zero, microbatches):
    runs = [
        train_for(
            small(**DROPOUT),
            offload=paged(tmp_path / tier, activations=tier),
            **options_of(zero, microbatches, steps=3),
        )
        for tier in ("host", "nvme")
    ]
    for run in runs:
        close(run.state)
    there, files = runs
    np.testing.assert_array_equal(files.losses, there.losses)
    np.testing.assert_array_equal(files.norms, there.norms)
    assert there.losses[0] != there.losses[-1]
    waiting = [role_tiers(run.plan)[ACTIVATIONS] for run in runs]
    size = kept_activation_bytes(files.plan)
    assert waiting == [{"host": size}, {"nvme": size}]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("pwritev", 28, "inputs: bucket 0 could not be written: No space left"),
        ("preadv", 5, "inputs: bucket 1 could not be read: Input/output error"),
    ],
)
def test_a_full_disk_and_a_failed_read_lose_nothing(tmp_path, monkeypatch, call, number, words):
    """The same state steps again, to the bits of a run without the failure."""
    plan = one_device(tmp_path / "failing", inputs="nvme")
    state, step = init_state(plan), build_step(plan)
    real = getattr(os, call)

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent.name == "inputs":
            raise OSError(number, os.strerror(number))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError, match=words) as error:
        step(state, batch_on(plan))
    monkeypatch.undo()
    assert "\n" not in str(error.value)
    steps_as_undisturbed(plan, state, step, one_device(tmp_path / "whole"), batch_on(plan))


@pytest.mark.parametrize("params", ["device", "host"])
def test_inputs_in_files_need_layers_in_files(params):
    refused(
        lambda: OffloadConfig(activations="nvme", params=params),
        "activations nvme",
        ["params: nvme", "activations: host"],
        error=ConfigError,
    )


def test_a_single_layer_keeps_its_input(tmp_path):
    """Its input goes straight to the backward pass: there is no file of inputs."""
    plan = plan_for(
        small(layers=1, width=32),
        offload=paged(tmp_path, activations="nvme", slice_elements=1024, min_elements=512),
        **options_of(devices=1),
    )
    state = init_state(plan)
    assert state["disk"].pages.inputs is None
    close(state)
