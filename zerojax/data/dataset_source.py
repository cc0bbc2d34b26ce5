"""Batches of rows of a dataset with random access, such as a dataset of Hugging Face or PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from zerojax.config.checks import names_keywords
from zerojax.data.source import RowSource, in_epochs
from zerojax.models.given_arrays import as_arrays, is_of_torch

_HUGGING_FACE = "datasets"
_PAD = "pad rows to one length, or pass collate=, a function (list of rows) -> batch"


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DatasetSource(RowSource):
    """Shuffled batches of a dataset whose rows are read by index.

    Every row is read once per epoch, in an order that depends only on the seed and the epoch. A run
    therefore resumes at the exact row without reading earlier rows, and each of several processes
    reads only its own rows.
    """

    kind: ClassVar[str] = "dataset"

    dataset: Any
    """Dataset with `len(dataset)` and `dataset[number]`, which is a row: a dict, tuple or other
    tree of numbers, arrays and lists of numbers. `datasets.Dataset` is read in one call per
    batch."""
    global_batch_size: int
    """Number of rows per batch, over all processes."""
    seed: int = 0
    shuffle: bool = True
    collate: Callable[[list[Any]], Any] | None = None
    """Function that makes a batch of a list of rows, as `collate_fn` of PyTorch's DataLoader; must
    be pure. None stacks the rows."""
    seq_len: int = dataclasses.field(init=False, default=1)
    """Always 1 and unused, as rows need not be sequences."""

    def __post_init__(self) -> None:
        if not _has_random_access(self.dataset):
            raise TypeError(
                f"dataset is a {type(self.dataset).__name__} without len(dataset) or "
                "dataset[number]; pass a dataset with both, or pass an iterable of batches to train"
            )
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size}: it must be at least 1")
        if not len(self.dataset):
            raise ValueError("the dataset has no rows; pass one with at least one row")

    @property
    def num_rows(self) -> int:
        """Number of rows of the dataset."""
        return len(self.dataset)

    @property
    def tokenizer(self) -> None:
        """Always None, because a dataset does not record which tokenizer made it."""
        return None

    def rows_at(self, numbers: np.ndarray) -> Any:
        """Reads rows by index, counted over all epochs, as a batch; a pure function.

        Args:
          numbers: int64 [rows], indices of at least 0.

        Raises:
          ValueError: rows differ in shape.
          TypeError: a row has values that are not numbers.
        """
        places = in_epochs(numbers, self.num_rows, self.seed if self.shuffle else None).tolist()
        if self.collate is not None:
            return self.collate([_own_row(self.dataset[place]) for place in places])
        if is_hugging_face(self.dataset):
            columns = self.dataset.with_format("numpy")[places]
            return {name: _column(name, values) for name, values in columns.items()}
        return _stacked([_own_row(self.dataset[place]) for place in places])

    @functools.cached_property
    def _checksum(self) -> int:
        """Checksum of the dataset's first and last row."""
        ends = sorted({0, self.num_rows - 1})
        leaves = [leaf for place in ends for leaf in jax.tree.leaves(_as_row(self.dataset[place]))]
        return zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))

    def fingerprint(self) -> dict[str, Any]:
        """Returns {"rows": their number, "checksum": of the first and last row, "seed",
        "shuffle"}."""
        order = {"seed": self.seed, "shuffle": self.shuffle}
        return {"rows": self.num_rows, "checksum": self._checksum, **order}

    def describe(self) -> str:
        """Describes the dataset in one line: its class, number of rows and order."""
        kind = type(self.dataset)
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        return (
            f"{kind.__module__.partition('.')[0]}.{kind.__name__}: {self.num_rows:,} rows, "
            f"{order}, {self.steps_per_epoch:,.1f} steps per epoch"
        )


def as_dataset_source(
    batches: Any, *, global_batch_size: int | None, seed: int, shuffle: bool = True
) -> Any:
    """Wraps a dataset of rows in a `DatasetSource`; returns anything else unchanged.

    Args:
      batches: a dataset of rows (see `is_dataset`), or batches.
      global_batch_size: number of rows per batch; required for a dataset.
      seed: random seed for the order of rows.
      shuffle: whether to shuffle the rows.

    Raises:
      ValueError: `batches` is a dataset of rows, but no batch size is given.
    """
    if not is_dataset(batches):
        return batches
    if global_batch_size is None:
        raise ValueError(
            f"batches is a {type(batches).__name__} of {len(batches):,} rows, not of batches; pass "
            "global_batch_size=..., the number of rows of a batch"
        )
    return DatasetSource(
        dataset=batches, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle
    )


def is_dataset(thing: object) -> bool:
    """Returns whether an object is a dataset whose items are rows, not batches.

    This is true for datasets of Hugging Face and PyTorch, and for other objects with a length and
    access by index that are not iterable. Lists and loaders contain batches.
    """
    if not _has_random_access(thing):
        return False
    is_other = isinstance(thing, Iterable | Mapping) or callable(thing)
    return is_of_torch(thing) or is_hugging_face(thing) or not is_other


def is_hugging_face(thing: object) -> bool:
    """Returns whether an object is a `datasets.Dataset`, which has random access to its rows."""
    is_theirs = type(thing).__module__.partition(".")[0] == _HUGGING_FACE
    return is_theirs and _has_random_access(thing)


def _has_random_access(thing: object) -> bool:
    return hasattr(thing, "__len__") and hasattr(thing, "__getitem__")


def _column(name: str, values: object) -> np.ndarray:
    """Converts one column of several rows to an array [rows, ...].

    Raises:
      ValueError: the rows have different lengths.
      TypeError: the rows are not numbers.
    """
    column = np.asarray(values)
    shapes = sorted({np.shape(value) for value in column}) if column.dtype == object else []
    if len(shapes) > 1:
        raise ValueError(f"rows of {name!r} have shapes {shapes[0]} to {shapes[-1]}; {_PAD}")
    if column.dtype.kind not in "biufcV":
        raise TypeError(
            f"{name!r} holds {column.dtype}, but a batch may hold only numbers; remove the column "
            f"(dataset.remove_columns({name!r})), or convert it to numbers"
        )
    return column


def _own_row(row: object) -> Any:
    """Copies the arrays, tensors and lists of a row, which the dataset may fill again."""

    def own(leaf: object) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        return leaf.clone() if is_of_torch(leaf) and hasattr(leaf, "clone") else leaf

    return jax.tree.map(own, row)


def _as_row(row: object) -> Any:
    """Converts lists of numbers, numbers and tensors in a row of a dataset to arrays."""

    def is_list(part: object) -> bool:
        return isinstance(part, list)

    return jax.tree.map(np.asarray, as_arrays(row), is_leaf=is_list)


def _stacked(rows: Sequence[Any]) -> Any:
    """Stacks rows, which are trees of arrays, to one batch.

    Raises:
      ValueError: rows differ in structure or shape.
      TypeError: a value is not a number.
    """
    rows = [_as_row(row) for row in rows]
    structures = {jax.tree.structure(row) for row in rows}
    if len(structures) > 1:
        raise ValueError(
            f"rows differ in their parts: {' and '.join(map(str, structures))}; give every row the "
            "same keys, or pass a collate function"
        )
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(rows[0])]
    columns = zip(*(jax.tree.leaves(row) for row in rows), strict=True)
    stacked = [_column(path, _joined(values)) for path, values in zip(paths, columns, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(rows[0]), stacked)


def _joined(values: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks arrays; if their shapes differ, returns an array of objects."""
    if len({value.shape for value in values}) == 1:
        return np.stack(values)
    column = np.empty(len(values), object)
    column[:] = values
    return column
