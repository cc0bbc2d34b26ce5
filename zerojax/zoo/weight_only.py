"""Rounds the layers of a decoder to int8 codes, to generate with fewer bytes of weights.

The codes of each layer are arrays of their own, and `Decoder.extend` applies such layers one after
the other. In a loop over stacked codes, the compiler for GPUs copied the codes of each layer before
the product: 3 bytes of memory traffic per weight instead of 1 (programs for an H200, 2026-11-28).
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.operators.rounded_weights import encoded
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.layers import Projection

WEIGHT_KINDS = ("int8",)
"""Formats of weights for generation, besides the compute dtype."""
CACHE_KINDS = ("int8",)
"""Formats of keys and values in the cache, besides the dtype of the activations."""
_FITTING = (None, "fake_int8")
_SCALE = "kernel_scale"


def check_weight_kind(model: Any, kind: str | None) -> None:
    """Raises if a decoder cannot generate with weights of this kind.

    Args:
      model: a decoder.
      kind: "int8", or None for the compute dtype.

    Raises:
      ValueError: the kind is unknown, the model has experts, or it was trained with products in
        another format.
    """
    if kind is None:
        return
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"quantize={kind!r} is unknown; use 'int8', or None for the compute dtype")
    if model.moe is not None:
        raise ValueError(
            f"quantize={kind!r} is not supported for the {model.moe.num_experts} experts of this "
            "model; leave quantize out"
        )
    used = getattr(model.config, "matmul_dtype", None)
    if used not in _FITTING:
        raise ValueError(
            f"quantize={kind!r} does not fit a model with matmul_dtype={used!r}, whose products "
            "are in another format; leave quantize out"
        )


def check_cache_kind(kind: str | None) -> None:
    """Raises a ValueError if there is no cache of this kind."""
    if kind not in (None, *CACHE_KINDS):
        raise ValueError(f"cache={kind!r} is unknown; use 'int8', or None for the compute dtype")


def with_codes(model: Decoder, kind: str | None) -> Decoder:
    """Returns a decoder whose projections in the layers are int8 codes, with one scale per output.

    The codes are those of `operators.rounded_weights`, so those of an export and of
    `matmul_dtype="fake_int8"`. Embeddings, output head, norms, biases and adapters are unchanged.
    The result is for `Decoder.extend` only.

    Args:
      model: a decoder with stacked layers, which is not modified and shares its other arrays with
        the result. Its arrays may be sharded over a mesh; codes and scales are sharded like them.
      kind: "int8"; None returns `model`.

    Raises:
      ValueError: see `check_weight_kind`.
    """
    check_weight_kind(model, kind)
    if kind is None:
        return model
    graphdef, stacked = nnx.split(model.blocks)
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    layer_graphdef: Any = None

    def encode(stacked: nnx.State, index: Any) -> nnx.State:
        nonlocal layer_graphdef
        state = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), stacked
        )
        block = nnx.merge(graphdef, state)
        block.eval()  # an adapter may have its own dropout
        for _, part in nnx.iter_modules(block):
            if isinstance(part, Projection):
                codes, scales = encoded(part.kernel[...], kind, part.num_inputs)
                part.kernel, part.kernel_scale = nnx.Param(codes), nnx.Param(scales)
                part.matmul_dtype = None
        layer_graphdef, state = nnx.split(block)
        return state

    abstract = jax.eval_shape(encode, stacked, 0)
    encode_layer = jax.jit(encode, out_shardings=_layer_shardings(stacked, abstract))
    layers = [
        nnx.merge(layer_graphdef, encode_layer(stacked, index)) for index in range(num_layers)
    ]
    copy = nnx.clone(model, graph=True)
    copy.blocks = nnx.List(layers)
    return copy


def _layer_shardings(stacked: nnx.State, layer: nnx.State) -> Any:
    """Returns the sharding of each array of one layer, from those of the stacked layers.

    Axes that divide the layers, such as `stage`, are left out: each of their devices holds the
    whole layer. Arrays without a mesh have None.
    """
    known = {_name(path): x for path, x in jax.tree.leaves_with_path(stacked)}

    def of_array(path: Any, x: Any) -> NamedSharding | None:
        name = _name(path)
        source = known[name.replace(_SCALE, "kernel")]
        sharding = getattr(source, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return None
        spec = [*sharding.spec, *[None] * source.ndim][: source.ndim]
        return NamedSharding(sharding.mesh, P(*spec[source.ndim - x.ndim :]))

    return jax.tree.map_with_path(of_array, layer)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
