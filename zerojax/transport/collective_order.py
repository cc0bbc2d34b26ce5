"""Orders the collectives of a program for XLA's CPU devices, which start some of them too early.

XLA's CPU executor starts a collective after the collectives before it, but a loop counts as
finished for this purpose as soon as it has been started (edges of kind `kScheduling` in
`xla/runtime/execution_graph.cc` of openxla/xla; JAX 0.12). If a collective after a loop reads
nothing that the loop computes, such as the second all-gather of a weight, some devices run it while
others run a collective of the loop. XLA then mixes up the two: the process ends ("Id can't be
larger than the number of participating threads", a time limit or a segmentation fault), or arrays
get the values of others. In the programs of this module each collective after a loop waits for a
result of the loop, and a loop waits for the collectives before it. Not ordered are two loops inside
of an inner `shard_map` or `custom_vmap`, and a loop without operands. Compilers for GPUs order
collectives themselves, and their programs are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs, mark_wait
from zerojax.placement.device_mesh import MODEL
from zerojax.tracing.dependence import Follow, Marks, union
from zerojax.tracing.jaxpr import (
    COLLECTIVES,
    evaluate_in_pieces,
    holds_collectives,
    is_checkpoint,
    piece_function,
    variables,
)
from zerojax.transport.sums import barrier_kind, zero_at_run_time

_LOOPS = ("scan", "while", "cond")
_CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")


def in_program_order(function: Callable[..., Any], mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """Returns `function` with its collectives in the order of the program, if CPUs run it.

    Values stay the same, bit for bit.

    Args:
      function: function of one device, as given to `jax.shard_map`; arguments and results are
        pytrees of arrays. The result is not differentiable.
      mesh: mesh of the devices; on one device, and on devices other than CPUs, `function` itself is
        returned. It is also called itself when JAX runs it operation by operation, to find a NaN.
    """
    if barrier_kind(mesh) != "branch" or mesh.size == 1:
        return function
    # Over the axis `model` the compiler inserts collectives that the traced program does not show.
    everywhere = mesh.shape[MODEL] > 1

    @functools.wraps(function)
    def ordered(*args: Tree) -> Any:
        if _runs_at_once(args):
            return function(*args)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        run = jaxpr_as_fun(_with_order(closed, everywhere))
        return jax.tree.unflatten(jax.tree.structure(shape), run(*jax.tree.leaves(args)))

    return ordered


def _runs_at_once(args: Tree) -> bool:
    """Returns whether JAX evaluates a function of one device without compiling it."""
    return any(isinstance(getattr(x, "val", None), jax.Array) for x in jax.tree.leaves(args))


def _with_order(closed: ClosedJaxpr, everywhere: bool) -> ClosedJaxpr:
    """Returns a program with the same results whose loops and collectives wait for each other.

    Args:
      closed: program; it is returned itself if it has no loop with collectives.
      everywhere: whether every loop contains collectives.
    """
    if not _has_loops(closed.jaxpr, everywhere):
        return closed

    def run(*inputs: jax.Array) -> list[Any]:
        return _Order(everywhere).run(closed, inputs, [0] * len(inputs))[0]

    return jax.make_jaxpr(run)(*(variable.aval for variable in closed.jaxpr.invars))


def _has_loops(program: Jaxpr, everywhere: bool) -> bool:
    """Returns whether a program has a loop (or a branch) with collectives, at any depth."""
    return any(
        _is_loop(equation, everywhere) or _holds_loops(equation, everywhere)
        for equation in program.eqns
    )


def _holds_loops(equation: Equation, everywhere: bool) -> bool:
    return any(_has_loops(inner, everywhere) for inner in inner_programs(equation.params))


def _is_loop(equation: Equation, everywhere: bool) -> bool:
    if equation.primitive.name not in _LOOPS or equation.params.get("length") == 0:
        return False
    return everywhere or _holds_collectives(equation)


def _holds_collectives(equation: Equation) -> bool:
    return any(map(holds_collectives, inner_programs(equation.params)))


class _Marks(Follow):
    """Traversal of what each value depends on in the compiled program, which has no barriers."""

    def _equation(self, equation: Equation, operands: list[Marks]) -> Sequence[Marks]:
        if equation.primitive.name == "optimization_barrier":
            return operands
        return super()._equation(equation, operands)


@dataclass(frozen=True)
class _Event:
    """Collective that has run, or loop with collectives.

    Attributes:
      bit: its mark.
      after: marks of the events that it depends on, and its own.
      results: arrays that it computed.
    """

    bit: Marks
    after: Marks
    results: Sequence[jax.Array]

    @functools.cached_property
    def zero(self) -> jax.Array:
        """0, int32 [], that cannot be computed before the results."""
        zeros = [zero_at_run_time(result) for result in self.results]
        return mark_wait(sum(zeros[1:], zeros[0]))


class _Order:
    """Evaluates a program; its loops wait for all events before them, and its collectives for all
    loops.

    Args:
      everywhere: whether every loop contains collectives.
    """

    def __init__(self, everywhere: bool) -> None:
        self._everywhere = everywhere
        self._events: list[_Event] = []
        self._loops: Marks = 0  # of the loops among the events
        self._loops_after: Marks = 0  # of these loops and of what they depend on
        self._follow = _Marks(frozenset())

    def run(
        self, closed: ClosedJaxpr, inputs: Sequence[Any], marks: Sequence[Marks]
    ) -> tuple[list[Any], list[Marks]]:
        """Evaluates a program after the events so far.

        Args:
          closed: program.
          inputs: values of its inputs.
          marks: marks of the events that each input depends on.

        Returns:
          (outputs, their marks).
        """
        held: dict[Any, Marks] = dict(zip(closed.jaxpr.invars, marks, strict=True))

        def of(atom: Operand) -> Marks:
            return 0 if isinstance(atom, Literal) else held.get(atom, 0)

        def run_piece(
            program: Jaxpr,
            equations: Sequence[Equation],
            taken: Sequence[Var],
            needed: Sequence[Var],
        ) -> Any:
            piece = program.replace(
                constvars=[], invars=[*taken], outvars=[*needed], eqns=[*equations]
            )
            found = self._follow.outputs(piece, [*map(of, taken)])
            held.update(zip(needed, found, strict=True))
            return piece_function(program, equations, taken, needed)

        def run_apart(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
            given = [*map(of, equation.invars)]
            if (inner := _called(equation)) is not None:
                with jax.named_scope(_scope(equation)):
                    results, found = self.run(inner, _with_barriers(equation, operands), given)
            else:
                results, found = self._run_event(closed.jaxpr, equation, operands, given)
            held.update(zip(equation.outvars, found, strict=True))
            return results

        outputs = evaluate_in_pieces(
            closed, inputs, is_apart=self._is_event, run_apart=run_apart, run_piece=run_piece
        )
        return outputs, [*map(of, closed.jaxpr.outvars)]

    def _is_event(self, equation: Equation) -> bool:
        return (
            equation.primitive.name.startswith(COLLECTIVES)
            or _holds_collectives(equation)
            or _is_loop(equation, self._everywhere)
            or _holds_loops(equation, self._everywhere)
        )

    def _run_event(
        self, program: Jaxpr, equation: Equation, operands: Sequence[Any], marks: Sequence[Marks]
    ) -> tuple[list[Any], list[Marks]]:
        """Runs a collective or a loop when the events before it have ended."""
        operands, everything = [*operands], (1 << len(self._events)) - 1
        waited = self._loops_after
        if is_loop := _is_loop(equation, self._everywhere):
            waited = 0
            if (place := _smallest_used(equation)) is not None:
                operands[place] = self._wait(operands[place], everything & ~union(marks))
                waited = everything
            params = {name: self._in_order(value) for name, value in equation.params.items()}
            equation = equation.replace(params=params)
        else:
            # A call of another kind, such as a `shard_map`, may contain loops.
            is_loop = _holds_loops(equation, self._everywhere)
            needed = everything if is_loop else self._loops
            operands = [self._wait(x, needed & ~m) for x, m in zip(operands, marks, strict=True)]
        results = _run_alone(program, equation, operands)
        if not (witnesses := _witnesses(results)):
            return results, [union(marks)] * len(results)
        bit = 1 << len(self._events)
        closure = bit | union(marks) | waited
        self._events.append(_Event(bit, closure, witnesses))
        if is_loop:
            self._loops |= bit
            self._loops_after = closure
        return results, [closure] * len(results)

    def _in_order(self, value: object) -> Any:
        """Returns an equation's parameter with `_with_order` applied to the programs in it."""
        if isinstance(value, ClosedJaxpr):
            return _with_order(value, self._everywhere)
        if type(value) is tuple:
            return tuple(map(self._in_order, value))
        return value

    def _wait(self, value: jax.Array, needed: Marks) -> Any:
        """Returns `value`, computed such that it depends on the events with the needed marks."""
        zeros: list[jax.Array] = []
        for event in reversed(self._events):
            if event.bit & needed:
                zeros.append(event.zero)
                needed &= ~event.after
        if not zeros or not _is_usable(jax.typeof(value := jnp.asarray(value))):
            return value
        zero = sum(zeros[1:], zeros[0])
        # A constant 0 instead would let the compiler remove the choice if the value is 0.
        other = jnp.broadcast_to(zero.astype(value.dtype), value.shape)
        return lax.select(zero == 0, value, other)


