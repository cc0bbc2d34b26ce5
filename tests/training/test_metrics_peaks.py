"""MFU is measured against what the maker published, or not at all."""

from __future__ import annotations

import pytest

from zerojax.training.metrics.runlog import find_peak, peak_flops


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("kind", "bf16", "memory"),
    [
        ("NVIDIA H200", 989.5e12, 141),
        ("NVIDIA H200 NVL", 835.5e12, 141),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 80),
        ("NVIDIA H100 PCIe", 756e12, 80),
        ("NVIDIA H100 NVL", 835.5e12, 94),
        ("NVIDIA GH200 480GB", 989.5e12, 96),
        ("NVIDIA GH200 144G HBM3e", 989.5e12, 144),
        ("NVIDIA B200", 2250e12, 180),
        ("NVIDIA GB200", 2500e12, 186),
        ("NVIDIA A100-SXM4-40GB", 312e12, 40),
        ("NVIDIA A100-SXM4-80GB", 312e12, 80),
        ("NVIDIA A100 80GB PCIe", 312e12, 80),
        ("NVIDIA A10", 125e12, 24),
        ("NVIDIA L4", 121e12, 24),
        ("NVIDIA L40S", 362e12, 48),
        ("NVIDIA RTX A6000", 154.8e12, 48),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12, 48),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 24),
        ("NVIDIA GeForce RTX 5090", 209.5e12, 32),
        ("NVIDIA GeForce RTX 3090", 71e12, 24),
        ("NVIDIA A800-SXM4-80GB", 312e12, 80),
        ("NVIDIA A100-PCIE-40GB", 312e12, 40),
        ("NVIDIA H800", 989.5e12, 80),
        ("NVIDIA H20", 148e12, 96),
        ("NVIDIA A40", 149.7e12, 48),
        ("NVIDIA A30", 165e12, 24),
        ("NVIDIA L40", 181e12, 48),
    ],
)
def test_known_devices(kind, bf16, memory):
    assert peak_flops(kind) == bf16
    assert find_peak(kind).memory == memory


@pytest.mark.parametrize("kind", ["Tesla V100-SXM2-16GB", "Tesla T4"])
def test_devices_without_bf16_units_have_no_such_peak(kind):
    assert peak_flops(kind, "bf16") is None
    assert 0 < peak_flops(kind, "fp32") < 16e12


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "",
        "TPU v4",
        "NVIDIA A10G",
        "NVIDIA H1000",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
def test_unknown_devices_have_none(kind):
    assert find_peak(kind) is None
    assert peak_flops(kind) is None


def test_a_peak_says_where_it_is_published():
    assert "nvidia.com/en-us/data-center/h200/" in find_peak("NVIDIA H200").source


def test_a_slice_of_a_gpu_has_no_peak():
    """It has a part of the cores; the peak of the whole would be a wrong one."""
    assert find_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
