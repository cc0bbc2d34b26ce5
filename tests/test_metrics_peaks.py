"""MFU is measured against what the maker published, or not at all."""

from __future__ import annotations

import pytest

from zerojax.metrics.peaks import PEAKS, find_peak, peak_flops


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
    ["cpu", "", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "TPU v4", "NVIDIA H1000"],
)
def test_unknown_devices_have_none(kind):
    assert find_peak(kind) is None
    assert peak_flops(kind) is None


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.pattern)
def test_rows_are_plausible_and_cited(peak):
    assert peak.source
    if peak.bf16 is not None:  # TF32 units do half the work of bf16 units on all of these
        assert peak.bf16 / peak.fp32 == pytest.approx(2, rel=0.02)
