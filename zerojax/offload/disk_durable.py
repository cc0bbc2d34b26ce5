"""Writes the rest of a state beside a durable store, so that a killed run resumes from its files.

A step writes one generation: new contents of all buckets, and one file with every part of the state
that is in no bucket (counters, random key, position of the data, parameters too small for slices).
The file is written before the generation is committed, and the previous file is kept until then.
Weights are not written; they are recomputed from the masters.

Each process of a run has its own files and commits by itself. No process begins a sweep before all
processes have committed the one before, since the pass between the two needs all processes. So the
files of a killed run are at most one generation apart, and a process that is ahead goes back by
one.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint.agreement import gather
from zerojax.checkpoint.arrays import Index, array_of_parts
from zerojax.checkpoint.store import BucketStore, StoreError
from zerojax.checkpoint.store.direct_io import replace_file
from zerojax.checkpoint.store.manifest import NAME as MANIFEST
from zerojax.checkpoint.store.manifest import load_manifest
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import open_regular
from zerojax.offload.disk import (
    DiskState,
)
from zerojax.offload.disk_errors import failing_together
from zerojax.offload.disk_places import disk_leaves
from zerojax.offload.disk_step import build_weights
from zerojax.placement.decisions import Decisions
from zerojax.placement.state import TrainState
from zerojax.placement.state_layout import store_folder
from zerojax.runtime.bounded_json import loads
from zerojax.tracing.trees import flatten_names, unflatten_like

_FROZEN, _OF_GENERATION = "frozen.npz", re.compile(r"state-(\d+)\.npz")
_ABOUT = "about"
_OF_ARCHIVES = (zipfile.BadZipFile, zlib.error, NotImplementedError)


def write_rest(plan: Decisions, disk: DiskState, state: TrainState) -> None:
    """Writes the parts of the state that are in no bucket (slice of optimizer state in a file).

    Raises:
      OSError: the disk reports an error.
    """
    # The sweep that is about to end commits this generation.
    folder, generation = disk.store.folder, disk.store.generation + 1
    # Frozen parameters do not change, so one file serves all generations.
    if not disk.has_frozen:
        frozen = _packed(flatten_names(state["frozen"]), {"filling": disk.filling})
        replace_file(folder / _FROZEN, frozen)
        disk.has_frozen = True
    about = {
        "data_state": disk.data_state,
        "signature": _signature(plan),
        "filling": disk.filling,
        "generation": generation,
    }
    replace_file(folder / _name_of(generation), _packed(_rest(plan, state), about))
    for path in _rest_files(folder):
        if _generation_of(path) < generation - 1:
            path.unlink()


def rest_writer(
    plan: Decisions, state: TrainState, data_state: dict[str, Any] | None
) -> Callable[[DiskState], None]:
    """Returns a callback that writes the rest of a state when a store is filled during a run.

    The written files allow a killed run to resume.

    Args:
      plan: plan that `state` follows.
      state: training state without the slices of the optimizer state in files; read when the
        callback is called.
      data_state: position of the data.
    """

    def before_commit(disk: DiskState) -> None:
        disk.data_state = data_state
        if disk.store.is_durable:
            write_rest(plan, disk, state)

    return before_commit


class AnotherPlanError(StoreError):
    """Raised if durable files belong to another plan than the one that should resume from them."""


@dataclass(frozen=True)
class Generations:
    """The generations in the files of one process, or of all of them together.

    Attributes:
      generation: the last one; -1: there are no files.
      oldest: the oldest one that the files can go back to.
      filling: see `DiskState.filling`.
    """

    generation: int
    oldest: int
    filling: int


def resume_step(plan: Decisions) -> int | None:
    """Returns the step of the last complete generation in the plan's folder; None: there is none.

    Collective: it is the last generation that all processes have.

    Raises:
      StoreError: this version did not write the contents of the folder, or the files of the
        processes do not belong together.
    """
    generation = _last_generation(plan)
    if generation is None:
        return None
    with failing_together():
        return _read_step(store_folder(plan.settings.offload), generation)


def _last_generation(plan: Decisions) -> int | None:
    """Returns the last generation that the files of all processes have.

    Returns None if there is none, or if the plan has no durable store.
    """
    if plan.offload is None or not plan.offload.on_disk or not plan.settings.offload.durable:
        return None
    folder = store_folder(plan.settings.offload)
    with failing_together():
        own = _find(folder)
    rows = gather(np.array(dataclasses.astuple(own), np.int32)).tolist()
    return common_generation(folder, [Generations(*row) for row in rows])


def common_generation(folder: Path, every: Sequence[Generations]) -> int | None:
    """Returns the last generation that all processes have; None if there is none.

    Args:
      folder: of this process, for messages.
      every: of each process.

    Raises:
      StoreError: the files of the processes do not belong together.
    """
    last = min(own.generation for own in every)
    fits = len({own.filling for own in every}) == 1
    if last > 0 and fits and all(own.oldest <= last for own in every):
        return last
    if max(own.generation for own in every) <= 0:
        return None
    if 0 <= last <= 1:
        return None  # a start was interrupted while the processes filled their files
    has = ", ".join(
        f"process {number}: {'none' if own.generation < 0 else own.generation}"
        for number, own in enumerate(every)
    )
    raise StoreError(
        f"{folder}: the durable files of the processes do not belong together (generations: "
        f"{has}); start the processes that wrote them, or delete the folder of every process to "
        "continue from the last checkpoint"
    )


def _find(folder: Path) -> Generations:
    """Returns the generations in the files in `folder`, those of this process.

    `generation` and `oldest` are -1 without a manifest, and 0 without a durable generation.
    """
    if not (folder / MANIFEST).exists():
        return Generations(-1, -1, 0)
    manifest = load_manifest(folder)  # only this: a scratch store may be mixed and is not used
    last = manifest.generation
    if not manifest.durable or not (folder / _name_of(last)).exists():
        return Generations(0, 0, 0)
    # Going back needs the previous buckets and the rest that was written with them.
    goes_back = manifest.has_previous and (folder / _name_of(last - 1)).exists()
    filling = _unpacked(folder / _name_of(last))[1].get("filling", 0)
    return Generations(last, last - 1 if goes_back else last, filling)


def _read_step(folder: Path, generation: int) -> int:
    path = folder / _name_of(generation)
    step = _unpacked(path)[0].get("step")
    # Arrays are stored as [parts, ...], so a number has one dimension.
    if step is None or step.shape != (1,) or step.dtype.kind not in "iu":
        raise StoreError(
            f"{path} has no step number, so this version of zerojax did not write it; delete "
            "its folder to continue from the last checkpoint"
        )
    return int(step[0])


def resume(plan: Decisions) -> tuple[TrainState, dict[str, Any] | None]:
    """Returns (state, position of the data) of the last complete generation.

    Call it only if `resume_step` returned a step. Collective.

    Raises:
      AnotherPlanError: the files are of another model, number of processes, optimizer, mesh, order
        of layers or slicing.
      StoreError: the files are damaged.
    """
    assert plan.offload is not None
    folder, generation = store_folder(plan.settings.offload), _last_generation(plan)
    disk: DiskState | None = None
    store: BucketStore | None = None
    try:
        with failing_together():
            buffers = plan.offload.num_buffers
            store = BucketStore.open(folder, generation=generation, num_buffers=buffers)
            arrays, about = _unpacked(folder / _name_of(store.generation))
        # Equal in all processes, which filled their files together.
        if about.get("signature") != _signature(plan):
            raise AnotherPlanError(
                f"{folder} holds the optimizer state of a run with another model, number of "
                "processes, optimizer, mesh, order of layers or slicing. Resume with the settings "
                "of that run and save a checkpoint, which fits any mesh, or delete the folder to "
                "continue from the last checkpoint"
            )
        with failing_together():
            disk = DiskState(store, disk_leaves(plan))
            frozen, of_frozen = _unpacked(folder / _FROZEN)
            if of_frozen.get("filling", about.get("filling")) != about.get("filling"):
                raise StoreError(
                    f"{folder / _FROZEN} belongs to another run than {_name_of(store.generation)}: "
                    "a file was copied here; delete the folder to continue from the last checkpoint"
                )
            arrays |= {f"frozen/{n}": x for n, x in frozen.items()}
            disk.has_frozen, disk.filling = True, about.get("filling", 0)
            state = _place(plan, arrays)
            disk.add_pages(plan)
            state["params"] |= build_weights(plan, disk.leaves, disk, {})
    except BaseException:
        if disk is not None:
            disk.close()
        elif store is not None:
            store.close()
        raise
    state["params"] = {name: state["params"][name] for name in plan.abstract_state["params"]}
    state["disk"] = disk
    return state, about.get("data_state")


def _rest(plan: Decisions, state: TrainState) -> dict[str, Any]:
    """Returns the part of a state that is written beside the buckets of a durable store: {name:
    leaf}.

    A durable store has the files from which a killed run resumes; a bucket is one slice of the
    optimizer state. The result lacks frozen parameters, and weights that are recomputed from master
    weights.
    """
    assert plan.offload is not None
    on_disk = {leaf.name for leaf in plan.offload.on_disk}
    kept = {n: x for n, x in state["params"].items() if n not in on_disk}
    return flatten_names({**state, "params": kept, "frozen": {}, "disk": {}})


def _place(plan: Decisions, arrays: dict[str, np.ndarray]) -> Any:
    """Places arrays of a resumed state on the devices, except weights that are recomputed from
    master weights.
    """
    abstract = plan.abstract_state
    wanted = _rest(plan, abstract) | flatten_names({"frozen": abstract["frozen"]})

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        numbers = {part: n for n, part in enumerate(_own_parts(leaf.shape, leaf.sharding))}

        def read(index: Index) -> np.ndarray:
            return np.array(arrays[name][numbers[_start(index)]])

        return array_of_parts(leaf.shape, leaf.sharding, read)

    placed = {name: place(name, leaf) for name, leaf in wanted.items()}
    kept = {n: x for n, x in abstract["params"].items() if f"params/{n}" in placed}
    return unflatten_like({**abstract, "params": kept, "disk": {}}, placed)


def _signature(plan: Decisions) -> str:
    """Returns a text that is equal for two plans whose optimizer state in files has the same
    layout.
    """
    assert plan.offload is not None
    slices = []
    for leaf in plan.offload.on_disk:
        shards = leaf.name, leaf.shard_shape, leaf.axes, leaf.num_shards
        rows = plan.placement.leaves[leaf.name].layer_rows
        layers = () if rows is None else (rows,)
        slices.append((*shards, leaf.slice_elements, *leaf.counts.values(), *layers))
    devices = [device.id for device in plan.mesh.devices.flat] if plan.mesh else []
    processes = jax.process_count()
    return json.dumps([plan.fingerprint, dict(plan.mesh.shape), devices, slices, processes])


def _own_parts(shape: tuple[int, ...], sharding: Any) -> list[tuple[int, ...]]:
    """Returns the starts of the parts of an array that devices of this process hold, in order."""
    places = sharding.addressable_devices_indices_map(shape).values()
    return sorted({_start(index) for index in places})


def _start(index: Index) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


def _packed(arrays: dict[str, jax.Array], about: dict[str, Any]) -> bytes:
    """Returns the contents of a file: of each array the parts of this process, [parts, ...]."""
    hosts = {}
    for name, x in arrays.items():
        parts = {_start(shard.index): shard.data for shard in x.addressable_shards}
        hosts[name] = np.stack([np.asarray(parts[start]) for start in sorted(parts)])
    kinds = {name: (x.dtype.name, x.shape) for name, x in hosts.items()}
    text = json.dumps({**about, "kinds": kinds}).encode()
    # As bytes, because NumPy's files do not store bfloat16; `kinds` has the dtypes.
    raw: dict[str, Any] = {n: np.frombuffer(x.tobytes(), np.uint8) for n, x in hosts.items()}
    raw[_ABOUT] = np.frombuffer(text, np.uint8)
    file = io.BytesIO()
    np.savez(file, **raw)
    return file.getvalue()


def _unpacked(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads a file: returns (arrays, metadata).

    Raises:
      StoreError: this version did not write the file, or it has the name of another generation.
      OSError: the system reports an error.
    """
    try:
        with open(open_regular(path, follow=False), "rb") as opened, np.load(opened) as file:
            about = loads(file[_ABOUT].tobytes())
            arrays = {
                name: file[name].view(np.dtype(dtype)).reshape(shape)
                for name, (dtype, shape) in about.pop("kinds").items()
            }
    # What NumPy, zipfile and JSON raise for damaged files.
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, *_OF_ARCHIVES) as error:
        raise StoreError(
            f"{path}: damaged ({type(error).__name__}); delete its folder to continue from the "
            "last checkpoint"
        ) from error
    named = _OF_GENERATION.fullmatch(path.name)
    if named and about.get("generation", int(named[1])) != int(named[1]):
        raise StoreError(
            f"{path} belongs to generation {quoted(about['generation'])}, not to {named[1]}: the "
            "file was copied or renamed; delete its folder to continue from the last checkpoint"
        )
    return arrays, about


def _name_of(generation: int) -> str:
    return f"state-{generation}.npz"


def _rest_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _OF_GENERATION.fullmatch(path.name)]


def _generation_of(path: Path) -> int:
    found = _OF_GENERATION.fullmatch(path.name)
    assert found is not None
    return int(found[1])
