"""Counts the bytes and FLOPs of experts in a step: rows sent, additional rounds, and state.

The numbers come from the calls of `zerojax.experts` in the traced loss. Rows are exchanged in
rounds of fixed size; a further round runs only if some expert has more rows than fit into the
rounds before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.optim.optimizer import map_state
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import EXPERT
from zerojax.plan.counts import gradient_bytes, model_flops, shard_bytes
from zerojax.tracing import trees
from zerojax.tracing.expert_calls import RowsOfCall, find_expert_calls, find_rows
from zerojax.tracing.flops import TRAINING_FACTOR, further_round_flops


@dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """Costs of experts per device and step, in bytes unless stated otherwise.

    Attributes:
      parameters: stored parameters of experts.
      optimizer_state: optimizer state of these parameters, including an average of the weights.
      gradients: gradients after the backward pass, or summed over microbatches.
      exchange: bytes sent for rows, results, gates and their gradients in one round of every call.
      further_bytes, further_flops: bytes and FLOPs that a second round of every call adds; with
        equal loads there is none.
      further_share: further_flops as a share of the step's FLOPs.
      products: method of the matrix products.
      computed: number of rows multiplied in the first round, divided by the actual number of rows.
      grouped: upper bound of this ratio for grouped products, with about equal loads.
    """

    parameters: int
    optimizer_state: int
    gradients: int
    exchange: int
    further_bytes: int
    further_flops: float
    further_share: float
    products: str
    computed: float
    grouped: float


def expert_costs(plan: Decisions) -> ExpertCosts | None:
    """Computes the costs of experts in a plan; returns None if the loss does not call
    `zerojax.experts`."""
    calls = list(find_rows(plan.traced.forward.jaxpr))
    if not calls:
        return None
    products = sorted({call.products for call in calls})[-1]
    names = expert_names(plan)
    leaves = plan.placement.leaves
    stored = plan.abstract_stored
    arrays = [stored["frozen" if leaves[name].frozen else "params"][name] for name in names]
    # One product in the forward pass, recomputed in the backward pass, which has two of its own.
    passes = 1 + TRAINING_FACTOR
    a_pass = plan.division.unit / plan.mesh.size
    further = passes * a_pass * further_round_flops(plan.traced.forward)
    step = model_flops(plan) / plan.mesh.size
    return ExpertCosts(
        parameters=shard_bytes(arrays),
        optimizer_state=_moments(plan, names),
        gradients=sum(gradient_bytes(plan, leaves[name]) for name in names),
        exchange=exchange_bytes(plan),
        further_bytes=_sent(plan, "further_round"),
        further_flops=further,
        further_share=further / step if step else 0.0,
        products=products,
        computed=_computed(plan, calls, products),
        grouped=_computed(plan, calls, "grouped"),
    )


def _computed(plan: Decisions, calls: list[RowsOfCall], products: Any) -> float:
    devices = plan.mesh.shape[EXPERT]
    rows = sum(call.times * call.choices for call in calls)
    return sum(call.times * call.computed(products, devices) for call in calls) / rows


def expert_names(plan: Decisions) -> list[str]:
    """Returns the names of the parameters that are weights of `zerojax.experts`, on any mesh."""
    calls = find_expert_calls(plan.traced.forward.jaxpr, sorted(plan.placement.leaves))
    return sorted(calls.dims)


def exchange_bytes(plan: Decisions) -> int:
    """Returns the bytes that one device sends per step over `expert`, in one round of each call; 0
    if expert=1.

    For E experts with C slots each on n devices, each exchange sends (n - 1) / n of E x C slots:
    rows, results and the gradients of both, with gates and their gradients. A checkpoint that
    recomputes a call sends rows and gates once more. If not all parameters are trained, the number
    is an upper bound.
    """
    return _sent(plan, "first_round")


def _sent(plan: Decisions, which: str) -> int:
    devices = plan.mesh.shape[EXPERT]
    slots = sum(getattr(call, which) for call in find_rows(plan.traced.forward.jaxpr))
    return round((devices - 1) / devices * slots * plan.num_microbatches)


def _moments(plan: Decisions, names: list[str]) -> int:
    """Returns the bytes of the optimizer state of some parameters, in all memories."""
    stored = plan.abstract_stored
    of = map_state(
        plan.tx,
        lambda _, name: name,
        stored["opt_state"],
        {name: name for name in stored["params"]},
    )
    flat, owners = trees.flatten_names(stored["opt_state"]), trees.flatten_names(of)
    return shard_bytes([leaf for path, leaf in flat.items() if owners.get(path) in names])


def expert_lines(costs: Mapping[str, Any]) -> list[str]:
    """Describes the costs of experts as text, one sentence each.

    Args:
      costs: an `ExpertCosts` as a dictionary.
    """
    size = trees.format_bytes
    lines = [
        f"experts, of one device: parameters {size(costs['parameters'])}, optimizer state "
        f"{size(costs['optimizer_state'])}, gradients {size(costs['gradients'])}"
    ]
    sent = ""
    if costs["exchange"]:
        sent = f"{size(costs['further_bytes'])} more bytes sent by each device and "
        lines.append(
            f"rows to experts and back, one round in every layer: {size(costs['exchange'])} sent "
            "by each device per step"
        )
    more = f"{costs['further_flops']:.3g} more FLOPs, {costs['further_share']:.1%} of the step's"
    if costs["products"] != "batched":  # a plan's trace has one round of them
        more = "at most a quarter of the first round's products in addition"
    if sent or costs["products"] == "batched":
        lines.append(f"one further round in every layer, not needed with equal loads: {sent}{more}")
    lines.append(_of_products(costs))
    return lines


def _of_products(costs: Mapping[str, Any]) -> str:
    """Describes the method of the experts' matrix products, and the reason for it."""
    products, computed = costs["products"], costs["computed"]
    said = f"products of experts: {products}, "
    if products == "batched":
        return (
            f"{said}{computed:.2f} times the arithmetic of their rows; moe.products=grouped, a "
            f"kernel for Hopper, has at most {costs['grouped']:.2f}; timed on one H200 only"
        )
    untimed = "; timed on one H200 only" if products == "grouped" else ", one tile after the other"
    return f"{said}at most {computed:.2f} times the arithmetic of their rows (requested){untimed}"


def costs_dict(plan: Decisions) -> dict[str, Any] | None:
    """Returns the costs of experts in a plan as a JSON-compatible dictionary; None if it has no
    experts."""
    found = expert_costs(plan)
    return None if found is None else dataclasses.asdict(found)
