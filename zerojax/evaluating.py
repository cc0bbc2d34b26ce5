"""The mean loss over batches that a model is not trained on.

Knows batches and the compiled evaluation; never changes a state.
"""

from __future__ import annotations

from typing import Any

from zerojax.data import TokenSource, local_rows, shard_batch
from zerojax.plan import Plan


def mean_loss(
    evaluate: Any, plan: Plan, state: Any, batches: Any, num_batches: int | None, default: int
) -> dict[str, float]:
    """`{"loss": mean, "weight": sum}` over batches, each weighted by its own weight.

    Args:
      evaluate: of `build_evaluation`.
      plan: which `state` follows.
      state: not donated.
      batches: an iterable of host batches, or a `TokenSource`; None: there are none.
      num_batches: at most this many; None: all, of a source `default`.
      default: batches of a source.

    Raises:
      ValueError: there is nothing to evaluate on.
    """
    if isinstance(batches, TokenSource):
        source, rows = batches, local_rows(plan)
        count = min(num_batches or default, max(1, int(source.steps_per_epoch)))
        batches = (source.batch(index, *rows) for index in range(count))
    elif batches is None:
        raise ValueError("no validation data: pass batches to evaluate, or validation= to train")
    loss = weight = 0.0
    for index, batch in enumerate(batches):
        if num_batches is not None and index >= num_batches:
            break
        sums = evaluate(state, shard_batch(plan, batch, vocab_size=plan.vocab_size))
        loss += float(sums["loss"])
        weight += float(sums["weight"])
    if weight == 0:
        raise ValueError("nothing to evaluate: the batches are empty, or all their weights are 0")
    return {"loss": loss / weight, "weight": weight}
