"""Checks and describes the calls of `zerojax.batch_sum`, `batch_mean` and `gather_batch` in a loss,
which read the rows of all devices, and of `row_numbers`."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.operators.marks import BatchCall
from zerojax.operators.whole_batch import IN_TURN
from zerojax.placement import device_mesh as meshes
from zerojax.placement.table import Placement
from zerojax.tracing.batch_calls import BatchSum, find_batch_sums
from zerojax.tracing.trace import ModelTrace
from zerojax.tracing.trees import format_bytes


def sums_of_trace(trace: ModelTrace, placement: Placement, num_extras: int) -> list[BatchSum]:
    """Finds the calls of `zerojax.batch_sum` and similar functions in a traced loss.

    Args:
      trace: trace of the loss.
      placement: placement table, which says which parameters are trained.
      num_extras: number of arrays in the model's state that are not parameters.
    """
    leaves = placement.leaves
    trained = [not leaves[name].frozen for name in sorted(leaves)]
    return find_batch_sums(trace.jaxpr.jaxpr, trained=trained, num_extras=num_extras)


def check_batch_sums(
    sums: Sequence[BatchSum],
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    num_microbatches: int,
) -> None:
    """Raises if a sum over the batch, or all of its rows, would differ from those on one device.

    Raises:
      ValueError: the summed value is the same on every device, parts of the batch are computed one
        after the other, or rows are gathered of which a device does not hold the whole.
    """
    devices = num_parts(mesh)
    for one in sums:
        if one.kind == "batch_sum" and one.of_model and not one.of_batch:
            raise ValueError(
                "the argument of zerojax.batch_sum depends on the model but not on the "
                f"batch: it is the same on each of {devices} devices, and its sum would be "
                f"{devices} times too large; use the value itself"
            )
    for one in sums:
        if one.kind in _WHY_ONE_MICROBATCH:
            _check_rows_there(one.kind, mesh, num_microbatches)
    if sums and settings.fixed_pieces is not None:
        raise ValueError(f"zerojax.{sums[0].kind} {IN_TURN}")


def _check_rows_there(kind: BatchCall, mesh: Mesh | AbstractMesh, num_microbatches: int) -> None:
    if num_microbatches > 1:
        raise ValueError(
            f"zerojax.{kind} needs all rows of the batch at once, but num_microbatches="
            f"{num_microbatches} computes them in {num_microbatches} parts, "
            f"{_WHY_ONE_MICROBATCH[kind]}"
        )
    for axis, why in _WHY.items():
        if (size := mesh.shape[axis]) > 1:
            raise ValueError(
                f"zerojax.{kind} with {axis}={size} is not supported: {why}; use {axis}=1"
            )


_WHY_ONE_MICROBATCH: dict[BatchCall, str] = {
    "gather_batch": "so that a row would be compared with fewer rows; use num_microbatches=1 and "
    "save memory by a checkpoint (remat), or compare the rows of groups: "
    "jax.vmap(loss_of_group)(batch).mean()",
    "row_numbers": "so that rows of each part would have the same numbers; use num_microbatches=1, "
    "or give the batch an array of row numbers: {'row': np.arange(rows), ...}",
}
_WHY = {
    meshes.CONTEXT: "each device has a part of every sequence, not whole rows",
    meshes.STAGE: "a pipeline computes the batch in parts, one after the other",
}


def describe_batch_sums(
    sums: Sequence[BatchSum], mesh: Mesh | AbstractMesh, num_microbatches: int
) -> list[str]:
    """Describes the sums over the batch in one sentence, with the bytes that devices send for
    them."""
    sums = [one for one in sums if one.kind != "row_numbers"]  # nothing is sent for them
    if not sums:
        return []
    names = " and ".join(f"zerojax.{kind}" for kind in sorted({one.kind for one in sums}))
    count = sum(one.times for one in sums)
    rows = "one microbatch" if num_microbatches > 1 else "the batch"
    line = f"{names}: {count} {'value is' if count == 1 else 'values are'} taken over {rows}"
    devices = num_parts(mesh)
    if devices == 1:
        return [f"{line}, all on one device"]
    sent = bytes_sent(sums, mesh, num_microbatches)
    kinds = {one.kind for one in sums}
    how = ["all-reduces in float32"] if kinds - {"gather_batch"} else []
    how += ["all-gathers"] if "gather_batch" in kinds else []
    return [
        f"{line} of {devices} devices, by {' and '.join(how)}, which are repeated in the "
        "backward pass: at "
        f"most {format_bytes(sent)} sent by each device per step, in addition to weights and "
        "gradients"
    ]


def bytes_sent(sums: Sequence[BatchSum], mesh: Mesh | AbstractMesh, num_microbatches: int) -> int:
    """Returns the number of bytes that one device sends per step for `sums`.

    A ring all-reduce sends 2 (N-1)/N of its array. A gather of rows sends the rows of a device N-1
    times, and so does the sum of their gradients.
    """
    devices = num_parts(mesh)
    ring = {"gather_batch": devices - 1.0, "row_numbers": 0.0}
    return round(
        num_microbatches
        * sum(
            ring.get(one.kind, 2 * (devices - 1) / devices) * one.num_bytes * one.times * one.passes
            for one in sums
        )
    )


def num_parts(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of devices over which the rows and tokens of a microbatch are split."""
    number = 1
    for axis in meshes.PASS_AXES:
        number *= mesh.shape[axis]
    return number
