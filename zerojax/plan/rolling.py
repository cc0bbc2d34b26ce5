"""Chooses which lists of layers are rolled, which means that layers of a Python list run as one
loop and their parameters are stored stacked.

The choice depends on traces, names and settings. In case of doubt the model stays as the user wrote
it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax import models, tracing
from zerojax.config import MeshConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, RollRemat
from zerojax.config.tree_types import Tree
from zerojax.optim import Optimizer
from zerojax.placement.device_mesh import MODEL, STAGE
from zerojax.placement.layer_stacks import RowsDifferError, Stacks, group_rows
from zerojax.placement.leaf_placement import tensor_parallel_axes
from zerojax.plan.stacked_updates import over_stacks
from zerojax.tracing import trees
from zerojax.tracing.rolling import (
    ELEMENTWISE,
    Loop,
    RolledModel,
    find_loops,
    has_checkpoints,
    kept_bytes,
)

Structs = Mapping[str, Any]
Pairs = tuple[tuple[str, RollRemat], ...]
KEPT_AS_IS = ("auto", "model")
"""Values of `roll_remat` that do not require a loop."""
MIN_TURNS = 4
"""Smallest number of iterations of a loop that the settings do not need: fewer layers compile fast,
and a loop has its own cost."""
_LENGTH = 240
"""Largest number of characters of an error in a reason."""


@dataclass(frozen=True, kw_only=True)
class Rolling:
    """Result of rolling a model's layers into loops: the loops, and the reasons.

    Attributes:
      model: model with loops in place of layers; None if nothing is rolled.
      loops: loops of this model.
      found: all loops that the model could have.
      reasons: a line for every list of layers that is rolled, and for every longer list (from
        `MIN_TURNS` layers on) that is not.
    """

    model: RolledModel | None = None
    loops: tuple[Loop, ...] = ()
    found: tuple[Loop, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def stacks(self) -> Stacks:
        """{stacked parameter: the user's names of its rows}; {} if nothing is rolled."""
        return {stack: rows for loop in self.loops for stack, rows in loop.stacks.items()}

    def given_up(self, error: Exception) -> Rolling:
        """Returns a result without loops, whose reasons contain the error that rolling caused."""
        titles = ", ".join(loop.title for loop in self.loops)
        why = f"layers: {titles} not rolled: {describe_error(error)}"
        return Rolling(found=self.found, reasons=(why,))


@dataclass(frozen=True, kw_only=True)
class RollingOptions:
    """Settings per parameter, which must be equal for all rows of a stacked parameter.

    Attributes:
      settings: mesh options.
      mesh: the device mesh.
      freeze: regular expressions on names of parameters that are not trained.
      tx: the optimizer.
      in_loop: whether a feature needs layers that run in a loop.
    """

    settings: MeshConfig
    mesh: Mesh | AbstractMesh
    freeze: tuple[str, ...]
    tx: optax.GradientTransformation
    in_loop: bool = False

    @property
    def needs_loop(self) -> bool:
        """Whether the settings are an error for a model whose layers do not run in a loop."""
        return self.in_loop or works_with_loops_alone(self.settings, self.mesh)


def choose_rolling(
    model: tracing.Model,
    trace: tracing.ModelTrace,
    params: Structs,
    options: RollingOptions,
) -> Rolling:
    """Chooses the loops that replace a model's layers.

    Args:
      model: model as the user wrote it.
      trace: trace of its loss on one microbatch.
      params: {name: struct} of all parameters.
      options: settings of parameters by name.
    """
    if options.settings.roll == "off":
        return Rolling()
    try:
        return _choose(model, trace, params, options)
    except Exception as error:  # on any error the model stays unrolled
        return Rolling(reasons=(f"layers: not rolled: {describe_error(error)}",))


def _choose(
    model: tracing.Model,
    trace: tracing.ModelTrace,
    params: Structs,
    options: RollingOptions,
) -> Rolling:
    rows_of = _Rows(model, params, options)
    found = find_loops(trace, params, rows_of.kind_of)
    rolled: list[Loop] = []
    reasons: list[str] = []
    for loop in found.loops:
        why = _why_not_worth(loop, options) or rows_of.why_state_differs(loop)
        if why is None:
            remat, said = _choose_remat(loop, options, params)
            rolled.append(dataclasses.replace(loop, remat=remat))
            reasons.append(f"layers: {loop.describe()}{said}")
        elif loop.layers.num_layers >= MIN_TURNS:
            more = (
                f" (the longer list cannot become one loop: {loop.why_not_more})"
                if loop.why_not_more
                else ""
            )
            reasons.append(f"layers: {loop.title} not rolled: {why}{more}")
    reasons += [f"layers: not rolled: {sentence}" for sentence in found.left]
    if not rolled:
        return Rolling(found=found.loops, reasons=tuple(reasons))
    if why := _why_never(model, options):
        titles = ", ".join(loop.title for loop in rolled)
        return Rolling(found=found.loops, reasons=(f"layers: {titles} not rolled: {why}",))
    return Rolling(
        model=RolledModel(model, rolled, params),
        loops=tuple(rolled),
        found=found.loops,
        reasons=tuple(reasons),
    )


def _remat_of(setting: RollRemat | Pairs, loop: Loop) -> tuple[str | None, str]:
    """Returns what `roll_remat` asks of a loop.

    In a mapping the exact title of the loop comes first, then the first pattern that matches.

    Returns:
      (pattern of the mapping that applies, or None; value).
    """
    if isinstance(setting, str):
        return None, setting
    names = [loop.title, *(name for names in loop.stacks.values() for name in names)]
    exact = [pair for pair in setting if pair[0] == loop.title]
    matching = (p for p in setting if any(re.search(p[0], name) for name in names))
    return next(iter(exact), None) or next(matching, (None, "auto"))


def _choose_remat(loop: Loop, options: RollingOptions, params: Structs) -> tuple[str, str]:
    """Chooses which values the backward pass recomputes in each iteration of a loop over layers.

    Without recomputation a loop stores elementwise results of every iteration, which separate
    layers recompute within other operations. That may take more memory than gathering layer by
    layer saves.

    Returns:
      (name of the policy, text that continues a reason of the plan).
    """
    pattern, remat = _remat_of(options.settings.roll_remat, loop)
    if pattern is not None:
        return remat, f"; roll_remat={{{pattern}: {remat}}}"
    if remat != "auto":
        return remat, "" if remat == "model" else f"; roll_remat={remat}"
    if has_checkpoints(loop.body) or options.needs_loop:
        return "model", ""
    kept, fewer = (kept_bytes(loop.body, x) * loop.count for x in ("none", ELEMENTWISE))
    rows = [params[name] for names in loop.stacks.values() for name in names]
    weights = sum(x.size * x.dtype.itemsize for x in rows)
    if fewer > kept / 2 or kept - fewer <= weights:
        return "model", ""
    sizes = [trees.format_bytes(x) for x in (fewer, kept, weights)]
    return ELEMENTWISE, (
        f"; the backward pass recomputes elementwise results: activations of {sizes[0]} are "
        f"stored instead of {sizes[1]}, "
        f"with weights of {sizes[2]} (roll_remat=model stores all)"
    )


def _why_never(model: tracing.Model, options: RollingOptions) -> str | None:
    """Returns the reason why no layers of a model may be rolled into a loop; None if they may."""
    if model.overwritten:
        return f"{min(model.overwritten)} is overwritten with its gradient in each layer"
    if isinstance(options.tx, Optimizer) and options.tx.with_stacks is None:
        return (
            f"{options.tx.kernel} encodes the state of whole arrays, which stacking would change "
            "in a "
            "checkpoint; zerojax.adamw, lion, lamb and sgd do not have this limit"
        )
    offload = options.settings.offload
    if offload.on_disk and offload.params == DEVICE:
        return "offload.opt_state uses nvme, whose files store each layer's parameter separately"
    return None


def _why_not_worth(loop: Loop, options: RollingOptions) -> str | None:
    """Returns the reason why a loop would cost more than it saves; None if it would not.

    If layers have no checkpoint, and their weights are not gathered or streamed layer by layer, a
    loop only stacks the values for the backward pass: 188 MiB, compared with 146 MiB for 24
    separate layers.
    """
    settings = options.settings
    _, remat = _remat_of(settings.roll_remat, loop)
    fewest = 2 if options.needs_loop or remat not in KEPT_AS_IS else MIN_TURNS
    if loop.count < fewest:
        return f"{loop.count} iterations, fewer than {fewest}"
    by_layer = (
        settings.zero == 3
        or options.needs_loop
        or (loop.is_checkpointed if remat in KEPT_AS_IS else remat != "none")
    )
    if not by_layer:
        return (
            "a loop would store more for the backward pass; with roll_remat=full, or zero=3, a "
            "loop "
            "stores less"
        )
    if not loop.has_small_rows:
        return (
            f"{trees.format_bytes(loop.row_bytes)} of values that differ by layer, such as "
            "masks, would be "
            f"stacked beside {trees.format_bytes(loop.carry_bytes * loop.count)} of activations"
        )
    return None


def works_with_loops_alone(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the settings require layers that run in a loop, as a pipeline and offload by
    layer do."""
    by_layer = settings.offload.by_layer or settings.offload.activations != DEVICE
    return mesh.shape[STAGE] > 1 or by_layer


def check_remat(settings: MeshConfig, rolling: Rolling) -> None:
    """Raises if the setting `roll_remat`, or a pattern of it, would apply to no layer.

    Raises:
      ValueError: no layers are rolled, or a pattern is that of no loop.
    """
    setting = settings.roll_remat
    why = "roll=off" if settings.roll == "off" else "; ".join(rolling.reasons)
    why = why or "the model has no such list"
    for pattern, value in () if isinstance(setting, str) else setting:
        loops = rolling.found if value in KEPT_AS_IS else rolling.loops
        if all(_remat_of(setting, loop)[0] != pattern for loop in loops):
            titles = ", ".join(loop.title for loop in loops)
            remedy = "use the name of a loop, or a pattern that no earlier one replaces"
            raise ValueError(
                f"roll_remat={{{pattern}: {value}}} applies to no loop over layers of a Python "
                f"list (loops: {titles or 'none'}; {why}); {remedy if titles else 'leave it out'}"
            )
    if not isinstance(setting, str) or setting in KEPT_AS_IS or rolling.model is not None:
        return
    raise ValueError(
        f"roll_remat={settings.roll_remat} applies to layers of a Python list that become a loop, "
        f"but in this model none do ({why}); put jax.checkpoint "
        "around the layers in the model, or give model.remat to a reference model, and leave "
        "roll_remat=auto"
    )


class _Rows:
    """Settings per parameter that decide whether a parameter can be a row of a stacked
    parameter."""

    def __init__(self, model: tracing.Model, params: Structs, options: RollingOptions) -> None:
        self._params, self._options = params, options
        frozen = (
            trees.match_names(params, options.freeze, option="freeze") if options.freeze else ()
        )
        self._frozen = {name: name in frozen for name in params}
        self._axes = _axes_of(model, params, options)
        self._trained = {
            name: jax.ShapeDtypeStruct(x.shape, jnp.float32)
            for name, x in params.items()
            if not self._frozen[name] and jnp.issubdtype(x.dtype, jnp.floating)
        }
        tx = options.tx
        settings = tx.settings if isinstance(tx, Optimizer) else None
        self._settings = {} if settings is None else settings(self._trained)

        self._forms = {} if isinstance(tx, Optimizer) else self._state_forms()

    def kind_of(self, name: str) -> tuple[Any, ...]:
        """Returns the settings of a parameter as (source, setting) pairs; only parameters with
        equal pairs can be rows of one stacked parameter."""
        return (
            ("freeze", self._frozen[name]),
            ("a tensor-parallel rule", self._axes[name]),
            ("the optimizer's groups or mask", self._settings.get(name)),
            ("the optimizer's groups or mask", self._forms.get(name)),
        )

    def _state_forms(self) -> dict[str, tuple[Any, ...]]:
        """Returns {name: structure of the optimizer's state for this parameter}.

        Groups and masks, such as those of `optax.multi_transform`, have different state for
        different parameters.
        """
        state = jax.eval_shape(self._options.tx.init, self._trained)
        forms: dict[str, list[Any]] = {name: [] for name in self._trained}
        holds = lambda x: isinstance(x, dict) and not forms.keys().isdisjoint(x)  # noqa: E731
        for node in jax.tree.leaves(state, is_leaf=holds):
            if holds(node):
                for name, form in forms.items():
                    form.append(jax.tree.structure(node[name]) if name in node else None)
        return {name: tuple(form) for name, form in forms.items()}

    def why_state_differs(self, loop: Loop) -> str | None:
        """Returns the reason why the optimizer's state of separate rows cannot be stored as the
        state of one array; None if it can."""
        if isinstance(self._options.tx, Optimizer):
            return None
        stacks = {s: names for s, names in loop.stacks.items() if names[0] in self._trained}
        try:
            state = jax.eval_shape(self._options.tx.init, self._trained)
            group_rows(state, stacks)
        except RowsDifferError as error:
            return f"the optimizer keeps rows differently: {error}"
        stored = stack_structs(self._trained, stacks)
        jax.eval_shape(over_stacks(self._options.tx, stacks).init, stored)
        return None


def _axes_of(model: tracing.Model, params: Structs, options: RollingOptions) -> dict[str, Any]:
    """Returns {name: mesh axes that tensor-parallel rules give its dimensions}."""
    rules = options.settings.rules
    if rules is None:
        rules = models.bound_attribute(model, "tensor_parallel_rules") or ()
    if options.mesh.shape[MODEL] == 1:
        rules = ()
    shapes = {name: tuple(x.shape) for name, x in params.items()}
    return tensor_parallel_axes(shapes, options.mesh.shape, rules)


def stack_structs(params: Structs, stacks: Stacks) -> dict[str, jax.ShapeDtypeStruct]:
    """Converts structs of separate parameters to structs as stored, with each stack in the place of
    its first row."""
    stack_of = {row: stack for stack, rows in stacks.items() for row in rows}
    stored: dict[str, Any] = {}
    for name, x in params.items():
        stack = stack_of.get(name)
        shape = x.shape if stack is None else (len(stacks[stack]), *x.shape)
        stored.setdefault(stack or name, jax.ShapeDtypeStruct(shape, x.dtype))
    return stored


def check_same_result(one: tracing.ModelTrace, other: tracing.ModelTrace) -> None:
    """Raises if a rolled loss returns another result than the user's loss.

    Raises:
      ValueError: structure, shape or dtype of the results differ.
    """
    forms = [_form(trace.result) for trace in (one, other)]
    if forms[0] != forms[1]:
        raise ValueError(f"the loop's loss returns {forms[1]}, but the model's returns {forms[0]}")


def _form(result: Tree) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(result)
    return structure, [(x.shape, x.dtype.name) for x in leaves]


def fit_stacks(tx: optax.GradientTransformation, stacks: Stacks) -> optax.GradientTransformation:
    """Adapts an optimizer to stacked parameters: each row is updated like a separate array."""
    if not stacks:
        return tx
    if isinstance(tx, Optimizer):
        assert tx.with_stacks is not None, "such an optimizer's layers are not rolled"
        return tx.with_stacks(stacks)
    return over_stacks(tx, stacks)


def describe_error(error: Exception) -> str:
    """Formats an exception as one line of a plan."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LENGTH else f"{words[:_LENGTH]} ..."
