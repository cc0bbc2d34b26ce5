"""A traced program without the mesh under which it was traced, so that it runs under another one.

JAX writes the mesh of the context into the types of all values, and a program whose types name
another mesh than the context does not run. Constraints on shardings become those that the caller
gives. Custom derivatives are traced again: JAX keeps them as functions of the old types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation
from zerojax.tracing.rolling.equality import abstract_value, equation_function, is_program

CONSTRAINTS = ("sharding_constraint", "reshard", "mesh_cast")
"""Names of the primitives with which a model gives an array a sharding."""
Constrain = Callable[[Equation], Callable[[jax.Array], jax.Array] | None]
"""Function from a constraint to what replaces it under the new mesh; None: nothing does."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def without_mesh(closed: ClosedJaxpr, traced_under: Context, constrain: Constrain) -> ClosedJaxpr:
    """Returns the same program for the mesh of the current context.

    Args:
      closed: program that was traced under another mesh, whose axes have size 1.
      traced_under: makes the context under which it was traced.
      constrain: replaces the model's constraints on shardings.
    """
    return _Freed(traced_under, constrain).closed(closed)


class _Freed:
    """Rewrites programs, at any depth."""

    def __init__(
        self, traced_under: Context, constrain: Constrain, *, in_rule: bool = False
    ) -> None:
        self._traced_under, self._constrain, self._in_rule = traced_under, constrain, in_rule
        # An equation that is made here has the context of the current mesh.
        self._context = _equations_of(lambda x: x + 1, [jax.ShapeDtypeStruct((), jnp.float32)])[
            0
        ].ctx

    def closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self._program(closed.jaxpr), closed.consts)

    def _program(self, program: Jaxpr) -> Jaxpr:
        names: dict[Any, Any] = {}

        def read(atom: Var | Literal) -> Any:
            if isinstance(atom, Literal):
                return _literal(atom)
            if atom not in names:
                names[atom] = Var(_without_mesh(atom.aval))
            return names[atom]

        taken = [[read(x) for x in atoms] for atoms in (program.constvars, program.invars)]
        equations: list[Equation] = []
        for equation in program.eqns:
            operands = [read(atom) for atom in equation.invars]
            if equation.primitive.name in CONSTRAINTS:
                replaced = self._constrain(equation)
                if replaced is None:
                    names[equation.outvars[0]] = operands[0]
                    continue
                made = _equations_of(replaced, [abstract_value(operands[0])])
            elif equation.primitive.name.startswith("custom_"):
                made = self._custom(equation)
            else:
                made = [equation.replace(params=self._params(equation), ctx=self._context)]
            (one,) = made
            results = [read(variable) for variable in equation.outvars]
            equations.append(one.replace(invars=operands, outvars=results))
        return program.replace(
            constvars=taken[0],
            invars=taken[1],
            eqns=equations,
            outvars=[read(atom) for atom in program.outvars],
        )

    def _params(self, equation: Equation) -> dict[str, Any]:
        return {name: self._param(value) for name, value in equation.params.items()}

    def _param(self, value: Any) -> Any:
        """Returns a parameter of an equation without types and shardings of the old mesh."""
        # In JAX 0.12 both names are the same class, which `_open` handles.
        if isinstance(value, ClosedJaxpr) and not isinstance(value, Jaxpr):
            return self.closed(value)
        if isinstance(value, Jaxpr):
            return self._open(value)
        if isinstance(value, Sharding | PartitionSpec):
            return None
        if isinstance(value, AbstractMesh):
            return jax.sharding.get_abstract_mesh()
        if type(value) in (tuple, list):
            return type(value)(map(self._param, value))
        return value

    def _open(self, program: Jaxpr | ClosedJaxpr) -> Any:
        # JAX 0.12 has one kind of program, which may hold constants.
        consts = getattr(program, "consts", None)
        freed = self._program(program)
        return ClosedJaxpr(freed, consts) if consts else freed

    def _custom(self, equation: Equation) -> list[Equation]:
        """Returns an equation with the same custom derivative, traced under the current mesh."""
        operands = [Var(atom.aval) for atom in equation.invars]
        function = equation_function(equation.replace(invars=operands), operands)
        structs = [_typed(variable.aval) for variable in operands]
        primal = self._param(next(x for x in equation.params.values() if is_program(x)))
        if self._in_rule:  # not differentiated again; a rule may call its own function
            # As one call, because exactly one equation takes the place of each.
            return _equations_of(jax.jit(jaxpr_as_fun(primal)), map(abstract_value, operands))
        own = _own_jvp if "jvp" in equation.primitive.name else _own_vjp
        rule = own(jaxpr_as_fun(primal), self._again, function, structs)
        return _equations_of(rule, map(abstract_value, operands))

    def _again(self, function: Callable[..., Any], structs: Sequence[Any]) -> Callable[..., Any]:
        """Returns a function that is traced under the old mesh, as one for the current mesh."""
        with self._traced_under():
            program, shape = jax.make_jaxpr(function, return_shape=True)(*structs)
        freed = _Freed(self._traced_under, self._constrain, in_rule=True).closed(program)
        run, tree = jaxpr_as_fun(freed), jax.tree.structure(shape)
        return lambda *given: jax.tree.unflatten(tree, run(*given))


