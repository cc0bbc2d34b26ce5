"""A mixture of experts beside the dense model with equal active parameters, on Shakespeare.

Both models have the settings of `examples/19_mixture_of_experts.py`, on one device, with the same
text and the same seeds. They differ only in the MLP: two of eight experts of width 64 for each
byte, or one MLP of width 128 for all bytes.
"""

from __future__ import annotations

import statistics
from typing import Any

import zerojax
from benchmarks.machine import load_average
from benchmarks.recording import Record, parse_arguments, write_record
from zerojax.config import ModelConfig, MoEConfig

SIZES: dict[str, Any] = {"name": "llama", "num_layers": 2, "num_heads": 4, "embed_dim": 64}
DENSE: dict[str, Any] = {"mlp_dim": 128}
MIXTURE: dict[str, Any] = {"moe": MoEConfig(num_experts=8, experts_per_token=2, expert_dim=64)}
SEEDS, STEPS, EVERY = (0, 1, 2), 500, 100


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row per seed and evaluation, with both validation losses.

    The notes have the mean difference over seeds, and the imbalance of experts at the end.
    """
    seeds, steps, every = (SEEDS[:2], 4, 2) if smoke else (SEEDS, STEPS, EVERY)
    rows: list[dict[str, Any]] = []
    fullest = []
    for seed in seeds:
        dense, mixture = (_train(seed, steps, every, mlp) for mlp in (DENSE, MIXTURE))
        fullest.append(float(mixture.metrics["moe_fullest"]))
        for one, other in zip(dense.evaluations, mixture.evaluations, strict=True):
            rows.append(
                {
                    "seed": seed,
                    "step": one["step"],
                    "dense_validation_loss": one["loss"],
                    "mixture_validation_loss": other["loss"],
                    "mixture_minus_dense": other["loss"] - one["loss"],
                }
            )
    means = [
        f"{_mean_difference(rows, step):+.3f} after {step:g} steps"
        for step in dict.fromkeys(row["step"] for row in rows)
    ]
    notes = [
        f"one device, batches of 16 rows of 64 bytes, AdamW with a learning rate of 3e-3, {steps} "
        "steps; a byte of the mixture meets as many parameters as one of the dense model, but for "
        "the router",
        f"mixture minus dense, mean over {len(seeds)} seeds: {', '.join(means)}",
        "load of the fullest expert relative to the mean, last step of each seed: "
        + ", ".join(f"{x:.2f}" for x in fullest),
    ]
    return Record(name="mixture", rows=rows, notes=notes)


def _train(seed: int, steps: int, every: int, mlp: dict[str, Any]) -> zerojax.Trainer:
    model = zerojax.zoo.build_model(ModelConfig(**SIZES, max_seq_len=64, **mlp), 256)
    return zerojax.train(
        model,
        {"data": 1},
        global_batch_size=16,
        optimizer=zerojax.adamw(3e-3),
        steps=steps,
        eval_every=every,
        seed=seed,
        run_dir=None,
    )


def _mean_difference(rows: list[dict[str, Any]], step: int) -> float:
    return statistics.mean(row["mixture_minus_dense"] for row in rows if row["step"] == step)


if __name__ == "__main__":
    main()
