"""Rewrites the loss program: one collective per layer, and gathers repeated in the backward pass.

**Buckets.** All reads in the body of one loop (one layer) are joined. So one collective gathers all
parameters of the layer, and one scatters their gradients, instead of one per parameter. Outside of
loops, a layer is the set of parameters with the same number in their names
(`passes.straight_parts`). A straight-line part of the program (without loops or calls that
read parameters) is cut where the reads of another layer begin.

**Repeated gathers.** `jax.checkpoint` around a whole loss would run a loop over layers a second
time, and that loop would stack the gathered parameters of all layers for the backward loop. So the
body of each loop, and each straight-line part, gets its own checkpoint. It saves the same values as
a backward pass without checkpoint, except for gathered values and for operations that cost nothing
to repeat. The model's own checkpoints stay unchanged. Values decoded from codes
(`collectives.decode_on_use`) are decoded again in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs, marks_experts, read_name
from zerojax.passes.gradient_order import (
    given_by_loops,
    shards_read_once,
    with_gradients_first,
)
from zerojax.passes.straight_parts import cut_at_layers, run_in_turn
from zerojax.tracing.jaxpr import (
    evaluate_in_pieces,
    is_checkpoint,
    program_of,
    split_scan,
    variables,
)
from zerojax.tracing.tiled_products import is_in_tiles
from zerojax.tracing.trees import layer_of
from zerojax.transport.collectives import DECODED

# Layout changes are recomputed: saved results would be copies of gathered parameters, and the
# recomputation fuses into another kernel.
_LAYOUT = frozenset(
    [
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "expand_dims",
        "optimization_barrier",
        "pad",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """Rewrites loss programs by these rules; call it with the loss function.

    Attributes:
      shapes: {name: shape on a device} of each parameter whose reads may be joined with other
        reads.
      buckets: function that divides such names into groups; each group uses one collective.
      read_together: `(names, operands of each read) -> results of each read`, by one collective.
      regather: whether gathered values are dropped after the forward pass and gathered again.
      everywhere: whether reads outside of loops are joined across layers.
      trained: names of parameters whose gradients are reduce-scattered inside the backward pass.
      shard_operand: position of the shard among a read's operands.
    """

    shapes: Mapping[str, tuple[int, ...]]
    buckets: Callable[[Sequence[str]], list[list[str]]]
    read_together: Callable[[Sequence[str], Sequence[Any]], Sequence[Any]]
    regather: bool
    everywhere: bool = False
    trained: Set[str] = frozenset()
    shard_operand: int = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function with the same values and derivatives that runs the rewritten
        program.
        """

        def rewritten(*args: Tree) -> Any:
            program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
            outputs = _evaluate(self, program, jax.tree.leaves(args), _Surroundings())
            return jax.tree.unflatten(jax.tree.structure(shape), outputs)

        return rewritten


