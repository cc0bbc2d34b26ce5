"""Description of one architecture: names, settings, and layouts of tensors in both directions.

A layout is written `"(heads head_dim) embed -> embed heads head_dim"`: left the dimensions of their
tensor, those in parentheses joined into one (the last runs fastest), right ours. A number on the
left divides the tensor into so many arrays: `"embed (3 heads head_dim) -> embed heads head_dim"`
with `part=1` is the second of three. Where a tensor holds arrays of unequal sizes one after the
other along its first dimension, `RowsOfTensor` says which rows are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from zerojax.zoo.hugging_face.config_reading import ConfigReading, check_common

Range = tuple[int, int]
"""From the first to behind the last."""

_PART = "part"
LAYER, EXPERT = "{layer}", "{expert}"
"""Stand in a tensor's name for the number of its layer, and of its expert."""


class RowsOfTensor(NamedTuple):
    """Some of the rows of a tensor: the first of ours, and how many it has."""

    first: int
    all: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """One of their tensors and one of our arrays.

    Attributes:
      theirs: for each dimension of their tensor the dimensions that are joined in it.
      ours: the dimensions of our array.
      parts: their tensor holds so many arrays, along the dimension "part" of `theirs`; 1: just one.
      part: which of them is ours.
      rows: of their tensor that are ours; None: all.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    parts: int = 1
    part: int = 0
    rows: RowsOfTensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether their tensor holds our array alone."""
        return self.parts == 1 and self.rows is None

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The size of each dimension, from the shape of our array."""
        if len(shape) != len(self.ours):
            raise ValueError(f"the array has shape {list(shape)}, its layout says {self.ours}")
        return {**dict(zip(self.ours, shape, strict=True)), _PART: self.parts}

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of their tensor, from that of our array."""
        sizes = self.sizes(shape)
        rows, *rest = (math.prod(sizes[name] for name in group) for group in self.theirs)
        return (rows if self.rows is None else self.rows.all, *rest)

    def their_runs(self, shape: Sequence[int], index: Sequence[Range]) -> list[list[Range]]:
        """Where a slice of our array is in their tensor: for each dimension its runs, in order.

        Args:
          shape: of our whole array.
          index: a range of each of its dimensions.
        """
        sizes, taken = self.sizes(shape), self._ranges(index)
        runs = [_runs([(sizes[name], taken[name]) for name in group]) for group in self.theirs]
        before = 0 if self.rows is None else self.rows.first
        return [[(start + before, stop + before) for start, stop in runs[0]], *runs[1:]]

    def to_ours(self, values: np.ndarray, index: Sequence[Range]) -> np.ndarray:
        """What was read at `their_runs(shape, index)`, as our array has it; a view if it can be."""
        taken = self._ranges(index)
        names = [name for group in self.theirs for name in group]
        split = values.reshape([taken[name][1] - taken[name][0] for name in names])
        kept = [name for name in names if name != _PART]
        split = split.reshape([taken[name][1] - taken[name][0] for name in kept])
        return split.transpose([kept.index(name) for name in self.ours])

    def as_theirs(self, values: np.ndarray) -> np.ndarray:
        """Our whole array as their tensor, which holds nothing else; a view if it can be."""
        assert self.is_whole, "other parts of their tensor would be missing"
        names = [name for group in self.theirs for name in group]
        turned = values.transpose([self.ours.index(name) for name in names])
        return turned.reshape(self.their_shape(values.shape))

    def to_theirs(self, values: np.ndarray, out: np.ndarray) -> None:
        """Writes our whole array into its place in their tensor.

        Args:
          values: in our shape.
          out: their tensor, contiguous; other parts of it stay.
        """
        sizes = self.sizes(values.shape)
        names = [name for group in self.theirs for name in group]
        if self.rows is not None:
            count = math.prod(sizes[name] for name in self.theirs[0])
            out = out[self.rows.first : self.rows.first + count]
        split = out.reshape([sizes[name] for name in names])
        assert np.shares_memory(split, out)
        if _PART in names:
            split = np.moveaxis(split, names.index(_PART), 0)[self.part]
            names.remove(_PART)
        split[...] = values.transpose([self.ours.index(name) for name in names])

    def _ranges(self, index: Sequence[Range]) -> Mapping[str, Range]:
        return {**dict(zip(self.ours, index, strict=True)), _PART: (self.part, self.part + 1)}


def _runs(dims: Sequence[tuple[int, Range]]) -> list[Range]:
    """The runs of a joined dimension, from (size, range) of what is joined in it."""
    whole = len(dims)
    while whole > 1 and dims[whole - 1][1] == (0, dims[whole - 1][0]):
        whole -= 1  # dims[whole:] are taken as they are
    unit = math.prod(size for size, _ in dims[whole:])
    start, stop = dims[whole - 1][1]
    stride = unit * dims[whole - 1][0]
    runs = []
    for outer in itertools.product(*(range(*taken) for _, taken in dims[: whole - 1])):
        at = 0
        for position, (size, _) in zip(outer, dims, strict=False):
            at = at * size + position
        runs.append((at * stride + start * unit, at * stride + stop * unit))
    return runs


