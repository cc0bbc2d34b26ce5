"""Dtypes by name: what the short names mean, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.config import LossScale
from zerojax.optim.precision import Precision, as_precision


def names(precision):
    fields = ("param_dtype", "compute_dtype", "reduce_dtype", "accumulate_dtype")
    return tuple(getattr(precision, field).name for field in fields)


def test_short_names():
    assert names(as_precision("fp32")) == ("float32",) * 4
    assert names(as_precision("bf16")) == ("float32", "bfloat16", "bfloat16", "float32")
    chosen = as_precision("bf16", reduce_dtype="fp32", accumulate_dtype="bf16")
    assert names(chosen) == ("float32", "bfloat16", "float32", "bfloat16")


def test_a_precision_passes_through():
    mine = Precision(compute_dtype=jnp.float32, reduce_dtype="bfloat16")
    assert as_precision(mine) == mine
    assert mine.reduce_dtype == np.dtype(jnp.bfloat16)
    assert hash(mine) == hash(Precision(compute_dtype="float32", reduce_dtype=jnp.bfloat16))


def test_float16_has_a_loss_scale():
    half = as_precision("fp16")
    assert names(half) == ("float32", "float16", "float16", "float32")
    assert half.loss_scale == LossScale()
    fixed = LossScale(static=128.0)
    assert as_precision("fp16", loss_scale=fixed).loss_scale == fixed
    assert as_precision("bf16").loss_scale is None
    assert "loss scale" in half.describe()


def test_without_masters():
    small = as_precision("bf16", param_dtype="bf16", moments_dtype="bf16")
    assert not small.has_masters
    assert "bfloat16 parameters without masters" in small.describe()
    assert "bfloat16 moments" in small.describe()


def test_description():
    assert as_precision("bf16").describe() == (
        "bfloat16 compute, float32 master weights, bfloat16 reductions, float32 accumulation"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: as_precision("fp8"), ValueError, "precision='fp8' is not one of fp32, bf16, fp16"),
        (
            lambda: as_precision("bf16", reduce_dtype="f32"),
            ValueError,
            "reduce_dtype='f32' is not one of fp32, bf16, fp16",
        ),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
