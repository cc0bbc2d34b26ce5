"""Offload section of a forecast's page."""

from __future__ import annotations

import textwrap

from zerojax.forecasting.result import ForecastNumbers, Offload
from zerojax.models.trees import format_bytes
from zerojax.plan.show_offload import CELL, ROLE, WIDTH, hiding_lines, moved_lines, tier_lines


def offload_section(forecast: ForecastNumbers) -> list[str]:
    """Bytes by tier, what moves by formula and as compiled, and what hides it; [] without any."""
    offload = forecast.offload
    if offload is None:
        return []
    lines = [*tier_lines(offload.tiers), *_per_node(forecast, offload)]
    if offload.moved:
        lines += ["", *moved_lines(offload.moved), *_compiled(offload)]
    if offload.hiding is not None:
        estimate = forecast.estimate
        tokens, step = estimate.tokens_per_second, estimate.step_seconds
        lines += hiding_lines(offload.hiding, round(tokens * step) if tokens and step else None)
    return ["OFFLOAD, by formula", *(f"  {line}".rstrip() for line in lines)]


def _per_node(forecast: ForecastNumbers, offload: Offload) -> list[str]:
    """What a machine with several of these GPUs must have."""
    number = min(forecast.num_devices, forecast.gpu.node_devices)
    sizes = {"host memory": offload.machine_host, "disk": offload.machine_disk}
    needed = [f"{format_bytes(size)} of {words}" for words, size in sizes.items() if size]
    gpus = "one GPU" if number == 1 else f"{number} GPUs"
    return [f"  a machine with {gpus} needs {' and '.join(needed)}"] if needed else []


def _compiled(offload: Offload) -> list[str]:
    """What the compiled program copies."""
    if offload.compiled_to_device is None or offload.compiled_to_host is None:
        return []
    sizes = (offload.compiled_to_device, offload.compiled_to_host)
    cells = "".join(f" {format_bytes(size):>{CELL}}" for size in sizes)
    lines = [f"  {'compiled':<{ROLE}}{cells}"]
    if offload.by_kernels:
        sentence = (
            f"{format_bytes(offload.by_kernels)} of it are copied by kernels, with the processors "
            "that products need"
        )
        lines += textwrap.wrap(sentence, WIDTH, initial_indent="  ", subsequent_indent="    ")
    if any(part.read for part in offload.moved):
        lines.append("  files are read and written behind the compiled program")
    return lines
