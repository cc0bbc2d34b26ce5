"""Optimizer state outside device memory, by one setting, with bit-equal results.

With float32 master weights, masters and moments are three quarters of the training state. They can
be stored in host memory, partly on the device, or in files; the update loads them slice by slice.
"""

import tempfile

import jax
import numpy as np

import zerojax
from zerojax.config import ModelConfig
from zerojax.config.mesh import OffloadConfig

jax.config.update("jax_num_cpu_devices", 8)

model = zerojax.zoo.build_model(ModelConfig(num_layers=2, embed_dim=64, max_seq_len=32), 256)
tokens = np.random.default_rng(0).integers(0, 256, (16, 33), dtype=np.int32)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
SMALL = {"slice_elements": 512, "min_elements": 256}  # for this small model


def bytes_by_memory(state) -> dict[str, int]:
    """Returns {memory kind: bytes of the state} for the first device."""
    held: dict[str, int] = {}
    for leaf in jax.tree.leaves(state):
        kind, own = leaf.sharding.memory_kind, leaf.addressable_shards[0].data
        held[kind] = held.get(kind, 0) + own.nbytes
    return held


def train_a_little(offload: OffloadConfig) -> tuple[dict[str, int], list[float]]:
    """Returns (bytes of state by memory kind, losses of five steps)."""
    plan = zerojax.make_plan(
        model,
        {"data": 8},
        example_batch=batch,
        optimizer=zerojax.adamw(1e-3),
        zero=2,
        precision="fp32",
        offload=offload,
    )
    state, step = zerojax.init_state(plan, seed=0), zerojax.build_step(plan)
    losses = []
    for _ in range(5):
        state, metrics = step(state, zerojax.shard_batch(plan, batch))
        losses.append(float(metrics["loss"]))
    return bytes_by_memory(state), losses


with tempfile.TemporaryDirectory() as folder:
    choices = {
        "device": OffloadConfig(),
        "host": OffloadConfig(opt_state="host", **SMALL),
        "device and host": OffloadConfig(opt_state={"device": 0.4, "host": 0.6}, **SMALL),
        "files": OffloadConfig(opt_state="nvme", folder=folder, **SMALL),
    }
    results = {name: train_a_little(offload) for name, offload in choices.items()}

for name, (held, losses) in results.items():
    shown = ", ".join(f"{kind} {size / 2**10:.0f} KiB" for kind, size in sorted(held.items()))
    print(f"{name:16} {shown}; last loss {losses[-1]:.6f}")

whole, expected = results["device"]
assert "pinned_host" not in whole
assert results["host"][0]["pinned_host"] > results["device and host"][0]["pinned_host"]
assert all(losses == expected for _, losses in results.values()), "a tier changes no bit"
