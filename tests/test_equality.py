"""Every way of computing a run gives the run of one device.

Stages, accumulation, tensor parallelism, buckets, remat, and every kind of model.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests import small_models
from tests.small_models import reference_model
from tests.trajectories import TOLERANCE, Trajectory, regression_batch, train_for

# Far below the default, so that parameters of these tiny models are gathered where they are used.
SMALL = 200


@functools.cache
def one_device(name: str) -> Trajectory:
    return train_for(reference_model(name), devices=1)


@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_reference_models_equal_one_device(name, zero, num_microbatches, model):
    # 4 microbatches need 8 x 4 = 32 rows; half the data shards under tensor parallelism need 16.
    mesh = {"model": model, "data": 8 // model if num_microbatches == 1 else 4}
    devices = mesh["model"] * mesh["data"]
    rules = {"persistence_threshold": SMALL, "num_microbatches": num_microbatches}
    run = train_for(reference_model(name), devices=devices, mesh=mesh, zero=zero, **rules)
    expected = one_device(name)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)
    assert expected.losses[-1] < expected.losses[0] - 0.05, (
        "the run has to learn, or equality is cheap"
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_rematerialised_blocks_equal_one_device(zero):
    run = train_for(reference_model("gpt2", remat="full"), zero=zero, persistence_threshold=SMALL)
    np.testing.assert_allclose(run.losses, one_device("gpt2").losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("zero", [1, 3])
def test_hybrid_sharding_equals_one_device(zero):
    mesh = {"replica": 2, "data": 2, "model": 2}
    run = train_for(reference_model("llama"), mesh=mesh, zero=zero, persistence_threshold=SMALL)
    np.testing.assert_allclose(run.losses, one_device("llama").losses, rtol=0, atol=TOLERANCE)
    specs = {str(leaf.stored_spec) for leaf in run.plan.placement.leaves.values()}
    assert not any("replica" in spec for spec in specs)


def test_sequence_sharding_equals_one_device():
    run = train_for(
        reference_model("llama"),
        mesh={"data": 4, "model": 2},
        zero=2,
        sequence_sharding=True,
        persistence_threshold=SMALL,
    )
    np.testing.assert_allclose(run.losses, one_device("llama").losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("bucket", [1, 3000])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_bucket_size_changes_nothing(zero, bucket):
    limits = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    run = train_for(reference_model("gpt2"), zero=zero, **limits)
    np.testing.assert_allclose(run.losses, one_device("gpt2").losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_users_nnx_model_equals_one_device(zero):
    """Conv, Embed, MHA under nnx.scan, a tied head, an odd parameter: nothing divides by 8."""
    user = lambda rngs: small_models.UserText(rngs)  # noqa: E731
    expected = train_for(user, devices=1)
    run = train_for(user, zero=zero, persistence_threshold=20)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)
    assert any("padded" in reason for _, reason in run.plan.placement.exceptions())
    stacked = run.plan.placement.leaves["blocks/up/kernel"]
    assert stacked.stack_dims == 1
    assert stacked.zero_dim in (-1, -2)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_linen_model_equals_one_device(zero):
    options = {"loss": small_models.linen_loss, "persistence_threshold": 20}
    expected = train_for(small_models.LinenText(), devices=1, **options)
    run = train_for(small_models.LinenText(), zero=zero, **options)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_functions_equal_one_device(zero):
    pair = small_models.init_functions, small_models.apply_functions
    options = {"loss": small_models.regression_loss, "batch": regression_batch}
    expected = train_for(pair, devices=1, **options)
    run = train_for(pair, zero=zero, persistence_threshold=20, **options)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_scan_that_starts_from_zeros_equals_one_device(zero):
    user = lambda rngs: small_models.Recurrent(rngs)  # noqa: E731
    options = {"loss": small_models.regression_loss, "batch": regression_batch}
    expected = train_for(user, devices=1, **options)
    run = train_for(user, zero=zero, persistence_threshold=20, **options)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)


def test_uneven_weights_are_divided_once_globally():
    """A shard with few counted tokens must not count as much as one with many."""

    def batch(index):
        made = small_models_batch(index)
        keep = np.arange(16)[:, None] * 2 > np.arange(16)[None]
        return {**made, "weights": keep.astype(np.float32)}

    def loss(model, batch):
        logits = model(batch["tokens"])
        return small_models.next_token(logits, batch["targets"], batch["weights"])

    expected = train_for(reference_model("gpt2"), devices=1, batch=batch, loss=loss)
    for options in ({}, {"num_microbatches": 2}):
        run = train_for(reference_model("gpt2"), zero=1, batch=batch, loss=loss, **options)
        np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)


def small_models_batch(index):
    from tests.trajectories import text_batch

    return text_batch(index)


def test_bfloat16_follows_float32():
    """bf16 has 8 bits of mantissa: single losses agree to about 2^-8 of their size of 4."""
    run = train_for(reference_model("gpt2"), zero=2, precision="bf16")
    np.testing.assert_allclose(run.losses, one_device("gpt2").losses, rtol=0, atol=4 * 2**-8)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(run.state["params"]))


def test_stages_on_one_mesh_are_bitwise_equal_without_clipping():
    """Sums of eight shards are in the same order at every stage when nothing else is summed."""
    import optax

    options = {"optimizer": optax.adamw(1e-3, eps=1e-5), "persistence_threshold": SMALL}
    runs = [train_for(reference_model("gpt2"), zero=zero, steps=5, **options) for zero in range(4)]
    for run in runs[1:]:
        np.testing.assert_allclose(run.losses, runs[0].losses, rtol=0, atol=1e-6)


def test_batch_statistics_are_the_mean_over_shards_and_dropout_differs_between_them():
    model = small_models.WithStatistics(nnx.Rngs(0), rate=0.5)
    options = {"loss": small_models.regression_loss, "batch": regression_batch}
    run = train_for(model, zero=1, steps=3, **options)
    mean = np.asarray(run.state["extras"]["norm/mean"])
    assert np.abs(mean).max() > 0
    shards = {
        np.asarray(s.data).tobytes() for s in run.state["extras"]["norm/mean"].addressable_shards
    }
    assert len(shards) == 1, "statistics have to agree on all devices"
    again = train_for(
        small_models.WithStatistics(nnx.Rngs(0), rate=0.5), zero=3, steps=3, **options
    )
    np.testing.assert_allclose(again.losses, run.losses, rtol=0, atol=TOLERANCE)
    other = train_for(model, zero=1, steps=3, seed=1, **options)
    assert abs(other.losses[0] - run.losses[0]) > 1e-4, "the seed has to reach dropout"