@functools.cache
def parse_layout(text: str, part: int = 0) -> Layout:
    """See the head of this module.

    Args:
      text: such as "(heads head_dim) embed -> embed heads head_dim"; without an arrow both are the
        same.
      part: which of several parts, from 0.

    Raises:
      ValueError: the two sides do not have the same dimensions, or there is no such part.
    """
    left, arrow, right = text.partition("->")
    groups, parts = [], 1
    for joined, single in re.findall(r"\(([^)]*)\)|(\w+)", left):
        names = joined.split() or [single]
        for number in [name for name in names if name.isdigit()]:
            parts = int(number)
        groups.append(tuple(_PART if name.isdigit() else name for name in names))
    named = [name for group in groups for name in group if name != _PART]
    ours = tuple(right.split()) if arrow else tuple(named)
    if sorted(ours) != sorted(named) or len(set(ours)) != len(ours):
        raise ValueError(f"layout {text!r}: both sides need the same dimensions, each once")
    if not 0 <= part < parts:
        raise ValueError(f"layout {text!r} has {parts} parts, and {part} is none of them")
    return Layout(theirs=tuple(groups), ours=ours, parts=parts, part=part)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our arrays and the tensors that it is made of.

    Attributes:
      name: of the parameter, "blocks/attention/query/kernel".
      tensor: their name, "model.layers.{layer}.self_attn.q_proj.weight". With "{layer}" in it our
        array is a stack: dimension 0 counts layers, each of which is a tensor. With "{expert}" in
        it, too, dimension 1 counts experts, and each expert of each layer is a tensor.
      dims: how a tensor is (a layer of) our array, see `parse_layout`.
      part: which of the parts that `dims` divides a tensor into.
      rows: of a tensor that are ours, where it holds others of other sizes; None: all.
    """

    name: str
    tensor: str
    dims: str
    part: int = 0
    rows: RowsOfTensor | None = None

    @property
    def is_stacked(self) -> bool:
        return LAYER in self.tensor

    @property
    def num_stacked(self) -> int:
        """How many leading dimensions of our array count tensors."""
        return (LAYER in self.tensor) + (EXPERT in self.tensor)

    @property
    def layout(self) -> Layout:
        layout = parse_layout(self.dims, self.part)
        return layout if self.rows is None else dataclasses.replace(layout, rows=self.rows)

    def tensor_of(self, layer: int, expert: int = 0) -> str:
        """The name of a layer's tensor; of an array that is not a stack there is only layer 0."""
        return self.tensor.replace(LAYER, str(layer)).replace(EXPERT, str(expert))

    def numbers(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """(layer, expert) of each tensor of our array, in order; 0 for what it does not count.

        Args:
          shape: of our whole array.
        """
        layers, experts = [*shape[: self.num_stacked], 1, 1][:2]
        return [(layer, expert) for layer in range(layers) for expert in range(experts)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row: how a model of ours is one of transformers'.

    Attributes:
      model_type: of config.json.
      class_name: of transformers, as config.json gets it.
      config_class: of our model's sizes.
      build: our model from its sizes.
      leaves: the arrays of a model of these sizes, in the order in which tensors are written.
      read: their config.json, key by key -> keyword arguments of `config_class`. Raises
        UnsupportedError for a value that changes what the model computes and that ours lacks.
      no_effect: further keys of config.json that change nothing of what this model computes; a key
        that is neither read nor among these or `config_reading.NO_EFFECT` is refused.
      write_config: our sizes -> config.json without "model_type", and without "architectures"
        unless it depends on the sizes.
      prefix: what their names begin with, but not in every file: "transformer." of GPT-2.
      ignored: regular expressions of tensors that are not parameters, such as tables that their
        code fills anew, or parameters of heads that ours lacks. A tensor of a leaf never is.
      copies: {tensor: the tensor that it repeats} of tensors that a file may have besides, such as
        a token table under the name of output weights; other values than those are refused.
      renamed: (regular expression, replacement) on the names in a file, before they are looked up.
    """

    model_type: str
    class_name: str
    config_class: type
    build: Callable[[Any, nnx.Rngs], nnx.Module]
    leaves: Callable[[Any], Sequence[Leaf]]
    read: Callable[[ConfigReading], dict[str, Any]]
    write_config: Callable[[Any], dict[str, Any]]
    no_effect: tuple[str, ...] = ()
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `config_class` from their config.json.

        Raises:
          UnsupportedError: a value that would make another model, or a key that is not known.
        """
        reading = ConfigReading(config)
        found = self.read(reading)
        check_common(reading, self.no_effect)
        return found

    def keys_read(self, config: Mapping[str, Any]) -> frozenset[str]:
        """The keys of a config.json that say what the model computes."""
        reading = ConfigReading(config)
        self.read(reading)
        return frozenset(reading.asked)
