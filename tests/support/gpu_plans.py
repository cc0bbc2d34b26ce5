"""Plans and steps for GPUs that this machine does not have."""

from typing import Any

import jax
import numpy as np

import zerojax
from zerojax.hardware import compile_client, gpus


def gpu_mesh(axes: Any = None, *, devices: int = 8, gpu: str = "h100") -> jax.sharding.Mesh:
    """Returns a mesh of described GPUs, by default with all of them on `data`."""
    return zerojax.make_mesh(axes, compile_client.gpu_devices(gpus.find_gpu(gpu), devices))


def text_plan(
    model: Any, rows: int, length: int, *, axes: Any = None, devices: int = 8, **options: Any
) -> zerojax.Plan:
    """Returns the plan of a model of tokens [rows, length], in int32, on so many H100."""
    tokens = jax.ShapeDtypeStruct((rows, length), np.int32)
    return zerojax.make_plan(
        model,
        gpu_mesh(axes, devices=devices),
        example_batch={"tokens": tokens, "targets": tokens},
        **options,
    )


def compile_step(plan: zerojax.Plan) -> compile_client.CompiledProgram:
    """Compiles the step of a plan, without what the compiler would measure on a GPU."""
    lowered = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    return compile_client.compile_for_gpus(lowered, sketch=True)
