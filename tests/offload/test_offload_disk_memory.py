"""A model whose optimizer state is larger than the memory it may take trains from disk."""

import pytest

from benchmarks.offload_disk import LAYERS, LIMIT_MIB, MIB, run_child


@pytest.mark.slow
def test_only_from_disk_under_a_limit_of_memory(tmp_path):
    """The limit is the kernel's, of private memory (RLIMIT_DATA), on real processes."""
    found = run_child("nvme", LAYERS, LIMIT_MIB, tmp_path / "nvme", steps=2)
    assert found is not None
    assert found["state_bytes"] > LIMIT_MIB * MIB
    assert found["peak_rss_bytes"] < found["state_bytes"]
    assert found["losses"][1] < found["losses"][0]
    for tier in ("host", "device"):
        assert run_child(tier, LAYERS, LIMIT_MIB, tmp_path / tier, steps=2) is None


@pytest.mark.thorough
def test_the_bits_do_not_depend_on_the_tier(tmp_path):
    """The same program, small and without a limit."""
    losses = {
        tier: run_child(tier, 1, 0, tmp_path / tier, steps=2)["losses"]
        for tier in ("device", "nvme")
    }
    assert losses["nvme"] == losses["device"]


@pytest.mark.thorough
def test_memory_of_sweeps_does_not_grow_with_the_store(tmp_path):
    """Three buckets of 48 MiB, whatever their number; 5 % is the noise of allocators."""
    one, two = (run_child("sweep", count, 0, tmp_path / str(count), steps=1) for count in (3, 6))
    assert two["peak_rss_bytes"] < 1.05 * one["peak_rss_bytes"]
    assert two["state_bytes"] == 2 * one["state_bytes"]
