"""torch over several processes: DistributedDataParallel, all states on every process (ZeRO 0)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def step(batch):
        loss = model(batch["tokens"], batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
