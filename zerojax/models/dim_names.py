"""Names that a model gives the dimensions of its parameters: `nnx.with_partitioning`,
`nn.with_partitioning`, `nn.with_logical_partitioning`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen, nnx
from flax.core import meta
from jax.sharding import NamedSharding

from zerojax.tracing import trees

DimNames = tuple[str | tuple[str, ...] | None, ...]
"""The name of each trailing dimension of a parameter: one, several or none."""
AxisRules = tuple[tuple[str, str | tuple[str, ...] | None], ...]
"""Table of (name of a dimension, mesh axes over which it is split), as Flax has it."""


def names_in_variable(variable: object) -> DimNames | None:
    """Returns the names that an NNX variable has in its metadata; None if it has none.

    The variable's own table (`sharding_rules`) is applied to them.
    """
    if not isinstance(variable, nnx.Variable):
        return None
    found = variable.get_metadata().get("out_sharding")
    if isinstance(found, NamedSharding):
        found = found.spec
    if not found:
        return None
    own = dict(variable.get_metadata().get("sharding_rules") or ())
    return tuple(own.get(name, name) if isinstance(name, str) else name for name in found)


def names_in_boxes(variables: Mapping[str, Any]) -> dict[str, DimNames]:
    """Returns {name of a Linen parameter: the names in its box}, of a tree with boxes."""
    is_box = lambda x: isinstance(x, meta.Partitioned)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(variables.get("params", {}), is_leaf=is_box)
    return {trees.path_name(path): tuple(x.names) for path, x in leaves if is_box(x)}


def rules_in_context() -> AxisRules | None:
    """Returns the table of Flax's `logical_axis_rules` context; None outside of one."""
    return tuple((name, axes) for name, axes in linen.get_logical_axis_rules()) or None
