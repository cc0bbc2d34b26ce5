"""Layers are divided as the best of all ways, found by trying them, would be."""

import itertools
import random

import pytest

from zerojax.config.mesh import PARTITIONS
from zerojax.pipeline.planning import METHODS, partition_layers


def all_partitions(num_layers, num_parts):
    for cuts in itertools.combinations(range(1, num_layers), num_parts - 1):
        edges = [0, *cuts, num_layers]
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def heaviest(layers, layer_cost, embed_cost, head_cost):
    costs = [count * layer_cost for count in layers]
    costs[0] += embed_cost
    costs[-1] += head_cost
    return max(costs)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("num_layers", "num_parts"),
    [(n, p) for n in (1, 2, 5, 8, 11) for p in (1, 2, 3, 4, 8) if p <= n],
)
def test_by_cost_it_is_the_best_of_all_ways_and_of_those_the_most_even(num_layers, num_parts):
    """Costs are whole numbers, so that equal ones compare as equal."""
    numbers = random.Random(num_layers * 31 + num_parts)
    trials = [(1, 0, 0), (0, 0, 0), (0, 3, 2), (2, 1, 1)]
    trials += [tuple(numbers.randrange(0, limit) for limit in (5, 12, 30)) for _ in range(12)]
    for layer_cost, embed_cost, head_cost in trials:
        costs = {"layer_cost": layer_cost, "embed_cost": embed_cost, "head_cost": head_cost}
        best = min(
            all_partitions(num_layers, num_parts),
            key=lambda way: (
                heaviest(way, layer_cost, embed_cost, head_cost),
                sorted(way, reverse=True),
                [-count for count in way],
            ),
        )
        for method in ("flops", "parameters"):
            assert partition_layers(method, num_layers, num_parts, **costs) == best


def test_a_heavy_head_takes_layers_from_the_last_part():
    assert partition_layers("flops", 32, 4, head_cost=4) == (9, 9, 9, 5)
    assert partition_layers("flops", 32, 4, embed_cost=2, head_cost=2) == (7, 9, 9, 7)
    # One that outweighs everything still leaves one layer in its part, and the rest is even.
    assert partition_layers("flops", 10, 4, head_cost=100) == (3, 3, 3, 1)


def test_without_costs_beside_the_layers_all_methods_agree_where_parts_are_equal():
    for method in METHODS:
        assert partition_layers(method, 12, 4) == (3, 3, 3, 3)
    assert partition_layers("flops", 10, 4) == (3, 3, 2, 2)
    assert partition_layers([3, 3, 2, 2], 10, 4) == (3, 3, 2, 2)


def test_many_layers_are_quick():
    """Not every way of dividing 512 layers is tried."""
    layers = partition_layers("flops", 512, 32, layer_cost=7.0, head_cost=40.0)
    assert (sum(layers), len(layers), max(layers)) == (512, 32, 17)


def test_settings_name_the_methods_there_are():
    assert PARTITIONS == METHODS
