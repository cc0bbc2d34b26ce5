"""Evaluates traced programs in which weights are gathered in tiles for their only product.

A weight is an input of the program that is this device's shard, or a read that the program marks.
Knows programs; how shards are gathered is a function that the caller gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun

from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs, marked_reads, read_name
from zerojax.tracing.jaxpr import (
    evaluate_in_pieces,
    is_checkpoint,
    program_of,
    split_scan,
    variables,
)
from zerojax.tracing.tiled_products import (
    TiledProduct,
    WeightProduct,
    find_product,
    is_call,
    is_in_tiles,
    is_step,
    multiply_in_tiles,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedWeight:
    """Input of a program that is this device's shard of a weight, to be gathered in tiles.

    Attributes:
      shard: this device's shard, in the dtype in which it is gathered.
      sink: zeros with the shape of the shard, perhaps in another dtype; the gradient of the weight
        is returned as the gradient of `sink`. None: it is returned as the gradient of `shard`.
      tiled: product that alone reads the weight.
    """

    shard: jax.Array
    sink: jax.Array | None
    tiled: TiledProduct = dataclasses.field(metadata={"static": True})


Tilings = Mapping[str, Callable[[WeightProduct], TiledProduct]]
"""{parameter: its product in tiles, from the product in a program}."""


def products_read(
    program: Jaxpr, names: Collection[str]
) -> Iterator[tuple[str, Any, WeightProduct | str]]:
    """Yields (name, equation that marks it, its only product or why there is none) of reads.

    Args:
      program: traced program; its nested programs are not searched, and a read whose result is not
        used does not count.
      names: names of the parameters that count.
    """
    if names:
        used = {*variables(program.outvars)}.union(*(variables(e.invars) for e in program.eqns))
        for equation in program.eqns:
            name = read_name(equation)
            if name is not None and name in names and equation.outvars[0] in used:
                yield name, equation, find_product(program, equation.outvars[0])


def has_reads(equation: Equation, names: Collection[str]) -> bool:
    """Returns whether a loop, call or checkpoint contains reads of `names`, at any depth of such
    equations; False for other equations."""
    if not names or not (is_call(equation) or equation.primitive.name == "scan"):
        return False
    return any(
        read_name(inner) in names or has_reads(inner, names)
        for inner in program_of(equation).jaxpr.eqns
    )


def run_with_tiles(
    closed: ClosedJaxpr, inputs: Sequence[Any], reads: Tilings | None = None
) -> list[Any]:
    """Evaluates a program with products in tiles.

    Args:
      closed: the program.
      inputs: its inputs; some may be `ShardedWeight`s.
      reads: tilings of parameters that the program reads, at any depth of loops, calls and
        checkpoints. The value that is read, or gathered for the read, is then this device's shard.
    """
    program, reads = closed.jaxpr, reads or {}
    pairs = zip(program.invars, inputs, strict=True)
    sharded = {variable for variable, value in pairs if isinstance(value, ShardedWeight)}
    begins = _first_equations(program, reads)
    apart = set()
    for equation in program.eqns:
        takes = not sharded.isdisjoint(variables(equation.invars))
        if takes or id(equation) in begins or has_reads(equation, reads):
            apart.add(id(equation))
        if id(equation) in begins or (takes and is_step(equation)):
            sharded.update(equation.outvars)
    if not apart:
        return jaxpr_as_fun(closed)(*inputs)

    def run_apart(equation: Equation, given: Sequence[Any]) -> Sequence[Any]:
        if (tiled := begins.get(id(equation))) is not None:
            (shard,) = given
            return [ShardedWeight(shard, None, tiled)]
        return _run_apart(equation, given, reads)

    return evaluate_in_pieces(
        closed, inputs, is_apart=lambda equation: id(equation) in apart, run_apart=run_apart
    )


def _first_equations(program: Jaxpr, reads: Tilings) -> dict[int, TiledProduct]:
    """Returns {`id` of the equation that takes the shard: product in tiles} of a program's reads.

    It is the call that gathers the value, or the mark where nothing gathers it.
    """
    gathers = {e.outvars[0]: e for e in program.eqns if e.primitive.name == "custom_vjp_call"}
    found = {}
    for name, mark, product in products_read(program, reads):
        assert isinstance(product, WeightProduct), product
        found[id(gathers.get(mark.invars[0], mark))] = reads[name](product)
    return found


def _run_apart(equation: Equation, inputs: Sequence[Any], reads: Tilings) -> Sequence[Any]:
    """Evaluates an equation that reads weights in tiles: a step, a call, a loop or a product."""
    kind = equation.primitive.name
    if kind == "dot_general":
        side = 0 if isinstance(inputs[0], ShardedWeight) else 1
        weight = inputs[side]
        return [multiply_in_tiles(weight.tiled, weight.shard, weight.sink, inputs[1 - side])]
    if kind == "scan":
        return _run_loop(equation, inputs, reads)
    if not is_call(equation):
        # Casts and changes of layout are done with each tile (`WeightProduct.operand`).
        return [inputs[0]]
    closed = program_of(equation)
    if not is_checkpoint(equation):
        return run_with_tiles(closed, inputs, reads)
    run = jax.checkpoint(
        lambda *given: run_with_tiles(closed, given, reads),
        policy=_asks_about_products(equation.params["policy"]),
        prevent_cse=equation.params["prevent_cse"],
    )
    return run(*inputs)


def _run_loop(equation: Equation, inputs: Sequence[Any], reads: Tilings) -> Sequence[Any]:
    params, (num_consts, num_carry) = equation.params, split_scan(equation)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]

    def body(carry: Sequence[Any], items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run_with_tiles(params["jaxpr"], [*consts, *carry, *items], reads)
        return outputs[:num_carry], outputs[num_carry:]

    carry, items = lax.scan(
        body,
        list(carry),
        list(inputs[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *items]


def _asks_about_products(policy: Callable[..., Any] | None) -> Any:
    """Returns a checkpoint policy that treats a product in tiles as `policy` treats the product."""
    if policy is None:
        return None

    def asking(primitive: Primitive, *avals: jax.core.AbstractValue, **params: Any) -> Any:
        if is_in_tiles(primitive, params):
            product = next(e for program in inner_programs(params) for e in _products(program))
            return policy(product.primitive, *(v.aval for v in product.invars), **product.params)
        return policy(primitive, *avals, **params)

    return asking


def _products(program: Jaxpr) -> Iterator[Any]:
    """Yields the products of a program, at any depth."""
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in inner_programs(equation.params):
            yield from _products(inner)


# --- reads of a loss ------------------------------------------------------------------------------


def find_reads_in_loops(
    program: Jaxpr, names: Collection[str]
) -> dict[str, list[WeightProduct | str]]:
    """Returns {parameter: the product that alone uses a read, or why there is none, of each read}.

    Parameters that are read nowhere, or only in branches and custom derivatives, are left out.

    Args:
      program: a loss, with a mark at every read.
      names: names of the parameters that count.
    """
    found: dict[str, list[WeightProduct | str]] = {}

    def walk(program: Jaxpr, in_loop: bool) -> None:
        for name, _, product in products_read(program, names):
            reads = found.setdefault(name, [])
            reads.append(product if in_loop else "no loop over layers slices it")
        for equation in program.eqns:
            if has_reads(equation, names):
                inside = in_loop or equation.primitive.name == "scan"
                walk(program_of(equation).jaxpr, inside)

    walk(program, False)
    return found


def tile_reads(function: Callable[..., Any], reads: Tilings) -> Callable[..., Any]:
    """Returns `function` with the same values, whose reads of some weights are in tiles.

    Args:
      function: a loss, with a mark at every read.
      reads: tilings of weights that a loop over layers slices and one product reads; the loss need
        not read all of them.

    Raises:
      ValueError: when it is traced; a weight is read in another way.
    """
    if not reads:
        return function

    def tiled(*args: Tree) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = find_reads_in_loops(closed.jaxpr, reads)
        # Reads in branches have marks, but `find_reads_in_loops` leaves them out.
        for name in sorted({read.name for read in marked_reads(closed.jaxpr)} & reads.keys()):
            product, *others = found.get(name, ["no loop over layers reads it"])
            if others or isinstance(product, str):
                why = f"it is read {len(others) + 1} times" if others else str(product)
                raise error_of_other_read(name, why)
        outputs = run_with_tiles(closed, jax.tree.leaves(args), reads)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return tiled


def error_of_other_read(name: str, why: str) -> ValueError:
    """Returns the error for a loss that does not read a weight in tiles in one product alone."""
    return ValueError(
        f"{name}: offload.tile_bytes gathers this weight in tiles for one matrix product, but in "
        f"this loss {why}; evaluate a function that runs the same layers, or remove tile_bytes"
    )
