"""Raises for settings of a run that exclude each other. Knows the settings, the mesh and the
optimizer; never a model, its trace or a batch.

`make` checks them before it traces the loss, and `zerojax deepspeed explain` checks those of a
file, so both refuse the same combinations. What depends on the model is checked where it is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from zerojax import optim
from zerojax.features.deterministic.equal_bits import check_elementwise, check_equal_bits
from zerojax.features.known import KNOWN, works_with
from zerojax.features.one_bit.sign_plan import check_one_bit
from zerojax.features.other_settings import check_others
from zerojax.features.seam import Combination, Feature
from zerojax.offload.offload_pages import check_pages
from zerojax.offload.offload_tiers import (
    check_by_layer,
    check_durable,
    check_early_update,
    check_sliced_update,
)
from zerojax.placement.expert_axis import check_expert_axis
from zerojax.placement.frozen_codes import check_codes
from zerojax.plan.context_split import check_context, check_layout
from zerojax.plan.gradient_wire import check_gradient_wire
from zerojax.plan.layer_tiles import check_tiles
from zerojax.plan.refusals import check_layer_norms
from zerojax.plan.secondary_wire import check_secondary
from zerojax.plan.table_lookups import check_lookup
from zerojax.plan.weight_wire import check_weight_wire
from zerojax.tracing.activation_offload import check_no_stages
from zerojax.tracing.unrolling import check_unroll


def _check_feature(feature: Feature[Any, Any], c: Combination) -> None:
    if not c.features.get(feature.kind).is_off:
        check_others(c, feature.kind, works_with(feature))


_CHECKS: tuple[Callable[[Combination], object], ...] = (
    lambda c: check_expert_axis(c.settings, c.mesh, c.precision),
    lambda c: check_lookup(c.settings, c.mesh, c.precision),
    lambda c: check_context(c.settings, c.mesh),
    lambda c: check_layout(c.mesh, c.attention_layout),
    lambda c: check_one_bit(c.settings, c.mesh, c.precision, c.tx),
    lambda c: check_codes(c.settings, c.mesh, c.precision),
    *(functools.partial(_check_feature, feature) for feature in KNOWN),
    lambda c: check_gradient_wire(c.settings, c.mesh),
    lambda c: check_secondary(c.settings, c.mesh),
    lambda c: check_weight_wire(c.settings, c.mesh, c.tx),
    lambda c: optim.fit_optimizer(c.tx, c.precision),
    lambda c: check_elementwise(c.settings, c.tx),
    lambda c: check_by_layer(c.settings),
    lambda c: check_early_update(c.settings.offload, c.precision, c.tx),
    lambda c: check_no_stages(c.settings),
    lambda c: check_durable(c.settings.offload, c.precision),
    lambda c: check_sliced_update(c.settings.offload, c.tx),
    lambda c: check_pages(c.settings, c.mesh, c.precision, c.tx),
    lambda c: check_tiles(c.settings, c.mesh),
    lambda c: check_equal_bits(c.settings, c.mesh, c.precision),
    lambda c: check_unroll(c.settings),
    lambda c: c.layer_norms and check_layer_norms(c.settings, c.tx),
)


def find_conflicts(combination: Combination) -> Iterator[ValueError]:
    """Yields an error for each check that the settings do not pass; its message states the
    settings and the remedy."""
    for check in _CHECKS:
        try:
            check(combination)
        except ValueError as error:
            yield error


def check_combination(combination: Combination) -> None:
    """Raises if settings exclude each other.

    Raises:
      ValueError: the first of `find_conflicts`.
    """
    for check in _CHECKS:
        check(combination)
