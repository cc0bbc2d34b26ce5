"""Checks validation data before a run, iterates over it, and handles batches with missing rows.

Knows plans and host batches; the callbacks of evaluations are in `evaluation`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.data import Feed, RowSource, local_rows, missing_rows
from zerojax.data.feed import check_function
from zerojax.models.given_arrays import as_arrays
from zerojax.operators.attention_choice import attention_planned_for
from zerojax.plan.device_mesh import COMPILER_AXES, num_data_shards
from zerojax.plan.loss_checks import part_with_mixed_rows
from zerojax.plan.make import Plan
from zerojax.plan.state import abstract_model, as_read, slice_batch
from zerojax.tracing import trace_model

Sums = Mapping[str, Any]


class LeftOutError(ValueError):
    """Raised for a batch with too few rows if the loss cannot exclude the missing rows."""


def check_validation(validation: Any) -> None:
    """Raises if `validation` is not data that can be read again at every evaluation.

    Raises:
      TypeError: an iterator, a path, or an object that is no data.
      ValueError: an empty list.
    """
    if isinstance(validation, Iterator | Feed):
        raise TypeError(
            f"validation is a {type(validation).__name__}, which can be read only once, but every "
            "evaluation reads it anew; give a list of batches, a function of the batch's number, "
            "or a TokenSource"
        )
    if isinstance(validation, str | Path):
        raise TypeError(
            f"validation={str(validation)!r} is a path; give batches, or "
            "zerojax.data.as_source(PATH, ...)[0]. Data from text files needs no validation=: "
            "its own validation part is used"
        )
    is_data = isinstance(validation, RowSource | Iterable) or callable(validation)
    if validation is not None and not is_data:
        raise TypeError(
            f"validation is a {type(validation).__name__}; give a list of batches, one batch, a "
            "function of the batch's number, or a TokenSource"
        )
    if callable(validation) and not isinstance(validation, RowSource | Iterable):
        check_function(validation, "validation")
    if isinstance(validation, Sequence | Mapping) and not validation:
        raise ValueError("validation is empty; give at least one batch, or None for no validation")


def each_batch(
    batches: Any, num_batches: int | None, default: int, rows: Callable[[], tuple[int, int]]
) -> Iterable[Any]:
    """Returns the host batches of an evaluation.

    Args:
      batches: a source, a function of the batch's number, one batch, or an iterable of batches.
      num_batches: maximum number of batches; None: all of an iterable, `default` of a source or a
        function.
      default: number of batches of a source or a function.
      rows: returns the range of rows of a source's batches that this process reads.
    """
    return map(as_arrays, _each_given(batches, num_batches, default, rows))


def _each_given(
    batches: Any, num_batches: int | None, default: int, rows: Callable[[], tuple[int, int]]
) -> Iterable[Any]:
    if isinstance(batches, RowSource):
        count, own = min(num_batches or default, max(1, int(batches.steps_per_epoch))), rows()
        return (batches.batch(index, *own) for index in range(count))
    if isinstance(batches, Mapping):
        batches = [batches]
    elif callable(batches) and not isinstance(batches, Iterable):
        count = default if num_batches is None else num_batches
        return (batches(index) for index in range(count))
    return itertools.islice(batches, num_batches)


def check_before_run(plan: Plan, validation: Any) -> None:
    """Raises if the plan's evaluation cannot use the validation data.

    Checks all batches of a list, the first and the last batch of another sequence, and the first
    batch of anything else.

    Raises:
      ValueError: names or shapes differ from the plan's batch, there is no batch, or a batch is
        short and its missing rows cannot be excluded from the loss.
    """
    if validation is None or isinstance(validation, RowSource):
        return
    if isinstance(validation, list | tuple):
        known = enumerate(validation)
    elif isinstance(validation, Sequence):
        places = dict.fromkeys([0, len(validation) - 1])
        known = ((place, validation[place]) for place in places)
    else:
        known = enumerate(each_batch(validation, 1, 1, lambda: local_rows(plan)))
    missing, number = {}, 0
    for place, batch in known:
        number += 1
        try:
            missing[place] = missing_rows(plan, batch)
        except ValueError as error:
            raise ValueError(f"validation, batch {place}: {error}") from None
    if not number:
        raise ValueError("validation has no batch; give at least one, or None for no validation")
    short = next((place for place, count in missing.items() if count), None)
    if short is not None and (why := why_not_filled(plan)):
        raise LeftOutError(f"validation, batch {short}, {_short_by(plan, missing[short])}: {why}")


def _short_by(plan: Plan, count: int) -> str:
    low, high = local_rows(plan)
    return f"has {high - low - count} rows, not {high - low}"


def why_not_filled(plan: Plan) -> str | None:
    """Returns why short batches are not possible, with a remedy; None if they are.

    They are possible if everything that the loss returns is a sum over rows, or a mean over a
    fixed number of rows. Then missing rows are filled with copies of one row, and the contribution
    of the copies is subtracted.
    """
    if jax.process_count() > 1:
        return (
            "with several processes every batch needs all of its rows; drop them, or fill the "
            "batch up with rows that the loss gives a weight of 0"
        )
    piece = slice_batch(plan.abstract_batch, num_data_shards(plan.mesh) * plan.num_microbatches)
    with attention_planned_for(plan.mesh, COMPILER_AXES):
        model = plan.users_model
        params, extras = abstract_model(model, plan.abstract_batch, plan.loss)
        read = as_read(params, plan.precision)
        trace = trace_model(model, read, extras, piece, plan.loss, train=False)
    part = part_with_mixed_rows(trace, params, extras, piece)
    if part is None:
        return None
    return (
        f"rows cannot be left out, since {part} is not known to be a sum or a mean of values that "
        "are computed row by row; drop the batch, give it all rows, or return pairs (sum, weight) "
        "in which rows can have a weight of 0"
    )


class Filler:
    """Computes the loss sums of batches, also of batches with missing rows.

    Missing rows are filled with copies, and the contribution of the copies is subtracted.

    Args:
      plan: of the evaluation.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._why: list[str | None] = []

    def sums(self, evaluate: Callable[[Any], Sums], batch: Any) -> Sums:
        """Returns `evaluate(batch)` over the rows that the batch has.

        Args:
          evaluate: returns sums over the rows of a full host batch.
          batch: on the host; may have fewer rows than the plan's batch.

        Raises:
          LeftOutError: the batch is short, and the loss mixes rows.
        """
        missing = missing_rows(self._plan, batch)
        if not missing:
            return evaluate(batch)
        if not self._why:  # tracing takes a while
            self._why.append(why_not_filled(self._plan))
        if self._why[0] is not None:
            raise LeftOutError(f"a batch {_short_by(self._plan, missing)}: {self._why[0]}")
        low, high = local_rows(self._plan)
        total = high - low
        copies = lambda x, count: np.repeat(np.asarray(x)[:1], count, axis=0)  # noqa: E731
        filled = jax.tree.map(lambda x: np.concatenate([np.asarray(x), copies(x, missing)]), batch)
        alone = jax.tree.map(lambda x: copies(x, total), batch)
        # Python floats are float64, so the subtraction of float32 sums adds no rounding error.
        return jax.tree.map(
            lambda both, copy: float(both) - missing / total * float(copy),
            evaluate(filled),
            evaluate(alone),
        )
