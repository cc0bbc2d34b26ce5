"""Every way of computing a run gives the run of one device.

Stages, accumulation, tensor parallelism, buckets, remat, and every kind of model. The quick tests
span the choices; the full product of the reference models is marked slow.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from tests.support import small_models
from tests.support.marks import slow
from tests.support.small_models import reference_model
from tests.support.trajectories import (
    TOLERANCE,
    Trajectory,
    regression_batch,
    text_batch,
    train_for,
)
from zerojax.models.losses import next_token

# Far below the default, so that parameters of these tiny models are gathered where they are used.
SMALL = 200
NORM_TOLERANCE = 5e-6

QUICK = {("gpt2", 0, 4, 1), ("gpt2", 1, 1, 2), ("llama", 2, 1, 1), ("llama", 3, 4, 2)}


CASES = list(itertools.product(["gpt2", "llama"], range(4), [1, 4], [1, 2]))
MATRIX = [case if case in QUICK else slow(*case) for case in CASES]
USER_QUICK = (3, 4, 2)
USER_CASES = itertools.product(range(4), [1, 4], [1, 2])
USER_MATRIX = [case if case == USER_QUICK else slow(*case) for case in USER_CASES]


def stages(quick):
    """Stages 1 to 3, of which all but one are slow."""
    return [zero if zero == quick else slow(zero) for zero in (1, 2, 3)]


@functools.cache
def one_device(name: str) -> Trajectory:
    return train_for(reference_model(name), devices=1)


def assert_equal_runs(run: Trajectory, expected: Trajectory) -> None:
    """Also their gradient norms: clipping and Adam hide from losses by what gradients are scaled.

    Losses are about 4.4 and their rounding is 1.1e-7 of that; ten of it were measured in 20 steps.
    Norms are of the order of 1 and differ by their rounding, 2e-7 where it was measured.
    """
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-6, atol=TOLERANCE)
    np.testing.assert_allclose(run.norms, expected.norms, rtol=NORM_TOLERANCE)
    fell = expected.losses[0] - expected.losses[-1]
    assert fell > 0.02, f"the loss fell by {fell}: equality is cheap when nothing is learned"


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "zero", "num_microbatches", "model"), MATRIX)
def test_reference_models_equal_one_device(name, zero, num_microbatches, model):
    mesh = {"model": model, "data": 8 // model}
    options = {"persistence_threshold": SMALL, "num_microbatches": num_microbatches}
    run = train_for(reference_model(name), mesh=mesh, zero=zero, **options)
    assert_equal_runs(run, one_device(name))


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["full", slow("dots")])
@pytest.mark.parametrize("zero", stages(3))
def test_rematerialised_blocks_equal_one_device(zero, remat):
    run = train_for(reference_model("gpt2", remat=remat), zero=zero, persistence_threshold=SMALL)
    assert_equal_runs(run, one_device("gpt2"))


@pytest.mark.thorough
@pytest.mark.parametrize("zero", stages(3))
def test_hybrid_sharding_equals_one_device(zero):
    mesh = {"replica": 2, "data": 2, "model": 2}
    run = train_for(reference_model("llama"), mesh=mesh, zero=zero, persistence_threshold=SMALL)
    assert_equal_runs(run, one_device("llama"))
    specs = {str(leaf.stored_spec) for leaf in run.plan.placement.leaves.values()}
    assert not any("replica" in spec for spec in specs)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", stages(2))
def test_sequence_sharding_equals_one_device(zero):
    mesh = {"data": 4, "model": 2}
    options = {"sequence_sharding": True, "persistence_threshold": SMALL}
    run = train_for(reference_model("llama"), mesh=mesh, zero=zero, **options)
    assert_equal_runs(run, one_device("llama"))


@pytest.mark.thorough
@pytest.mark.parametrize("bucket", [slow(1), 3000])
@pytest.mark.parametrize("zero", [slow(0), 1, slow(3)])
def test_bucket_size_changes_nothing(zero, bucket):
    limits = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    run = train_for(reference_model("gpt2"), zero=zero, **limits)
    assert_equal_runs(run, one_device("gpt2"))


@functools.cache
def one_device_of(kind: str) -> Trajectory:
    model, options = USERS[kind]
    return train_for(model, devices=1, **options)


def user(rngs):
    return small_models.UserText(rngs)


USERS = {
    "nnx": (user, {}),
    "linen": (small_models.LinenText(), {"loss": small_models.linen_loss}),
    "functions": (
        (small_models.init_functions, small_models.apply_functions),
        {"loss": small_models.regression_loss, "batch": regression_batch},
    ),
}
"""kind: (a model as users have one, what else it needs)."""

RULES = {
    "nnx": (("blocks/up/kernel", (None, "model")), ("blocks/down/kernel", ("model", None))),
    "linen": (("Block_0/Dense_0/k", (None, "model")), ("Block_0/Dense_1/k", ("model", None))),
    "functions": (("in/w", (None, "model")), ("out/w", ("model", None))),
}
"""kind: a split of its two matrices over `model`, as a user would write it."""


@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "num_microbatches", "model"), USER_MATRIX)
@pytest.mark.parametrize("kind", USERS)
def test_a_users_model_equals_one_device(kind, zero, num_microbatches, model):
    """nnx: Conv, Embed, MHA under nnx.scan, a tied head, an odd parameter: nothing divides by 8."""
    mesh = {"model": model, "data": 8 // model}
    source, options = USERS[kind]
    if model > 1:
        options = {**options, "rules": RULES[kind]}
    run = train_for(
        source,
        mesh=mesh,
        zero=zero,
        num_microbatches=num_microbatches,
        persistence_threshold=20,
        **options,
    )
    assert_equal_runs(run, one_device_of(kind))
    leaves = run.plan.placement.leaves
    assert sum("model" in leaf.axes for leaf in leaves.values()) == 2 * (model - 1)
    if zero and kind == "nnx":
        assert any("padded" in reason for _, reason in run.plan.placement.exceptions())
        stacked = leaves["blocks/up/kernel"]
        assert stacked.stack_dims == 1
        assert stacked.zero_dim in (-1, -2)


@pytest.mark.parametrize("zero", stages(3))
def test_muon_sees_whole_matrices(zero):
    """It orthogonalises each matrix; of a shard the result would be another one."""
    pair = small_models.init_functions, small_models.apply_functions
    options = {
        "loss": small_models.regression_loss,
        "batch": regression_batch,
        "optimizer": optax.contrib.muon(1e-2, adam_eps_root=1e-5),
    }
    expected = train_for(pair, devices=1, **options)
    assert expected.losses[-1] < 0.9 * expected.losses[0]
    assert_equal_runs(train_for(pair, zero=zero, persistence_threshold=20, **options), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", stages(3))
def test_a_scan_that_starts_from_zeros_equals_one_device(zero):
    user = lambda rngs: small_models.Recurrent(rngs)  # noqa: E731
    options = {"loss": small_models.regression_loss, "batch": regression_batch}
    expected = train_for(user, devices=1, **options)
    assert_equal_runs(train_for(user, zero=zero, persistence_threshold=20, **options), expected)


@pytest.mark.thorough
def test_uneven_weights_are_divided_once_globally():
    """A shard with few counted tokens must not count as much as one with many."""

    def batch(index):
        made = text_batch(index)
        keep = np.arange(32)[:, None] > np.arange(16)[None] * 2
        return {**made, "weights": keep.astype(np.float32)}

    def loss(model, batch):
        return next_token(model(batch["tokens"]), batch["targets"], batch["weights"])

    expected = train_for(reference_model("gpt2"), devices=1, batch=batch, loss=loss)
    run = train_for(reference_model("gpt2"), zero=1, batch=batch, loss=loss, num_microbatches=4)
    assert_equal_runs(run, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [slow(0), slow(1), 2, slow(3)])
def test_bfloat16_follows_float32(zero):
    """bf16 has 8 bits of mantissa: one token's loss of 4 is off by up to 2^-8 x 4, the mean of 512
    by 1/22 of that, 7e-4 (1.6e-4 measured at every stage)."""
    run = train_for(
        reference_model("gpt2"), zero=zero, precision="bf16", persistence_threshold=SMALL
    )
    np.testing.assert_allclose(run.losses, one_device("gpt2").losses, rtol=0, atol=7e-4)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(run.state["params"]))


def runs_of_all_stages(name: str) -> list[Trajectory]:
    """Without clipping: the gradient norm alone is summed in another order by each placement."""
    options = {"optimizer": optax.adamw(1e-3, eps=1e-5), "persistence_threshold": SMALL, "steps": 5}
    return [train_for(reference_model(name), zero=zero, **options) for zero in range(4)]


def assert_bitwise_equal(run: Trajectory, expected: Trajectory) -> None:
    assert run.losses.tobytes() == expected.losses.tobytes()
    for name, value in expected.state["params"].items():
        np.testing.assert_array_equal(run.state["params"][name], value, err_msg=name)


@pytest.mark.slow
def test_all_stages_on_one_mesh_are_bitwise_equal():
    whole, *sharded = runs_of_all_stages("llama")
    for run in sharded:
        assert_bitwise_equal(run, whole)


@pytest.mark.slow
def test_a_tied_weight_is_bitwise_equal_up_to_stage_1_and_from_stage_2():
    """From stage 2 each use of a parameter is summed over devices on its own, then the two sums
    are added: another order for a weight that is used twice."""
    zero_0, zero_1, zero_2, zero_3 = runs_of_all_stages("gpt2")
    assert_bitwise_equal(zero_1, zero_0)
    assert_bitwise_equal(zero_3, zero_2)
    np.testing.assert_allclose(zero_2.losses, zero_0.losses, rtol=1e-6, atol=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 3])
def test_weights_keep_their_digits_where_gradients_are_sent_in_fewer(zero):
    """The first loss is that of float32 weights, to its rounding; of bfloat16's it is 3e-5 away."""
    first = [
        train_for(
            reference_model("gpt2", num_layers=1),
            steps=1,
            zero=zero,
            reduce_dtype=dtype,
            persistence_threshold=1,
        ).losses[0]
        for dtype in ("bf16", "fp32")
    ]
    assert abs(first[0] - first[1]) < 1e-6
