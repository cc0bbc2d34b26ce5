"""Finds the mesh options of `zerojax.train(model, "auto")` for the devices of this machine."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from zerojax.checkpoint.agreement import computed_by_process_0, first_text
from zerojax.config import MeshConfig
from zerojax.config.display import show
from zerojax.config.loader import from_dict, to_dict
from zerojax.data import local_rows_of_mesh
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import Gpu, gpu_of_device
from zerojax.placement.device_mesh import make_mesh, num_data_shards
from zerojax.training.run_spec import RunSpec
from zerojax.training.search_runs import PlannedCall, find_for

AUTO = "auto"
"""Value of `mesh_config` that asks for a search of the mesh options."""
SECONDS = 120.0
"""Duration of the search; a compilation that has begun is finished. A later start finds compiled
plans in the forecast cache."""


def with_found_settings(spec: RunSpec) -> RunSpec:
    """Returns the run with the mesh options and number of microbatches that fit and cost the least
    time.

    Collective: process 0 searches, and the others take its result. `num_microbatches`, if given, is
    kept. CPU devices and cards without a description keep the
    default options; a reason says so.

    Args:
      spec: description of the run with the default mesh options.

    Raises:
      ValueError: nothing fits the devices, or the rows of a batch are divided among processes in
        another way than with the default options.
      CompilerMissing: the compile-only client is not installed (`zerojax[plan]`).
    """
    assert isinstance(spec.mesh, MeshConfig)
    device, count = jax.devices()[0], jax.device_count()
    card = gpu_of_device(device.device_kind)
    if card is None:
        why = f'mesh_config="auto": default settings; no card is known as {device.device_kind!r}'
        return dataclasses.replace(spec, reasons=(*spec.reasons, why))
    mesh, microbatches, sentence = computed_by_process_0(lambda: _search(spec, card, count))
    if mesh is None:
        raise ValueError(f'mesh_config="auto": {sentence}')
    settings = from_dict(MeshConfig, mesh)
    _check_rows(spec, settings)
    inputs = dataclasses.replace(spec.inputs, num_microbatches=microbatches)
    reason = f'mesh_config="auto": {sentence}'
    return dataclasses.replace(spec, mesh=settings, inputs=inputs, reasons=(*spec.reasons, reason))


def _search(spec: RunSpec, card: Gpu, count: int) -> tuple[dict[str, Any] | None, int | None, str]:
    """Searches; returns (mesh options, number of microbatches, sentence about the result)."""
    missing = compile_client.missing()
    if missing is not None:
        raise compile_client.CompilerMissing(
            f'mesh_config="auto" compares compiled plans, but {missing}'
        )
    is_quiet = spec.log is None or spec.log.console == "quiet"
    if not is_quiet:
        show(f"searching settings for {count} x {card.title}, {SECONDS:.0f} s at most ...")
    assert isinstance(spec.mesh, MeshConfig)
    call = PlannedCall(inputs=spec.inputs, settings=spec.mesh, mesh_options=spec.mesh_options)
    kept = spec.inputs.num_microbatches
    found = find_for(call, card, count, budget=SECONDS, num_microbatches=kept)
    mesh = None if found.mesh is None else to_dict(found.mesh)
    return mesh, found.num_microbatches, found.result.sentence


def _check_rows(spec: RunSpec, found: MeshConfig) -> None:
    """Raises if processes would need other rows of a batch than those they already divided.

    Raises:
      ValueError: the devices of a process have other rows in the found mesh than in the default
        one.
    """
    assert isinstance(spec.mesh, MeshConfig)
    if jax.process_count() == 1:
        return
    now, then = (make_mesh(settings) for settings in (spec.mesh, found))
    # Both meshes divide this size evenly, and ranges of another size are in proportion.
    size = math.lcm(num_data_shards(now), num_data_shards(then))
    differ = local_rows_of_mesh(now, size) != local_rows_of_mesh(then, size)
    # Collective, so that all processes raise.
    if first_text("differs" if differ else None) is not None:
        raise ValueError(
            'mesh_config="auto" found settings in which processes read other rows of a batch than '
            f"with the default settings, by which batches are divided already; pass {found} as "
            "mesh_config"
        )
