"""Checks validation data before a run, iterates over it, and handles batches with missing rows.

This module knows plans and host batches. The callbacks of evaluations are in `evaluation`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.data import (
    DatasetSource,
    Feed,
    RowSource,
    as_dataset_source,
    is_dataset,
    local_rows,
    missing_rows,
)
from zerojax.data.feed import check_function
from zerojax.models.given_arrays import as_arrays, own_arrays
from zerojax.operators.attention_choice import attention_planned_for
from zerojax.placement.device_mesh import COMPILER_AXES
from zerojax.placement.state import abstract_model, as_read, slice_batch
from zerojax.plan.loss_checks import OVER_BATCH, part_with_mixed_rows
from zerojax.plan.make import Plan
from zerojax.tracing import trace_model

Sums = Mapping[str, Any]
DEFAULT_BATCHES = 8
"""Number of batches per evaluation of a text or a function, unless the user sets it."""


class LeftOutError(ValueError):
    """A batch has too few rows, and missing rows cannot be excluded from the loss."""


@dataclass(frozen=True)
class FilledBatch:
    """A batch in which copies of one row replace missing rows.

    Attributes:
      batch: rows of this process on the host, including the copies.
      copies: batch of the same shape in which every row is the copied row; None if nothing was
        copied.
      missing: number of copies in the global batch.
    """

    batch: Batch
    copies: Any = None
    missing: int = 0


def check_validation(validation: object) -> None:
    """Raises if `validation` is not data that can be read again at every evaluation.

    Raises:
      TypeError: `validation` is an iterator, a path, or an object that is no data.
      ValueError: `validation` is an empty list or dict.
    """
    if isinstance(validation, Iterator | Feed):
        raise TypeError(
            f"validation is a {type(validation).__name__}, which can be read only once, but every "
            "evaluation reads it anew; give a list of batches, a function of the batch's number, "
            "or a TokenSource"
        )
    _check_no_path(
        "validation",
        validation,
        ". Data from text files needs no validation=: its own validation part is used",
    )
    is_data = isinstance(validation, RowSource | Iterable) or callable(validation)
    if validation is not None and not (is_data or is_dataset(validation)):
        raise TypeError(
            f"validation is a {type(validation).__name__}; give a list of batches, one batch, a "
            "function of the batch's number, a dataset of rows, or a TokenSource"
        )
    if callable(validation) and not isinstance(validation, RowSource | Iterable):
        check_function(validation, "validation")
    if isinstance(validation, Sequence | Mapping) and not validation:
        raise ValueError("validation is empty; give at least one batch, or None for no validation")


def _check_no_path(name: str, data: object, more: str = "") -> None:
    if isinstance(data, str | Path):
        raise TypeError(
            f"{name}={str(data)!r} is a path; give batches, or zerojax.data.as_source(PATH, "
            f"...)[0]{more}"
        )


def in_batches(data: object, global_batch_size: int) -> Any:
    """Converts a dataset of rows to a source of batches; returns other data unchanged.

    Args:
      data: validation data in any form that `zerojax.train` takes, or None.
      global_batch_size: number of rows of a global batch of the plan.

    Raises:
      TypeError: `data` is a path.
    """
    _check_no_path("batches", data)
    if isinstance(data, DatasetSource):
        return dataclasses.replace(data, global_batch_size=global_batch_size)
    return as_dataset_source(data, global_batch_size=global_batch_size, seed=0, shuffle=False)


def each_batch(
    batches: Any,
    num_batches: int | None,
    default: int | None,
    rows: Callable[[], tuple[int, int]],
) -> Iterable[Any]:
    """Returns the host batches of an evaluation; a short batch of a dataset is a `FilledBatch`.

    Args:
      batches: a source, a function of the batch's number, one batch, or an iterable of batches.
      num_batches: maximum number of batches; None: all of an iterable, `default` otherwise.
      default: maximum number of batches of a source or a function; None: all of a dataset,
        `DEFAULT_BATCHES` of another source or a function.
      rows: function that returns the range of rows of a source's batches that this process reads.
    """
    limit = default if num_batches is None else num_batches
    if isinstance(batches, RowSource):
        own = rows()
        return (_batch_of(batches, index, *own) for index in range(_num_batches(batches, limit)))
    if isinstance(batches, Mapping):
        batches = [batches]
    elif callable(batches) and not isinstance(batches, Iterable):
        count = DEFAULT_BATCHES if limit is None else limit
        return (as_arrays(batches(index)) for index in range(count))
    return map(as_arrays, itertools.islice(batches, num_batches))


def _num_batches(source: RowSource, limit: int | None) -> int:
    """Returns the number of batches of an evaluation; of a text only full batches are counted."""
    if isinstance(source, DatasetSource):
        count = math.ceil(source.steps_per_epoch)
        return count if limit is None else min(limit, count)
    return min(DEFAULT_BATCHES if limit is None else limit, max(1, int(source.steps_per_epoch)))


def _batch_of(source: RowSource, index: int, low: int, high: int) -> Any:
    size = source.global_batch_size
    missing = (index + 1) * size - source.num_rows
    if missing <= 0 or not isinstance(source, DatasetSource):
        return as_arrays(source.batch(index, low, high))
    last = source.num_rows - 1  # all processes read this row, so they all add the same copies
    numbers = np.minimum(index * size + np.arange(low, high), last)
    filled = own_arrays(as_arrays(source.rows_at(numbers)))
    return FilledBatch(filled, as_arrays(source.rows_at(np.full_like(numbers, last))), missing)


def describe_limit(validation: object, eval_batches: int | None) -> str | None:
    """Returns a log line about the evaluated share of a source; None if all rows are evaluated.

    Args:
      validation: validation data of the run.
      eval_batches: number of batches per evaluation that the user set; None: not set.
    """
    if not isinstance(validation, RowSource):
        return None
    count = _num_batches(validation, eval_batches)
    rows, size = validation.num_rows, validation.global_batch_size
    if count * size >= rows:
        return None
    return (
        f"validation: an evaluation reads {count * size:,} of {rows:,} rows ({count} batches of "
        f"{size}); eval_batches= sets the number of batches"
    )


def check_before_run(plan: Plan, validation: object, eval_batches: int | None) -> None:
    """Raises if the plan's evaluation cannot use the validation data.

    Checks all batches of a list, the first and the last batch of another sequence, the number of
    rows of a dataset, and the first batch of other data. A source of text is not checked.

    Args:
      plan: plan of the run.
      validation: validation data of the run, or None.
      eval_batches: number of batches per evaluation that the user set; None: not set.

    Raises:
      ValueError: names or shapes differ from the plan's batch, there is no batch, or a batch is
        short and its missing rows cannot be excluded from the loss.
    """
    if isinstance(validation, DatasetSource):
        _check_rows(plan, validation, eval_batches)
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
    if short is not None and (why := _why_refused(plan)):
        low, high = local_rows(plan)
        which = f"batch {short}, {_is_short(high - low, missing[short])}"
        raise LeftOutError(f"validation, {which}: {why}")


def _check_rows(plan: Plan, source: DatasetSource, eval_batches: int | None) -> None:
    """Raises LeftOutError if the last batch of a dataset is short and the loss mixes rows."""
    rows, size = source.num_rows, source.global_batch_size
    whole = rows // size
    if _num_batches(source, eval_batches) <= whole or (why := why_not_filled(plan)) is None:
        return
    remedy = f"pass eval_batches={whole} to leave out the last {rows % size} rows"
    if not whole:
        remedy = "pass a dataset with at least that many rows"
    raise LeftOutError(
        f"validation has {rows:,} rows, and the last batch {_is_short(size, size - rows % size)}: "
        f"{why}; {remedy}"
        + ("" if OVER_BATCH in why else ", or return pairs (sum, weight) from the loss")
    )


def _is_short(rows: int, missing: int) -> str:
    return f"has {rows - missing} rows, not {rows}"


def _why_refused(plan: Plan, *, of_dataset: bool = False) -> str | None:
    """Returns why batches with missing rows are refused, with a remedy; None if accepted."""
    if jax.process_count() > 1 and not of_dataset:
        return (
            "with several processes every batch needs all of its rows; drop them, or fill the "
            "batch up with rows that the loss gives a weight of 0"
        )
    why = why_not_filled(plan)
    if why is None or OVER_BATCH in why:
        return why and f"{why}; drop the batch, or give it all rows"
    return (
        f"{why}; drop the batch, give it all rows, or return pairs (sum, weight) in which rows can "
        "have a weight of 0"
    )


def why_not_filled(plan: Plan) -> str | None:
    """Returns why missing rows of a batch cannot be replaced by copies; None if they can.

    They can if everything that the loss returns is a sum over rows, or a mean over a fixed number
    of rows. Then missing rows are filled with copies of one row, and the copies' contribution is
    subtracted.
    """
    pieces = plan.division.unit
    if pieces == plan.global_batch_size:  # with one row, the row dimension cannot be found
        pieces = 1
    piece = slice_batch(plan.abstract_batch, pieces, plan.precision, plan.traced.exact_leaves)
    with attention_planned_for(plan.mesh, COMPILER_AXES):
        model = plan.users_model
        params, extras = abstract_model(model, plan.abstract_batch, plan.loss)
        read = as_read(params, plan.precision)
        trace = trace_model(model, read, extras, piece, plan.loss, train=False)
    part = part_with_mixed_rows(trace, params, extras, piece)
    if part is None:
        return None
    return (
        f"missing rows cannot be excluded, because {part} is not known to be a sum or a mean of "
        "values that are computed row by row"
    )


class Filler:
    """Computes loss sums of batches, including batches with missing rows.

    Missing rows are filled with copies, and the copies' contribution is subtracted.

    Args:
      plan: plan of the evaluation.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._why = functools.cache(functools.partial(_why_refused, plan))  # tracing takes a while

    def fill(self, batch: Batch) -> FilledBatch:
        """Fills missing rows of a short host batch with copies of one row.

        Args:
          batch: a batch from `each_batch`.

        Raises:
          LeftOutError: the batch is short, and the loss mixes rows or (unless a dataset gave it)
            there are several processes.
          ValueError: names or shapes differ from the plan's batch in another way.
        """
        if isinstance(batch, FilledBatch):
            if (why := self._why(of_dataset=True)) is not None:
                size = self._plan.global_batch_size
                raise LeftOutError(f"the last batch {_is_short(size, batch.missing)}: {why}")
            return batch
        missing = missing_rows(self._plan, batch)
        if not missing:
            return FilledBatch(batch)
        low, high = local_rows(self._plan)
        if (why := self._why()) is not None:
            raise LeftOutError(f"a batch {_is_short(high - low, missing)}: {why}")
        copies = lambda x, count: np.repeat(np.asarray(x)[:1], count, axis=0)  # noqa: E731
        return FilledBatch(
            jax.tree.map(lambda x: np.concatenate([np.asarray(x), copies(x, missing)]), batch),
            jax.tree.map(lambda x: copies(x, high - low), batch),
            missing,
        )

    def sums(self, evaluate: Callable[[Any], Sums], filled: FilledBatch) -> Sums:
        """Returns the sums over a filled batch's own rows, without the copies.

        Args:
          evaluate: function that returns sums over the rows of a full host batch.
          filled: result of `fill`.
        """
        if not filled.missing:
            return evaluate(filled.batch)
        share = filled.missing / self._plan.global_batch_size
        # Python floats are float64, so subtracting float32 sums adds no rounding error.
        return jax.tree.map(
            lambda both, copy: float(both) - share * float(copy),
            evaluate(filled.batch),
            evaluate(filled.copies),
        )
