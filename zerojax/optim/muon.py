"""Muon, as an in-place update of shards and as `optax.contrib.muon` with the same state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers, MuonState

from pallas_kernels import muon as rules
from pallas_kernels.choice import Impl, choose
from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.optim.ema import Ema, EmaState, around
from zerojax.optim.fused import Numbers, cast_floats, next_count
from zerojax.optim.matrices import as_stack, fans, newton_schulz, on_whole_matrices
from zerojax.optim.methods import check_numbers
from zerojax.optim.muon_parameters import Rule, Uses, muon_dimensions, rule_of
from zerojax.optim.optimizer import Arrays, Optimizer, UpdateContext
from zerojax.optim.parameter_tree import ParameterTree
from zerojax.optim.schedules import Schedule, as_schedule
from zerojax.optim.transforms import clip_by_global_norm

Dimensions = Callable[[Tree], Tree] | None

_PARTS = (MuonState, optax.ScaleByAdamState, optax.ScaleByScheduleState)
"""Optax states that change; the other states of these transformations are empty."""
_LATE = 2**30
"""Number of updates after which the bias correction of a momentum equals 1."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Arguments of `muon`, and four further settings.

    Attributes:
      rule: result of `rule_of` for the argument `dimensions`.
      moments_dtype: dtype of the moments; None uses optax's default, the dtype of the parameters.
      stochastic: whether bfloat16 parameters and moments are rounded stochastically.
      ema: settings of the average of the parameters; None for no average.
    """

    learning_rate: float | Schedule
    adam_learning_rate: float | Schedule
    beta: float
    nesterov: bool
    ns_steps: int
    weight_decay: float
    adam_b1: float
    adam_b2: float
    adam_weight_decay: float
    eps: float
    consistent_rms: float | None
    dimensions: Dimensions
    clip_norm: float | None
    impl: Impl
    ns_eps: float
    bias_correction: bool
    adam_nesterov: bool
    rule: Rule | None = None
    moments_dtype: DTypeLike | None = None
    stochastic: bool = False
    ema: Ema | None = None


@names_keywords()
def muon(
    learning_rate: float | Schedule,
    *,
    adam_learning_rate: float | Schedule | None = None,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_weight_decay: float = 0.0,
    eps: float = 1e-8,
    consistent_rms: float | None = None,
    dimensions: Dimensions = muon_dimensions,
    clip_norm: float | None = None,
    impl: Impl = "auto",
    ns_eps: float | None = None,
    bias_correction: bool = True,
    adam_nesterov: bool | None = None,
) -> Optimizer:
    """Builds Muon (arXiv:2502.16982): orthogonalized updates for matrices, Adam for other
    parameters.

    Defaults and state are those of `optax.contrib.muon`, except for `dimensions`; with clipping the
    state has the form of an `optax.chain`.
    Elements are updated in place on shards. For the matrix products (Newton-Schulz), each matrix is
    gathered on one device in float32: matrices of equal size, from all stacks of layers, are
    distributed over the devices that shard them. Every device computes all replicated matrices. The
    plan's reasons list both groups.

    Args:
      learning_rate: learning rate of matrices.
      adam_learning_rate: learning rate of other parameters; None uses that of matrices.
      beta: decay of the momentum.
      nesterov: whether to use Nesterov momentum.
      ns_steps: number of Newton-Schulz iterations.
      weight_decay: weight decay of matrices per unit of learning rate.
      adam_b1, adam_b2: decay of Adam's moments.
      adam_weight_decay: weight decay of other parameters per unit of learning rate.
      eps: number added to the root of Adam's second moment.
      consistent_rms: None multiplies an orthogonal matrix by sqrt(columns / rows), at least 1. A
        number (0.2 is usual) multiplies it by this number times sqrt(max(rows, columns)), so that
        AdamW's learning rates can be used.
      dimensions: function from the parameters to a tree with an
        `optax.contrib.MuonDimensionNumbers` for each matrix and None elsewhere. None treats every
        2-D array as a matrix. With the default, a plan reads the matrix products in the loss: each
        expert's matrix is a separate matrix, and Adam updates routers. In a model without names
        like those of zerojax's models, a parameter that the loss uses only in matrix products is a
        matrix, except the head.
      clip_norm: maximum of the global gradient norm; None does not clip.
      impl: implementation of the update, as for `zerojax.adamw`.
      ns_eps: number added to norms of matrices; None uses `eps`.
      bias_correction: whether to correct the momentum's bias toward its start at 0, as in optax.
        Muon's author (https://kellerjordan.github.io/posts/muon/) and DeepSpeed do not correct it.
      adam_nesterov: whether Adam uses Nesterov momentum, too; None uses the value of `nesterov`,
        as in optax.

    Raises:
      ValueError, TypeError: a number is out of range.
    """
    ns_eps = eps if ns_eps is None else ns_eps
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    check_numbers(
        learning_rate=learning_rate,
        adam_learning_rate=adam_learning_rate,
        beta=beta,
        ns_steps=ns_steps,
        weight_decay=weight_decay,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_weight_decay=adam_weight_decay,
        eps=eps,
        ns_eps=ns_eps,
        consistent_rms=consistent_rms,
        clip_norm=clip_norm,
    )
    if impl not in get_args(Impl):
        choose(impl, kernel="muon")  # raises an error that lists the valid values
    return _make(
        _Options(
            learning_rate=learning_rate,
            adam_learning_rate=adam_learning_rate,
            beta=beta,
            nesterov=nesterov,
            ns_steps=ns_steps,
            weight_decay=weight_decay,
            adam_b1=adam_b1,
            adam_b2=adam_b2,
            adam_weight_decay=adam_weight_decay,
            eps=eps,
            consistent_rms=consistent_rms,
            dimensions=dimensions,
            clip_norm=clip_norm,
            impl=impl,
            ns_eps=ns_eps,
            bias_correction=bias_correction,
            adam_nesterov=nesterov if adam_nesterov is None else adam_nesterov,
            rule=rule_of(dimensions),
        )
    )


def _make(options: _Options) -> Optimizer:
    plain, dtype = _plain(options), options.moments_dtype

    def init(params: Tree) -> Tree:
        return _cast_moments(plain.init(params), dtype)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        if dtype is None:
            return plain.update(updates, state, params, **extra)
        updates, state, params = (cast_floats(x, jnp.float32) for x in (updates, state, params))
        updates, state = plain.update(updates, state, params, **extra)
        return updates, _cast_moments(state, dtype)

    def apply(
        grads: Arrays, state: Tree, params: Arrays, context: UpdateContext
    ) -> tuple[Arrays, Tree]:
        return _apply(options, (params, grads, state), context)

    def with_dtypes(moments_dtype: DTypeLike, stochastic: bool) -> Optimizer:
        changed = {"moments_dtype": jnp.dtype(moments_dtype), "stochastic": stochastic}
        return _make(dataclasses.replace(options, **changed))

    def with_tree(tree: ParameterTree) -> Optimizer:
        dimensions = tree.choice_by_name(options.dimensions)
        return _make(dataclasses.replace(options, dimensions=dimensions))

    def with_ema(ema: Ema) -> Optimizer:
        return _make(dataclasses.replace(options, ema=ema))

    def with_clip_norm(limit: float | None) -> Optimizer:
        return _make(dataclasses.replace(options, clip_norm=limit))

    return Optimizer(
        *around(init, update, options.ema),
        apply=apply,
        kernel="muon",
        impl=options.impl,
        clip_norm=options.clip_norm,
        with_dtypes=with_dtypes,
        learning_rate=as_schedule(options.learning_rate),
        ema=options.ema,
        with_ema=with_ema,
        with_clip_norm=with_clip_norm,
        with_tree=with_tree,
        with_uses=lambda uses: _with_uses(options, uses),
        matrices=lambda params: {n: dims for n, (dims, _) in _matrices(options, params).items()},
    )


def _with_uses(options: _Options, uses: Uses) -> Optimizer:
    """Returns Muon with matrices chosen by its rule from the uses of parameters in a loss."""
    if options.rule is None:
        return _make(options)
    chosen, stated = options.rule(uses), options.dimensions

    def dimensions(params: Tree) -> Tree:
        if isinstance(params, Mapping):
            return {name: chosen.get(name) for name in params}
        return None if stated is None else stated(params)  # params may be optax's placeholders

    return _make(dataclasses.replace(options, dimensions=dimensions))


def _plain(options: _Options) -> Any:
    """Builds Muon as a plain optax transformation, without an in-place update."""
    core = _as_optax_has_it(options, options.eps, options.nesterov)
    # optax has one setting for both kinds of parameters, and always corrects the bias.
    changed = (options.ns_eps, options.adam_nesterov) != (options.eps, options.nesterov)
    if changed or not options.bias_correction:
        core = _apart(options)
    if options.clip_norm is not None:
        core = optax.chain(clip_by_global_norm(options.clip_norm), core)
    return optax.with_extra_args_support(core)


def _apart(options: _Options) -> optax.GradientTransformation:
    """Combines two Muon transformations of optax with different settings: one for matrices, one for
    other parameters.
    """
    of_matrices = _as_optax_has_it(options, options.ns_eps, options.nesterov)
    of_others = _as_optax_has_it(options, options.eps, options.adam_nesterov)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        # Both transformations compute the same moments, so one state serves both. Only `others`
        # gets the real count, and so returns the state to keep.
        late = state if options.bias_correction else _with_counts(state, lambda _: _LATE)
        moved, _ = of_matrices.update(updates, late, params)
        others, state = of_others.update(updates, state, params)
        pick = lambda dims, matrix, other: other if dims is None else matrix  # noqa: E731
        is_leaf = lambda x: x is None or isinstance(x, MuonDimensionNumbers)  # noqa: E731
        return jax.tree.map(pick, _numbers(options, updates), moved, others, is_leaf=is_leaf), state

    return optax.GradientTransformation(of_others.init, update)


def _with_counts(state: Tree, count_of: Callable[[jax.Array], Any]) -> Tree:
    is_muon = lambda node: isinstance(node, MuonState)  # noqa: E731
    count = lambda x: x._replace(count=count_of(x.count)) if is_muon(x) else x  # noqa: E731
    return jax.tree.map(count, state, is_leaf=is_muon)


def _numbers(options: _Options, params: Tree) -> Tree:
    """Builds a tree with `MuonDimensionNumbers` for matrices and None for other parameters."""
    if options.dimensions is not None:
        return options.dimensions(params)
    return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params)


def _as_optax_has_it(options: _Options, eps: float, nesterov: bool) -> optax.GradientTransformation:
    return optax.contrib.muon(
        options.learning_rate,
        ns_steps=options.ns_steps,
        beta=options.beta,
        eps=eps,
        weight_decay=options.weight_decay,
        nesterov=nesterov,
        adam_b1=options.adam_b1,
        adam_b2=options.adam_b2,
        adam_weight_decay=options.adam_weight_decay,
        adam_learning_rate=options.adam_learning_rate,
        muon_weight_dimension_numbers=options.dimensions,
        consistent_rms=options.consistent_rms,
    )


def _cast_moments(state: Tree, dtype: Any) -> Tree:
    if dtype is None:
        return state

    def cast(part: Tree) -> Any:
        names = [name for name in ("mu", "nu") if name in getattr(part, "_fields", ())]
        return part._replace(**{name: cast_floats(getattr(part, name), dtype) for name in names})

    return jax.tree.map(lambda x: cast(x) if _is_part(x) else x, state, is_leaf=_is_part)


def _is_part(node: object) -> bool:
    return isinstance(node, _PARTS)


# The fused update


def _apply(
    options: _Options, arrays: tuple[Arrays, Arrays, Tree], context: UpdateContext
) -> tuple[Arrays, Tree]:
    params, grads, state = arrays
    average, rate = None, None
    if options.ema is not None:
        average, rate, state = state, options.ema.rate(state.count), state.inner
    parts: list[Any] = [x for x in jax.tree.leaves(state, is_leaf=_is_part) if _is_part(x)]
    (of_matrices,) = (part for part in parts if isinstance(part, MuonState))
    (of_others,) = (part for part in parts if isinstance(part, optax.ScaleByAdamState))
    kinds = _matrices(options, context.whole(params))
    matrices = {n: x for n, x in params.items() if n in kinds}
    others = {n: x for n, x in params.items() if n not in kinds}
    numbers = Numbers(scalars={}, stochastic=options.stochastic, context=context, average_rate=rate)
    own = lambda names: () if average is None else ({n: average.ema[n] for n in names},)  # noqa: E731
    new, momentum, moments, averages = {}, {}, ({}, {}), {}
    if matrices:
        given = (matrices, grads, of_matrices, own(matrices))
        new, momentum, *moved = _update_matrices(options, given, kinds, numbers)
        averages = {name: x for each in moved for name, x in each.items()}
    if others:
        # Matrices and other parameters have the same number of applied updates.
        state_of_others = of_others._replace(count=of_matrices.count)
        given = (others, grads, state_of_others, own(others))
        changed, *moved = _update_others(options, given, numbers)
        moments, new = moved[:2], new | changed
        averages |= {name: x for each in moved[2:] for name, x in each.items()}
    # Parts are told apart by identity, since arrays cannot be compared while they are traced.
    changes = {
        id(of_matrices): {"mu": momentum},
        id(of_others): {"mu": moments[0], "nu": moments[1]},
    }

    def advance(part: Tree) -> Any:
        if not _is_part(part):
            return part
        changed: dict[str, Any] = {
            # A field also has placeholders of the parameters that the other part updates.
            field: {**getattr(part, field), **moved}
            for field, moved in changes.get(id(part), {}).items()
        }
        return part._replace(count=next_count(part.count, context), **changed)

    advanced = jax.tree.map(advance, state, is_leaf=_is_part)
    if average is not None:
        moved = {name: averages[name] for name in average.ema}
        advanced = EmaState(advanced, next_count(average.count, context), moved)
    return {name: new[name] for name in params}, advanced


def _matrices(
    options: _Options, whole: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, tuple[MuonDimensionNumbers, float]]:
    """Returns {name of a matrix: (dimensions, factor of the orthogonal matrix)}."""
    kinds = {}
    for name, dims in _numbers(options, dict(whole)).items():
        if dims is None:
            continue
        rows, columns = fans(whole[name].shape, dims)
        scale = math.sqrt(max(1.0, columns / rows))
        if options.consistent_rms is not None:
            scale = math.sqrt(max(rows, columns)) * options.consistent_rms
        kinds[name] = dims, scale
    return kinds


def _update_matrices(
    options: _Options,
    arrays: tuple[Arrays, Arrays, Any, tuple[Arrays, ...]],
    kinds: Mapping[str, tuple[MuonDimensionNumbers, float]],
    numbers: Numbers,
) -> tuple[Arrays, ...]:
    """Updates the matrices; returns (matrices, momentum, and the average if there is one).

    Args:
      arrays: (matrices, gradients, state of their momentum, () or a tuple with their average).
      kinds: {name: (dimensions, factor of the orthogonal matrix)}.
      numbers: context of the update, without scalars.
    """
    params, grads, state, averages = arrays
    context = numbers.context
    rate = jnp.asarray(as_schedule(options.learning_rate)(state.count), jnp.float32)
    step = {"gradient_scale": context.gradient_scale, "skip": context.skip}
    count = optax.safe_increment(state.count) if options.bias_correction else _LATE
    average = rules.momentum_scalars(options.beta, count=count, nesterov=options.nesterov, **step)
    numbers = dataclasses.replace(numbers, scalars=dict.fromkeys(params, average))
    momentum = {name: state.mu[name] for name in params}
    own = {name: grads[name] for name in params}
    # The look-ahead is an output of its own in float32: the stored momentum may be bfloat16, and
    # with Nesterov momentum it is not the direction.
    ahead = numbers.update(rules.MUON_MOMENTUM, (momentum,), (own,), out_dtypes=(jnp.float32,))
    skip = jnp.asarray(context.skip, jnp.float32)
    by_scale = {
        scale: rules.DescentScalars(
            rate,
            matrix_scale=jnp.float32(scale),
            weight_decay=jnp.float32(options.weight_decay),
            skip=skip,
        )
        for scale in {scale for _, scale in kinds.values()}
    }

    stacks = {
        name: as_stack(x.shape, context.dims.get(name, ((),) * x.ndim), kinds[name][0])
        for name, x in sorted(ahead.outputs[0].items())
    }
    directions = on_whole_matrices(
        lambda x: newton_schulz(x, state.ns_coeffs, steps=options.ns_steps, eps=options.ns_eps),
        ahead.outputs[0],
        stacks,
    )
    descent = dataclasses.replace(
        numbers, scalars={name: by_scale[kinds[name][1]] for name in params}
    )
    # With another salt the random bits differ from those that rounded the momentum.
    new = descent.update_params(
        rules.MUON_DESCENT, params, averages, (directions,), salt=0x5BD1E995
    )
    return new[0], ahead.updated[0], *new[1:]


def _update_others(
    options: _Options,
    arrays: tuple[Arrays, Arrays, Any, tuple[Arrays, ...]],
    numbers: Numbers,
) -> tuple[Arrays, ...]:
    """Updates all parameters that are not matrices with Adam.

    Args:
      arrays: (parameters, gradients, Adam's state, () or a tuple with the parameters' average).
      numbers: context of the update, without scalars.

    Returns:
      (parameters, first moments, second moments, and the average if there is one).
    """
    params, grads, state, averages = arrays
    context = numbers.context
    rate = as_schedule(options.adam_learning_rate)(state.count)
    scalars = rules.nesterov_adam_scalars(
        rate,
        count=optax.safe_increment(state.count),
        nesterov=options.adam_nesterov,
        b1=options.adam_b1,
        b2=options.adam_b2,
        eps=options.eps,
        weight_decay=options.adam_weight_decay,
        gradient_scale=context.gradient_scale,
        skip=context.skip,
    )
    numbers = dataclasses.replace(numbers, scalars=dict.fromkeys(params, scalars))
    pick = lambda tree: {name: tree[name] for name in params}  # noqa: E731
    moments = pick(state.mu), pick(state.nu), *averages
    return numbers.update_params(rules.NESTEROV_ADAM, params, moments, (pick(grads),))
