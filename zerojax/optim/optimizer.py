"""Optimizer of zerojax: an optax transformation with an in-place update on shards.

Also converts the optimizer's state between the form used in training and optax's form in
checkpoints, and maps functions over the arrays that belong to each parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from pallas_kernels.choice import Choice, Impl
from pallas_kernels.rounding import seed_of
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.optim.ema import Ema, EmaState, new_ema_state
from zerojax.optim.parameter_tree import ParameterTree
from zerojax.optim.schedules import Schedule

Arrays = dict[str, jax.Array]
Sums = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class StateCoding:
    """Conversion between the two forms of an optimizer's state.

    The portable form is optax's; its arrays depend neither on the mesh nor on how parameters are
    sharded. Checkpoints and transfers between meshes use it.

    Attributes:
      portable_init: function (parameters) that returns the portable state before the first update,
        for `jax.eval_shape` and `optax.tree.map_params`.
      abstract_state: function ({name: `ShapeDtypeStruct` of the stored parameter with its
        `NamedSharding`}, {name: number of elements without padding}) that returns the state used in
        training, as `ShapeDtypeStruct`s with `NamedSharding`s.
      new_state: traceable function (result of `abstract_state`, parameters) that returns the state
        before the first update.
      to_portable_state: function (state) that returns the portable state of the same shards; called
        inside `shard_map`.
      from_portable_state: function (portable state, tree of `plan.abstract_state`) that returns the
        state of the same shards; called inside `shard_map`. It inverts `to_portable_state` exactly,
        bit for bit.
    """

    portable_init: Callable[[Tree], Tree]
    abstract_state: Callable[[Mapping[str, Any], Mapping[str, int]], Tree]
    new_state: Callable[[Tree, Tree], Tree]
    to_portable_state: Callable[[Tree], Tree]
    from_portable_state: Callable[[Tree, Tree], Tree]


def coding_around(coding: StateCoding, ema: Ema | None) -> StateCoding:
    """Extends a coding to a state with an average (EMA), which is the same in both forms."""
    if ema is None:
        return coding

    def portable_init(params: Tree) -> Tree:
        return new_ema_state(coding.portable_init(params), params)

    def abstract_state(stored: Mapping[str, Any], sizes: Mapping[str, int]) -> Tree:
        mesh = next(iter(stored.values())).sharding.mesh
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
        average = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)  # noqa: E731
        averages = {name: average(x) for name, x in stored.items()}
        return EmaState(coding.abstract_state(stored, sizes), count, averages)

    def new_state(structs: Tree, params: Tree) -> Tree:
        return new_ema_state(coding.new_state(structs.inner, params), params)

    def to_portable_state(state: Tree) -> Tree:
        return dataclasses.replace(state, inner=coding.to_portable_state(state.inner))

    def from_portable_state(portable: Tree, structs: Tree) -> Tree:
        inner = coding.from_portable_state(portable.inner, structs.inner)
        return dataclasses.replace(portable, inner=inner)

    return StateCoding(
        portable_init=portable_init,
        abstract_state=abstract_state,
        new_state=new_state,
        to_portable_state=to_portable_state,
        from_portable_state=from_portable_state,
    )


@dataclass(frozen=True, kw_only=True)
class UpdateContext:
    """Inputs of an optimizer's update besides gradients, state and parameters.

    Attributes:
      gradient_scale: float32 []; factor of the gradients: loss weight, loss scale and clipping in
        one number.
      skip: bool []; True leaves parameters and state unchanged, whatever the gradients contain.
      key: typed PRNG key of this step, the same on every device.
      axes: {name: mesh axes of more than one device that split the parameter}; a norm over a whole
        parameter is summed over them.
      choice: implementation to run, with the reason.
      shapes: {name: shape of the whole parameter}, for weight-decay masks that read shapes; {} if
        no parameter is split.
      piece: int32 []; index of the slice of a shard, if the shard is updated in slices.
      layers: {name: mesh axes, among its `axes`, that split dimension 0} for parameters whose
        dimension 0 counts layers; LAMB has a trust ratio per layer.
      dims: {name: for each dimension, the mesh axes, among its `axes`, that split it} for
        parameters that are split; Muon needs it to gather matrices.
      all_params: {name: shape and dtype of the whole parameter} for all parameters, if the update
        covers only some of them; masks and groups see all. {} if the update covers all.
      numbers: numbers that the program takes as inputs; None: they are constants of the program.
    """

    gradient_scale: jax.Array
    skip: jax.Array
    key: jax.Array
    axes: Mapping[str, tuple[str, ...]]
    choice: Choice
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    piece: jax.Array | None = None
    layers: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    dims: Mapping[str, tuple[tuple[str, ...], ...]] = dataclasses.field(default_factory=dict)
    all_params: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    numbers: StepNumbers | None = None

    def seed(self, name: str) -> jax.Array:
        """Returns random bits for a parameter's shard, uint32 [2]; replicas of a shard get equal
        bits."""
        key = jax.random.fold_in(self.key, sorted(self.axes).index(name))
        if self.piece is not None:
            key = jax.random.fold_in(key, self.piece)
        for axis in self.axes[name]:
            key = jax.random.fold_in(key, lax.axis_index(axis))
        return seed_of(key)

    def seeds(self, names: Sequence[str]) -> jax.Array:
        """Returns `seed` of each name, uint32 [names, 2]; the number of operations does not grow
        with the number of names."""
        number_of = {name: number for number, name in enumerate(sorted(self.axes))}
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            groups.setdefault(tuple(self.axes[name]), []).append(name)
        fold_each = jax.vmap(jax.random.fold_in, (None, 0))
        fold_all = jax.vmap(jax.random.fold_in, (0, None))
        parts = []
        # The folds have the order of `seed`, so that both give the same bits.
        for axes, group in groups.items():
            keys = fold_each(self.key, jnp.array([number_of[name] for name in group]))
            for number in () if self.piece is None else (self.piece,):
                keys = fold_all(keys, number)
            for axis in axes:
                keys = fold_all(keys, lax.axis_index(axis))
            parts.append(jax.vmap(seed_of)(keys))
        place = {
            name: row for row, name in enumerate(n for group in groups.values() for n in group)
        }
        # Groups have changed the order; the rows must have that of `names`.
        return jnp.concatenate(parts)[jnp.array([place[name] for name in names])]

    def whole(self, params: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns {name: shape and dtype of the whole parameter}, without arrays."""
        if self.all_params:
            return dict(self.all_params)
        return {
            name: jax.ShapeDtypeStruct(self.shapes.get(name, shard.shape), shard.dtype)
            for name, shard in params.items()
        }

    def sum_over(self, axes: tuple[str, ...], values: Sums) -> Sums:
        """Sums arrays over mesh axes, in one collective.

        Needs at least two arrays: see `zerojax.passes.update.build_norm` for the problem with a
        single one.
        """
        return lax.psum(values, axes) if axes else values


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Numbers of one update that a program takes as inputs, so that other hyperparameters run in
    the same program.

    Attributes:
      scalars: for each different settings of parameters, in the order of the parameters' names, the
        scalars of the update rule, float32 [] each; `gradient_scale` and `skip` are not used.
      clip_norm: float32 []; maximum of the global gradient norm; None does not clip.
    """

    scalars: tuple[Any, ...]
    clip_norm: jax.Array | None


jax.tree_util.register_dataclass(StepNumbers, ["scalars", "clip_norm"], [])

Apply = Callable[[Arrays, Tree, Arrays, UpdateContext], tuple[Arrays, Tree]]


@dataclass(frozen=True, kw_only=True)
class BegunUpdate:
    """Update whose scalars are computed; arrays are passed later, whole or in slices.

    Attributes:
      moments: for each moment, its entries in the state {name: value}, in the order of the rule.
      run: function (parameters, moments, gradients, piece) that returns (parameters, moments). Each
        argument, and each moment, is {name: array} of some parameters; `piece` is the index of the
        slice, or None.
      end: function (moments of all parameters) that returns the state after this step.
    """

    moments: tuple[dict[str, Any], ...]
    run: Callable[..., tuple[Arrays, tuple[Arrays, ...]]]
    end: Callable[[tuple[dict[str, Any], ...]], Tree]


Begin = Callable[[Tree, Mapping[str, jax.ShapeDtypeStruct], UpdateContext], BegunUpdate]


class Optimizer(optax.GradientTransformationExtraArgs):
    """Optax transformation that can also update shards in place.

    `init` and `update` follow optax's interface, with optax's states, so it works in `optax.chain`.
    The step calls `apply` instead, which writes parameters and moments once, without a tree of
    updates. Both give equal results up to float32 rounding.

    Attributes:
      apply: function (gradients, state, parameters, context) that returns (parameters, state),
        called inside `shard_map` over the whole mesh. Arrays are {name: this device's shard}.
        Gradients are not scaled yet; `context.gradient_scale` includes the clipping.
      kernel: name of its kernel, for `pallas_kernels.choice.choose`.
      impl: requested implementation: "auto", "xla", "mosaic_gpu" or "interpret".
      clip_norm: maximum of the global gradient norm; None does not clip.
      with_dtypes: function (moments dtype, whether to round stochastically) that returns the same
        optimizer with these moments. By default moments are as in optax: in the parameters' dtype,
        rounded to nearest.
      coding: conversion between the state and its stored form; None if both are the same.
      learning_rate: schedule over updates applied, for reports; None if unknown.
      begin: function (state, {name: shape and dtype of the whole parameter}, context) that returns
        a `BegunUpdate`, for shards that are updated in slices; None if an element's update depends
        on other elements. The state may hold any object in place of a moment.
      moments: optax's names of the moments in the state, in the order of the rule; () if `begin` is
        None.
      per_layer: whether layers that are stacked in one array are updated as separate arrays.
      with_stacks: function ({stack: names of its rows}) that returns the same optimizer for
        parameters that include these stacks; None if its state depends on how arrays are stacked.
      with_tree: function (`ParameterTree`) that returns the same optimizer for parameters by name.
        Its mask, and other arguments that are functions of the parameters, see the user's tree.
      with_uses: function ({trained parameter: `matrix_uses.ParameterUse`}) that returns the same
        optimizer with matrices chosen by the products of a traced loss; None if it has none.
      settings: function (parameters) that returns {name: settings of the parameter}; None if
        unknown.
      matrices: function ({name: shape and dtype of the whole parameter}) that returns {name: its
        dimensions} of parameters that the update needs as whole matrices
        (`zerojax.optim.matrices`); None if it needs none.
      ema: settings of the average of the parameters in the state; None without an average.
      with_ema: function (`Ema`) that returns the same optimizer with an average; its state is an
        `EmaState` around the optimizer's state.
      with_clip_norm: function (maximum) that returns the same optimizer with this `clip_norm`.
      numbers: function (number of updates applied, int32 []; {name: shape and dtype of the whole
        parameter}) that returns the `StepNumbers` of the next update; None if its numbers are
        always constants of the program.
      one_bit: `zerojax.optim.one_bit.OneBit`, which sends signs of momentum instead of gradients;
        None if gradients are summed.
    """

    apply: Apply
    kernel: str
    impl: Impl
    clip_norm: float | None
    with_dtypes: Callable[[Any, bool], Optimizer]
    coding: StateCoding | None
    learning_rate: Schedule | None
    begin: Begin | None
    moments: tuple[str, ...]
    per_layer: bool
    with_stacks: Callable[[Mapping[str, tuple[str, ...]]], Optimizer] | None
    with_tree: Callable[[ParameterTree], Optimizer]
    with_uses: Callable[[Mapping[str, Any]], Optimizer] | None
    settings: Callable[[Tree], Mapping[str, Any]] | None
    matrices: Callable[[Mapping[str, Any]], Mapping[str, MuonDimensionNumbers]] | None
    ema: Ema | None
    with_ema: Callable[[Ema], Optimizer]
    with_clip_norm: Callable[[float | None], Optimizer]
    numbers: Callable[[jax.Array, Mapping[str, jax.ShapeDtypeStruct]], StepNumbers] | None
    one_bit: Any

    def __new__(
        cls,
        init: Callable[..., Tree],
        update: Callable[..., tuple[Tree, Tree]],
        *,
        apply: Apply,
        kernel: str,
        impl: Impl,
        clip_norm: float | None,
        with_dtypes: Callable[[Any, bool], Optimizer],
        with_ema: Callable[[Ema], Optimizer],
        with_clip_norm: Callable[[float | None], Optimizer],
        with_tree: Callable[[ParameterTree], Optimizer],
        ema: Ema | None = None,
        coding: StateCoding | None = None,
        learning_rate: Schedule | None = None,
        begin: Begin | None = None,
        moments: tuple[str, ...] = (),
        per_layer: bool = False,
        with_stacks: Callable[[Mapping[str, tuple[str, ...]]], Optimizer] | None = None,
        with_uses: Callable[[Mapping[str, Any]], Optimizer] | None = None,
        settings: Callable[[Tree], Mapping[str, Any]] | None = None,
        matrices: Callable[[Mapping[str, Any]], Mapping[str, MuonDimensionNumbers]] | None = None,
        numbers: Callable[[Any, Mapping[str, Any]], StepNumbers] | None = None,
        one_bit: Any = None,
    ) -> Optimizer:
        self = super().__new__(cls, init, update)
        self.apply, self.kernel, self.impl, self.clip_norm = apply, kernel, impl, clip_norm
        self.with_dtypes, self.learning_rate = with_dtypes, learning_rate
        self.coding, self.begin, self.moments = coding, begin, moments
        self.per_layer, self.with_stacks, self.settings = per_layer, with_stacks, settings
        self.matrices, self.ema, self.with_ema, self.one_bit = matrices, ema, with_ema, one_bit
        self.with_tree, self.with_clip_norm = with_tree, with_clip_norm
        self.with_uses, self.numbers = with_uses, numbers
        return self


def coding_of(tx: optax.GradientTransformation) -> StateCoding | None:
    """Returns the coding of an optimizer's state; None if training and checkpoints use one form."""
    return tx.coding if isinstance(tx, Optimizer) else None


def map_state(
    tx: optax.GradientTransformation,
    function: Callable[[Any, Any], Any],
    state: Tree,
    of_params: Mapping[str, Any],
    *,
    others: Callable[[Any], Any] = lambda _: "",
) -> Tree:
    """Maps a function over the state's arrays that belong to a parameter, with a value of the
    parameter.

    A part of an optimizer has no array for parameters that another part updates.

    Args:
      tx: optimizer.
      function: function (array, value in `of_params`) that returns the new array.
      state: state in its portable form, or a tree of the same structure.
      of_params: {name of a parameter: any value}.
      others: function applied to the arrays that belong to no parameter; by default "" takes their
        place.
    """
    coding = coding_of(tx)
    init = tx.init if coding is None else coding.portable_init
    try:
        return optax.tree_utils.tree_map_params(
            init,
            lambda leaf, of_param: leaf if _is_masked(leaf) else function(leaf, of_param),
            state,
            dict(of_params),
            transform_non_params=others,
            is_leaf=_is_masked,
        )
    except Exception:
        # optax calls `init` with placeholders; an `init` that reads their shapes fails (such as
        # `optax.sm3`). In its state, dicts with names of parameters are searched instead.
        return _map_by_names(function, state, of_params, others)


def _map_by_names(
    function: Callable[[Any, Any], Any],
    state: Tree,
    of_params: Mapping[str, Any],
    others: Callable[[Any], Any],
) -> Tree:
    def is_named(node: object) -> bool:
        return isinstance(node, dict) and bool(node) and node.keys() <= of_params.keys()

    def of_node(node: Tree) -> Any:
        if not is_named(node):
            return others(node)
        return {
            name: jax.tree.map(lambda leaf, name=name: function(leaf, of_params[name]), part)
            for name, part in node.items()
        }

    return jax.tree.map(of_node, state, is_leaf=is_named)


def _is_masked(leaf: object) -> bool:
    return isinstance(leaf, optax.MaskedNode)
