"""Plans how experts are split over the mesh axis `expert`: raises for unsupported settings, and
finds the dimension that is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.models.adapt import bound_attribute
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import AXES, DATA, DATA_AXES, EXPERT, MODEL
from zerojax.placement.table import Placement
from zerojax.tracing import trees
from zerojax.tracing.expert_calls import ExpertCalls, find_expert_calls
from zerojax.tracing.protocol import Model

ATTRIBUTE = "expert_parameters"
"""Name of the static attribute by which a model declares its expert parameters."""


def check_expert_axis(
    settings: MeshConfig, mesh: Mesh | AbstractMesh, precision: Precision
) -> None:
    """Raises if `expert` > 1 is combined with settings that are unsupported or could change the
    results.

    Args:
      settings: mesh options.
      mesh: the device mesh.
      precision: the user's setting of precision.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if mesh.shape[EXPERT] == 1:
        return
    asked = f"expert={mesh.shape[EXPERT]}"
    for axis in AXES:
        if axis not in (*DATA_AXES, MODEL) and mesh.shape[axis] > 1:
            raise ValueError(
                f"{asked} with {axis}={mesh.shape[axis]} is not supported; use {axis}=1 "
                "(supported are "
                "`data`, `replica` and `model` with `expert`), or expert=1"
            )
    codes = getattr(precision, "freeze_codes", None)
    others = {
        f"deterministic={settings.deterministic!r}": settings.deterministic is not None,
        f"freeze_codes={codes!r}": codes is not None,
        f"wire.weights={settings.wire.weights}": settings.wire.weights != "compute",
    }
    for what, is_there in others.items():
        if is_there:
            raise ValueError(
                f"{asked} with {what} is not supported; leave {what} out, or use expert=1"
            )


def plan_experts(
    model: Model,
    shapes: Mapping[str, Sequence[int]],
    program: Jaxpr,
    mesh: Mesh | AbstractMesh,
    stacks: Mapping[str, tuple[str, ...]],
) -> dict[str, int]:
    """Finds the dimension of experts of each expert parameter, which is split over `expert`.

    Args:
      model: the model.
      shapes: {name: shape} of all parameters.
      program: jaxpr of the loss, whose first inputs are the parameters, sorted by name.
      mesh: the device mesh.
      stacks: {stacked parameter of rolled layers: the user's names of its rows}.

    Returns:
      {expert parameter: its dimension of experts, counted from the end (negative)}; {} if expert=1.

    Raises:
      ValueError: the model's declaration contradicts its program, or a number of experts is not
        divisible.
    """
    if mesh.shape[EXPERT] == 1:
        return {}
    asked = f"expert={mesh.shape[EXPERT]}"
    calls = find_expert_calls(program, sorted(shapes))
    if not calls.count:
        raise ValueError(
            f"{asked} splits experts, but the loss never calls zerojax.experts; use expert=1, or "
            "compute the experts with zerojax.experts"
        )
    declared = _declared(model, shapes, stacks, asked)
    check_expert_calls(calls, declared, asked)
    for name in sorted(declared):
        number = shapes[name][calls.dims[name]]
        if number % mesh.shape[EXPERT]:
            raise ValueError(
                f"{asked} does not divide the {number} experts of {name}; use a divisor of {number}"
            )
    return {name: calls.dims[name] for name in sorted(declared)}


def _declared(
    model: Model,
    shapes: Mapping[str, Any],
    stacks: Mapping[str, tuple[str, ...]],
    asked: str,
) -> frozenset[str]:
    """Returns the names of stored parameters that the model declares as expert parameters."""
    patterns = bound_attribute(model, ATTRIBUTE)
    if not patterns:
        raise ValueError(
            f"{asked} splits experts, but the {model.kind} has no attribute {ATTRIBUTE}, which "
            "names its expert parameters: regular expressions on names, such as "
            "(r'experts/(gate|up|down)$',); add it to the class, or use expert=1"
        )
    rows = {name: stacks.get(name, (name,)) for name in shapes}
    names = [row for several in rows.values() for row in several]
    matched = trees.match_names(names, tuple(patterns), option=ATTRIBUTE)
    return frozenset(name for name, several in rows.items() if matched.issuperset(several))


def check_expert_calls(calls: ExpertCalls, declared: Iterable[str], asked: str) -> None:
    """Raises if the declared expert parameters are used in any other way than as weights of
    `zerojax.experts`.

    Raises:
      ValueError: the message states the parameter and its other use.
    """
    declared = frozenset(declared)
    for name in sorted(declared):
        where = calls.elsewhere.get(name)
        if where is not None:
            raise ValueError(
                f"{asked}: {name} is declared in {ATTRIBUTE} and {where}, where a device has only "
                "its own experts; pass it only to zerojax.experts, or use expert=1"
            )
        if name not in calls.dims:
            raise ValueError(
                f"{asked}: {name} is declared in {ATTRIBUTE}, but is not passed to "
                "zerojax.experts as "
                f"weights; leave it out of {ATTRIBUTE}, or use expert=1"
            )
    for name in sorted(calls.dims.keys() - declared):
        raise ValueError(
            f"{asked}: {name} is passed to zerojax.experts as weights, but is not declared in "
            f"{ATTRIBUTE}; declare all weights of experts, or use expert=1"
        )
    if calls.computed:
        raise ValueError(
            f"{asked}: zerojax.experts got computed weights of shape {list(calls.computed[0])} "
            "instead of stored parameters; pass the parameters themselves, or use expert=1"
        )
    if calls.conditional is not None:
        raise ValueError(
            f"{asked}: zerojax.experts is called inside `{calls.conditional}`, which devices may "
            "enter a different number of times, so they would wait for each other forever; call it "
            "outside, or use expert=1"
        )


def describe_experts(mesh: Mesh | AbstractMesh, placement: Placement) -> list[str]:
    """Returns one sentence on how the axis `expert` splits the experts; [] if its size is 1."""
    devices = mesh.shape[EXPERT]
    if devices == 1:
        return []
    leaves = [leaf for leaf in placement.leaves.values() if leaf.expert_dim is not None]
    numbers = sorted({leaf.shape[leaf.expert_dim or 0] for leaf in leaves})
    return [
        f"expert={devices}: each device has {' or '.join(str(n // devices) for n in numbers)} of "
        f"{' or '.join(map(str, numbers))} experts, of {len(leaves)} parameters, ZeRO-sharded over "
        f"data={mesh.shape[DATA]} alone; all-to-alls send rows to their experts and back, in "
        "as many rounds as the expert with the most rows needs"
    ]
