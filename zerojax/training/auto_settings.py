"""Finds the mesh options of `zerojax.train(model, "auto")` for the devices of this machine."""

from __future__ import annotations

import dataclasses

import jax

from zerojax.config import MeshConfig
from zerojax.config.display import show
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import gpu_of_device
from zerojax.training.run_spec import RunSpec
from zerojax.training.search_runs import PlannedCall, find_for

AUTO = "auto"
"""As `mesh_config`: search the mesh options."""
SECONDS = 120.0
"""Duration of the search; a compilation that has begun is finished. A later start finds compiled
plans in the forecast cache."""


def with_found_settings(spec: RunSpec) -> RunSpec:
    """Returns the run with the mesh options and microbatches that cost the least time and fit.

    `num_microbatches`, if given, is kept. CPU devices and cards without a description keep the
    default options; a reason says so.

    Args:
      spec: with the default mesh options.

    Raises:
      ValueError: there are several processes, or nothing fits the devices.
      CompilerMissing: the compile-only client is not installed (`zerojax[plan]`).
    """
    assert isinstance(spec.mesh, MeshConfig)
    if jax.process_count() > 1:
        raise ValueError(
            f'mesh_config="auto" searches in one process, and this job has {jax.process_count()}; '
            "search with `zerojax plan SCRIPT --search`, and pass the settings it prints"
        )
    device, count = jax.devices()[0], jax.device_count()
    card = gpu_of_device(device.device_kind)
    if card is None:
        why = f'mesh_config="auto": default settings; no card is known as {device.device_kind!r}'
        return dataclasses.replace(spec, reasons=(*spec.reasons, why))
    missing = compile_client.missing()
    if missing is not None:
        raise compile_client.CompilerMissing(
            f'mesh_config="auto" compares compiled plans, but {missing}'
        )
    is_quiet = spec.log is None or spec.log.console == "quiet"
    if not is_quiet:
        show(f"searching settings for {count} x {card.title}, {SECONDS:.0f} s at most ...")
    call = PlannedCall(inputs=spec.inputs, settings=spec.mesh, mesh_options=spec.mesh_options)
    kept = spec.inputs.num_microbatches
    found = find_for(call, card, count, budget=SECONDS, num_microbatches=kept)
    if found.mesh is None:
        raise ValueError(f'mesh_config="auto": {found.result.sentence}')
    inputs = dataclasses.replace(spec.inputs, num_microbatches=found.num_microbatches)
    reason = f'mesh_config="auto": {found.result.sentence}'
    return dataclasses.replace(
        spec, mesh=found.mesh, inputs=inputs, reasons=(*spec.reasons, reason)
    )
