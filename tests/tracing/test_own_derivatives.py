"""A model's own derivatives (`jax.custom_vjp`) see the gradients of the mean over a whole batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.tracing.jaxpr import has_own_rules
from zerojax.zoo import fp8

ROWS, LIMIT = 32, 2e-3


@jax.custom_vjp
def clipped(x):
    """The value itself; its gradient is clipped, and nearly all of these gradients are larger."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.clip(gradient, -LIMIT, LIMIT),))


def init(key):
    first, second = jax.random.split(key)
    return {
        "layers": jax.random.normal(first, (4, 12, 12)) / 4,
        "head": jax.random.normal(second, (12, 5)),
    }


def apply(params, x):
    def layer(x, kernel):
        return clipped(x + jnp.tanh(x @ kernel)), None

    return clipped(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"])


def batch_of(index):
    random = np.random.default_rng(index)
    return {
        "x": random.normal(size=(ROWS, 12)).astype(np.float32),
        "y": random.normal(size=(ROWS, 5)).astype(np.float32),
        "mask": (random.random(ROWS) < 0.4).astype(np.float32),
    }


def masked(model, batch):
    losses = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def mean(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def counted(model, batch):
    losses = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(losses), losses.size


def norms(loss, **options):
    """Gradient norms of two steps."""
    options = {"optimizer": zerojax.sgd(1.0), "persistence_threshold": 0, **options}
    plan = plan_for((init, apply), loss=loss, batch=batch_of, **options)
    state, step, found = init_state(plan, 0), build_step(plan), []
    for index in range(2):
        state, metrics = step(state, jax.device_put(batch_of(index), plan.batch_sharding))
        found.append(float(metrics["grad_norm"]))
    return plan, found


def plainly(loss, params):
    """The same by `jax.grad` of the mean over the whole batch."""

    def quotient(params, batch):
        class Model:
            def __call__(self, x):
                return apply(params, x)

        result = loss(Model(), batch)
        return result[0] / result[1] if isinstance(result, tuple) else result

    found, gradient = [], jax.jit(jax.grad(quotient))
    for index in range(2):
        grads = gradient(params, batch_of(index))
        found.append(float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))))
        params = jax.tree.map(lambda x, grad: x - grad, params, grads)
    return found


HOST = {"params": "host", "opt_state": "host", "min_elements": 1}
FIXED = {"deterministic": "mesh", "virtual_shards": 16}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        pytest.param(masked, {"zero": 1, "num_microbatches": 4}, id="masked-zero1"),
        pytest.param(counted, {"zero": 2}, id="counted-zero2", marks=pytest.mark.slow),
        pytest.param(
            masked, {"mesh": {"stage": 2}, "zero": 1, "num_microbatches": 4}, id="pipeline"
        ),
        pytest.param(mean, {"zero": 3}, id="mean-zero3"),
        pytest.param(masked, {"devices": 1}, id="one-device"),
        pytest.param(mean, FIXED, id="deterministic"),
        pytest.param(masked, {"offload": HOST, "zero": 1}, id="host", marks=pytest.mark.slow),
    ],
)
def test_a_rule_that_clips_sees_gradients_of_the_mean(loss, options):
    plan, found = norms(loss, **options)
    start = plan_for((init, apply), loss=loss, batch=batch_of, devices=1)
    params = {name: np.asarray(x) for name, x in init_state(start, 0)["params"].items()}
    np.testing.assert_allclose(found, plainly(loss, params), rtol=2e-5)
    assert any("get gradients of the mean" in reason for reason in plan.reasons)


@pytest.mark.thorough
def test_under_a_loss_scale_it_sees_the_scaled_mean():
    """As with any other framework; what is not clipped is divided by the scale again."""
    plan, found = norms(mean, precision="fp16")
    assert plan.traced.batch_weight is not None
    assert all(np.isfinite(found))


def drawn(model, batch):
    mask = jax.random.bernoulli(model.key, 0.5, (len(batch["x"]),)).astype(jnp.float32)
    losses = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return jnp.sum(losses * mask), jnp.sum(mask)


