"""Time to trace and compile the step for 4, 16 and 64 layers, which are scanned.

Also measures a hand-written step of the same model on one device; CPU seconds of this process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

import zerojax
from benchmarks import plain_jax, small_gpt
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record

NUM_DEVICES = 8
DEPTHS = (4, 16, 64)
REPEATS = 3
DEPTH_LIMIT = 1.10
BARE_LIMIT = 1.10


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row for each way to build the step, with a column for each number of layers."""
    depths = (1, 2) if smoke else DEPTHS
    taken: dict[tuple[str, int], list[float]] = {}
    for repeat in range(1 if smoke else REPEATS + 1):
        for depth in depths:
            for name, build in _builders(depth, smoke).items():
                jax.clear_caches()
                before = time.process_time()
                build()
                seconds = time.process_time() - before
                if repeat or smoke:  # the first time pays for what JAX does once
                    taken.setdefault((name, depth), []).append(seconds)
    names = list(dict.fromkeys(name for name, _ in taken))
    seconds = {key: statistics.median(times) for key, times in taken.items()}
    rows = [
        {"step": name}
        | {f"{depth}_layers_cpu_s": seconds[name, depth] for depth in depths}
        | {"deepest/flattest": seconds[name, depths[-1]] / seconds[name, depths[0]]}
        for name in names
    ]
    bare, single, *_ = names
    goals = [
        Goal(
            name=f"{name}, {depths[-1]} layers / {depths[0]} layers",
            value=row["deepest/flattest"],
            limit=DEPTH_LIMIT,
        )
        for name, row in zip(names[1:], rows[1:], strict=True)
    ]
    goals.append(
        Goal(
            name=f"{single} / {bare}, {depths[-1]} layers",
            value=seconds[single, depths[-1]] / seconds[bare, depths[-1]],
            limit=BARE_LIMIT,
        )
    )
    return Record(name="compile_time", rows=rows, goals=goals)


def _builders(depth: int, smoke: bool) -> dict[str, Callable[[], Any]]:
    config = dataclasses.replace(small_gpt.choose_config(smoke), num_layers=depth)
    factory = small_gpt.make_factory(config)
    example = small_gpt.make_source(config).batch(0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))

    def bare() -> Any:
        params = jax.eval_shape(lambda: plain_jax.init_params(factory))
        opt_state = jax.eval_shape(tx.init, params)
        return plain_jax.build_step(factory, tx).lower(params, opt_state, example).compile()

    def planned(zero: int, data: int) -> Callable[[], Any]:
        mesh = zerojax.make_mesh({"data": data}, devices=jax.devices()[:data])

        def build() -> Any:
            plan = zerojax.make_plan(
                factory, mesh, example_batch=example, optimizer=tx, zero=zero, precision="fp32"
            )
            step = zerojax.build_step(plan)
            return step.lower(plan.abstract_state, plan.abstract_batch).compile()

        return build

    return {
        "bare jit": bare,
        "zerojax, 1 device": planned(0, 1),
        f"zerojax zero=2, {NUM_DEVICES} devices": planned(2, NUM_DEVICES),
        f"zerojax zero=3, {NUM_DEVICES} devices": planned(3, NUM_DEVICES),
    }


if __name__ == "__main__":
    main()
