"""Finds the parameters that Muon treats as matrices: by name, or by products in a traced loss.

Each expert's matrix is a separate matrix. Adam updates routers, embeddings and heads; Muon's
authors recommend this for embeddings and heads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from zerojax.config.tree_types import Tree
from zerojax.optim.groups import is_matrix
from zerojax.tracing import trees
from zerojax.tracing.matrix_uses import MatrixDims, ParameterUse

Uses = Mapping[str, ParameterUse]
Dimensions = dict[str, MuonDimensionNumbers | None]

LAYER_KERNELS = r"^blocks/.*kernel$"
"""Regular expression on the names of layers' matrices in zerojax's models."""
_EXPERTS = r"^blocks/.*experts/(gate|up|down)$"
"""Regular expression on the names of experts' arrays, [layers, experts, inputs, outputs]."""
_ROUTERS = r"(^|/)router/kernel$"
_JOINS_HEADS = ("output", "out")


def muon_dimensions(params: Tree, *, kernels: str = LAYER_KERNELS) -> Tree:
    """Returns the `muon_weight_dimension_numbers` of `optax.contrib.muon` for stacked layers.

    By default, optax's Muon treats every 2-D array as a matrix and gives all others to Adam. For
    stacked layers this is wrong: it includes biases [layers, width] and excludes kernels [layers,
    inputs, outputs]. With this function each layer's kernel is a matrix, and so is the kernel of
    each expert of `zerojax.zoo.MoE`. Adam updates embeddings, the head, routers, biases and scales.

        optax.contrib.muon(0.02, muon_weight_dimension_numbers=zerojax.optim.muon_dimensions)

    This function uses only names and shapes. A plan with `zerojax.muon` reads the products in the
    loss instead, and so finds the experts and routers of any model with `zerojax.experts`.

    Args:
      params: tree of arrays; dimension 0 of a kernel counts layers.
      kernels: regular expression on the kernels' names. Their shapes are [layers, inputs, outputs],
        or with attention heads [layers, inputs, heads, size]; for a layer named "output" or "out",
        [layers, heads, size, outputs].

    Returns:
      The tree with a `MuonDimensionNumbers` for each parameter that is a matrix, and None
      elsewhere.

    Raises:
      ValueError: no name matches `kernels`, or a matching array does not have 3 or 4 dimensions.
    """
    arrays = trees.flatten_names(params)
    found = [name for name in arrays if re.search(kernels, name)]
    if arrays and not found:
        _raise_no_match(arrays, kernels)
    dimensions = {
        name: _dimensions(name, jnp.ndim(arrays[name]))
        for name in found
        if not re.search(_ROUTERS, name)
    }
    experts = [name for name in arrays if re.search(_EXPERTS, name) and jnp.ndim(arrays[name]) == 4]
    dimensions |= dict.fromkeys(experts, MuonDimensionNumbers(2, 3))
    return trees.unflatten_like(params, {name: dimensions.get(name) for name in arrays})


def _raise_no_match(names: Iterable[str], kernels: str) -> None:
    names = list(names)
    raise ValueError(
        f"muon_dimensions: {kernels!r} matches none of the {len(names)} parameters, such as "
        f"{', '.join(names[:3])}; pass kernels= with a regular expression that matches"
    )


def _dimensions(name: str, ndim: int) -> MuonDimensionNumbers:
    if ndim == 3:
        return MuonDimensionNumbers(1, 2)
    if ndim != 4:
        raise ValueError(
            f"muon_dimensions: {name} has {ndim} dimensions, but a stacked kernel has 3 (layers, "
            "inputs, outputs) or 4 (with heads); pass kernels= with an expression that excludes it"
        )
    # A slice and no index, because a name may have only one part.
    joins = name.split(trees.SEPARATOR)[-2:-1] in ([word] for word in _JOINS_HEADS)
    return MuonDimensionNumbers((1, 2), 3) if joins else MuonDimensionNumbers(1, (2, 3))


def matrices_by_shape(params: Tree) -> Tree:
    """Returns a tree like `muon_dimensions` does, for the matrices of DeepSpeed's Muon (its
    `set_optimizer_flags`).

    These are all parameters with two or more dimensions, except those with "embed" or "lm_head" in
    their names. In stacked layers, each layer's kernel is a matrix (`muon_dimensions`), and stacked
    biases and scales are not.

    Raises:
      ValueError: an array outside of stacks has more than two dimensions, and its name does not
        tell which of them are rows.
    """
    arrays = trees.flatten_names(params)
    found = {name: _by_shape(name, jnp.ndim(array)) for name, array in arrays.items()}
    return trees.unflatten_like(params, found)


