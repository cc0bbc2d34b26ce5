"""Limits of the integers in a batch that index rows of a parameter, from the traced model.

JAX does not refuse an index outside of a table: `jnp.take` and `Embed` give NaN, and `table[ids]`
gives whatever row is nearest. A limit is found only where an array of the batch reaches the table
unchanged; what a model computes of it, clips or masks is its own affair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal
from jax.lax import GatherScatterMode

from zerojax.operators.marks import inner_programs, read_name


@dataclasses.dataclass(frozen=True)
class IndexLimit:
    """Values of an array of the batch have to be in [low, high).

    Attributes:
      low, high: the range; negative indices count from the end where the model takes them.
      parameter: whose rows they are.
      window: the part of the array that it holds for, a slice for each dimension.
    """

    low: int
    high: int
    parameter: str
    window: tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class _Table:
    parameter: str


@dataclasses.dataclass(frozen=True)
class _Index:
    """An array of the batch, or a part of it, with its values as they are.

    Attributes:
      leaf: its name.
      window: (start, limit, stride) of each of its dimensions.
      is_whole: its dimensions are those of the leaf, so that it can be cut further.
      added: what was added to all values: half of how JAX counts indices from the end.
      wraps: negative values count from the end.
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
    """{name of a leaf of the batch: what its values must keep to}.

    Args:
      program: traced with a mark at every read of a parameter (`tracing.jaxpr.mark_read`).
      batch: for each input of the program the name and the shape of a leaf of integers, or None.
    """
    found: dict[str, list[IndexLimit]] = {}
    inputs = [
        None if each is None else _Index(each[0], tuple((0, size, 1) for size in each[1]))
        for each in batch
    ]
    _follow(program, inputs, found)
    return {name: tuple(limits) for name, limits in found.items()}


def _follow(program: Jaxpr, inputs: Sequence[Any], found: dict[str, list[IndexLimit]]) -> list[Any]:
    held: dict[Any, Any] = dict(zip(program.invars, inputs, strict=True))
    for equation in program.eqns:
        given = [None if isinstance(x, Literal) else held.get(x) for x in equation.invars]
        for variable, tag in zip(equation.outvars, _outputs(equation, given, found), strict=True):
            if tag is not None:
                held[variable] = tag
    return [None if isinstance(x, Literal) else held.get(x) for x in program.outvars]


def _outputs(equation: Any, given: list[Any], found: dict[str, list[IndexLimit]]) -> Sequence[Any]:
    kind, nothing = equation.primitive.name, [None] * len(equation.outvars)
    if (name := read_name(equation)) is not None:
        return [_Table(name)]
    if kind == "gather":
        _note(equation, given[0], given[1], found)
        return nothing
    inner = list(inner_programs(equation.params))
    if kind not in ("scan", "while", "cond") and len(inner) == 1:
        if len(inner[0].invars) == len(given):
            return _follow(inner[0], given, found)
        return nothing
    if kind in _SAME_VALUES:
        return given[: len(equation.outvars)]
    if kind == "select_n" and len(given) == 3:
        return [_wrapped(given[1], given[2])]
    first = given[0] if given else None
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


def _wrapped(first: Any, second: Any) -> _Index | None:
    """`where(index < 0, index + size, index)`: JAX's way to count from the end."""
    if not (isinstance(first, _Index) and isinstance(second, _Index)):
        return None
    plain, raised = sorted((first, second), key=lambda index: index.added)
    if plain.added or dataclasses.replace(raised, added=0) != plain:
        return None
    return dataclasses.replace(plain, wraps=True)


def _note(equation: Any, table: Any, index: Any, found: dict[str, list[IndexLimit]]) -> None:
    if not (isinstance(table, _Table) and isinstance(index, _Index)) or index.added:
        return
    numbers, params = equation.params["dimension_numbers"], equation.params
    if len(numbers.start_index_map) != 1 or params["mode"] == GatherScatterMode.CLIP:
        return
    dim = numbers.start_index_map[0]
    if params["slice_sizes"][dim] != 1:
        return
    high = equation.invars[0].aval.shape[dim]
    # Rows are cut over devices and microbatches outside of the trace: dimension 0 is all of it.
    rows, *rest = index.window
    if rows[0] != 0 or rows[2] != 1:
        return
    window = (slice(None), *(slice(*part) for part in rest))
    limit = IndexLimit(-high if index.wraps else 0, high, table.parameter, window)
    limits = found.setdefault(index.leaf, [])
    if limit not in limits:
        limits.append(limit)
