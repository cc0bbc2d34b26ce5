"""Makes plans of the same run with other settings of offload.

Tracing and placement are reused, except that a plan with weights in host memory is made anew.
"""

from __future__ import annotations

import dataclasses

from zerojax.config.mesh import HOST, NVME
from zerojax.offload.offload_tiers import resliced
from zerojax.placement.layer_stacks import row_layout
from zerojax.placement.state import abstract_offloaded, portable_on_host
from zerojax.plan.make import Plan, Remake
from zerojax.plan.reasons import describe_offload


def streamed_from_host(plan: Plan) -> Plan:
    """Returns the plan of the same run with weights and inputs of layers in host memory instead of
    files.

    Args:
      plan: plan with the weights of layers in files.
    """
    assert isinstance(plan.remake, Remake)
    config = plan.settings.offload
    inputs = HOST if config.activations == NVME else config.activations
    offload = dataclasses.replace(config, params=HOST, activations=inputs, update_in_backward=False)
    settings = dataclasses.replace(plan.settings, offload=offload)
    return dataclasses.replace(plan.remake, settings=settings)(plan.mesh)


def with_slices(plan: Plan, elements: int) -> Plan:
    """Returns the same plan with another `offload.slice_elements`.

    Args:
      plan: plan with offload.
      elements: largest number of elements of a slice.

    Raises:
      ValueError: there are too many slices.
    """
    before = plan.offload
    assert before is not None
    assert isinstance(plan.remake, Remake)
    offload = dataclasses.replace(plan.settings.offload, slice_elements=elements)
    settings = dataclasses.replace(plan.settings, offload=offload)
    layout = resliced(before, offload, plan.placement, plan.mesh)
    portable = portable_on_host(plan.abstract_portable, row_layout(layout, plan.stacks))
    told = dict(
        zip(
            describe_offload(plan.settings, before), describe_offload(settings, layout), strict=True
        )
    )
    return dataclasses.replace(
        plan,
        settings=settings,
        offload=layout,
        abstract_state=abstract_offloaded(plan.abstract_stored, layout, plan.precision),
        abstract_portable=portable,
        reasons=tuple(told.get(reason, reason) for reason in plan.reasons),
        remake=dataclasses.replace(plan.remake, settings=settings),
    )
