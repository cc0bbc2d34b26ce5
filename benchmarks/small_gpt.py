"""The model that most benchmarks use: a GPT of 3.5 million parameters, and its batches.

Contains sizes only; no mesh, ZeRO stage or clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from zerojax.data import TokenSource, tokens_of_array
from zerojax.zoo import GPT2, GPT2Config

# 3,487,232 parameters, with separate output weights.
FULL = GPT2Config(
    vocab_size=512,
    max_seq_len=256,
    num_layers=4,
    num_heads=4,
    embed_dim=256,
    tie_embeddings=False,
)
SMOKE = dataclasses.replace(FULL, max_seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
BATCH_SIZE = 8


def choose_config(smoke: bool) -> GPT2Config:
    """Returns the measured size or, for a smoke run, a tiny size."""
    return SMOKE if smoke else FULL


def make_factory(config: GPT2Config) -> Callable[[nnx.Rngs], Any]:
    """Returns a function `rngs -> model`, which zerojax accepts as a model."""
    return lambda rngs: GPT2(config, rngs=rngs)


def make_source(config: GPT2Config, batch_size: int = BATCH_SIZE) -> TokenSource:
    """Returns batches of random tokens, so many that no batch is used twice."""
    count = 400 * batch_size * (config.max_seq_len + 1)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, count, dtype=np.uint16)
    return TokenSource(
        tokens=tokens_of_array(ids),
        seq_len=config.max_seq_len,
        global_batch_size=batch_size,
        vocab_size=config.vocab_size,
    )
