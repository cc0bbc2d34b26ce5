"""Prepares the weights of a decoder for generation: layers apart, and 8-bit codes.

`Decoder.extend` applies layers that are not stacked one after the other. In a loop over stacked
layers, the compiler for GPUs copies the weights of each layer before the product: 3 bytes of memory
traffic per byte of weights instead of 1 (programs for an H200, 2026-11-28).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.generation_limits import CODES
from zerojax.operators.rounded_weights import FP8, encoded
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.layers import Projection

_FITTING = {"int8": (None, "fake_int8"), FP8: (None,)}
_SCALE = "kernel_scale"


def check_weight_kind(model: Decoder, kind: str | None) -> None:
    """Raises if a decoder cannot generate with weights of this kind.

    Args:
      model: a decoder.
      kind: one of `CODES`, or None for the compute dtype.

    Raises:
      ValueError: the kind is unknown, the model has experts, or it was trained with products in
        another format.
    """
    if kind is None:
        return
    if kind not in CODES:
        raise ValueError(
            f"quantize={kind!r} is unknown; use 'int8' or 'fp8', or None for the compute dtype"
        )
    if model.moe is not None:
        raise ValueError(
            f"quantize={kind!r} does not work for a model with experts (this one has "
            f"{model.moe.num_experts}), nor does any other kind; leave quantize out"
        )
    used = getattr(model.config, "matmul_dtype", None)
    if used not in _FITTING[kind]:
        raise ValueError(
            f"quantize={kind!r} does not fit a model with matmul_dtype={used!r}, whose products "
            "are in another format; leave quantize out"
        )


def with_codes(model: Decoder, kind: str | None) -> Decoder:
    """Returns a decoder whose projections in the layers are 8-bit codes, with one scale per output.

    The codes are those of `operators.rounded_weights`, so those of an export and, for "int8", of
    `matmul_dtype="fake_int8"`. Embeddings, output head, norms, biases and adapters are unchanged.

    Args:
      model: see `with_layers_apart`.
      kind: "int8" or "fp8"; None returns `model`.

    Raises:
      ValueError: see `check_weight_kind`.
    """
    check_weight_kind(model, kind)
    return model if kind is None else with_layers_apart(model, kind)


def with_layers_apart(
    model: Decoder, kind: str | None = None, dtype: DTypeLike | None = None
) -> Decoder:
    """Returns a decoder in which each layer has arrays of its own, for `Decoder.extend` only.

    Args:
      model: a decoder with stacked layers, which is not modified and shares its other arrays with
        the result. Its arrays may be sharded over a mesh; those of the layers are sharded like
        them.
      kind: "int8" or "fp8" rounds the kernels of projections to codes, see `with_codes`; None
        rounds nothing.
      dtype: dtype of the layers' parameters, before they are rounded; None: their own.

    Raises:
      ValueError: see `check_weight_kind`.
    """
    check_weight_kind(model, kind)
    graphdef, params, rest = nnx.split(model.blocks, nnx.Param, ...)
    options = {
        "graphdef": graphdef,
        "kind": kind,
        "dtype": None if dtype is None else np.dtype(dtype),
    }
    layer = nnx.eval_shape(lambda: _layer(params, rest, 0, **options))
    layer_graphdef, abstract = nnx.split(layer)
    shardings = tuple(_layer_shardings(nnx.merge_state(params, rest), abstract))
    layers = [
        nnx.merge(layer_graphdef, _layer_state(params, rest, index, shardings=shardings, **options))
        for index in range(jax.tree.leaves(params)[0].shape[0])
    ]
    copy = nnx.clone(model, graph=True)
    copy.blocks = nnx.List(layers)
    return copy


@functools.partial(jax.jit, static_argnames=("graphdef", "kind", "dtype", "shardings"))
def _layer_state(
    params: nnx.State,
    rest: nnx.State,
    index: jax.Array | int,
    *,
    shardings: tuple[NamedSharding | None, ...],
    **options: Any,
) -> nnx.State:
    """Returns the arrays of a layer, each with its sharding; None leaves it to the compiler."""
    leaves, structure = jax.tree.flatten(nnx.state(_layer(params, rest, index, **options)))
    placed = [
        x if sharding is None else lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def _layer(
    params: nnx.State,
    rest: nnx.State,
    index: jax.Array | int,
    *,
    graphdef: nnx.GraphDef[Any],
    kind: str | None,
    dtype: np.dtype | None,
) -> Any:
    """Returns layer `index` of stacked layers, with parameters in `dtype` or as codes."""

    def read(x: jax.Array, dtype: np.dtype | None = None) -> jax.Array:
        own = lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return own if dtype is None or not is_float else own.astype(dtype)

    own_params = jax.tree.map(functools.partial(read, dtype=dtype), params)
    block = nnx.merge(graphdef, own_params, jax.tree.map(read, rest))
    block.eval()  # an adapter may have its own dropout
    if kind is not None:
        for _, part in nnx.iter_modules(block):
            if isinstance(part, Projection):
                codes, scales = encoded(part.kernel[...], kind, part.num_inputs)
                part.kernel, part.kernel_scale = nnx.Param(codes), nnx.Param(scales)
                part.matmul_dtype = None
    return block


def _layer_shardings(stacked: nnx.State, layer: nnx.State) -> Iterator[NamedSharding | None]:
    """Yields the sharding of each array of one layer, from those of the stacked layers.

    Axes that divide the layers, such as `stage`, are left out: each of their devices holds the
    whole layer. Arrays without a mesh have None.
    """
    known = {_name(path): x for path, x in jax.tree.leaves_with_path(stacked)}
    for path, x in jax.tree.leaves_with_path(layer):
        source = known[_name(path).replace(_SCALE, "kernel")]
        sharding = getattr(source, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            yield None
            continue
        # A spec may end before the last dimension.
        spec = [*sharding.spec, *[None] * source.ndim][: source.ndim]
        yield NamedSharding(sharding.mesh, P(*spec[source.ndim - x.ndim :]))


def is_faster_apart(model: object, platform: str) -> bool:
    """Returns whether a model generates faster with `with_layers_apart` on a platform.

    On CPUs a loop over stacked layers compiles faster, and the weights of a layer are not copied.
    A layer of experts reads few of its weights for a token, so it stays in the loop.
    """
    return platform != "cpu" and isinstance(model, Decoder) and model.moe is None


def is_divided_by_layers(model: Decoder) -> bool:
    """Returns whether devices hold different layers of a decoder, as pipeline stages do."""
    for x in jax.tree.leaves(nnx.state(model.blocks)):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.shard_shape(x.shape)[0] < x.shape[0]:
            return True
    return False


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
