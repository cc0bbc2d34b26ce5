"""A float16 run that no loss scale helps ends, also when that happens between two reports."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.config import LogConfig, LossScale
from zerojax.optim.precision import Precision
from zerojax.training.reporting import MAX_STEPS_UNDER_WAY

FLOAT16 = Precision(
    compute_dtype=jnp.float16,
    reduce_dtype=jnp.float16,
    loss_scale=LossScale(initial=1.0, hysteresis=1),
)


def loss(params, batch):
    steepness = jnp.max(batch["steepness"]).astype(jnp.float32)
    return 100 * steepness * params["steep"].astype(jnp.float32).sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("steep_at", "ends_at"), [(13, 13 + MAX_STEPS_UNDER_WAY), (58, 60)])
def test_one_step_at_the_floor_ends_the_run(steep_at, ends_at):
    # A gradient of 3e6, which float16 does not hold under any scale >= 1.
    steepness = [3e4 if step == steep_at else 1.0 for step in range(1, 61)]
    batches = [{"steepness": np.full(8, value, np.float32)} for value in steepness]
    seen = []
    with pytest.raises(FloatingPointError, match=f"step {steep_at} overflowed.*'steep'"):
        zerojax.train(
            (lambda key, batch: {"steep": jnp.full(8, 1e-4)}, loss),
            None,
            batches,
            loss=lambda apply, batch: apply(batch),
            optimizer=optax.sgd(1e-6),
            precision=FLOAT16,
            global_batch_size=8,
            steps=60,
            log=LogConfig(every=10, console="quiet"),
            callbacks=[lambda trainer, values: seen.append(trainer.num_steps)],
        )
    assert seen[-1] <= ends_at
