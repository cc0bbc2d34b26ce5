"""What the backward pass computes again: every gathered parameter, and nothing else.

Rewrites the traced program of a loss; knows gathers and checkpoints, never models or placements.

`jax.checkpoint` around a whole loss does not do: it would run a loop over layers a second time, and
that loop would stack the gathered parameters of all layers for the loop of the backward pass. So
every body of a loop, and every straight piece of the program, gets a checkpoint of its own, which
keeps what a plain backward pass keeps except for gathers and for what costs nothing to do again.
The checkpoints that a model brings along stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from zerojax.programs import inner_programs, is_checkpoint, split_scan

# Kept, these would be copies of gathered parameters; done again, they are part of another kernel.
_LAYOUT = frozenset(
    [
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    ]
)


def forget_gathers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, differentiated as it was, but keeping no gathered value for its backward pass."""

    def wrapped(*args: Any) -> Any:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        outputs = _evaluate(program, jax.tree.leaves(args), _Surroundings())
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return wrapped


def is_gather(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Whether a traced operation is a gather of ours, whose result a policy must not keep.

    The gather sits in a `shard_map`, and that in the call of a `custom_vjp`, which a parameter that
    is not differentiated (a frozen one) still shows to the policy.
    """
    if primitive.name == "all_gather":
        return True
    if primitive.name not in ("shard_map", "custom_vjp_call"):
        return False
    return any(
        is_gather(equation.primitive, equation.params)
        for program in inner_programs(params)
        for equation in program.eqns
    )


def _keep_what_is_dear(primitive: Any, *_: Any, **params: Any) -> bool:
    """The policy of a checkpoint: everything but gathers and changes of layout."""
    return primitive.name not in _LAYOUT and not is_gather(primitive, params)


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """What a program lies in: a loop (which needs no guard against CSE), a model's checkpoint."""

    in_loop: bool = False
    checkpointed: bool = False


def _gathers(equation: Any) -> bool:
    """Whether an equation gathers, at any depth."""
    return is_gather(equation.primitive, equation.params) or any(
        _gathers(inner) for program in inner_programs(equation.params) for inner in program.eqns
    )


def _evaluate(closed: ClosedJaxpr, inputs: Sequence[Any], where: _Surroundings) -> list[Any]:
    """The outputs of a program, piece by piece."""
    program = closed.jaxpr
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equations, needed in _pieces(program):
        first = equations[0]
        if len(equations) == 1 and _is_structured(first):
            outputs = _evaluate_structured(first, [read(atom) for atom in first.invars], where)
            values |= dict(zip(first.outvars, outputs, strict=True))
            continue
        taken = _free_variables(equations)
        piece = program.replace(
            constvars=(), invars=taken, outvars=needed, eqns=equations, effects=program.effects
        )
        run = jaxpr_as_fun(ClosedJaxpr(piece, ()))
        if not where.checkpointed and any(map(_gathers, equations)):
            run = jax.checkpoint(run, policy=_keep_what_is_dear, prevent_cse=not where.in_loop)
        values |= dict(zip(needed, run(*map(read, taken)), strict=True))
    return [read(atom) for atom in program.outvars]


def _is_structured(equation: Any) -> bool:
    """Whether an equation is a loop, a checkpoint or a call that gathers inside."""
    kind = equation.primitive.name
    return (kind in ("scan", "jit", "pjit") or is_checkpoint(equation)) and _gathers(equation)


def _pieces(program: Jaxpr) -> Iterator[tuple[list[Any], list[Any]]]:
    """Cuts a program at its structured equations.

    Yields:
      (equations of a piece, those of its results that something after it needs).
    """
    pieces: list[list[Any]] = []
    joins = False
    for equation in program.eqns:
        structured = _is_structured(equation)
        if joins and not structured:
            pieces[-1].append(equation)
        else:
            pieces.append([equation])
        joins = not structured
    later = [{atom for atom in program.outvars if not isinstance(atom, Literal)}]
    for equations in reversed(pieces[1:]):
        later.append(later[-1] | set(_free_variables(equations)))
    for equations, needed in zip(pieces, reversed(later), strict=True):
        made = [variable for equation in equations for variable in equation.outvars]
        yield equations, [variable for variable in made if variable in needed]


def _free_variables(equations: Sequence[Any]) -> list[Any]:
    """The variables that a piece takes from before it."""
    made: set[Any] = set()
    taken: dict[Any, None] = {}
    for equation in equations:
        for atom in equation.invars:
            if not isinstance(atom, Literal) and atom not in made:
                taken[atom] = None
        made.update(equation.outvars)
    return list(taken)


def _evaluate_structured(equation: Any, inputs: list[Any], where: _Surroundings) -> Sequence[Any]:
    params = equation.params
    if equation.primitive.name == "scan":
        return _evaluate_scan(equation, inputs, where)
    inner = params["jaxpr"]
    closed = (
        ClosedJaxpr(inner, ()) if type(inner) is Jaxpr and not hasattr(inner, "consts") else inner
    )
    if not is_checkpoint(equation):
        return _evaluate(closed, inputs, where)
    inside = dataclasses.replace(where, checkpointed=True)
    run = jax.checkpoint(
        lambda *inputs: _evaluate(closed, inputs, inside),
        policy=_without_gathers(params["policy"]),
        prevent_cse=params["prevent_cse"],
    )
    return run(*inputs)


def _without_gathers(policy: Any) -> Any:
    """A model's own policy, which may not keep gathered values either."""
    if policy is None:
        return None

    def refuse_gathers(primitive: Any, *avals: Any, **params: Any) -> Any:
        return False if is_gather(primitive, params) else policy(primitive, *avals, **params)

    return refuse_gathers


def _evaluate_scan(equation: Any, inputs: list[Any], where: _Surroundings) -> Sequence[Any]:
    params = equation.params
    num_consts, num_carry = split_scan(equation)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    inside = _Surroundings(in_loop=True)

    def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _evaluate(params["jaxpr"], [*consts, *carry, *items], inside)
        return outputs[:num_carry], outputs[num_carry:]

    carry, items = lax.scan(
        body,
        carry,
        inputs[num_consts + num_carry :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *items]
