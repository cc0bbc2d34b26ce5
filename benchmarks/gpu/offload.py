"""Part "offload": the host link, the update of offloaded state, and steps with offload.

Results are compared in part `offload_bits`, and the largest models are searched in `largest`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import zerojax
from benchmarks.gpu.offload_torch import torch_link_row
from benchmarks.gpu.prediction import predict_step, shown
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source
from benchmarks.gpu.traced import busy_ms, device_events
from benchmarks.gpu.workloads import Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.measuring import interleave, least_of, median_of, sample
from benchmarks.recording import Goal, Record, add_arguments, write_record
from zerojax.checkpoint.store.rates import measure_rates
from zerojax.config.mesh import SLICE_ELEMENTS
from zerojax.hardware.local_devices import LinkRates, measure_link
from zerojax.plan.offload_costs import moved_bytes

HOST_GB = "100"
"""Limit of pinned host memory in GiB; JAX's default is 64. Read when the backend starts."""
SLICES = (2**22, 2**24, 2**26)
UPDATE_BYTES = 24
"""Bytes per parameter on the link: float32 master and two moments, in each direction."""
UTILISATION, STEP_LIMIT, OVERLAP = 0.85, 1.10, 0.90
MIB = 2**20

Tiers = Mapping[str, Mapping[str, Any]]
TIERS: Tiers = {
    "none": {},
    "opt_state host": {"opt_state": "host"},
    "opt_state host, delayed": {"opt_state": "host", "delayed_update": True},
    "params host": {"params": "host", "opt_state": "host"},
    "update in the backward pass": {
        "params": "host",
        "opt_state": "host",
        "update_in_backward": True,
    },
    "activations host": {"activations": "host"},
    "opt_state half host": {"opt_state": {"device": 0.5, "host": 0.5}},
    "opt_state nvme": {"opt_state": "nvme"},
}
SMOKE_SLICES = {"slice_elements": 2**10, "min_elements": 2**8}


def main(argv: list[str] | None = None) -> None:
    """Measures, and writes the record after each row, so that a late failure loses little."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", HOST_GB)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the device
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after this")
    arguments = parser.parse_args(argv)
    load_before = load_average()
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    predictions: dict[str, Any] = {}

    def is_over() -> bool:
        return time.perf_counter() - began > arguments.seconds

    def keep(row: dict[str, Any], more: list[Goal]) -> None:
        rows.append(row | {"at_s": time.perf_counter() - began})
        goals.extend(more)
        save()

    def foresee(name: str, prediction: dict[str, Any] | None) -> None:
        predictions[name] = prediction
        save()

    def save() -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # the record is shown once, at the end
            record()

    def record() -> None:
        found = Record(name="offload", rows=rows, goals=goals)
        write_record(found, arguments, load_before, predictions=predictions)

    keep(torch_link_row(arguments.smoke), [])  # before JAX allocates memory that it does not return
    rates = _measure_links(arguments.smoke, keep)
    for elements in SLICES[1:2] if arguments.smoke else SLICES:
        if not is_over():
            keep(*_guarded("update", f"slices of {elements}", _update, arguments, rates, elements))
    with tempfile.TemporaryDirectory() as folder:
        disk = _measure_disk(Path(folder), arguments.smoke, keep)
        bare: float | None = None
        for name, offload in TIERS.items():
            if is_over():
                keep({"what": "step", "way": name, "note": "left out: time is over"}, [])
                continue
            files = Path(folder) / name.replace(" ", "_")
            run = _Step(name, offload, files, rates, disk, bare, foresee)
            keep(*_guarded("step", name, run, arguments))
            bare = bare or run.seconds
            gc.collect()
    record()


def _guarded(
    what: str, way: str, measure: Callable[..., Any], *given: Any
) -> tuple[dict[str, Any], list[Goal]]:
    """Returns (row, goals); a failure becomes a note, so that the next row can still run."""
    row = {"what": what, "way": way}
    try:
        more, goals = measure(*given)
    except Exception as error:
        return row | {"note": f"{type(error).__name__}: {error}"[:300]}, []
    return row | more, goals


# --- rates of the link and of the disk ------------------------------------------------------------


def _measure_links(smoke: bool, keep: Callable[..., None]) -> LinkRates:
    """Measures the host link; returns the rates of the largest array, which the goals use."""
    sizes = (MIB,) if smoke else (16 * MIB, 128 * MIB, 1024 * MIB)
    for size in sizes:
        rates = measure_link(num_bytes=size, repeats=2 if smoke else 5)
        row = {"what": "link", "way": f"device_put of {size // MIB} MiB"}
        row |= {"in_GB/s": rates.to_device / 1e9, "out_GB/s": rates.to_host / 1e9}
        keep(row | {"both_GB/s": rates.both / 1e9}, [])
    return rates


def _measure_disk(folder: Path, smoke: bool, keep: Callable[..., None]) -> float | None:
    """Returns bytes per second, read and written at once; None if not measurable."""

    def best() -> tuple[dict[str, Any], list[Goal]]:
        # Tries every number of threads; the best rate is the limit for a pipeline.
        found = list(measure_rates(folder, num_bytes=(4 if smoke else 512) * MIB))
        rates = max(found, key=lambda rates: rates.both)
        row = {"in_GB/s": rates.read / 1e9, "out_GB/s": rates.write / 1e9}
        row |= {"both_GB/s": rates.both / 1e9, "direct": rates.is_direct}
        return row, []

    row, _ = _guarded("disk", "buckets", best)
    keep(row, [])
    return row["both_GB/s"] * 1e9 if "both_GB/s" in row else None


# --- the update alone -----------------------------------------------------------------------------


def _init_vector(shape: tuple[int, int]) -> Callable[[jax.Array], dict[str, jax.Array]]:
    return lambda key: {"w": jax.random.normal(key, shape)}


def _apply_vector(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Computes a forward pass [rows] -> [rows] that is much faster than the update."""
    return x * jnp.mean(params["w"].astype(jnp.float32))


