"""The learning rate that a report shows is that of the user's optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.optim.optax_rates import schedule_of

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
WITH_SCHEDULE = {
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(SCHEDULE)),
    "momentum": optax.sgd(SCHEDULE, momentum=0.9),
    "lamb": optax.lamb(SCHEDULE),
    "scale(-1)": optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), matrices), optax.sgd(SCHEDULE)
    ),
}
WITHOUT = {
    "no product": optax.scale_by_adam(),
    "the sign alone": optax.adafactor(SCHEDULE),
    "groups": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1)}, lambda params: dict.fromkeys(params, "a")
    ),
    "two numbers": optax.chain(optax.scale(0.5), optax.sgd(SCHEDULE)),
    "a scaled update": optax.chain(optax.adam(SCHEDULE), optax.scale(0.5)),
    "clipped afterwards": optax.chain(optax.sgd(SCHEDULE), optax.clip(1.0)),
    "every fourth step": optax.MultiSteps(optax.adam(SCHEDULE), 4),
    "needs a value": optax.lbfgs(),
}


@pytest.mark.parametrize("name", WITH_SCHEDULE)
def test_the_rate_is_the_schedule(name):
    rate = schedule_of(WITH_SCHEDULE[name])
    for count in (0, 5, 10, 50):
        np.testing.assert_allclose(rate(count), SCHEDULE(count), rtol=1e-6)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_one_rate_has_none(name):
    assert schedule_of(WITHOUT[name]) is None


def test_reports_have_the_rate():
    def init(key):
        return {"w": jnp.ones((4, 4))}

    def batch(step):
        return {"x": np.ones((8, 4), np.float32)}

    trainer = zerojax.train(
        (init, lambda params, x: x @ params["w"]),
        {"zero": 1},
        batch,
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optax.adamw(SCHEDULE),
        steps=3,
        run_dir=None,
        log=zerojax.LogConfig(every=1, console="quiet"),
    )
    found = [row["learning_rate"] for row in trainer.history]
    np.testing.assert_allclose(found, [SCHEDULE(step) for step in range(3)], rtol=1e-6)
    assert schedule_of(optax.sgd(0.5))(7) == 0.5
