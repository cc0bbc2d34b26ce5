"""XLA types in text form, and their sizes in bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import TypeAlias

HOST_MEMORY_SPACE = 5
"""What `pinned_host` becomes in a layout: `{1,0:S(5)}`."""

_BITS = {
    **dict.fromkeys(("token", "opaque"), 0),
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
    # Below a byte an element takes a whole one, unless its layout says `E(4)`: packed.
    **dict.fromkeys(("s1", "u1", "s2", "u2", "s4", "u4", "f4e2m1fn"), 8),
}
_FLOAT8 = re.compile(r"f8e\dm\d\w*")
_TOKEN = re.compile(r"[()]|([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_PACKED = re.compile(r"E\((\d+)\)")


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """One array of a type.

    Attributes:
      dtype: as XLA writes it: "bf16", "f32", "pred", "f8e4m3fn"; "token" for what has no bytes.
      shape: sizes; the bound of a dimension whose size is dynamic.
      bits: of one element in memory.
      memory_space: 0 is the device's own memory, `HOST_MEMORY_SPACE` the host's.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: int
    memory_space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.size * self.bits // 8)


Type: TypeAlias = "Array | tuple[Type, ...]"


def _array(dtype: str, dims: str, layout: str | None) -> Array:
    bits = _BITS.get(dtype, 8 if _FLOAT8.fullmatch(dtype) else None)
    if bits is None:
        raise ValueError(
            f"dtype {dtype!r} in the type {dtype}[{dims}] is none that zerojax knows "
            f"({', '.join(sorted(_BITS))}, f8e*); add its size to zerojax/forecasting/hlo/types.py"
        )
    shape = tuple(int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim.strip())
    packed = _PACKED.search(layout or "")
    space = _MEMORY_SPACE.search(layout or "")
    return Array(
        dtype, shape, int(packed[1]) if packed else bits, memory_space=int(space[1]) if space else 0
    )


@functools.lru_cache(maxsize=1 << 16)
def read_type(text: str) -> Type:
    """The type that `text` spells: an `Array`, or a tuple of types, nested as in the text.

    Args:
      text: such as `f32[16,64]{1,0}` or `((bf16[8]{0}, s32[]), bf16[64]{0}, u32[])`.

    Raises:
      ValueError: no type, or a dtype that is not known.
    """
    levels: list[list[Type]] = [[]]
    for token in _TOKEN.finditer(text):
        if token[0] == "(":
            levels.append([])
        elif token[0] == ")":
            inner = tuple(levels.pop())
            levels[-1].append(inner)
        else:
            levels[-1].append(_array(token[1], token[2], token[3]))
    if len(levels) != 1 or len(levels[0]) != 1:
        raise ValueError(f"{text!r} is not the type of a value as XLA's HLO text spells it")
    return levels[0][0]


@functools.lru_cache(maxsize=1 << 16)
def arrays_of(text: str) -> tuple[Array, ...]:
    """All arrays of the type that `text` spells, in order; tokens are none."""

    def flatten(value: Type) -> list[Array]:
        if isinstance(value, Array):
            return [value] if value.bits else []
        return [array for part in value for array in flatten(part)]

    return tuple(flatten(read_type(text)))
