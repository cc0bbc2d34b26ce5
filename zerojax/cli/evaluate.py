"""`zerojax eval`: the loss of a trained model on text it was not trained on.

Knows a loaded run and its validation batches; never trains.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
from flax import nnx

from zerojax.data.source import TokenSource, as_source
from zerojax.runs import load_run


def validation_source(loaded: Any) -> TokenSource:
    """The part of the run's corpus that training left out.

    Raises:
      ValueError: there is none.
    """
    config = loaded.config
    _, validation, _ = as_source(
        config.data.path,
        tokenizer=loaded.tokenizer or "bytes",
        seq_len=config.data.seq_len,
        global_batch_size=config.global_batch_size,
        validation_fraction=config.data.validation_fraction,
    )
    if validation is None:
        raise ValueError(
            f"data.validation_fraction={config.data.validation_fraction} left nothing to evaluate "
            "on; train with a fraction above 0"
        )
    return validation


def mean_loss(model: Any, source: TokenSource, num_batches: int) -> tuple[float, int]:
    """Loss per token in nats over the first batches, and the number of tokens.

    Args:
      num_batches: at most one pass over `source` is made.
    """
    model.eval()
    graphdef, state = nnx.split(model)
    # Without jit the scan over the layers would be compiled again for every batch.
    loss = jax.jit(lambda state, batch: nnx.merge(graphdef, state).loss(batch))
    total = weight = 0.0
    for step in range(max(1, min(num_batches, int(source.steps_per_epoch)))):
        batch_sum, batch_weight = loss(state, source.batch(step))
        total, weight = total + float(batch_sum), weight + float(batch_weight)
    return total / weight, int(weight)


def run(args: argparse.Namespace) -> int:
    """Prints loss, perplexity and bits per token."""
    if args.batches is not None and args.batches < 1:
        raise ValueError(f"--batches {args.batches}: at least 1 is needed")
    loaded = load_run(args.run)
    source = validation_source(loaded)
    loss, num_tokens = mean_loss(loaded.model, source, args.batches or loaded.config.eval_batches)
    print(
        f"step {loaded.step}: loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.2f}, "
        f"{loss / math.log(2):.3f} bits per token, over {num_tokens:,} validation tokens"
    )
    return 0
