"""Which dtype is used for what: stored, computed with, sent, and summed.

Knows dtypes; never touches arrays of a run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one training run.

    Attributes:
      param_dtype: the stored parameters that the optimizer updates (master weights).
      compute_dtype: parameters as the model reads them, and the floating-point leaves of a batch.
      reduce_dtype: gradients on the wire.
      accumulate_dtype: gradients summed over microbatches. float32 costs 4 bytes per parameter at
        stages 0 and 1, where gradients are whole.
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.bfloat16
    reduce_dtype: Any = jnp.bfloat16
    accumulate_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = np.dtype(getattr(self, field.name))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"Precision.{field.name}={dtype.name} is not a floating-point type; "
                    "use jnp.float32 or jnp.bfloat16"
                )
            object.__setattr__(self, field.name, dtype)
        if self.param_dtype != np.dtype(jnp.float32):
            raise ValueError(
                f"Precision.param_dtype={self.param_dtype.name}: master weights are float32; "
                "lower precision belongs in compute_dtype"
            )

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.compute_dtype.name} compute, {self.param_dtype.name} master weights, "
            f"{self.reduce_dtype.name} reductions, {self.accumulate_dtype.name} accumulation"
        )


def as_precision(
    precision: Precision | str,
    *,
    reduce_dtype: str | None = None,
    accumulate_dtype: str | None = None,
) -> Precision:
    """A `Precision` from its short name.

    Args:
      precision: "fp32", "bf16" or a `Precision`.
      reduce_dtype, accumulate_dtype: "fp32" or "bf16"; None keeps the default: reductions in the
        compute dtype, accumulation in float32.

    Raises:
      ValueError: an unknown name.
    """
    if isinstance(precision, str):
        compute = _dtype(precision, "precision")
        precision = Precision(compute_dtype=compute, reduce_dtype=compute)
    if not isinstance(precision, Precision):
        raise TypeError(
            f"precision={precision!r} is a {type(precision).__name__}; "
            "use 'fp32', 'bf16' or Precision(...)"
        )
    changes = {}
    if reduce_dtype is not None:
        changes["reduce_dtype"] = _dtype(reduce_dtype, "reduce_dtype")
    if accumulate_dtype is not None:
        changes["accumulate_dtype"] = _dtype(accumulate_dtype, "accumulate_dtype")
    return dataclasses.replace(precision, **changes)


def _dtype(name: Any, option: str) -> Any:
    if name not in DTYPES:
        raise ValueError(f"{option}={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]
