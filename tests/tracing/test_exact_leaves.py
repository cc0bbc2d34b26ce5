"""Floats of a batch that the loss compares, rounds or makes integers of keep all of their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax

WIDTH, CLASSES = 4, 5
INTEGER, COMPARED, ROUNDED = "makes an integer of it", "compares it", "rounds it"


def logits(params, x):
    return jnp.tanh(x @ params["w"].astype(x.dtype)) @ params["v"].astype(x.dtype)


def nll(params, batch, labels):
    scores = logits(params, batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def in_scan(params, b):
    def body(carry, _):
        return carry, jnp.sum(logits(params, b["x"])[jnp.arange(8), carry.astype(int)])

    return lax.scan(body, b["y"], None, length=2)[1].sum()


def layers_in_scan(params, b):
    def layer(h, w):
        h = h @ w
        return jnp.where(h >= 0, h, 0.1 * h), None  # of a layer, not of the batch

    h, _ = lax.scan(layer, b["x"], jnp.stack([params["w"]] * 2))
    return jnp.mean(h @ params["v"])


def in_while(params, b):
    total = lax.while_loop(lambda c: c[0] < b["y"][0], lambda c: (c[0] + 1, c[1] + 1), (0.0, 0.0))
    return jnp.mean(logits(params, b["x"])) * total[1]


def in_cond(params, b):
    score = lambda y: nll(params, b, y.astype(int))  # noqa: E731
    return lax.cond(jnp.sum(params["v"]) > 0, score, lambda y: 2 * score(y), b["y"])


@jax.custom_jvp
def own_rule(x, y):
    return x * (y == 3)


own_rule.defjvp(lambda given, tangents: (own_rule(*given), tangents[0] * (given[1] == 3)))


@jax.custom_vjp
def own_backward(x, y):
    return x * (y > 3)


own_backward.defvjp(lambda x, y: (own_backward(x, y), y), lambda y, g: (g * (y > 3), 0 * y))


def squares(params, b):
    return jnp.mean((jnp.mean(logits(params, b["x"]), -1) - b["y"]) ** 2)


def huber(params, b):
    error = jnp.mean(logits(params, b["x"]), -1) - b["y"]
    return jnp.mean(jnp.where(jnp.abs(error) < 1, error**2, jnp.abs(error)))


def by_hand(params, b):
    found = jnp.argmax(logits(params, b["x"]), -1).astype(jnp.float32)
    return squares(params, {**b, "y": 0.0}) + 0 * jnp.mean((found - b["y"]) == 0)


def mean_where(params, b, chosen):
    return jnp.mean(jnp.where(chosen, logits(params, b["x"])[:, 0], 0))


LOSSES = {
    "astype": (lambda p, b: nll(p, b, b["y"].astype(int)), {"y": INTEGER}),
    "minus one": (lambda p, b: nll(p, b, (b["y"] - 1).astype(jnp.int32)), {"y": INTEGER}),
    "times mask": (
        lambda p, b: nll(p, b, (b["y"] * b["m"]).astype(jnp.int8)),
        {"m": INTEGER, "y": INTEGER},
    ),
    "where": (
        lambda p, b: nll(p, b, jnp.where(b["m"] > 0, b["y"], 0).astype(int)),
        {"m": COMPARED, "y": INTEGER},
    ),
    "where of a layer": (
        lambda p, b: nll(p, b, jnp.where(logits(p, b["x"])[:, 0] > 0, b["y"], 0).astype(int)),
        {"y": INTEGER},
    ),
    "shapes": (
        lambda p, b: nll(
            p, b, jnp.concatenate([b["y"][None, 4:], b["y"][None, :4]], 1).T[:, 0].astype(int)
        ),
        {"y": INTEGER},
    ),
    "stop_gradient": (
        lambda p, b: nll(p, b, lax.stop_gradient(b["y"] + 0.0).astype(int)),
        {"y": INTEGER},
    ),
    "bool": (lambda p, b: mean_where(p, b, b["m"].astype(bool)), {"m": INTEGER}),
    "one_hot": (
        lambda p, b: -jnp.mean(logits(p, b["x"]) * (b["y"][:, None] == jnp.arange(CLASSES)[None])),
        {"y": COMPARED},
    ),
    "accuracy": (
        lambda p, b: mean_where(p, b, jnp.argmax(logits(p, b["x"]), -1) == b["y"]),
        {"y": COMPARED},
    ),
    "accuracy by difference": (by_hand, {"y": COMPARED}),
    "argmax": (lambda p, b: nll(p, b, jnp.argmax(b["soft"], -1)), {"soft": COMPARED}),
    "argsort": (lambda p, b: mean_where(p, b, jnp.argsort(b["y"]) > 2), {"y": COMPARED}),
    "top_k": (lambda p, b: nll(p, b, lax.top_k(b["soft"], 1)[1][:, 0]), {"soft": COMPARED}),
    "searchsorted": (
        lambda p, b: nll(p, b, jnp.searchsorted(jnp.arange(4.0), b["y"])),
        {"y": COMPARED},
    ),
    "floor": (lambda p, b: jnp.mean(logits(p, b["x"])[:, 0] * jnp.floor(b["y"])), {"y": ROUNDED}),
    "round": (lambda p, b: jnp.mean(logits(p, b["x"])[:, 0] * jnp.round(b["y"])), {"y": ROUNDED}),
    "jit": (lambda p, b: jax.jit(lambda y: nll(p, b, y.astype(int)))(b["y"]), {"y": INTEGER}),
    "remat": (
        lambda p, b: jax.checkpoint(lambda y: nll(p, b, y.astype(int)))(b["y"]),
        {"y": INTEGER},
    ),
    "vmap": (
        lambda p, b: jnp.mean(jax.vmap(lambda s, y: s[y.astype(int)])(logits(p, b["x"]), b["y"])),
        {"y": INTEGER},
    ),
    "scan": (in_scan, {"y": INTEGER}),
    "while": (in_while, {"y": COMPARED}),
    "cond": (in_cond, {"y": INTEGER}),
    "custom_jvp": (
        lambda p, b: jnp.mean(own_rule(logits(p, b["x"])[:, 0], b["y"])),
        {"y": COMPARED},
    ),
    "custom_vjp": (
        lambda p, b: jnp.mean(own_backward(logits(p, b["x"])[:, 0], b["y"])),
        {"y": COMPARED},
    ),
    "lengths": (lambda p, b: mean_where(p, b, jnp.arange(8) < jnp.sum(b["m"])), {"m": COMPARED}),
    "callback": (
        lambda p, b: nll(
            p,
            b,
            jax.pure_callback(
                lambda y: np.asarray(y).astype(np.int32),
                jax.ShapeDtypeStruct((8,), jnp.int32),
                b["y"],
            ),
        ),
        {"y": "passes it to a callback"},
    ),
    # Inputs of layers, and targets of a regression, are cast.
    "regression": (squares, {}),
    "huber": (huber, {}),
    "layers in a scan": (layers_in_scan, {}),
    "not a number": (
        lambda p, b: jnp.mean(logits(p, jnp.nan_to_num(jnp.where(jnp.isnan(b["x"]), 0, b["x"])))),
        {},
    ),
    "normalized": (
        lambda p, b: jnp.mean(
            logits(p, jnp.clip((b["x"] - jnp.mean(b["x"])) / jnp.std(b["x"]), -3, 3))
        ),
        {},
    ),
    "relu": (lambda p, b: jnp.mean(logits(p, jax.nn.relu(b["x"]))), {}),
    "shuffled": (
        lambda p, b: jnp.mean(logits(p, jax.random.permutation(jax.random.key(0), b["x"]))),
        {},
    ),
}


def init(key):
    w, v = jax.random.normal(key, (2, WIDTH, max(WIDTH, CLASSES)))
    return {"w": w[:, :WIDTH], "v": v[:, :CLASSES]}


MODEL = (init, lambda params, function: function(params))


def batch_of(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(64, WIDTH)).astype(np.float32),
        "y": rng.integers(0, CLASSES, 64).astype(dtype),
        "m": np.ones(64, np.float32),
        "soft": rng.uniform(size=(64, CLASSES)).astype(np.float32),
    }


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_loss_needs_exactly_is_kept(name):
    """With 8 devices, a part has 8 rows."""
    function, wanted = LOSSES[name]
    loss = lambda model, batch: model(lambda params: function(params, batch))  # noqa: E731
    plan = zerojax.make_plan(
        MODEL, {"zero": 1}, example_batch=batch_of(), loss=loss, precision="bf16"
    )
    assert plan.traced.exact_leaves == wanted
    (line,) = [reason for reason in plan.reasons if reason.startswith("batch: ")]
    kept, _, cast = line.rpartition("; ") if wanted else ("", "", line)
    assert all(f"{leaf!r}" in kept and why in kept for leaf, why in wanted.items())
    assert cast.endswith("cast to bfloat16")
    assert all(f"{leaf!r}" in cast for leaf in batch_of().keys() - wanted)
