"""Description of one architecture: names, layouts, and settings in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from zerojax.models.hugging_face.layouts import Layout, parse_layout

LAYER = "{layer}"
"""Stands in a tensor's name for the number of its layer."""


class UnsupportedError(ValueError):
    """A folder of Hugging Face holds something that zerojax cannot train as it is meant."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our arrays and the tensors that it is made of.

    Attributes:
      name: of the parameter, "blocks/attention/query/kernel".
      tensor: their name, "model.layers.{layer}.self_attn.q_proj.weight". With "{layer}" in it our
        array is a stack: dimension 0 counts layers, each of which is a tensor.
      dims: how a tensor is (a layer of) our array, see `layouts`.
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
        """The name of a layer's tensor; of an array that is no stack there is only layer 0."""
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
      ignored: regular expressions of tensors that are no parameters, such as tables that their
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
