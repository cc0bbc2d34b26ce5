"""Fused attention of cuDNN: one kernel forward and one backward, which store no scores.

The custom calls are those of `jax.nn.dot_product_attention(implementation="cudnn")`. That function
queries libcudnn's version and the default device's compute capability, so it cannot be traced for
absent GPUs. The calls of this module can, and a step runs exactly the program that was planned.
They also return the log-sum-exp of the scores in float32.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.chunked_attention import KEPT, Visibility

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
_FORWARD_COUNT, _BACKWARD_COUNT = 2, 5
"""Numbers of products of [queries, keys] with head_dim; the backward pass recomputes the scores."""
MIN_CAPABILITY = 8.0
WIDE_HEADS = (9.0, 12.0)
"""Compute capabilities [first, end) that support head_dim up to 256; the first is Hopper."""

_DTYPES = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}
_BY_HEADS = (0, 2, 1, 3)
"""Memory layout of [batch, heads, tokens, head_dim] stored as [batch, tokens, heads, head_dim]."""


def obstacle(
    query: jax.Array,
    key: jax.Array,
    visibility: Visibility,
    *,
    given: Collection[str],
    capability: float,
    split: int,
) -> str | None:
    """Returns the reason why cuDNN does not support a call; None if it does.

    Args:
      query, key: arrays of a call of `zerojax.attention`.
      visibility: mask by positions.
      given: names of the options among "segments", "positions", "layout", "softcap" and "sinks"
        that the call sets.
      capability: compute capability of the GPU.
      split: number of devices over which the heads are split.
    """
    if capability < MIN_CAPABILITY:
        return (
            f"cuDNN attention needs compute capability {MIN_CAPABILITY} or newer, not {capability}"
        )
    if query.dtype not in _DTYPES:
        return f"cuDNN attention supports bfloat16 and float16, not {query.dtype}"
    head_dim, widest = query.shape[-1], _widest_head(capability)
    if head_dim % 8 or head_dim > widest:
        return f"head_dim must be a multiple of 8 and at most {widest}, not {head_dim}"
    if key.shape[2] % split:
        return f"the {key.shape[2]} key/value heads cannot be split over {split} devices"
    if given:
        return f"cuDNN attention does not support {' or '.join(sorted(given))}"
    if visibility.causal and query.shape[1] != key.shape[1]:
        return "cuDNN's causal mask needs as many queries as keys"
    if visibility.window is not None and not visibility.causal:
        return "cuDNN attention supports a window only with causal=True"
    return None


def _widest_head(capability: float) -> int:
    return 256 if WIDE_HEADS[0] <= capability < WIDE_HEADS[1] else 128


@dataclass(frozen=True)
class _Mask:
    scale: float
    causal: bool
    window: int


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, visibility: Visibility, scale: float
) -> jax.Array:
    """Computes softmax attention by cuDNN; lowers only for CUDA.

    The compiler cannot partition the custom call, so every mesh axis that splits its operands must
    be manual. Has only first derivatives in reverse mode. The order of sums in the backward pass
    varies between runs, unless XLA has the option `--xla_gpu_deterministic_ops`.

    Args:
      query: [batch, queries, heads, head_dim], bfloat16 or float16.
      key, value: [batch, keys, kv_heads, head_dim].
      visibility: mask by positions; a window only together with `causal`.
      scale: factor of the scores.

    Returns:
      [batch, queries, heads, head_dim] in the dtype of `query`.
    """
    mask = _Mask(scale=float(scale), causal=visibility.causal, window=visibility.window or 0)
    return _attend(mask, query, key, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(mask: _Mask, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return _call_forward(mask, query, key, value)[0]


def part_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, visibility: Visibility, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Computes attention without a derivative; returns (out, log-sum-exp of the scores).

    The log-sum-exp is float32 [batch, queries, heads].

    Args:
      query, key, value, visibility, scale: arguments as for `cudnn_attention`.
    """
    mask = _Mask(scale=float(scale), causal=visibility.causal, window=visibility.window or 0)
    out, log_sum = _call_forward(mask, query, key, value)
    return out, jnp.swapaxes(log_sum, 1, 2)


