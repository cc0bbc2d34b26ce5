"""Runs an optax update that leaves parameters and state unchanged if a step is skipped.

Each new array of the state is selected with `skip` as soon as it is computed, and later operations
of the update read the selected array. The result equals a selection at the end of the update. The
early selection has an advantage: a selected array is an output, and XLA does not compute an output
twice, so each array of the state is written in place. With a selection at the end, the fusion that
computes a parameter reads the old moments too, and XLA on CPUs copies every moment first.
`pallas_kernels.optimizers` does the same for zerojax's own optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Operand


def guarded_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: Tree,
    state: Tree,
    params: Tree,
    *,
    skip: jax.Array,
    extra: Mapping[str, Any],
) -> tuple[Tree, Tree]:
    """Applies an optax update, or returns its inputs if `skip` is set; traced.

    Args:
      grads, state, params: arguments of `tx.update`.
      skip: bool []; True returns `params` and `state` unchanged.
      extra: further keyword arguments of `tx.update`.

    Returns:
      (parameters, state), with the tree structures of the inputs.
    """

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, new_state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), new_state

    closed, shapes = jax.make_jaxpr(update, return_shape=True)(grads, state, params)
    sizes = [len(jax.tree.leaves(tree)) for tree in (grads, state, params)]
    inputs = closed.jaxpr.invars
    old = [*inputs[sizes[0] + sizes[1] :], *inputs[sizes[0] : sizes[0] + sizes[1]]]
    run = jaxpr_as_fun(_with_guards(closed, old))
    outputs = run(skip, *jax.tree.leaves((grads, state, params)))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _with_guards(closed: ClosedJaxpr, old: Sequence[Any]) -> ClosedJaxpr:
    """Returns the program with a new first input `skip`; if that is True, it returns the old
    values.

    Args:
      closed: program that computes the new values.
      old: for each output, the input that holds its previous value.
    """
    program = closed.jaxpr
    skip = Var(jax.typeof(jnp.bool_(False)))
    before: dict[Any, Any] = {}
    for new, kept in zip(program.outvars, old, strict=True):
        if not isinstance(new, Literal):
            before.setdefault(new, kept)
    names: dict[Any, Any] = {}
    equations: list[Any] = []

    def guard(new: Operand, kept: Operand) -> Any:
        if new is kept:
            return new
        result, added = _guard(skip, new, kept)
        equations.extend(added)
        return result

    for equation in program.eqns:
        equations.append(equation.replace(invars=[_read(names, x) for x in equation.invars]))
        for new in equation.outvars:
            if new in before:
                names[new] = guard(new, before[new])
    outputs = [
        names[new]
        if not isinstance(new, Literal) and new in names and before[new] is kept
        else guard(_read(names, new), kept)
        for new, kept in zip(program.outvars, old, strict=True)
    ]
    guarded = program.replace(invars=[skip, *program.invars], eqns=equations, outvars=outputs)
    return ClosedJaxpr(guarded, closed.consts)


def _read(names: Mapping[Any, Any], atom: Operand) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _guard(skip: Operand, new: Operand, kept: Operand) -> tuple[Any, list[Any]]:
    """Returns (variable equal to `kept` if `skip` is set, else to `new`; its equations)."""
    program = _select(new.aval, kept.aval).jaxpr
    names: dict[Any, Any] = dict(zip(program.invars, (skip, new, kept), strict=True))
    equations = []
    for equation in program.eqns:
        made = [Var(variable.aval) for variable in equation.outvars]
        given = [_read(names, x) for x in equation.invars]
        equations.append(equation.replace(invars=given, outvars=made))
        names.update(zip(equation.outvars, made, strict=True))
    return names[program.outvars[0]], equations


@functools.cache
def _select(new: jax.core.ShapedArray, kept: jax.core.ShapedArray) -> ClosedJaxpr:
    def select(skip: jax.Array, new: jax.Array, kept: jax.Array) -> jax.Array:
        # where, not cond: a cond costs 4 to 14 bytes per parameter of traffic and a copy.
        return jnp.where(skip, kept, new)

    forms = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in (new, kept)]
    return jax.make_jaxpr(select)(jax.ShapeDtypeStruct((), jnp.bool_), *forms)
