"""Choice of the implementation of attention where a model says "auto", measured on its own GPU.

What `auto` takes is timed beside those implementations that hold no more than it does, so that the
memory of the plan stays what it is: the forward and the backward pass of one call, on arrays of its
sizes. Calls whose time hangs on data (packed texts, positions) and layouts are left to `auto`.
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

from zerojax.models.attending import Call, attention
from zerojax.models.chunked_attention import BLOCK
from zerojax.plan.device_mesh import MODEL
from zerojax.plan.make import Plan
from zerojax.plan.open_choices import NO_MORE_MEMORY
from zerojax.training.tuning.measured_choices import Answer, Question, Way
from zerojax.training.tuning.trials import Repeated, base_key, on_device, room

ARRAYS = 24
"""Of a query's size at once: four that are given, three times four results that are compared, and
what an implementation makes beside scores (compiled for an H200)."""
SCORES = 6
"""Of a row, in float32: scores, probabilities, their gradients and copies in another order, of all
queries and keys where they are stored, of a block where they are not (compiled for an H200)."""
TOKENS, CHANNELS = 128, 64
"""To multiples of which the compiler fills up what it multiplies."""
AT_ONCE = 4
"""Times that a program computes."""
ROUNDING_LIMIT = 2.0**-6
"""Relative to the largest element of an array: products in 16 bits, in two orders."""


def choose_attention(
    plan: Plan, call: Call, decided: Callable[[Callable[[], Question]], Answer]
) -> Answer:
    """The fastest implementation of one call, each beside the best so far.

    Args:
      decided: asks a question, as `decide` does.
    """
    best, reasons = str(call.implementation), []
    for other in NO_MORE_MEMORY[best]:
        reference = best
        answer = decided(lambda: attention_question(plan, call, reference, other))  # noqa: B023
        # What cannot be asked leaves "xla", which is not what this plan has.
        best = other if answer.choice == other else best
        reasons.append(answer.reason)
    return Answer(choice=best, reason="; ".join(reasons))


def attention_question(plan: Plan, call: Call, reference: str, other: str) -> Question:
    """One call by two implementations, forward and backward."""
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
    """(both passes, both passes several times), jitted functions of query, key, value and slope.

    Args:
      call: its options; name: of the implementation.
      mesh: of one device, in which the call stands as in a step: cuDNN's is another outside of one.
    """

    def once(query: Any, key: Any, value: Any, slope: Any) -> tuple[jax.Array, ...]:
        def attend(*operands: jax.Array) -> jax.Array:
            return attention(
                *operands,
                causal=call.causal,
                window=call.window,
                implementation=name,  # type: ignore[arg-type]
            )

        out, backward = jax.vjp(attend, query, key, value)
        return (out, *backward(slope))

    def several(query: Any, key: Any, value: Any, slope: Any) -> jax.Array:
        def again(_: jax.Array, query: jax.Array) -> jax.Array:
            out, *gradients = once(query, key, value, slope)
            # All of the gradients are needed, and none changes what is computed next by much.
            return out + sum(0 * jnp.sum(x).astype(out.dtype) for x in gradients)

        return lax.fori_loop(0, AT_ONCE, again, query)

    step = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(once, **step)), jax.jit(jax.shard_map(several, **step))


def _on_one_device(plan: Plan, call: Call) -> Call:
    """The call with a device's own heads, and as many rows as there is room for.

    Raises:
      ValueError: there is no room for one.
    """
    split = plan.mesh.shape[MODEL]
    heads, kv_heads = call.heads // split, max(call.kv_heads // split, 1)
    row = row_bytes(dataclasses.replace(call, heads=heads))
    rows = min(call.rows, room(plan) // row)
    if rows < 1:
        raise ValueError(f"one row takes {row:,} bytes, and {room(plan):,} may be taken")
    return dataclasses.replace(call, rows=rows, heads=heads, kv_heads=kv_heads)


def row_bytes(call: Call) -> int:
    """Bytes that measuring one row of a call takes at most, in two implementations."""
    tokens = [-(-n // TOKENS) * TOKENS for n in (call.queries, call.keys)]
    channels = -(-call.head_dim // CHANNELS) * CHANNELS
    arrays = ARRAYS * max(tokens) * call.heads * channels * call.itemsize
    held = tokens if call.implementation == "xla" else [min(n, BLOCK) for n in tokens]
    return arrays + SCORES * 4 * call.heads * math.prod(held)


def _drawn(call: Call) -> tuple[jax.Array, ...]:
    """Query, key, value and the slope of the result."""
    of_queries = (call.rows, call.queries, call.heads, call.head_dim)
    of_keys = (call.rows, call.keys, call.kv_heads, call.head_dim)
    keys = jax.random.split(jax.random.key(2), 4)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    pairs = zip(keys, shapes, strict=True)
    return tuple(jax.random.normal(key, shape).astype(call.dtype) for key, shape in pairs)


def _obstacle(trace: Callable[[], Any]) -> str | None:
    """Why an implementation refuses the call when it is traced."""
    try:
        trace()
    except ValueError as error:
        return " ".join(str(error).split()).partition("; use ")[0]
    return None


def difference(ours: Any, theirs: Any) -> str | None:
    """Why a result and gradients are not equal to rounding; None if they are."""
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
