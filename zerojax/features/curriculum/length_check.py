"""Checks on the run's model that weights of 0 at the end of rows have the effect of shorter rows.

A curriculum may replace shorter rows by full rows whose last tokens have weight 0. That is correct
if the loss of a token does not depend on later tokens, and if the loss uses the weights. Both are
checked once, in evaluation mode, with the first batch and the state before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config.curriculum import MAX_RUNGS, CurriculumConfig
from zerojax.config.tree_types import Batch
from zerojax.features.curriculum.row_lengths import WEIGHTS, without_end
from zerojax.placement.decisions import Decisions
from zerojax.placement.state import TrainState

_SUM_TOLERANCE = 1e-4
"""Relative difference of two sums of weights that rounding of float32 sums may cause."""


class LengthCheck:
    """The length check of one run.

    Args:
      config: curriculum with lengths that need weights of 0.
      keys: names of the batch arrays that are shortened.
      build_evaluation: `zerojax.step.build.build_evaluation`.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        keys: Sequence[str],
        build_evaluation: Callable[[Decisions], Any],
    ) -> None:
        self._config, self._keys, self._build_evaluation = config, keys, build_evaluation

    def passes(self, state: TrainState, batch: Batch, plan: Decisions, step: int) -> bool:
        """Compares the losses of two batches that differ only in tokens of weight 0.

        The two losses must be bit-equal, because a masked attention score adds exactly 0 to a sum.
        The weight of the loss must be proportional to the sum of the batch's weights.

        Args:
          state: train state before the step; it is not donated.
          batch: batch of the step, on the devices.
          plan: plan of the row length for which the step is compiled.
          step: number of the step, from 1.

        Returns:
          True if the check is done. False if this batch cannot show a difference, because all its
          tokens are equal or its rows have one token.

        Raises:
          ValueError: the loss of early tokens depends on later ones, does not use the weights, or
            is not finite.
        """
        cut = self._config.length(step) // 2
        if cut < 1:
            return False
        # The weights of the batch may be 0 at tokens whose loss the check needs.
        batch = {**batch, WEIGHTS: _on(batch[WEIGHTS], _ones, cut)}
        early = {**batch, WEIGHTS: _on(batch[WEIGHTS], without_end, cut)}
        names = [name for name in self._keys if name != WEIGHTS]
        changed = {name: _on(batch[name], _with_other_end, cut) for name in names}
        if not any(jax.device_get(_differ(batch[name], changed[name])) for name in names):
            return False
        evaluate = self._build_evaluation(plan)
        one, other = (
            jax.device_get(evaluate(state, each)) for each in (early, {**early, **changed})
        )
        whole = jax.device_get(evaluate(state, batch))
        if not np.isfinite([one["loss"], other["loss"]]).all():
            raise ValueError(
                f"curriculum: the loss of the first {cut} tokens of a row is {one['loss']:.9g}, so "
                "it cannot be checked that weights of 0 replace shorter rows; look at the first "
                "batch, whose targets may be out of range"
            )
        if not all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other))):
            raise ValueError(
                f"curriculum: the loss of the first {cut} tokens of a row is {one['loss']:.9g} or "
                f"{other['loss']:.9g}, depending on later tokens of weight 0, so weights of 0 do "
                f"not replace shorter rows. {self._remedy('use a causal model')}"
            )
        sums = [float(jax.device_get(_sum(each[WEIGHTS]))) for each in (early, batch)]
        share = sums[0] / sums[1] if sums[1] else 0.0
        if not np.isclose(one["weight"], share * whole["weight"], rtol=_SUM_TOLERANCE):
            divide = "divide the loss by that sum"
            raise ValueError(
                f"curriculum: with weights of 0 after token {cut} of each row, the sum of "
                f"batch['weights'] falls to {share:.3g} of its value, but the loss divides by "
                f"{one['weight']:.6g} instead of {share * whole['weight']:.6g}, so its weight is "
                f"not the sum of batch['weights'] over all tokens of a row. {self._remedy(divide)}"
            )
        return True

    def _remedy(self, other: str) -> str:
        return (
            f"A schedule of {len(self._config.all_lengths)} lengths needs weights of 0, one "
            f"of at most {MAX_RUNGS} does not: raise length_step, use fixed_discrete, or {other}"
        )


def _on(array: jax.Array, change: Any, cut: int) -> jax.Array:
    """Returns `change(array, cut)`, computed on the devices; it has the sharding of `array`."""
    return jax.jit(lambda x: change(x, cut), out_shardings=array.sharding)(array)


def _ones(array: jax.Array, _: int) -> jax.Array:
    return jnp.ones_like(array)


def _with_other_end(array: jax.Array, cut: int) -> jax.Array:
    """Returns rows in which the tokens from `cut` on are replaced by the row's first token."""
    return array.at[:, cut:].set(array[:, :1])


@jax.jit
def _differ(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.any(one != other)


@jax.jit
def _sum(weights: jax.Array) -> jax.Array:
    return jnp.sum(weights.astype(jnp.float32))
