"""Matrix dimensions of stacked parameters for `optax.contrib.muon`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from zerojax.models import trees

Tree = Any

LAYER_KERNELS = r"^blocks/.*kernel$"
"""The matrices of the layers of zerojax's models."""
_JOINS_HEADS = ("output", "out")


def muon_dimensions(params: Tree, *, kernels: str = LAYER_KERNELS) -> Tree:
    """What to give `optax.contrib.muon` as `muon_weight_dimension_numbers`.

    Left alone, it takes every array of two dimensions for a matrix and gives the others to Adam. Of
    stacked layers that is the wrong way round: biases [layers, width] are taken, and kernels
    [layers, inputs, outputs] are not. With this each layer's kernel is a matrix, and embeddings,
    the head, biases and scales are Adam's, as Muon's authors have it.

        optax.contrib.muon(0.02, muon_weight_dimension_numbers=zerojax.optim.muon_dimensions)

    Args:
      params: a tree of arrays; dimension 0 of a kernel counts layers.
      kernels: regular expression on their names. [layers, inputs, outputs], or with attention heads
        [layers, inputs, heads, size]; a layer named "output" or "out" has its heads first,
        [layers, heads, size, outputs].

    Returns:
      The tree with `MuonDimensionNumbers` where a parameter is a matrix and None elsewhere.

    Raises:
      ValueError: no parameter has such a name, or one has not 3 or 4 dimensions.
    """
    arrays = trees.flatten_names(params)
    found = [name for name in arrays if re.search(kernels, name)]
    if arrays and not found:
        raise ValueError(
            f"muon_dimensions: {kernels!r} matches none of the {len(arrays)} parameters, such as "
            f"{', '.join(list(arrays)[:3])}; give kernels= a regular expression that does"
        )
    dimensions = {name: _dimensions(name, jnp.ndim(arrays[name])) for name in found}
    return trees.unflatten_like(params, {name: dimensions.get(name) for name in arrays})


def _dimensions(name: str, ndim: int) -> MuonDimensionNumbers:
    if ndim == 3:
        return MuonDimensionNumbers(1, 2)
    if ndim != 4:
        raise ValueError(
            f"muon_dimensions: {name} has {ndim} dimensions, and a stacked kernel has 3 "
            "(layers, inputs, outputs) or 4 (with heads); give kernels= an expression without it"
        )
    joins = name.split(trees.SEPARATOR)[-2:-1] in ([word] for word in _JOINS_HEADS)
    return MuonDimensionNumbers((1, 2), 3) if joins else MuonDimensionNumbers(1, (2, 3))


def describe_muon(opt_state: Tree, stacks: Collection[str]) -> list[str]:
    """What a Muon that was not told of stacked layers does to them, in a line for the plan."""
    is_muon = lambda node: isinstance(node, MuonState)  # noqa: E731
    lines = []
    for part in jax.tree.leaves(opt_state, is_leaf=is_muon):
        if not is_muon(part):
            continue
        taken = {name: x for name, x in part.mu.items() if not isinstance(x, optax.MaskedNode)}
        rows = sorted(name for name, x in taken.items() if name in stacks and x.ndim == 2)
        if rows:
            lines.append(
                f"muon takes {len(rows)} stacks of vectors, such as {rows[0]}, for matrices whose "
                "rows are layers, and leaves stacked kernels to Adam; give it "
                "muon_weight_dimension_numbers=zerojax.optim.muon_dimensions"
            )
    return lines
