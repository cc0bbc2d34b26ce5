"""Traces a model's forward pass with abstract arrays, and determines how each parameter is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch, Tree
from zerojax.operators.attending import Call, calls_of_attention
from zerojax.operators.marks import inner_programs
from zerojax.tracing.dependence import marks_of_outputs
from zerojax.tracing.exact_leaves import find_exact_leaves
from zerojax.tracing.index_limits import IndexLimit, find_index_limits
from zerojax.tracing.protocol import Arrays, Loss, Model, on_batch
from zerojax.tracing.reads import MarkRead, find_reads
from zerojax.tracing.trees import flatten_names
from zerojax.tracing.uniform import find_uniform_branches

_DRAWS = ("random_bits", "threefry", "rng_bit_generator")
"""Prefixes of the names of primitives that generate random bits."""


@dataclass(frozen=True)
class ModelTrace:
    """Results of one abstract forward pass.

    Attributes:
      read_shapes: {name: shapes with which the parameter is read}; a missing name is never read. A
        stack of layers in a scan is read one slice at a time, so these shapes have fewer dimensions
        than the stored shape. The same holds for an ensemble under `jax.vmap`.
      mapped_dims: {name: number of leading dimensions that `jax.vmap` maps at a read}.
      barriers: {name: reason why the parameter cannot be gathered where the model reads it}.
      in_branches: names of the parameters that are read in a branch that is the same on all
        devices.
      eight_bits: names of the parameters that the model uses only as 8-bit floats.
      result: abstract value of the loss.
      jaxpr: traced forward pass, for counting. Its inputs are parameters, extras (non-parameter
        arrays) and batch, in the order of sorted names; its outputs are the leaves of `result`.
      index_limits: {leaf of the batch: limits of its integers} (see module `index_limits`).
      exact_leaves: {floating-point leaf of the batch whose exact values matter: why} (see module
        `exact_leaves`).
      attention: a sentence for each kind of call of `zerojax.attention`, in order.
      attention_calls: one call of `zerojax.attention` of each kind, in the order of `attention`.
      program: the same equations with the new extras as further outputs, by sorted names.
    """

    read_shapes: Mapping[str, frozenset[tuple[int, ...]]]
    mapped_dims: Mapping[str, int]
    barriers: Mapping[str, str]
    in_branches: frozenset[str]
    eight_bits: frozenset[str]
    result: Tree
    jaxpr: ClosedJaxpr
    index_limits: Mapping[str, tuple[IndexLimit, ...]]
    exact_leaves: Mapping[str, str]
    attention: tuple[str, ...]
    attention_calls: tuple[Call, ...]
    program: ClosedJaxpr


def trace_model(
    model: Model, params: Arrays, extras: Arrays, batch: Batch, loss: Loss, *, train: bool = True
) -> ModelTrace:
    """Traces the loss once, without computing it, and determines how each parameter is read.

    Args:
      params, extras, batch: trees of `ShapeDtypeStruct` with the shapes and dtypes that the model
        will get.
      loss: loss function, `function(model, batch)`.
      train: whether the model runs in training mode.

    Raises:
      ValueError: the model names an axis of `jax.pmap` or `jax.vmap`.
    """
    handed: set[str] = set()
    plain: set[str] = set()

    def traced(params: Arrays, extras: Arrays, batch: Batch) -> Any:
        function, key = on_batch(loss, batch), jax.random.key(0)
        on_read = {name: MarkRead(name, handed) for name in params if name not in plain}
        return model.run(params, extras, key, function, train=train, on_read=on_read)

    while True:
        try:
            with calls_of_attention() as calls:
                trace = jax.make_jaxpr(traced, return_shape=True)
                program, (result, _) = trace(params, extras, batch)
            break
        except NameError as error:
            raise _about_an_axis(error) from error
        except Exception:
            # The cause may be a placeholder of a parameter. If so, the trace works with the arrays,
            # and `find_reads` records that their stored values are used.
            # No placeholder is left that could be the cause.
            if handed <= plain:
                raise
            plain |= handed
    outputs = program.jaxpr.outvars[: len(jax.tree.leaves(result))]
    jaxpr = ClosedJaxpr(program.jaxpr.replace(outvars=outputs), program.consts)
    # The leaves of a dict are in the order of its sorted keys.
    rest = len(jax.tree.leaves((extras, batch)))
    uniform = find_uniform_branches(
        program.jaxpr,
        num_params=len(params),
        num_extras=len(extras),
        num_results=len(outputs),
    )
    reads = find_reads(jaxpr.jaxpr, [*sorted(params), *[None] * rest], uniform)
    flat = flatten_names(batch)
    of_batch = [
        (name, leaf.shape) if jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.shape else None
        for name, leaf in flat.items()
    ]
    # The leaves of the batch are the last inputs.
    before = [None] * (len(jaxpr.jaxpr.invars) - len(of_batch))
    floats = [
        name if jnp.issubdtype(leaf.dtype, jnp.floating) else "" for name, leaf in flat.items()
    ]
    return ModelTrace(
        read_shapes={name: frozenset(shapes) for name, shapes in reads.shapes.items()},
        mapped_dims=reads.mapped_dims,
        barriers=reads.barriers,
        in_branches=frozenset(reads.in_branches),
        eight_bits=frozenset(reads.shapes.keys() - reads.in_full),
        result=result,
        jaxpr=jaxpr,
        index_limits=find_index_limits(jaxpr.jaxpr, [*before, *of_batch]),
        exact_leaves=find_exact_leaves(jaxpr.jaxpr, [*before, *floats]),
        attention=tuple(dict.fromkeys(call.describe() for call in calls)),
        attention_calls=tuple(dict.fromkeys(calls)),
        program=program,
    )


def has_random_numbers(program: Jaxpr | ClosedJaxpr) -> bool:
    """Returns whether a traced program draws random numbers, at any depth."""
    jaxpr: Jaxpr = getattr(program, "jaxpr", program)
    return any(
        equation.primitive.name.startswith(_DRAWS)
        or any(has_random_numbers(inner) for inner in inner_programs(equation.params))
        for equation in jaxpr.eqns
    )


def is_random(
    model: Model, params: Arrays, extras: Arrays, batch: Batch, loss: Loss, *, train: bool
) -> bool:
    """Returns whether the loss depends on the random key; arguments are those of `trace_model`."""

    def run(params: Arrays, extras: Arrays, batch: Batch, key: jax.Array) -> Any:
        return model.run(params, extras, key, on_batch(loss, batch), train=train)[0]

    key = jax.eval_shape(lambda: jax.random.key(0))
    closed = jax.make_jaxpr(run)(params, extras, batch, key)
    marks = [0] * (len(closed.jaxpr.invars) - 1)
    return any(marks_of_outputs(closed.jaxpr, [*marks, 1]))


def _about_an_axis(error: NameError) -> Exception:
    """Returns a ValueError with a remedy if a model uses an unknown axis name; else returns
    `error`.
    """
    match = re.search(r"unbound axis name: (\w+)", str(error))
    if match is None:
        return error
    return ValueError(
        f"the model sums over an axis named {match[1]!r}, as under jax.pmap (for example BatchNorm "
        "with axis_name=); zerojax has no such axis; remove the name, so that each device "
        "normalises by its own rows, or use zerojax.batch_mean for means over the whole batch"
    )
