"""Describes one architecture: names, settings, and layouts of tensors in both directions.

Tensors have transformers' format, arrays zerojax's; `theirs` and `ours` name the two sides. A
layout such as `"(heads head_dim) embed -> embed heads head_dim"` has the dimensions of the tensor
on the left and of the array on the right; parentheses join dimensions into one, in row-major order.
A number on the left divides the tensor into that many arrays: in
`"embed (3 heads head_dim) -> embed heads head_dim"` with `part=1`, the array is the second of three
parts. In `"embed (mlp 2) -> embed mlp"` the elements of two arrays alternate; a slice of one is
read with the other's elements in between, since reading element by element would take too long. If
a tensor concatenates arrays of unequal sizes along its first dimension, `RowsOfTensor` gives the
rows of the array.
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

from zerojax.config.late_dataclasses import dataclass
from zerojax.zoo.hugging_face.config_reading import ConfigReading, check_common
from zerojax.zoo.hugging_face.task_keys import (
    HEADS,
    check_head,
    read_task,
    write_task,
)
from zerojax.zoo.task_heads import TaskKind

Range = tuple[int, int]
"""Range (start, stop), excluding stop."""

_PART = "part"
LAYER, EXPERT = "{layer}", "{expert}"
"""Placeholders in a tensor's name for the indices of its layer and expert."""


class RowsOfTensor(NamedTuple):
    """Position of an array's rows in a tensor: its first row, and the tensor's number of rows."""

    first: int
    all: int


@dataclass(frozen=True)
class Layout:
    """Mapping between a tensor in transformers' format and an array of zerojax.

    Attributes:
      theirs: for each dimension of the tensor, the dimensions that it joins.
      ours: dimensions of the array.
      parts: number of arrays in the tensor, along the dimension "part" of `theirs`.
      part: index of this array among them.
      rows: rows of the tensor that belong to the array; None for all.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    parts: int = 1
    part: int = 0
    rows: RowsOfTensor | None = None

    @property
    def is_whole(self) -> bool:
        """Returns whether the tensor contains only this array."""
        return self.parts == 1 and self.rows is None

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Returns the size of each dimension from the shape of the array."""
        if len(shape) != len(self.ours):
            raise ValueError(f"the array has shape {list(shape)}, but its layout is {self.ours}")
        return {**dict(zip(self.ours, shape, strict=True)), _PART: self.parts}

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the tensor from the shape of the array."""
        sizes = self.sizes(shape)
        rows, *rest = (math.prod(sizes[name] for name in group) for group in self.theirs)
        return (rows if self.rows is None else self.rows.all, *rest)

    def their_runs(self, shape: Sequence[int], index: Sequence[Range]) -> list[list[Range]]:
        """Converts a slice of the array to the index ranges to read per dimension of the tensor.

        Args:
          shape: shape of the whole array.
          index: range of the slice in each dimension of the array.
        """
        sizes, taken = self.sizes(shape), self._ranges(index)
        runs = [_runs([(sizes[name], taken[name]) for name in group]) for group in self.theirs]
        before = 0 if self.rows is None else self.rows.first
        return [[(start + before, stop + before) for start, stop in runs[0]], *runs[1:]]

    def to_ours(self, values: np.ndarray, index: Sequence[Range]) -> np.ndarray:
        """Converts values read at `their_runs(shape, index)` to the array; a view if possible."""
        taken = self._ranges(index)
        names = [name for group in self.theirs for name in group]
        split = values.reshape([taken[name][1] - taken[name][0] for name in names])
        kept = [name for name in names if name != _PART]
        if _PART in names:
            # If all parts were read, this one is at its own number, otherwise at 0.
            part = self.part - taken[_PART][0]
            split = np.moveaxis(split, names.index(_PART), 0)[part]
        return split.transpose([kept.index(name) for name in self.ours])

    def as_theirs(self, values: np.ndarray) -> np.ndarray:
        """Converts the whole array to a tensor that contains only it; a view if possible."""
        assert self.is_whole, "other parts of their tensor would be missing"
        names = [name for group in self.theirs for name in group]
        transposed = values.transpose([self.ours.index(name) for name in names])
        return transposed.reshape(self.their_shape(values.shape))

    def to_theirs(self, values: np.ndarray, out: np.ndarray) -> None:
        """Writes the whole array to its place in the tensor.

        Args:
          values: the array.
          out: the tensor, contiguous; its other parts are unchanged.
        """
        sizes = self.sizes(values.shape)
        names = [name for group in self.theirs for name in group]
        if self.rows is not None:
            count = math.prod(sizes[name] for name in self.theirs[0])
            out = out[self.rows.first : self.rows.first + count]
        split = out.reshape([sizes[name] for name in names])
        # A copy would lose the values that are written into it.
        assert np.shares_memory(split, out)
        if _PART in names:
            split = np.moveaxis(split, names.index(_PART), 0)[self.part]
            names.remove(_PART)
        split[...] = values.transpose([self.ours.index(name) for name in names])

    def _ranges(self, index: Sequence[Range]) -> Mapping[str, Range]:
        # Parts that alternate are read together, and `to_ours` selects one of them.
        alternates = any(len(group) > 1 and group[-1] == _PART for group in self.theirs)
        part = (0, self.parts) if alternates else (self.part, self.part + 1)
        return {**dict(zip(self.ours, index, strict=True)), _PART: part}


def _runs(dims: Sequence[tuple[int, Range]]) -> list[Range]:
    """Computes the ranges in a joined dimension, from (size, range) of each dimension in it."""
    whole = len(dims)
    while whole > 1 and dims[whole - 1][1] == (0, dims[whole - 1][0]):
        whole -= 1  # dims[whole:] are selected completely
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
    """Parses a layout; for the syntax see the module's docstring.

    Args:
      text: layout such as "(heads head_dim) embed -> embed heads head_dim"; without an arrow both
        sides are equal.
      part: index of the array among the parts of the tensor.

    Raises:
      ValueError: the two sides have different dimensions, or `part` is out of range.
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
        raise ValueError(f"layout {text!r}: part={part} must be from 0 to {parts - 1}")
    return Layout(theirs=tuple(groups), ours=ours, parts=parts, part=part)


