"""Optimizers that read paths: masks, labels and rates see the user's own tree of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, traverse_util

import zerojax
from tests.support.trajectories import plan_for, regression_batch
from zerojax.data import shard_batch
from zerojax.optim.parameter_tree import OnParameterTree, ParameterTree
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state
from zerojax.tracing import trees

TOLERANCE = 2e-6
"""Of one element, after three steps with rates of 0.1: sums over 8 devices are in another order."""
TREES = {
    "dicts": {"backbone": {"kernel": 0, "bias": 1}, "head": {"kernel": 2}, "scale": 3},
    "numbers for keys": {"layers": {0: {"w": 0}, 1: {"w": 1}}, "out": 2},
    "lists and tuples": [{"w": 0, "b": 1}, ({"w": 2}, 3)],
}
OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "labels": lambda: optax.multi_transform(
        {"on": optax.adam(0.1), "off": optax.set_to_zero()}, label_by_path
    ),
    "mask by path": lambda: optax.adamw(0.1, mask=decays_by_path),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)),
    "factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "average": lambda: zerojax.with_ema(optax.sgd(0.1, momentum=0.9), 0.9),
}


def _words(path):
    return trees.path_name(path).split("/")


def label_by_path(params):
    def label(path, _):
        words = _words(path)
        is_off = "backbone" in words or words[0] == "0" or words[:2] == ["layers", "0"]
        return "off" if is_off else "on"

    return jax.tree_util.tree_map_with_path(label, params)


def decays_by_path(params):
    decays = lambda path, _: _words(path)[-1] not in ("bias", "b", "scale")  # noqa: E731
    return jax.tree_util.tree_map_with_path(decays, params)


def arrays_like(tree, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda n: jnp.asarray(random.normal(size=(4 + n, 5)), jnp.float32), tree)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_states_are_those_of_the_users_tree(name, tree):
    params = arrays_like(TREES[tree])
    own = ParameterTree(trees.names_like(params))
    tx, by_name = OPTIMIZERS[name](), trees.flatten_names(params)
    wrapped = OnParameterTree(tx, own)
    state, flat_state = tx.init(params), wrapped.init(by_name)
    for seed in (1, 2):
        grads = arrays_like(TREES[tree], seed)
        updates, state = tx.update(grads, state, params)
        flat, flat_state = wrapped.update(trees.flatten_names(grads), flat_state, by_name)
        jax.tree.map(np.testing.assert_array_equal, own.nest(flat), updates)
    jax.tree.map(np.testing.assert_array_equal, flat_state, own.state_by_name(state))
    names = [*by_name]
    moments = [x for x in jax.tree.leaves(flat_state, is_leaf=own.holds) if own.holds(x)]
    assert all([*x] == [n for n in names if n in x] for x in moments)
    jax.tree.map(np.testing.assert_array_equal, own.nest_state(flat_state), state)


def test_a_mask_for_the_upper_part_of_the_tree():
    params = arrays_like(TREES["dicts"])
    own = ParameterTree(trees.names_like(params))
    by_name = trees.flatten_names(params)
    mask = {"backbone": False, "head": True, "scale": True}
    updates, _ = (tx := OnParameterTree(optax.masked(optax.scale(0.0), mask), own)).update(
        by_name, tx.init(by_name), by_name
    )
    zero = {name for name, x in updates.items() if not np.any(x)}
    assert zero == {"head/kernel", "scale"}


def test_frozen_parameters_are_no_part_of_the_tree():
    own = ParameterTree(trees.names_like(TREES["dicts"]))
    assert own.nest({"head/kernel": 1}) == {"head": {"kernel": 1}}
    own = ParameterTree(trees.names_like(TREES["lists and tuples"]))
    masked = optax.MaskedNode()
    assert own.nest({"0/b": 1, "1/1": 2}) == [{"b": 1}, (masked, 2)]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.backbone = nnx.Linear(12, 16, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.backbone(x))
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.tanh(linen.Dense(16, name="backbone")(x))
        return linen.Dense(5, name="head")(x)


def init(key):
    kernel = lambda n, shape: jax.random.normal(jax.random.fold_in(key, n), shape) / 4  # noqa: E731
    return ({"backbone": kernel(0, (12, 16)), "bias": jnp.zeros(16)}, [kernel(1, (16, 5))])


def apply(params, x):
    return jnp.tanh(x @ params[0]["backbone"] + params[0]["bias"][None]) @ params[1][0]


MODELS = {"nnx": Net, "linen": LinenNet(), "functions": (init, apply)}


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def users_labels(params):
    """As Flax's own pages freeze a backbone."""
    if isinstance(params, dict):
        return traverse_util.path_aware_map(
            lambda path, _: "off" if "backbone" in path else "on", params
        )
    return label_by_path(params)


