"""Proposes tensor-parallel rules for a model from the matrix products in its loss, and counts their
cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax import tracing
from zerojax.config import MeshConfig, as_mesh_config
from zerojax.config.checks import as_patterns, names_keywords
from zerojax.config.display import as_details, printable
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import (
    AXES,
    DATA,
    MODEL,
    make_abstract_mesh,
    make_mesh,
    num_data_shards,
)
from zerojax.plan.inputs import PlanInputs, resolve_mesh
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.rule_choice import Kind, SplitChoice, choose_splits
from zerojax.tracing.trees import flatten_names, format_bytes

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]
_NAMES = 3
"""Largest number of patterns listed for each reason."""


@dataclass(frozen=True, kw_only=True)
class ProposedSplit:
    """Proposed split of the parameters that one pattern matches, which is one row of a proposal.

    Attributes:
      pattern: regular expression that matches `names` and no other parameter.
      names: names of the parameters, such as one parameter in all layers of a list.
      shape: shape of each parameter.
      axes: mesh axis, "model" or None, for each dimension except stacked layers; () if the
        parameters are not split.
      kind: "column": output features are split. "row": the product sums over split features, and an
        all-reduce of its result follows. "vocabulary": rows of a table, or outputs that the loss
        reduces, are split. "follows": a bias or scale of split features. "whole": not split.
      why: sentence with the reason.
      saved_bytes: bytes of stored weights that a device saves.
      forward_bytes, backward_bytes: bytes of the results that one device all-reduces in one
        microbatch; a ring of N devices sends 2 (N - 1) / N times as many.
      forward_sums, backward_sums: number of these all-reduces; the compiler may combine some.
    """

    pattern: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kind: Kind
    why: str
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_sums: int
    backward_sums: int


@dataclass(frozen=True, kw_only=True, repr=False)
class RuleProposal:
    """Tensor-parallel rules for a model, and the cost of each; `str()` formats a table.

    Attributes:
      model: number of devices on the axis `model`.
      rules: rules for `rules=` of `make_plan` and for `mesh.rules`; () if nothing can be split.
      parts: proposed splits, one for each pattern, in the order of the parameters.
      weight_bytes: bytes of all stored weights.
    """

    model: int
    rules: Rules
    parts: tuple[ProposedSplit, ...]
    weight_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes of stored weights that each device saves."""
        return sum(part.saved_bytes for part in self.parts)

    @property
    def forward_bytes(self) -> int:
        """Bytes that a device all-reduces over `model` in the forward pass of a microbatch."""
        return sum(part.forward_bytes for part in self.parts)

    @property
    def backward_bytes(self) -> int:
        """Bytes that a device all-reduces over `model` in the backward pass of a microbatch."""
        return sum(part.backward_bytes for part in self.parts)

    def __str__(self) -> str:
        rules = [f"  {printable(repr(rule))}," for rule in self.rules]
        ending = ["", "rules = (", *rules, ")"] if rules else []
        return "\n".join(
            [_headline(self), "", *_table(self.parts), "", "why", *_reasons(self.parts), *ending]
        )

    def __repr__(self) -> str:
        return f"RuleProposal({len(self.rules)} rules for model={self.model}; print it)"

    def _repr_html_(self) -> str:
        return as_details(_headline(self), str(self))


@names_keywords()
def propose_rules(
    model: tracing.ModelLike,
    mesh: Mesh | AbstractMesh | MeshConfig | Mapping[str, Any],
    *,
    example_batch: Batch,
    loss: tracing.Loss | None = None,
    precision: Precision | str | None = None,
    num_microbatches: int | None = None,
    freeze: str | Sequence[str] = (),
) -> RuleProposal:
    """Proposes tensor-parallel rules for a model from its matrix products, and counts their cost.

    The loss is traced, and nothing runs. The dimensions of parameters are followed through
    products, element-wise operations, reshapes that split heads, and loops; names of parameters
    have no effect. The model's own tensor-parallel rules are ignored.

    Args:
      model, example_batch, loss, precision, num_microbatches, freeze: arguments of the run, as for
        `zerojax.make_plan`. Bytes of all-reduces are counted for one microbatch in the compute
        dtype.
      mesh: mesh of the run, or its sizes: {"data": 2, "model": 4}. This machine need not have the
        devices. Only the number of data shards and the size of `model` are used.

    Returns:
      The proposal; `make_plan(..., rules=proposal.rules)` uses it.

    Raises:
      ValueError: the mesh has no `model` axis above 1, or the model cannot be planned.

    >>> import jax, zerojax
    >>> from flax import nnx
    >>> class Mlp(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
    ...     def loss(self, batch):
    ...         x = self.down(nnx.gelu(self.up(batch)))
    ...         return zerojax.losses.mean_squared_error(x, batch)
    >>> batch = jax.ShapeDtypeStruct((16, 8), "float32")
    >>> proposal = zerojax.propose_rules(Mlp, {"data": 2, "model": 4}, example_batch=batch)
    >>> dict(proposal.rules)
    {'^down/kernel$': ('model', None), '^up/bias$': ('model',), '^up/kernel$': (None, 'model')}
    """
    inputs = PlanInputs(
        model=model,
        example_batch=example_batch,
        loss=loss,
        precision=precision,
        num_microbatches=num_microbatches,
        freeze=as_patterns("freeze", freeze),
    )
    if isinstance(mesh, Mapping | MeshConfig):
        mesh = _mesh_of(as_mesh_config(mesh))
    return propose_for(inputs, mesh)


