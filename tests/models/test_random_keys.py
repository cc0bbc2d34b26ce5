"""Random keys of any kind (`jax_default_prng_impl`): saved whole, never read as another kind."""

import jax
import numpy as np
import pytest
from flax import nnx

import zerojax
from zerojax.checkpoint import CheckpointError

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.out(x))


def train(folder, steps, kind="rbg", **options):
    with jax.default_prng_impl(kind):
        return zerojax.train(
            Dropping,
            {"zero": 2},
            lambda step: {"x": X},
            loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
            optimizer=zerojax.adamw(0.1),
            steps=steps,
            checkpoint=None if folder is None else folder / "run",
            run_dir=None,
            **options,
        )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_a_run_with_other_keys_goes_on_where_it_was(tmp_path, kind):
    whole = train(None, 6, kind)
    train(tmp_path, 3, kind)
    resumed = train(tmp_path, 6, kind)
    assert resumed.num_steps == 6
    assert resumed.metrics["loss"] == whole.metrics["loss"]
    assert whole.state["rng"].shape == (4,)


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "second"), [("rbg", "threefry2x32"), ("threefry2x32", "rbg")])
def test_keys_of_another_kind_are_refused_with_the_setting(tmp_path, first, second):
    train(tmp_path, 2, first)
    with pytest.raises(CheckpointError, match="'rng': the checkpoint has.*jax_default_prng_impl"):
        train(tmp_path, 4, second)


@pytest.mark.thorough
def test_a_state_with_a_key_of_another_kind_than_its_plans_is_not_saved(tmp_path):
    trainer = train(tmp_path, 1, "threefry2x32")
    with jax.default_prng_impl("rbg"):
        trainer.state = zerojax.init_state(trainer.plan)
    trainer.num_steps = 2
    with pytest.raises(ValueError, match=r"\['rng'\] has 4 numbers, but keys of the plan have 2"):
        trainer.save()
