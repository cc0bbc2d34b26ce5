"""What it costs that a batch is copied before it is placed: bytes, and seconds of host time.

Compared with placing the same memory without a copy, which a loader that fills it again would
change. A feed copies to aligned memory, which JAX on the CPU then uses as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, median_of, sample
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.data import as_feed, shard_own_batch

DEVICES = (1, 8)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Measures batches of tokens and of images on each number of devices."""
    shapes = {
        "tokens": ((8, 64) if smoke else (32, 4096), np.int32),
        "images": ((8, 8, 8, 3) if smoke else (64, 224, 224, 3), np.float32),
    }
    rows = [
        _measured(name, *shape, devices, 2 if smoke else 20)
        for name, shape in shapes.items()
        for devices in DEVICES
    ]
    goals = [
        Goal(
            name=f"bytes copied per byte of a batch of {row['batch']}, {row['devices']} devices",
            value=row["copied"],
            limit=1.0,
        )
        for row in rows
    ]
    note = "`aliased` places memory that its loader may change, so its figure is no alternative"
    return Record(name="batch_copies", rows=rows, goals=goals, notes=[note])


def _measured(
    name: str, shape: tuple[int, ...], dtype: Any, devices: int, steps: int
) -> dict[str, Any]:
    mesh = zerojax.make_mesh({"data": devices}, devices=jax.devices()[:devices])
    batch = {"x": _aligned(shape, dtype)}
    model = (lambda key: {"w": np.ones(1, np.float32)}, lambda params, x: params["w"])
    loss = lambda model, batch: jnp.mean(model(0) * jnp.mean(batch["x"]))  # noqa: E731
    plan = zerojax.make_plan(model, mesh, example_batch=batch, loss=loss)
    feed = as_feed(lambda step: batch)
    own = lambda batch: shard_own_batch(plan, batch, vocab_size=None)  # noqa: E731
    sides = {
        "aliased": _repeat(lambda: own(batch)),
        "feed": _repeat(lambda: own(next(feed))),
        "shard_batch": _repeat(lambda: zerojax.shard_batch(plan, batch)),
    }
    samples = interleave(sides, warm_up=2, steps=steps, rounds=5)
    read = next(feed)
    again = sum(_is_copied(shard.data, read["x"]) for shard in own(read)["x"].addressable_shards)
    return {
        "batch": name,
        "devices": devices,
        "mb": batch["x"].nbytes / 1e6,
        "copied": 1 + again / devices,
        **{f"{side}_ms": 1e3 * median_of(samples[side], "wall") for side in sides},
    }


def _is_copied(placed: jax.Array, source: np.ndarray) -> bool:
    return not 0 <= placed.unsafe_buffer_pointer() - source.ctypes.data < source.nbytes


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


def _repeat(one: Callable[[], Any]) -> Callable[[int], Sample]:
    def steps(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(one())

    return lambda count: sample(lambda: steps(count), count)


if __name__ == "__main__":
    main()
