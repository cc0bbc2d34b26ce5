"""torch, one process: eager, or `compile`d."""

from __future__ import annotations

import torch

from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch, *, compiled=False):
    model = make_model()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def step(batch):
        loss = forward(batch["tokens"], batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
