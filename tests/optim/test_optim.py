"""Schedules at their corners, the defaults of optax and of a run, and the optimizers by name."""

import dataclasses
import functools
import inspect
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import zerojax
from zerojax.config import (
    ConfigError,
    OptimizerConfig,
    ParameterGroup,
    RunConfig,
    from_dict,
    load,
    to_dict,
)
from zerojax.optim import adamw, build_optimizer, build_schedule, decay_mask

PARAMS = {"mlp/kernel": jnp.ones((2, 3)), "mlp/bias": jnp.ones((2, 3)), "norm": jnp.ones((3,))}


def rates(steps, at, **options):
    config = OptimizerConfig(learning_rate=1.0, final_lr_fraction=0.1, **options)
    schedule, reason = build_schedule(config, steps)
    return [round(float(schedule(count)), 5) for count in at], reason


def test_cosine():
    values, reason = rates(110, (0, 4, 9, 10, 60, 110, 200), schedule="cosine", warmup_steps=10)
    assert values == [0.1, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    assert reason == "10 warm-up steps, then cosine to 0.1"


def test_linear():
    values, _ = rates(110, (9, 10, 35, 110), schedule="linear", warmup_steps=10)
    assert values == [1.0, 1.0, 0.775, 0.1]


def test_warm_up_stable_decay():
    options = {"schedule": "wsd", "warmup_steps": 10, "decay_fraction": 0.2}
    values, _ = rates(100, (9, 50, 80, 90, 100), **options)
    assert values == [1.0, 1.0, 1.0, 0.55, 0.1]


@pytest.mark.parametrize(
    ("steps", "schedule", "reason"),
    [
        (100, "constant", "10 warm-up steps, then constant"),
        (
            None,
            "cosine",
            "10 warm-up steps, then constant, since the length of the run is not known",
        ),
    ],
)
def test_constant_also_when_the_length_is_not_known(steps, schedule, reason):
    values, said = rates(steps, (0, 9, 10, 10_000), schedule=schedule)
    assert values == [0.1, 1.0, 1.0, 1.0]
    assert said == reason


def test_default_warm_up_is_two_percent_between_ten_steps_and_half_of_the_run():
    for steps, first in ((2000, 1 / 40), (100, 1 / 10), (6, 1 / 3)):
        assert rates(steps, (0,), schedule="cosine")[0] == [round(first, 5)]
    assert rates(1, (0,), schedule="cosine")[0] == [1.0]


def test_no_warm_up_starts_at_the_peak():
    assert rates(10, (0,), schedule="linear", warmup_steps=0)[0] == [1.0]


def test_weight_decay_is_on_matrices_only():
    assert decay_mask(PARAMS) == {"mlp/kernel": True, "mlp/bias": False, "norm": False}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "sgd", "adam8bit"])
def test_every_name_decays_matrices_and_nothing_else(name):
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", warmup_steps=0)
    built = build_optimizer(config, 10)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = built.tx.update(zeros, built.tx.init(PARAMS), PARAMS)
    assert float(updates["mlp/kernel"][0, 0]) < 0
    np.testing.assert_array_equal(updates["mlp/bias"], 0)
    np.testing.assert_array_equal(updates["norm"], 0)
    assert built.reasons[0].startswith(f"optimizer {name} (configured), learning rate 0.1: ")


RECIPE = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SAID = "adamw's beta1 0.9, beta2 0.95, eps 1e-08, weight_decay 0.1 on matrices, clip_norm 1"


