"""Decodes weights of gpt-oss in MXFP4: 4-bit floats with one power of two for each 32 of them.

The format is that of the OCP Microscaling Formats (MX) Specification 1.0. A weight [experts, in,
out] is stored as two tensors: NAME_blocks, uint8 [experts, out, in / 32, 16], with two codes in a
byte, the first one in its lower bits, and NAME_scales, uint8 [experts, out, in / 32], with the
exponents plus 127. Decoded values are exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.layouts import Range
from zerojax.zoo.hugging_face.safetensors import Tensor

METHOD = "mxfp4"
"""Name of the format in `quantization_config` of config.json."""
GROUP = 32
"""Number of values that share a scale."""

_BLOCKS, _SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
_BIAS, _NAN = 127, 255

Stored = tuple[Path, Tensor]
ReadBlock = Callable[[Stored, Sequence[Sequence[Range]]], np.ndarray]


@dataclass(frozen=True)
class CodedTensor:
    """Weight in MXFP4 codes.

    Attributes:
      blocks, scales: file and entry of the two stored tensors.
      decoded: entry of the decoded weight, bfloat16 [experts, in, out], which is in no file.
    """

    blocks: Stored
    scales: Stored
    decoded: Tensor

    def read(self, read_block: ReadBlock, runs: Sequence[Sequence[Range]]) -> np.ndarray:
        """Decodes a block of the weight, expert by expert.

        Only the codes of the block are read, in whole groups of 32 inputs.

        Args:
          read_block: function that reads a block of a stored tensor.
          runs: ordered ranges for each of [experts, in, out]; the block is their Cartesian product.

        Returns:
          The block, bfloat16.
        """
        experts, inputs, outputs = runs
        block = np.empty([sum(stop - start for start, stop in dim) for dim in runs], jnp.bfloat16)
        if block.size == 0:
            return block
        first, last = inputs[0][0] // GROUP, -(-inputs[-1][1] // GROUP)
        chosen = np.concatenate([np.arange(*run) for run in inputs]) - first * GROUP
        numbers = (number for run in experts for number in range(*run))
        for place, number in enumerate(numbers):
            rows = [[(number, number + 1)], outputs, [(first, last)]]
            codes = read_block(self.blocks, [*rows, [(0, GROUP // 2)]])
            block[place] = decode(codes, read_block(self.scales, rows))[0].T[chosen]
        return block


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes codes, uint8 [..., groups, 16], with scales, uint8 [..., groups].

    Returns:
      bfloat16 [..., groups * 32]; NaN for scales of 255.
    """
    pairs = np.stack([codes & 0x0F, codes >> 4], axis=-1)
    values = _VALUES[pairs.reshape(*codes.shape[:-1], GROUP)]
    # Signed before the subtraction, which would wrap around in uint8.
    exponents = scales.astype(np.int32)[..., None] - _BIAS
    with np.errstate(over="ignore"):
        values = np.ldexp(values, exponents)
    values = np.where(scales[..., None] == _NAN, np.float32(np.nan), values)
    return values.reshape(*codes.shape[:-2], -1).astype(jnp.bfloat16)


def find_coded(tensors: Mapping[str, Stored]) -> dict[str, CodedTensor]:
    """Finds the weights in MXFP4 codes among the tensors of a folder.

    Returns:
      {name of the weight: its codes}.

    Raises:
      UnsupportedError: codes have no scales, or shapes or dtypes do not fit each other.
    """
    found = {}
    for name, (file, blocks) in tensors.items():
        if not name.endswith(_BLOCKS):
            continue
        weight = name.removesuffix(_BLOCKS)
        scales = tensors.get(weight + _SCALES)
        shape = blocks.shape
        fits = len(shape) == 4 and shape[-1] == GROUP // 2 and blocks.dtype == np.uint8
        if scales is None or not fits or scales[1].shape != shape[:-1]:
            theirs = None if scales is None else list(scales[1].shape)
            raise UnsupportedError(
                f"tensor {quoted(name)} is {blocks.dtype.name} {list(shape)} with scales {theirs}, "
                "but codes of MXFP4 are uint8 [experts, out, in / 32, 16] with scales [experts, "
                "out, in / 32]; fetch the folder again"
            )
        whole = (shape[0], shape[2] * GROUP, shape[1])
        decoded = Tensor(name=weight, shape=whole, dtype=np.dtype(jnp.bfloat16))
        found[weight] = CodedTensor((file, blocks), scales, decoded)
    return found
