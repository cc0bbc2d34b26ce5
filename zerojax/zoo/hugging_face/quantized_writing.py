"""Writes kernels as 8- or 4-bit codes in the format of compressed-tensors (vLLM, transformers).

Only kernels of linear layers get codes; embeddings, norms, biases and the output head keep their
dtype. Codes are computed from weights in the dtype of the export, which is also the dtype of the
scales.

int8, int4: format "pack-quantized". Codes and scales are those of `operators.rounded_weights`: one
scale for each output (int8), or for 32 inputs of an output (int4). Codes plus 128 (int4: 8) fill
int32 words from the lowest bits up. fp8: format "float-quantized". A code times the scale of its
output is the nearest such value to the weight.

Source: the package compressed-tensors 0.20, modules compressors/pack_quantized and
compressors/naive_quantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.rounded_weights import (
    FORMATS,
    FP8,
    check_inputs,
    codes_and_scales,
    float8_and_scales,
)
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.layouts import EXPERT, Leaf
from zerojax.zoo.hugging_face.safetensors import Tensor
from zerojax.zoo.hugging_face.writing import Outgoing, Read

KINDS = (*FORMATS, FP8)

_WEIGHT, _HEAD = ".weight", "lm_head"
_WORD_BITS = 32
_FP8 = np.dtype(jnp.float8_e4m3fn)


@dataclass(frozen=True)
class CodedPart:
    """One tensor of a quantized kernel: its codes, its scales, or its shape.

    Attributes:
      tensor: name, shape and dtype of the tensor.
      source: the kernel.
      kind: format of the codes, one of `KINDS`.
      parts: {name: tensor} of the same kernel, computed and not yet written.
    """

    tensor: Tensor
    source: Outgoing
    kind: str
    parts: dict[str, np.ndarray]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Parameters of the kernel."""
        return self.source.leaves

    def values(self, read: Read) -> np.ndarray:
        """Computes the tensor's values; the kernel is read once for all of its tensors.

        Raises:
          ValueError: the kernel has values that are not finite.
        """
        if self.tensor.name not in self.parts:
            name = self.source.tensor.name
            weights = self.source.values(read)
            if not np.isfinite(weights.astype(np.float32)).all():
                raise ValueError(
                    f"{name} has values that are not finite, for which {self.kind} has no code; "
                    "export an earlier step, or without quantization"
                )
            self.parts.update(encode(name, weights, self.kind))
        return self.parts.pop(self.tensor.name)


def encode(name: str, weights: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """Quantizes a kernel.

    Args:
      name: name of the kernel's tensor, which ends in ".weight".
      weights: [outputs, inputs], finite, in the dtype of the scales.
      kind: format of the codes, one of `KINDS`.

    Returns:
      {name: tensor}: codes, and scales [outputs, number of scales per output]; with int8 and int4
      also the shape as int64.
    """
    if kind == FP8:
        codes, scales = float8_and_scales(np, np.ascontiguousarray(weights.T))
        return {
            name: np.ascontiguousarray(codes.T),
            f"{name}_scale": scales.T.astype(weights.dtype),
        }
    codes, scales = codes_and_scales(np, np.ascontiguousarray(weights.T), kind)
    codes = codes.reshape(weights.T.shape).T.astype(np.int32)
    return {
        f"{name}_packed": _as_words(codes, FORMATS[kind].bits),
        f"{name}_scale": np.ascontiguousarray(scales[:, 0].T).astype(weights.dtype),
        f"{name}_shape": np.array(weights.shape, np.int64),
    }


def _as_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes [outputs, inputs] into int32 words [outputs, inputs x bits / 32], rounded up."""
    per_word = _WORD_BITS // bits
    unsigned = (codes + 2 ** (bits - 1)).astype(np.uint32)
    unsigned = np.pad(unsigned, ((0, 0), (0, -codes.shape[1] % per_word)))
    words = np.zeros((len(codes), unsigned.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        words |= unsigned[:, place::per_word] << np.uint32(place * bits)
    return words.view(np.int32)


def with_codes(class_name: str, found: Sequence[Outgoing], kind: str) -> list[Outgoing | CodedPart]:
    """Replaces the kernels of linear layers by their codes, in the order of `found`.

    Args:
      class_name: transformers' class of the model.
      found: all tensors of the model.
      kind: format of the codes, one of `KINDS`.

    Raises:
      ValueError: the kind is unknown, or with int4 a number of inputs is not divisible by 32.
      UnsupportedError: the model is not a decoder with linear layers (GPT-2 is not), or has
        experts.
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
    name, (outputs, inputs), dtype = one.tensor.name, one.tensor.shape, one.tensor.dtype

    def tensor(ending: str, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return Tensor(name=f"{name}{ending}", shape=shape, dtype=np.dtype(dtype))

    if kind == FP8:
        tensors = [tensor("", (outputs, inputs), _FP8), tensor("_scale", (outputs, 1), dtype)]
    else:
        check_inputs(kind, inputs)
        form = FORMATS[kind]
        words = math.ceil(inputs * form.bits / _WORD_BITS)
        tensors = [
            tensor("_packed", (outputs, words), np.int32),
            tensor("_scale", (outputs, inputs // (form.group or inputs)), dtype),
            tensor("_shape", (2,), np.int64),
        ]
    parts: dict[str, np.ndarray] = {}
    return [CodedPart(entry, one, kind, parts) for entry in tensors]


def quantization_config(kind: str) -> dict[str, Any]:
    """Builds the `quantization_config` of config.json."""
    form = FORMATS.get(kind)
    weights = {
        "num_bits": 8 if form is None else form.bits,
        "type": "float" if form is None else "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    if form is not None and form.group is not None:
        weights |= {"strategy": "group", "group_size": form.group}
    group = {"targets": ["Linear"], "weights": weights}
    group |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized" if form is None else "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": [_HEAD],
        "kv_cache_scheme": None,
    }
