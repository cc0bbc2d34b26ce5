"""Training and evaluation of Linen modules, whose mode is an argument, and what stays random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import zerojax
from zerojax.models.adapt import as_model

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


class Switches(linen.Module):
    """Returns its switches, each with a default that is wrong in one of the modes."""

    frozen: bool | None = None

    @linen.compact
    def __call__(
        self, x, train=False, training=False, *, deterministic=True, use_running_average=True
    ):
        w = self.param("w", linen.initializers.ones, (1,))
        return w[0] * 0 + jnp.array([train, training, deterministic, use_running_average])

    def encode(self, x, train):
        return self(x, train)


def modes(call, module=None):
    """What a call of the module sees: (in training, in evaluation)."""
    model, key = as_model(module or Switches()), jax.random.key(0)
    params, extras = model.init(key, X, call)
    run = lambda train: model.run(params, extras, key, lambda m: call(m, X), train=train)[0]  # noqa: E731
    return [run(train).tolist() for train in (True, False)], model.switched


def test_every_switch_that_a_call_does_not_say_follows_the_mode():
    names = ("deterministic", "train", "training", "use_running_average")
    assert modes(lambda m, x: m(x)) == ([[1, 1, 0, 0], [0, 0, 1, 1]], names)
    # What the call says stays, by position or by name.
    said, switched = modes(lambda m, x: m(x, True, deterministic=True))
    assert said == [[1, 1, 1, 0], [1, 0, 1, 1]]
    assert switched == ("training", "use_running_average")
    # Any method; one that is called inside of a module is the module's own affair.
    assert modes(lambda m, x: m.encode(x)) == ([[1, 0, 1, 1], [0, 0, 1, 1]], ("train",))
    by_name = modes(lambda m, x: m(x, method="encode"))
    assert by_name == modes(lambda m, x: m.encode(x))


def test_an_attribute_of_the_module_wins_over_the_mode():
    class Merged(linen.Module):
        deterministic: bool | None = None

        @linen.compact
        def __call__(self, x, deterministic=None):
            w = self.param("w", linen.initializers.ones, (1,))
            return w * linen.merge_param("deterministic", self.deterministic, deterministic)

    assert modes(lambda m, x: m(x), Merged())[0] == [[0], [1]]
    assert modes(lambda m, x: m(x), Merged(deterministic=False)) == ([[0], [0]], ())


class AlwaysOn(linen.Module):
    """Dropout and batch statistics that are on unless a call says otherwise."""

    @linen.compact
    def __call__(self, x, train=True):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(linen.Dense(8)(x))
        return linen.Dense(1)(linen.Dropout(0.5, deterministic=not train)(x))


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - 1) ** 2)


def train(model, loss=squared, **options):
    given = {"validation": [{"x": X}], "run_dir": None, "steps": 2, **options}
    return zerojax.train(model, {"zero": 1}, lambda step: {"x": X}, loss=loss, **given)


@pytest.mark.thorough
def test_an_evaluation_is_that_of_the_module_without_dropout():
    trainer = train(AlwaysOn())
    assert "train: set by the mode" in trainer.plan.table()
    variables = trainer.to_model()
    assert np.abs(variables["batch_stats"]["BatchNorm_0"]["mean"]).max() > 0
    expected = np.mean((AlwaysOn().apply(variables, X, train=False) - 1) ** 2)
    np.testing.assert_allclose(trainer.evaluations[-1]["loss"], expected, rtol=1e-5)


class Inner(linen.Module):
    """A switch that the mode does not reach."""

    statistics: bool = False

    @linen.compact
    def __call__(self, x):
        if self.statistics:
            x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dropout(0.5, deterministic=False)(linen.Dense(1)(x))


class Stubborn(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.out(x), deterministic=False)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Inner(), Stubborn])
def test_a_loss_that_is_random_in_evaluation_is_warned_of_at_the_users_line(model):
    with pytest.warns(UserWarning, match="random in evaluation mode.*linen module needs") as caught:
        train(model)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_loss_that_fails_in_evaluation_is_refused_before_the_first_step():
    steps = []
    with pytest.raises(ValueError, match="fails in evaluation mode.*use_running_average"):
        train(Inner(statistics=True), callbacks=[lambda trainer, metrics: steps.append(metrics)])
    assert not steps
