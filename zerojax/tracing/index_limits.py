"""Finds limits of the integers in a batch that index rows of a parameter, from the traced model.

JAX raises no error for an index outside of a table: `jnp.take` and `Embed` return NaN, and
`table[ids]` returns the nearest row. A limit is known only if an array of the batch reaches the
table unchanged. Indices that the model computes, clips or masks have no limit here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal
from jax.lax import GatherScatterMode

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs, read_name


@dataclass(frozen=True)
class IndexLimit:
    """Range [low, high) for the values of an array of the batch.

    Attributes:
      low, high: limits of the values; `low` is negative if negative indices count from the end.
      parameter: parameter whose rows the values index; "" if they are classes of a task.
      window: part of the array to which the limits apply, a slice for each dimension.
      ignored: value outside of the range that is valid, too; None if there is none.
    """

    low: int
    high: int
    parameter: str
    window: tuple[slice, ...]
    ignored: int | None = None


@dataclass(frozen=True)
class _Table:
    parameter: str


@dataclass(frozen=True)
class _Index:
    """Array of the batch, or a part of it, whose values are unchanged.

    Attributes:
      leaf: name of the leaf of the batch.
      window: (start, limit, stride) of each dimension of the leaf.
      is_whole: whether the value still has the dimensions of the leaf, so that slices can be
        followed.
      added: number that was added to all values, as JAX does for negative indices.
      wraps: whether negative values count from the end.
    """

    leaf: str
    window: tuple[tuple[int, int, int], ...]
    is_whole: bool = True
    added: int = 0
    wraps: bool = False


_SAME_VALUES = ("convert_element_type", "copy", "optimization_barrier")
_OTHER_SHAPE = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")


def find_index_limits(
    program: Jaxpr, batch: Sequence[tuple[str, Any] | None]
) -> dict[str, tuple[IndexLimit, ...]]:
    """Finds the valid indices in a batch: {name of a leaf of the batch: limits of its values}.

    Args:
      program: traced program with a mark at every read of a parameter
        (`operators.marks.mark_read`).
      batch: for each input of the program, (name, shape) if it is an integer leaf of the batch,
        else None.
    """
    limits_by_leaf: dict[str, list[IndexLimit]] = {}
    inputs = [
        None if each is None else _Index(each[0], tuple((0, size, 1) for size in each[1]))
        for each in batch
    ]
    _follow(program, inputs, limits_by_leaf)
    return {name: tuple(limits) for name, limits in limits_by_leaf.items()}


def _follow(
    program: Jaxpr, inputs: Sequence[Any], limits_by_leaf: dict[str, list[IndexLimit]]
) -> list[Any]:
    held: dict[Any, Any] = dict(zip(program.invars, inputs, strict=True))
    for equation in program.eqns:
        operands = [None if isinstance(x, Literal) else held.get(x) for x in equation.invars]
        for variable, tag in zip(
            equation.outvars, _outputs(equation, operands, limits_by_leaf), strict=True
        ):
            if tag is not None:
                held[variable] = tag
    return [None if isinstance(x, Literal) else held.get(x) for x in program.outvars]


def _outputs(
    equation: Equation, operands: list[Any], limits_by_leaf: dict[str, list[IndexLimit]]
) -> Sequence[Any]:
    kind, nothing = equation.primitive.name, [None] * len(equation.outvars)
    if (name := read_name(equation)) is not None:
        return [_Table(name)]
    if kind == "gather":
        _note(equation, operands[0], operands[1], limits_by_leaf)
        return nothing
    inner = list(inner_programs(equation.params))
    if kind not in ("scan", "while", "cond") and len(inner) == 1:
        if len(inner[0].invars) == len(operands):
            return _follow(inner[0], operands, limits_by_leaf)
        return nothing
    if kind in _SAME_VALUES:
        return operands[: len(equation.outvars)]
    if kind == "select_n" and len(operands) == 3:
        return [_wrapped(operands[1], operands[2])]
    first = operands[0] if operands else None
    if not isinstance(first, _Index):
        return nothing
    if kind in _OTHER_SHAPE:
        return [dataclasses.replace(first, is_whole=False)]
    if kind == "slice":
        return [_cut(first, equation.params)]
    if kind == "add" and isinstance(equation.invars[1], Literal):
        return [dataclasses.replace(first, added=first.added + int(equation.invars[1].val))]
    return nothing


def _cut(index: _Index, params: Mapping[str, Any]) -> _Index | None:
    if not index.is_whole:
        return None
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    window = tuple(
        (start + first * step, start + last * step, step * stride)
        for (start, _, step), first, last, stride in zip(
            index.window, starts, limits, strides, strict=True
        )
    )
    return dataclasses.replace(index, window=window)


def _wrapped(first: _Index | None, second: _Index | None) -> _Index | None:
    """Recognizes JAX's wrapping of negative indices, `where(index < 0, index + size, index)`."""
    if not (isinstance(first, _Index) and isinstance(second, _Index)):
        return None
    plain, raised = sorted((first, second), key=lambda index: index.added)
    if plain.added or dataclasses.replace(raised, added=0) != plain:
        return None
    return dataclasses.replace(plain, wraps=True)


def _note(
    equation: Equation,
    table: _Table | None,
    index: _Index | None,
    limits_by_leaf: dict[str, list[IndexLimit]],
) -> None:
    # A number was added, so the limits would not be those of the values in the batch.
    if not (isinstance(table, _Table) and isinstance(index, _Index)) or index.added:
        return
    numbers, params = equation.params["dimension_numbers"], equation.params
    if len(numbers.start_index_map) != 1 or params["mode"] == GatherScatterMode.CLIP:
        return
    dim = numbers.start_index_map[0]
    # Slices of several rows must begin before the last row, so other limits hold for them.
    if params["slice_sizes"][dim] != 1:
        return
    high = equation.invars[0].aval.shape[dim]
    # Dimension 0 must not be sliced: outside of the trace, rows are split over devices.
    rows, *rest = index.window
    if rows[0] != 0 or rows[2] != 1:
        return
    window = (slice(None), *(slice(*part) for part in rest))
    limit = IndexLimit(-high if index.wraps else 0, high, table.parameter, window)
    limits = limits_by_leaf.setdefault(index.leaf, [])
    if limit not in limits:
        limits.append(limit)
