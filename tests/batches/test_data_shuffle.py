"""The shuffle is a permutation for every size and key, and looks like a random one."""

from __future__ import annotations

import numpy as np
import pytest

from zerojax.data.shuffle import permute


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9, 100, 1023, 1024, 1025, 12_345])
def test_every_position_goes_to_a_different_place(size: int):
    for key in range(3):
        assert np.array_equal(
            np.sort(permute(np.arange(size), size, key=(7, key))), np.arange(size)
        )


def test_any_subset_and_shape_gives_the_same_places():
    size = 1_000_003
    whole = permute(np.arange(0, size, 1000), size, key=(0, 0))
    assert whole.dtype == np.int64
    pieces = permute(np.arange(0, size, 1000)[5:11].reshape(2, 3), size, key=(0, 0))
    assert np.array_equal(pieces, whole[5:11].reshape(2, 3))
    assert permute(np.array([], np.int64), size, key=(0,)).shape == (0,)


def test_epochs_and_seeds_have_orders_of_their_own():
    size = 10_000
    orders = [permute(np.arange(size), size, key) for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for first in range(4):
        for second in range(first):
            # Independent permutations agree in one place on average; the count is Poisson(1).
            assert np.sum(orders[first] == orders[second]) < 12


def test_the_order_looks_random():
    size = 100_000
    order = permute(np.arange(size), size, key=(3, 1))
    uniform = (order + 0.5) / size
    for lag in (1, 2, 64):
        # The correlation of n independent pairs has standard deviation n**-0.5; 4 of them.
        assert abs(np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]) < 4 * size**-0.5
    # Which hundredth the first tenth of the epoch comes from: chi-squared with 99 degrees of
    # freedom, without replacement (factor 0.9); mean 89, standard deviation about 13.
    counts = np.bincount(order[: size // 10] * 100 // size, minlength=100)
    chi_squared = np.sum((counts - 100.0) ** 2) / 100
    assert 40 < chi_squared < 150


def test_the_order_is_the_same_on_every_machine():
    # Positions saved by one version must mean the same windows in the next.
    assert permute(np.arange(8), 1000, key=(0, 0)).tolist() == [
        350,
        181,
        895,
        756,
        1,
        120,
        840,
        156,
    ]
