"""Weighted mixtures of sources: each row of a batch is a row of one source.

Rows are assigned in blocks of 1,024. A block's number of rows of each source follows from the
weights and the block's index; their order follows from a permutation of the block. The mapping from
row index to (source, row of the source) therefore needs no state and no search.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.data.shuffle import permute
from zerojax.data.source import RowSource, check_sizes

BLOCK = 1024
# Weights are multiples of 1 / UNITS, so that counts are integers and equal on every machine.
UNITS = 1 << 20
# Part of random keys, to differ from the keys of the sources' shuffles and of masks.
_STREAM = (0, 2)

AtEnd = Literal["repeat", "stop"]


@dataclass(frozen=True)
class _Phase:
    """Range of blocks in which the same sources provide rows, between the ends of two sources.

    Attributes:
      first: index of the first block.
      units: int64 [sources], share of each source, as a multiple of 1 / `UNITS`; if the phase is
        one block, number of rows of each source.
      before: int64 [sources], number of rows that each source provided before this phase.
      is_one_block: whether the phase is the single block in which a source ends.
    """

    first: int
    units: np.ndarray
    before: np.ndarray
    is_one_block: bool

    def given(self, block: int) -> np.ndarray:
        """Returns how many rows each source has provided before block `block`, int64 [sources]."""
        if self.is_one_block:
            return self.before + (block - self.first) * self.units
        return self.before + largest_remainders((block - self.first) * BLOCK, self.units)


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MixtureSource(RowSource):
    """Rows of several sources in proportion to their weights.

    After each block of 1,024 rows the number of rows from every source equals its share of all
    rows, up to one row. After its last row a source starts its next epoch, or stops, and the others
    take over its share.
    """

    kind: ClassVar[str] = "mixture"

    sources: tuple[RowSource, ...]
    """Sources of the mixture; their own batch sizes are ignored. Arrays that a source lacks are
    filled in: "weights" of 1, one segment per row, and the positions in it."""
    weights: tuple[float, ...]
    """Weight of each source; the sum is arbitrary."""
    names: tuple[str, ...]
    """Name of each source, for messages."""
    at_end: tuple[AtEnd, ...] = ()
    """Action of each source after its last row, "repeat" or "stop"; empty: all repeat."""
    global_batch_size: int
    """Number of rows per batch, over all processes."""
    seed: int = 0
    """Random seed for the order of rows within blocks."""
    seq_len: int = dataclasses.field(init=False)
    """Number of tokens of a row."""
    vocab_size: int | None = dataclasses.field(init=False, default=None)
    """Largest `vocab_size` of the sources; None if that of any source is unknown."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("the mixture has 0 sources; pass at least one")
        sizes = [source.vocab_size for source in self.sources]
        known = [size for size in sizes if size is not None]
        for name, value in (
            ("at_end", self.at_end or ("repeat",) * len(self.sources)),
            ("seq_len", self.sources[0].seq_len),
            ("vocab_size", max(known) if len(known) == len(sizes) else None),
        ):
            object.__setattr__(self, name, value)
        check_sizes(self)
        for field in ("weights", "names", "at_end"):
            if len(getattr(self, field)) != len(self.sources):
                raise ValueError(
                    f"{field} has {len(getattr(self, field))} entries for {len(self.sources)} "
                    "sources of the mixture; give one for each"
                )
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                f"the sources of the mixture are called {list(self.names)}; give each a unique "
                "name, and merge repeated data into one source"
            )
        for name, source in zip(self.names, self.sources, strict=True):
            if source.seq_len != self.seq_len:
                raise ValueError(
                    f"{name} has rows of seq_len={source.seq_len}, {self.names[0]} of "
                    f"{self.seq_len}; use the same for all sources of a mixture"
                )
        self._check_tokenizers()
        if not set(self.at_end) <= {"repeat", "stop"}:
            raise ValueError(f"at_end={list(self.at_end)} is not valid; use repeat or stop")
        if "repeat" not in self.at_end:
            raise ValueError(
                "every source of the mixture stops at its end, but the run needs rows until its "
                "last "
                "step; let at least one source repeat (at_end: repeat)"
            )
        _check_weights(self.weights, self.names)
        self.array_names  # noqa: B018 - raises if the sources have different types of rows

    def _check_tokenizers(self) -> None:
        known = [
            (name, source.tokenizer)
            for name, source in zip(self.names, self.sources, strict=True)
            if source.tokenizer is not None
        ]
        for (one, first), (other, second) in itertools.pairwise(known):
            if first != second:
                raise ValueError(
                    f"{one} and {other} were made by different tokenizers; prepare all sources of "
                    "a mixture with one"
                )

    @property
    def tokenizer(self) -> Mapping[str, Any] | None:
        """Tokenizer that made the ids of all sources."""
        return next((x.tokenizer for x in self.sources if x.tokenizer is not None), None)

    @property
    def template(self) -> str | None:
        """Chat template of the first source that has one."""
        return next((x.template for x in self.sources if x.template is not None), None)

    @property
    def num_rows(self) -> int:
        """Sum of the sources' numbers of rows. With uneven weights, sources end their epochs at
        different rows."""
        return sum(source.num_rows for source in self.sources)

    @functools.cached_property
    def array_names(self) -> tuple[str, ...]:
        """Names of the arrays in the mixture's rows.

        Raises:
          ValueError: sources have different types of rows, such as masked tokens and plain text.
        """
        found = [
            {name: value.shape[1:] for name, value in source.rows(0, 1).items()}
            for source in self.sources
        ]
        names = tuple(dict.fromkeys(name for shapes in found for name in shapes))
        if all(shapes == found[0] for shapes in found):
            return names
        for label, shapes in zip(self.names, found, strict=True):
            missing = sorted(set(names) - set(shapes) - set(_FILLED))
            odd = sorted(name for name, shape in shapes.items() if shape != (self.seq_len,))
            if missing or odd:
                raise ValueError(
                    f"the rows of {label} have {sorted(shapes)}, the rows of the mixture have "
                    f"{sorted(names)}, and there is no default for {missing or odd}; mix only "
                    "sources "
                    "of the same type"
                )
        return names

    @functools.cached_property
    def _phases(self) -> tuple[_Phase, ...]:
        return tuple(_phases(self.weights, self._limits))

    @property
    def _limits(self) -> list[int | None]:
        """Total number of rows that each source provides; None for a source without limit."""
        pairs = zip(self.sources, self.at_end, strict=True)
        return [source.num_rows if end == "stop" else None for source, end in pairs]

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Maps row indices of the mixture to (source, row of the source).

        Args:
          numbers: int64 [rows], row indices of the mixture.

        Returns:
          (indices of sources, rows of these sources), int64 [rows] each.
        """
        sources, rows = np.empty_like(numbers), np.empty_like(numbers)
        blocks = numbers // BLOCK
        for block in np.unique(blocks).tolist():
            mine = blocks == block
            drawn = permute(numbers[mine] % BLOCK, BLOCK, (self.seed, *_STREAM, block))
            before, after = self._given(block), self._given(block + 1)
            ends = np.cumsum(after - before)
            # From the right: a source without rows in this block ends where the source before it
            # ends.
            chosen = np.searchsorted(ends, drawn, side="right")
            starts = ends - (after - before)
            sources[mine] = chosen
            rows[mine] = before[chosen] + drawn - starts[chosen]
        return sources, rows

    def _given(self, block: int) -> np.ndarray:
        """Returns how many rows each source has provided before block `block`, int64 [sources]."""
        firsts = [phase.first for phase in self._phases]
        return self._phases[bisect.bisect_right(firsts, block) - 1].given(block)

    def rows_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the mixture's rows by index; a pure function. The arrays are those of the
        sources."""
        sources, rows = self.places(numbers)
        made: dict[str, np.ndarray] = {}
        for index in np.unique(sources).tolist():
            mine = sources == index
            found = _filled(self.sources[index].rows_at(rows[mine]), self.array_names)
            for name, value in found.items():
                if name not in made:
                    made[name] = np.empty((len(numbers), *value.shape[1:]), value.dtype)
                made[name][mine] = value
        return made

    def epochs(self, row: int) -> dict[str, int]:
        """Returns {name of a source: its epoch, from 1} after `row` rows of the mixture."""
        block, within = divmod(row, BLOCK)
        given = self._given(block)
        if within:
            first = np.arange(block * BLOCK, row, dtype=np.int64)
            given = given + np.bincount(self.places(first)[0], minlength=len(self.sources))
        # This is the epoch of the last row.
        pairs = zip(self.names, given.tolist(), self.sources, strict=True)
        return {name: 1 + max(rows - 1, 0) // source.num_rows for name, rows, source in pairs}

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that determine which data a row index refers to; saved in
        checkpoints."""
        return {
            "sources": [source.fingerprint() for source in self.sources],
            "weights": list(self.weights),
            "at_end": list(self.at_end),
            "seed": self.seed,
        }

    def describe(self) -> str:
        """Describes the mixture in one line for the log."""
        shares = _units(self.weights) / UNITS
        parts = [
            f"{100 * share:.3g} % {source.describe()}"
            + (" (stops at its end)" if end == "stop" else "")
            for share, source, end in zip(shares, self.sources, self.at_end, strict=True)
        ]
        return "mixture of " + "; ".join(parts)


def largest_remainders(total: int, units: np.ndarray) -> np.ndarray:
    """Divides `total` items in proportion to `units`; each count is less than 1 off its exact
    share.

    If each share is at least 1/1,024, no count decreases when `total` grows by 1,024, because its
    exact share then grows by at least one.

    Args:
      total: number of items, at least 0.
      units: int64 [n] >= 0 with a sum of `UNITS`.

    Returns:
      Counts, int64 [n] with a sum of `total`.
    """
    rounds, rest = divmod(total, UNITS)  # keeps products below 64 bits
    quotas = rest * units
    counts = quotas // UNITS
    left = rest - int(counts.sum())
    order = np.argsort(-(quotas % UNITS), kind="stable")
    counts[order[:left]] += 1
    return counts + rounds * units


def _units(weights: Sequence[float], *, active: np.ndarray | None = None) -> np.ndarray:
    """Converts weights to int64 [sources] with a sum of `UNITS`; inactive sources get 0."""
    values = np.asarray(weights, np.float64)
    if active is not None:
        values = np.where(active, values, 0)
    exact = np.round(values / values.sum() * UNITS, 6)  # 1/1,024 must be 1,024 units, not one less
    units = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - units), kind="stable")
    units[order[: UNITS - int(units.sum())]] += 1
    return units


def _check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    total = sum(weights)
    for name, weight in zip(names, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise ValueError(
                f"weight={weight} of {name} is not a number above 0; change the weight, or "
                "remove the source"
            )
        # With a margin, so that rounding of the sum does not refuse a weight of exactly 1/1,024.
        if weight * BLOCK < total * (1 - 1e-9):
            raise ValueError(
                f"weight={weight} of {name} is less than 1/{BLOCK} of all weights ({total:g}), so "
                f"some blocks of {BLOCK} rows have none of its rows; raise it to "
                f"{total / (BLOCK - 1):.3g} or remove the source"
            )


def _phases(weights: Sequence[float], limits: Sequence[int | None]) -> list[_Phase]:
    """Computes the phases of a mixture; the last phase has no end.

    Args:
      weights: weight of each source.
      limits: total number of rows that each source provides; None if unlimited.
    """
    count = len(weights)
    active = np.ones(count, bool)
    ends = np.array([np.iinfo(np.int64).max if x is None else x for x in limits], np.int64)
    phases: list[_Phase] = []
    block, before = 0, np.zeros(count, np.int64)
    while True:
        phase = _Phase(block, _units(weights, active=active), before, False)
        phases.append(phase)
        if np.all(ends[active] == np.iinfo(np.int64).max):
            return phases
        block = _block_of_first_end(phase, ends, active)
        before = phase.given(block)
        counts = _counts_with_ends(phase.units, ends - before, active)
        phases.append(_Phase(block, counts, before, True))
        block, before = block + 1, before + counts
        active &= before < ends


def _block_of_first_end(phase: _Phase, ends: np.ndarray, active: np.ndarray) -> int:
    """Returns the first block of a phase that would need more rows of a source than are left."""

    def is_over(blocks: int) -> bool:
        return bool(np.any(phase.given(phase.first + blocks + 1)[active] > ends[active]))

    bound = 1
    while not is_over(bound):
        bound *= 2
    return phase.first + bisect.bisect_left(range(bound + 1), True, key=is_over)


def _counts_with_ends(units: np.ndarray, left: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Counts the rows of each source in a block in which a source ends and others take over; int64
    [sources]."""
    counts, active = np.zeros(len(units), np.int64), active.copy()
    while True:
        share = _units(np.where(active, units, 0).tolist())
        wanted = largest_remainders(BLOCK - int(counts[~active].sum()), share)
        over = active & (wanted > left)
        if not over.any():
            return np.where(active, wanted, counts)
        counts[over] = left[over]
        active &= ~over


_FILLED = ("weights", "segments", "positions")


def _filled(rows: dict[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Adds missing arrays of `names` to `rows`; by default each row is one text."""
    shape = rows["tokens"].shape
    if "positions" in names and "positions" not in rows:
        rows = {**rows, "positions": _positions(rows.get("segments"), shape)}
    if "segments" in names and "segments" not in rows:
        rows = {**rows, "segments": np.zeros(shape, np.int32)}
    if "weights" in names and "weights" not in rows:
        rows = {**rows, "weights": np.ones(shape, np.float32)}
    return {name: rows[name] for name in names}


def _positions(segments: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Computes positions int32 [rows, seq_len], from 0 in each run of equal segments."""
    index = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    if segments is None:
        return index.copy()
    begins = np.ones(shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
