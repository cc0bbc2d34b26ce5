"""Writes the rest of a state beside a durable store, so that a killed run resumes from its files.

A step writes one generation: new contents of all buckets, and one file with every part of the state
that is in no bucket (counters, random key, position of the data, parameters too small for slices).
The file is written before the generation is committed, and the previous file is kept until then.
Weights are not written; they are recomputed from the masters.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint.arrays import array_of_parts
from zerojax.checkpoint.store import BucketStore, StoreError
from zerojax.checkpoint.store.direct_io import replace_file
from zerojax.checkpoint.store.manifest import NAME as MANIFEST
from zerojax.checkpoint.store.manifest import load_manifest
from zerojax.config.regular_files import open_regular
from zerojax.parallel.offload.disk import (
    DiskState,
)
from zerojax.parallel.offload.disk_places import disk_leaves
from zerojax.parallel.offload.disk_step import build_weights
from zerojax.plan.make import Plan
from zerojax.plan.state import TrainState
from zerojax.plan.state_layout import store_folder
from zerojax.runtime.bounded_json import loads
from zerojax.tracing.trees import flatten_names, unflatten_like

_FROZEN, _OF_GENERATION = "frozen.npz", re.compile(r"state-(\d+)\.npz")
_ABOUT = "about"
_OF_ARCHIVES = (zipfile.BadZipFile, zlib.error, NotImplementedError)


def write_rest(plan: Plan, disk: DiskState, state: TrainState) -> None:
    """Writes the parts of the state that are in no bucket (slice of optimizer state in a file).

    Raises:
      OSError: the disk reports an error.
    """
    folder, generation = disk.store.folder, disk.store.generation + 1
    if not disk.has_frozen:
        replace_file(folder / _FROZEN, _packed(flatten_names(state["frozen"]), {}))
        disk.has_frozen = True
    about = {"data_state": disk.data_state, "signature": _signature(plan)}
    replace_file(folder / f"state-{generation}.npz", _packed(_rest(plan, state), about))
    for path in _rest_files(folder):
        if _generation_of(path) < generation - 1:
            path.unlink()


def rest_writer(
    plan: Plan, state: TrainState, data_state: dict[str, Any] | None
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


def resume_step(plan: Plan) -> int | None:
    """Returns the step of the last complete generation in the plan's folder; None: there is none.

    Raises:
      StoreError: this version did not write the contents of the folder.
    """
    if not _may_be_there(plan):
        return None
    folder = store_folder(plan.settings.offload)
    manifest = load_manifest(folder)  # only this: a scratch store may be mixed and is not used
    path = folder / f"state-{manifest.generation}.npz"
    if not manifest.durable or not path.exists():
        return None
    step = _unpacked(path)[0].get("step")
    if step is None or step.ndim or step.dtype.kind not in "iu":
        raise StoreError(
            f"{path} has no step number, so this version of zerojax did not write it; delete "
            "its folder to continue from the last checkpoint"
        )
    return int(step)


def resume(plan: Plan) -> tuple[TrainState, dict[str, Any] | None]:
    """Returns (state, position of the data) of the last complete generation.

    Call it only if `resume_step` returned a step.

    Raises:
      AnotherPlanError: the files are of another model, optimizer, mesh, order of layers or slicing.
      StoreError: the files are damaged.
    """
    folder = store_folder(plan.settings.offload)
    store, disk = BucketStore.open(folder), None
    try:
        arrays, about = _unpacked(folder / f"state-{store.generation}.npz")
        if about.get("signature") != _signature(plan):
            raise AnotherPlanError(
                f"{folder} holds the optimizer state of a run with another model, optimizer, "
                "mesh, order of layers or slicing. Resume with the settings of that run and save "
                "a checkpoint, which fits any mesh, or delete the folder to continue from the "
                "last checkpoint"
            )
        disk = DiskState(store, disk_leaves(plan))
        arrays |= {f"frozen/{n}": x for n, x in _unpacked(folder / _FROZEN)[0].items()}
        disk.has_frozen = True
        state = _place(plan, arrays)
        disk.add_pages(plan)
        state["params"] |= build_weights(plan, disk.leaves, disk, {})
    except BaseException:
        store.close() if disk is None else disk.close()
        raise
    state["params"] = {name: state["params"][name] for name in plan.abstract_state["params"]}
    state["disk"] = disk
    return state, about.get("data_state")


def _may_be_there(plan: Plan) -> bool:
    offload = plan.settings.offload
    on_disk = plan.offload is not None and bool(plan.offload.on_disk)
    return on_disk and offload.durable and (store_folder(plan.settings.offload) / MANIFEST).exists()


def _rest(plan: Plan, state: Any) -> dict[str, Any]:
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


def _place(plan: Plan, arrays: dict[str, np.ndarray]) -> Any:
    """Places arrays of a resumed state on the devices, except weights that are recomputed from
    master weights.
    """
    abstract = plan.abstract_state
    wanted = _rest(plan, abstract) | flatten_names({"frozen": abstract["frozen"]})

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return array_of_parts(leaf.shape, leaf.sharding, lambda part: np.array(arrays[name][part]))

    placed = {name: place(name, leaf) for name, leaf in wanted.items()}
    kept = {n: x for n, x in abstract["params"].items() if f"params/{n}" in placed}
    return unflatten_like({**abstract, "params": kept, "disk": {}}, placed)


def _signature(plan: Plan) -> str:
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
    return json.dumps([plan.fingerprint, dict(plan.mesh.shape), devices, slices])


def _packed(arrays: dict[str, Any], about: dict[str, Any]) -> bytes:
    hosts = {name: np.asarray(x) for name, x in arrays.items()}
    kinds = {name: (x.dtype.name, x.shape) for name, x in hosts.items()}
    text = json.dumps({**about, "kinds": kinds}).encode()
    raw: dict[str, Any] = {n: np.frombuffer(x.tobytes(), np.uint8) for n, x in hosts.items()}
    raw[_ABOUT] = np.frombuffer(text, np.uint8)
    file = io.BytesIO()
    np.savez(file, **raw)
    return file.getvalue()


def _unpacked(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads a file: returns (arrays, metadata).

    Raises:
      StoreError: this version did not write the file.
      OSError: the system reports an error.
    """
    try:
        with open(open_regular(path, follow=False), "rb") as opened, np.load(opened) as file:
            about = loads(file[_ABOUT].tobytes())
            arrays = {
                name: file[name].view(np.dtype(dtype)).reshape(shape)
                for name, (dtype, shape) in about.pop("kinds").items()
            }
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, *_OF_ARCHIVES) as error:
        raise StoreError(
            f"{path}: damaged ({type(error).__name__}); delete its folder to continue from the "
            "last checkpoint"
        ) from error
    return arrays, about


def _rest_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _OF_GENERATION.fullmatch(path.name)]


def _generation_of(path: Path) -> int:
    found = _OF_GENERATION.fullmatch(path.name)
    assert found is not None
    return int(found[1])