@dataclass(frozen=True)
class Leaf:
    """Parameter of zerojax and the tensors that contain it.

    Attributes:
      name: name of the parameter, such as "blocks/attention/query/kernel".
      tensor: name of the tensor, such as "model.layers.{layer}.self_attn.q_proj.weight". With
        "{layer}", the parameter is stacked: dimension 0 is the layer, and each layer is one tensor.
        With "{expert}" as well, dimension 1 is the expert, and each expert of each layer is one
        tensor.
      dims: layout of a tensor, see `parse_layout`.
      part: index of the parameter among the parts into which `dims` divides a tensor.
      rows: rows of the tensor that belong to the parameter; None for all.
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
        """Returns the number of leading dimensions (layer, expert) of the parameter."""
        return (LAYER in self.tensor) + (EXPERT in self.tensor)

    @property
    def layout(self) -> Layout:
        layout = parse_layout(self.dims, self.part)
        return layout if self.rows is None else dataclasses.replace(layout, rows=self.rows)

    def tensor_of(self, layer: int, expert: int = 0) -> str:
        """Returns the name of the tensor of a layer and expert; an index is 0 if it has no
        dimension."""
        return self.tensor.replace(LAYER, str(layer)).replace(EXPERT, str(expert))

    def numbers(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Lists (layer, expert) of each of the parameter's tensors; 0 if there is no such
        dimension.

        Args:
          shape: shape of the whole parameter.
        """
        layers, experts = [*shape[: self.num_stacked], 1, 1][:2]
        return [(layer, expert) for layer in range(layers) for expert in range(experts)]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Mapping between a model class of zerojax and one of transformers.

    Attributes:
      model_type: value of "model_type" in config.json.
      class_name: class of transformers, written to "architectures" in config.json.
      config_class: class of the zerojax configuration.
      build: function (configuration, rngs) that builds the model.
      leaves: function from a configuration to the parameters, in the order in which tensors are
        written.
      read: function from config.json to keyword arguments of `config_class`. Raises
        UnsupportedError for a value that zerojax's model does not support.
      no_effect: additional keys of config.json that do not change what the model computes. A key
        that is neither read, nor listed here or in `config_reading.NO_EFFECT`, is refused.
      dropout, attention_dropout: keys of config.json with rates of dropout, which is set per run;
        transformers uses 0.1 for a missing key. zerojax has no dropout of attention weights.
      write_config: function from a configuration to config.json without "model_type", and without
        "architectures" unless it depends on the configuration.
      prefix: prefix of tensor names that some files omit, such as "transformer." of GPT-2.
      ignored: regular expressions for tensors that are not read: tables that transformers
        recomputes, and parameters of unsupported heads. They never apply to tensors of `leaves`.
      copies: {optional tensor: tensor that it must equal}, such as a token table under the name of
        the output weights; a copy with other values is refused.
      renamed: pairs (regular expression, replacement), applied to the names in a file first.
      tasks: {class of transformers with a head for a task: kind of the task}; the field "task" of
        the configuration is read and written for all architectures alike.
    """

    model_type: str
    class_name: str
    config_class: type
    build: Callable[[Any, nnx.Rngs], nnx.Module]
    leaves: Callable[[Any], Sequence[Leaf]]
    read: Callable[[ConfigReading], dict[str, Any]]
    write_config: Callable[[Any], dict[str, Any]]
    no_effect: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()
    attention_dropout: tuple[str, ...] = ()
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    tasks: Mapping[str, TaskKind] = dataclasses.field(default_factory=dict)

    def read_fields(self, reading: ConfigReading) -> dict[str, Any]:
        """Reads the keyword arguments of `config_class`, with the task if there is one.

        Raises:
          UnsupportedError: a value is not supported.
        """
        fields = self.read(reading)
        task = read_task(reading, self.tasks)
        return fields if task is None else {**fields, "task": task}

    def write_keys(self, config: Any) -> dict[str, Any]:
        """Builds config.json for a configuration, without keys copied from another one.

        Raises:
          UnsupportedError: transformers has no class of the model for its task.
        """
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            **self.write_config(config),
            **write_task(getattr(config, "task", None), self.tasks),
        }

    def is_ignored(self, tensor: str, *, has_task: bool) -> bool:
        """Returns whether a tensor of the files may be left out: see `ignored`. If the files or the
        model have a task, other heads may be left out, too."""
        heads = HEADS if has_task else ()
        return any(re.search(pattern, tensor) for pattern in (*self.ignored, *heads))

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a config.json to keyword arguments of `config_class`.

        Raises:
          UnsupportedError: a value is not supported or a key is unknown.
        """
        reading = ConfigReading(config)
        fields = self.read_fields(reading)
        check_head(reading, (self.class_name,), self.tasks)
        check_common(reading, (*self.no_effect, *self.dropout, *self.attention_dropout))
        return fields

    def keys_read(self, config: Mapping[str, Any]) -> frozenset[str]:
        """Returns the keys of a config.json that determine what the model computes."""
        reading = ConfigReading(config)
        self.read_fields(reading)
        return frozenset(reading.asked)
