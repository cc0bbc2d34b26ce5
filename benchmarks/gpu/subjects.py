"""The zerojax model and the batches of a workload.

Translates a workload to zerojax's model and data; times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.workloads import (
    BETAS,
    CLIP_NORM,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Workload,
)
from zerojax import adamw
from zerojax.config import ModelConfig
from zerojax.data import TokenSource, tokens_of_array
from zerojax.optim import decay_mask
from zerojax.zoo import build_model


def make_factory(workload: Workload, *, attention: Any = "auto") -> Callable[[Any], Any]:
    """Returns a function `rngs -> model`."""
    config = ModelConfig(
        name=workload.kind,
        vocab_size=workload.vocab_size,
        max_seq_len=workload.seq_len,
        num_layers=workload.num_layers,
        num_heads=workload.num_heads,
        num_kv_heads=workload.num_kv_heads,
        embed_dim=workload.embed_dim,
        mlp_dim=workload.mlp_dim,
        remat=workload.remat,
        rope_theta=workload.rope_theta,
        norm_eps=workload.norm_eps,
        attention=attention,
    )
    return build_model(config, workload.vocab_size)


def make_source(workload: Workload, num_batches: int = 64) -> TokenSource:
    """Returns batches of random tokens; longer runs repeat them in another order."""
    count = num_batches * workload.batch_size * (workload.seq_len + 1)
    dtype = np.uint16 if workload.vocab_size <= 1 << 16 else np.uint32
    ids = np.random.default_rng(0).integers(0, workload.vocab_size, count, dtype=dtype)
    return TokenSource(
        tokens=tokens_of_array(ids),
        seq_len=workload.seq_len,
        global_batch_size=workload.batch_size,
        vocab_size=workload.vocab_size,
    )


def make_optimizer(*, clip_norm: float | None = CLIP_NORM) -> Any:
    """Returns AdamW with weight decay on matrices only and a constant learning rate."""
    b1, b2 = BETAS
    return adamw(
        LEARNING_RATE,
        b1=b1,
        b2=b2,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        mask=decay_mask,
        clip_norm=clip_norm,
    )


def peak_device_bytes() -> int | None:
    """Returns the peak bytes of the first device in this process; None if not counted."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
