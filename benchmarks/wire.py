"""Quantized weights and gradients compared with exact ones on Shakespeare: losses, bytes per step.

Every way has the same batches and initial weights. The devices form two nodes of two, so that
gradients are reduced in two levels.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

import zerojax.data
from benchmarks.machine import load_average
from benchmarks.recipe import ADAMW
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import MeshConfig, ModelConfig
from zerojax.forecasting import hlo
from zerojax.zoo import build_model

NUM_DEVICES, NODE = 4, 2
TEXT = Path(zerojax.data.__file__).parent / "shakespeare.txt"
ROWS, SEQ = 32, 32
STEPS, LAST, EVERY, SEEDS = 1000, 50, 250, 5
SMOKE = {"steps": 4, "last": 2, "every": 2, "seeds": 1}

EXACT, FINEST = "exact", "gradients int8, weights delta_int4"
WAYS = {
    EXACT: {},
    "gradients int8": {"gradients": "int8"},
    "gradients int4": {"gradients": "int4"},
    "weights int8": {"weights": "int8"},
    FINEST: {"gradients": "int8", "weights": "delta_int4"},
}


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    # One program at a time: with several under way, collectives may wait for each other's threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row for each way: its losses minus the exact losses for each seed, and bytes."""
    full = {"steps": STEPS, "last": LAST, "every": EVERY, "seeds": SEEDS}
    sizes = SMOKE if smoke else full
    runs = {way: _Run(way) for way in WAYS}
    curves: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    for seed in range(sizes["seeds"]):
        for way, run in runs.items():
            curves[way].append(run.train(seed, sizes["steps"]))
            print(f"seed {seed}: {way}: {curves[way][-1][-sizes['last'] :].mean():.4f}", flush=True)
    last = {way: np.mean(curves[way], axis=0)[-sizes["last"] :].mean() for way in WAYS}
    rows = [
        {
            "way": way,
            **{f"loss at {at}": _mean(curves[way], at, sizes) for at in _points(sizes)},
            "above exact": float(last[way] - last[EXACT]),
            **{
                f"seed {seed}": float((curve - exact)[-sizes["last"] :].mean())
                for seed, (curve, exact) in enumerate(zip(curves[way], curves[EXACT], strict=True))
            },
            "bytes_per_parameter": runs[way].bytes_per_parameter,
        }
        for way in WAYS
    ]
    worst = max(rows[-1][f"seed {seed}"] for seed in range(sizes["seeds"]))
    goals = [Goal(name=f"{FINEST} - exact, of the worst seed", value=worst, limit=0.01)]
    parameters = runs[EXACT].plan.placement.num_parameters()
    notes = [
        f"GPT-2 of {parameters:,} parameters on Shakespeare's bytes, {ROWS * SEQ} tokens a step, "
        f"{sizes['steps']} steps of AdamW at 1e-3; stage 2 on {NUM_DEVICES} virtual devices in "
        f"nodes of {NODE}, float32",
        f"losses: means of {sizes['last']} steps up to that one, over the seeds; seeds: what the "
        "last mean is above the exact one's",
        "bytes: that one device sends in a step, from the compiled program",
    ]
    return Record(name="wire", rows=rows, goals=goals, notes=notes)


def _points(sizes: dict[str, int]) -> range:
    return range(sizes["every"], sizes["steps"] + 1, sizes["every"])


def _mean(curves: list[np.ndarray], at: int, sizes: dict[str, int]) -> float:
    return float(np.mean([curve[at - sizes["last"] : at] for curve in curves]))


class _Run:
    """A run with one setting of communication."""

    def __init__(self, way: str) -> None:
        self._tokens = np.frombuffer(TEXT.read_bytes(), np.uint8)
        config = ModelConfig(num_layers=2, num_heads=2, embed_dim=48, max_seq_len=SEQ)
        mesh = MeshConfig(node=NODE)
        self.plan = zerojax.make_plan(
            build_model(config, 256),
            zerojax.make_mesh(mesh, devices=jax.devices()[:NUM_DEVICES]),
            example_batch=self._batch(np.random.default_rng(0)),
            optimizer=zerojax.adamw(1e-3, **ADAMW),
            zero=2,
            node=NODE,
            precision="fp32",
            wire=WAYS[way] or None,
        )
        self._step = zerojax.build_step(self.plan)
        state, batch = self.plan.abstract_state, self.plan.abstract_batch
        text = self._step.lower(state, batch).compile().as_text()
        found = hlo.find_collectives(hlo.read_program(text), NUM_DEVICES)
        sent = sum(one.wire_bytes * one.times for one in found)
        self.bytes_per_parameter = sent / self.plan.placement.num_parameters()

    def train(self, seed: int, steps: int) -> np.ndarray:
        """Returns the loss of each step."""
        random, state, losses = np.random.default_rng(seed), zerojax.init_state(self.plan, seed), []
        for _ in range(steps):
            placed = jax.device_put(self._batch(random), self.plan.batch_sharding)
            state, metrics = self._step(state, placed)
            losses.append(float(metrics["loss"]))  # waits: queued steps would wait for each other
        return np.array(losses)

    def _batch(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        starts = random.integers(0, self._tokens.size - SEQ - 1, ROWS)
        rows = np.stack([self._tokens[at : at + SEQ + 1] for at in starts]).astype(np.int32)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


if __name__ == "__main__":
    main()
