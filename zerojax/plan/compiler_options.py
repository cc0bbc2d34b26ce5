"""Chooses the compiler options of a training step; `tests/gpu_programs/test_gpu_programs.py`
measures their effects on GPU programs."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from zerojax.hardware import compile_client
from zerojax.placement.device_mesh import EXPERT, STAGE, are_here

PREFETCH_OPTIONS = {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
"""Compiler options that start the all-gathers of the next layer before this layer's matrix products
end (prefetch of ZeRO-3). For 1.3 billion parameters on 8 H100 they need 4 MB more. JAX 0.10 does
not know them."""

TWO_AT_ONCE_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
"""Allows two concurrent collectives. For 1.3 billion parameters on 64 H100 in 8 nodes all gathers
are then scheduled beside matrix products (33 % without). Expected steps of 8 H100, with what the
device waits for collectives (JAX 0.12, replayed with one link): 7 billion parameters with 128
microbatches 49.3 -> 47.5 s (4.3 -> 0.6 %), 8 billion with 64 57.6 -> 56.7 s (2.4 -> 0.4 %), at 0.2
GiB more; 70 billion on 64 H200 the same step. Not with experts on one node: mixtures' exchanges
then wait (8x22B on 64 H200 at stage 2: 41.1 -> 43.7 s).
Under a pipeline activations travel beside the gathers: with 1.3 billion parameters on 8 H100,
data 2 x stage 4, three times as many products lie under each message, at 21 MB less."""


UNFILLED_OPTIONS = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}
"""Compiler options with which arrays are not filled with zeros before a loop that overwrites all
their rows, such as the values that a loop over layers stacks for the backward pass. For GPT-2 with
124 million parameters on an H100 this saves 10.5 of 117.3 GB of memory traffic; the peak grows by
0.2 %."""

NO_KERNELS_OPTIONS = {"xla_gpu_experimental_use_collective_kernels": ""}
"""Compiler options with which NCCL alone computes small all-reduces. The compile-only client treats
all nodes as one node, and XLA's own kernel for an array of a few numbers over 64 devices ends the
whole process (JAX 0.12, "size mismatch when packing elements"); over 32 devices it compiles. GPUs
of several nodes do not use this kernel."""
MOST_DEVICES = 32


def choose_options(
    mesh: Mesh | AbstractMesh,
    regather: bool,
    on_host: bool = False,
    *,
    unrolled: bool = False,
    tiled: bool = False,
) -> tuple[dict, dict[str, str]]:
    """Chooses the compiler options of a step.

    Args:
      mesh: mesh of the devices; an abstract mesh and devices other than NVIDIA GPUs get no options.
      regather: whether the step gathers weights inside its loops over layers (ZeRO-3).
      on_host: whether the step keeps arrays in host memory.
      unrolled: whether the gathered weights are read outside of loops over layers, in a loop over
        microbatches. `PREFETCH_OPTIONS` are then left out, because they would pipeline that loop:
        the compiler would gather all weights of the next microbatch beside the weights of the
        current microbatch. Compiled for 8 H100 (JAX 0.12, stage 3, 4 microbatches, 6 MiB of weights
        in bfloat16 in a Python list): 24.1 MiB of temporaries with the options, 9.0 MiB without.
      tiled: whether weights are gathered in tiles, in loops that gather the next tile during the
        product of the current tile. `PREFETCH_OPTIONS` are then left out, because they would
        pipeline these loops and the loops over layers. Compiled for 8 H200 (JAX 0.12), a GPT of a
        trillion parameters then needs 18 GiB instead of 23 GiB.

    Returns:
      ({option: value}, {option: reason why this compiler does not use it}).
    """
    if not isinstance(mesh, Mesh) or not compile_client.is_cuda(mesh):
        return {}, {}
    options: dict[str, Any] = dict(UNFILLED_OPTIONS)
    options |= compile_client.HOST_OPTIONS if on_host else {}
    if regather:
        options |= {} if unrolled or tiled else PREFETCH_OPTIONS
        nodes = {device.process_index for device in mesh.devices.flat}
        is_dense = mesh.shape[EXPERT] == 1 and not tiled and not unrolled
        if len(nodes) > 1 or mesh.shape[STAGE] > 1 or (is_dense and mesh.size > 1):
            options |= TWO_AT_ONCE_OPTIONS
    known, dropped = compile_client.keep_known_options(mesh, options)
    if mesh.size > MOST_DEVICES and not are_here(mesh):
        # A compiler without this option does not have the kernel either.
        known |= compile_client.keep_known_options(mesh, NO_KERNELS_OPTIONS)[0]
    if regather and tiled:
        why = "loops over tiles already gather the next tile in advance (offload.tile_bytes)"
        dropped |= dict.fromkeys(PREFETCH_OPTIONS, why)
    elif regather and unrolled:
        why = "layers outside of loops would all be gathered for the next microbatch, too"
        dropped |= dict.fromkeys(PREFETCH_OPTIONS, why)
    return known, dropped
