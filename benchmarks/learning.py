"""Loss and FLOPs of a curriculum of the row length and of layer drop, compared with plain training.

All runs train the same model on the same rows of Shakespeare with the same number of steps. FLOPs
are those of the compiled row lengths, so that tokens of weight 0 count too, and those of the number
of layers that layer drop is expected to keep in each step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
import numpy as np

import zerojax
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import LogConfig, ModelConfig
from zerojax.plan.counts import model_flops
from zerojax.training.step_programs import CountedWork
from zerojax.zoo import build_model

NUM_DEVICES = 2
SHARE = 0.4
"""Share of the steps in which the row length grows."""
PLAIN, CURRICULUM, LAYER_DROP = "plain", "curriculum", "layer_drop"
THETA, FALLS = 0.5, 10
"""Settings of layer drop: theta, and gamma times the number of steps."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; the defaults are those of the full measurement."""

    layers: int = 12
    heads: int = 4
    width: int = 64
    tokens: int = 256
    shortest: int = 8
    rows: int = 4
    steps: int = 400
    points: int = 4
    seeds: int = 3


SMOKE = Sizes(layers=1, heads=1, width=16, tokens=64, rows=2, steps=10, points=2, seeds=1)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    write_record(measure(SMOKE if arguments.smoke else Sizes()), arguments, load_before)


def measure(sizes: Sizes) -> Record:
    """Measures a row for each evaluation: losses and work of both ways, means over the seeds."""
    runs: dict[str, list[_Result]] = {PLAIN: [], CURRICULUM: [], LAYER_DROP: []}
    for seed in range(sizes.seeds):
        for way, results in runs.items():
            results.append(_train(way, seed, sizes))
            print(f"seed {seed}: {way}: {results[-1].losses[-1]:.4f}", flush=True)
    plain, short, dropped = runs[PLAIN], runs[CURRICULUM], runs[LAYER_DROP]
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            **{f"{way}_loss": _mean(results, place) for way, results in runs.items()},
            **{
                f"{way}_work": results[0].work[place] / plain[0].work[-1]
                for way, results in runs.items()
            },
        }
        for place, step in enumerate(plain[0].steps)
    ]
    first = short[0]
    goals = [
        Goal(name="work at equal steps", value=first.work[-1] / plain[0].work[-1], limit=0.80),
        Goal(name="compiled steps per length", value=first.compiled / first.rungs, limit=1.0),
        Goal(name="work of layer drop", value=dropped[0].work[-1] / plain[0].work[-1], limit=0.80),
        Goal(name="loss of layer drop", value=_mean(dropped, -1) / _mean(plain, -1), limit=1.01),
    ]
    notes = [
        f"GPT-2 of {sizes.layers} layers of width {sizes.width} on Shakespeare's bytes, "
        f"{sizes.rows} x {sizes.tokens} tokens a step, {sizes.steps} steps, {sizes.seeds} seeds, "
        f"{NUM_DEVICES} virtual devices, zero=1, float32; the default optimizer",
        f"rows grow from {sizes.shortest} to {sizes.tokens} tokens over {SHARE:.0%} of the steps",
        f"layer drop: theta={THETA}, gamma={FALLS / sizes.steps:g}",
        "loss: validation, whole rows, all layers; work: FLOPs so far, as a part of all of the "
        "plain run",
    ]
    return Record(name="learning", rows=rows, goals=goals, notes=notes)


@dataclasses.dataclass(frozen=True)
class _Result:
    """The evaluations of one run."""

    steps: list[int]
    losses: list[float]
    work: list[float]
    compiled: int
    rungs: int


def _train(way: str, seed: int, sizes: Sizes) -> _Result:
    config = ModelConfig(
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        embed_dim=sizes.width,
        max_seq_len=sizes.tokens,
    )
    curriculum = zerojax.CurriculumConfig(
        type="seqlen", min_length=sizes.shortest, total_steps=round(SHARE * sizes.steps)
    )
    layer_drop = zerojax.LayerDropConfig(theta=THETA, gamma=FALLS / sizes.steps)
    with _counting() as compiled:
        trainer = zerojax.train(
            build_model(config, 256),
            {"zero": 1},
            steps=sizes.steps,
            seq_len=sizes.tokens,
            global_batch_size=sizes.rows,
            curriculum=curriculum if way == CURRICULUM else None,
            layer_drop=layer_drop if way == LAYER_DROP else None,
            eval_every=sizes.steps // sizes.points,
            seed=seed,
            run_dir=None,
            log=LogConfig(console="quiet"),
        )
    steps = [int(one["step"]) for one in trainer.evaluations]
    plan = trainer.plan
    if (drop := plan.features.get("layer_drop")) is not None:
        whole = model_flops(plan) / drop.work()
        work = [whole * sum(map(drop.work, range(step))) for step in steps]
    elif plan.ladder is None:
        work = [model_flops(plan) * step for step in steps]
    else:
        counted = CountedWork(plan)
        work = [counted.flops(0, step) for step in steps]
    losses = [one["loss"] for one in trainer.evaluations]
    rungs = 1 if plan.ladder is None else len(plan.ladder.plans)
    return _Result(steps, losses, work, len(compiled), rungs)


@contextlib.contextmanager
def _counting() -> Iterator[list[str]]:
    """Collects the names of the training steps that are compiled in the block."""
    found: list[str] = []

    def listen(event: str, _: float, **facts: Any) -> None:
        if event.endswith("backend_compile_duration") and facts.get("fun_name") == "jit(step)":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _mean(results: list[_Result], place: int) -> float:
    return float(np.mean([one.losses[place] for one in results]))


if __name__ == "__main__":
    main()
