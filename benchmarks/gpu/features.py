"""Part "features": runs of `zerojax train` with one feature each, on the GPU and on the CPU.

Both run the same steps, in float32 with exact products, so their losses differ only by rounding.
16-bit runs use the device's default products. Each run is a separate process, so that a crash does
not end the others. Features that exist only on GPUs (kernels) are compared with the plain run on
the CPU. After --seconds no run is started, and running ones are ended.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 6
COMMON = (
    "model.embed_dim=256",
    "model.max_seq_len=128",
    "model.remat=full",
    "global_batch_size=16",
    f"steps={STEPS}",
    "eval_every=null",
    "log.every=1",
    "mesh.zero=3",
)
TINY = ("model.embed_dim=32", "model.num_layers=2", "global_batch_size=4", "data.seq_len=32")
AT_ONCE = 8
"""Number of runs at the same time; most of their time is spent on importing and compiling."""
Platform = Literal["cpu", "gpu"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run with one feature.

    Attributes:
      words: overrides of `configs/tiny_shakespeare.yaml`; FOLDER is replaced by an empty folder.
      limit: largest allowed loss difference; 1e-5 is float32 rounding over six steps of AdamW.
      against: overrides of the run on the CPU, if they differ.
    """

    words: tuple[str, ...] = ()
    limit: float = 1e-5
    against: tuple[str, ...] | None = None


FILES = ("mesh.offload.params=nvme", "mesh.offload.folder=FOLDER", "mesh.offload.min_elements=100")
HOST = ("mesh.offload.params=host", "mesh.offload.opt_state=host", "mesh.offload.min_elements=100")
BF16 = ("precision=bf16",)
CODES = ("model.lora.rank=8", "model.lora.alpha=16")
EXPERTS = ("model.moe.num_experts=8", "model.moe.experts_per_token=2", "model.moe.expert_dim=128")
BY_CODES = 1e-3
"""Limit for quantized weights: a value between two codes may be rounded to either."""
OF_BF16 = 2e-2

CASES: Mapping[str, Case] = {
    "plain": Case(),
    "gpt2": Case(("model.name=gpt2",)),
    "layers in files": Case(FILES),
    "layers and their inputs in files": Case((*FILES, "mesh.offload.activations=nvme")),
    "layers in files, in tiles": Case((*FILES, "mesh.offload.tile_bytes=65536")),
    "layers in host memory": Case(HOST),
    "layers in host memory, in tiles": Case((*HOST, "mesh.offload.tile_bytes=65536")),
    "4 microbatches": Case(("num_microbatches=4",)),
    "layer drop": Case(("layer_drop.theta=0.5", "layer_drop.gamma=0.2")),
    "experts": Case(EXPERTS, limit=1e-4),
    "8-bit Adam": Case(("optimizer.name=adam8bit",), limit=BY_CODES),
    "Lion": Case(("optimizer.name=lion", "optimizer.learning_rate=3e-4"), limit=BY_CODES),
    "LAMB": Case(("optimizer.name=lamb",)),
    "adapters, nf4": Case((*CODES, "freeze_dtype=nf4"), limit=BY_CODES),
    "adapters, int8": Case((*CODES, "freeze_dtype=int8"), limit=BY_CODES),
    "float16": Case(("precision=fp16",), limit=OF_BF16),
    "dropout": Case(("model.dropout=0.1",)),
    "losses and MLPs in chunks": Case(("model.loss_chunk=32", "model.mlp_chunk=32")),
    "same bits on any mesh": Case(("mesh.deterministic=mesh",)),
    "kernels, bfloat16": Case((*BF16, "mesh.kernels=mosaic_gpu"), limit=OF_BF16, against=BF16),
    "mosaic_gpu attention, bfloat16": Case(
        (*BF16, "model.attention=mosaic_gpu"), limit=OF_BF16, against=BF16
    ),
    "cuDNN attention, bfloat16": Case(
        (*BF16, "model.attention=cudnn"), limit=OF_BF16, against=BF16
    ),
    "grouped products, bfloat16": Case(
        (*BF16, *EXPERTS, "model.moe.products=grouped"), limit=OF_BF16, against=(*BF16, *EXPERTS)
    ),
}
ON_A_GPU_ALONE = tuple(name for name, case in CASES.items() if case.against is not None)


