"""Known schedules (1F1B, GPipe, interleaved, zero-bubble) as tables.

The papers let a stage start when its input is there. In one compiled program the stages move in
step, so here a tick has one F slot and one B slot and stages fill both (see `Schedule`). The price
is memory: `1f1b` holds 2(p-1-s)+1 microbatches at stage s of p, where the paper's holds p-s.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerojax.plan.schedules.table import Operation, Schedule, locate

Ticks = Mapping[tuple[str, int, int], int]
"""(kind, virtual stage, microbatch) -> tick."""


def assemble(name: str, ticks: Ticks, num_stages: int, placement: str = "loop") -> Schedule:
    """The table in which every operation stands at its tick."""
    cells: list[list[list[Operation]]] = [
        [[] for _ in range(num_stages)] for _ in range(1 + max(ticks.values()))
    ]
    for (kind, virtual, microbatch), tick in ticks.items():
        stage, chunk = locate(placement, num_stages, virtual)
        cells[tick][stage].append(Operation(kind, microbatch, chunk))
    order = "FBW".index
    return Schedule(
        name,
        tuple(
            tuple(tuple(sorted(cell, key=lambda operation: order(operation.kind))) for cell in row)
            for row in cells
        ),
        placement,
    )


def build_gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the opposite order (arXiv:1811.06965).

    Bubble (p-1)/(m+p-1); every stage holds all m microbatches.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for stage in range(p):
        for microbatch in range(m):
            ticks["F", stage, microbatch] = microbatch + stage
            ticks["B", stage, microbatch] = (m + p - 1) + (m - 1 - microbatch) + (p - 1 - stage)
    return assemble("gpipe", ticks, p)


def build_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward and one backward in every tick: the default.

    The bubble is that of 1F1B (arXiv:2104.04473), (p-1)/(m+p-1), also where stages move in step;
    stage s holds min(m, 2(p-1-s)+1) microbatches, however many there are.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for stage in range(p):
        for microbatch in range(m):
            ticks["F", stage, microbatch] = microbatch + stage
            ticks["B", stage, microbatch] = microbatch + 2 * (p - 1) - stage
    return assemble("1f1b", ticks, p)


def build_1f1b_classic(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B as published (arXiv:2104.04473): one operation in a tick.

    Stage s holds min(m, p-s) microbatches. The bubble is (p-1)/(m+p-1) only where stages do not
    wait for each other; in step, half of all slots are empty.
    """
    p, m = num_stages, num_microbatches
    orders = []
    for stage in range(p):
        ahead = min(p - 1 - stage, m)
        order = [("F", microbatch) for microbatch in range(ahead)]
        for microbatch in range(m):
            if ahead + microbatch < m:
                order.append(("F", ahead + microbatch))
            order.append(("B", microbatch))
        orders.append(order)
    ticks: dict[tuple[str, int, int], int] = {}
    # The table is read off by letting every stage go through its order as early as it can.
    free = [0] * p
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, microbatch = order[0]
                needed = _input_of(kind, stage, microbatch, p)
                if needed is not None and needed not in ticks:
                    break
                earliest = 0 if needed is None else ticks[needed] + 1
                ticks[kind, stage, microbatch] = max(free[stage], earliest)
                free[stage] = ticks[kind, stage, microbatch] + 1
                order.pop(0)
    return assemble("1f1b_classic", ticks, p)


def _input_of(kind: str, stage: int, microbatch: int, p: int) -> tuple[str, int, int] | None:
    """The operation of a neighbour (or of the last stage itself) that must come first."""
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    return ("B", stage + 1, microbatch) if stage < p - 1 else ("F", stage, microbatch)


def build_interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B with v chunks on each stage (arXiv:2104.04473, section 2.2).

    Bubble (p-1)/(vm+p-1); stage s holds min(vm, 2(p-1-s)+(v-1)p+1) activations of a v-th of its
    layers. Microbatches go through in groups of p, so m must be a multiple of p.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    ticks = {}
    for virtual in range(p * v):
        chunk, stage = divmod(virtual, p)
        for microbatch in range(m):
            group, place = divmod(microbatch, p)
            start = group * p * v + place
            ticks["F", virtual, microbatch] = start + chunk * p + stage
            ticks["B", virtual, microbatch] = (
                (p * v - 1) + start + (v - 1 - chunk) * p + (p - 1 - stage)
            )
    return assemble("interleaved", ticks, p)


def build_zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose backward is split into B and W (ZB-H1, arXiv:2401.10241).

    Stage s delays its W by s ticks, so that all stages do W in the same m ticks. In step the bubble
    is (p-1)(F+B)/(m(F+B+W)+(p-1)(F+B)); where stages do not wait for each other it is the paper's,
    with (p-1)(F+B-W). Stage s holds min(m, 2p-1-s) microbatches: at most what `1f1b` holds.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for stage in range(p):
        for microbatch in range(m):
            ticks["F", stage, microbatch] = microbatch + stage
            ticks["B", stage, microbatch] = microbatch + 2 * (p - 1) - stage
            ticks["W", stage, microbatch] = microbatch + 2 * (p - 1)
    return assemble("zb_h1", ticks, p)


def build_zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Split backward with the model folded over the stages like a V (arXiv:2405.15362).

    A microbatch enters every second tick; the two chunks of a stage then never meet, because one is
    an even and the other an odd number of stages from the input. All stages do W in the same 2m
    ticks and hold the same number of activations, 3p-1 of half a stage. The bubble in step is that
    of `zb_h1`, and no V has a smaller one: the last stage does 2m forwards, the first of which is
    p-1 ticks from the input and the last of which is p-1 ticks from the end of the model.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for virtual in range(2 * p):
        for microbatch in range(m):
            ticks["F", virtual, microbatch] = 2 * microbatch + virtual
            ticks["B", virtual, microbatch] = 2 * microbatch + 4 * p - 2 - virtual
    for stage in range(p):
        backwards = sorted(
            (ticks["B", virtual, microbatch], virtual, microbatch)
            for virtual in (stage, 2 * p - 1 - stage)
            for microbatch in range(m)
        )
        for place, (_, virtual, microbatch) in enumerate(backwards):
            ticks["W", virtual, microbatch] = 4 * p - 3 + place
    return assemble("zb_v", ticks, p, "v")


def build_forward(
    num_stages: int, num_microbatches: int, num_chunks: int, placement: str
) -> Schedule:
    """All forwards as early as they can be, for evaluation; backwards follow in mirror order.

    In every tick a stage takes what is ready, first of the lowest group of p microbatches, then of
    the lowest chunk, then of the lowest microbatch.
    """
    p, last = num_stages, num_stages * num_chunks - 1
    ready = {(0, microbatch) for microbatch in range(num_microbatches)}
    done: dict[tuple[int, int], int] = {}
    tick = 0
    while len(done) < (last + 1) * num_microbatches:
        chosen: dict[int, tuple[tuple[int, int, int], tuple[int, int]]] = {}
        for virtual, microbatch in ready:
            stage, chunk = locate(placement, p, virtual)
            rank = microbatch // p, chunk, microbatch
            if stage not in chosen or rank < chosen[stage][0]:
                chosen[stage] = rank, (virtual, microbatch)
        for _, (virtual, microbatch) in chosen.values():
            done[virtual, microbatch] = tick
            ready.remove((virtual, microbatch))
            if virtual < last:
                ready.add((virtual + 1, microbatch))
        tick += 1
    ticks = {("F", *item): at for item, at in done.items()}
    ticks |= {("B", *item): 2 * tick - 1 - at for item, at in done.items()}
    return assemble("forward", ticks, p, placement)
