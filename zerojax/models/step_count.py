"""State that changes once per optimizer step, by what all passes of the step have counted.

Knows variables and their rules; nothing of microbatches and devices, over which others add counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.tracing import trees
from zerojax.tracing.protocol import Arrays, Rule, StepRule


class StepCount(nnx.Variable):
    """Integers that forward passes add to, from which one array is made anew in each step.

    A pass adds the number of something among its own rows: `self.load[...] += counts`. What all
    microbatches and devices have added is summed; at the end of an optimizer step another variable
    of the same module becomes `rule(its value, counts)`, and the count is 0 again. So both are the
    same on any number of devices and microbatches, where passes count the same. A step that is
    skipped changes neither, and evaluation does not, whatever it counts. Neither is trained; both
    are in checkpoints.

    >>> class Router(nnx.Module):
    ...     def __init__(self):
    ...         self.bias = nnx.Variable(jnp.zeros(4))
    ...         self.load = StepCount(jnp.zeros(4, jnp.int32), changes="bias", rule=raise_idle)
    >>> def raise_idle(bias, counts):
    ...     return bias + 0.1 * (counts == 0)
    >>> router = Router()
    """

    def __init__(self, value: Any, *, changes: str, rule: Rule, **metadata: Any) -> None:
        """A count, best of zeros.

        Args:
          value: integers of any shape.
          changes: attribute of the same module: an `nnx.Variable` that is no `nnx.Param`.
          rule: (value of that variable, counts of the step) -> its next value, same shape and
            dtype; of arrays as the module has them. Where layers are stacked it is mapped over
            them. Layers that are stacked have equal rules: a function, or an object with `==`.

        Raises:
          TypeError: not integers.
        """
        dtype = jnp.result_type(value)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"a StepCount was given {dtype.name}: sums of other numbers depend on the number "
                "of devices; give it integers, such as jnp.zeros(4, jnp.int32)"
            )
        super().__init__(value, changes=changes, rule=rule, ndim=jnp.ndim(value), **metadata)


def find_step_rules(variables: Mapping[Any, Any], extra_paths: Mapping[str, Any]) -> dict[str, Any]:
    """{name of a count: its `StepRule`} of a module.

    Args:
      variables: {path: variable or array}, of all its state.
      extra_paths: {name: path} of what is no parameter.

    Raises:
      ValueError: a count changes what is not there, or what another one changes.
    """
    found: dict[str, StepRule] = {}
    for name, path in extra_paths.items():
        count = variables[path]
        if not isinstance(count, StepCount):
            continue
        changes = count.get_metadata("changes")
        target = trees.path_name((*path[:-1], changes))
        if target not in extra_paths or target == name:
            raise ValueError(
                f"{name} is a StepCount that changes {changes!r}, and its module has no variable "
                f"{changes} that is not trained; add self.{changes} = nnx.Variable(...)"
            )
        if target in (rule.target for rule in found.values()):
            raise ValueError(
                f"two StepCounts change {target}; count in one array, of which one rule makes the "
                "next value"
            )
        found[name] = StepRule(target, count.get_metadata("rule"), count.get_metadata("ndim"))
    return found


def after_step(extras: Arrays, rules: Mapping[str, StepRule]) -> Arrays:
    """The extras after an optimizer step: what counts change is made anew, and counts are 0.

    Args:
      extras: whole arrays, in which counts are sums over the whole batch.
    """
    changed = dict(extras)
    for name, rule in rules.items():
        changed[rule.target] = rule.apply(extras[rule.target], extras[name])
        changed[name] = jnp.zeros_like(extras[name])
    return changed


def check_step_rules(rules: Mapping[str, StepRule], extras: Arrays) -> None:
    """Refuses a rule whose result would not be the next value.

    Args:
      extras: of `ShapeDtypeStruct`s.

    Raises:
      ValueError: another shape or dtype.
    """
    for name, rule in rules.items():
        old = extras[rule.target]
        new = jax.eval_shape(rule.apply, old, extras[name])
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"the rule of {name} makes {new.dtype.name}{list(new.shape)} of {rule.target}, "
                f"{old.dtype.name}{list(old.shape)}; let it keep shape and dtype, as with "
                ".astype(old.dtype)"
            )
