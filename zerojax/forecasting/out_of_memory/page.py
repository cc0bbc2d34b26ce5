"""Text of the page about an out-of-memory error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from zerojax.forecasting.out_of_memory.living import Device, Living
from zerojax.forecasting.out_of_memory.message import Asked
from zerojax.forecasting.remedies import PRICES, Remedy
from zerojax.models.trees import format_bytes

START = "out of memory"
"""How the page begins: by this it is found among an error's notes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """What is shown.

    Attributes:
      asked: what did not fit; activity: while this was done.
      device: where.
      sizes: {role: bytes per device} of the plan; source: where activations are known from.
      living: the largest arrays.
      excess: bytes too many, as far as known.
      remedies: the cheapest first.
      profile: file for `pprof`, if one could be written.
    """

    asked: Asked
    activity: str
    device: Device
    sizes: Mapping[str, int]
    source: str
    living: tuple[Living, ...]
    excess: int | None
    remedies: tuple[Remedy, ...]
    profile: Path | None


def draw(page: Page) -> str:
    """At most one screen, 100 columns."""
    lines = [f"{START} in {page.activity}: {_asked(page.asked)}", ""]
    lines += _row("device", _device(page.device))
    total = sum(page.sizes.values())
    lines += _row("plan", f"{format_bytes(total)} on each device at the peak ({page.source}):")
    ordered = sorted(page.sizes.items(), key=lambda item: item[1], reverse=True)
    lines += [f"            {format_bytes(size):>10}  {role}" for role, size in ordered]
    if page.living:
        lines += _row("lives now", "the largest arrays, on each device:")
    for one in page.living:
        several = f" ({one.count} of them)" if one.count > 1 else ""
        lines.append(f"            {format_bytes(one.size):>10}  {one.name}{several}")
    lines += ["", *_remedies(page)]
    if page.profile is not None:
        lines += ["", f"What made each array: pprof -top {page.profile}"]
    return "\n".join(lines)


def _row(label: str, text: str) -> list[str]:
    return [f"{label:<11} {text}"]


def _asked(asked: Asked) -> str:
    if asked.size is None:
        return asked.text
    if asked.by_compiler:
        return f"the compiled step needs {format_bytes(asked.size)}"
    return f"{format_bytes(asked.size)} ({asked.size:,} bytes) were asked for in one piece"


def _device(device: Device) -> str:
    words = [f"{device.name}: {format_bytes(device.in_use)} in use"]
    if device.limit is not None:
        by = f" by {device.source}" if device.source else ""
        words.append(f"limit {format_bytes(device.limit)}{by}")
    if device.free is not None:
        words.append(f"{format_bytes(device.free)} left")
    return ", ".join(words)


def _remedies(page: Page) -> list[str]:
    if not page.remedies:
        return [
            "No setting of this plan takes notably less: use more devices, or ones with more memory"
        ]
    lines = ["The cheapest settings that take less (savings by formula, for each device):"]
    for remedy in page.remedies:
        assert remedy.saving is not None
        assert remedy.price is not None
        enough = page.excess is not None and remedy.saving >= page.excess
        lines.append(f"  {remedy.words}")
        saves = f"saves about {format_bytes(remedy.saving)}{', enough' if enough else ''}"
        lines.append(f"      {saves}: {remedy.why}")
        lines.append(f"      costs {PRICES[remedy.price]}")
    return lines
