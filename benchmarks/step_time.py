"""CPU time of a step relative to a step that a JAX expert writes, alternating in one process.

Uses the four models of `first_step` on 1 and 8 CPU devices; on 8, ZeRO 3 and sharded arrays.
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

LIMITS = {1: 1.02, 8: 0.95}
STEPS, ROUNDS, WARM_UP = 10, 15, 5


def main(argv: list[str] | None = None) -> None:
    """Writes the record; with `--one`, times one model in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each side")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "DEVICES"))
    arguments = parser.parse_args(argv)
    if arguments.one:
        model, devices = arguments.one
        print(json.dumps(measure_one(model, int(devices), arguments.smoke, arguments.rounds)))
        return
    load_before = load_average()
    record = Record(name="step_time", rows=[])
    for name in first_step.models(arguments.smoke):
        for devices in first_step.DEVICES:
            words = ["--one", name, str(devices), "--rounds", str(arguments.rounds)]
            words += ["--smoke"] * arguments.smoke
            rows = in_a_process("benchmarks.step_time", *words)
            goals = [_goal(row) for row in rows if row["side"] != EXPERT]
            record = Record(
                name=record.name, rows=[*record.rows, *rows], goals=[*record.goals, *goals]
            )
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)


def _goal(row: dict[str, Any]) -> Goal:
    devices = row["devices"]
    where = f"{row['model']}, {devices} device{'s' * (devices > 1)}"
    name = f"CPU time of a step, {where}: {row['side']} / expert"
    return Goal(name=name, value=row["cpu/expert"], limit=LIMITS[devices])


def measure_one(name: str, devices: int, smoke: bool, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each side of one model.

    Raises:
      RuntimeError: the sides' losses differ.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    factory, batch = first_step.models(smoke)[name]
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.01))
    own = zerojax.adamw(3e-4, weight_decay=0.01, **CLIPPED)
    losses: dict[str, float] = {}
    runs = {
        EXPERT: _expert(factory, chain, batch),
        WITH_OPTAX: _zerojax(factory, chain, batch, devices),
        OWN: _zerojax(factory, own, batch, devices),
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
            "side": side,
            "cpu_ms": 1e3 * median_of(samples[side], "cpu"),
            "wall_ms": 1e3 * median_of(samples[side], "wall"),
            "cpu/expert": ratio_of(samples[side], samples[EXPERT], "cpu"),
            "wall/expert": ratio_of(samples[side], samples[EXPERT], "wall"),
            "loss": losses[side],
        }
        for side in SIDES
    ]


def _expert(factory: Any, tx: Any, batch: Any) -> Callable[[], jax.Array]:
    compiled = plain_gspmd.lower_step(factory, tx, batch).compile()
    params = plain_jax.init_params(factory)
    given = params, tx.init(params), batch
    placed = jax.device_put(given, compiled.input_shardings[0])
    state = list(placed)

    def step() -> jax.Array:
        state[0], state[1], loss = compiled(*state)
        return loss

    return step


def _zerojax(factory: Any, tx: Any, batch: Any, devices: int) -> Callable[[], jax.Array]:
    plan = zerojax.make_plan(
        factory, zerojax.make_mesh({"data": devices}), example_batch=batch, optimizer=tx,
        zero=3 if devices > 1 else 1, precision="fp32",
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
