"""The `shard_map` region of a pass: manual axes and specs of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from zerojax.parallel.zero.microbatch import Arrays, PassConfig
from zerojax.plan.leaf import LeafPlacement
from zerojax.plan.mesh import DATA_AXES

SpecOf = Callable[[LeafPlacement], P]


def data_spec(leaf: LeafPlacement) -> P:
    """How a parameter lies in a region that is manual over the data axes alone."""
    return leaf.data_spec


def map_gradients(
    config: PassConfig,
    local: Callable[..., tuple[Arrays, Arrays, Arrays]],
    *,
    spec_of: SpecOf = data_spec,
    axes: tuple[str, ...] = DATA_AXES,
) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """What `build_gradients` returns, from what one device does.

    Args:
      config: of the pass.
      local: (params, frozen, extras, key_data, batch, loss_factor) of one device -> (sums, grads,
        extras); grads {name: as `params` has it}, the others the same on every device.
      spec_of: how a parameter lies in the region.
      axes: the manual axes.
    """

    def gradients(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: Any,
        batch: Arrays,
        loss_factor: jax.Array | None = None,
    ) -> tuple[Arrays, Arrays, Arrays]:
        specs = specs_of(config, params, spec_of), specs_of(config, frozen, spec_of)
        mapped = jax.shard_map(
            local,
            mesh=config.mesh,
            in_specs=(*specs, P(), P(), P(DATA_AXES), P()),
            out_specs=(P(), specs[0], P()),
            axis_names=set(axes),
            check_vma=False,
        )
        return mapped(params, frozen, extras, key_data, batch, loss_factor)

    return gradients


def map_forward(
    config: PassConfig,
    local: Callable[..., Arrays],
    *,
    spec_of: SpecOf = data_spec,
    axes: tuple[str, ...] = DATA_AXES,
) -> Callable[..., Arrays]:
    """What `build_forward` returns, from what one device does; arguments as in `map_gradients`."""

    def forward(
        params: Arrays, frozen: Arrays, extras: Arrays, key_data: Any, batch: Arrays
    ) -> Arrays:
        specs = specs_of(config, params, spec_of), specs_of(config, frozen, spec_of)
        mapped = jax.shard_map(
            local,
            mesh=config.mesh,
            in_specs=(*specs, P(), P(), P(DATA_AXES)),
            out_specs=P(),
            axis_names=set(axes),
            check_vma=False,
        )
        return mapped(params, frozen, extras, key_data, batch)

    return forward


def specs_of(config: PassConfig, arrays: Arrays, spec_of: SpecOf = data_spec) -> dict[str, P]:
    """{name: how a parameter lies in the region}."""
    return {name: spec_of(config.placement.leaves[name]) for name in arrays}
