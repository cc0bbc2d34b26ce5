"""Batch feeds: iterators of batches whose position can be saved, to resume a run."""

from __future__ import annotations

import abc
import base64
import collections
import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import jax

from zerojax.config.batch_division import RowsOfSteps
from zerojax.data.source import RowSource
from zerojax.models.given_arrays import as_arrays, own_arrays

logger = logging.getLogger("zerojax.data")

Batch = Mapping[str, Any]
State = dict[str, Any]
REGROUPED = "regrouped"
"""Key in the state of a feed whose batches are made of rows of another feed's batches."""
ITERATOR = "iterator"
"""Key in the state of a feed with the result of `get_state` of the user's iterator."""
_OTHERS = "batches=zerojax.data.as_feed(batches, allow_other_data=True)"


class Feed(abc.ABC):
    """Iterator of batches, endless or ending, whose position can be saved and restored.

    Batches are copies: whoever makes them may fill the same arrays again for the next batch.

    To resume with the batch that follows, call `state()` right after `next()`. The state is
    JSON-compatible.
    """

    kind: str
    """Type of the data. It is part of the state, so that data of another type are detected."""

    regroups = False
    """Whether the feed makes its batches from the rows of another feed's batches."""

    allow_other_data = False
    """Whether `restore` accepts a state of other data than the feed's; it then continues at the
    same number of batches."""

    def __init__(self, start: int):
        if start < 0:
            raise ValueError(f"start={start}: the first step is at least 0")
        self._position = start
        self._returned: collections.deque[tuple[Batch, State]] = collections.deque()
        self._returned_state: State | None = None
        self._rows: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._returned:
            batch, self._returned_state = self._returned.popleft()
            return batch
        self._returned_state = None
        batch = self._cut(as_arrays(self._next()))
        if not self.regroups:  # such a feed's rows come from batches that were copied before
            batch = own_arrays(batch)
        self._position += 1
        return batch

    @property
    def position(self) -> int:
        """Number of batches returned since the start of the run, which is the next batch's step."""
        return int(self.state()["position"])

    def state(self) -> State:
        """Returns `{"kind": ..., "position": number of batches returned so far, ...}`."""
        if self._returned_state is not None:
            return self._returned_state
        return {"kind": self.kind, "position": self._position, **self._details()}

    def restore(self, state: Mapping[str, Any], *, allow_other_data: bool | None = None) -> None:
        """Continues with the batch that came next when `state` was taken.

        Args:
          state: result of `state()`, possibly of an earlier process.
          allow_other_data: whether to continue at the same number of batches if the data differ
            from those of the state; None uses the attribute of this name.

        Raises:
          ValueError: the state belongs to other data or another type of data.
        """
        if not isinstance(state, Mapping) or type(state.get("position")) is not int:
            raise ValueError(f"data state {str(state)[:80]!r} has no 'position'; pass Feed.state()")
        if allow_other_data is None:
            allow_other_data = self.allow_other_data
        details = state
        if REGROUPED in state and not (self.regroups or allow_other_data):
            raise ValueError(
                f"the batches of the saved run grew, so its {state['position']} steps are not so "
                "many batches of the data; continue with its settings (batch_ramp), or continue "
                f"after so many batches nevertheless: {_OTHERS}"
            )
        if state.get("kind") != self.kind:
            if not allow_other_data:
                raise ValueError(
                    f"the saved data position is for data of type {state.get('kind')!r}, but the "
                    f"current data are of type {self.kind!r}; pass the data of the saved run, "
                    "or continue "
                    "with other data: " + _OTHERS
                )
            details = {}
        self._restore(int(state["position"]), details, allow_other_data)
        self._returned.clear()
        self._returned_state = None
        self._position = int(state["position"])

    def take_rows(self, low: int, high: int) -> None:
        """Cuts every following batch to the rows `low` to `high` (exclusive) of the data's batch.

        For a run with several processes that all read the global batch.
        """
        self._rows = low, high
        self._returned = collections.deque((self._cut(b), state) for b, state in self._returned)

    def peek(self) -> list[tuple[Batch, State]]:
        """Returns the batches that `give_back` put back and that are not read again yet, each with
        the state after it."""
        return list(self._returned)

    def _cut(self, batch: Batch) -> Batch:
        if self._rows is None:
            return batch
        low, high = self._rows
        return jax.tree.map(lambda x: x[low:high] if getattr(x, "shape", ()) else x, batch)

    def give_back(self, batches: Iterable[tuple[Batch, State]], state: State) -> None:
        """Puts back batches that were read but not used; the feed returns them first.

        Args:
          batches: pairs `(batch, state after it)`, in order.
          state: state before the first of these batches.
        """
        for item in reversed(list(batches)):
            self._returned.appendleft(item)
        if self._returned:
            self._returned_state = state

    def advances(self, batches: object) -> bool:
        """Returns whether reading this feed moves the user's iterator `batches`."""
        del batches
        return False

    def epochs(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Returns {name of a data set: its epoch, from 1} for a state of this feed; may be
        empty."""
        del state
        return {}

    @abc.abstractmethod
    def _next(self) -> Batch:
        """Returns the next batch; raises StopIteration at the end."""

    def _details(self) -> State:
        """Returns the entries of the feed's state besides kind and position."""
        return {}

    @abc.abstractmethod
    def _restore(self, position: int, details: Mapping[str, Any], allow_other: bool) -> None:
        """Moves the feed to batch `position`; `details` is the whole saved state, or empty if the
        state is of another type of data."""


class SourceFeed(Feed):
    """Feed of the batches of a `RowSource`; its state also holds the index of the next row, under
    "row"."""

    def __init__(self, source: RowSource, start: int, rows: tuple[int, int] | None):
        super().__init__(start)
        self.kind, size = source.kind, source.global_batch_size
        self._source = source
        self._lo, self._hi = rows or (0, size)
        if not 0 <= self._lo < self._hi <= size:
            raise ValueError(f"rows={rows} are not within the {size} rows of a global batch")
        self._row = start * size
        self._sizes: RowsOfSteps | None = None

    def use_sizes(self, sizes: RowsOfSteps) -> None:
        """Gives every following batch the number of rows of its step.

        Of a batch of s rows, each process reads its part: the rows `lo` s / B to `hi` s / B, where
        `lo` and `hi` are its rows of a full batch of B rows.

        Args:
          sizes: rows of the steps; the full batch is that of the source.
        """
        state, self._sizes = self.state(), sizes
        self.restore(state)  # forgets batches that were read ahead with another size

    def _next(self) -> Batch:
        size, whole = self._source.global_batch_size, self._source.global_batch_size
        if self._sizes is not None:
            size = self._sizes.rows(self._position + 1)
        low, high = self._lo * size // whole, self._hi * size // whole
        batch = self._source.rows(self._row + low, self._row + high)
        self._row += size
        return batch

    def epochs(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Returns {name of a data set: its epoch, from 1} for a state of this feed."""
        return self._source.epochs(int(state["row"])) if "row" in state else {}

    def _details(self) -> State:
        # Saves the row, not only the step, so that a run that continues with another
        # global_batch_size resumes at the row where it stopped, and an epoch still has every window
        # once.
        return {"row": self._row, "data": self._source.fingerprint()}

    def _restore(self, position: int, details: Mapping[str, Any], allow_other: bool) -> None:
        saved, now = details.get("data", {}), self._source.fingerprint()
        differing = [key for key in now if key in saved and saved[key] != now[key]]
        if differing and not allow_other:
            changes = ", ".join(f"{key} was {saved[key]!r}, is {now[key]!r}" for key in differing)
            raise ValueError(
                f"the data differ from those of the saved run ({changes}), so the saved "
                "position is not "
                "valid for them; pass the same data and seed, start a new run in another "
                f"checkpoint folder, or continue with other data: {_OTHERS}"
            )
        row = details.get("row")
        same = row is not None and not differing
        if same:
            self._row = int(row)
        elif self._sizes is not None:
            self._row = self._sizes.rows_before(position + 1)
        else:
            self._row = position * self._source.global_batch_size


class FunctionFeed(Feed):
    """Feed of a function `step -> batch`, with steps from 0; it can move to any position
    immediately."""

    kind = "function"

    def __init__(self, function: Callable[[int], Batch], start: int):
        super().__init__(start)
        self._function = function

    def _next(self) -> Batch:
        return self._function(self._position)

    def _restore(self, position: int, details: Mapping[str, Any], allow_other: bool) -> None:
        del position, details, allow_other  # the base class keeps the position


class IterableFeed(Feed):
    """Feed of any iterable. An iterable that can be iterated again is repeated at its end; an
    iterator ends.

    An iterator with `get_state` and `set_state` (grain) is restored by these methods. Their states
    are copied, so an iterator may return and keep a dict that it changes. Any other iterator
    returns to its position by reading and discarding all earlier batches, which is logged.
    """

    kind = "iterable"

    def __init__(self, iterable: Iterable[Batch], start: int):
        super().__init__(start)
        self._iterable = iterable
        self._iterator: Any = iter(iterable)
        self._is_one_shot = self._iterator is iterable
        self._has_state = all(hasattr(self._iterator, n) for n in ("get_state", "set_state"))
        if self._has_state:
            self.kind = "stateful iterator"
        self._read = 0
        self._to_skip = start

    def advances(self, batches: object) -> bool:
        """Returns whether reading this feed moves the user's iterator `batches`."""
        return self._is_one_shot and self._iterable is batches

    def _next(self) -> Batch:
        # Not before a batch is requested, because `restore` may still set another position.
        if self._to_skip:
            logger.warning(
                "data: reading and discarding %d batches to reach the batch after step %d; to "
                "resume immediately pass a function of the step, or an iterator with get_state and "
                "set_state",
                self._read + self._to_skip,  # a batch may have been read to plan the run
                self._position,
            )
            while self._to_skip:
                self._advance()
                self._to_skip -= 1
        return self._advance()

    def _advance(self) -> Batch:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._is_one_shot:
                raise
            self._iterator = iter(self._iterable)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise ValueError(
                    f"the data ({type(self._iterable).__name__}) returned no batch when iterated "
                    f"(after {self._read} batches); pass an iterable with at least one"
                ) from None
        self._read += 1
        return batch

    def _details(self) -> State:
        # While batches are still to be skipped, the iterator's own state is that of an earlier
        # position.
        if not self._has_state or self._to_skip:
            return {}
        state = self._iterator.get_state()
        try:
            state = copy.deepcopy(state)  # batches are read ahead, and it may be a dict in use
        except Exception as error:  # any object's own error, such as one about a generator
            raise TypeError(
                f"the state from get_state() of the data ({type(self._iterator).__name__}) cannot "
                f"be copied: {error}; return numbers, text, lists and dicts of these"
            ) from error
        return {ITERATOR: _as_json(state)}

    def _restore(self, position: int, details: Mapping[str, Any], allow_other: bool) -> None:
        if self._has_state and ITERATOR in details:
            self._iterator.set_state(copy.deepcopy(_from_json(details[ITERATOR])))
            self._to_skip, self._read = 0, position
            return
        if position < self._read:
            if self._is_one_shot:
                raise ValueError(
                    f"the data iterator has already returned {self._read} batches and cannot go "
                    f"back to {position}; pass a fresh iterator, a list, or a function of the step"
                )
            self._iterator = iter(self._iterable)
            self._read = 0
        self._to_skip = position - self._read


def as_feed(
    batches: object,
    *,
    start: int = 0,
    rows: tuple[int, int] | None = None,
    allow_other_data: bool = False,
) -> Feed:
    """Makes a `Feed` from a user's batches.

    Args:
      batches: a `RowSource`, a function `step -> batch` (steps from 0), a sequence or iterable of
        batches (which is repeated at its end), or an iterator (which ends). From a `RowSource` each
        of several processes reads only its `rows`; other data are used unchanged (`zerojax.train`
        finds out which rows they contain). A `Feed` is returned itself.
      start: number of the first step; `Feed.restore` restores a saved state more exactly.
      rows: `(lo, hi)` of each global batch that this process reads from a `RowSource`; None reads
        all rows.
      allow_other_data: whether a saved run may continue with these batches although the data
        differ; it continues at the same number of batches.

    Raises:
      TypeError: `batches` is a single batch, a path, an object that is not data, or a `Feed`
        although `start` or `rows` is given.
      ValueError: the sequence is empty, `start` is negative, or `rows` are outside the batch.
    """
    if isinstance(batches, Feed) and (start or rows):
        raise TypeError("this is already a Feed; omit start and rows, or use Feed.restore(state)")
    feed = batches if isinstance(batches, Feed) else _new_feed(batches, start, rows)
    feed.allow_other_data |= allow_other_data
    return feed


def _new_feed(batches: object, start: int, rows: tuple[int, int] | None) -> Feed:
    if isinstance(batches, RowSource):
        return SourceFeed(batches, start, rows)
    if isinstance(batches, str | Path) or batches is None:
        raise TypeError(
            f"batches={batches!r} is not a source of batches; pass the first of the three "
            "results of zerojax.data.as_source(...)"
        )
    if isinstance(batches, Mapping):
        raise TypeError(
            f"batches is a single batch with keys {sorted(map(str, batches))[:8]}; pass [batch] to "
            "train on it repeatedly, or an iterable of batches"
        )
    if isinstance(batches, Sequence):
        if not batches:
            raise ValueError("batches is empty (length 0); pass at least one batch")
        few = batches[:2] if isinstance(batches, list | tuple) else ()
        shapes = [list(item.shape) for item in few if getattr(item, "shape", ())]
        if len(shapes) == 2 and shapes[0][1:] != shapes[1][1:]:
            raise TypeError(
                f"batches is a single batch, a {type(batches).__name__} of arrays {shapes[0]}, "
                f"{shapes[1]}, ...; pass [batch] to train on it repeatedly, or an iterable of "
                "batches"
            )
        return FunctionFeed(lambda step: batches[step % len(batches)], start)
    if isinstance(batches, Iterable):
        return IterableFeed(batches, start)
    if callable(batches):
        check_function(batches, "batches")
        return FunctionFeed(batches, start)
    raise TypeError(
        f"batches is a {type(batches).__name__}; pass a TokenSource, an iterable of batches, or a "
        "function of the step"
    )


def check_function(function: Callable[..., Any], option: str) -> None:
    """Checks that a function maps a batch number to a batch.

    Args:
      function: the user's function.
      option: name of the option that passes the function, for messages.

    Raises:
      TypeError: it is a generator function, or cannot be called with one argument.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{option} is the generator function {name}, which returns an iterator instead of a "
            f"batch; pass the batches themselves, such as {option}=list({name}(...)), or a "
            "function of the batch's number that returns one"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not every callable has a signature
        return
    try:
        signature.bind(0)
    except TypeError as error:
        raise TypeError(
            f"{option} is a function, which is called with the number of a batch, but "
            f"{name}{signature} cannot be called so: {error}; write def {name}(number), or pass a "
            "list of batches"
        ) from None


def one_pass(batches: object) -> tuple[Any, int | None]:
    """Returns batches for one pass over the data, and how many there are.

    An iterable of unknown length becomes an iterator, which ends. Batches of known length, endless
    batches, a single batch, a path and a `Feed` are returned unchanged: the caller stops after the
    number.

    Args:
      batches: batches in any form that `as_feed` accepts.

    Returns:
      (batches, number of batches of one pass; None if unknown, endless or 0).
    """
    if has_no_end(batches) or isinstance(batches, Mapping | str | Path | Feed):
        return batches, None
    if isinstance(batches, Sized):
        with contextlib.suppress(TypeError):  # torch's loader of an IterableDataset has no length
            return batches, len(batches) or None
    return iter(batches) if isinstance(batches, Iterable) else batches, None


def has_no_end(batches: object) -> bool:
    """Returns whether batches are endless: those of a `RowSource`, of a function of the step, and
    None, the embedded text."""
    is_function = callable(batches) and not isinstance(batches, Iterable)
    return batches is None or isinstance(batches, RowSource) or is_function


def _as_json(value: object) -> Any:
    """Converts bytes to {"base64": ...}; other values are unchanged."""
    if isinstance(value, bytes | bytearray):
        return {"base64": base64.b64encode(value).decode("ascii")}
    return value


def _from_json(value: object) -> Any:
    if isinstance(value, Mapping) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"])
    return value
