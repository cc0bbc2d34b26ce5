"""State that changes once per optimizer step, from counts that the forward passes add up.

Handles variables and their rules; other modules sum the counts over microbatches and devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from zerojax.tracing import trees
from zerojax.tracing.protocol import Arrays, Rule, StepRule


class StepCount(nnx.Variable):
    """Integer counts of a step, from which another variable is updated once per optimizer step.

    A forward pass adds the counts of its own rows: `self.load[...] += counts`. The counts are
    summed over all microbatches and devices. At the end of an optimizer step, the variable
    `changes` of the same module becomes `rule(value, counts)` and the counts are reset to 0. The
    result does not depend on the number of devices and microbatches if the counts of single rows do
    not. Skipped steps and evaluation change neither variable. Both variables are untrained and are
    saved in checkpoints.

    >>> class Router(nnx.Module):
    ...     def __init__(self):
    ...         self.bias = nnx.Variable(jnp.zeros(4))
    ...         self.load = StepCount(jnp.zeros(4, jnp.int32), changes="bias", rule=raise_idle)
    >>> def raise_idle(bias, counts):
    ...     return bias + 0.1 * (counts == 0)
    >>> router = Router()
    """

    def __init__(self, value: ArrayLike, *, changes: str, rule: Rule, **metadata: Any) -> None:
        """Creates the counts.

        Args:
          value: initial counts, usually zeros; integers of any shape.
          changes: name of an attribute of the same module that is an `nnx.Variable`, not an
            `nnx.Param`.
          rule: function (value of that variable, counts of the step) that returns the next value,
            with the same shape and dtype. Arrays have the shapes of the single module; for stacked
            layers the rule is vmapped. Stacked layers need equal rules: one function, or objects
            with `==`.

        Raises:
          TypeError: `value` is not an integer array.
        """
        dtype = jnp.result_type(value)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"a StepCount of dtype {dtype.name} is not supported, because floating-point sums "
                "depend on the number of devices; use integers, such as jnp.zeros(4, jnp.int32)"
            )
        super().__init__(value, changes=changes, rule=rule, ndim=jnp.ndim(value), **metadata)


def find_step_rules(variables: Mapping[Any, Any], extra_paths: Mapping[str, Any]) -> dict[str, Any]:
    """Finds the `StepCount`s in a module: {name of the count: its `StepRule`}.

    Args:
      variables: {path: variable or array} of the module's whole state.
      extra_paths: {name: path} of all state that is not a parameter.

    Raises:
      ValueError: the variable that a count changes does not exist, is a parameter or the count
        itself, or two counts change it.
    """
    rules: dict[str, StepRule] = {}
    for name, path in extra_paths.items():
        count = variables[path]
        if not isinstance(count, StepCount):
            continue
        changes = count.get_metadata("changes")
        target = trees.path_name((*path[:-1], changes))
        if target not in extra_paths or target == name:
            raise ValueError(
                f"{name} is a StepCount with changes={changes!r}, but its module has no untrained "
                f"variable {changes}; add self.{changes} = nnx.Variable(...)"
            )
        if target in (rule.target for rule in rules.values()):
            raise ValueError(
                f"two StepCounts change {target}; use one StepCount with one rule for both counts"
            )
        rules[name] = StepRule(target, count.get_metadata("rule"), count.get_metadata("ndim"))
    return rules


def after_step(extras: Arrays, rules: Mapping[str, StepRule]) -> Arrays:
    """Computes the extras (arrays that are not parameters) after a step: applies rules, resets
    counts to 0.

    Args:
      extras: unsharded arrays; counts are summed over the whole batch.
      rules: {name of the count: its rule}.
    """
    changed = dict(extras)
    for name, rule in rules.items():
        changed[rule.target] = rule.apply(extras[rule.target], extras[name])
        changed[name] = jnp.zeros_like(extras[name])
    return changed


def check_step_rules(rules: Mapping[str, StepRule], extras: Arrays) -> None:
    """Checks that each rule preserves the shape and dtype of its variable.

    Args:
      rules: {name of the count: its rule}.
      extras: {name: `ShapeDtypeStruct`}.

    Raises:
      ValueError: a rule returns another shape or dtype.
    """
    for name, rule in rules.items():
        old = extras[rule.target]
        new = jax.eval_shape(rule.apply, old, extras[name])
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"the rule of {name} returns {new.dtype.name}{list(new.shape)} for {rule.target}, "
                f"which is {old.dtype.name}{list(old.shape)}; return the same shape and dtype, for "
                "example with .astype(old.dtype)"
            )