def propose_for(inputs: PlanInputs, mesh: Mesh | AbstractMesh) -> RuleProposal:
    """Proposes tensor-parallel rules from the inputs of a plan, for a mesh with model above 1."""
    mesh = _without_other_axes(mesh)
    degree = mesh.shape[MODEL]
    if degree < 2:
        raise ValueError(
            f"model={degree} splits nothing; give the mesh of the run an axis model above 1, such "
            'as {"data": 2, "model": 4}'
        )
    plan = plan_of(inputs, mesh, zero=0, rules=(), roll="off")
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    params = {
        name: jax.ShapeDtypeStruct(plan.placement.leaves[name].shape, stored[name].dtype)
        for name in sorted(stored)
    }
    trained = {name for name, leaf in plan.placement.leaves.items() if not leaf.frozen}
    choices = choose_splits(
        plan.traced.forward,
        params,
        *_other_inputs(plan),
        trained=trained,
        degree=degree,
        added_first=not _is_cpu(mesh),
    )
    stack_dims = {name: leaf.stack_dims for name, leaf in plan.placement.leaves.items()}
    axes = {name: _axes(params[name], choices[name], stack_dims[name]) for name in params}
    parts = tuple(_parts(params, choices, axes, degree))
    return RuleProposal(
        model=degree,
        rules=tuple((part.pattern, part.axes) for part in parts if part.axes),
        parts=parts,
        weight_bytes=sum(map(_num_bytes, params.values())),
    )


def _mesh_of(config: MeshConfig) -> Mesh | AbstractMesh:
    """Makes a mesh from `config`, with this machine's devices if it has as many, else an abstract
    mesh."""
    sizes = [getattr(config, axis) for axis in AXES]
    if -1 in sizes or math.prod(sizes) == jax.device_count():
        return make_mesh(config)
    return make_abstract_mesh(config)


def _without_other_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns a mesh with the same number of data shards and the same axis `model`, but no other
    axes."""
    _, mesh = resolve_mesh(mesh, None, {})
    sizes = {DATA: num_data_shards(mesh), MODEL: mesh.shape[MODEL]}
    if mesh.shape[DATA] == sizes[DATA] and math.prod(sizes.values()) == mesh.size:
        return mesh
    if isinstance(mesh, Mesh):
        return make_mesh(sizes, [*mesh.devices.flat][: math.prod(sizes.values())])
    return make_abstract_mesh(sizes).update(abstract_device=mesh.abstract_device)


def _other_inputs(plan: Plan) -> tuple[list[str], list[str]]:
    """Returns the names of the inputs of a traced loss after its parameters: (state, batch)."""
    batch = [
        f"batch[{name!r}]" if name else "the batch" for name in flatten_names(plan.abstract_batch)
    ]
    state = sorted(plan.abstract_stored["extras"])
    number = len(plan.traced.forward.jaxpr.invars) - len(plan.placement.leaves)
    assert len(state) + len(batch) == number, (state, batch, number)
    return state, batch


def _is_cpu(mesh: Mesh | AbstractMesh) -> bool:
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _parts(
    params: Mapping[str, Any],
    choices: Mapping[str, SplitChoice],
    axes_of: Mapping[str, tuple[str | None, ...]],
    degree: int,
) -> Iterator[ProposedSplit]:
    """Yields a `ProposedSplit` for each pattern of parameter names."""
    same = {name: (params[name].shape, axes_of[name], choices[name].kind) for name in params}
    patterns = group_names(same)
    pattern_of = {name: pattern for pattern, names in patterns.items() for name in names}
    for pattern, names in patterns.items():
        found = [choices[name] for name in names]
        shape, axes, _ = same[names[0]]
        size = sum(_num_bytes(params[name]) for name in names)
        yield ProposedSplit(
            pattern=pattern,
            names=tuple(names),
            shape=tuple(shape),
            axes=axes,
            kind=found[0].kind,
            why=found[0].why.format(_readable(pattern_of.get(found[0].partner or "", ""))),
            saved_bytes=size - size // degree if axes else 0,
            forward_bytes=sum(choice.forward_bytes for choice in found),
            backward_bytes=sum(choice.backward_bytes for choice in found),
            forward_sums=sum(choice.forward_sums for choice in found),
            backward_sums=sum(choice.backward_sums for choice in found),
        )


def _axes(
    param: jax.ShapeDtypeStruct, choice: SplitChoice, stack_dims: int
) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dimension except stacked layers; () for a parameter that is not
    split."""
    if choice.dim is None:
        return ()
    axes = [MODEL if dim == choice.dim else None for dim in range(len(param.shape))]
    return tuple(axes[min(stack_dims, choice.dim) :])


