"""Cost of `deterministic="mesh"` in time, bytes sent and temporaries, relative to a plain step.

On 8 virtual CPU devices at every stage, and on one, which computes 8 small pieces in place of one
large one. Both sides alternate. `tests/features/deterministic/test_deterministic.py` shows that
results are bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import zerojax
from benchmarks import small_gpt
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, median_of, ratio_of, sample
from benchmarks.recipe import ADAMW
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.forecasting import hlo
from zerojax.runtime.memory import keep_freed_memory

NUM_DEVICES = 8
CASES = ((0, 8), (1, 8), (2, 8), (3, 8), (1, 1))
"""(ZeRO stage, number of devices) of each case."""
SMOKE_CASES = ((1, 8), (3, 2))
WAYS = ("plain", "deterministic")
WIRE_LIMIT = 1.5


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    keep_freed_memory()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    # One program at a time: with several under way, collectives may wait for each other's threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns two rows per case."""
    rows: list[dict[str, Any]] = []
    for zero, devices in SMOKE_CASES if smoke else CASES:
        sides = {way: _Side(way, zero, devices, smoke) for way in WAYS}
        samples = interleave(
            {way: side.run for way, side in sides.items()},
            warm_up=1 if smoke else 2,
            steps=1 if smoke else 2,
            rounds=2 if smoke else 5,
        )
        rows += [_row(way, zero, devices, sides, samples) for way in WAYS]
    goals = [
        Goal(
            name="bytes on the wire at stages 0 to 3, deterministic / plain, the most",
            value=max(row["wire/plain"] for row in rows if row["devices"] == NUM_DEVICES),
            limit=WIRE_LIMIT,
        ),
    ]
    notes = [
        f"batch {small_gpt.BATCH_SIZE}: {small_gpt.BATCH_SIZE // NUM_DEVICES} row in each of "
        f"{NUM_DEVICES} virtual shards",
        "wire: bytes that one device sends per step, from the compiled program",
    ]
    return Record(name="deterministic", rows=rows, goals=goals, notes=notes)


def _row(
    way: str,
    zero: int,
    devices: int,
    sides: dict[str, _Side],
    samples: dict[str, list[Sample]],
) -> dict[str, Any]:
    plain = sides["plain"]
    return {
        "zero": zero,
        "devices": devices,
        "way": way,
        "cpu_ms": 1e3 * median_of(samples[way], "cpu"),
        "cpu/plain": ratio_of(samples[way], samples["plain"], "cpu"),
        "wall/plain": ratio_of(samples[way], samples["plain"], "wall"),
        "wire_MB": sides[way].wire / 1e6,
        "wire/plain": sides[way].wire / plain.wire if plain.wire else 1.0,
        "temp_MB": sides[way].temporary / 1e6,
        "temp/plain": sides[way].temporary / plain.temporary,
    }


class _Side:
    """One way of training, with the time, bytes sent and temporaries of its step."""

    def __init__(self, way: str, zero: int, devices: int, smoke: bool) -> None:
        config = small_gpt.choose_config(smoke)
        self._source = small_gpt.make_source(config)
        self._plan = zerojax.make_plan(
            small_gpt.make_factory(config),
            zerojax.make_mesh(None, devices=jax.devices()[:devices]),
            example_batch=self._source.batch(0),
            optimizer=zerojax.adamw(3e-4, **ADAMW),
            zero=zero,
            precision="fp32",
            deterministic="mesh" if way == "deterministic" else None,
            virtual_shards=NUM_DEVICES,
        )
        self._state = zerojax.init_state(self._plan)
        batch = zerojax.shard_batch(self._plan, self._source.batch(0))
        compiled = zerojax.build_step(self._plan).lower(self._state, batch).compile()
        self._step: Callable[[Any, Any], Any] = compiled
        found = hlo.find_collectives(hlo.read_program(compiled.as_text()), devices)
        self.wire = sum(one.wire_bytes * one.times for one in found)
        self.temporary = compiled.memory_analysis().temp_size_in_bytes
        self.losses: list[float] = []

    def run(self, count: int) -> Sample:
        return sample(lambda: self._steps(count), count)

    def _steps(self, count: int) -> None:
        losses = []
        for index in range(len(self.losses), len(self.losses) + count):
            batch = zerojax.shard_batch(self._plan, self._source.batch(index))
            self._state, metrics = self._step(self._state, batch)
            losses.append(metrics["loss"])
        self.losses += [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
