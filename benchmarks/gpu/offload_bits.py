"""Part "offload_bits": twenty steps with each kind of offload compared with steps on the device.

Only this part would detect a donated array that a copy to the host still reads, since on a CPU
nothing is copied. The compiler is set to be deterministic, since two programs may otherwise use
different kernels for the same product.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zerojax
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source
from benchmarks.gpu.workloads import Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from zerojax.step.reshard import to_portable_state

STEPS = 20
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
SLICES = {"slice_elements": 2**16, "min_elements": 2**10}
TIERS: Mapping[str, Mapping[str, Any]] = {
    "opt_state host": {"opt_state": "host"},
    "opt_state shares": {"opt_state": {"device": 0.4, "host": 0.6}},
    "opt_state nvme": {"opt_state": "nvme"},
    "activations host": {"activations": "host"},
    "params host": {"params": "host", "opt_state": "host"},
}
SAME_PROGRAM = ("opt_state host", "opt_state shares")
"""Kinds of offload whose forward and backward pass equal those on the device, so that results must
be bit-equal. With offloaded layers or layer inputs, and with state in files, another program
computes the results, and sums may have another order: with jax 0.12 on a CPU, bf16, the norm by
which gradients are clipped differs by 4 units in the last place."""
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
"""Tolerance of losses if programs differ, as in part "stages"."""


def main(argv: list[str] | None = None) -> None:
    """Compares and writes the record; exits with an error if bits or losses differ too much."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()  # read when the backend starts
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_default_matmul_precision", "highest")
    with tempfile.TemporaryDirectory() as folder:
        workload = choose_workload("stages", arguments.smoke)
        for record in measure(workload, Path(folder), arguments.smoke):
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)
    failed = [row["tier"] for row in record.rows if "note" in row]
    if failed or not all(goal.is_met for goal in record.goals):
        raise SystemExit(f"not as on the device, or not at all: see the table {failed or ''}")


def measure(workload: Workload, folder: Path, smoke: bool) -> Iterator[Record]:
    """Yields the record after each comparison of a precision and a kind of offload."""
    workload = dataclasses.replace(workload, remat="full")
    rows: list[dict[str, Any]] = []
    goals = []
    for precision, tolerance in list(TOLERANCES.items())[-1 if smoke else 0 :]:
        exact, leaves = _train(workload, precision, {})
        for name, offload in TIERS.items():
            began = time.perf_counter()
            row: dict[str, Any] = {"precision": precision, "tier": name}
            rows.append(row)
            own = folder / f"{precision}_{name.replace(' ', '_')}"
            more = {"folder": str(own)} if name == "opt_state nvme" else {}
            try:
                losses, found = _train(workload, precision, {**offload, **more, **SLICES})
            except Exception as error:  # the other kinds of offload may still work
                row["note"] = f"{type(error).__name__}: {error}"[:300]
                yield Record(name="offload_bits", rows=rows, goals=goals)
                continue
            difference = float(np.max(np.abs(losses - exact)))
            unequal = sum(found[key] != leaves[key] for key in leaves)
            row |= {"max_loss_difference": difference, "unequal_arrays": unequal}
            row |= {"arrays": len(leaves), "last_loss": float(losses[-1])}
            row["seconds"] = time.perf_counter() - began
            of = f"{precision}, {name}"
            if name in SAME_PROGRAM:
                goals.append(Goal(name=f"{of}: arrays with other bits", value=unequal, limit=0))
            else:
                name = f"{of}: largest loss difference"
                goals.append(Goal(name=name, value=difference, limit=tolerance))
            yield Record(name="offload_bits", rows=rows, goals=goals)


def _train(
    workload: Workload, precision: str, offload: Mapping[str, Any]
) -> tuple[np.ndarray, dict[str, bytes]]:
    """Returns (losses, {path: bytes} of the portable state, which does not depend on offload)."""
    source = make_source(workload)
    plan = zerojax.make_plan(
        make_factory(workload),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch=source.batch(0),
        optimizer=make_optimizer(),
        precision=precision,
        offload=dict(offload),
    )
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    losses = []
    for index in range(STEPS):
        state, metrics = step(state, zerojax.shard_batch(plan, source.batch(index)))
        losses.append(metrics["loss"])
    found = np.array([float(loss) for loss in losses])
    paths = jax.tree.leaves_with_path(to_portable_state(plan, state))
    return found, {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in paths}


if __name__ == "__main__":
    main()
