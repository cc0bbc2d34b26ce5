"""Description of one architecture: names, settings, and layouts of tensors in both directions.

A layout is written `"(heads head_dim) embed -> embed heads head_dim"`: left the dimensions of their
tensor, those in parentheses joined into one (the last runs fastest), right ours. A number on the
left divides the tensor into so many arrays: `"embed (3 heads head_dim) -> embed heads head_dim"`
with `part=1` is the second of three.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

Range = tuple[int, int]
"""From the first to behind the last."""

_PART = "part"
LAYER = "{layer}"
"""Stands in a tensor's name for the number of its layer."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One of their tensors and one of our arrays.

    Attributes:
      theirs: for each dimension of their tensor the dimensions that are joined in it.
      ours: the dimensions of our array.
      parts: their tensor holds so many arrays, along the dimension "part" of `theirs`; 1: just one.
      part: which of them is ours.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    parts: int = 1
    part: int = 0

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The size of each dimension, from the shape of our array."""
        if len(shape) != len(self.ours):
            raise ValueError(f"the array has shape {list(shape)}, its layout says {self.ours}")
        return {**dict(zip(self.ours, shape, strict=True)), _PART: self.parts}

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of their tensor, from that of our array."""
        sizes = self.sizes(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in self.theirs)

    def their_runs(self, shape: Sequence[int], index: Sequence[Range]) -> list[list[Range]]:
        """Where a slice of our array is in their tensor: for each dimension its runs, in order.

        Args:
          shape: of our whole array.
          index: a range of each of its dimensions.
        """
        sizes, taken = self.sizes(shape), self._ranges(index)
        return [_runs([(sizes[name], taken[name]) for name in group]) for group in self.theirs]

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
        assert self.parts == 1, "other parts of their tensor would be missing"
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


class UnsupportedError(ValueError):
    """A folder of Hugging Face holds something that zerojax cannot train as it is meant."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our arrays and the tensors that it is made of.

    Attributes:
      name: of the parameter, "blocks/attention/query/kernel".
      tensor: their name, "model.layers.{layer}.self_attn.q_proj.weight". With "{layer}" in it our
        array is a stack: dimension 0 counts layers, each of which is a tensor.
      dims: how a tensor is (a layer of) our array, see `parse_layout`.
      part: which of the parts that `dims` divides a tensor into.
    """

    name: str
    tensor: str
    dims: str
    part: int = 0

    @property
    def is_stacked(self) -> bool:
        return LAYER in self.tensor

    @property
    def layout(self) -> Layout:
        return parse_layout(self.dims, self.part)

    def tensor_of(self, layer: int) -> str:
        """The name of a layer's tensor; of an array that is not a stack there is only layer 0."""
        return self.tensor.replace(LAYER, str(layer))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row: how a model of ours is one of transformers'.

    Attributes:
      model_type: of config.json.
      class_name: of transformers, as config.json gets it.
      config_class: of our model's sizes.
      build: our model from its sizes.
      leaves: the arrays of a model of these sizes, in the order in which tensors are written.
      read_config: their config.json -> keyword arguments of `config_class`. Raises
        UnsupportedError for a value that changes what the model computes and that ours lacks.
      write_config: our sizes -> config.json without "model_type", and without "architectures"
        unless it depends on the sizes.
      prefix: what their names begin with, but not in every file: "transformer." of GPT-2.
      ignored: regular expressions of tensors that are not parameters, such as tables that their
        code fills anew, or parameters of heads that ours lacks. A tensor of a leaf never is.
      renamed: (regular expression, replacement) on the names in a file, before they are looked up.
    """

    model_type: str
    class_name: str
    config_class: type
    build: Callable[[Any, nnx.Rngs], nnx.Module]
    leaves: Callable[[Any], Sequence[Leaf]]
    read_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    write_config: Callable[[Any], dict[str, Any]]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def require(config: Mapping[str, Any], why: str, **allowed: tuple[Any, ...]) -> None:
    """Refuses values of config.json that would make another model.

    Args:
      config: theirs.
      why: a clause on what ours does instead.
      **allowed: for each key its values; the first is what a missing key means.

    Raises:
      UnsupportedError: another value.
    """
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            listed = " or ".join(repr(x) for x in values)
            raise UnsupportedError(
                f"config.json: {key}={value!r}, but {why}; only {listed} will do"
            )


def needed(config: Mapping[str, Any], key: str) -> Any:
    """A value that config.json has to have."""
    if config.get(key) is None:
        raise UnsupportedError(f"config.json has no {key!r}, without which there is no model")
    return config[key]
