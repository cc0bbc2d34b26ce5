"""Part "twin": checks on the CPU in float32 that the PyTorch models equal those of zerojax.

`export` writes zerojax's initial parameters, batches and losses; `check` trains the PyTorch model
on them. The two need not run in the same Python environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.workloads import CLIP_NORM, choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, add_arguments, write_record

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 5
LIMIT = 1e-4
KINDS = ("gpt2", "llama")


def main(argv: list[str] | None = None) -> None:
    """Exports and checks in two processes; with `--only`, does one of the two in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--only", choices=("export", "check"))
    parser.add_argument("--folder", type=Path, help="of the exported files")
    arguments = parser.parse_args(argv)
    if arguments.only == "export":
        for kind in KINDS:
            export(kind, arguments.folder)
        return
    load_before = load_average()
    if arguments.only == "check":
        _check(arguments, arguments.folder, load_before)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.twin", "--only", "export"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command += ["--folder", folder]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        _check(arguments, Path(folder), load_before)


def _check(arguments: argparse.Namespace, folder: Path, load_before: float) -> None:
    if importlib.util.find_spec("torch") is None:
        note = "left out: torch is not installed (pip install torch)"
        write_record(Record(name="twin", rows=[], notes=[note]), arguments, load_before)
        return
    rows: list[dict[str, Any]] = []
    goals = []
    for kind in KINDS:
        ours, theirs = compare(kind, folder)
        difference = float(np.max(np.abs(ours - theirs)))
        rows.append(
            {
                "model": kind,
                "steps": STEPS,
                "zerojax_last_loss": float(ours[-1]),
                "torch_last_loss": float(theirs[-1]),
                "max_difference": difference,
            }
        )
        name = f"{kind}, largest loss difference over {STEPS} steps"
        goals.append(Goal(name=name, value=difference, limit=LIMIT))
    write_record(Record(name="twin", rows=rows, goals=goals), arguments, load_before)
    if not all(goal.is_met for goal in goals):
        raise SystemExit("losses of the PyTorch and JAX models differ; do not compare their speeds")


def export(kind: str, folder: Path) -> None:
    """Writes KIND.npz with parameters, batches, and the losses of zerojax's steps."""
    # The checking process may run without JAX.
    import zerojax
    from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source

    workload = choose_workload(kind, smoke=True)
    source = make_source(workload)
    plan = zerojax.make_plan(
        make_factory(workload),
        zerojax.make_mesh({"data": 1}),
        example_batch=source.batch(0),
        optimizer=make_optimizer(),
        precision="fp32",
    )
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    arrays = {f"param:{name}": np.array(value) for name, value in state["params"].items()}
    losses = []
    for index in range(STEPS):
        batch = source.batch(index)
        arrays[f"tokens:{index}"], arrays[f"targets:{index}"] = batch["tokens"], batch["targets"]
        state, metrics = step(state, zerojax.shard_batch(plan, batch))
        losses.append(float(metrics["loss"]))
    np.savez(folder / f"{kind}.npz", losses=np.array(losses), **arrays)


def compare(kind: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns (losses of zerojax, of PyTorch) from the same parameters and batches."""
    import torch  # only where it is installed

    from benchmarks.gpu.torch_model import Decoder, load_jax_parameters, make_optimizer

    with np.load(folder / f"{kind}.npz") as file:
        arrays = dict(file)
    names = [name for name in arrays if name.startswith("param:")]
    model = Decoder(choose_workload(kind, smoke=True))
    load_jax_parameters(model, {name.removeprefix("param:"): arrays[name] for name in names})
    optimizer = make_optimizer(model)
    losses = []
    for index in range(STEPS):
        tokens, targets = (
            torch.from_numpy(arrays[f"{key}:{index}"]).long() for key in ("tokens", "targets")
        )
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return arrays["losses"], np.array(losses)


if __name__ == "__main__":
    main()