def freezing():
    own = optax.adamw(0.1, mask=decays_by_path)
    return optax.multi_transform({"on": own, "off": optax.set_to_zero()}, users_labels)


def trained(model, optimizer, steps=3, **options):
    plan = plan_for(model, batch=regression_batch, loss=squares, optimizer=optimizer, **options)
    state, step = init_state(plan, seed=0), build_step(plan)
    for number in range(steps):
        state, _ = step(state, shard_batch(plan, regression_batch(number)))
    return to_portable_state(plan, state), plan


def by_plain_optax(model, optimizer, params, tree):
    """The same steps over the user's tree, in a loop of optax alone."""
    own = ParameterTree(tree)
    nested = own.nest(params)

    def call(nested, batch):
        if isinstance(model, tuple):
            return squares(lambda x: apply(nested, x), batch)
        if isinstance(model, linen.Module):
            return squares(lambda x: model.apply({"params": nested}, x), batch)
        graph, state = nnx.split(Net(nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, nested)
        return squares(nnx.merge(graph, state), batch)

    state = optimizer.init(nested)
    for number in range(3):
        grads = jax.grad(call)(nested, regression_batch(number))
        updates, state = optimizer.update(grads, state, nested)
        nested = optax.apply_updates(nested, updates)
    return own.by_name(nested, [*params])


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_what_a_path_freezes_stays_and_the_rest_is_plain_optax(kind, zero):
    options = {"zero": zero, "persistence_threshold": 0}
    start, plan = trained(MODELS[kind], freezing(), steps=0, **options)
    after, _ = trained(MODELS[kind], freezing(), **options)
    before = {name: np.asarray(x) for name, x in start["params"].items()}
    expected = by_plain_optax(MODELS[kind], freezing(), before, plan.model.parameter_names())
    for name, value in after["params"].items():
        if "backbone" in name or name.startswith("0/"):
            np.testing.assert_array_equal(value, before[name])
        else:
            np.testing.assert_allclose(value, expected[name], atol=TOLERANCE)
            assert np.abs(value - before[name]).max() > 0.01


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [zerojax.adamw, zerojax.adam8bit, zerojax.lamb])
def test_masks_of_our_own_optimizers_see_the_tree_too(make):
    seen = []

    def mask(params):
        seen.append(params)
        return {"backbone": {"kernel": True, "bias": False}, "blocks": False, "head": False}

    plan = plan_for(
        Net,
        batch=regression_batch,
        loss=squares,
        optimizer=make(0.1, weight_decay=0.1, mask=mask),
        zero=1,
    )
    assert {*seen[-1]} == {"backbone", "blocks", "head"}
    assert {*seen[-1]["blocks"]} == {0, 1, 2}
    if plan.tx.settings is not None:
        settings = plan.tx.settings(dict(plan.abstract_state["params"]))
        assert [name for name, of in settings.items() if of.weight_decay] == ["backbone/kernel"]


def test_a_run_shows_the_state_as_optax_has_it():
    optimizer = optax.adam(0.1)
    trainer = zerojax.train(
        Net,
        {"zero": 3, "persistence_threshold": 0},
        regression_batch,
        loss=squares,
        optimizer=optimizer,
        steps=1,
        run_dir=None,
        precision="fp32",
    )
    state = trainer.optimizer_state()
    params = nnx.to_pure_dict(nnx.state(trainer.to_model(), nnx.Param))
    expected = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    shapes = [x.shape for x in jax.tree.leaves(expected)]
    assert [x.shape for x in jax.tree.leaves(state)] == shapes
