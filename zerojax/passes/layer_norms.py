"""Norms of gradients, updates and parameters by layer, from sums of squares that a step returns.

A sum of squares belongs to one parameter, or to one row of a stack of layers. The host adds the
sums of a layer, so that the program of a step has no code for each layer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from zerojax.passes.update import axes_of_leaves, specs_of_leaves, squares_of_rows, summed
from zerojax.placement.decisions import Decisions
from zerojax.placement.table import shared_axes
from zerojax.tracing.loops import find_stack_loops

Arrays = dict[str, jax.Array]
KINDS = ("gradient", "update", "parameter")
"""What the norms are of, in the order of the rows of "layer_sums"."""


def layer_of(name: str) -> str:
    """Returns the layer of a parameter: its name up to the first number, such as "blocks/3"; the
    first part of a name without a number.
    """
    parts = name.split("/")
    for place, part in enumerate(parts):
        if place and part.isdecimal():
            return "/".join(parts[: place + 1])
    return parts[0]


def layer_stacks(plan: Decisions) -> dict[str, int]:
    """Returns {stored parameter: number of its rows} of the parameters whose rows are layers."""
    rows = _rows_of_stacks(plan)
    return {name: len(rows[name]) for name in plan.abstract_stored["params"] if name in rows}


def layer_rows(plan: Decisions) -> list[str]:
    """Returns the layer of each sum in a row of "layer_sums"; "" for a row that only pads."""
    rows = _rows_of_stacks(plan)
    return [
        layer
        for name in plan.abstract_stored["params"]
        for layer in rows.get(name, (layer_of(name),))
    ]


def _rows_of_stacks(plan: Decisions) -> dict[str, tuple[str, ...]]:
    """Returns {stored parameter: layer of each of its rows}, for stacks of rolled layers and for
    the model's own stacks, over which it runs a loop.
    """
    stored = plan.abstract_stored["params"]
    own = _own_stacks(plan)
    found = {}
    for name in stored:
        leaf = plan.placement.leaves[name]
        if name in plan.stacks:
            names = tuple(map(layer_of, plan.stacks[name]))
        elif name in own:
            names = tuple(f"{own[name]}/{row}" for row in range(leaf.shape[0]))
        else:
            continue
        count = stored[name].shape[0]
        order = range(count) if leaf.layer_rows is None else leaf.layer_rows
        found[name] = tuple(names[row] if 0 <= row < len(names) else "" for row in order)
    return found


def _own_stacks(plan: Decisions) -> dict[str, str]:
    """Returns {parameter over whose rows the model runs a loop: what the names of its layers begin
    with}: the part that the names of all parameters of the loop have in common.
    """
    found: dict[str, str] = {}
    for loop in find_stack_loops(plan.traced.forward, sorted(plan.placement.leaves)):
        holders = [name.split("/")[:-1] for name in loop.stacked]
        alike = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*holders, strict=False))
        common = "/".join(first for first, *_ in alike)
        for name in loop.stacked:
            found.setdefault(name, common or name.split("/")[0])
    return found


def build_changes(plan: Decisions) -> Callable[[Arrays, Arrays], jax.Array]:
    """Builds the traced `(parameters, new parameters) -> sums of squares`, float32 [2, sums]: of
    their differences, and of the new parameters.

    One collective sums all of them. XLA copies the old weights, because it would otherwise write
    the new ones in their place before both are read (+14 % of peak memory at zero=0 for 1.3 billion
    parameters on 8 H100, +3 % at zero=3; 2026-11-30, compiled, not run).
    """
    stored = plan.abstract_state["params"]
    specs, axes, num_rows = (
        specs_of_leaves(stored),
        axes_of_leaves(plan.mesh, stored),
        layer_stacks(plan),
    )
    first = {name: shared_axes(plan.mesh, P(*specs[name][:1])) for name in num_rows}
    over = tuple(name for name in plan.mesh.axis_names if any(name in a for a in axes.values()))

    def squares(name: str, x: jax.Array) -> jax.Array:
        copies = math.prod(plan.mesh.shape[axis] for axis in set(over) - set(axes[name]))
        if name not in num_rows:
            return jnp.sum(x * x) / copies
        return squares_of_rows(x, jnp.float32(1), first[name], num_rows[name]) / copies

    def local(before: Arrays, after: Arrays) -> jax.Array:
        found = {}
        for name, new in after.items():
            new = new.astype(jnp.float32)
            found[f"update {name}"] = squares(name, new - before[name].astype(jnp.float32))
            found[f"parameter {name}"] = squares(name, new)
        joined, places, _ = summed(found, over)
        order = [[places[f"{kind} {name}"] for name in after] for kind in KINDS[1:]]
        return joined[np.stack([np.concatenate(each) for each in order])]

    return jax.shard_map(
        local, mesh=plan.mesh, in_specs=(specs, specs), out_specs=P(), check_vma=False
    )


def norms_of_layers(rows: Sequence[str], sums: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns {"gradient", "update" or "parameter": {layer: l2 norm}}, layers in natural order:
    "blocks/2" before "blocks/10".

    Args:
      rows: `layer_rows` of the plan of the step.
      sums: "layer_sums" of the step, on the host.
    """
    numbers: dict[str, list[int]] = {}
    for number, layer in enumerate(rows):
        if layer:
            numbers.setdefault(layer, []).append(number)
    order = sorted(numbers, key=_natural)
    return {
        kind: {layer: math.sqrt(row[numbers[layer]].sum(dtype=np.float64)) for layer in order}
        for kind, row in zip(KINDS, np.asarray(sums), strict=True)
    }


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a key that orders numbers in names by value."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
