"""Steps whose optimizer's numbers are inputs of the program, not constants in it.

Learning rate, decays and clipping of a plain step are constants of its compiled program, so another
learning rate is another program. With `PlanInputs.numbers_are_inputs` a small program computes them
for the coming update, and the step takes them as float32 scalars. Plans that differ only in these
numbers then have equal programs, which JAX's cache of compiled programs holds once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.tree_types import Batch
from zerojax.optim import Optimizer
from zerojax.passes.update import true_shapes
from zerojax.placement.state import TrainState
from zerojax.plan.make import Plan


def takes_numbers(plan: Plan) -> bool:
    """Returns whether the step of a plan takes its optimizer's numbers as inputs.

    It does not if the plan does not ask for it, if the optimizer is one of optax or adam8bit, or if
    state is offloaded: these compute their numbers elsewhere.
    """
    is_asked = plan.inputs.numbers_are_inputs and plan.offload is None
    return is_asked and isinstance(plan.tx, Optimizer) and plan.tx.numbers is not None


class StepWithNumbers:
    """Compiled step `(state, batch)` that computes the numbers of the update and passes them on.

    Args:
      plan: plan of the step, for which `takes_numbers` holds.
      jitted: jitted step `(state, batch, numbers)`.
    """

    def __init__(self, plan: Plan, jitted: Any) -> None:
        tx, shapes = plan.tx, true_shapes(plan)
        assert isinstance(tx, Optimizer)
        assert tx.numbers is not None
        compute, params = tx.numbers, plan.abstract_state["params"]
        whole = {n: jax.ShapeDtypeStruct(shapes[n], leaf.dtype) for n, leaf in params.items()}
        replicated = NamedSharding(plan.mesh, P())

        def numbers(step: jax.Array, skipped: jax.Array) -> Any:
            return compute(step - skipped, whole)

        self._jitted, self._numbers = jitted, jax.jit(numbers, out_shardings=replicated)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        self._abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
            jax.eval_shape(numbers, count, count),
        )

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        numbers = self._numbers(state["step"], state["skipped"])
        return self._jitted(state, batch, numbers)

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """Traces the step, with numbers of any value."""
        return self._jitted.trace(state, batch, self._abstract)

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """Lowers the step, with numbers of any value."""
        return self._jitted.lower(state, batch, self._abstract)
