"""The one jitted training step: forward, backward, reduction, update, all in one donated program.

Knows plans and traces everything; never runs a loop and never reads a value back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import collectives, zero
from zerojax.model import Loss
from zerojax.planned import Planned
from zerojax.state import TrainState, step_key

Metrics = dict[str, jax.Array]


def build_step(plan: Planned) -> Any:
    """The training step of a plan, jitted once.

    Returns:
      `step(state, batch) -> (state, metrics)`. `state` is donated: use only what comes back.
      `batch` comes from `shard_batch`. Metrics are replicated scalars on the devices: "loss"
      (float32, the global sum divided by the global weight), "weight" (float32), "grad_norm"
      (float32, before clipping), "skipped" (int32, 1 when loss or gradients were not finite and
      nothing but the counters changed) and "num_skipped" (int32, of the run so far).
      `step.lower(...)` gives the program. A loop that never waits queues steps without end: wait
      for a metric at least every 64 steps (`Trainer` does).
    """
    gradients = zero.build_gradients(pass_config(plan))
    replicated = NamedSharding(plan.mesh, P())
    specs = plan.state_shardings["params"]
    tx = optax.with_extra_args_support(plan.tx)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        key_data = jax.random.key_data(step_key(state["rng"], state["step"]))
        sums, grads, extras = gradients(
            state["params"], state["frozen"], state["extras"], key_data, batch
        )
        grads = {
            name: jax.lax.with_sharding_constraint(grad / sums["weight"], specs[name])
            for name, grad in grads.items()
        }
        loss = sums["loss"] / sums["weight"]
        grad_norm = collectives.global_norm(grads, specs)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = tx.update(
            grads, state["opt_state"], state["params"], grad_norm=grad_norm
        )
        params = optax.apply_updates(state["params"], updates)
        # where, not cond: a cond costs 4 to 14 bytes per parameter of traffic and a copy of the
        # state.
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        skipped = 1 - finite.astype(jnp.int32)
        new_state = TrainState(
            step=state["step"] + 1,
            skipped=state["skipped"] + skipped,
            rng=state["rng"],
            params=jax.tree.map(keep, params, state["params"]),
            frozen=state["frozen"],
            opt_state=jax.tree.map(keep, opt_state, state["opt_state"]),
            extras=jax.tree.map(keep, extras, state["extras"]),
        )
        metrics = {
            "loss": loss,
            "weight": sums["weight"],
            "grad_norm": grad_norm,
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
