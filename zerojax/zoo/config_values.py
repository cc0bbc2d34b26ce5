"""Converts configurations of models to values that JSON can store, and back."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from zerojax.config.attention_layouts import BlockLayout, layout_of_mode, values_of_layout

T = TypeVar("T")


def values_of(config: Any) -> dict[str, Any]:
    """Returns {field: value} of a configuration, as dicts, lists, numbers, text and None.

    Args:
      config: a dataclass whose fields may be dataclasses, tuples, block layouts and NumPy scalars.
    """
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: object) -> Any:
    if isinstance(value, BlockLayout):
        return values_of_layout(value)
    if dataclasses.is_dataclass(value):
        return values_of(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def config_of(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds a configuration from the result of `values_of`, as JSON returns it.

    The types of the fields say which dicts are dataclasses and which lists are tuples.

    Raises:
      TypeError, ValueError: a field is unknown or missing, or a value is invalid.
    """
    hints = _hints_of(cls)
    return cls(**{name: _as(hints.get(name, Any), value) for name, value in values.items()})


@functools.cache
def _hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _as(hint: object, value: object) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hints = [each for each in typing.get_args(hint) if each is not types.NoneType]
        return value if value is None or len(hints) > 1 else _as(hints[0], value)
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        item = typing.get_args(hint)[0]
        return tuple(_as(item, each) for each in value)
    if not isinstance(hint, type) or not dataclasses.is_dataclass(hint):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"expected the fields of a {hint.__name__}, got {value!r:.60}")
    return layout_of_mode(value) if issubclass(hint, BlockLayout) else config_of(hint, value)