def main(argv: list[str] | None = None) -> None:
    """Compares and writes the record; exits with an error if losses differ or a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1e9, help="of all runs together")
    arguments = parser.parse_args(argv)
    load_before = load_average()
    ends = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for record in measure(Path(folder), arguments.smoke, ends):
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)
    failed = [row["feature"] for row in record.rows if "note" in row]
    if failed or not all(goal.is_met for goal in record.goals):
        raise SystemExit(f"losses differ, or runs failed: see the table {failed or ''}")


def measure(folder: Path, smoke: bool, ends: float) -> Iterator[Record]:
    """Yields the record after each feature.

    Args:
      folder: folder of the runs.
      smoke: use tiny sizes and three features.
      ends: value of time.monotonic() after which no run is started.
    """
    names = [name for name in CASES if not (smoke and name in ON_A_GPU_ALONE)]
    names = names[:3] if smoke else names
    gpu: Platform = "cpu" if smoke or jax.default_backend() != "gpu" else "gpu"
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    runs: dict[tuple[str, ...], Future[list[float]]] = {}

    def start(pool: ThreadPoolExecutor, platform: Platform, words: tuple[str, ...]) -> None:
        own = folder / f"{platform}_{len(runs)}"
        runs[platform, *words] = pool.submit(_train, own, platform, words, smoke, ends)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name in names:
            words, against = CASES[name].words, CASES[name].against
            for platform, of in ((gpu, words), ("cpu", words if against is None else against)):
                if (platform, *of) not in runs:
                    start(pool, platform, of)
        for name in names:
            began, case = time.perf_counter(), CASES[name]
            row: dict[str, Any] = {"feature": name}
            rows.append(row)
            try:
                found = runs[gpu, *case.words].result()
                of = case.words if case.against is None else case.against
                expected = runs["cpu", *of].result()
                differences = [a - b for a, b in zip(found, expected, strict=True)]
            except Exception as error:  # the other features may still work
                row["note"] = str(error)[-400:] or type(error).__name__
            else:
                difference = max(map(abs, differences))
                row |= {"last_loss": found[-1], "difference": difference}
                row |= {"differences": differences, "waited_s": time.perf_counter() - began}
                title = f"{name}: largest loss difference, {gpu} and cpu"
                goals.append(Goal(name=title, value=difference, limit=case.limit))
            yield Record(name="features", rows=rows, goals=goals)


def _train(
    folder: Path, platform: Platform, words: tuple[str, ...], smoke: bool, ends: float
) -> list[float]:
    """Returns the losses of a run in a separate process."""
    if time.monotonic() > ends:
        raise TimeoutError("left out: time is over")
    folder.mkdir()
    is_exact = not any(word in words for word in ("precision=bf16", "precision=fp16"))
    words = tuple(word.replace("FOLDER", str(folder / "files")) for word in words)
    devices = "cpu_devices=null" if platform == "gpu" else "cpu_devices=1"
    options = (*COMMON, *(TINY if smoke else ()), f"run_dir={folder / 'run'}", devices, *words)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment["JAX_PLATFORMS"] = "cuda,cpu" if platform == "gpu" else "cpu"
    if is_exact:
        environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerojax", "train", "configs/tiny_shakespeare.yaml", *options],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(min(max(ends - time.monotonic(), 1), 1e6))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        if status:
            raise RuntimeError(f"status {status} on the {platform}: {log.read()[-350:]}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    if len(losses) != STEPS:
        raise RuntimeError(f"{len(losses)} losses of {STEPS} steps on the {platform}")
    return losses


if __name__ == "__main__":
    main()