def part_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    out: jax.Array,
    log_sum: jax.Array,
    slope: jax.Array,
    visibility: Visibility,
    scale: float,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of query, key and value by cuDNN.

    Args:
      query, key, value, visibility, scale: arguments as for `cudnn_attention`.
      out, log_sum: results of `part_forward`.
      slope: [batch, queries, heads, head_dim], gradient with respect to `out`.
    """
    mask = _Mask(scale=float(scale), causal=visibility.causal, window=visibility.window or 0)
    return _backward(mask, (query, key, value, out, jnp.swapaxes(log_sum, 1, 2)), slope)


def _forward(mask: _Mask, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, log_sum = checkpoint_name(_call_forward(mask, *operands), KEPT)
    return out, (*operands, out, log_sum)


def _backward(mask: _Mask, kept: tuple[jax.Array, ...], slope: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, out, log_sum = kept
    call = jax.ffi.ffi_call(
        BACKWARD,
        (*(_by_heads(x) for x in (query, key, value)), _NO_WORKSPACE),
        output_layouts=(_BY_HEADS, _BY_HEADS, _BY_HEADS, None),
        **_options(mask, query, key, is_backward=True),
    )
    *gradients, _ = call(query, key, value, log_sum, slope.astype(out.dtype), out)
    return tuple(x.transpose(_BY_HEADS) for x in gradients)


_attend.defvjp(_forward, _backward)


def _call_forward(
    mask: _Mask, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Calls cuDNN's forward kernel; returns (out, float32 log-sum-exp [batch, heads, queries])."""
    out = _by_heads(query)
    call = jax.ffi.ffi_call(
        FORWARD,
        (out, jax.ShapeDtypeStruct(out.shape[:3], jnp.float32), _NO_WORKSPACE),
        output_layouts=(_BY_HEADS, None, None),
        **_options(mask, query, key, is_backward=False),
    )
    result, log_sum, _ = call(query, key, value)
    return result.transpose(_BY_HEADS), log_sum


def _by_heads(x: jax.Array) -> jax.ShapeDtypeStruct:
    batch, tokens, heads, head_dim = x.shape
    return jax.ShapeDtypeStruct((batch, heads, tokens, head_dim), x.dtype)


_NO_WORKSPACE = jax.ShapeDtypeStruct((0,), np.uint8)
"""Placeholder that XLA replaces by cuDNN's workspace if it finds the library."""


# --- the custom call ------------------------------------------------------------------------------


def _options(mask: _Mask, query: jax.Array, key: jax.Array, *, is_backward: bool) -> dict[str, Any]:
    batch, queries, heads, _ = query.shape
    sizes = (batch, heads, queries, key.shape[1])
    config = _config(mask, sizes, _DTYPES[query.dtype], is_backward)
    return {
        "custom_call_api_version": 2,
        "legacy_backend_config": json.dumps(config),
        "vmap_method": "sequential",
    }


def _config(
    mask: _Mask, sizes: tuple[int, ...], element_type: str, is_backward: bool
) -> dict[str, Any]:
    """Builds the backend configuration; see `CudnnfMHABackendConfig` in XLA."""
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": mask.scale,
        "intermediate_tensor_shape": {
            "element_type": element_type,
            "dimensions": [str(size) for size in sizes],
            "tuple_shapes": [],
            "layout": {
                "dim_level_types": [],
                "dim_unique": [],
                "dim_ordered": [],
                "minor_to_major": ["3", "2", "1", "0"],
                "tiles": [],
                "element_size_in_bits": "0",
                "memory_space": "0",
                "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "dynamic_shape_metadata_prefix_bytes": "0",
            },
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if mask.causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": mask.window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        **(_BACKWARD_PRODUCTS if is_backward else _FORWARD_PRODUCTS),
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}


def _product(left: int, right: int, left_batch: int, right_batch: int) -> dict[str, list[str]]:
    """Builds the dimension numbers of a product of arrays whose first dimension is the batch."""
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": ["0", str(left_batch)],
        "rhs_batch_dimensions": ["0", str(right_batch)],
    }


_FORWARD_PRODUCTS = {
    "bmm1_dot_dimension_numbers": _product(3, 3, 2, 2),  # scores = query key^T
    "bmm2_dot_dimension_numbers": _product(3, 1, 1, 2),  # out = weights value
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": _product(2, 1, 1, 2),  # gradient of key
    "bmm1_grad_gemm2_dot_dimension_numbers": _product(3, 1, 1, 2),  # gradient of query
    "bmm2_grad_gemm1_dot_dimension_numbers": _product(2, 1, 1, 2),  # gradient of value
    "bmm2_grad_gemm2_dot_dimension_numbers": _product(3, 3, 2, 2),  # gradient of weights
}


# --- counting -------------------------------------------------------------------------------------


def call_flops(target: str, head_dim: int, config: Mapping[str, Any]) -> int:
    """Counts the FLOPs of one call of cuDNN's attention: products over the scores inside its mask.

    Args:
      target: name of the custom call, any of cuDNN's attention calls.
      head_dim: number of features of a query head.
      config: backend configuration of the call.
    """
    attention = config["cudnn_fmha_backend_config"]
    sizes = [int(size) for size in attention["intermediate_tensor_shape"]["dimensions"]]
    seen = math.prod(sizes[:2]) * _seen_pairs(
        *sizes[2:],
        is_causal="CAUSAL" in attention.get("mask_type", ""),
        window=int(attention.get("sliding_window_length", 0)),
    )
    return 2 * (_BACKWARD_COUNT if "Backward" in target else _FORWARD_COUNT) * seen * head_dim


def _seen_pairs(queries: int, keys: int, *, is_causal: bool, window: int) -> int:
    """Counts the visible (query, key) pairs; `window` 0 means no window."""
    if not is_causal:
        return queries * keys
    reach = min(window or keys, keys)
    full = max(0, queries - reach)  # queries that see a full window of keys
    near = min(queries, reach)
    return near * (near + 1) // 2 + full * reach