def _by_shape(name: str, ndim: int) -> MuonDimensionNumbers | None:
    lower = name.lower()
    if not is_matrix(name, ndim) or "embed" in lower or "lm_head" in lower:
        return None
    if re.search(LAYER_KERNELS, name):
        return _dimensions(name, ndim)
    if re.search(_EXPERTS, name) and ndim == 4:
        return MuonDimensionNumbers(2, 3)
    if ndim == 2:
        return MuonDimensionNumbers()
    raise ValueError(
        f"muon: {name} has {ndim} dimensions, and a config file cannot state which of "
        "them are rows; take the section out and pass optimizer=zerojax.muon(lr, "
        "dimensions=...), which returns optax.contrib.MuonDimensionNumbers for each "
        "matrix"
    )


# Matrices found by the products of a traced loss

Rule = Callable[[Uses], Dimensions]
"""Function from the uses of all trained parameters to {name: dimensions of its matrices, or None
for Adam}."""


def rule_of(dimensions: Any) -> Rule | None:
    """Returns the rule that chooses Muon's matrices from a traced loss; None to keep `dimensions`.

    Args:
      dimensions: the argument of `muon`.

    Returns:
      The rule, if `dimensions` is `muon_dimensions` (also as a `functools.partial` with `kernels`)
      or `matrices_by_shape`. None for other functions: a user's own choice is not changed.
    """
    if dimensions is matrices_by_shape:
        return _by_shape_and_use
    if dimensions is muon_dimensions:
        return functools.partial(_by_use, kernels=LAYER_KERNELS)
    is_partial = isinstance(dimensions, functools.partial) and not dimensions.args
    if is_partial and dimensions.func is muon_dimensions:
        return functools.partial(_by_use, **{"kernels": LAYER_KERNELS, **dimensions.keywords})
    return None


def _by_use(uses: Uses, *, kernels: str) -> Dimensions:
    """Chooses Muon's matrices: experts by their products, others by name if `kernels` matches any.

    If `kernels` matches no name, as in a user's own model, the matrices are the parameters that the
    loss uses only in matrix products, except routers and heads.
    """
    others = {n: use for n, use in uses.items() if use.role not in ("expert", "router")}
    matched = [name for name in others if re.search(kernels, name)]
    found: Dimensions = dict.fromkeys(uses)
    found |= {n: _of_experts(n, use) for n, use in uses.items() if use.role == "expert"}
    if matched:
        found |= {name: _of_kernel(name, uses[name]) for name in matched}
    else:
        found |= {n: _numbers(use.product) for n, use in others.items() if use.role == "matrix"}
    if uses and not any(found.values()):
        _raise_no_match(uses, kernels)
    return found


def _by_shape_and_use(uses: Uses) -> Dimensions:
    return {
        name: _of_experts(name, use) if use.role == "expert" else _by_shape(name, len(use.shape))
        for name, use in uses.items()
    }


def _of_kernel(name: str, use: ParameterUse) -> MuonDimensionNumbers | None:
    """Returns the dimensions of a kernel's rows and columns.

    They are taken from the matrix product that uses the kernel, if there is exactly one; otherwise
    from the kernel's name and number of dimensions.
    """
    return _dimensions(name, len(use.shape)) if use.product is None else _numbers(use.product)


def _of_experts(name: str, use: ParameterUse) -> MuonDimensionNumbers | None:
    """Returns the dimensions of one expert's matrix; None for arrays with a vector per expert.

    Raises:
      ValueError: an expert's array has more than two dimensions and no product shows its rows.
    """
    if use.product is not None:
        return _numbers(use.product)
    if use.expert_ndim < 2:
        return None
    if use.expert_ndim == 2:
        first = (use.expert_dim or 0) + 1
        return MuonDimensionNumbers(first, first + 1)
    raise ValueError(
        f"muon: an expert of {name} has {use.expert_ndim} dimensions, and no product in the loss "
        "shows which of them are rows; pass dimensions= to zerojax.muon, a function that returns "
        "optax.contrib.MuonDimensionNumbers for each matrix and None for others"
    )


def _numbers(product: MatrixDims | None) -> MuonDimensionNumbers | None:
    if product is None:
        return None
    one = lambda side: side[0] if len(side) == 1 else side  # noqa: E731
    return MuonDimensionNumbers(one(product.rows), one(product.columns))


# Descriptions for the plan


def muon_names(opt_state: Tree) -> list[frozenset[str]]:
    """For each Muon in an optimizer's state, returns the names that it treats as matrices."""
    is_muon = lambda node: isinstance(node, MuonState)  # noqa: E731
    parts = [x for x in jax.tree.leaves(opt_state, is_leaf=is_muon) if is_muon(x)]
    return [
        frozenset(n for n, x in part.mu.items() if not isinstance(x, optax.MaskedNode))
        for part in parts
    ]


