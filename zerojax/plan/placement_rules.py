"""Placement options of users, and tensor-parallel rules by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from zerojax.plan.leaf import Shape
from zerojax.plan.mesh import MODEL

Rules = Sequence[tuple[str, Sequence[str | None]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementRules:
    """What the user can say about placement.

    Attributes:
      zero: ZeRO stage. 0: all whole; 1: optimizer state and masters sharded; 2: and gradients; 3:
        and the parameters that forward and backward read.
      tensor_parallel: (regular expression on the name, mesh axis per trailing dimension); the first
        that matches counts; dimensions it does not mention stay whole.
      freeze: regular expressions on names.
      persistence_threshold: elements; at stage 3 a smaller parameter is gathered once per step
        instead of at every use, which saves a collective per use.
      virtual_shards: dimensions are chosen and padded for so many shards, however many devices
        there are, which divide it; None: for as many as there are.
    """

    zero: int = 1
    tensor_parallel: Rules = ()
    freeze: Sequence[str] = ()
    persistence_threshold: int = 100_000
    virtual_shards: int | None = None


def tensor_parallel_axes(
    shapes: Mapping[str, Shape], axis_sizes: Mapping[str, int], rules: Rules
) -> dict[str, tuple[str | None, ...]]:
    """Mesh axis per dimension of every parameter, from the first rule that matches its name."""
    compiled = []
    for pattern, axes in rules:
        for axis in axes:
            if axis not in (None, MODEL):
                raise ValueError(
                    f"tensor-parallel rule {pattern!r} names the axis {axis!r}; "
                    f"use {MODEL!r} or null"
                )
        try:
            compiled.append((re.compile(pattern), tuple(axes)))
        except re.error as error:
            raise ValueError(
                f"tensor-parallel rule {pattern!r} is not a regular expression: {error}"
            ) from None
    result = {}
    for name, shape in shapes.items():
        axes = next((axes for pattern, axes in compiled if pattern.search(name)), ())
        if len(axes) > len(shape):
            raise ValueError(
                f"a tensor-parallel rule gives {len(axes)} axes {axes} for {name}, which has "
                f"{len(shape)} dimensions {list(shape)}; give at most one axis per trailing "
                "dimension"
            )
        full = (None,) * (len(shape) - len(axes)) + axes
        for index, axis in enumerate(full):
            size = axis_sizes[axis] if axis else 1
            if shape[index] % size:
                raise ValueError(
                    f"{name}: dim {index} of size {shape[index]} is not divisible by "
                    f"{axis}={size}; choose a {axis} size that divides {shape[index]}, or change "
                    "its tensor-parallel rule"
                )
        result[name] = tuple(axis if axis and axis_sizes[axis] > 1 else None for axis in full)
    return result
