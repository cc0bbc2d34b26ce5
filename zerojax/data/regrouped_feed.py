"""Batches with other numbers of rows than those of the data: every row is used once, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zerojax.config.batch_division import RowsOfSteps
from zerojax.data.feed import REGROUPED, Batch, Feed, SourceFeed, State, logger
from zerojax.plan.refusals import check_rows


def in_sizes(feed: Feed, sizes: RowsOfSteps, *, start: int | None = None) -> Feed:
    """Returns a feed of the same rows in batches of other sizes.

    A `SourceFeed` reads the rows of each step by index. The batches of any other feed, of any size,
    are cut into rows, and the rows are put together in order.

    Args:
      feed: feed of the run's data; do not use it afterwards.
      sizes: number of rows of each step.
      start: number of steps taken before; the feed moves to the row after them. None: the feed
        keeps its position, and no step was taken.
    """
    if isinstance(feed, SourceFeed):
        feed.use_sizes(sizes)
        regrouped: Feed = feed
    else:
        regrouped = RegroupedFeed(feed, sizes)
    if start:
        regrouped.restore({"position": start}, allow_other_data=True)
    return regrouped


class RegroupedFeed(Feed):
    """Feed of the rows of another feed, in batches of other sizes.

    Its state holds the state of the other feed before the batch that is partly used, and the number
    of its used rows.
    """

    regroups = True

    def __init__(self, feed: Feed, sizes: RowsOfSteps) -> None:
        super().__init__(0)
        self.kind, self._feed, self._sizes = feed.kind, feed, sizes
        self._whole: Batch | None = None
        self._before, self._used = feed.state(), 0

    def _next(self) -> Batch:
        wanted, parts = self._sizes.rows(self._position + 1), []
        missing = wanted
        while missing:
            part = self._take(missing)
            if part is None:
                if parts:
                    logger.warning(
                        "data: the last %d rows are not used: the batch of step %d needs %d",
                        wanted - missing,
                        self._position + 1,
                        wanted,
                    )
                raise StopIteration
            parts.append(part)
            missing -= _num_rows(part)
        return parts[0] if len(parts) == 1 else jax.tree.map(_joined, *parts)

    def _take(self, most: int) -> Batch | None:
        """Returns the next rows of the current batch, at most `most`; None at the end of the
        data."""
        if self._whole is None or self._used == _num_rows(self._whole):
            self._before, self._used = self._feed.state(), 0
            try:
                self._whole = jax.tree.map(np.asarray, next(self._feed))
            except StopIteration:
                self._whole = None
                return None
            if not check_rows(self._whole):
                raise ValueError(
                    f"batch {self._feed.position - 1} of the data has 0 rows; return batches of at "
                    "least one row, or end the data"
                )
        low, high = self._used, min(self._used + most, _num_rows(self._whole))
        self._used = high
        return jax.tree.map(lambda x: x[low:high], self._whole)

    def epochs(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Returns {name of a data set: its epoch, from 1} for a state of this feed."""
        return self._feed.epochs(state.get(REGROUPED, {}).get("feed", {}))

    def _details(self) -> State:
        # The batch is used up, so the state after it is enough, and it need not be read again.
        if self._whole is not None and self._used == _num_rows(self._whole):
            return {REGROUPED: {"feed": self._feed.state(), "used": 0}}
        return {REGROUPED: {"feed": self._before, "used": self._used}}

    def _restore(self, position: int, details: Mapping[str, Any], allow_other: bool) -> None:
        if REGROUPED in details:
            inner, used = details[REGROUPED]["feed"], details[REGROUPED]["used"]
        elif details.get("kind") == self.kind:  # whole batches were used
            inner, used = details, 0
        else:
            batches, used = divmod(self._sizes.rows_before(position + 1), self._sizes.final)
            inner = {"kind": self._feed.kind, "position": batches}
        self._feed.restore(inner, allow_other_data=allow_other)
        self._whole, self._before, self._used = None, self._feed.state(), 0
        while used:
            part = self._take(used)
            if part is None:
                raise ValueError(
                    f"the data end {used} rows before the row after step {position}, where the "
                    "saved run stopped; pass the data of the saved run"
                )
            used -= _num_rows(part)


def _num_rows(batch: Batch) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)
