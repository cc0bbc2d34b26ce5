"""Rewrites the loss program: gathers of table rows become lookups on the devices with the columns.

Such tables are sharded by columns (`owned_tables`). A read of such a table returns a marked
placeholder, whose values are never used. The program is then evaluated with the gathers from
placeholders replaced. The plan has checked (`zerojax.tracing.row_lookups`) that no other operation
uses a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import evaluate_in_pieces, is_checkpoint, program_of, split_scan
from zerojax.tracing.row_lookups import CALLS, SAME, takes_rows
from zerojax.transport.owned_tables import OwnedTable, take_rows

_STAND_IN = "zerojax.stand_in:"


@dataclass(frozen=True)
class StandIn:
    """Replaces the read of a table that is sharded by columns: returns a placeholder of zeros."""

    name: str
    table: OwnedTable

    def __call__(self, shard: jax.Array) -> jax.Array:
        shape = self.table.rows, self.table.width
        zeros = jnp.zeros(shape, self.table.compute_dtype)
        return checkpoint_name(zeros, f"{_STAND_IN}{self.name}")


def with_lookups(
    function: Callable[..., Any],
    tables: Mapping[str, OwnedTable],
    shards_of: Callable[..., Mapping[str, jax.Array]],
) -> Callable[..., Any]:
    """Returns `function` with gathers of table rows replaced by lookups on other devices.

    Args:
      function: function that reads each of `tables` through its `StandIn`.
      tables: {name: table}.
      shards_of: function that maps the arguments of `function` to {name: this device's columns}.
    """

    def rewritten(*args: Tree) -> Any:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        rules = _Rules(tables, shards_of(*args))
        outputs = _evaluate(rules, program, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten if tables else function


@dataclass(frozen=True)
class _Rules:
    tables: Mapping[str, OwnedTable]
    shards: Mapping[str, jax.Array]


@dataclass(frozen=True)
class _Held:
    """The table that a variable stands for, and the dtypes to which it was cast, in order."""

    name: str
    casts: tuple[Any, ...] = ()


def _marked(equation: Equation) -> str | None:
    """Returns the name of the table whose placeholder an equation marks, or None."""
    if equation.primitive.name != "name" or not equation.params["name"].startswith(_STAND_IN):
        return None
    return equation.params["name"].removeprefix(_STAND_IN)


def _has_mark(equation: Equation) -> bool:
    """Returns whether an equation, or a program inside it, marks a placeholder."""
    return _marked(equation) is not None or any(
        _has_mark(inner) for program in inner_programs(equation.params) for inner in program.eqns
    )


def _evaluate(rules: _Rules, closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates a program on `inputs`; returns its outputs. Both are arrays or `_Held`."""
    apart, _ = _follow(closed.jaxpr, _held_among(inputs))
    return evaluate_in_pieces(
        closed,
        inputs,
        is_apart=lambda equation: id(equation) in apart,
        run_apart=lambda equation, given: _run(rules, equation, given),
    )


def _held_among(values: Sequence[Any]) -> list[_Held | None]:
    return [value if isinstance(value, _Held) else None for value in values]


def _follow(program: Jaxpr, inputs: Sequence[_Held | None]) -> tuple[set[int], list[_Held | None]]:
    """Finds the equations of a program that use tables.

    Args:
      inputs: the table that each input stands for; None for arrays.

    Returns:
      (`id` of each equation that creates or uses a table, also in nested programs; the table that
      each output stands for, or None).
    """
    held = {v: one for v, one in zip(program.invars, inputs, strict=True) if one is not None}
    apart = set()

    def held_by(atom: Var | Literal) -> _Held | None:
        return None if isinstance(atom, Literal) else held.get(atom)

    for equation in program.eqns:
        given = [held_by(atom) for atom in equation.invars]
        if any(given) or _has_mark(equation):
            apart.add(id(equation))
            made = zip(equation.outvars, _tables_made(equation, given), strict=True)
            held |= {variable: one for variable, one in made if one is not None}
    return apart, [held_by(atom) for atom in program.outvars]


def _tables_made(equation: Equation, given: Sequence[_Held | None]) -> list[_Held | None]:
    """Returns, for each result of an equation, the table that it stands for, or None."""
    kind, name = equation.primitive.name, _marked(equation)
    if name is not None:
        return [_Held(name)]
    if kind in SAME and given[0] is not None:
        is_cast = kind == "convert_element_type"
        casts = (equation.params["new_dtype"],) if is_cast else ()
        return [_Held(given[0].name, given[0].casts + casts)]
    if kind in CALLS or is_checkpoint(equation):
        return _follow(program_of(equation).jaxpr, given)[1]
    return [None] * len(equation.outvars)


def _run(rules: _Rules, equation: Equation, given: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an equation that creates or uses a table; returns arrays or `_Held`."""
    kind = equation.primitive.name
    if kind in SAME:
        return _tables_made(equation, _held_among(given))
    if kind == "scan":
        return _run_scan(rules, equation, given)
    if kind in CALLS:
        return _evaluate(rules, program_of(equation), given)
    if is_checkpoint(equation):
        return _run_checkpoint(rules, equation, given)
    assert takes_rows(equation), f"the plan did not notice that {kind} uses a table"
    return [_look_up(rules, equation, *given)]


def _look_up(rules: _Rules, equation: Equation, held: _Held, indices: jax.Array) -> jax.Array:
    """Evaluates a gather of table rows, with [..., 1] indices, by a lookup on all devices."""
    params = equation.params
    rows = take_rows(
        rules.tables[held.name],
        rules.shards[held.name],
        indices[..., 0],
        mode=params["mode"],
        fill=params["fill_value"],
        casts=held.casts,
    )
    (dim,) = params["dimension_numbers"].offset_dims
    return jnp.moveaxis(rows, -1, dim)


def _run_checkpoint(rules: _Rules, equation: Equation, given: Sequence[Any]) -> Sequence[Any]:
    closed = program_of(equation)
    tables = _held_among(given)
    made = _follow(closed.jaxpr, tables)[1]

    def inside(arrays: list[Any]) -> list[Any]:
        outputs = _evaluate(rules, closed, _joined(tables, arrays))
        return [value for value in outputs if not isinstance(value, _Held)]

    run = jax.checkpoint(
        inside, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"]
    )
    return _joined(made, run([value for value in given if not isinstance(value, _Held)]))


def _joined(tables: Sequence[_Held | None], arrays: Sequence[Any]) -> list[Any]:
    """Fills gaps: returns `tables` with each None replaced by the next item of `arrays`."""
    rest = iter(arrays)
    return [next(rest) if table is None else table for table in tables]


def _run_scan(rules: _Rules, equation: Equation, given: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    num_consts, num_carry = split_scan(equation)
    consts = list(given[:num_consts])

    def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _evaluate(rules, params["jaxpr"], [*consts, *carry, *items])
        return outputs[:num_carry], outputs[num_carry:]

    carry, items = lax.scan(
        body,
        list(given[num_consts : num_consts + num_carry]),
        list(given[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *items]
