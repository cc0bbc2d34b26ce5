"""Precision of a run: the dtypes of storage, computation, communication and accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax.config import LossScale, describe_loss_scale
from zerojax.config.checks import names_keywords
from zerojax.optim.weight_codes import KINDS

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
STORED = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
"""Dtypes allowed for parameters and moments: those with the exponent range of float32."""


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of one training run.

    Attributes:
      param_dtype: dtype of the stored parameters that the optimizer updates. float32: master
        weights. bfloat16: no master weights; updates are rounded stochastically, so that an update
        far below one unit in the last place still changes a parameter on average.
      compute_dtype: dtype in which the model reads parameters and the floating-point arrays of a
        batch, except those that the loss compares or makes integers of, such as ids.
      reduce_dtype: dtype of gradients in collectives, except in those over `model`, which the
        compiler places: they have the dtype of the summed values.
      accumulate_dtype: dtype of gradients summed over microbatches. float32 costs 4 bytes per
        parameter at stages 0 and 1, where gradients are not sharded.
      moments_dtype: dtype of the optimizer's stored moments; its arithmetic is float32.
      freeze_dtype: dtype of stored frozen parameters; None uses the property `frozen_dtype`.
      freeze_codes: "nf4" or "int8" stores kernels among frozen parameters, as chosen by
        `zerojax.placement.frozen_codes`, in codes of 4 or 8 bits. None stores no codes.
      loss_scale: scale of the loss, so that small float16 gradients are not lost. None uses
        `LossScale()` if the compute or reduce dtype is float16, and otherwise no scale.
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.bfloat16
    reduce_dtype: Any = jnp.bfloat16
    accumulate_dtype: Any = jnp.float32
    moments_dtype: Any = jnp.float32
    freeze_dtype: Any = None
    freeze_codes: str | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        for name in _DTYPE_FIELDS:
            if name == "freeze_dtype" and self.freeze_dtype is None:
                continue
            dtype = np.dtype(getattr(self, name))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"Precision.{name}={dtype.name} is not a floating-point type; "
                    "use jnp.float32, jnp.bfloat16 or jnp.float16"
                )
            object.__setattr__(self, name, dtype)
        for name in ("param_dtype", "moments_dtype", "accumulate_dtype"):
            dtype = getattr(self, name)
            if dtype not in STORED:
                raise ValueError(
                    f"Precision.{name}={dtype.name} loses small values permanently; use float32 or "
                    "bfloat16 for stored or accumulated values; lower precision is possible in "
                    "compute_dtype"
                )
        if self.freeze_dtype not in (None, *STORED, self.compute_dtype):
            raise ValueError(
                f"Precision.freeze_dtype={self.freeze_dtype.name} loses large and small weights "
                f"that compute_dtype={self.compute_dtype.name} could represent; use float32, "
                "bfloat16 or None, the compute dtype"
            )
        if self.freeze_codes not in (None, *KINDS):
            raise ValueError(
                f"Precision.freeze_codes={self.freeze_codes!r} is not one of {', '.join(KINDS)}; "
                "use one of them, or None for no codes"
            )
        is_scaled = np.dtype(jnp.float16) in (self.compute_dtype, self.reduce_dtype)
        if is_scaled and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScale())
        if self.loss_scale is not None and not is_scaled:
            raise ValueError(
                f"Precision.loss_scale is set, but compute_dtype={self.compute_dtype.name}: only "
                "float16 needs a loss scale, bfloat16 has float32's range; leave loss_scale out, "
                "or use float16"
            )

    @property
    def has_masters(self) -> bool:
        """Returns whether parameters are stored in float32 (master weights)."""
        return self.param_dtype == np.dtype(jnp.float32)

    @property
    def frozen_dtype(self) -> np.dtype:
        """Dtype of frozen parameters. They receive no small updates, so the compute dtype is
        enough; a 16-bit `param_dtype` is used instead if set."""
        if self.freeze_dtype is not None:
            return np.dtype(self.freeze_dtype)
        return np.dtype(self.compute_dtype if self.has_masters else self.param_dtype)

    def describe(self) -> str:
        """Formats the dtypes in one line for the log."""
        masters = "master weights" if self.has_masters else "parameters without masters"
        parts = [
            f"{self.compute_dtype.name} compute",
            f"{self.param_dtype.name} {masters}",
            f"{self.reduce_dtype.name} reductions",
            f"{self.accumulate_dtype.name} accumulation",
        ]
        if self.freeze_codes is not None:
            parts.append(f"frozen kernels in {self.freeze_codes}")
        if self.moments_dtype != np.dtype(jnp.float32):
            parts.append(f"{self.moments_dtype.name} moments")
        if self.loss_scale is not None:
            parts.append(describe_loss_scale(self.loss_scale))
        return ", ".join(parts)


_DTYPE_FIELDS = (
    "param_dtype",
    "compute_dtype",
    "reduce_dtype",
    "accumulate_dtype",
    "moments_dtype",
    "freeze_dtype",
)


def default_precision(platform: str | None) -> tuple[str, str]:
    """Returns (default precision of a run, reason that the plan prints).

    Args:
      platform: JAX's name of the devices' platform; None if this process has no devices.
    """
    if platform == "cpu":
        return "fp32", "precision='fp32': CPUs have no fast bf16"
    return "bf16", "precision='bf16': the default on accelerators"


def as_precision(
    precision: Precision | str,
    *,
    reduce_dtype: str | None = None,
    accumulate_dtype: str | None = None,
    param_dtype: str | None = None,
    moments_dtype: str | None = None,
    freeze_dtype: str | None = None,
    loss_scale: LossScale | None = None,
) -> Precision:
    """Builds a `Precision` from its short name, or changes the given one.

    Args:
      precision: "fp32", "bf16", "fp16", the compute dtype, or a `Precision`, whose values are kept
        where an argument below is None.
      reduce_dtype: dtype of reductions: "fp32", "bf16" or "fp16"; None uses the compute dtype.
      accumulate_dtype, param_dtype, moments_dtype: "fp32" or "bf16"; None uses float32.
      freeze_dtype: dtype of frozen parameters: "fp32", "bf16" or (under fp16) "fp16"; None uses
        `Precision.frozen_dtype`. "nf4" or "int8" stores their kernels as codes, the rest in the
        default.
      loss_scale: loss scale for float16; None keeps the default.

    Raises:
      ValueError: a name is unknown, or the dtypes do not fit together (see `Precision`).
      TypeError: `precision` is of another type.
    """
    if isinstance(precision, str):
        compute = _dtype(precision, "precision")
        precision = Precision(compute_dtype=compute, reduce_dtype=compute)
    if not isinstance(precision, Precision):
        raise TypeError(
            f"precision={precision!r} is not valid; use 'fp32', 'bf16', 'fp16' or "
            "zerojax.Precision(...)"
        )
    named = {
        "reduce_dtype": reduce_dtype,
        "accumulate_dtype": accumulate_dtype,
        "param_dtype": param_dtype,
        "moments_dtype": moments_dtype,
        "freeze_dtype": freeze_dtype,
    }
    changes: dict[str, Any] = {}
    if freeze_dtype in KINDS:
        changes["freeze_codes"] = named.pop("freeze_dtype")
    changes |= {name: _dtype(given, name) for name, given in named.items() if given is not None}
    if loss_scale is not None:
        changes["loss_scale"] = loss_scale
    return dataclasses.replace(precision, **changes)


def _dtype(name: str, option: str) -> DTypeLike:
    if name not in DTYPES:
        known = (*DTYPES, *KINDS) if option == "freeze_dtype" else DTYPES
        raise ValueError(f"{option}={name!r} is not one of {', '.join(known)}")
    return DTYPES[name]