@pytest.mark.parametrize("given", [None, OptimizerConfig()], ids=["None", "OptimizerConfig()"])
def test_a_runs_default_is_the_recipe_of_language_models_and_says_so(given):
    built, schedule = build_optimizer(given, 100), build_schedule(OptimizerConfig(), 100)[0]
    recipe = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, mask=decay_mask, **RECIPE)
    )
    large = lambda count: jax.tree.map(lambda x: (10.0 - count) * x, PARAMS)  # noqa: E731
    # The same operations in float32; the norm is summed in another order.
    states = assert_same_updates(built.tx, recipe, PARAMS, large, rtol=1e-6)
    chex.assert_trees_all_close(*states, rtol=1e-6)
    assert built.reasons[1] == SAID


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            OptimizerConfig(name="sgd", clip_norm=None),
            "sgd's beta1 0.9, weight_decay 0.1 on matrices, no clipping",
        ),
        (
            OptimizerConfig(name="lion", beta2=0.99, weight_decay=0.3),
            "lion's beta1 0.9, beta2 0.99, weight_decay 0.3 on matrices, clip_norm 1",
        ),
    ],
)
def test_a_run_says_the_numbers_that_its_optimizer_reads(config, said):
    assert build_optimizer(config, 100).reasons[1] == said


OPTAX = {
    "adamw": optax.adamw,
    "lion": optax.lion,
    "lamb": optax.lamb,
    "sgd": optax.sgd,
    "muon": optax.contrib.muon,
}
OWN_DEFAULTS = {"sgd": {"weight_decay": 0.0, "mask": None}}  # optax's has neither: none
NOT_THEIRS = {
    "clip_norm": None,
    "groups": None,
    "impl": "auto",
    # Of lamb outside of the step, and of muon: the values that make them optax's.
    "per_layer": True,
    "ns_eps": None,
    "bias_correction": True,
    "adam_nesterov": None,
    # The one that differs: stacked layers are matrices, of which optax cannot know.
    "dimensions": zerojax.optim.muon_dimensions,
}


@pytest.mark.parametrize("name", OPTAX)
def test_defaults_are_those_of_optax(name):
    ours, theirs = (
        {each.name: each.default for each in inspect.signature(make).parameters.values()}
        for make in (getattr(zerojax, name), OPTAX[name])
    )
    theirs |= OWN_DEFAULTS.get(name, {})
    assert ours["learning_rate"] is inspect.Parameter.empty
    assert {key: ours[key] for key in ours if key in theirs} == {
        key: theirs[key] for key in theirs if key in ours
    }
    rest = {key: value for key, value in ours.items() if key not in theirs}
    assert rest == {key: NOT_THEIRS[key] for key in rest}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTAX)
def test_with_a_learning_rate_alone_an_optimizer_is_that_of_optax(name):
    """Replacing `optax.adamw(lr)` by `zerojax.adamw(lr)` changes nothing, on no kind of array."""
    own = getattr(zerojax, name)
    if name == "muon":
        own = functools.partial(own, dimensions=None)
    keys = iter(jax.random.split(jax.random.key(0), 12))
    normal = lambda scale: {  # noqa: E731
        "kernel": scale * jax.random.normal(next(keys), (6, 4)),
        "bias": scale * jax.random.normal(next(keys), (4,)),
    }
    # Gradients of norm 30 would show clipping, and parameters of 3 decay on the bias. Both run the
    # same operations one by one, so every bit is the same.
    gradients = [normal(6.0) for _ in range(5)]
    pair = own(0.05), OPTAX[name](0.05)
    states = assert_same_updates(*pair, normal(3.0), gradients.__getitem__, rtol=0)
    chex.assert_trees_all_equal(*states, strict=True)


def assert_same_updates(ours, theirs, params, gradient_of, *, rtol, steps=5):
    """Asserts that two transformations move parameters alike; returns both states."""
    moved, expected = params, params
    state, optax_state = ours.init(params), theirs.init(params)
    for count in range(steps):
        updates, state = ours.update(gradient_of(count), state, moved)
        moved = optax.apply_updates(moved, updates)
        updates, optax_state = theirs.update(gradient_of(count), optax_state, expected)
        expected = optax.apply_updates(expected, updates)
        for name in params:
            np.testing.assert_allclose(moved[name], expected[name], rtol=rtol)
    return state, optax_state


