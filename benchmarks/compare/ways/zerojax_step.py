"""zerojax's step in a loop of the user: any ZeRO stage, one process or several."""

from __future__ import annotations

import zerojax
from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch, *, zero=0):
    zerojax.join_processes()
    b1, b2 = BETAS
    plan = zerojax.make_plan(
        make_model(),
        zerojax.make_mesh({"data": -1}),
        example_batch=batch,
        optimizer=zerojax.adamw(
            LEARNING_RATE,
            b1=b1,
            b2=b2,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            mask=None,
            clip_norm=CLIP_NORM,
        ),
        zero=zero,
        precision="fp32",
    )
    state, update = zerojax.init_state(plan), zerojax.build_step(plan)

    def step(batch):
        nonlocal state
        state, metrics = update(state, zerojax.shard_batch(plan, batch))
        return float(metrics["loss"])

    return step
