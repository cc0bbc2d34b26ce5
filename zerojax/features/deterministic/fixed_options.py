"""Chooses the compiler options of a step that has the same bits on every mesh."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from zerojax.hardware import compile_client
from zerojax.placement.device_mesh import are_here

FIXED_ROUNDING_OPTIONS = {"xla_allow_excess_precision": False}
"""Compiler options that keep every cast as written. By default XLA removes a cast to bfloat16 that
is cast back at once, and which casts it removes depends on collectives between them, and so on the
mesh."""

FIXED_KERNELS_OPTIONS = {"xla_gpu_deterministic_ops": True}
"""Compiler options without kernels that sum in undefined order and without autotuned kernels."""


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
    options |= FIXED_KERNELS_OPTIONS if is_cuda and are_here(mesh) else {}
    known, dropped = compile_client.keep_known_options(mesh, options)
    if is_cuda and not are_here(mesh):
        why = "the compile-only client cannot disable autotuning; on GPUs the option is set"
        dropped |= dict.fromkeys(FIXED_KERNELS_OPTIONS, why)
    return known, dropped
