"""Compiles a step for GPUs that are not there, and reads facts from the compiled program."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax.forecasting import forecast_cache
from zerojax.forecasting.hlo.communication import Collective, find_collectives
from zerojax.forecasting.hlo.costs import hbm_bytes
from zerojax.forecasting.hlo.host_copies import HostCopy, find_host_copies
from zerojax.forecasting.hlo.live_buffers import LiveAtPeak, read_live
from zerojax.forecasting.hlo.overlap import find_overlap
from zerojax.forecasting.hlo.program import Instruction, Program, read_program
from zerojax.forecasting.hlo.timeline import read_timeline
from zerojax.forecasting.roles import bytes_by_role
from zerojax.forecasting.step_contents import line_of_instruction, read_largest, read_sent
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import Gpu, target_text
from zerojax.operators.context import SCOPE
from zerojax.operators.cudnn_attention import FORWARD as FUSED_ATTENTION
from zerojax.optim.matrices import SCOPE as MATRICES
from zerojax.plan.make import Plan

FACTS_VERSION = 11
"""Version of `Facts` in cache keys. Increase it when the readers of programs change, so that
cached results expire."""

Facts = dict[str, Any]
"""Facts that are read from a compiled step, as plain values that JSON can store."""


def cache_key(plan: Plan, gpu: Gpu, fast: bool, *, program: str) -> str:
    """Returns the cache key of a compiled step's facts: a hash of everything that determines them.

    The program's text contains neither compiler options nor the assignment of devices to nodes, so
    both are added to the hash.
    """
    options = {**plan.program.options, **(compile_client.FAST_OPTIONS if fast else {})}
    mesh = {str(name): size for name, size in plan.mesh.shape.items()}
    return forecast_cache.key_of(
        FACTS_VERSION,
        program,
        [target_text(gpu), gpu.node_devices, mesh],
        [compile_client.compiler_version(fast=fast), options],
    )


def digest_of_lines(lowered: jax.stages.Lowered) -> str:
    """Returns a hash of a program with the lines of its sources, which its cache key ignores."""
    return forecast_cache.key_of(lowered.as_text(debug_info=True))


def compile_facts(
    lowered: jax.stages.Lowered,
    plan: Plan,
    devices: Sequence[Any] | None,
    fast: bool,
    lines: str | None,
) -> Facts:
    """Compiles a step and reads it.

    Args:
      lines: `digest_of_lines`, to read what collectives send as well; None: only the rest.
    """
    own = {} if devices is None else plan.program.options  # otherwise `jax.jit` has them
    with tempfile.TemporaryDirectory(prefix="zerojax-plan-") as folder:
        compiled = compile_client.compile_for_gpus(
            lowered,
            devices=devices,
            options={**own, **(compile_client.FAST_OPTIONS if fast else {})},
            dump=Path(folder),
        )
        live = read_live(Path(folder))
    return read_facts(compiled, plan, devices=devices, live=live, lines=lines)


def read_facts(
    compiled: compile_client.CompiledProgram,
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
    live: LiveAtPeak | None = None,
    lines: str | None = None,
) -> Facts:
    """Reads a compiled step.

    Args:
      compiled: the compiled step.
      plan: its plan.
      devices: devices of the plan in the order of an abstract mesh; None: those of the plan's mesh.
      live: the compiler's report of live buffers; None: there is none, and the roles are unknown.
      lines: as in `compile_facts`.
    """
    roles = None if live is None else bytes_by_role(live, plan)
    program = read_program(compiled.text)
    collectives = find_collectives(program, plan.mesh.size)
    overlap = find_overlap(program, collectives)
    nodes = nodes_of(plan.mesh if devices is None else devices)
    axes = {one.name: axes_of(one.group, plan.mesh) for one in collectives}
    rows = [_collective_facts(one, axes[one.name], nodes) for one in collectives]
    copies, names = find_host_copies(program), _Names(program)
    # What arrays collectives send is read only if it is asked for: it needs the lines of the
    # sources.
    sent = {}
    if lines is not None:
        arrays = read_sent(program, collectives, axes, plan)
        largest = [] if live is None else read_largest(live, plan)
        sent = {
            "lines": lines,
            "sent": [dataclasses.asdict(one) for one in arrays],
            "largest": [dataclasses.asdict(one) for one in largest],
        }
    return {
        **sent,
        "memory": dataclasses.asdict(compiled.memory),
        "roles": roles,
        "collectives": rows,
        "host_copies": [_copy_facts(copy) for copy in copies],
        "timeline": read_timeline(program, collectives, copies, overlap, name_of=names.number),
        "places": names.known,
        "hbm_bytes": hbm_bytes(program),
        "unknown_loops": list(program.unknown_loops),
        "by_cublas": compiled.by_cublas,
        "calls_cudnn": FUSED_ATTENTION in compiled.text,
    }


class _Names:
    """Names of kernels for people: the user's line, or what a kernel without one does."""

    def __init__(self, program: Program):
        self._program = program
        self._numbers: dict[str, int] = {}

    @property
    def known(self) -> list[str]:
        return list(self._numbers)

    def number(self, instruction: Instruction) -> int:
        """Returns the number of an instruction's name in `known`."""
        return self._numbers.setdefault(self._name(instruction), len(self._numbers))

    def _name(self, instruction: Instruction) -> str:
        line = line_of_instruction(self._program, instruction)
        if line is not None:
            return line
        in_passes = any(word in instruction.op_name for word in ("jvp(", "transpose("))
        return "forward and backward pass, no line of a model" if in_passes else "the update"


def _collective_facts(one: Collective, axes: str, nodes: Sequence[int]) -> Facts:
    return {
        "kind": one.kind,
        "dtype": one.dtype,
        "axis": axes,
        "of_attention": SCOPE in one.op_name,
        "of_matrices": MATRICES in one.op_name,
        "crosses_nodes": len({nodes[index] for index in one.group}) > 1,
        # The number in the node is that of the first device; `network_share` takes it for all of
        # them.
        "group": [len(one.group), sum(nodes[i] == nodes[one.group[0]] for i in one.group)],
        "times": one.times,
        "payload_bytes": one.payload_bytes,
        "wire_bytes": one.wire_bytes,
        "loop_depth": one.loop_depth,
    }


def _copy_facts(copy: HostCopy) -> Facts:
    return {
        "direction": copy.direction,
        "bytes": copy.bytes,
        "times": copy.times,
        "loop_depth": copy.loop_depth,
        "is_linear": copy.is_linear,
        "is_async": copy.is_async,
        "opposite_bytes": copy.opposite_bytes,
    }


def axes_of(group: Sequence[int], mesh: Mesh | AbstractMesh) -> str:
    """Returns the mesh axes along which the devices of a group differ, such as "data+model".

    A compiled program numbers its devices in the order of the mesh.
    """
    places = np.array(np.unravel_index(list(group), tuple(mesh.shape.values())))
    differ = [name for name, row in zip(mesh.axis_names, places, strict=True) if len(set(row)) > 1]
    return "+".join(map(str, differ)) or "none"


def nodes_of(devices: Mesh | AbstractMesh | Sequence[Any]) -> list[int]:
    """Returns the number of the node of each device, in the order of the mesh."""
    if isinstance(devices, AbstractMesh):
        raise TypeError(
            "the mesh has no devices to compile for; pass devices="
            "zerojax.hardware.compile_client.gpu_devices(gpu, count)"
        )
    every = devices.devices.flat if isinstance(devices, Mesh) else devices
    return [device.process_index for device in every]
