"""`zerojax.train`; its trainer takes one step at a time, so that programs can alternate."""

from __future__ import annotations

import zerojax
from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch):
    trainer = zerojax.train(
        make_model(),
        {"data": -1},
        [batch],
        optimizer=zerojax.adamw(
            LEARNING_RATE,
            b1=BETAS[0],
            b2=BETAS[1],
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            mask=None,
            clip_norm=CLIP_NORM,
        ),
        steps=0,
        run_dir=None,
    )
    return lambda batch: float(trainer.step(batch)["loss"])
