"""How gradients become parameters: the optimizers' own update in the step, at every stage.

A trajectory on one device, updated by optax itself, is what every other has to follow.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import zerojax
from pallas_kernels.choice import Choice
from tests.support.marks import slow
from tests.support.offload_disk_runs import Regression
from tests.support.recipe import CLIPPED, DECAYED, RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, regression_batch, text_batch, train_for
from zerojax.optim import decay_mask
from zerojax.optim.precision import Precision
from zerojax.passes.update import build_norm
from zerojax.plan.reasons import describe_update

STEPS = 6
RATE = 1e-3
# Near 0, Adam's eps decides what a rounding error of a gradient becomes; see
# tests/support/trajectories.py.
EPS = 1e-5


def plan_of(optimizer, zero, mesh=None, precision="fp32", **options):
    mesh = mesh or {"data": 8}
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return zerojax.make_plan(
        reference_model("gpt2"),
        zerojax.make_mesh(mesh, devices=devices),
        example_batch=text_batch(0),
        optimizer=optimizer,
        zero=zero,
        precision=precision,
        **options,
    )


class Run:
    """A compiled step, and what it does from the start."""

    def __init__(self, plan, *, uneven=False):
        self.plan, self.step, self.uneven = plan, zerojax.build_step(plan), uneven
        self.restart()

    def restart(self):
        self.state, self.taken = zerojax.init_state(self.plan), 0
        if self.uneven:
            kept = self.plan.state_shardings["params"]
            made = jax.jit(make_uneven, out_shardings=kept)(self.state["params"])
            self.state = {**self.state, "params": made}

    def __call__(self, steps, *, spoilt=False):
        """Losses of so many steps more; with `spoilt` their gradients are not finite."""
        losses = []
        for _ in range(steps):
            batch = dict(text_batch(self.taken))
            if spoilt:
                batch["targets"] = np.full_like(batch["targets"], 10_000)  # no token of the model
            placed = zerojax.shard_batch(self.plan, batch)
            self.state, metrics = self.step(self.state, placed)
            losses.append(float(metrics["loss"]))
            self.taken += 1
        return np.array(losses)


OWN = {
    "adamw": lambda **more: zerojax.adamw(RATE, eps=EPS, **RECIPE, **more),
    "lion": lambda **more: zerojax.lion(RATE / 10, **DECAYED, **more),
    "lamb": lambda **more: zerojax.lamb(RATE, eps=EPS, **DECAYED, **more),
    "sgd": lambda **more: zerojax.sgd(0.1, momentum=0.9, **CLIPPED, **more),
}
DECAY = {"weight_decay": 0.1, "mask": decay_mask}
OPTAX = {
    "adamw": lambda: optax.adamw(RATE, b1=0.9, b2=0.95, eps=EPS, **DECAY),
    "lion": lambda: optax.lion(RATE / 10, b1=0.9, b2=0.99, **DECAY),
    "lamb": lambda: optax.lamb(RATE, b1=0.9, b2=0.999, eps=EPS, **DECAY),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
}


def make_uneven(params):
    """Layers of different sizes, so that one ratio for all of them is far from theirs."""

    def of_layers(x):
        return x * (0.5 + 2.5 * jnp.arange(len(x), dtype=x.dtype)).reshape(-1, *(1,) * (x.ndim - 1))

    return {n: of_layers(x) if n.startswith("blocks/") else x for n, x in params.items()}


def layers_apart(params):
    """Every layer of the model in arrays of its own, as `optax.lamb` wants it."""
    flat = {name: x for name, x in params.items() if not name.startswith("blocks/")}
    rows = ((name, x) for name, x in params.items() if name not in flat)
    return flat | {f"{name}/{layer}": x for name, rows in rows for layer, x in enumerate(rows)}


def losses_of_layers_apart(tx):
    """Losses on one device of the model with all layers in arrays of their own; no step, no plan's
    optimizer."""
    plan = plan_of(None, 0, {"data": 1})
    state = zerojax.init_state(plan)

    def loss(params, batch):
        run = plan.model.run(
            params, state["extras"], jax.random.key(0), lambda model: plan.loss(model, batch)
        )
        total, weight = run[0]
        return total / weight

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        apart = layers_apart(params)
        updates, opt_state = tx.update(layers_apart(grads), opt_state, apart)
        moved = optax.apply_updates(apart, updates)
        return value, {name: stacked(moved, name) for name in params}, opt_state

    def stacked(apart, name):
        rows = [x for key, x in apart.items() if key.startswith(f"{name}/")]
        return jnp.stack(rows) if rows else apart[name]

    params, losses = make_uneven(state["params"]), []
    opt_state = tx.init(layers_apart(params))
    for index in range(STEPS):
        value, params, opt_state = step(params, opt_state, text_batch(index))
        losses.append(float(value))
    return np.array(losses)


@pytest.fixture(scope="module")
def alone():
    """name -> losses on one device, updated by optax."""
    known = {}

    def losses(name):
        if name not in known:
            clipped = optax.chain(optax.clip_by_global_norm(1.0), OPTAX[name]())
            run = Run(plan_of(clipped, 0, {"data": 1})) if name != "lamb" else None
            known[name] = run(STEPS) if run else losses_of_layers_apart(clipped)
        return known[name]

    return losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "zero", "mesh"),
    [
        slow("adamw", 0, {"data": 8}),
        ("adamw", 3, {"data": 4, "model": 2}),
        slow("adamw", 1, {"replica": 2, "data": 4}),
        slow("lion", 1, {"data": 8}),
        ("lamb", 3, {"data": 8}),
        slow("lamb", 0, {"data": 8}),
        slow("lamb", 1, {"replica": 2, "data": 4}),
        slow("lamb", 2, {"data": 2, "model": 4}),
        slow("lamb", 1, {"data": 2, "model": 2, "stage": 2}),
        slow("lamb", 3, {"data": 4, "stage": 2}),
        slow("sgd", 2, {"data": 8}),
    ],
)
def test_updates_in_place_follow_optax_on_one_device(alone, name, zero, mesh):
    run = Run(plan_of(OWN[name](), zero, mesh), uneven=name == "lamb")
    assert np.abs(run(STEPS) - alone(name)).max() <= TOLERANCE
    assert int(run.state["skipped"]) == 0


ONLY_A_RATE = {
    "adamw": (zerojax.adamw, optax.adamw, 1e-2),
    "lion": (zerojax.lion, optax.lion, 1e-3),
    "lamb": (zerojax.lamb, optax.lamb, 1e-2),
    "sgd": (zerojax.sgd, optax.sgd, 1e-1),
    "muon": (functools.partial(zerojax.muon, dimensions=None), optax.contrib.muon, 1e-2),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("own", "optaxs", "rate"), ONLY_A_RATE.values(), ids=ONLY_A_RATE)
def test_with_a_learning_rate_alone_a_step_is_that_of_optax(own, optaxs, rate):
    """In place on shards that no parameter divides into: other programs, so sums round apart."""
    options = {"batch": regression_batch, "zero": 3, "steps": 4, "persistence_threshold": 0}
    ours, theirs = (train_for(Regression, optimizer=tx(rate), **options) for tx in (own, optaxs))
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=0, atol=TOLERANCE)
    assert theirs.losses[0] - theirs.losses[-1] > 100 * TOLERANCE


def test_the_first_leaf_that_is_not_finite_is_found_wherever_it_lies():
    plan = plan_of(OWN["adamw"](), 3, {"data": 4, "model": 2})
    leaves = plan.abstract_state["params"]
    norm = jax.jit(build_norm(plan))
    names = list(leaves)
    ones = {
        name: jax.device_put(np.ones(leaf.shape, np.float32), leaf.sharding)
        for name, leaf in leaves.items()
    }
    found = norm(ones, jnp.float32(0.5))
    count = sum(leaf.size for leaf in leaves.values())
    np.testing.assert_allclose(found.norm, 0.5 * np.sqrt(count), rtol=1e-6)
    assert int(found.bad_leaf) == -1
    for index in (0, len(names) // 2, len(names) - 1):
        large = {**ones, names[index]: 100 * ones[names[index]]}
        found, size = norm(large, jnp.float32(0.5)), leaves[names[index]].size
        assert int(found.largest_leaf) == index
        share = 1e4 * size / (1e4 * size + count - size)
        np.testing.assert_allclose(found.largest_share, share, rtol=1e-5)
        spoilt = np.ones(leaves[names[index]].shape, np.float32)
        spoilt.flat[-1] = np.inf
        bad = {**ones, names[index]: jax.device_put(spoilt, leaves[names[index]].sharding)}
        found = norm(bad, jnp.float32(1))
        assert not np.isfinite(found.norm)
        assert int(found.bad_leaf) == index
        found = norm({**bad, names[-1]: ones[names[-1]] * np.nan}, jnp.float32(1))
        assert int(found.bad_leaf) == index, "of several the first"


@pytest.fixture(scope="module")
def in_bfloat16():
    """Losses with float32 masters and moments."""
    return Run(plan_of(OWN["adamw"](), 3, precision="bf16"))(16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [
        slow(Precision(param_dtype=jnp.bfloat16), id="no masters"),
        slow(Precision(moments_dtype=jnp.bfloat16), id="small moments"),
        pytest.param(Precision(param_dtype=jnp.bfloat16, moments_dtype=jnp.bfloat16), id="both"),
    ],
)
def test_less_state_learns_as_well(precision, in_bfloat16):
    """Batches repeat after four, so a model learns them. Rounding costs some of it: 3 % allowed."""
    run = Run(plan_of(OWN["adamw"](), 3, precision=precision))
    losses, state = run(16), run.state
    masters = in_bfloat16
    assert losses[-1] < masters[0] - 0.9 * (masters[0] - masters[-1])
    np.testing.assert_allclose(losses[-4:], masters[-4:], rtol=0.03)
    dtypes = {x.dtype.name for x in jax.tree.leaves(state["opt_state"]) if x.ndim}
    assert dtypes == {run.plan.precision.moments_dtype.name}
    assert {x.dtype for x in state["params"].values()} == {precision.param_dtype}
    run.restart()
    np.testing.assert_array_equal(run(4), losses[:4])  # rounded by the step's key: reproducible


def test_a_kernel_is_refused_where_there_is_no_gpu_and_the_choice_is_told():
    with pytest.raises(ValueError, match="impl='mosaic_gpu' for adamw"):
        plan_of(OWN["adamw"](impl="mosaic_gpu"), 1)
    # On CPU devices no kernel could run, and nothing is said of it.
    assert not any("optimizer update by" in reason for reason in plan_of(None, 1).reasons)
    plan = plan_of(None, 1)
    kernel, xla = Choice("mosaic_gpu", "asked for"), Choice("xla", "asked for")
    told = describe_update({"update": kernel, "statistics": xla}, plan.tx, (), {}, plan.mesh)
    assert told == ["optimizer update by mosaic_gpu: asked for"]
    told = describe_update({"update": xla, "statistics": kernel}, plan.tx, (), {}, plan.mesh)
    assert told == ["gradient statistics by mosaic_gpu: asked for"]


@pytest.mark.thorough
def test_a_users_own_chain_still_goes_the_way_of_optax(alone):
    chain = optax.chain(zerojax.adamw(RATE, eps=EPS, **RECIPE), optax.scale(1.0))
    losses = Run(plan_of(chain, 2))(STEPS)
    assert np.abs(losses - alone("adamw")).max() <= TOLERANCE
