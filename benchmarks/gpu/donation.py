"""Part "donation": arrays that are donated right after an asynchronous save are saved as they were.

Also measures the cost of fingerprints. Works on any backend; on a CPU it shows that the saved
values survive although they are not copied.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.fingerprints import PendingFingerprints

UPDATES = 3
ROUNDS = 3
LEAVES, ELEMENTS, SMOKE_ELEMENTS = 8, 2**25, 2**18


def main(argv: list[str] | None = None) -> None:
    """Saves, donates, compares and writes the record; exits with an error if a bit differs."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    elements = SMOKE_ELEMENTS if arguments.smoke else ELEMENTS
    with tempfile.TemporaryDirectory() as folder:
        record = measure(Path(folder), elements, sorted({1, len(jax.devices())}))
    write_record(record, arguments, load_before)
    if not all(goal.is_met for goal in record.goals):
        raise SystemExit("a checkpoint does not hold what was saved: see the table")


def measure(folder: Path, elements: int, device_counts: Sequence[int]) -> Record:
    """Returns one row per number of devices."""
    rows = []
    for count in device_counts:
        found = [donate_after_save(folder / f"{count}-{i}", elements, count) for i in range(ROUNDS)]
        fast = fingerprint_rate(elements, count)
        unequal = sum(found)
        row = {"devices": count, "MB": 4e-6 * elements * LEAVES, "saves": ROUNDS}
        rows.append(row | {"unequal_arrays": unequal, "fingerprints_GB/s": fast})
    wrong = sum(row["unequal_arrays"] for row in rows)
    goal = Goal(name="arrays that are not as they were saved", value=wrong, limit=0)
    return Record(name="donation", rows=rows, goals=[goal])


def donate_after_save(folder: Path, elements: int, num_devices: int) -> int:
    """Returns the number of arrays that differ from their values when `save` was called."""
    shape = _shape(elements, num_devices)
    state, abstract = _state(shape, num_devices)
    expected = {name: np.array(x) for name, x in state.items()}
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state, data_state={}, config={}, plan={})
        for _ in range(UPDATES):
            state = update(state)
        jax.block_until_ready(state)
        restored = checkpointer.restore(abstract, 1).state
    return sum(
        np.asarray(restored[name]).tobytes() != expected[name].tobytes() for name in expected
    )


def fingerprint_rate(elements: int, num_devices: int) -> float:
    """Returns GB/s of fingerprints of the state over all devices, the best of three tries."""
    state, _ = _state(_shape(elements, num_devices), num_devices)
    jax.block_until_ready(state)
    PendingFingerprints(state).result()
    best = math.inf
    for _ in range(ROUNDS):
        began = time.perf_counter()
        PendingFingerprints(state).result()
        best = min(best, time.perf_counter() - began)
    return 4e-9 * elements * LEAVES / best


def _shape(elements: int, num_devices: int) -> tuple[int, int]:
    return num_devices, elements // num_devices


def _state(
    shape: tuple[int, int], num_devices: int
) -> tuple[dict[str, jax.Array], dict[str, jax.ShapeDtypeStruct]]:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    abstract = {
        f"leaf{i}": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for i in range(LEAVES)
    }

    def make() -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), LEAVES)
        return {
            name: jax.random.normal(key, shape) for name, key in zip(abstract, keys, strict=True)
        }

    return jax.jit(make, out_shardings=sharding)(), abstract


if __name__ == "__main__":
    main()
