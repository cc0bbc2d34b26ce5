"""Runs with layer drop: resumes, evaluations, a ds_config's section and run files."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.support.refusals import refused
from tests.support.trajectories import failing_at
from zerojax import deepspeed_config as deepspeed
from zerojax.config import ConfigError, LayerDropConfig, ModelConfig
from zerojax.zoo import build_model

DROP = LayerDropConfig(theta=0.2, gamma=20.0)
ROWS, STEPS = 8, 4


def model():
    return build_model(ModelConfig(num_layers=4, num_heads=2, embed_dim=16, max_seq_len=16), 32)


def batch_of(step: int) -> dict[str, np.ndarray]:
    text = np.random.default_rng(step).integers(0, 32, (ROWS, 17), np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def trained(mesh=None, *, batches=batch_of, layer_drop=DROP, **options) -> zerojax.Trainer:
    settings = {"run_dir": None, "log": zerojax.LogConfig(every=1, console="quiet")}
    settings |= {"optimizer": optax.adamw(1e-2), "steps": STEPS}
    mesh = {"zero": 3, "persistence_threshold": 0} if mesh is None else mesh
    return zerojax.train(model(), mesh, batches, layer_drop=layer_drop, **{**settings, **options})


def leaves(trainer: zerojax.Trainer):
    state = jax.device_get(dict(trainer.state))
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(state)]


@pytest.mark.thorough
def test_a_resumed_run_has_the_same_bits(tmp_path, capfd):
    whole = trained()
    with pytest.raises(OSError, match="gone"):
        trained(batches=failing_at(2, batch_of), checkpoint=tmp_path)
    resumed = trained(checkpoint=tmp_path)
    assert [one["step"] for one in resumed.history] == [3, 4]
    for (name, one), (_, other) in zip(*map(leaves, (resumed, whole)), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    resumed.close()
    capfd.readouterr()
    trained(checkpoint=tmp_path, layer_drop=None, steps=STEPS + 1, log=zerojax.LogConfig())
    assert "the layer_drop of this call" in " ".join("".join(capfd.readouterr()).split())


@pytest.mark.thorough
def test_evaluations_have_all_layers():
    losses = []
    for layer_drop in (DROP, None):
        frozen = optax.set_to_zero()
        run = trained(layer_drop=layer_drop, optimizer=frozen, validation=[batch_of(9)])
        losses.append([one["loss"] for one in run.evaluations])
    assert losses[0] == losses[1]


def file(**section):
    return {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        "progressive_layer_drop": section,
    }


@pytest.mark.thorough
def test_a_ds_config_sets_it():
    def drop_of(given):
        features = deepspeed.translate(given, num_devices=8).features
        return features.get(zerojax.LayerDropConfig)

    assert drop_of(file(enabled=True, theta=0.5)) == LayerDropConfig(theta=0.5)
    assert drop_of(file(enabled=True, theta=0.5, gamma=0.01)) == LayerDropConfig(
        theta=0.5, gamma=0.01
    )
    assert drop_of(file(enabled=False, theta=0.5)).is_off
    assert deepspeed.translate(file(enabled=True), num_devices=8).warnings
    refused(lambda: drop_of(file(enabled=True, theta=0.0)), "theta", error=ConfigError)

    given = file(enabled=True, theta=0.2, gamma=20.0)
    other = LayerDropConfig(theta=0.3)
    refused(
        lambda: trained(given, layer_drop=other, optimizer=None),
        "progressive_layer_drop layer_drop",
        error=ConfigError,
    )
    engine = zerojax.initialize(model=model(), config=given, example_batch=batch_of(0))
    assert engine.plan.features["layer_drop"].config == DROP
