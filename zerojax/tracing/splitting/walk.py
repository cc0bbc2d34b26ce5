"""Traverses a traced program and records which dimensions of its values are equal."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal, Var

from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import FURTHER_ROUNDS, inner_programs
from zerojax.tracing.jaxpr import split_scan
from zerojax.tracing.splitting.record import Record, Value
from zerojax.tracing.splitting.rules import dims_after

_CONSTANT: frozenset[str] = frozenset()
_KEEPS_TOTALS = ("copy", "copy_p", "name", "reshape", "squeeze", "transpose")
_LOOP = "counts the layers or steps of a loop"


def follow_dims(record: Record, program: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    """Follows the dimensions of a program's inputs to its outputs.

    The body of a loop is traversed once; its sums are multiplied by the number of iterations (1 for
    a `while` loop). Branches of a `cond` count with their mean.

    Args:
      record: record to which sums, uses of weights and obstacles are added.
      program: traced program.
      inputs: a `Value` for each input of the program.

    Returns:
      A `Value` for each output of the program.
    """
    values: dict[Any, Value] = dict(zip(program.invars, inputs, strict=True))

    def constant(atom: Operand) -> Value:
        return Value(record.factors.new_dims(atom.aval.shape), _CONSTANT)

    def read(atom: Var | Literal) -> Value:
        return constant(atom) if isinstance(atom, Literal) else values[atom]

    values |= {variable: constant(variable) for variable in program.constvars}

    uses = collections.Counter(
        atom
        for atoms in (program.outvars, *(equation.invars for equation in program.eqns))
        for atom in atoms
        if not isinstance(atom, Literal)
    )

    def operand(atom: Var | Literal) -> Value:
        """Returns the value of an operand, without `total` if other equations use the operand as
        well.
        """
        value = read(atom)
        # A sum that something else reads, too, is all-reduced before it is added to another one.
        if isinstance(atom, Literal) or uses[atom] == 1 or value.total is None:
            return value
        return dataclasses.replace(value, total=None)

    for equation in program.eqns:
        operands = [operand(atom) for atom in equation.invars]
        results = _after(record, equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
        record.seen.update(dict.fromkeys(result.dims for result in results if len(result.dims)))
    return [read(atom) for atom in program.outvars]


def _after(record: Record, equation: Equation, operands: list[Value]) -> Sequence[Value]:
    kind, params = equation.primitive.name, equation.params
    if kind == "scan":
        return _scan(record, equation, operands)
    if kind == "while":
        return _while(record, equation, operands)
    if kind == "cond":
        return _cond(record, params, operands)
    inner = list(inner_programs(params))
    # The program of `reduce` combines two numbers; it is no call.
    # The program of a `shard_map` has the shapes of one device, not those of its operands.
    calls = (
        kind not in ("shard_map", "reduce")
        and len(inner) == 1
        and len(inner[0].invars) == len(operands)
    )
    if calls and len(inner[0].outvars) == len(equation.outvars):
        return follow_dims(record, inner[0], operands)
    weights, before = _joined(operands), len(record.totals)
    results = dims_after(record, equation, operands)
    total = _total(record, kind, operands, before)
    return [Value(dims, weights, total) for dims in results]


def _total(record: Record, kind: str, operands: list[Value], before: int) -> int | None:
    """Returns the index in `record.totals` of the sum that an equation computes; None: no sum.

    Args:
      before: number of recorded sums before the equation.
    """
    if len(record.totals) > before:
        return before
    totals = [value.total for value in operands]
    if kind in _KEEPS_TOTALS:
        return totals[0]
    if kind in ("add", "add_any") and None not in totals:
        record.totals.append((totals[0], totals[1]))  # type: ignore[arg-type]
        return before
    return None


def _joined(values: Sequence[Value]) -> frozenset[str] | None:
    """Returns the parameters from which a value is computed; None if it depends on the batch."""
    names: frozenset[str] = _CONSTANT
    for value in values:
        if value.weights is None:
            return None
        names |= value.weights
    return names


def _same(record: Record, first: Value, second: Value) -> Value:
    """Merges two alternative values, such as the results of two branches; their dimensions become
    equal.
    """
    for a, b in zip(first.dims, second.dims, strict=True):
        record.unify(a, b)
    return Value(first.dims, _joined([first, second]))


def _scan(record: Record, equation: Equation, operands: list[Value]) -> list[Value]:
    """Processes the body of a loop once; the dimensions of the carry are the same in every
    iteration.
    """
    body, length = equation.params["jaxpr"].jaxpr, equation.params["length"]
    num_consts, num_carry = split_scan(equation)
    stacks = operands[num_consts + num_carry :]
    for stack in stacks:
        record.block(stack.dims[0], _LOOP)
    carry = [_carried(value) for value in operands[num_consts : num_consts + num_carry]]
    rows = [Value(stack.dims[1:], stack.weights) for stack in stacks]
    before = record.times
    record.times = before * length
    outputs = follow_dims(record, body, [*operands[:num_consts], *carry, *rows])
    record.times = before
    carried = [_same(record, *pair) for pair in zip(carry, outputs[:num_carry], strict=True)]
    number = record.factors.new_dim(length)
    record.block(number, _LOOP)
    made = [Value((number, *value.dims), value.weights) for value in outputs[num_carry:]]
    return [*carried, *made]


def _carried(value: Value) -> Value:
    """Returns a carried value as later iterations see it: it depends on the batch."""
    return Value(value.dims, None)


def _while(record: Record, equation: Equation, operands: list[Value]) -> list[Value]:
    """Processes a loop once; rounds of `zerojax.experts` after the first count as 0 iterations."""
    params, before = equation.params, record.times
    if FURTHER_ROUNDS in str(equation.source_info.name_stack):
        record.times = 0.0
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = [_carried(value) for value in operands[first + second :]]
    follow_dims(record, params["cond_jaxpr"].jaxpr, [*operands[:first], *carry])
    consts = operands[first : first + second]
    outputs = follow_dims(record, params["body_jaxpr"].jaxpr, [*consts, *carry])
    record.times = before
    return [_same(record, *pair) for pair in zip(carry, outputs, strict=True)]


def _cond(record: Record, params: Mapping[str, Any], operands: list[Value]) -> list[Value]:
    branches, before = params["branches"], record.times
    record.times = before / len(branches)
    results = [follow_dims(record, branch.jaxpr, operands[1:]) for branch in branches]
    record.times = before
    joined = results[0]
    for other in results[1:]:
        joined = [_same(record, *pair) for pair in zip(joined, other, strict=True)]
    return joined