def is_made_again(primitive: Primitive, params: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint policy must recompute the result of an operation, not save it.

    This holds for zerojax's gathers, decoded weights, and marks of gathered experts. A gather is in
    a `shard_map` inside a `custom_vjp` call; the policy sees that call if the parameter is not
    differentiated (frozen). A product whose weight is gathered in tiles counts as a product.
    """
    if primitive.name == "all_gather":
        return True
    if is_in_tiles(primitive, params):
        return False
    if primitive.name == "name":
        return params["name"] == DECODED or marks_experts(params["name"])
    if primitive.name not in ("shard_map", "custom_vjp_call"):
        return False
    return any(
        is_made_again(equation.primitive, equation.params)
        for program in inner_programs(params)
        for equation in program.eqns
    )


def _keep_what_is_dear(primitive: Primitive, *_: jax.core.AbstractValue, **params: Tree) -> bool:
    """Returns whether a checkpoint saves a result: all except gathers and layout changes."""
    return primitive.name not in _LAYOUT and not is_made_again(primitive, params)


def _without_gathers(policy: Callable[..., Any] | None) -> Any:
    """Returns a checkpoint policy like `policy` that saves no gathered values; None stays None."""
    if policy is None:
        return None

    def refuse_gathers(primitive: Primitive, *avals: jax.core.AbstractValue, **params: Tree) -> Any:
        return False if is_made_again(primitive, params) else policy(primitive, *avals, **params)

    return refuse_gathers


# --- evaluation of the program, part by part ------------------------------------------------------


@dataclass(frozen=True)
class _Surroundings:
    """Context of a program: whether it is in a loop (where `prevent_cse` is not needed) or in a
    checkpoint.
    """

    in_loop: bool = False
    checkpointed: bool = False


def _evaluate(
    rules: Rewriting, closed: ClosedJaxpr, inputs: Sequence[Any], where: _Surroundings
) -> list[Any]:
    """Evaluates a program with the rewriting `rules` applied; returns its outputs."""
    of_loops = given_by_loops(closed.jaxpr, lambda equation: _trains(rules, equation))

    def run_piece(
        program: Jaxpr, equations: Sequence[Any], taken: Sequence[Any], needed: Sequence[Any]
    ) -> Callable[..., Any]:
        if where.in_loop or rules.everywhere:
            run = run_part(program, equations, taken, needed)
        else:
            parts = cut_at_layers(equations, needed)
            run = run_in_turn(parts, program, taken, needed, run_part)
        shards = shards_read_once(program, equations, rules.trained, rules.shard_operand)
        waiting, first = _places(taken, of_loops), _places(taken, shards)
        return with_gradients_first(run, waiting, first) if waiting and first else run

    def run_part(
        program: Jaxpr, equations: Sequence[Any], taken: Sequence[Any], needed: Sequence[Any]
    ) -> Callable[..., Any]:
        run = _piece(rules, program, equations, taken, needed, where)
        if rules.regather and not where.checkpointed and any(map(_reads, equations)):
            run = jax.checkpoint(run, policy=_keep_what_is_dear, prevent_cse=not where.in_loop)
        return run

    return evaluate_in_pieces(
        closed,
        inputs,
        is_apart=_is_structured,
        run_apart=lambda equation, given: _evaluate_structured(rules, equation, given, where),
        run_piece=run_piece,
    )


def _reads(equation: Equation) -> bool:
    """Returns whether an equation reads a parameter, at any depth."""
    return read_name(equation) is not None or any(
        _reads(inner) for program in inner_programs(equation.params) for inner in program.eqns
    )


def _trains(rules: Rewriting, equation: Equation) -> bool:
    """Returns whether an equation reads a trained parameter, at any depth."""
    return read_name(equation) in rules.trained or any(
        _trains(rules, inner)
        for program in inner_programs(equation.params)
        for inner in program.eqns
    )


def _places(taken: Sequence[Any], wanted: Set[Any]) -> list[int]:
    return [place for place, variable in enumerate(taken) if variable in wanted]


def _is_structured(equation: Equation) -> bool:
    """Returns whether an equation is a loop, branch, checkpoint or call that reads parameters.

    A `cond` with such reads takes the same branch on all devices; the plan has checked this.
    """
    kind = equation.primitive.name
    return (kind in ("scan", "cond", "jit", "pjit") or is_checkpoint(equation)) and _reads(equation)


def _evaluate_structured(
    rules: Rewriting, equation: Equation, inputs: Sequence[Any], where: _Surroundings
) -> Sequence[Any]:
    if equation.primitive.name == "scan":
        return _evaluate_scan(rules, equation, inputs)
    if equation.primitive.name == "cond":
        branches = [
            lambda *given, branch=branch: _evaluate(rules, branch, given, where)
            for branch in equation.params["branches"]
        ]
        return lax.switch(inputs[0], branches, *inputs[1:])
    closed = program_of(equation)
    if not is_checkpoint(equation):
        return _evaluate(rules, closed, inputs, where)
    inside = dataclasses.replace(where, checkpointed=True)
    policy = equation.params["policy"]
    run = jax.checkpoint(
        lambda *inputs: _evaluate(rules, closed, inputs, inside),
        policy=_without_gathers(policy) if rules.regather else policy,
        prevent_cse=equation.params["prevent_cse"],
    )
    return run(*inputs)


def _evaluate_scan(rules: Rewriting, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    num_consts, num_carry = split_scan(equation)
    consts = list(inputs[:num_consts])
    carry = list(inputs[num_consts : num_consts + num_carry])

    def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
        given = [*consts, *carry, *items]
        outputs = _evaluate(rules, params["jaxpr"], given, _Surroundings(in_loop=True))
        return outputs[:num_carry], outputs[num_carry:]

    carry, items = lax.scan(
        body,
        carry,
        list(inputs[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *items]


# --- one straight-line part -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """One read of a parameter: its name, its equation, and the variable of the result."""

    name: str
    call: Any
    result: Any


def _piece(
    rules: Rewriting,
    program: Jaxpr,
    equations: Sequence[Any],
    taken: Sequence[Any],
    needed: Sequence[Any],
    where: _Surroundings,
) -> Callable[..., Sequence[Any]]:
    """Returns straight-line equations as a function in which the parameter reads of a layer are
    joined.

    Each group of joined reads needs only one collective.
    """
    by_number = not (where.in_loop or rules.everywhere)
    groups = _groups(rules, equations, taken, needed, by_number=by_number)
    together = [read for group in groups for read in group]
    done = {id(read.call) for read in together}
    # Marks are dropped: a mark between a parameter and its use would make a scan stack copies.
    marked = {eqn.outvars[0]: eqn.invars[0] for eqn in equations if read_name(eqn) is not None}
    rest = [
        equation.replace(
            invars=[
                atom if isinstance(atom, Literal) else marked.get(atom, atom)
                for atom in equation.invars
            ]
        )
        for equation in equations
        if id(equation) not in done and read_name(equation) is None
    ]
    body = jaxpr_as_fun(
        ClosedJaxpr(
            program.replace(
                constvars=(),
                invars=[*taken, *(read.result for read in together)],
                outvars=[marked.get(variable, variable) for variable in needed],
                eqns=rest,
                effects=program.effects,
            ),
            (),
        )
    )
    position = {variable: index for index, variable in enumerate(taken)}

    def run(*given: Tree) -> Sequence[Any]:
        wholes: list[Any] = []
        for group in groups:
            operands = [tuple(given[position[v]] for v in read.call.invars) for read in group]
            wholes += rules.read_together([read.name for read in group], operands)
        return body(*given, *wholes)

    return run


def _groups(
    rules: Rewriting,
    equations: Sequence[Any],
    taken: Sequence[Any],
    needed: Sequence[Any],
    *,
    by_number: bool,
) -> list[list[_Read]]:
    """Groups the reads of a straight-line part that can share a collective; returns groups of two
    or more.

    A read is grouped only if it depends on nothing but inputs of the part. A read whose result is
    not used is in no group: `if self.scale` in a Flax layer is such a read, and only the read after
    it counts.

    Args:
      rules: rules of the rewriting.
      equations: equations of the part.
      taken: inputs of the part.
      needed: outputs of the part.
      by_number: True: a layer is the set of names with the same number, and reads of names without
        a number are not grouped. False: the part is one layer.
    """
    outside, used = set(taken), {*needed}
    for equation in equations:
        used.update(() if read_name(equation) is not None else variables(equation.invars))
    marks = {
        e.invars[0]: read_name(e)
        for e in equations
        if read_name(e) is not None and not used.isdisjoint((e.invars[0], e.outvars[0]))
    }
    reads: dict[str, _Read] = {}
    for call in equations:
        name = marks.get(call.outvars[0]) if len(call.outvars) == 1 else None
        given = {atom for atom in call.invars if not isinstance(atom, Literal)}
        if name not in rules.shapes or not given <= outside:
            continue
        shape, (result,) = rules.shapes[name], call.outvars
        # A read under vmap, whose value has extra dimensions, is not grouped, nor is a second
        # read of the same parameter.
        if result.aval.shape == shape[len(shape) - result.aval.ndim :]:
            reads.setdefault(name, _Read(name, call, result))
    layers: dict[str, list[str]] = {"": list(reads)} if not by_number else {}
    if by_number:
        for name in reads:
            if (layer := layer_of(name)) is not None:
                layers.setdefault(layer, []).append(name)
    buckets = [bucket for names in layers.values() for bucket in rules.buckets(names)]
    return [[reads[name] for name in bucket] for bucket in buckets if len(bucket) > 1]
