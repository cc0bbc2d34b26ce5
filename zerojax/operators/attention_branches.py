"""Attention with a data-dependent branch or with sinks, as one operation with a custom derivative.

The branch index is an integer array, such as the kind of a layer in a loop. The forward pass saves
query, key, value, the result and the log-sum-exp of the scores, independently of the branch. JAX's
own derivative of a conditional would save the residuals of every branch. A sink (a learned score
without a value) only changes the log-sum-exp, which is an input of the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators import chunked_attention as chunked
from zerojax.operators import cudnn_attention as cudnn
from zerojax.operators import kernel_attention as kernels
from zerojax.operators.chunked_attention import KEPT, Visibility
from zerojax.operators.marks import LINEAR_RULE, branch_scope
from zerojax.operators.sparse_layouts import BlockTable

Rows = dict[str, Any]
"""{"segments" or "positions": pair of integer arrays, for queries and for keys}."""


@dataclass(frozen=True)
class Branch:
    """Static options of the attention of some layers: one case of a data-dependent branch.

    Attributes:
      implementation: implementation that computes the attention.
      window: window as for `zerojax.attention`.
      block: maximum number of queries and keys of a tile of "chunked"; None uses its default.
      layers: (number of layers that take this branch, number of all layers); None if unknown.
    """

    implementation: Literal["chunked", "cudnn", "mosaic_gpu"]
    window: int | None = None
    block: int | None = None
    layers: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Options:
    branches: tuple[Branch, ...]
    causal: bool
    scale: float
    softcap: float | None
    table: BlockTable | None

    def visibility(self, branch: Branch) -> Visibility:
        return Visibility(causal=self.causal, window=branch.window)

    def of_chunks(self, branch: Branch) -> dict[str, Any]:
        return {
            "visibility": self.visibility(branch),
            "scale": self.scale,
            "softcap": self.softcap,
            "table": self.table,
            "block": branch.block,
        }


def attention_of_branch(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    index: jax.Array | None,
    rows: Rows,
    sinks: jax.Array | None,
    *,
    branches: tuple[Branch, ...],
    causal: bool,
    scale: float,
    softcap: float | None = None,
    table: BlockTable | None = None,
) -> jax.Array:
    """Computes softmax attention by the branch at `index`; has only first reverse-mode derivatives.

    Args:
      query: [batch, queries, heads, head_dim].
      key, value: [batch, keys, kv_heads, head_dim].
      index: int32 [], index of the branch; None if there is only one branch.
      rows: segments and positions, if any, by these names; see `chunked_attention`.
      sinks: float32 [heads], attention sinks; None for no sinks.
      branches: options of each branch.
      causal, scale, softcap, table: options as for `zerojax.attention`. Only "chunked" uses a
        softcap; "chunked" and "mosaic_gpu" use a table. Sinks are applied to the result of any
        branch.

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`; 0 for a query that sees no key.
    """
    options = _Options(branches, causal, scale, softcap, table)
    return _attend(options, index, query, key, value, rows, sinks)


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, *operands: Tree) -> jax.Array:
    out, _ = _compute(options, *operands)
    return checkpoint_name(out, LINEAR_RULE)


def _forward(options: _Options, *operands: Tree) -> tuple[jax.Array, tuple[Any, ...]]:
    out, log_sum = checkpoint_name(_as_one_operation(options, *operands), KEPT)
    return out, (*operands, out, log_sum)


def _backward(options: _Options, kept: tuple[Any, ...], slope: jax.Array) -> tuple[Any, ...]:
    index, query, key, value, rows, sinks, out, log_sum = kept
    turned = jnp.sum(slope.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    runs = [functools.partial(_slopes, options, branch) for branch in options.branches]
    operands = (query, key, value, rows, out, log_sum, turned, slope)
    gradients = _switch(options, index, runs, *operands)
    of_sinks = None
    if sinks is not None:
        # The gradient of a score is weight x (slope . value - turned), and a sink has no value.
        weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - log_sum)
        of_sinks = -jnp.sum(weights * turned, axis=(0, 1)).astype(sinks.dtype)
    # Index, segments and positions are integers and have no gradient.
    return None, *gradients, None, of_sinks


_attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _as_one_operation(options: _Options, *operands: Tree) -> tuple[jax.Array, jax.Array]:
    """Wraps the branches as one operation, whose interior an outer `jax.checkpoint` cannot save."""
    return _compute(options, *operands)


def _refuse(*_: object) -> Any:
    raise NotImplementedError(
        "this attention (with sinks, or windows that differ between layers) has no second "
        "derivative; use implementation='xla'"
    )


_as_one_operation.defvjp(_refuse, _refuse)


# --- arithmetic -----------------------------------------------------------------------------------


def _compute(
    options: _Options,
    index: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: Rows,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes (out, float32 log-sum-exp [batch, queries, heads]; -inf if a query sees no key)."""
    # Sinks rescale the result in float32; without sinks a branch returns its final dtype.
    dtype = query.dtype if sinks is None else jnp.float32
    runs = [functools.partial(_part, options, branch, dtype) for branch in options.branches]
    out, log_sum = _switch(options, index, runs, query, key, value, rows)
    if sinks is not None:
        # A query that sees no key has log_sum -inf and gets the factor exp(-inf) = 0, because
        # sinks are finite.
        total = jnp.logaddexp(log_sum, sinks.astype(jnp.float32)[None, None])
        out = out * jnp.exp(log_sum - total)[..., None]
        log_sum = total
    return out.astype(query.dtype), log_sum


def _part(
    options: _Options,
    branch: Branch,
    dtype: DTypeLike,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """Computes one branch of `_compute` without sinks, with the result in `dtype`."""
    if branch.implementation == "chunked":
        result = chunked.part_forward(query, key, value, **options.of_chunks(branch), **rows)
    elif branch.implementation == "cudnn":
        result = cudnn.part_forward(
            query, key, value, visibility=options.visibility(branch), scale=options.scale
        )
    else:
        result = kernels.part_forward(
            *(query, key, value, rows),
            visibility=options.visibility(branch),
            scale=options.scale,
            table=options.table,
        )
    out, log_sum = result
    return out.astype(dtype), log_sum


def _slopes(
    options: _Options,
    branch: Branch,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: Rows,
    out: jax.Array,
    log_sum: jax.Array,
    turned: jax.Array,
    slope: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of query, key and value, in their dtypes."""
    ends = {"log_sum": log_sum, "turned": turned, "slope": slope}
    if branch.implementation == "chunked":
        gradients = chunked.part_backward(
            query, key, value, **ends, **options.of_chunks(branch), **rows
        )
    elif branch.implementation == "cudnn":
        gradients = cudnn.part_backward(
            *(query, key, value),
            out=out,
            log_sum=log_sum,
            slope=slope,
            visibility=options.visibility(branch),
            scale=options.scale,
        )
    else:
        gradients = kernels.part_backward(
            *(query, key, value, rows),
            **ends,
            visibility=options.visibility(branch),
            scale=options.scale,
            table=options.table,
        )
    return tuple(x.astype(y.dtype) for x, y in zip(gradients, (query, key, value), strict=True))


def _switch(
    options: _Options, index: jax.Array | None, runs: list[Callable[..., Any]], *operands: Tree
) -> Any:
    """Runs the selected branch; each branch's scope records the fraction of layers that take it."""
    if index is None:
        return runs[0](*operands)

    def scoped(run: Callable[..., Any], branch: Branch) -> Callable[..., Any]:
        def call(*operands: Tree) -> Any:
            with _scope(branch):
                return run(*operands)

        return call

    pairs = zip(runs, options.branches, strict=True)
    return lax.switch(index, [scoped(*pair) for pair in pairs], *operands)


@contextlib.contextmanager
def _scope(branch: Branch) -> Iterator[None]:
    if branch.layers is None:
        yield
        return
    with jax.named_scope(branch_scope(*branch.layers)):
        yield
