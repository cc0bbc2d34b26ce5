"""Executor of a schedule table: one loop over ticks inside a region manual over `stage`.

Everything here is traced inside a region that is manual over the mesh axis `stage`.

Nothing is differentiated through the loop over ticks. A backward slot runs the backward pass of one
chunk for one microbatch, from what its forward slot left in a buffer; so a table decides what is
alive when. The loop is cut, when it is traced, into runs of ticks that use the same slots, and idle
stages compute along on old values whose results are thrown away: all stages wait for the slowest
one anyway, and a `cond` in its place would put collectives where only some devices get to. Only the
embedding and the head, where no collective is in them, run under a `cond`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.parallel.pipeline.stage import Stage, StageWork
from zerojax.parallel.replicated_sums import over_auto_axes
from zerojax.plan.mesh import STAGE
from zerojax.plan.schedules import ExecutorTable, Run

Arrays = dict[str, Any]
Several = list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """What a pass over all microbatches leaves on a stage; nothing is summed over stages.

    Attributes:
      sums: of the microbatches whose head was computed here.
      chunks, outer: gradients, summed over microbatches; None without a backward pass.
      extras: as they are here afterwards.
      embed_writes, layers_writes, head_writes: names of the extras that each piece writes; of those
        of the layers a stage has written the rows of its own layers.
    """

    sums: Any
    chunks: Arrays | None
    outer: Arrays | None
    extras: Arrays
    embed_writes: Sequence[str]
    layers_writes: Sequence[str]
    head_writes: Sequence[str]


def execute(
    table: ExecutorTable,
    work: StageWork,
    *,
    weights: Arrays,
    fixed: Arrays,
    outer: Arrays,
    rows: np.ndarray,
    extras: Arrays,
    accumulate_dtype: Any,
    activation_spec: Any,
    backward: bool = True,
) -> Results:
    """All microbatches through all stages, forward and backward.

    Args:
      table: of the schedule.
      work: what to compute.
      weights, fixed: trees whose leaves have this stage's rows of the stacks, chunk after chunk.
      outer: weights that are on every stage.
      rows: int32 [stages, chunks, rows of a chunk]: the layer of each, -1 for none.
      extras: {name: array}, the same on every stage.
      accumulate_dtype: dtype in which gradients are added up.
      activation_spec: partition spec of an activation over the axes that are with the compiler.
      backward: False leaves out all but the forward slots.
    """
    stage = lax.axis_index(STAGE)
    machine = Stage(
        table=table,
        work=work,
        weights=weights,
        fixed=fixed,
        outer=outer,
        rows=jnp.asarray(rows)[stage],
        backward=backward,
        send=_build_send(table, activation_spec),
    )
    names, columns = list(table.columns), np.stack(list(table.columns.values()), axis=-1)
    state = machine.start(extras, accumulate_dtype)
    for run in table.runs:
        run = run if backward else _forward_only(run)
        if not (run.forward or run.backward or run.weight):
            continue

        def tick(state: Arrays, cells: jax.Array, run: Run = run) -> tuple[Arrays, None]:
            mine = lax.dynamic_index_in_dim(cells, stage, keepdims=False)
            row = {name: mine[at] for at, name in enumerate(names)}
            return machine.tick(state, row, run), None

        state, _ = lax.scan(tick, state, jnp.asarray(columns[run.start : run.stop]))
    return Results(
        sums=state["sums"],
        chunks=state["chunk grads"] if backward else None,
        outer=state["outer grads"] if backward else None,
        extras=state["extras"],
        embed_writes=machine.embed_writes,
        layers_writes=machine.layers_writes,
        head_writes=machine.head_writes,
    )


def _forward_only(run: Run) -> Run:
    receives = frozenset(item for item in run.receives if item[0] == "activation")
    return run._replace(backward=False, weight=False, receives=receives)


def _build_send(table: ExecutorTable, spec: Any) -> Callable[[jax.Array, str], jax.Array]:
    """`(value, direction) -> what arrives here from the neighbour`, over `stage`."""
    number = table.schedule.num_stages
    right = [(stage, (stage + 1) % number) for stage in range(number)]
    pairs = {"right": right, "left": [(target, source) for source, target in right]}
    if not table.wraps:
        pairs = {name: [p for p in two if abs(p[0] - p[1]) == 1] for name, two in pairs.items()}
        if number == 2:  # both neighbours are the same stage, but only one of them is next to it
            pairs = {"right": [(0, 1)], "left": [(1, 0)]}

    def send(value: jax.Array, direction: str) -> jax.Array:
        if direction == "local":
            return value
        permute = lambda x: lax.ppermute(x, STAGE, pairs[direction])  # noqa: E731
        here = spec if value.ndim == len(spec) else jax.sharding.PartitionSpec()
        return over_auto_axes(permute, here, here)(value)

    return send
