"""Describes the plan of one parameter: its sharding, collectives, update, memory, and names in
checkpoints."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.config.display import printable
from zerojax.config.mesh import DEVICE
from zerojax.optim.optimizer import Optimizer, map_state
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import describe_mesh
from zerojax.placement.layer_stacks import find_row, users_names
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.plan.muon_matrices import exchanges_of_parameter
from zerojax.plan.wire import LeafTransfer, leaf_transfers
from zerojax.tracing import trees

_WIDTH = 11


def explain_parameter(plan: Decisions, name: str) -> str:
    """Formats a page of text about one parameter in a training step.

    Args:
      plan: plan of the run.
      name: name of the parameter, as in `plan.table()`.

    Raises:
      ValueError: there is no such parameter; the message states the nearest name.
    """
    found = find_row(name, plan.stacks)
    leaf = _find(plan, name if found is None else found[0])
    stored = _abstract(plan, leaf)
    of_stack = [] if found is None else [("row", f"{found[1]} of {printable(found[0])}")]
    rows = [
        *of_stack,
        ("stored", f"{_array(leaf.stored_shape, stored.dtype)} split as {_spec(leaf)}"),
        ("", f"{_array(_shard(stored), stored.dtype)} on each device, {_bytes(plan, leaf)}"),
        ("computed", _access(plan, leaf)),
        *[("", line) for line in _tiles(plan, leaf)],
        *[(phase, _words(transfer)) for phase, transfer in _phases(plan, leaf)],
        ("update", _update(plan, leaf)),
        *[("", line) for line in _settings_lines(plan, leaf)],
        *[("", line) for line in _state_lines(plan, leaf)],
        ("memory", _tiers(plan, leaf)),
        ("checkpoint", ", ".join(_names_on_disk(plan, name))),
        *[("because", printable(reason)) for reason in leaf.reasons],
    ]
    shape = leaf.shape if found is None else leaf.shape[1:]
    head = f"{printable(name)}: {_array(shape, stored.dtype)}, mesh {describe_mesh(plan.mesh)}"
    lines = [f"{head}, zero={plan.zero}"]
    previous = None
    for label, text in rows:
        shown = "" if label == previous else label
        lines.append(f"  {shown:<{_WIDTH}}{text}")
        previous = label or previous
    return "\n".join(lines)


def _tiles(plan: Decisions, leaf: LeafPlacement) -> list[str]:
    """Describes the tiles in which the weight of a layer is gathered."""
    tiles = plan.tiles.cut.get(leaf.name)
    if tiles is None:
        return []
    return [f"in {tiles.count} tiles of a layer's weight along its dimension {tiles.dim}"]


def checkpoint_names(plan: Decisions, name: str) -> list[str]:
    """Returns the names of a parameter's arrays in a checkpoint: the parameter itself, then its
    optimizer state."""
    role = "frozen" if name in plan.abstract_portable["frozen"] else "params"
    marked = map_state(
        plan.tx,
        lambda leaf, of: of,
        plan.abstract_portable["opt_state"],
        {trained: trained for trained in plan.abstract_portable["params"]},
    )
    moments = trees.flatten_names({"opt_state": marked})
    return [f"{role}/{name}", *(path for path, of in moments.items() if of == name)]


def _names_on_disk(plan: Decisions, name: str) -> list[str]:
    """Returns the names of a parameter in a checkpoint; for a stacked parameter the names of its
    first and last row."""
    names = users_names(name, plan.stacks)
    if len(names) == 1:
        return checkpoint_names(plan, names[0])
    ends = checkpoint_names(plan, names[0])[0], checkpoint_names(plan, names[-1])[0]
    return [f"{ends[0]} to {ends[1]}"]


def _find(plan: Decisions, name: str) -> LeafPlacement:
    leaves = plan.placement.leaves
    if name not in leaves:
        near = difflib.get_close_matches(name, plan.users_placement.leaves, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}?" if near else "plan.table() lists all"
        raise ValueError(f"{name!r} is not a parameter of this plan; {hint}")
    return leaves[name]


def _abstract(plan: Decisions, leaf: LeafPlacement) -> jax.ShapeDtypeStruct:
    return plan.abstract_stored["frozen" if leaf.frozen else "params"][leaf.name]


def _shard(stored: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    assert stored.sharding is not None
    return stored.sharding.shard_shape(stored.shape)


def _array(shape: Sequence[int], dtype: DTypeLike) -> str:
    return f"{jnp.dtype(dtype).name}[{', '.join(map(str, shape))}]"


def _spec(leaf: LeafPlacement) -> str:
    axes = ("+".join(a) if isinstance(a, tuple) else a or "-" for a in leaf.stored_spec)
    return (
        f"({', '.join(axes)})" if any(leaf.stored_spec) else "nothing: replicated on every device"
    )


def _bytes(plan: Decisions, leaf: LeafPlacement) -> str:
    stored = _abstract(plan, leaf)
    return trees.format_bytes(math.prod(_shard(stored)) * stored.dtype.itemsize)


def _access(plan: Decisions, leaf: LeafPlacement) -> str:
    dtype = jnp.float8_e4m3fn if leaf.eight_bits else plan.precision.compute_dtype
    slices = f", one of {leaf.num_slices} layers at a time" if leaf.num_slices > 1 else ""
    shape = leaf.device_shape(plan.placement.axis_sizes)
    whole = _array(shape[leaf.stack_dims :] if slices else shape, dtype)
    coded = "" if leaf.codes is None else f", decoded from {leaf.codes.kind}"
    if leaf.row_reads is not None:
        return f"{leaf.access.value}, {leaf.row_reads.rows} rows as {_array(shape[1:], dtype)}"
    return f"{leaf.access.value}, as {whole}{slices}{coded}"


def _phases(plan: Decisions, leaf: LeafPlacement) -> list[tuple[str, LeafTransfer | None]]:
    found: list[tuple[str, LeafTransfer | None]] = [
        (t.phase, t) for t in leaf_transfers(plan, leaf)
    ]
    found += [
        (
            "update",
            LeafTransfer(
                phase="update",
                kind="all-to-all",
                over=axes,
                dtype="float32",
                times=2,
                num_bytes=sent,
            ),
        )
        for axes, sent in exchanges_of_parameter(plan, leaf.name)
    ]
    return found or [("wire", None)]


def _words(transfer: LeafTransfer | None) -> str:
    if transfer is None:
        return "nothing is sent"
    times = "once" if transfer.times == 1 else f"{transfer.times:g} times"
    size = trees.format_bytes(transfer.num_bytes)
    where = {"node": " inside a node", "nodes": " between nodes", "": ""}[transfer.within]
    return (
        f"{transfer.kind} over {' x '.join(transfer.over)}{where} in {transfer.dtype}, {times}: "
        f"{size} sent by each device"
    )


def _update(plan: Decisions, leaf: LeafPlacement) -> str:
    if leaf.frozen:
        return "none: it is frozen"
    if not isinstance(plan.tx, Optimizer):
        return "an optax transformation, partitioned by XLA"
    chosen = plan.program.kernels["update"].implementation
    by = "compiled by XLA" if chosen == "xla" else f"by the kernel {chosen}"
    return f"in place on each device's shard, {by}"


def _settings_lines(plan: Decisions, leaf: LeafPlacement) -> list[str]:
    """Returns a line with the factor of the learning rate and the weight decay; [] if they are not
    known."""
    if leaf.frozen or not isinstance(plan.tx, Optimizer) or plan.tx.settings is None:
        return []
    found = plan.tx.settings(plan.abstract_stored["params"])[leaf.name]
    decay = found.weight_decay
    shown = "by schedule" if callable(decay) else f"{decay:g}"
    return [f"learning rate x {found.learning_rate_factor:g}, weight decay {shown}"]


def _stored_names(plan: Decisions, name: str) -> list[str]:
    """Returns the names of a stored parameter's optimizer state in the training state."""
    if name not in plan.stacks:
        return checkpoint_names(plan, name)[1:]
    row = plan.stacks[name][0]
    paths = checkpoint_names(plan, row)[1:]
    return [path.removesuffix(row) + name for path in paths if path.endswith(row)]


def _state_lines(plan: Decisions, leaf: LeafPlacement) -> list[str]:
    leaves = trees.flatten_names(plan.abstract_stored)
    lines = []
    for path in _stored_names(plan, leaf.name):
        if path in leaves:
            array = leaves[path]
            lines.append(f"{_array(_shard(array), array.dtype)} {path} on each device")
    return lines


def _tiers(plan: Decisions, leaf: LeafPlacement) -> str:
    if plan.offload is None or leaf.name not in plan.offload.leaves:
        return DEVICE
    sliced = plan.offload.leaves[leaf.name]
    counts = ", ".join(f"{count} on {tier}" for tier, count in sliced.counts.items() if count)
    weights = "; its weights are on the host" if leaf.name in plan.offload.streamed else ""
    weights = "; its weights are in files" if leaf.name in plan.offload.paged else weights
    return f"optimizer state in {sliced.num_slices} slices: {counts}{weights}"
