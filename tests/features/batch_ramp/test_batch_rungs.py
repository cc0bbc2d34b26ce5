"""Microbatches of a batch ramp: their rows divide every batch size."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support.refusals import refused
from zerojax.config import BatchRampConfig, MeshConfig
from zerojax.features.batch_ramp.batch_ladder import ramp_microbatches
from zerojax.placement.device_mesh import make_abstract_mesh

RAMP = BatchRampConfig(start=64, increment=64, ramp_rows=10_000)


def microbatches(data: int, stage: int = 1, number: int | None = None, rows: int = 256):
    mesh = make_abstract_mesh(MeshConfig(data=data, stage=stage), data * stage)
    batch = {"x": jax.ShapeDtypeStruct((rows, 4), np.float32)}
    return ramp_microbatches(RAMP, number, mesh, batch)


@pytest.mark.parametrize(
    ("data", "stage", "expected"),
    [
        (8, 1, 4),  # 64 rows each
        (8, 2, 8),  # 4 per stage
        (8, 4, 16),
        (32, 4, 8),  # one row per shard
        (2, 3, 8),  # 12 per stage do not divide 64 rows
    ],
)
def test_the_number_divides_every_size(data, stage, expected):
    number, reasons = microbatches(data, stage)
    assert number == expected
    assert all(rows * number % 256 == 0 for rows in (64, 128, 192))
    assert str(256 // number) in reasons[0]


def test_a_number_that_does_not_divide_is_refused():
    message = refused(lambda: microbatches(8, number=6), "num_microbatches=6", "num_microbatches=4")
    assert "batch_ramp" in message
    assert microbatches(8, number=8) == (8, [])
    refused(lambda: microbatches(48), "64 48", "multiples")