def _called(equation: Equation) -> ClosedJaxpr | None:
    """Returns the program of a call or a checkpoint; None for other equations."""
    if not is_checkpoint(equation) and equation.primitive.name not in _CALLS:
        return None
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def _scope(equation: Equation) -> str:
    """Returns the name that JAX gives to the operations of a call or a checkpoint."""
    name = "checkpoint" if is_checkpoint(equation) else f"jit({equation.params.get('name', '')})"
    return "/".join(filter(None, [str(equation.source_info.name_stack), name]))


def _with_barriers(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands of a call; those of a checkpoint behind the barriers that JAX adds."""
    if not is_checkpoint(equation) or not equation.params["differentiated"]:
        return operands
    behind = np.broadcast_to(equation.params["prevent_cse"], len(operands))
    pairs = list(zip(operands, behind, strict=True))
    given = iter(lax.optimization_barrier([x for x, apart in pairs if apart]))
    return [next(given) if apart else x for x, apart in pairs]


def _run_alone(program: Jaxpr, equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of `program` on the given operands; returns the equation's results."""
    fresh = jax.make_jaxpr(lambda *values: None)
    taken = fresh(*(atom.aval for atom in equation.invars)).jaxpr.invars
    made = fresh(*(variable.aval for variable in equation.outvars)).jaxpr.invars
    alone = equation.replace(invars=taken, outvars=made)
    return piece_function(program, [alone], taken, made)(*operands)


def _witnesses(results: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results from which it is seen that a loop or a collective has ended.

    They are all floats, since integers may be counters, whose last value the compiler knows; if
    there are none, all numbers.
    """
    usable = [x for x in results if _is_usable(jax.typeof(x))]
    return [x for x in usable if jnp.issubdtype(x.dtype, jnp.floating)] or usable


def _smallest_used(equation: Equation) -> int | None:
    """Returns the position of the smallest operand of a loop that can wait; None if there is none.

    An operand that the body of a `scan`, or no branch of a `cond`, reads cannot wait, because the
    compiler removes it. Floats come first, because integers may be counters, from which the
    compiler derives the number of iterations.
    """
    places = set(range(len(equation.invars)))
    if equation.primitive.name != "while":
        programs = [*inner_programs(equation.params)]
        first = len(places) - len(programs[0].invars)
        read = {x for program in programs for one in program.eqns for x in variables(one.invars)}
        places = {
            place
            for place in places
            if place < first or any(program.invars[place - first] in read for program in programs)
        }

    def order(place: int) -> tuple[bool, int]:
        aval = equation.invars[place].aval
        return not jnp.issubdtype(aval.dtype, jnp.floating), aval.size

    usable = [place for place in sorted(places) if _is_usable(equation.invars[place].aval)]
    return min(usable, key=order, default=None)


def _is_usable(aval: object) -> bool:
    """Returns whether a value is an array with an element, on the device, that is a number (no
    random key).
    """
    if not isinstance(aval, jax.core.ShapedArray):
        return False
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return bool(aval.size) and not is_key and aval.memory_space != jax.memory.Space.Host
