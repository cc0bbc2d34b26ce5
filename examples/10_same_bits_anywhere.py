"""A run with bit-equal results while the number of devices changes.

This needs a batch size that is divisible by many numbers of devices, and sums whose order does not
depend on the mesh (`deterministic`). Without `deterministic`, results differ by rounding.
"""

import tempfile

import jax
import numpy as np

import zerojax
from zerojax.config import ElasticityConfig, ModelConfig

jax.config.update("jax_num_cpu_devices", 8)

# The batch size of at most 32 rows, in microbatches of 1, 2 or 3 rows, for most numbers of devices.
elastic = ElasticityConfig(max_global_batch_size=32, micro_batch_sizes=(1, 2, 3))
chosen = elastic.choose_batch()
rows, counts = chosen.global_batch_size, chosen.device_counts
print(f"{rows} rows on any of {counts} devices")

model = zerojax.zoo.build_model(ModelConfig(num_layers=2, embed_dim=32, max_seq_len=16), 256)


def make_batch(number):
    tokens = np.random.default_rng(number).integers(0, 256, (rows, 17), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(devices: list[int], folder: str) -> list[float]:
    """Returns losses of two steps on each number of devices, with checkpoints in between."""
    losses = []
    for count in devices:
        plan = zerojax.make_plan(
            model,
            zerojax.make_mesh({"data": count}, devices=jax.devices()[:count]),
            example_batch=make_batch(0),
            optimizer=zerojax.adamw(1e-2),
            precision="fp32",
            zero=2,
            deterministic="mesh",
            virtual_shards=8,
        )
        with zerojax.Checkpointer(folder) as checkpointer:
            if losses:
                restored = checkpointer.restore(plan.abstract_portable)
                state = zerojax.from_portable_state(plan, restored.state)
            else:
                state = zerojax.init_state(plan, seed=0)
            step = zerojax.build_step(plan)
            for _ in range(2):
                batch = zerojax.shard_batch(plan, make_batch(len(losses)))
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
            about = {"data_state": {}, "config": {}, "plan": plan.as_dict()}
            checkpointer.save(len(losses), zerojax.to_portable_state(plan, state), **about)
    return losses


with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
    undisturbed = train([8, 8, 8], one)
    moved = train([8, 4, 1], two)

print("\n".join(f"{a:.9f}  {b:.9f}" for a, b in zip(undisturbed, moved, strict=True)))
assert {8, 4, 1} <= set(counts)
assert moved == undisturbed