def group_names(same: Mapping[str, Any]) -> dict[str, list[str]]:
    """Groups names that differ only in numbers; returns {regular expression: names}.

    Args:
      same: {name: any value}; names in one group have equal values.

    >>> group_names({"h_0/up": 1, "h_1/up": 1, "h_0/down": 2, "out": 0})
    {'^h_\\\\d+/up$': ['h_0/up', 'h_1/up'], '^h_0/down$': ['h_0/down'], '^out$': ['out']}
    """
    found: dict[str, list[str]] = {}
    for name in same:
        if any(re.search(pattern, name) for pattern in found):
            continue
        words = re.split(r"(\d+)", name)
        kept = [re.escape(word) for word in words]
        for place in range(1, len(words), 2):
            wider = [*kept[:place], r"\d+", *kept[place + 1 :]]
            pattern = re.compile(f"^{''.join(wider)}$")
            names = [other for other in same if pattern.search(other)]
            if len(names) > 1 and all(same[other] == same[name] for other in names):
                kept = wider
        pattern = re.compile(f"^{''.join(kept)}$")
        found[pattern.pattern] = [other for other in same if pattern.search(other)]
    return found


def _headline(proposal: RuleProposal) -> str:
    split = sum(len(part.names) for part in proposal.parts if part.axes)
    number = sum(len(part.names) for part in proposal.parts)
    weights = format_bytes(proposal.weight_bytes)
    if not split:
        return (
            f"nothing can be split over model={proposal.model}: no product's output can stay "
            "split until "
            "another product sums over it, for the reasons below; use model=1, or pass your own "
            "rules"
        )
    left = format_bytes(proposal.weight_bytes - proposal.saved_bytes)
    return (
        f"model={proposal.model} splits {split} of {number} parameters: {left} of {weights} of "
        f"weights on each device; a microbatch all-reduces {format_bytes(proposal.forward_bytes)} "
        f"forward and {format_bytes(proposal.backward_bytes)} backward"
    )


def _table(parts: Sequence[ProposedSplit]) -> list[str]:
    rows: list[Sequence[str]] = [
        ("parameter", "shape", "split", "kind", "saved", "forward", "backward")
    ]
    for part in parts:
        times = f"{len(part.names)} of " if len(part.names) > 1 else ""
        axes = (*[None] * (len(part.shape) - len(part.axes)), *part.axes)
        rows.append(
            (
                printable(_readable(part.pattern)),
                times + ("x".join(map(str, part.shape)) or "scalar"),
                ", ".join(axis or "-" for axis in axes) if part.axes else "whole",
                part.kind if part.axes else "",
                *(_sized(n) for n in (part.saved_bytes, part.forward_bytes, part.backward_bytes)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _readable(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern.strip("^$").replace(r"\d+", "*"))


def _sized(count: int) -> str:
    return format_bytes(count) if count else "-"


def _reasons(parts: Sequence[ProposedSplit]) -> list[str]:
    """Formats one line for each reason of a split, with some of the patterns that it applies to."""
    shared: dict[str, list[str]] = {}
    for part in parts:
        shared.setdefault(part.why, []).append(_readable(part.pattern))
    lines = []
    for why, names in shared.items():
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        lines.append(f"  {printable(', '.join(names[:_NAMES]) + more)}: {printable(why)}")
    return lines
