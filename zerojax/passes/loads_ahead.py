"""Loads the rows that a loop reads from host memory one iteration ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation, Operand
from zerojax.placement.slices import put_slice, take_slice, to_device
from zerojax.tracing.activation_offload import evaluate_loops
from zerojax.tracing.jaxpr import evaluate_in_pieces, is_checkpoint, program_of, split_scan
from zerojax.tracing.tiled_products import is_call


def load_one_ahead(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, whose loops load their rows from host memory one iteration ahead.

    Results are the same. A `jax.lax.scan` over an array in host memory, such as the backward pass
    of `zerojax.tracing.activation_offload.keep_inputs_on_host`, begins each iteration with the load
    of its own row, and nothing is left to compute during that load (compiled for an H100 by JAX
    0.12). Here an iteration loads the row of the next one. The last iteration is after the loop, so
    that no index has to be clamped: the copy engine moves only rows whose number is linear in the
    loop's counter.
    """

    def rewritten(*arguments: Tree) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        chosen = {id(equation) for equation in _loops(closed.jaxpr)}
        outputs = evaluate_loops(closed, jax.tree.leaves(arguments), chosen, _run_loop)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten


def _loops(program: Jaxpr) -> Iterator[Any]:
    """Yields the loops over arrays in host memory, at the top level and inside calls."""
    for equation in program.eqns:
        if is_call(equation):
            yield from _loops(program_of(equation).jaxpr)
        elif equation.primitive.name == "scan":
            items = equation.invars[sum(split_scan(equation)) :]
            if any(map(_is_on_host, items)):
                yield equation


def _is_on_host(atom: Operand) -> bool:
    return getattr(atom.aval, "memory_space", None) == jax.memory.Space.Host


def _run_loop(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    params, (num_consts, num_carry) = equation.params, split_scan(equation)
    first, last = num_consts + num_carry, params["length"] - 1
    consts, start, items = operands[:num_consts], operands[num_consts:first], operands[first:]
    on_host = [_is_on_host(atom) for atom in equation.invars[first:]]

    def number(done: jax.Array | int) -> Any:
        return last - done if params["reverse"] else done

    def load(index: jax.Array | int) -> list[Any]:
        stacks = zip(items, on_host, strict=True)
        return [to_device(take_slice(stack, index)) for stack, far in stacks if far]

    def run(
        done: jax.Array | int, carry: Sequence[Any], loaded: Sequence[Any], stacks: Sequence[Any]
    ) -> Any:
        ready = iter(loaded)
        rows = [
            next(ready) if far else take_slice(stack, number(done))
            for stack, far in zip(items, on_host, strict=True)
        ]
        outputs = _without_loads(params["jaxpr"], [*consts, *carry, *rows])
        new = zip(stacks, outputs[num_carry:], strict=True)
        return outputs[:num_carry], [put_slice(stack, row, number(done)) for stack, row in new]

    def one(done: jax.Array | int, state: Tree) -> Any:
        carry, loaded, stacks = state
        following = load(number(done) + (-1 if params["reverse"] else 1))
        carry, stacks = run(done, carry, loaded, stacks)
        return carry, following, stacks

    stacks = [jnp.zeros(atom.aval.shape, atom.aval.dtype) for atom in equation.outvars[num_carry:]]
    carry, loaded, stacks = lax.fori_loop(0, last, one, (list(start), load(number(0)), stacks))
    carry, stacks = run(last, carry, loaded, stacks)
    return [*carry, *stacks]


def _without_loads(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates an iteration, of which the arrays in host memory are on the device already.

    The checkpoint that recomputes the layer is evaluated as part of the iteration: in a loop,
    nothing can be merged with its computation.
    """

    def is_load(equation: Equation) -> bool:
        return equation.primitive.name == "device_put" and _is_on_host(equation.invars[0])

    def is_apart(equation: Equation) -> bool:
        is_outer = is_checkpoint(equation) or is_call(equation)
        return is_load(equation) or (is_outer and any(map(_is_on_host, equation.invars)))

    def run_apart(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if is_load(equation):
            return operands
        return _without_loads(program_of(equation), operands)

    return evaluate_in_pieces(closed, inputs, is_apart=is_apart, run_apart=run_apart)
