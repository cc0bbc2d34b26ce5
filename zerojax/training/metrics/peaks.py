"""Published peak FLOP/s of devices, the denominator of MFU.

Unknown devices have no peak; none is guessed.
"""

from dataclasses import dataclass

from zerojax.hardware.gpus import gpu_of_device


@dataclass(frozen=True)
class Peak:
    """One kind of device. Matrix products without sparsity, accumulated in float32."""

    bf16: float | None
    """TFLOP/s of bfloat16 products; None: the device has no such units."""
    fp32: float | None
    """TFLOP/s of float32 products as JAX runs them by default: TF32 units where there are some."""
    memory: float
    """GB, as sold (10^9 bytes)."""
    source: str
    """Where the numbers are published. Pages that print sparse rates are halved there."""


def find_peak(device_kind: str) -> Peak | None:
    """The published limits of a device kind such as "NVIDIA H100 80GB HBM3"; None if not known."""
    gpu = gpu_of_device(device_kind)
    if gpu is None:
        return None
    return Peak(
        bf16=gpu.bf16_flops and gpu.bf16_flops / 1e12,
        fp32=gpu.fp32_flops and gpu.fp32_flops / 1e12,
        memory=gpu.memory_gb,
        source="; ".join(gpu.sources),
    )


def peak_flops(device_kind: str, precision: str = "bf16") -> float | None:
    """FLOP/s of one device in "bf16" or "fp32"; None if not known."""
    gpu = gpu_of_device(device_kind)
    if gpu is None:
        return None
    return {"bf16": gpu.bf16_flops, "fp32": gpu.fp32_flops}[precision]
