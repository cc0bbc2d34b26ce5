"""Finds sharding rules without effect: that match nothing, come too late or split nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zerojax.models import bound_attribute
from zerojax.placement.device_mesh import MODEL
from zerojax.placement.leaf_placement import tensor_parallel_axes
from zerojax.plan.make import Plan
from zerojax.zoo.bert import Bert
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.t5 import T5

_RULES_OF_ZOO = frozenset(
    rule for model in (Bert, Decoder, T5) for rule in model.tensor_parallel_rules
)


def users_rules(plan: Plan) -> tuple[tuple[str, Sequence[str | None]], ...]:
    """Returns the sharding rules of the mesh; else those of the model, if the mesh splits matrices.

    Without those of zerojax's own models, which are for all variants and fit only some of them.
    """
    if plan.settings.rules is not None:
        return tuple(plan.settings.rules)
    rules = bound_attribute(plan.model, "tensor_parallel_rules") or ()
    splits = plan.mesh.shape[MODEL] > 1
    # Rules of the zoo are for all variants of a model, so some match nothing in most of them.
    return tuple(rule for rule in rules if splits and rule not in _RULES_OF_ZOO)


def effect_of(
    place: int, rules: Sequence[tuple[str, Sequence[str | None]]], plan: Plan, size: int
) -> tuple[str, str, list[str]]:
    """Returns (why a sharding rule has no effect, remedy, parameters that it matches).

    Returns ("", "", []) if it has an effect.
    """
    pattern, axes = rules[place]
    # With one device on the axis every rule is without effect, so the mesh is named and not the
    # rule.
    if size == 1:
        return f"splits nothing: the mesh has {MODEL}={size}", f"set {MODEL} in the mesh", []
    shapes = {name: leaf.shape for name, leaf in plan.placement.leaves.items()}
    # Rules are written for a layer; the first row of a stack stands for all of its rows.
    asked = {name: (plan.stacks.get(name) or (name,))[0] for name in shapes}
    matched = [name for name, row in asked.items() if re.search(pattern, row)]
    if not matched:
        near = ", ".join(list(shapes)[:3])
        return "matches no parameter", f"correct the pattern; names are such as {near}", []
    earlier = [one for one, _ in rules[:place]]
    # The first rule that matches a parameter decides, as in `tensor_parallel_axes`.
    first = [name for name in matched if not any(re.search(one, asked[name]) for one in earlier)]
    if not first:
        taken = next(one for one in earlier if re.search(one, asked[matched[0]]))
        return (
            f"comes too late: {taken!r} or other earlier rules match its {len(matched)} parameters",
            "move it before them or remove it",
            matched,
        )
    own = {name: shapes[name] for name in first}
    stacks = plan.stacks
    sizes = plan.mesh.shape
    if any(any(one) for one in tensor_parallel_axes(own, sizes, [rules[place]], stacks).values()):
        return "", "", []
    # A rule that splits nothing has an effect if a later rule would split what it matches.
    later = tensor_parallel_axes(own, sizes, rules[place + 1 :], stacks)
    if not any(any(one) for one in later.values()):
        return (
            f"splits none of the {len(first)} parameters that it matches (axes {list(axes)})",
            f"name the axis {MODEL!r} for a dimension, or remove it",
            first,
        )
    return "", "", []
