"""JAX's tools for debugging in a run: callbacks in a loss, and configuration switches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
LINE = (lambda key: {"w": jnp.ones((4, 8))}, lambda params, x: x @ params["w"])


def squared(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def train(mesh=None, *, loss=squared, steps=2, **options):
    given = {"batches": lambda step: {"x": X}, "run_dir": None, **options}
    return zerojax.train(LINE, mesh or {"zero": 1}, loss=loss, steps=steps, **given)


def one_device():
    return jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "pieces"),
    [
        ({"zero": 0}, 8),
        ({"zero": 1}, 8),
        ({"zero": 2}, 8),
        ({"zero": 3, "persistence_threshold": 0}, 8),
        ({"zero": 3, "persistence_threshold": 0, "model": 2}, 4),
        ({"zero": 1, "deterministic": "mesh"}, 8),
        (one_device, 1),
    ],
)
def test_a_debug_callback_in_a_loss_sees_every_piece_of_the_batch(mesh, pieces):
    seen = []

    def loss(model, batch):
        value = squared(model, batch)
        jax.debug.callback(lambda x: seen.append(float(x)), value)
        return value

    train(mesh() if callable(mesh) else mesh, loss=loss, steps=1)
    jax.effects_barrier()
    pieces_of_batch = X.reshape(pieces, -1, 4).sum(-1) ** 2
    np.testing.assert_allclose(sorted(seen), sorted(pieces_of_batch.mean(1)), rtol=1e-5)


@pytest.mark.parametrize("options", [{"mesh": {"stage": 2}}, {"offload": {"params": "host"}}])
def test_layers_that_run_one_by_one_refuse_a_debug_callback(options):
    def loss(model, batch):
        value = model.loss(batch)
        jax.debug.print("{value}", value=value)
        return value

    with pytest.raises(ValueError, match="`debug_print`.*remove it, or debug without"):
        plan_for(
            reference_model("gpt2", num_layers=2, remat="full"),
            loss=loss,
            optimizer=zerojax.adamw(1e-3),
            **options,
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "switch",
    [
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.debug_nans(True),
        pytest.param(lambda: jax.checking_leaks(), marks=pytest.mark.thorough),
        pytest.param(lambda: jax.disable_jit(), marks=pytest.mark.thorough),
        pytest.param(lambda: jax.enable_x64(True), marks=pytest.mark.thorough),
    ],
)
def test_a_run_is_the_same_under_the_switches_for_debugging(switch):
    plain = train(steps=2, validation=[{"x": X}])
    with switch():
        trainer = train(steps=2, validation=[{"x": X}])
        np.testing.assert_allclose(trainer.metrics["loss"], plain.metrics["loss"], rtol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, trainer.to_model(), plain.to_model())


@pytest.mark.thorough
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 cannot repeat a step outside of jit"
)
def test_jax_debug_nans_ends_a_run_at_its_first_nan():
    def loss(model, batch):
        return jnp.log(-squared(model, batch))

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="Invalid value"):
        train(loss=loss)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 ends a process that computes with such arrays"
)
def test_a_callback_that_reads_arrays_of_an_earlier_state_is_told_to_copy_them():
    kept = []

    def callback(trainer, metrics):
        kept.append(trainer.state["params"]["w"])
        return bool(kept[0].sum() < -1)

    with pytest.raises(RuntimeError, match="deleted") as caught:
        train(steps=4, callbacks=[callback], log=zerojax.LogConfig(every=1))
    assert "jax.device_get(trainer.state['params'])" in "".join(caught.value.__notes__)
