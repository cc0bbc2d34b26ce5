"""Reads from a compiled step in which collectives a process first needs each other process.

A process that has not begun a step takes part in none of its collectives. So the first collective
that needs it is the furthest that the other processes can have come (`runtime.hang_map`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from zerojax.forecasting.compiled_facts import axes_of
from zerojax.forecasting.hlo.communication import find_collectives, find_groups
from zerojax.forecasting.hlo.program import read_program
from zerojax.forecasting.step_contents import by_collective, describe_sent, read_sent
from zerojax.plan.make import Plan
from zerojax.runtime.standstill import Meeting


def find_meetings(plan: Plan, text: str) -> list[Meeting]:
    """Returns the collectives in which this process first needs each of the other processes.

    Collectives are in the order in which the compiled program first reaches them. Devices that run
    independent instructions at the same time may reach them in another order.

    Args:
      plan: plan of the step, on devices.
      text: the compiled step, as HLO.
    """
    assert isinstance(plan.mesh, Mesh)
    program = read_program(text)
    collectives = find_collectives(program, plan.mesh.size)
    axes = {one.name: axes_of(one.group, plan.mesh) for one in collectives}
    sent = by_collective(read_sent(program, collectives, axes, plan))
    every = find_groups(program, plan.mesh.size)
    groups = {one.name: every[one.name] for one in collectives if one.name in sent}
    # The compiled program numbers devices in the order of the mesh.
    owners = [device.process_index for device in plan.mesh.devices.flat]
    return [
        Meeting(what=describe_sent(sent[name]), processes=processes)
        for name, processes in first_needs(groups, owners, jax.process_index())
    ]


def first_needs(
    groups: Mapping[str, Sequence[Sequence[int]]], owners: Sequence[int], process: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (name of a collective, processes that no earlier collective needs), in their order.

    Args:
      groups: {name of a collective: its groups of devices}, in the order of the program.
      owners: process of each device.
      process: process whose devices take part; it is not among the returned ones.
    """
    met, found = {process}, []
    for name, all_groups in groups.items():
        owned = ({owners[device] for device in group} for group in all_groups)
        new = {other for group in owned if process in group for other in group} - met
        if new:
            found.append((name, tuple(sorted(new))))
            met |= new
    return found
