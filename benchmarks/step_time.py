"""CPU time of a step relative to a step that a JAX expert writes, alternating in one process.

Uses the models of `first_step` on one CPU device, and at every ZeRO stage on eight.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import optax

import zerojax
from benchmarks import first_step, plain_gspmd, plain_jax
from benchmarks.first_step import EXPERT, OWN, SIDES, WITH_OPTAX
from benchmarks.machine import load_average
from benchmarks.measuring import in_a_process, interleave, median_of, ratio_of, sample
from benchmarks.overhead import check_losses_agree
from benchmarks.recipe import CLIPPED
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record

LIMITS = {0: 1.02, 1: 1.02, 2: 1.02, 3: 0.95}
"""Largest time of a step by ZeRO stage, as a multiple of the expert's."""
STEPS, ROUNDS, WARM_UP = 10, 15, 5


def main(argv: list[str] | None = None) -> None:
    """Writes the record; with `--one`, times one model in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each side")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "DEVICES", "ZERO"))
    arguments = parser.parse_args(argv)
    if arguments.one:
        model, case = arguments.one[0], (int(arguments.one[1]), int(arguments.one[2]))
        print(json.dumps(measure_one(model, case, arguments.smoke, arguments.rounds)))
        return
    load_before = load_average()
    record = Record(name="step_time", rows=[])
    for name in first_step.models(arguments.smoke):
        for devices, zero in first_step.CASES[: 3 if arguments.smoke else None]:
            words = ["--one", name, str(devices), str(zero), "--rounds", str(arguments.rounds)]
            words += ["--smoke"] * arguments.smoke
            rows = in_a_process("benchmarks.step_time", *words)
            goals = [_goal(row) for row in rows if row["side"] != EXPERT]
            record = Record(
                name=record.name, rows=[*record.rows, *rows], goals=[*record.goals, *goals]
            )
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)


def _goal(row: dict[str, Any]) -> Goal:
    where = first_step.title(row["model"], row["devices"], row["zero"])
    name = f"CPU time of a step, {where}: {row['side']} / expert"
    return Goal(name=name, value=row["cpu/expert"], limit=LIMITS[row["zero"]])


def measure_one(name: str, case: tuple[int, int], smoke: bool, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each side of one model.

    Raises:
      RuntimeError: the sides' losses differ.
    """
    devices, zero = case
    jax.config.update("jax_num_cpu_devices", devices)
    factory, batch = first_step.models(smoke)[name]
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.01))
    own = zerojax.adamw(3e-4, weight_decay=0.01, **CLIPPED)
    losses: dict[str, float] = {}
    runs = {
        EXPERT: _expert(factory, chain, batch, zero),
        WITH_OPTAX: _zerojax(factory, chain, batch, case),
        OWN: _zerojax(factory, own, batch, case),
    }

    def side(name: str) -> Callable[[int], Any]:
        def steps(count: int) -> None:
            for _ in range(count):
                loss = runs[name]()
            losses[name] = float(loss)

        return lambda count: sample(lambda: steps(count), count)

    samples = interleave(
        {name: side(name) for name in SIDES},
        warm_up=WARM_UP,
        steps=2 if smoke else STEPS,
        rounds=2 if smoke else rounds,
    )
    check_losses_agree(losses, 0.02)
    return [
        {
            "model": name,
            "devices": devices,
            "zero": zero,
            "side": side,
            "cpu_ms": 1e3 * median_of(samples[side], "cpu"),
            "wall_ms": 1e3 * median_of(samples[side], "wall"),
            "cpu/expert": ratio_of(samples[side], samples[EXPERT], "cpu"),
            "wall/expert": ratio_of(samples[side], samples[EXPERT], "wall"),
            "loss": losses[side],
        }
        for side in SIDES
    ]


def _expert(factory: Any, tx: Any, batch: Any, zero: int) -> Callable[[], jax.Array]:
    compiled = plain_gspmd.lower_step(factory, tx, batch, zero=zero).compile()
    params = plain_jax.init_params(factory)
    given = params, tx.init(params), batch
    placed = jax.device_put(given, compiled.input_shardings[0])
    state = list(placed)

    def step() -> jax.Array:
        state[0], state[1], loss = compiled(*state)
        return loss

    return step


def _zerojax(factory: Any, tx: Any, batch: Any, case: tuple[int, int]) -> Callable[[], jax.Array]:
    devices, zero = case
    plan = zerojax.make_plan(
        factory, zerojax.make_mesh({"data": devices}), example_batch=batch, optimizer=tx,
        zero=zero, precision="fp32",
    )  # fmt: skip
    step, placed = zerojax.build_step(plan), zerojax.shard_batch(plan, batch)
    state = zerojax.init_state(plan)

    def one() -> jax.Array:
        nonlocal state
        state, metrics = step(state, placed)
        return metrics["loss"]

    return one


if __name__ == "__main__":
    main()
