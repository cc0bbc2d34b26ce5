"""Refusals of the operators: attention, losses in chunks, experts and sums over the batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.refusals import table
from zerojax.config import FixedLayout, SlidingWindowLayout
from zerojax.operators import BlockTable, batch_mean, batch_sum, experts
from zerojax.operators.attending import layout_in_force
from zerojax.operators.chunked_loss import head_next_token
from zerojax.operators.context.choice import Sizes, choose_way
from zerojax.operators.context.order import order_of_tokens
from zerojax.operators.context.sequence_split import ContextSplit, sequences_split
from zerojax.operators.rounded_weights import check_inputs

SLIDING = SlidingWindowLayout
SMALL = FixedLayout(block=4, num_local_blocks=2)


def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def attend(heads: int = 2, kv_heads: int = 2, tokens: int = 8, **options: Any) -> jax.Array:
    """The shape of attention; nothing is computed."""
    query, key = ones(1, tokens, heads, 4), ones(1, tokens, kv_heads, 4)
    given = {"query": query, "key": key, "value": key, **options}
    call = lambda: zerojax.attention(**given)  # noqa: E731
    return jax.eval_shape(call)


def in_force(layout: Any) -> None:
    with layout_in_force(SMALL):
        attend(layout=layout)


def blocks(heads: int = 1, tokens: int = 8) -> BlockTable:
    return BlockTable(block=4, seen=np.ones((heads, tokens // 4, tokens // 4), bool))


def loss(**options: Any) -> Any:
    given = {"hidden": ones(2, 4, 8), "head": ones(16, 8), "targets": ones(2, 4, dtype=int)}
    return jax.eval_shape(lambda: head_next_token(**given | options, vocab_dim=0, chunk=4))


def way(name: str) -> Any:
    sizes = Sizes(rows=1, tokens=8, heads=2, kv_heads=2, head_dim=4, itemsize=4, devices=2)
    return choose_way(name, sizes)


def over_two(name: str, *, heads: int = 2, keys: int = 8, causal: bool = True) -> Any:
    """Attention over two devices, each of which sees half of the tokens."""

    def here(query: jax.Array, key: jax.Array) -> jax.Array:
        with sequences_split(ContextSplit("a", 2, name)):
            return zerojax.attention(query, key, key, causal=causal)

    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("a",), kind, devices=jax.devices()[:2])
    spec = jax.P(None, "a")
    split_over = jax.shard_map(
        here, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    return jax.eval_shape(split_over, ones(1, 8, heads, 4), ones(1, keys, heads, 4))


def double(weights: jax.Array, rows: jax.Array) -> jax.Array:
    return rows @ weights


def outside() -> Any:
    """Experts whose function closes over a traced array."""
    return jax.eval_shape(lambda w: routed(lambda _, rows: rows @ w), ones(4, 8, 8))


def routed(apply: Any = double, **options: Any) -> Any:
    given = {"x": ones(6, 8), "gates": ones(6, 2), "ids": np.zeros((6, 2), int), **options}
    return jax.eval_shape(lambda: experts(weights=ones(4, 8, 8), apply=apply, **given))


CALLS = table(
    """
attend(query=ones(8, 2, 4)) | query "(8, 2, 4)" | query[None]
  | attend(query=ones(8, 2, 4)[None])
attend(key=ones(1, 8, 2, 4, dtype=jnp.bfloat16)) | key bfloat16 float32 | cast
  | attend(key=ones(1, 8, 2, 4, dtype=jnp.bfloat16).astype(jnp.float32))
attend(heads=4, kv_heads=3) | 4 3 | 1 4 | attend(heads=4, kv_heads=$)
attend(softcap=0) | softcap=0 | None | attend(softcap=$)
attend(implementation="flash") | implementation='flash' | auto xla chunked
  | attend(implementation="$")
attend(implementation="cudnn") | cuDNN | 'auto' 'chunked' | attend(implementation=$)
attend(implementation="mosaic_gpu") | Mosaic | 'auto' 'chunked' | attend(implementation=$)
attend(layout="fixed") | str | FixedLayout zerojax.operators.BlockTable
  | attend(layout=SMALL) ; attend(layout=blocks())
attend(heads=4, layout=blocks(2)) | 2 4 | 4 1 | attend(heads=4, layout=blocks($))
attend(layout=blocks(tokens=4)) | 4 8 | 8 | attend(layout=blocks(tokens=$))
attend(layout=SLIDING(block=4)) | num_sliding_window_blocks=3 | 2 smaller
  | attend(layout=SLIDING(block=4, num_sliding_window_blocks=2)) ; attend(layout=SLIDING(block=2))
in_force(blocks()) | layout=table fixed | layout= | in_force(None)
attend(segments=(np.zeros((1, 8), int),)) | segments 1 | one pair
  | attend(segments=np.zeros((1, 8), int)) ; attend(segments=(np.zeros((1, 8), int),) * 2)
attend(positions=ones(1, 8)) | positions float32 | .astype('int32')
  | attend(positions=ones(1, 8).astype('int32'))
loss(targets=ones(2, 3, dtype=int)) | targets "(2, 3)" | "(2, 4)"
  | loss(targets=ones(*$, dtype=int))
way("rings") | 'rings' | auto ring ulysses allgather | way("$")
order_of_tokens("zigzag", 9, 2) | 9 4 | 8 12 | order_of_tokens("zigzag", $, 2)
over_two("allgather", keys=4) | 4 2 | context=1 | attend()
over_two("ring", causal=False) | ring | 'ulysses' 'allgather' | over_two($, causal=False)
over_two("ulysses", heads=3) | 3 2 | 'ring' 'allgather' | over_two($, heads=3)
check_inputs("int4", 40) | int4 32 40 | 32 int8
  | check_inputs("int4", 64) ; check_inputs("int8", 40)
routed(products="grouped") | products='grouped' | products='batched' | routed($)
outside() | "[4, 8, 8]" | weights | routed()
routed(lambda weights, rows: (rows @ weights)[0]) | "rows of shape" | "width]" | routed()
routed(lambda weights, rows: (rows @ weights).astype(int)) | int32 | floating-point
  | routed()
routed(x=ones(6, 8, dtype=int)) | int32 | floating-point | routed(x=ones(6, 8))
routed(ids=np.zeros((6, 2))) | float32 | integers | routed(ids=np.zeros((6, 2)).astype(int))
routed(ids=np.full((6, 2), -1)) | -1 | 0 3 | routed(ids=np.full((6, 2), $))
routed(ids=np.full((6, 2), 4)) | 4 | 0 3 | routed(ids=np.full((6, 2), $))
batch_mean(ones(2, dtype=int)) | int32 | x.astype(jnp.float32)
  | batch_mean(ones(2, dtype=int).astype(jnp.float32))
batch_sum(ones(2, dtype=bool)) | bool | "jnp.sum(x, axis=0)"
  | batch_sum(jnp.sum(ones(2, dtype=bool), axis=0))
""",
    (ValueError, TypeError),
)
NAMES = globals() | {
    "batch_mean": batch_mean,
    "batch_sum": batch_sum,
    "check_inputs": check_inputs,
    "order_of_tokens": order_of_tokens,
}


@pytest.mark.parametrize("row", CALLS)
def test_calls(row):
    CALLS[row].check(lambda call: eval(call, NAMES))