Again = Callable[[Callable[..., Any], Sequence[Any]], Callable[..., Any]]


def _own_jvp(
    primal: Callable[..., Any], again: Again, function: Callable[..., Any], structs: Sequence[Any]
) -> Any:
    """Returns `primal` with the custom JVP rule of `function`."""
    floats = [place for place, x in enumerate(structs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    primal = jax.custom_jvp(primal)

    def pushed(*given: Tree) -> Any:
        values, tangents = given[: len(structs)], given[len(structs) :]
        # JAX demands this dtype for tangents of integers.
        every = [np.zeros(x.shape, jax.dtypes.float0) for x in structs]
        for place, tangent in zip(floats, tangents, strict=True):
            every[place] = tangent
        return jax.jvp(function, values, tuple(every))

    rule = again(pushed, [*structs, *(structs[place] for place in floats)])

    @primal.defjvp
    def own_rule(values: Tree, tangents: Tree) -> Any:
        return rule(*values, *(tangents[place] for place in floats))

    return primal


def _own_vjp(
    primal: Callable[..., Any], again: Again, function: Callable[..., Any], structs: Sequence[Any]
) -> Any:
    """Returns `primal` with the custom VJP rule of `function`."""
    floats = [place for place, x in enumerate(structs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    primal = jax.custom_vjp(primal)
    kept: dict[str, Any] = {}

    def forward(*values: Tree) -> Any:
        def of_floats(*chosen: Tree) -> Any:
            every = list(values)
            for place, value in zip(floats, chosen, strict=True):
                every[place] = value
            return function(*every)

        results, pull = jax.vjp(of_floats, *(values[place] for place in floats))
        # The structure of the residuals is known only when the forward rule was traced.
        residuals, kept["tree"] = jax.tree.flatten(pull)
        kept["residuals"] = [_typed(jax.typeof(x)) for x in residuals]
        kept["results"] = [_typed(jax.typeof(x)) for x in results]
        return results, residuals

    first = again(forward, structs)
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in kept["results"]]

    def backward(*given: Tree) -> Any:
        residuals, chosen = given[: len(kept["residuals"])], iter(given[len(kept["residuals"]) :])
        pull = jax.tree.unflatten(kept["tree"], residuals)
        cotangents = [
            next(chosen) if floating else np.zeros(x.shape, jax.dtypes.float0)
            for x, floating in zip(kept["results"], is_float, strict=True)
        ]
        return list(pull(cotangents))

    wanted = [x for x, floating in zip(kept["results"], is_float, strict=True) if floating]
    second = again(backward, [*kept["residuals"], *wanted])

    def own_backward(residuals: Tree, cotangents: Tree) -> Any:
        chosen = [x for x, floating in zip(cotangents, is_float, strict=True) if floating]
        found = iter(second(*residuals, *chosen))
        return tuple(next(found) if place in floats else None for place in range(len(structs)))

    primal.defvjp(lambda *values: first(*values), own_backward)
    return primal


def _equations_of(function: Callable[..., Any], structs: Iterable[Any]) -> list[Equation]:
    """Returns the equations of a function, traced under the current mesh."""
    return list(jax.make_jaxpr(function)(*structs).jaxpr.eqns)


def _typed(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns a value's type, with its sharding where a mesh with Explicit axes gives it one."""
    sharding, weak = getattr(aval, "sharding", None), getattr(aval, "weak_type", False)
    split = sharding is not None and any(sharding.spec)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding if split else None, weak_type=weak
    )


def _literal(atom: Literal) -> Literal:
    """Returns a literal whose value has no mesh in its type."""
    aval = _without_mesh(atom.aval)
    if aval is atom.aval:
        return atom
    value = np.asarray(atom.val)
    # Only a Python number keeps the type weak.
    return Literal(value.item() if aval.weak_type else value, aval)


def _without_mesh(aval: jax.core.AbstractValue) -> Any:
    """Returns the type of a value without the mesh that JAX wrote into it."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return aval
    return aval.update(sharding=None)
