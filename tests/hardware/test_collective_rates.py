"""Timed collectives: the arrays, the checks of their results, and the two bandwidths."""

import contextlib

import jax
import numpy as np
import pytest

from zerojax.hardware import collective_rates
from zerojax.hardware.collective_rates import (
    GATHER,
    REDUCE,
    algorithm_bandwidth,
    bus_bandwidth,
    measure_collectives,
)

KIB = 2**10


def test_each_size_is_gathered_and_reduced_with_right_results():
    within = []

    @contextlib.contextmanager
    def around(kind, num_bytes):
        within.append((kind, num_bytes))
        yield

    found = list(measure_collectives([8 * KIB, 64 * KIB], passes=3, around=around))
    sizes = [(GATHER, 8 * KIB), (REDUCE, 8 * KIB), (GATHER, 64 * KIB), (REDUCE, 64 * KIB)]
    assert [(one.kind, one.num_bytes) for one in found] == sizes == within
    for one in found:
        assert one.num_devices == 8
        assert one.is_right
        assert 0 < one.seconds <= one.longest


def test_one_device_alone_measures_nothing():
    assert list(measure_collectives([KIB], devices=jax.devices()[:1])) == []


@pytest.mark.parametrize("kind", [GATHER, REDUCE])
def test_a_wrong_result_is_noticed(kind, monkeypatch):
    name = "_gather" if kind == GATHER else "_reduce"
    right = getattr(collective_rates, name)
    monkeypatch.setattr(collective_rates, name, lambda x: right(x).at[0, 1].add(1))
    found = {one.kind: one.is_right for one in measure_collectives([KIB], passes=1)}
    assert found == {GATHER: kind != GATHER, REDUCE: kind != REDUCE}


def test_values_of_many_devices_and_their_sum_are_exact():
    values = collective_rates._values(100_000)
    assert values.dtype == np.float32
    assert values.sum() == sum(n % 17 for n in range(100_000)) < 2**24


def test_bandwidths_are_those_of_nccl_tests():
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    assert algorithm_bandwidth(1000, 0.5) == 2000
    assert bus_bandwidth(GATHER, 1000, 4, 0.5) == 2000 * 3 / 4
    assert bus_bandwidth(REDUCE, 1000, 4, 0.5) == 2000 * 2 * 3 / 4
