"""8-bit moments in a run: what is stored, how it resumes and moves."""

import shutil

import numpy as np
import pytest

import zerojax
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax.config import LogConfig
from zerojax.optim import adam8bit
from zerojax.optim.adam8bit_state import part_of
from zerojax.plan.counts import shard_bytes

BATCHES = [text_batch(index) for index in range(4)]
STEPS = 8


def model():
    """Matrices of 4096 elements and more, which are coded; some are not divided by their shards."""
    return reference_model("gpt2", embed_dim=72)


def train(optimizer, mesh, folder=None, steps=STEPS):
    """The losses of the steps that this run took."""
    losses = []
    with zerojax.train(
        model(),
        mesh,
        BATCHES,
        optimizer=optimizer,
        precision="fp32",
        run_dir=None,
        steps=steps,
        checkpoint=folder,
        log=LogConfig(every=1, tensorboard=False),
        callbacks=[lambda trainer, values: losses.append(values["loss"])],
    ):
        pass
    return losses


@pytest.fixture(scope="module")
def whole():
    return train(adam8bit(1e-3, **RECIPE), {"zero": 3})


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder with a checkpoint after half of the steps, and the losses until then."""
    folder = tmp_path_factory.mktemp("run") / "half"
    return folder, train(adam8bit(1e-3, **RECIPE), {"zero": 3}, folder, STEPS // 2)


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.slow
def test_resumed_bit_for_bit_although_moments_are_stored_in_float32(whole, half, tmp_path):
    folder, first = half
    second = train(adam8bit(1e-3, **RECIPE), {"zero": 3}, copy_of(folder, tmp_path))
    assert first + second == whole


@pytest.mark.slow
def test_goes_on_with_float32_moments(whole, half, tmp_path):
    second = train(zerojax.adamw(1e-3, **RECIPE), {"zero": 2}, copy_of(half[0], tmp_path))
    np.testing.assert_allclose(second, whole[STEPS // 2 :], rtol=0, atol=2e-3)


@pytest.mark.slow
def test_a_live_reshard_codes_anew(whole):
    losses = []
    trainer = zerojax.train(
        model(),
        {"zero": 3},
        BATCHES,
        optimizer=adam8bit(1e-3, **RECIPE),
        precision="fp32",
        run_dir=None,
        steps=STEPS // 2,
        callbacks=[lambda trainer, values: losses.append(values["loss"])],
        log=LogConfig(every=1),
    )
    trainer.reshard({"data": 4, "model": 2, "zero": 3})
    trainer.fit(BATCHES, steps=STEPS)
    np.testing.assert_allclose(losses, whole, rtol=0, atol=2e-4)


def test_the_plan_counts_two_bytes_of_moments_per_coded_parameter():
    plans = {
        name: zerojax.make_plan(
            reference_model("gpt2", embed_dim=256),
            zerojax.make_mesh({"data": 8}),
            example_batch=BATCHES[0],
            optimizer=optimizer,
            zero=1,
        )
        for name, optimizer in (
            ("coded", adam8bit(1e-3, **RECIPE)),
            ("float32", zerojax.adamw(1e-3, **RECIPE)),
        )
    }
    sizes = {name: shard_bytes(plan.abstract_state["opt_state"]) for name, plan in plans.items()}
    large = {
        name: leaf.size
        for name, leaf in plans["coded"].abstract_portable["params"].items()
        if leaf.size >= 4096
    }
    assert min(large.values()) < 8 * 4096, "one must be small in its shards, and coded"
    codes = part_of(plans["coded"].abstract_state["opt_state"]).mu
    assert {name for name, code in codes.items() if code.dtype == np.int8} == set(large)
    coded = sum(large.values())
    # 2 codes and 8 bytes of scales for 128 to 512 elements, in place of 8 bytes.
    saved = (sizes["float32"] - sizes["coded"]) * 8 / coded
    assert 5.9 < saved <= 6