def of_the_model(model, batch):
    losses = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return jnp.sum(losses), jax.lax.stop_gradient(jnp.sum(losses > 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss", "options", "why"),
    [
        (drawn, {}, "the weight is random, or depends on the model"),
        (of_the_model, {}, "the weight is random, or depends on the model"),
        (masked, FIXED, "sums weights in its own order"),
    ],
)
def test_where_the_weight_is_not_known_before_it_is_said(loss, options, why):
    options = {"optimizer": zerojax.sgd(1.0), **options}
    plan = plan_for((init, apply), loss=loss, batch=batch_of, **options)
    assert plan.traced.batch_weight is None
    assert any("gradients of the summed loss" in r and why in r for r in plan.reasons)


@pytest.mark.thorough
def test_models_without_rules_of_their_own_are_computed_as_before():
    plan = plan_for(reference_model("gpt2"))
    assert not has_own_rules(plan.traced.forward.jaxpr)
    assert plan.traced.batch_weight is None
    chunked = plan_for(reference_model("gpt2", loss_chunk=8))
    assert "custom_vjp" in str(chunked.traced.forward)
    assert chunked.traced.batch_weight is None


def test_what_a_rule_gives_is_still_of_the_batch():
    """A rule behind another one is not taken for one of parameters alone."""

    def chained(params, x):
        return clipped(jnp.tanh(clipped(x @ params["layers"][0])) @ params["head"])

    plan = plan_for((init, chained), loss=mean, batch=batch_of)
    assert any("get gradients of the mean" in reason for reason in plan.reasons)
    assert not any("do not depend on the batch" in reason for reason in plan.reasons)


class ScaledAndClipped(nnx.Module):
    """An 8-bit product whose scales follow its gradients, before a rule that clips."""

    def __init__(self, clips, rngs):
        self.clips = clips
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (12, 16)) / 4)
        self.head = nnx.Param(jax.random.normal(rngs.params(), (16, 5)))
        self.history = fp8.init_history(self.kernel[...])

    def __call__(self, x):
        x = jnp.tanh(fp8.fp8_dot(x, self.kernel[...], self.history[...], 1))
        return (clipped(x) if self.clips else x) @ self.head[...]


def scaled(clips, **options):
    options = {"optimizer": zerojax.sgd(1.0), **options}
    return plan_for(
        lambda rngs: ScaledAndClipped(clips, rngs), loss=mean, batch=batch_of, **options
    )


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_rule_that_clips_beside_8_bit_products_sees_gradients_of_the_mean(num_microbatches):
    found = []
    for options in ({"devices": 1}, {"zero": 3, "num_microbatches": num_microbatches}):
        plan = scaled(True, **options)
        assert any("get gradients of the mean" in reason for reason in plan.reasons)
        state, batch = init_state(plan, 0), jax.device_put(batch_of(0), plan.batch_sharding)
        found.append(float(build_step(plan)(state, batch)[1]["grad_norm"]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_a_rule_of_parameters_alone_is_told():
    def clips_a_kernel(params, x):
        return apply({**params, "head": clipped(params["head"] * 2)}, x)

    wanted = "do not depend on the batch gets the gradient of one device's rows"
    for function, told in ((clips_a_kernel, True), (apply, False)):
        plan = plan_for((init, function), loss=mean, batch=batch_of, zero=3)
        assert any(wanted in reason for reason in plan.reasons) is told


def test_8_bit_products_alone_follow_the_size_of_gradients():
    plan = scaled(False)
    assert plan.traced.batch_weight is None
    assert any(
        "gradients of the summed loss, to which their scales adapt" in r for r in plan.reasons
    )


@pytest.mark.thorough
def test_a_batch_without_weight_is_skipped():
    plan = plan_for((init, apply), loss=masked, batch=batch_of)
    batch = {**batch_of(0), "mask": np.zeros(ROWS, np.float32)}
    state = init_state(plan, 0)
    before = jax.tree.map(np.asarray, state["params"])
    state, metrics = build_step(plan)(state, jax.device_put(batch, plan.batch_sharding))
    assert int(metrics["skipped"]) == 1
    chex.assert_trees_all_equal(state["params"], before, strict=True)
