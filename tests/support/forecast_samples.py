"""Plans and forecasts made by hand, for tests of what is shown, decided and searched."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import ModelConfig
from zerojax.forecasting.forecast_numbers import (
    COMPILED,
    ForecastNumbers,
    Memory,
    RoleBytes,
    Traffic,
    TrafficRow,
)
from zerojax.forecasting.roofline import estimate, verdict
from zerojax.hardware.gpus import Gpu, find_gpu
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.zoo import build_model

GIB = 2**30


@functools.cache
def sample_card(name: str = "h200") -> Gpu:
    """A card with round numbers of its own, whatever the shipped one says."""
    return dataclasses.replace(
        find_gpu(name),
        memory_bytes={"h200": 141, "h100": 79}[name] * GIB,
        bf16_flops=1e15,
        memory_bandwidth={"h200": 4.8e12, "h100": 3.35e12}[name],
        node_devices=8,
        node_bandwidth=450e9,
        network_bandwidth=50e9,
    )


@functools.cache
def sample_plan(
    devices: int = 8,
    zero: int = 1,
    model: int = 1,
    num_microbatches: int = 1,
    remat: str = "none",
    rows: int = 64,
    stage: int = 1,
    delayed: bool = False,
) -> Plan:
    """A Llama of four layers on an abstract mesh."""
    config = ModelConfig(
        name="llama", num_layers=4, num_heads=8, embed_dim=256, max_seq_len=128, remat=remat
    )
    tokens = jax.ShapeDtypeStruct((rows, 128), jnp.int32)
    return make_plan(
        build_model(config, 256),
        make_abstract_mesh({"model": model, "stage": stage}, devices),
        example_batch={"tokens": tokens, "targets": tokens},
        zero=zero,
        num_microbatches=num_microbatches,
        offload={"opt_state": "host", "delayed_update": True} if delayed else {},
    )


def sample_memory(compiled: bool = True, scale: float = 1.0, **roles: int | None) -> Memory:
    """Bytes by role; the formula knows the first four.

    Args:
      scale: on every size.
      **roles: role with "_" for a space -> bytes, instead of the standard ones.
    """
    sizes = {
        "master weights": 3 * GIB + 7,
        "optimizer state": 6 * GIB + 13,
        "gathered weights": 2 * GIB + 1,
        "gradients": 4 * GIB + 5,
        "activations": 20 * GIB + 3,
        "workspace": 37 * 2**20,
        "other": 11,
    }
    sizes |= {name.replace("_", " "): size for name, size in roles.items()}
    sizes = {role: int((size or 0) * scale) for role, size in sizes.items()}
    known = ("master weights", "optimizer state", "gathered weights", "gradients")
    rows = tuple(
        RoleBytes(
            role=role, bytes=size if compiled else None, formula=size if role in known else None
        )
        for role, size in sizes.items()
        if compiled or role in known
    )
    total = sum(sizes.values())
    state = sizes["master weights"] + sizes["optimizer state"]
    return Memory(
        state=state,
        batch=2**20,
        arguments=state + 2**20 if compiled else None,
        outputs=state if compiled else None,
        aliased=state if compiled else None,
        temporary=total - state - 2**20 if compiled else None,
        peak=total if compiled else None,
        host=0,
        formula_peak=sum(row.formula or 0 for row in rows),
        roles=rows,
    )


def sample_row(**changes: Any) -> TrafficRow:
    row = TrafficRow(
        kind="all-gather",
        axis="data",
        dtype="bf16",
        count=192,
        payload_bytes=4 * GIB,
        wire_bytes=4 * GIB - 99_999_999,
        loop_depth=2,
        crosses_nodes=False,
        hidden=0.93,
    )
    return dataclasses.replace(row, **changes)


def sample_forecast(
    plan: Plan | None = None,
    gpu: Gpu | None = None,
    memory: Memory | None = None,
    rows: tuple[TrafficRow, ...] | None = None,
    **changes: Any,
) -> ForecastNumbers:
    """A forecast as `zerojax.forecast` would put it together."""
    plan = plan or sample_plan(zero=3, num_microbatches=4)
    gpu = gpu or sample_card()
    memory = memory or sample_memory()
    devices = plan.mesh.size
    compiled = memory.peak is not None
    if rows is None:
        rows = (
            sample_row(),
            sample_row(kind="reduce-scatter", count=96, wire_bytes=2 * GIB - 3, hidden=0.5),
            sample_row(kind="all-reduce", dtype="f32", count=3, wire_bytes=1_234_567, hidden=0.0),
        )
    rows = rows if compiled and devices > 1 else ()
    total = sum(row.wire_bytes for row in rows)
    formula = 6 * GIB if devices > 1 else 0
    return dataclasses.replace(
        ForecastNumbers(
            gpu=gpu,
            num_devices=devices,
            mesh=dict(plan.mesh.shape),
            plan=plan.as_dict(),
            source=COMPILED,
            why_formula=None,
            compiler="jaxlib 0.12.0, jax-cuda13-pjrt 0.12.0",
            options_dropped={},
            seconds=12.3,
            memory=memory,
            traffic=Traffic(
                rows=rows,
                wire_bytes=total if compiled else None,
                network_bytes=sum(row.network_bytes for row in rows) if compiled else None,
                data_wire_bytes=total if compiled else None,
                formula_bytes=formula,
                unit=2.05 * GIB,
            ),
            estimate=estimate(
                gpu,
                mesh=plan.mesh.shape,
                dtype="bfloat16",
                flops=1.6e14,
                model_flops=1.2e14,
                hbm_bytes=600 * GIB if compiled else None,
                rows=rows,
                formula_bytes=formula,
                tokens=2**20,
            ),
            verdict=verdict(plan, gpu, memory),
        ),
        **changes,
    )
