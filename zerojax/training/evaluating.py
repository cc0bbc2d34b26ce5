"""Evaluation: the mean loss over validation batches."""

from __future__ import annotations

import math
from typing import Any

from zerojax.data import TokenSource, local_rows, shard_batch
from zerojax.plan.plan import Plan
from zerojax.runtime.system_memory import allocating_for


@allocating_for("an evaluation")
def mean_loss(
    evaluate: Any, plan: Plan, state: Any, batches: Any, num_batches: int | None, default: int
) -> dict[str, float]:
    """`{"loss": mean, "weight": sum}` and own metrics over batches, weighted by their own weights.

    A metric whose weights are all 0 is NaN.

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
    totals: dict[str, list[float]] = {}
    for index, batch in enumerate(batches):
        if num_batches is not None and index >= num_batches:
            break
        sums = evaluate(state, shard_batch(plan, batch, vocab_size=plan.vocab_size))
        own = {name: (x["sum"], x["weight"]) for name, x in sums.get("metrics", {}).items()}
        for name, pair in {"loss": (sums["loss"], sums["weight"]), **own}.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[:] = total[0] + float(pair[0]), total[1] + float(pair[1])
    weight = totals.get("loss", [0.0, 0.0])[1]
    if weight == 0:
        raise ValueError("nothing to evaluate: the batches are empty, or all their weights are 0")
    means = {name: x / y if y else math.nan for name, (x, y) in totals.items()}
    return {"loss": means.pop("loss"), "weight": weight, **means}
