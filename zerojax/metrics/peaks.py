"""What a device could do at best, as its maker published it; the denominator of MFU.

Knows the names that devices give themselves; unknown devices have no peak, never a guessed one.
"""

import re
from dataclasses import dataclass

DATA_CENTER = "https://www.nvidia.com/en-us/data-center/"
AMPERE = "NVIDIA Ampere GA102 GPU Architecture, appendix A"
ADA = "NVIDIA Ada GPU Architecture, appendix A"
BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, appendix A"


@dataclass(frozen=True)
class Peak:
    """One kind of device. Matrix products without sparsity, accumulated in float32."""

    pattern: str
    """Regex on the upper-case device kind."""
    bf16: float | None
    """TFLOP/s of bfloat16 products; None: the device has no such units."""
    fp32: float
    """TFLOP/s of float32 products as JAX runs them by default: TF32 units where there are some."""
    memory: float
    """GB, as sold (10^9 bytes)."""
    source: str
    """Where the numbers are published. Pages that print sparse rates are halved here."""


# The first match wins: special forms stand before the plain name.
PEAKS = (
    Peak(r"\bGB200\b", 2500, 1250, 186, DATA_CENTER + "gb200-nvl72/"),
    Peak(r"\bB200\b", 2250, 1125, 180, DATA_CENTER + "hgx/"),
    Peak(r"\bGH200\b.*\b144G", 989.5, 494.7, 144, DATA_CENTER + "grace-hopper-superchip/"),
    Peak(r"\bGH200\b", 989.5, 494.7, 96, DATA_CENTER + "grace-hopper-superchip/"),
    Peak(r"\bH200 NVL\b", 835.5, 417.5, 141, DATA_CENTER + "h200/"),
    Peak(r"\bH200\b", 989.5, 494.7, 141, DATA_CENTER + "h200/"),
    Peak(r"\bH100 NVL\b", 835.5, 417.5, 94, DATA_CENTER + "h100/"),
    Peak(r"\bH100 PCIE\b", 756, 378, 80, DATA_CENTER + "h100/"),
    Peak(r"\bH[18]00\b", 989.5, 494.7, 80, DATA_CENTER + "h100/"),
    Peak(r"\bH20\b", 148, 74, 96, "NVIDIA H20 GPU datasheet"),
    Peak(r"\bA[18]00\b.*\b40GB", 312, 156, 40, DATA_CENTER + "a100/"),
    Peak(r"\bA[18]00\b", 312, 156, 80, DATA_CENTER + "a100/"),
    Peak(r"\bA40\b", 149.7, 74.8, 48, DATA_CENTER + "a40/"),
    Peak(r"\bA30\b", 165, 82, 24, DATA_CENTER + "products/a30-gpu/"),
    Peak(r"\bA10\b", 125, 62.5, 24, DATA_CENTER + "products/a10-gpu/"),
    Peak(r"\bL40S\b", 362, 183, 48, DATA_CENTER + "l40s/"),
    Peak(r"\bL40\b", 181, 90.5, 48, DATA_CENTER + "l40/"),
    Peak(r"\bL4\b", 121, 60, 24, DATA_CENTER + "l4/"),
    Peak(r"\bRTX 6000 ADA\b", 364.2, 182.1, 48, ADA),
    Peak(r"\bRTX A6000\b", 154.8, 77.4, 48, AMPERE),
    Peak(r"\bRTX 5090\b(?! LAPTOP)", 209.5, 104.8, 32, BLACKWELL),
    Peak(r"\bRTX 4090\b(?! LAPTOP| D)", 165.2, 82.6, 24, ADA),
    Peak(r"\bRTX 3090\b(?! TI)", 71, 35.6, 24, AMPERE),
    Peak(r"\bV100\b.*\b16GB", None, 15.7, 16, DATA_CENTER + "v100/"),
    Peak(r"\bV100\b", None, 15.7, 32, DATA_CENTER + "v100/"),
    Peak(r"\bT4\b", None, 8.1, 16, DATA_CENTER + "tesla-t4/"),
)


def find_peak(device_kind: str) -> Peak | None:
    """The published limits of a device kind such as "NVIDIA H100 80GB HBM3"; None if not known."""
    name = device_kind.upper()
    return next((peak for peak in PEAKS if re.search(peak.pattern, name)), None)


def peak_flops(device_kind: str, precision: str = "bf16") -> float | None:
    """FLOP/s of one device in "bf16" or "fp32"; None if not known."""
    peak = find_peak(device_kind)
    if peak is None:
        return None
    tflops = {"bf16": peak.bf16, "fp32": peak.fp32}[precision]
    return tflops * 1e12 if tflops else None
