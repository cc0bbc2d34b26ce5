"""Tensor-parallel rules from the names that a Flax model gives the dimensions of its parameters."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from flax import linen

from zerojax import models
from zerojax.config import MeshConfig
from zerojax.config.tree_types import Batch
from zerojax.models.dim_names import AxisRules, DimNames
from zerojax.placement.device_mesh import AXES, MODEL
from zerojax.tracing.protocol import Loss, Model, ModelLike


def with_named_dims(
    settings: MeshConfig, model: Model, axis_rules: AxisRules | None
) -> tuple[MeshConfig, list[str]]:
    """Adds the rules that follow from the names of dimensions, unless other rules are given.

    Args:
      settings: mesh options. Their own `rules`, and without a table in them also the
        `tensor_parallel_rules` of the model, take precedence.
      model: the user's model, after its arrays were traced.
      axis_rules: table of the Flax context of the run; `settings.logical_axis_rules` replaces it.

    Returns:
      (the options, reasons for the plan).

    Raises:
      ValueError: the options have a table, and the model names no dimension or also has `rules`.
    """
    table = settings.logical_axis_rules
    named: Mapping[str, DimNames] = getattr(model, "dim_names", {})
    if table is not None:
        _check_named(table, named)
    elif settings.rules is not None or models.bound_attribute(model, "tensor_parallel_rules"):
        return settings, []
    rows = dict(reversed(table or axis_rules or ()))  # the first row of a name counts, as in Flax
    given = dict(reversed(rows.items())) | {x: () for x in _texts(named) if x not in rows}
    axes_of = {name: _axes(name, axes) for name, axes in given.items()}
    order = list(axes_of)
    splits = {name: _split(names, axes_of, order) for name, names in named.items()}
    rules = tuple((f"^{re.escape(n)}$", axes) for n, axes in splits.items() if MODEL in axes)
    if table is not None and settings.rules not in (None, rules):  # equal on another mesh
        raise ValueError(
            f"logical_axis_rules={dict(table)} and rules cannot be combined; give rules alone, or "
            "leave rules out"
        )
    why = _describe(settings, named, splits, axes_of) if named else []
    return (dataclasses.replace(settings, rules=rules) if rules else settings), why


def under_axis_rules(loss: Loss, table: AxisRules | None, *, splits: bool) -> Loss:
    """Returns the loss under a Flax context in which names of dimensions stand for `model` alone.

    Flax then constrains activations (`nn.with_logical_constraint`) over the axis that the compiler
    splits; the other axes are split by the step itself.

    Args:
      loss: loss of the run.
      table: table of the run; None: the loss is returned as it is.
      splits: whether `model` has several devices.
    """
    if table is None:
        return loss
    rows = ((name, MODEL if MODEL in _axes(name, axes) else None) for name, axes in table)
    kept = tuple(rows) if splits else ()

    @functools.wraps(loss)
    def under(model: ModelLike, batch: Batch) -> Any:
        with linen.logical_axis_rules(kept):
            return loss(model, batch)

    return under


def _check_named(table: AxisRules, named: Mapping[str, DimNames]) -> None:
    if not named:
        raise ValueError(
            f"logical_axis_rules={dict(table)}, but the model gives no "
            "name to a dimension of its parameters (nnx.with_partitioning, "
            "nn.with_logical_partitioning); use rules, which have patterns of parameter names, or "
            "leave logical_axis_rules out"
        )


def _axes(name: str, found: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes of a row of the table; a name without a row may be an axis itself."""
    if found == ():
        return (name,) if name in AXES else ()
    return (found,) if isinstance(found, str) else tuple(found or ())


def _texts(named: Mapping[str, DimNames]) -> list[str]:
    """Returns the names of all dimensions, each once."""
    found = [name for names in named.values() for one in names for name in _parts(one)]
    return list(dict.fromkeys(found))


def _parts(name: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (name,) if isinstance(name, str) else tuple(name or ())


def _split(
    names: DimNames, axes_of: Mapping[str, tuple[str, ...]], order: list[str]
) -> tuple[str | None, ...]:
    """Returns the axis of each dimension. As in Flax, an axis splits only one dimension, that whose
    name is first in the table."""
    found = [
        min((order.index(x) for x in _parts(name) if MODEL in axes_of[x]), default=len(order))
        for name in names
    ]
    first = found.index(min(found)) if min(found, default=len(order)) < len(order) else None
    return tuple(MODEL if place == first else None for place in range(len(names)))


def _describe(
    settings: MeshConfig,
    named: Mapping[str, DimNames],
    splits: Mapping[str, tuple[str | None, ...]],
    axes_of: Mapping[str, tuple[str, ...]],
) -> list[str]:
    """Says which names split parameters over `model`, and which axes of the table are not used."""
    counts: dict[str, int] = collections.Counter()
    for name, axes in splits.items():
        if MODEL in axes:
            parts = _parts(named[name][axes.index(MODEL)])
            counts[next(part for part in parts if MODEL in axes_of[part])] += 1
    texts = _texts(named)
    unused = dict.fromkeys(x for name in texts for x in axes_of[name] if x != MODEL)
    own = [axis for axis in unused if axis in AXES]
    foreign = [axis for axis in unused if axis not in AXES]
    about = [f"{', '.join(own)} of the table: ZeRO shards over the other axes"] if own else []
    if foreign:
        about.append(f"{', '.join(foreign)} of the table: zerojax has no such axis")
    if counts:
        rows = (f"{name} ({number} parameters)" for name, number in counts.items())
        words = [f"`{MODEL}` splits {', '.join(rows)}", *about]
        return [
            f"the model's names of dimensions are its tensor-parallel rules: {'; '.join(words)}"
        ]
    if settings.model == 1:
        return []
    # Names that share an axis of another library are meant to be split together.
    groups = [[name for name in texts if axis in axes_of[name]] for axis in foreign]
    tables = [
        f"logical_axis_rules={{{', '.join(f'{name}: {MODEL}' for name in names)}}}"
        for names in groups or [texts[:1]]
    ]
    return [
        f"the model names dimensions {', '.join(texts)}, but no name stands for `{MODEL}`"
        f"{'; not used: ' + '; '.join(about) if about else ''}; to split some, give "
        f"{' or '.join(tables)}"
    ]
