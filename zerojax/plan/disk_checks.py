"""Refusals at plan time of options that slices in files do not support."""

from __future__ import annotations

from zerojax.config.offload import NVME, OffloadConfig
from zerojax.optim.precision import Precision


def check_durable(config: OffloadConfig, precision: Precision, num_processes: int) -> None:
    """Refuses `durable` where a killed run could not go on from files alone.

    Raises:
      ValueError: with what stands against it and what to do.
    """
    if not config.durable:
        return
    remedy = "leave durable out: a killed run then goes on from its last checkpoint"
    others = [tier for tier in config.shares if tier != NVME]
    if others:
        raise ValueError(
            f"offload.durable with opt_state={config.shares}: what lies in {' and '.join(others)} "
            f"memory dies with the process, so files alone are no whole step; set opt_state: nvme, "
            f"or {remedy}"
        )
    if not precision.has_masters:
        raise ValueError(
            "offload.durable with param_dtype=bfloat16: weights are made again from float32 "
            f"masters in the files, and there are none; use param_dtype=float32, or {remedy}"
        )
    if num_processes > 1:
        raise ValueError(
            f"offload.durable with {num_processes} processes: killed between two of their commits, "
            f"they would be left with different steps; use one process, or {remedy}"
        )
