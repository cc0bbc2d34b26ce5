"""Bytes of state per device at each ZeRO stage; all stages compute the same losses.

Stage 1 shards the optimizer state, 2 also the gradients, 3 also the parameters.
"""

import jax
import numpy as np

import zerojax
from zerojax.config import ModelConfig

jax.config.update("jax_num_cpu_devices", 8)

model = zerojax.zoo.build_model(ModelConfig(num_layers=2, embed_dim=128, max_seq_len=32), 256)
tokens = np.random.default_rng(0).integers(0, 256, (16, 33), dtype=np.int32)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train_a_little(zero: int) -> tuple[int, list[float]]:
    """Returns (bytes of state on the first device, losses of three steps)."""
    plan = zerojax.make_plan(
        model,
        {"data": 8},
        example_batch=batch,
        optimizer=zerojax.adamw(1e-3),
        zero=zero,
        precision="fp32",
        persistence_threshold=0,
    )
    state, step = zerojax.init_state(plan, seed=0), zerojax.build_step(plan)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    losses = []
    for _ in range(3):
        state, metrics = step(state, zerojax.shard_batch(plan, batch))
        losses.append(float(metrics["loss"]))
    return held, losses


held, losses = zip(*(train_a_little(zero) for zero in range(4)), strict=True)
for zero in range(4):
    print(f"zero={zero}: {held[zero] / 2**20:5.2f} MiB on each device, losses {losses[zero]}")

assert held[0] > 7 * held[1]
np.testing.assert_allclose(losses[1:], [losses[0]] * 3, atol=4e-6)  # float32 rounding