def _square(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    found = model(batch["x"])
    return jnp.sum(jnp.square(found)), jnp.float32(found.size)


def _update(
    arguments: argparse.Namespace, rates: LinkRates, elements: int
) -> tuple[dict[str, Any], list[Goal]]:
    """Times a step of half a billion parameters that consists almost only of the update."""
    shape = (4, 2**12) if arguments.smoke else (32, 2**24)
    batch = {"x": jnp.ones((8,), jnp.float32)}
    offload = SMOKE_SLICES if arguments.smoke else {"slice_elements": elements}
    plan = zerojax.make_plan(
        (_init_vector(shape), _apply_vector),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch=batch,
        loss=_square,
        optimizer=make_optimizer(),
        precision="bf16",
        offload={"opt_state": "host", **offload},
    )
    assert plan.offload is not None
    assert plan.offload.leaves, plan.offload.kept
    seconds, least, busy = _time_steps(
        plan, zerojax.build_step(plan), lambda _: batch, warm_up=2, steps=3, rounds=3
    )
    moved = UPDATE_BYTES * shape[0] * shape[1]
    used = moved / seconds / rates.both
    # A slice is loaded, updated and stored, one direction of the link after the other.
    in_turns = (moved / 2 / rates.to_device + moved / 2 / rates.to_host) / seconds
    row = {"step_ms": 1e3 * seconds, "least_ms": 1e3 * least, "of_link": used, "of_turns": in_turns}
    row |= busy
    name = f"update in slices of {elements}: bytes / time, of the link's both ways"
    is_default = elements == SLICE_ELEMENTS or arguments.smoke
    goal = Goal(name=name, value=used, limit=UTILISATION, at_least=True)
    return row, [goal] if is_default else []


# --- a whole step ---------------------------------------------------------------------------------


class _Step:
    """Trains one model with one kind of offload; `seconds` is the time of a step after the run."""

    def __init__(
        self,
        name: str,
        offload: Mapping[str, Any],
        folder: Path,
        rates: LinkRates,
        disk: float | None,
        bare: float | None,
        foresee: Callable[[str, dict[str, Any] | None], None],
    ) -> None:
        self._name, self._offload, self._folder = name, dict(offload), folder
        self._foresee = foresee
        self._rates, self._disk, self._bare = rates, disk, bare
        self.seconds: float | None = None

    def __call__(self, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
        workload = choose_workload("offload", arguments.smoke)
        plan = self._plan(workload, arguments.smoke)
        source = make_source(workload, 4)
        step = zerojax.build_step(plan)
        predicted = None
        if "nvme" not in self._offload.values():  # files are no part of a program
            predicted = predict_step(plan, step)
            self._foresee(self._name, predicted)
        self.seconds, least, busy = _time_steps(
            plan, step, source.batch, warm_up=2, steps=workload.steps, rounds=workload.rounds
        )
        row = {"step_ms": 1e3 * self.seconds, "least_ms": 1e3 * least, **shown(predicted)}
        row["tokens_per_s"] = workload.tokens_per_step / self.seconds
        row |= busy
        if self._bare is None or not self._offload:
            return row, []
        link, disk = self._moving_seconds(plan)
        ratio = self.seconds / self._bare
        overlap = max(self._bare, link, disk) / self.seconds
        row |= {"link_ms": 1e3 * link, "disk_ms": 1e3 * disk, "/none": ratio, "overlap": overlap}
        of = f"{self._name}, {workload.tokens_per_step} tokens"
        return row, [
            Goal(name=f"{of}: step / step without", value=ratio, limit=STEP_LIMIT),
            Goal(name=f"{of}: overlap", value=overlap, limit=OVERLAP, at_least=True),
        ]

    def _plan(self, workload: Workload, smoke: bool) -> zerojax.Plan:
        offload = dict(self._offload)
        if offload and smoke:
            offload |= SMOKE_SLICES
        in_backward = offload.get("update_in_backward", False)
        if "nvme" in offload.values():
            offload["folder"] = str(self._folder)
        return zerojax.make_plan(
            make_factory(workload),
            zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
            example_batch=make_source(workload, 4).batch(0),
            # An update in the backward pass cannot wait for the norm of all gradients.
            optimizer=make_optimizer(clip_norm=None) if in_backward else make_optimizer(),
            precision="bf16",
            offload=offload,
        )

    def _moving_seconds(self, plan: zerojax.Plan) -> tuple[float, float]:
        """Returns the seconds that link and disk need for a step's bytes at measured rates."""
        moved = moved_bytes(plan)
        link = sum(part.to_device + part.to_host for part in moved) / self._rates.both
        on_disk = sum(part.read + part.written for part in moved)
        return link, on_disk / self._disk if self._disk else 0.0


def _time_steps(
    plan: zerojax.Plan,
    step: Any,
    batch: Callable[[int], Any],
    *,
    warm_up: int,
    steps: int,
    rounds: int,
) -> tuple[float, float, dict[str, float]]:
    """Returns (median, minimum) seconds of a step, and `busy_ms` of one more step."""
    state = [zerojax.init_state(plan)]
    batches = [zerojax.shard_batch(plan, batch(index)) for index in range(2)]

    def run(steps: int) -> Any:
        def one_after_the_other() -> None:
            for index in range(steps):
                state[0], metrics = step(state[0], batches[index % 2])
            jax.block_until_ready((state[0], metrics))

        return sample(one_after_the_other, steps)

    taken = interleave({"step": run}, warm_up=warm_up, steps=steps, rounds=rounds)["step"]
    return median_of(taken, "wall"), least_of(taken, "wall"), _traced(lambda: run(1))


def _traced(run: Callable[[], Any]) -> dict[str, float]:
    """Returns `busy_ms` of one run; nothing on a CPU, whose trace has no device."""
    if jax.default_backend() != "gpu":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return busy_ms(device_events(folder))


if __name__ == "__main__":
    main()
