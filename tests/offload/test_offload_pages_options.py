"""Layers in files with other options of a run, each against the same run on the device.

Tolerances are those of `tests.offload.test_offload_pages`, whose programs are the same.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.offload.test_offload_pages import MODEL, options_of, paged
from tests.support.offload_disk_runs import close, portable
from tests.support.pipeline_runs import SmallText, small
from tests.support.trajectories import TOLERANCE, Trajectory, train_for
from zerojax.models.losses import next_token
from zerojax.optim.precision import LossScale, as_precision


def both(folder: Any, *, inputs: str = "device", **more: Any) -> tuple[Trajectory, Trajectory]:
    """(layers in files, everything on the device), the first one's files closed."""
    given = options_of(2, devices=2, steps=3) | more
    files = train_for(small(**MODEL), offload=paged(folder, activations=inputs), **given)
    found = portable(files.plan, files.state)
    close(files.state)
    device = train_for(small(**MODEL), **given)
    assert files.plan.offload.paged
    for name, value in portable(device.plan, device.state).items():
        tolerance = 100 * TOLERANCE
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(files.losses, device.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(files.norms, device.norms, rtol=4 * TOLERANCE)
    return files, device


GROUPS = {"^blocks/.*kernel": {"learning_rate_factor": 0.1, "weight_decay": 0.0}}
OPTIMIZERS = {
    "groups": {"weight_decay": 0.3, "groups": GROUPS},
    "mask": {"weight_decay": 0.3, "mask": zerojax.optim.decay_mask},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_groups_and_masks_hold_for_layers_in_files(tmp_path, case):
    """And they matter: without them the run is another one."""
    options = OPTIMIZERS[case]
    make = lambda more: zerojax.adamw(0.05, eps=1e-5, clip_norm=0.1, **more)  # noqa: E731
    files, _ = both(tmp_path, optimizer=make(options))
    decay = {"weight_decay": options["weight_decay"]}
    plain = train_for(small(**MODEL), **options_of(2, devices=2, steps=3, optimizer=make(decay)))
    assert abs(plain.losses[-1] - files.losses[-1]) > 10 * TOLERANCE


@pytest.mark.thorough
def test_inputs_on_the_host(tmp_path):
    both(tmp_path, inputs="host", num_microbatches=2)


@pytest.mark.thorough
def test_steps_that_overflow_in_float16_are_skipped_alike(tmp_path):
    """The first scale overflows, so that masters, moments and weights in files must not change."""
    precision = as_precision("fp16", loss_scale=LossScale(initial=2.0**20, hysteresis=1))
    given = options_of(2, devices=2, steps=10, precision=precision)
    runs = [
        train_for(small(**MODEL), **given, **more) for more in ({"offload": paged(tmp_path)}, {})
    ]
    files, device = runs
    skipped = [int(run.state["skipped"]) for run in runs]
    assert skipped[0] == skipped[1]
    assert 0 < skipped[0] < 10
    scales = [float(run.state["loss_scale"]["scale"]) for run in runs]
    assert scales[0] == scales[1] < 2.0**20
    # Weights have 11 bits.
    np.testing.assert_allclose(files.losses, device.losses, rtol=0, atol=2e-2)
    close(files.state)


def head_metric(model: SmallText, batch: Any) -> Any:
    """The loss, and the mean square of the logits."""
    logits = model(batch["tokens"])
    size = jnp.sum(logits.astype(jnp.float32) ** 2), jnp.float32(logits.size)
    return *next_token(logits, batch["targets"]), {"size": size}


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 2])
def test_metrics_of_the_loss(tmp_path, microbatches):
    files, device = both(tmp_path, loss=head_metric, num_microbatches=microbatches)
    assert float(device.first["size"]) > 0
    np.testing.assert_allclose(files.first["size"], device.first["size"], rtol=1e-5)
