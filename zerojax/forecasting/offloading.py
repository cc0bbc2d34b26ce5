"""Offload in a forecast: bytes per tier, transfers, and what overlaps with them."""

from __future__ import annotations

from typing import Any

from zerojax.config.offload import HOST
from zerojax.forecasting.hlo.host_copies import TO_DEVICE, TO_HOST
from zerojax.forecasting.result import Offload
from zerojax.hardware.gpus import Gpu
from zerojax.plan.counts import role_tiers
from zerojax.plan.offload_costs import buffer_bytes, file_bytes, hiding, moved_bytes
from zerojax.plan.plan import Plan


def offload_numbers(plan: Plan, gpu: Gpu, facts: dict[str, Any] | None) -> Offload | None:
    """None without offload.

    Args:
      facts: what was read from the compiled step, its `host_copies` among it; None: nothing was
        compiled.
    """
    if plan.offload is None:
        return None
    copies = None if facts is None else facts["host_copies"]

    def total(**wanted: Any) -> int | None:
        if copies is None:
            return None
        same = [one for one in copies if all(one[key] == value for key, value in wanted.items())]
        return sum(one["bytes"] * one["times"] for one in same)

    number, tiers = min(plan.mesh.size, gpu.node_devices), role_tiers(plan)
    generations = 2 if plan.settings.offload.durable else 1
    return Offload(
        tiers=tiers,
        moved=moved_bytes(plan),
        hiding=hiding(plan, gpu),
        compiled_to_device=total(direction=TO_DEVICE),
        compiled_to_host=total(direction=TO_HOST),
        by_kernels=total(is_linear=False),
        machine_host=number * sum(own.get(HOST, 0) for own in tiers.values())
        + buffer_bytes(plan, plan.offload, number),
        machine_disk=generations * file_bytes(plan, number),
    )
