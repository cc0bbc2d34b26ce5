"""The one jitted training step: forward, backward, reduction, update, all in one donated program.

Knows plans and traces everything; never runs a loop and never reads a value back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import zero
from zerojax.model import Loss
from zerojax.planned import Planned
from zerojax.state import TrainState, step_key
from zerojax.updates import build_norm, build_update

Metrics = dict[str, jax.Array]


def build_step(plan: Planned) -> Any:
    """The training step of a plan, jitted once.

    Returns:
      `step(state, batch) -> (state, metrics)`. `state` is donated: use only what comes back.
      `batch` comes from `shard_batch`. Metrics are replicated scalars on the devices: "loss"
      (float32, the global sum divided by the global weight), "weight" (float32), "grad_norm"
      (float32, before clipping), "bad_leaf" (int32, number of the first parameter whose gradient
      is not finite, -1 where all are), "skipped" (int32, 1 when loss or gradients were not finite
      and nothing but the counters changed) and "num_skipped" (int32, of the run so far).
      `step.lower(...)` gives the program. A loop that never waits queues steps without end: wait
      for a metric at least every 64 steps (`Trainer` does).
    """
    gradients = zero.build_gradients(pass_config(plan))
    replicated = NamedSharding(plan.mesh, P())
    read_norm, update = build_norm(plan), build_update(plan)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        key = step_key(state["rng"], state["step"])
        sums, grads, extras = gradients(
            state["params"], state["frozen"], state["extras"], jax.random.key_data(key), batch
        )
        loss, scale = sums["loss"] / sums["weight"], 1 / sums["weight"]
        grad_norm, bad_leaf = read_norm(grads, scale)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        params, opt_state = update(grads, state, scale, grad_norm, ~finite, key)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        skipped = 1 - finite.astype(jnp.int32)
        new_state = TrainState(
            step=state["step"] + 1,
            skipped=state["skipped"] + skipped,
            rng=state["rng"],
            params=params,
            frozen=state["frozen"],
            opt_state=opt_state,
            extras=jax.tree.map(keep, extras, state["extras"]),
        )
        metrics = {
            "loss": loss,
            "weight": sums["weight"],
            "grad_norm": grad_norm,
            "bad_leaf": bad_leaf,
            "skipped": skipped,
            "num_skipped": new_state["skipped"],
        }
        return new_state, metrics

    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(plan.state_shardings, replicated),
        compiler_options=dict(plan.compiler_options) or None,
    )


def build_evaluation(plan: Planned, loss: Loss | None = None) -> Any:
    """The evaluation of a plan, jitted once.

    Args:
      loss: what to evaluate, as the training loss; None takes the plan's.

    Returns:
      `evaluate(state, batch) -> {"loss": sum, "weight": sum}`, float32 scalars over the global
      batch. The model runs in evaluation mode; the state is not donated and does not change.
    """
    forward = zero.build_forward(pass_config(plan), loss or plan.loss)

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        return forward(state["params"], state["frozen"], state["extras"], state["rng"], batch)

    return jax.jit(evaluate, out_shardings=NamedSharding(plan.mesh, P()))


def pass_config(plan: Planned) -> zero.PassConfig:
    """What the forward and backward pass needs of a plan."""
    return zero.PassConfig(
        model=plan.model,
        loss=plan.loss,
        mesh=plan.mesh,
        placement=plan.placement,
        precision=plan.precision,
        num_microbatches=plan.num_microbatches,
        reduce_bucket_size=plan.settings.reduce_bucket_size,
        allgather_bucket_size=plan.settings.allgather_bucket_size,
        sequence_sharding=plan.settings.sequence_sharding,
        regather=plan.regather,
    )
