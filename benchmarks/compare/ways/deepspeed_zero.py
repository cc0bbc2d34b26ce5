"""DeepSpeed over several processes, any stage, with torch's optimizer."""

from __future__ import annotations

import deepspeed
import torch

from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch, *, zero):
    deepspeed.init_distributed("gloo")
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        ),
        config={
            "train_batch_size": len(batch["tokens"]),
            "gradient_clipping": CLIP_NORM,
            "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
            "steps_per_print": 10**9,
        },
    )

    def step(batch):
        loss = engine(batch["tokens"], batch["targets"])
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step
