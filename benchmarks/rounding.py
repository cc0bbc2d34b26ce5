"""Loss added by rounding a trained model's kernels, and the part that QAT recovers.

QAT is quantization-aware training. The model of `make train` is trained with three seeds. From each
checkpoint it is trained further, once with kernels rounded in the forward pass and once without.
Losses are those of the validation text, per byte, before and after rounding.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zerojax
from benchmarks.default_run import CONFIG, ROOT, run_command
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import RunConfig, load
from zerojax.data.corpus import read_text
from zerojax.models.losses import next_token_of_call
from zerojax.zoo import build_model

NAMES = ("int8", "int4")
SEEDS = (0, 1, 2)
FIRST, FURTHER = 300, 150
"""Numbers of steps without rounding, and of further steps with and without rounding."""
RUN = ("cpu_devices=2", "eval_every=1000", "log.every=50", f"checkpoint.every={FIRST}")
TINY = ("embed_dim=32", "num_layers=2", "global_batch_size=4")
ROWS = 128
"""Number of validation rows."""
MOST_PERPLEXITY, LEAST_RECOVERED = 1.005, 0.5


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row for each seed and format: losses, and the recovered share of the added loss."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS[:1] if smoke else SEEDS:
            rows += _rows_of_seed(Path(folder) / str(seed), seed, smoke)
    goals = []
    for name in NAMES:
        mine = [row for row in rows if row["format"] == name]
        perplexity = max(row["rounded/plain perplexity"] for row in mine)
        recovered = statistics.median(row["recovered"] for row in mine)
        if name == "int8":
            what = "int8: perplexity after rounding / before, largest of the seeds"
            goals.append(Goal(name=what, value=perplexity, limit=MOST_PERPLEXITY))
        else:
            what = f"{name}: share of the loss by rounding that training recovers, median"
            goal = Goal(name=what, value=recovered, limit=LEAST_RECOVERED, at_least=True)
            goals.append(goal)
    notes = [f"zerojax train {CONFIG} {' '.join(RUN)}, {FIRST} steps and {FURTHER} further ones"]
    return Record(name="rounding", rows=rows, goals=goals, notes=notes)


def _rows_of_seed(folder: Path, seed: int, smoke: bool) -> list[dict[str, Any]]:
    first, further = (2, 2) if smoke else (FIRST, FURTHER)
    words = [*RUN, f"seed={seed}", *(TINY if smoke else ())]
    _train(folder / "first", [*words, f"steps={first}"])

    def further_trained(name: str | None) -> Path:
        run = folder / str(name)
        shutil.copytree(folder / "first", run)
        _train(run, [*words, f"steps={first + further}", f"matmul_dtype={name or 'null'}"])
        return run

    plain = further_trained(None)
    unrounded = _loss(plain, None, words)
    rows = []
    for name in NAMES:
        rounded = _loss(plain, name, words)
        trained = _loss(further_trained(f"fake_{name}"), name, words)
        rows.append(
            {
                "seed": seed,
                "format": name,
                "loss": unrounded,
                "rounded_loss": rounded,
                "rounded/plain perplexity": math.exp(rounded - unrounded),
                "trained_rounded_loss": trained,
                "recovered": (rounded - trained) / (rounded - unrounded),
            }
        )
    return rows


def _train(run: Path, words: list[str]) -> None:
    run_command(["train", CONFIG, f"run_dir={run}", *words])


def _loss(run: Path, name: str | None, words: list[str]) -> float:
    """Returns the validation loss of a run, with kernels rounded to `name` unless None."""
    dtype = "null" if name is None else f"fake_{name}"
    config = load(RunConfig, ROOT / CONFIG, [*words, f"matmul_dtype={dtype}"])
    model = zerojax.load_run(
        run, model=build_model(config.model, 256), mesh={"data": 1}, loss=next_token_of_call
    ).to_model()
    length = config.data.seq_len
    ids = np.frombuffer(read_text(None).encode(), np.uint8)[-ROWS * (length + 1) :]
    tokens = ids.reshape(ROWS, length + 1).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    total, weight = jax.jit(lambda batch: next_token_of_call(model, batch))(batch)
    return float(total / weight)


if __name__ == "__main__":
    main()
