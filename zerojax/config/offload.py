"""Options of offload: memory tier of each kind of state."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerojax.config.checks import check_at_least, refuse
from zerojax.config.keywords import names_keywords
from zerojax.config.loader import coerce_fields, parse_text

DEVICE, HOST, NVME = TIERS = ("device", "host", "nvme")
"""Tiers, nearest first: the accelerator's memory, pinned host memory, files on a disk."""
HOST_KIND = "pinned_host"
"""What JAX calls the memory of the tier host; the only kind from which GPUs copy by themselves."""

Shares = tuple[tuple[str, float], ...]


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What of a run lies outside device memory. The default leaves everything on the device."""

    opt_state: str | Shares = DEVICE
    """Memory of moments and float32 master weights: device, host (pinned memory), nvme (files
    on a disk, see folder), or shares of them: {device: 0.4, host: 0.6}. The update moves them
    to the device slice by slice and computes the same bits. With any value but device the
    weights of forward and backward are stored besides, in the compute dtype."""
    params: Literal["device", "host"] = DEVICE
    """Memory of the layer weights that forward and backward read. host: weights are moved to
    the device layer by layer, and gradients back, so that device memory does not grow with
    depth. For models whose layers run in one scan."""
    activations: Literal["device", "host"] = DEVICE
    """Memory of each layer's input until the backward pass. host: one activation per layer
    leaves the device, and layers are recomputed in the backward pass."""
    update_in_backward: bool = False
    """Update each layer as soon as its gradient exists, so that gradients are never stored; for
    the largest models. Needs params: host, one microbatch, no clipping, and bf16 or fp32. A
    non-finite gradient is found after the layers behind it have been updated."""
    folder: str | None = None
    """Folder for the files of nvme. null: next to the run's checkpoints."""
    durable: bool = False
    """Keep two generations on disk, so that a killed run resumes from its last complete step,
    for twice the disk space. false: it resumes from the last checkpoint."""
    slice_elements: int = 2**24
    """Elements of a parameter's shard that are moved and updated at once. The device holds two
    slices of each array: 400 MB for Adam with 16 million elements."""
    min_elements: int = 2**16
    """Elements. Parameters with smaller shards stay on the device: each costs a transfer and
    saves nothing."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "opt_state", _normal_shares(self.opt_state))
        coerce_fields(self)
        check_at_least(self, 1, "slice_elements", "min_elements")
        if self.update_in_backward and self.params != HOST:
            refuse(
                "update_in_backward",
                True,
                "updates layers as they stream through the device; set params: host as well",
            )
        if self.durable and not self.on_disk:
            refuse("durable", True, "concerns files on a disk; set opt_state: nvme, or leave it")

    @property
    def shares(self) -> dict[str, float]:
        """{tier: share of the optimizer's state}, nearest first; they add up to 1."""
        if isinstance(self.opt_state, str):
            return {self.opt_state: 1.0}
        return dict(self.opt_state)

    @property
    def moves_opt_state(self) -> bool:
        """Whether any of the optimizer's state leaves the device."""
        return list(self.shares) != [DEVICE]

    @property
    def on_disk(self) -> bool:
        """Whether any of it lies on a disk."""
        return NVME in self.shares

    @property
    def on_host(self) -> bool:
        """Whether anything lies in host memory."""
        return HOST in self.shares or HOST in (self.params, self.activations)

    @property
    def is_off(self) -> bool:
        """Whether everything stays on the device."""
        return not (self.moves_opt_state or self.on_host)


def _normal_shares(value: Any) -> Any:
    """One tier as text; several as ((tier, share), ...), nearest first."""
    if isinstance(value, str):
        text = str(value)
        if not text.startswith(("{", "[")):
            _check_tier(text)
            return text
        return _normal_shares(parse_text(text))
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (tuple, list)) or not value:
        refuse(
            "opt_state", value, "is no tier; use device, host, nvme, or {device: 0.4, host: 0.6}"
        )
    shares: dict[str, float] = {}
    for pair in value:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            refuse(
                "opt_state", pair, "is no pair of tier and share; write {device: 0.4, host: 0.6}"
            )
        tier, share = pair
        _check_tier(tier)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            refuse("opt_state", share, f"is no share of {tier}; give a number from 0 to 1")
        if tier in shares:
            refuse("opt_state", tier, "is given twice; add its shares up")
        shares[tier] = float(share)
    total = sum(shares.values())
    if abs(total - 1) > 1e-6:
        refuse("opt_state", dict(shares), f"adds up to {total:g}; shares must add up to 1")
    held = tuple((tier, shares[tier]) for tier in TIERS if shares.get(tier))
    return held[0][0] if len(held) == 1 else held


def _check_tier(tier: Any) -> None:
    if tier in TIERS:
        return
    near = {"cpu": HOST, "gpu": DEVICE, "disk": NVME, "none": DEVICE}.get(str(tier).lower())
    near = near or next(iter(difflib.get_close_matches(str(tier), TIERS, 1)), None)
    hint = f"did you mean {near!r}?" if near else "use device, host or nvme"
    refuse("opt_state", tier, f"is not one of {', '.join(TIERS)}; {hint}")
