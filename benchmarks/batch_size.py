"""Validation loss of a GPT by batch size at equal tokens, by rule for the learning rate.

A large batch takes fewer updates for the same tokens, so its loss is higher. The table shows how
much of this a rule for the learning rate recovers, and a ramp of the batch. Every run sees the same
rows of Shakespeare's bytes in the same order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

import zerojax
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import BatchRamp, LogConfig, ModelConfig
from zerojax.zoo import build_model

NUM_DEVICES = 2
RULES = (None, "sqrt", "linear")
RAMP = "ramp"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; the defaults are those of the full measurement."""

    layers: int = 2
    heads: int = 2
    width: int = 64
    tokens: int = 64
    base: int = 2
    """Rows of the small batch, for which the learning rate is set."""
    factors: tuple[int, ...] = (4, 16)
    """Larger batches, as multiples of the small one."""
    steps: int = 2048
    """Number of steps with the small batch; divisible by the factors."""
    rate: float = 2e-3
    """Learning rate of the small batch. Of 1e-3, 2e-3, 4e-3 and 8e-3, the losses of the last three
    differ by 0.03 (one seed)."""
    evaluated: int = 512
    """Rows of an evaluation."""
    seeds: int = 3


SMOKE = Sizes(
    layers=1,
    heads=1,
    width=16,
    tokens=16,
    base=4,
    factors=(2,),
    steps=8,
    rate=1e-3,
    evaluated=32,
    seeds=1,
)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    write_record(measure(SMOKE if arguments.smoke else Sizes()), arguments, load_before)


def measure(sizes: Sizes) -> Record:
    """Measures a row for each batch size and rule: mean of the validation losses of all seeds."""
    rows: list[dict[str, Any]] = [_row(sizes, sizes.base, None)]
    for factor in sizes.factors:
        rows += [_row(sizes, factor * sizes.base, rule) for rule in RULES]
    rows.append(_row(sizes, sizes.factors[-1] * sizes.base, RAMP))
    first = rows[0]["loss"]
    for row in rows:
        row["minus_small_batch"] = row["loss"] - first
    notes = [
        f"GPT-2 of {sizes.layers} layers of width {sizes.width} on Shakespeare's bytes, rows of "
        f"{sizes.tokens} tokens, {sizes.steps * sizes.base} rows in all, {sizes.seeds} seed(s), "
        f"{NUM_DEVICES} virtual devices, float32; the default optimizer with rate {sizes.rate:g} "
        f"for {sizes.base} rows, cosine and a warm-up of a tenth, both by tokens",
        f"{RAMP}: from {sizes.base} rows to the full batch in half of the rows, rule sqrt",
        "loss: validation after the last step, in nats per byte",
    ]
    return Record(name="batch_size", rows=rows, goals=_goals(sizes, rows), notes=notes)


def _goals(sizes: Sizes, rows: list[dict[str, Any]]) -> list[Goal]:
    """Returns the goals, for the smallest of the larger batches: rules are for such factors."""
    loss = {(row["rows"], row["rule"]): row["loss"] for row in rows}
    small, large = sizes.base, sizes.base * sizes.factors[0]
    plain = loss[large, "none"]
    best = min(loss[large, "sqrt"], loss[large, "linear"])
    return [
        Goal(
            name=f"{large} rows - {small} rows",
            value=plain - loss[small, "none"],
            limit=0.0,
            at_least=True,
        ),
        Goal(name=f"{large} rows, best rule - none", value=best - plain, limit=0.0),
    ]


def _row(sizes: Sizes, rows: int, rule: str | None) -> dict[str, Any]:
    found = [_train(sizes, rows, rule, seed) for seed in range(sizes.seeds)]
    losses = [loss for loss, _ in found]
    row = {
        "rows": rows,
        "rule": rule or "none",
        "updates": found[0][1],
        "loss": float(np.mean(losses)),
    }
    print(row, flush=True)
    return row


def _train(sizes: Sizes, rows: int, rule: str | None, seed: int) -> tuple[float, int]:
    """Returns (validation loss, number of updates) of a run over all rows."""
    config = ModelConfig(
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        embed_dim=sizes.width,
        max_seq_len=sizes.tokens,
    )
    total = sizes.steps * sizes.base
    ramp, steps = None, total // rows
    if rule == RAMP:
        increment = max(sizes.base, (rows - sizes.base) // 5)
        ramp = zerojax.BatchRampConfig(start=sizes.base, increment=increment, ramp_rows=total // 2)
        steps = _steps_until(BatchRamp(config=ramp, final=rows), total)
    optimizer = zerojax.OptimizerConfig(
        learning_rate=sizes.rate,
        schedule_unit="tokens",
        warmup_tokens=total * sizes.tokens // 10,
        scaling=None if rule is None else "sqrt" if rule == RAMP else rule,
        base_batch=None if rule is None else sizes.base,
    )
    trainer = zerojax.train(
        build_model(config, 256),
        {"zero": 1},
        optimizer=optimizer,
        steps=steps,
        seq_len=sizes.tokens,
        global_batch_size=rows,
        batch_ramp=ramp,
        eval_batches=sizes.evaluated // rows,
        seed=seed,
        run_dir=None,
        log=LogConfig(console="quiet"),
    )
    return trainer.evaluations[-1]["loss"], steps


def _steps_until(ramp: BatchRamp, rows: int) -> int:
    """Returns the largest number of steps that have at most `rows` rows."""
    steps = 0
    while ramp.rows_before(steps + 2) <= rows:
        steps += 1
    return steps


if __name__ == "__main__":
    main()
