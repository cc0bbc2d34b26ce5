"""Checks the settings of a run that shall have the same bits on every mesh, chooses its
microbatches and compiler options, and describes them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.hardware import compile_client
from zerojax.optim.precision import Precision
from zerojax.placement import device_mesh as meshes

FIXED_ROUNDING_OPTIONS = {"xla_allow_excess_precision": False}
"""Compiler options that keep every cast as written. By default XLA removes a cast to bfloat16 that
is cast back at once, and which casts it removes depends on collectives between them, and so on the
mesh."""

FIXED_KERNELS_OPTIONS = {"xla_gpu_deterministic_ops": True}
"""Compiler options without kernels that sum in undefined order and without autotuned kernels."""


def check_elementwise(settings: MeshConfig, tx: Any) -> None:
    """Raises if `deterministic` is set and the optimizer's update is not elementwise.

    Raises:
      ValueError: the message states the optimizers whose update is elementwise.
    """
    if settings.fixed_pieces is None or getattr(tx, "begin", None) is not None:
        return
    kernel = getattr(tx, "kernel", None)
    what = f"the optimizer {kernel}" if kernel else "a plain optax transformation"
    raise ValueError(
        f"deterministic='mesh' needs an elementwise update, but {what} may combine elements of "
        "a shard, and shards "
        "differ between meshes; use zerojax.adamw, lion or sgd"
    )


def check_equal_bits(settings: MeshConfig, mesh: Mesh | AbstractMesh, precision: Precision) -> None:
    """Raises if deterministic='mesh' cannot give the same bits on every mesh.

    Raises:
      ValueError: axes, offload or precision with which results would depend on the mesh.
    """
    asked, count = "deterministic='mesh'", settings.fixed_pieces
    if count is None:
        return
    for axis in [name for name in meshes.AXES if name != meshes.DATA]:
        if mesh.shape[axis] > 1:
            raise ValueError(
                f"{asked} with {axis}={mesh.shape[axis]}: sums over `{axis}` depend on its size; "
                f"use {axis}=1, or leave deterministic out"
            )
    shards = mesh.shape[meshes.DATA]
    if count % shards:
        fewer = max(n for n in range(1, shards) if count % n == 0)
        remedy = f"use {fewer} devices (data={fewer})"
        if shards == _near_power(shards):
            remedy = f"use virtual_shards={shards}, or {fewer} devices (data={fewer})"
        raise ValueError(
            f"{asked} with data={shards}: virtual_shards={count} is not divisible by {shards} "
            f"devices; {remedy}"
        )
    if not settings.offload.is_off:
        raise ValueError(
            f"{asked} together with offload: the order in which slices of state are updated "
            "differs with the mesh; leave offload or deterministic out"
        )
    if precision.accumulate_dtype != jnp.float32:
        raise ValueError(
            f"{asked} accumulates in float32, but accumulate_dtype is "
            f"{jnp.dtype(precision.accumulate_dtype).name}; use accumulate_dtype='fp32'"
        )


def microbatches_of_equal_bits(
    settings: MeshConfig, mesh: Mesh | AbstractMesh, num_microbatches: int | None
) -> int | None:
    """Returns the number of microbatches: the user's, or with deterministic='mesh' the number that
    follows from virtual_shards.

    Raises:
      ValueError: the user's number contradicts virtual_shards.
    """
    count, shards = settings.fixed_pieces, mesh.shape[meshes.DATA]
    if count is None:
        return num_microbatches
    needed = count // shards
    if num_microbatches not in (None, needed):
        raise ValueError(
            f"num_microbatches={num_microbatches} contradicts deterministic='mesh', which computes "
            f"virtual_shards={count} pieces on {shards} data shards, {needed} on each; leave "
            f"num_microbatches out, or use virtual_shards={_near_power(num_microbatches * shards)}"
        )
    return needed


def fixed_options(mesh: Mesh | AbstractMesh) -> tuple[dict[str, Any], dict[str, str]]:
    """Chooses the compiler options with which a step rounds and sums in one way on every mesh.

    Args:
      mesh: mesh of the devices; an abstract mesh gets no options.

    Returns:
      ({option: value}, {option: reason why this compiler does not use it}).
    """
    if not isinstance(mesh, Mesh):
        return {}, {}
    options, is_cuda = dict(FIXED_ROUNDING_OPTIONS), compile_client.is_cuda(mesh)
    options |= FIXED_KERNELS_OPTIONS if is_cuda and meshes.are_here(mesh) else {}
    known, dropped = compile_client.keep_known_options(mesh, options)
    if is_cuda and not meshes.are_here(mesh):
        why = "the compile-only client cannot disable autotuning; on GPUs the option is set"
        dropped |= dict.fromkeys(FIXED_KERNELS_OPTIONS, why)
    return known, dropped


def describe_equal_bits(settings: MeshConfig, num_microbatches: int) -> list[str]:
    """Describes the effect of the setting `deterministic`; returns [] if it is not set."""
    count = settings.fixed_pieces
    if count is None:
        return []
    lines = [
        f"deterministic='mesh': the same bits on any number of devices that divides {count}, each "
        f"of which computes {num_microbatches} of {count} virtual shards in sequence"
    ]
    if settings.zero >= 2:
        lines.append("gradients of each virtual shard are exchanged separately")
    elif num_microbatches > 1:
        lines.append("gradients are sent as float32 sums, once per step")
    return lines


def _near_power(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()