@pytest.mark.parametrize(("clip_norm", "largest"), [(None, 1e6), (3.0**0.5, 1.0)])
def test_the_global_norm_is_clipped_unless_switched_off(clip_norm, largest):
    config = OptimizerConfig(
        name="sgd", clip_norm=clip_norm, schedule="constant", warmup_steps=0, learning_rate=1.0
    )
    tx, params = build_optimizer(config, 10).tx, {"norm": jnp.ones(3)}
    updates, _ = tx.update({"norm": jnp.full((3,), 1e6)}, tx.init(params), params)
    np.testing.assert_allclose(updates["norm"], -largest, rtol=1e-6)


def test_an_optimizer_tells_its_learning_rate():
    for rate, count, value in ((0.25, 7, 0.25), (optax.linear_schedule(1.0, 0.0, 4), 1, 0.75)):
        built = build_optimizer(adamw(rate), 100)
        assert float(built.learning_rate(count)) == value
        assert built.reasons == ()


def test_momentum_of_sgd_is_the_first_beta():
    params = {"x": jnp.ones(3)}
    for config, theirs in (
        (OptimizerConfig(name="sgd", beta1=0.8, nesterov=True), optax.sgd(1.0, 0.8, True)),
        (OptimizerConfig(name="sgd", beta1=0.0), optax.sgd(1.0)),
    ):
        config = dataclasses.replace(
            config, schedule="constant", warmup_steps=0, learning_rate=1.0, clip_norm=None
        )
        gradient_of = lambda count: {"x": jnp.full(3, (0.5, -2.0)[count])}  # noqa: E731
        mine = build_optimizer(config, 10).tx
        assert_same_updates(mine, theirs, params, gradient_of, rtol=0, steps=2)


GROUPS_FILE = """\
optimizer:
  impl: xla
  groups:
    embed:
      learning_rate_factor: 1e-1
      weight_decay: 0
    ".*/kernel": {learning_rate_factor: 2}
"""


def test_groups_come_from_a_file_in_its_order(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(GROUPS_FILE)
    config = load(RunConfig, path)
    assert config.optimizer.impl == "xla"
    assert config.optimizer.groups == (
        ("embed", ParameterGroup(learning_rate_factor=0.1, weight_decay=0.0)),
        (".*/kernel", ParameterGroup(learning_rate_factor=2.0)),
    )
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert hash(config) == hash(load(RunConfig, path))
    typed = load(RunConfig, None, ["optimizer.groups={embed: {weight_decay: 0}}"])
    assert typed.optimizer.groups == (("embed", ParameterGroup(weight_decay=0.0)),)


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        (
            "{embed: {weight_decay: -1}}",
            "optimizer.groups.embed.weight_decay: -1.0 must be >= 0 ({path}:3)",
        ),
        (
            "{embed: {learning_rate: 1}}",
            "optimizer.groups.embed.learning_rate: unknown key; did you mean "
            "'learning_rate_factor'? ({path}:3)",
        ),
        ("{embed: 0.1}", "expected a section with the keys learning_rate_factor, weight_decay"),
        ("{'(': {}}", "optimizer.groups: '(' is not a regular expression"),
        ("embed", "expected a mapping or a list of pairs, got 'embed' (str) ({path}:3)"),
    ],
)
def test_a_mistake_in_a_group_is_placed(tmp_path, groups, sentence):
    path = tmp_path / "run.yaml"
    path.write_text(f"optimizer:\n  name: lion\n  groups: {groups}\n")
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, path)
    assert sentence.format(path=path) in str(caught.value)


def test_groups_of_a_configuration_reach_the_update():
    group = ParameterGroup(learning_rate_factor=0.5)
    config = OptimizerConfig(schedule="constant", warmup_steps=0, groups=(("mlp/kernel", group),))
    plain = dataclasses.replace(config, groups=())
    built = [build_optimizer(each, 10).tx for each in (config, plain)]
    halved, full = (tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0] for tx in built)
    np.testing.assert_allclose(halved["mlp/kernel"], 0.5 * full["mlp/kernel"], rtol=1e-6)
    np.testing.assert_array_equal(halved["norm"], full["norm"])


def test_a_transformation_is_taken_as_it_is():
    tx = optax.sgd(0.1)
    built = build_optimizer(tx, 100)
    assert built.tx is tx
    assert built.learning_rate(3) == pytest.approx(0.1)
