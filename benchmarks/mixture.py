"""A mixture of experts beside the dense model with equal active parameters, on Shakespeare.

Both runs have the settings of `make train`, on two devices, and differ only in the MLP: two of
eight experts of width 256 for each token, or one MLP of width 512 for all tokens.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.default_run import CONFIG, run_command
from benchmarks.machine import load_average
from benchmarks.recording import Record, parse_arguments, write_record

BOTH = ("cpu_devices=2", "steps=200", "eval_every=20", "log.every=20")
MIXTURE = ("moe.num_experts=8", "moe.experts_per_token=2", "moe.expert_dim=256")
TINY = ("steps=4", "eval_every=2", "embed_dim=32", "num_layers=2", "global_batch_size=4")


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row per evaluation: both validation losses, and the imbalance of experts."""
    with tempfile.TemporaryDirectory() as folder:
        dense = _losses(Path(folder) / "dense", (), smoke)
        mixture = _losses(Path(folder) / "mixture", MIXTURE, smoke)
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "dense_validation_loss": loss,
            "mixture_validation_loss": mixture["eval"][step]["loss"],
            "fullest_expert_over_mean": mixture["train"].get(step, {}).get("moe_fullest"),
        }
        for step, loss in ((step, report["loss"]) for step, report in dense["eval"].items())
    ]
    notes = [
        f"zerojax train {CONFIG} {' '.join(BOTH)}; the mixture with {' '.join(MIXTURE)}",
        "parameters: dense 1.87 million; mixture 5.41 million, of which a token meets 1.88 million",
    ]
    return Record(name="mixture", rows=rows, notes=notes)


def _losses(run: Path, words: tuple[str, ...], smoke: bool) -> dict[str, dict[int, Any]]:
    """Returns {kind of report: {step: report}} of a run."""
    run_command(["train", CONFIG, f"run_dir={run}", *BOTH, *words, *(TINY if smoke else ())])
    found: dict[str, dict[int, Any]] = {"train": {}, "eval": {}}
    for line in (run / "metrics.jsonl").open():
        report = json.loads(line)
        if report["kind"] in found:
            found[report["kind"]][report["step"]] = report
    return found


if __name__ == "__main__":
    main()