def describe_muon(
    opt_state: Tree,
    stacks: Collection[str],
    uses: Uses,
    stated: Mapping[str, MuonDimensionNumbers] | None = None,
) -> list[str]:
    """Describes which parameters Muon treats as matrices, and conflicts with their use in the loss.

    Args:
      opt_state: optimizer state as stored; without a Muon the result is [].
      stacks: names of stacks of layers that a loop slices.
      uses: uses of the trained parameters in the loss.
      stated: {name: dimensions of its matrices}; None for optax's Muon, which does not expose them.
    """
    lines = []
    for names in muon_names(opt_state):
        taken = names & uses.keys()
        rows = sorted(n for n in taken if n in stacks and len(uses[n].shape) == 2)
        if rows:
            lines.append(
                f"muon treats {len(rows)} stacks of vectors, such as {rows[0]}, as matrices whose "
                "rows are layers, and leaves stacked kernels to Adam; pass "
                "muon_weight_dimension_numbers=zerojax.optim.muon_dimensions"
            )
        else:
            lines.append(_describe_split(taken, uses))
            lines += _describe_doubts(taken, uses, stated or {})
        lines += _describe_mixtures(taken, uses)
    return lines


def _describe_split(taken: Collection[str], uses: Uses) -> str:
    is_expert = lambda name: uses[name].role == "expert"  # noqa: E731
    plain = [name for name in taken if not is_expert(name)]
    experts = [name for name in taken if is_expert(name)]
    parts = [f"matrices of {_short(plain)}" if plain else ""]
    parts.append(f"each expert's matrix of {_short(experts)}" if experts else "")
    rest = [name for name in uses if name not in taken]
    updated = f"; Adam updates {_short(rest, uses)}" if rest else ""
    return f"muon orthogonalizes {' and '.join(filter(None, parts)) or 'nothing'}{updated}"


def _describe_doubts(
    taken: frozenset[str], uses: Uses, stated: Mapping[str, MuonDimensionNumbers]
) -> list[str]:
    """Returns a line for each kind of parameter whose use in the loss does not fit its update."""
    lines = []
    left = [n for n in uses if n not in taken]
    matrices = [name for name in left if uses[name].role == "matrix"]
    if matrices:
        lines.append(
            f"muon leaves {_short(matrices)} to Adam, although the loss uses them as matrices; to "
            "orthogonalize them pass kernels= of zerojax.optim.muon_dimensions, or dimensions="
        )
    unclear = [n for n in left if uses[n].role == "other" and uses[n].products and n not in stated]
    unclear = [n for n in unclear if all(map(all, uses[n].products))]
    if unclear:
        lines.append(
            f"muon leaves {_short(unclear)} to Adam, since the loss does not always use each of "
            "them as the same matrix; to orthogonalize them pass dimensions="
        )
    other = [n for n, use in uses.items() if n in stated and not _agree(use, stated[n])]
    if other:
        first = stated[min(other)]
        product = uses[min(other)].product
        assert product is not None
        lines.append(
            f"muon treats {_short(other)} as matrices with rows {first.reduction_axis} and columns "
            f"{first.output_axis}, but the loss uses rows {product.rows} and columns "
            f"{product.columns} (all other dimensions are stacks); correct dimensions="
        )
    roles = ("other", "expert")
    unseen = [n for n in taken & stated.keys() if uses[n].product is None and uses[n].role in roles]
    if unseen:
        lines.append(
            f"muon chooses the dimensions of {_short(unseen)} by names and shapes, because no "
            "single product in the loss determines them"
        )
    return lines


def _describe_mixtures(taken: Collection[str], uses: Uses) -> list[str]:
    """Describes experts that Adam updates, and routers that Muon updates, one line each."""
    lines = []
    is_left = lambda use: use.role == "expert" and use.expert_ndim > 1  # noqa: E731
    experts = [n for n, use in uses.items() if n not in taken and is_left(use)]
    if experts:
        lines.append(
            f"muon leaves the experts' matrices {_short(experts)} to Adam; use zerojax.muon "
            "without dimensions=, or state their dimensions"
        )
    routers = [name for name in taken if uses[name].role == "router"]
    if routers:
        lines.append(
            f"muon orthogonalizes the router {_short(routers)}; leave it to Adam with dimensions="
        )
    return lines


def _agree(use: ParameterUse, stated: MuonDimensionNumbers) -> bool:
    """Returns whether a product in the loss uses the stated matrices or their transposes."""
    if use.product is None:
        return True
    axes = (stated.reduction_axis, stated.output_axis)
    sides = [(axis,) if isinstance(axis, int) else tuple(axis) for axis in axes]
    ndim = len(use.shape)
    found = {tuple(sorted(dim % ndim for dim in side)) for side in sides}
    return found == set(use.product)


def _short(names: Iterable[str], uses: Uses | None = None) -> str:
    """Lists names in order, with layer numbers replaced by `*`, and with roles if `uses` is
    given."""
    found: dict[str, None] = {}
    for name in sorted(names):
        role = uses[name].role if uses is not None else "other"
        shown = re.sub(r"(?<=/)\d+(?=/)", "*", name)
        found[f"{shown} ({role})" if role in ("router", "table", "head") else shown] = None
    return ", ".join(found)
