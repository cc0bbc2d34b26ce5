"""Writes kernels as 8-bit codes in the format of compressed-tensors (vLLM, transformers).

Each row of a tensor [outputs, inputs] has one scale. Only kernels of linear layers have codes;
embeddings, norms, biases and the output head keep their dtype.

int8: format "pack-quantized". A code is the nearest multiple of the scale, -127 to 127. Four codes
plus 128 make an int32, the first in its lowest byte.
fp8: format "float-quantized". A code is the nearest float8_e4m3fn of the weight divided by the
scale.

Source: the package compressed-tensors 0.20, modules compressors/pack_quantized and
compressors/naive_quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.layouts import EXPERT, Leaf
from zerojax.zoo.hugging_face.safetensors import Tensor
from zerojax.zoo.hugging_face.writing import Outgoing, Read

LARGEST = {"int8": 127.0, "fp8": float(jnp.finfo(jnp.float8_e4m3fn).max)}
"""Largest magnitude of a code."""
KINDS = tuple(LARGEST)

_WEIGHT, _HEAD = ".weight", "lm_head"
_PER_WORD, _OFFSET = 4, 128
_FORMATS = {"int8": ("pack-quantized", "int"), "fp8": ("float-quantized", "float")}


@dataclasses.dataclass(frozen=True)
class CodedPart:
    """One tensor of a quantized kernel: its codes, its scales, or its shape.

    Attributes:
      tensor: name, shape and dtype.
      source: the kernel, in float32.
      kind: "int8" or "fp8".
      parts: tensors of the same kernel that are computed and not yet written, by name.
    """

    tensor: Tensor
    source: Outgoing
    kind: str
    scale_dtype: np.dtype
    parts: dict[str, np.ndarray]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameters of the kernel."""
        return self.source.leaves

    def values(self, read: Read) -> np.ndarray:
        """Returns the tensor's values; the kernel is read once for all of its parts.

        Raises:
          ValueError: the kernel has values that are not finite.
        """
        if self.tensor.name not in self.parts:
            name = self.source.tensor.name
            weights = np.asarray(self.source.values(read), np.float32)
            if not np.isfinite(weights).all():
                raise ValueError(
                    f"{name} has values that are not finite, for which {self.kind} has no code; "
                    "export an earlier step, or without quantization"
                )
            self.parts.update(encode(name, weights, self.kind, self.scale_dtype))
        return self.parts.pop(self.tensor.name)


def encode(
    name: str, weights: np.ndarray, kind: str, scale_dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Quantizes a kernel.

    Args:
      name: of its tensor, which ends in ".weight".
      weights: [outputs, inputs] in float32, finite.
      kind: "int8" or "fp8".
      scale_dtype: of the scales. Codes are chosen for the rounded scales.

    Returns:
      {name: tensor}: codes and scales [outputs, 1]; with int8 also the shape as int64.
    """
    largest = np.max(np.abs(weights), axis=1, keepdims=True)
    scales = (largest / np.float32(LARGEST[kind])).astype(scale_dtype)
    scales[scales == 0] = 1  # a row of zeros, or of values below the smallest scale
    codes = np.clip(weights / scales.astype(np.float32), -LARGEST[kind], LARGEST[kind])
    if kind == "fp8":
        return {name: codes.astype(jnp.float8_e4m3fn), f"{name}_scale": scales}
    return {
        f"{name}_packed": _as_words(np.rint(codes).astype(np.int32)),
        f"{name}_scale": scales,
        f"{name}_shape": np.array(weights.shape, np.int64),
    }


def _as_words(codes: np.ndarray) -> np.ndarray:
    """Packs codes [outputs, inputs] to int32 [outputs, inputs / 4], rounded up."""
    padding = -codes.shape[1] % _PER_WORD
    bytes_ = np.pad((codes + _OFFSET).astype(np.uint8), ((0, 0), (0, padding)))
    return np.ascontiguousarray(bytes_).view("<i4")


def with_codes(class_name: str, found: Sequence[Outgoing], kind: str) -> list[Outgoing | CodedPart]:
    """Replaces the kernels of linear layers by their codes, in the order of `found`.

    Args:
      class_name: transformers' class of the model.
      found: all tensors of the model.
      kind: "int8" or "fp8".

    Raises:
      ValueError: an unknown kind.
      UnsupportedError: not a decoder with linear layers (GPT-2's are not), or one with experts.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize={kind!r} is not known; use one of {', '.join(KINDS)}")
    if not class_name.endswith("ForCausalLM"):
        raise UnsupportedError(
            f"quantize={kind!r} supports decoders (...ForCausalLM), not {class_name}; export "
            "without quantization"
        )
    if any(EXPERT in leaf.tensor for one in found for leaf in one.leaves):
        raise UnsupportedError(
            f"quantize={kind!r} does not support experts; export the mixture without quantization"
        )
    coded = [_coded_parts(one, kind) if _is_linear(one) else [one] for one in found]
    return [part for parts in coded for part in parts]


def _is_linear(one: Outgoing) -> bool:
    """Returns whether a tensor is the kernel [outputs, inputs] of a layer, not of the head."""
    first, name = one.leaves[0], one.tensor.name
    is_kernel = first.name.endswith("/kernel") and name.endswith(_WEIGHT)
    if not is_kernel or len(one.tensor.shape) != 2 or name.startswith(_HEAD):
        return False
    return first.layout.theirs[-1][0] == first.layout.ours[0]


def _coded_parts(one: Outgoing, kind: str) -> list[CodedPart]:
    name, (rows, columns) = one.tensor.name, one.tensor.shape
    scale_dtype = one.tensor.dtype
    scales = Tensor(name=f"{name}_scale", shape=(rows, 1), dtype=scale_dtype)
    if kind == "fp8":
        dtype = np.dtype(jnp.float8_e4m3fn)
        tensors = [Tensor(name=name, shape=(rows, columns), dtype=dtype), scales]
    else:
        words = -(-columns // _PER_WORD)
        tensors = [
            Tensor(name=f"{name}_packed", shape=(rows, words), dtype=np.dtype(np.int32)),
            scales,
            Tensor(name=f"{name}_shape", shape=(2,), dtype=np.dtype(np.int64)),
        ]
    wide = dataclasses.replace(one.tensor, dtype=np.dtype(np.float32))
    source, parts = dataclasses.replace(one, tensor=wide), {}
    return [CodedPart(tensor, source, kind, scale_dtype, parts) for tensor in tensors]


def quantization_config(kind: str) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json."""
    name, type_ = _FORMATS[kind]
    weights = {
        "num_bits": 8,
        "type": type_,
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights}
    group |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": [_HEAD],
        "kv_cache_scheme": None,
    }
