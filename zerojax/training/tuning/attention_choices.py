"""Measures which attention implementation is fastest where a model sets "auto".

Candidates are the plan's choice for "auto" and implementations that need no more memory, so the
memory of the plan does not grow. One call is timed, forward and backward, on arrays of the call's
sizes. Calls whose time depends on data (packed texts, positions) or that have attention layouts
keep the choice of "auto".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from zerojax.config.tree_types import Tree
from zerojax.operators.attending import Call, attention
from zerojax.operators.chunked_attention import BLOCK
from zerojax.placement.device_mesh import MODEL
from zerojax.plan.make import Plan
from zerojax.plan.open_choices import NO_MORE_MEMORY
from zerojax.training.tuning.measured_choices import Answer, Question, Way
from zerojax.training.tuning.trials import Repeated, base_key, on_device, room

ARRAYS = 24
"""Number of arrays of a query's size that exist at once: four inputs, three times four compared
results, and temporaries besides scores (from programs compiled for an H200)."""
SCORES = 6
"""Number of float32 arrays of a row's attention scores: scores, probabilities, their gradients and
transposed copies. They cover all queries and keys if an implementation stores them, otherwise one
block (from programs compiled for an H200)."""
TOKENS, CHANNELS = 128, 64
"""Numbers to whose multiples the compiler pads dimensions of matrix products."""
AT_ONCE = 4
"""Number of computations in one timed program."""
ROUNDING_LIMIT = 2.0**-6
"""Maximum difference relative to an array's largest element, for 16-bit products in two orders."""


def choose_attention(
    plan: Plan, call: Call, decided: Callable[[Callable[[], Question]], Answer]
) -> Answer:
    """Returns the fastest implementation of a call; each candidate is compared with the best so
    far.

    Args:
      plan: plan on GPUs of this machine.
      call: the attention call.
      decided: function that answers a question, as `decide` does.
    """
    best, reasons = str(call.implementation), []
    for other in NO_MORE_MEMORY[best]:
        reference = best
        answer = decided(lambda: attention_question(plan, call, reference, other))  # noqa: B023
        # If the question fails, the answer is "xla", which is not the plan's choice.
        best = other if answer.choice == other else best
        reasons.append(answer.reason)
    return Answer(choice=best, reason="; ".join(reasons))


def attention_question(plan: Plan, call: Call, reference: str, other: str) -> Question:
    """Builds the `Question` which of two attention implementations is faster, with gradients."""
    sizes = _on_one_device(plan, call)
    make = on_device(plan, lambda: _drawn(sizes))
    assert isinstance(plan.mesh, Mesh)
    alone = Mesh([plan.mesh.local_devices[0]], ("alone",), axis_types=(AxisType.Auto,))

    def way(name: str) -> Way:
        run, repeat = programs_of(call, name, alone)
        return Way(
            name=name,
            run=lambda: run(*make()),
            repeat=Repeated(lambda: (make(), None), lambda held, _: (repeat(*held), held)),
            obstacle=_obstacle(lambda: jax.eval_shape(run, *jax.eval_shape(make))),
        )

    return Question(
        title=str(call.kind),
        key={
            **base_key(plan, str(call.kind)),
            "elements": sizes.rows * sizes.queries * sizes.heads * sizes.head_dim,
            "ways": [reference, other],
        },
        reference=way(reference),
        other=way(other),
        difference=difference,
    )


def programs_of(call: Call, name: str, mesh: Mesh) -> tuple[Any, Any]:
    """Returns two jitted functions: forward and backward pass once, and `AT_ONCE` times.

    Both functions take query, key, value and the gradient of the output.

    Args:
      call: options of the attention call.
      name: name of the implementation.
      mesh: mesh of one device. The call runs under `shard_map` as in a step, because cuDNN's
        implementation differs outside of `shard_map`.
    """

    def once(
        query: jax.Array, key: jax.Array, value: jax.Array, slope: jax.Array
    ) -> tuple[jax.Array, ...]:
        def attend(*operands: jax.Array) -> jax.Array:
            return attention(
                *operands,
                causal=call.causal,
                window=call.window,
                implementation=name,  # type: ignore[arg-type]
            )

        out, backward = jax.vjp(attend, query, key, value)
        return (out, *backward(slope))

    def several(query: jax.Array, key: jax.Array, value: jax.Array, slope: jax.Array) -> jax.Array:
        def again(_: jax.Array, query: jax.Array) -> jax.Array:
            out, *gradients = once(query, key, value, slope)
            # Uses all gradients, so that XLA removes none, without changing the next input.
            return out + sum(0 * jnp.sum(x).astype(out.dtype) for x in gradients)

        return lax.fori_loop(0, AT_ONCE, again, query)

    step = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(once, **step)), jax.jit(jax.shard_map(several, **step))


def _on_one_device(plan: Plan, call: Call) -> Call:
    """Returns the call with the heads of one device and as many rows as fit in memory.

    Raises:
      ValueError: the memory does not suffice for one row.
    """
    split = plan.mesh.shape[MODEL]
    heads, kv_heads = call.heads // split, max(call.kv_heads // split, 1)
    row = row_bytes(dataclasses.replace(call, heads=heads))
    rows = min(call.rows, room(plan) // row)
    if rows < 1:
        raise ValueError(
            f"one row takes {row:,} bytes, and measurements may use {room(plan):,}; the plan's "
            "choice is used"
        )
    return dataclasses.replace(call, rows=rows, heads=heads, kv_heads=kv_heads)


def row_bytes(call: Call) -> int:
    """Returns the maximum number of bytes needed to measure one row of a call with two
    implementations."""
    tokens = [-(-n // TOKENS) * TOKENS for n in (call.queries, call.keys)]
    channels = -(-call.head_dim // CHANNELS) * CHANNELS
    arrays = ARRAYS * max(tokens) * call.heads * channels * call.itemsize
    held = tokens if call.implementation == "xla" else [min(n, BLOCK) for n in tokens]
    return arrays + SCORES * 4 * call.heads * math.prod(held)


def _drawn(call: Call) -> tuple[jax.Array, ...]:
    """Returns random arrays for query, key, value and gradient of the output."""
    of_queries = (call.rows, call.queries, call.heads, call.head_dim)
    of_keys = (call.rows, call.keys, call.kv_heads, call.head_dim)
    keys = jax.random.split(jax.random.key(2), 4)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    pairs = zip(keys, shapes, strict=True)
    return tuple(jax.random.normal(key, shape).astype(call.dtype) for key, shape in pairs)


def _obstacle(trace: Callable[[], Any]) -> str | None:
    """Returns why an implementation rejects the call during tracing; None if it accepts it."""
    try:
        trace()
    except ValueError as error:
        return " ".join(str(error).split()).partition("; use ")[0]
    return None


def difference(ours: Tree, theirs: Tree) -> str | None:
    """Describes a difference of output or gradients beyond rounding; None if they agree."""
    names = ("the result", "the gradient of query", "of key", "of value")
    for name, mine, other in zip(names, ours, theirs, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (mine, other))
        if a.shape != b.shape or mine.dtype != other.dtype:
            return f"{name} is {mine.dtype}{list(mine.shape)}"
        if not np.isfinite(a).all():
            return f"{name} is not finite"
        far, largest = np.abs(a - b).max(initial=0), np.abs(b).max(initial=0)
        if far > ROUNDING_LIMIT * largest:
            return f"{name} differs by {far:.2g}, where its largest is {largest:.2g}"
    return None
