"""Builds optimizers that are both an optax transformation and a fused in-place update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.choice import Impl
from pallas_kernels.elementwise import Rule, Updated, averaging, averaging_scalars
from pallas_kernels.update import update, update_trees
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.optim.ema import EMA, Ema, EmaState, around
from zerojax.optim.groups import Decay, LeafSettings
from zerojax.optim.optimizer import Arrays, BegunUpdate, Optimizer, StepNumbers, UpdateContext
from zerojax.optim.parameter_tree import ParameterTree
from zerojax.optim.schedules import Schedule, as_schedule
from zerojax.optim.transforms import clip_by_global_norm

_PARTS = (
    optax.ScaleByAdamState,
    optax.ScaleByLionState,
    optax.TraceState,
    optax.ScaleByScheduleState,
)
"""Optax states that hold arrays; the other states of these optimizers are empty."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Scalars and context of one update step.

    Attributes:
      scalars: {name of a parameter: scalars of the update rule}.
      stochastic: whether bfloat16 arrays are rounded stochastically.
      context: context of the step.
      average_rate: float32 []; 1 - decay of the average (EMA) of the parameters; None without an
        average.
    """

    scalars: Mapping[str, Any]
    stochastic: bool
    context: UpdateContext
    average_rate: jax.Array | None = None

    def update_params(
        self,
        rule: Rule,
        params: Arrays,
        others: tuple[Arrays, ...],
        read: tuple[Arrays, ...],
        **more: Any,
    ) -> tuple[Arrays, ...]:
        """Updates parameters and `others` in one pass of an update rule; returns the new
        (parameters, *others).

        Args:
          rule: the update rule.
          params: {name: array}.
          others: moments, then the average (EMA) if there is one, as dicts like `params`.
          read: arrays that are only read, such as gradients, as dicts like `params`.
          **more: further arguments of `update`.
        """
        if self.average_rate is None:
            return self.update(rule, (params, *others), read, **more).updated
        rule = averaging(rule)
        numbers = dataclasses.replace(self, scalars=self.with_rate(self.scalars))
        return numbers.update(rule, (params, *others), read, **more).updated

    def with_rate(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Adds `average_rate` to scalars, for an `averaging` rule; equal objects stay one
        object."""
        rate = self.average_rate
        made = {id(one): averaging_scalars(type(one))(*one, rate) for one in scalars.values()}
        return {name: made[id(one)] for name, one in scalars.items()}

    def update(
        self,
        rule: Rule,
        updated: tuple[Arrays, ...],
        read: tuple[Arrays, ...],
        *,
        salt: int = 0,
        by_row: Container[str] = (),
        out_dtypes: Sequence[Any] = (),
    ) -> Any:
        """Runs one pass of an update rule over all parameters; returns an `Updated` of {name:
        array}.

        Passes that round stochastically need different values of `salt`. `by_row` names the
        parameters with separate scalars and sums for each row. `out_dtypes` are the dtypes of the
        requested outputs.
        """
        names = sorted(self.scalars)
        is_piece = self.context.piece is not None and self.context.choice.implementation != "xla"
        rounded = [name for name in names if self._rounds(updated, name)]
        seeds = self.context.seeds(rounded) ^ jnp.uint32(salt) if rounded else None
        seed_of = {} if seeds is None else dict(zip(rounded, seeds, strict=True))

        def leaf(arrays: Sequence[Any], also_read: Sequence[Any], name: str) -> Updated:
            if is_piece:
                # A kernel reads memory by its address. Without a barrier XLA 0.12 passes a slice
                # that is still in host memory to the kernel, and then rejects the resulting
                # program.
                arrays, also_read = lax.optimization_barrier((arrays, also_read))
            return update(
                rule,
                arrays,
                also_read,
                scalars=self.scalars[name],
                seed=seed_of.get(name),
                impl=self.context.choice,
                by_row=name in by_row,
                out_dtypes=out_dtypes,
            )

        return update_trees(leaf, updated, read, {name: name for name in self.scalars})

    def _rounds(self, updated: tuple[Arrays, ...], name: str) -> bool:
        """Returns whether the updated values of a parameter are rounded stochastically."""
        return self.stochastic and any(tree[name].dtype == jnp.bfloat16 for tree in updated)


Run = Callable[[Arrays, tuple[Arrays, ...], Arrays, Numbers], tuple[Arrays, tuple[Arrays, ...]]]
"""Function (parameters, moments, gradients, numbers) that returns (parameters, moments).

If `numbers` has an `average_rate`, the average of the parameters comes after the moments.
"""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Definition of an optimizer, as parts of optax and as an equivalent fused update rule.

    Attributes:
      kernel: name of the kernel.
      chain: function (decay, learning rate) that builds the optax transformation from these two
        transformations.
      moments: fields of optax's state that hold moments, in the order of the update rule.
      scalars: function (learning_rate, weight_decay=, count=, gradient_scale=, skip=) that returns
        the scalars of the update rule; `count` includes the update, so it is 1 at the first.
      run: function that updates all parameters.
      elementwise: whether each element is updated independently, so that a shard may be updated in
        slices.
      per_layer: whether layers stacked in one array are updated as separate arrays.
      one_bit: function (this method, options) that returns the `OneBit` of an optimizer with 1-bit
        communication, see `zerojax.optim.one_bit`; None for all other optimizers.
    """

    kernel: str
    chain: Callable[[Any, Any], optax.GradientTransformation]
    moments: tuple[str, ...]
    scalars: Callable[..., Any]
    run: Run
    elementwise: bool = True
    per_layer: bool = False
    one_bit: Callable[[Method, Options], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that all optimizers share.

    Attributes:
      learning_rate: a number or a schedule.
      decay: weight decay and parameter groups.
      clip_norm: maximum of the global gradient norm; None does not clip.
      impl: requested implementation, see `pallas_kernels.choice.choose`.
      moments_dtype: dtype of the moments; None uses optax's default, the dtype of the parameters.
      stochastic: whether `apply` rounds bfloat16 parameters and moments stochastically.
      ema: settings of the average of the parameters, stored in an `EmaState`; None for no average.
    """

    learning_rate: float | Schedule
    decay: Decay
    clip_norm: float | None
    impl: Impl
    moments_dtype: DTypeLike | None = None
    stochastic: bool = False
    ema: Ema | None = None


def make_optimizer(method: Method, options: Options) -> Optimizer:
    """Builds an optimizer from its definition (method) and options."""
    core, dtype, ema = _transformation(method, options), options.moments_dtype, options.ema

    def init(params: Tree) -> Tree:
        options.decay.settings(params)  # raises if the mask or a group does not fit the parameters
        state = core.init(params)
        return state if dtype is None else cast_floats(state, dtype)

    def apart(layers: Iterable[str]) -> list[str]:
        # To the user, rolled layers (stacked for a loop) are separate arrays, so the update treats
        # them separately even without per_layer.
        return [name for name in layers if method.per_layer or name in options.decay.stacks]

    def update(
        updates: Tree, state: Tree, params: Tree = None, *, layers: Iterable[str] = (), **extra: Any
    ) -> tuple[Tree, Tree]:
        if method.one_bit is not None:
            raise ValueError(
                "this optimizer uses 1-bit communication, so it has no update outside of a "
                "training step: each device computes momentum from its own gradients; pass it to "
                "zerojax.train by itself, not in an optax chain"
            )
        extra["layers"] = apart(layers)
        if dtype is None:
            return core.update(updates, state, params, **extra)
        updates, state, params = (cast_floats(x, jnp.float32) for x in (updates, state, params))
        updates, state = core.update(updates, state, params, **extra)
        return updates, cast_floats(state, dtype)

    def apply(
        grads: Arrays, state: Tree, params: Arrays, context: UpdateContext
    ) -> tuple[Arrays, Tree]:
        layers = {name: context.layers[name] for name in apart(context.layers)}
        context = dataclasses.replace(context, layers=layers)
        return _apply(method, options, (params, grads, state), context)

    def with_dtypes(moments_dtype: DTypeLike, stochastic: bool) -> Optimizer:
        changed = {"moments_dtype": jnp.dtype(moments_dtype), "stochastic": stochastic}
        return make_optimizer(method, dataclasses.replace(options, **changed))

    def with_stacks(stacks: Mapping[str, tuple[str, ...]]) -> Optimizer:
        decay = dataclasses.replace(options.decay, stacks=dict(stacks))
        return make_optimizer(method, dataclasses.replace(options, decay=decay))

    def with_tree(tree: ParameterTree) -> Optimizer:
        mask = tree.choice_by_name(options.decay.mask)
        decay = dataclasses.replace(options.decay, mask=mask)
        return make_optimizer(method, dataclasses.replace(options, decay=decay))

    def with_ema(ema: Ema) -> Optimizer:
        return make_optimizer(method, dataclasses.replace(options, ema=ema))

    def with_clip_norm(limit: float | None) -> Optimizer:
        return make_optimizer(method, dataclasses.replace(options, clip_norm=limit))

    moments = method.moments if ema is None else (*method.moments, EMA)

    return Optimizer(
        *around(init, update, ema),
        apply=apply,
        kernel=method.kernel,
        impl=options.impl,
        clip_norm=options.clip_norm,
        with_dtypes=with_dtypes,
        learning_rate=as_schedule(options.learning_rate),
        begin=functools.partial(begin_update, method, options) if method.elementwise else None,
        moments=moments if method.elementwise else (),
        per_layer=method.per_layer,
        with_stacks=with_stacks,
        settings=options.decay.settings,
        ema=ema,
        with_ema=with_ema,
        with_clip_norm=with_clip_norm,
        with_tree=with_tree,
        numbers=functools.partial(_step_numbers, method, options),
        one_bit=None if method.one_bit is None else method.one_bit(method, options),
    )


def cast_floats(tree: Tree, dtype: DTypeLike) -> Tree:
    """Casts the floating-point arrays of a tree to another dtype."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


# The optax transformation


def _transformation(method: Method, options: Options) -> Any:
    rate = optax.scale_by_learning_rate(options.learning_rate)
    decay = optax.add_decayed_weights(options.decay.weight_decay, options.decay.stored_mask)
    if options.decay.groups:
        rate, decay = _factors_after(rate, options.decay), _grouped_decay(decay, options.decay)
    core = method.chain(decay, rate)
    if options.clip_norm is not None:
        core = optax.chain(clip_by_global_norm(options.clip_norm), core)
    return optax.with_extra_args_support(core)


def _grouped_decay(
    plain: optax.GradientTransformation, decay: Decay
) -> optax.GradientTransformation:
    """Builds a weight decay with a value for each parameter; the state's form is that of
    `plain`."""

    def add(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError("groups need the parameters: call update(gradients, state, params)")
        own = _spread(params, {n: s.weight_decay for n, s in decay.settings(params).items()})
        return jax.tree.map(decayed, updates, params, own), state

    def decayed(g: jax.Array, p: jax.Array, d: jax.Array | float) -> jax.Array:
        return g if isinstance(d, int | float) and d == 0 else g + d * p  # d may be traced

    return optax.GradientTransformation(plain.init, add)


def _factors_after(
    rate: optax.GradientTransformation, decay: Decay
) -> optax.GradientTransformation:
    """Builds a transformation that scales updates by `rate`, then by each parameter's factor."""

    def scale(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        settings = decay.settings(updates)
        factors = _spread(updates, {n: s.learning_rate_factor for n, s in settings.items()})
        updates, state = rate.update(updates, state, params)
        return jax.tree.map(lambda u, factor: u * factor, updates, factors), state

    return optax.GradientTransformation(rate.init, scale)


def _spread(like: Tree, by_name: Mapping[str, Any]) -> Tree:
    # Settings have the order of the leaves.
    return jax.tree.unflatten(jax.tree.structure(like), list(by_name.values()))


# The fused update


def _apply(
    method: Method, options: Options, arrays: tuple[Arrays, Arrays, Tree], context: UpdateContext
) -> tuple[Arrays, Tree]:
    params, grads, state = arrays
    begun = begin_update(method, options, state, context.whole(params), context)
    params, after = begun.run(params, begun.moments, grads, None)
    return params, begun.end(after)


def begin_update(
    method: Method,
    options: Options,
    state: Tree,
    whole: Mapping[str, jax.ShapeDtypeStruct],
    context: UpdateContext,
) -> BegunUpdate:
    """Implements `Optimizer.begin` for any method, including methods that are not elementwise."""
    average, average_rate = None, None
    if options.ema is not None:
        average, average_rate, state = state, options.ema.rate(state.count), state.inner
    parts = jax.tree.leaves(state, is_leaf=_is_part)
    # A state has at most one schedule, and one part with moments.
    schedule = next((p for p in parts if isinstance(p, optax.ScaleByScheduleState)), None)
    moments = next((p for p in parts if p is not schedule), None)
    rate = as_schedule(options.learning_rate)(schedule.count if schedule else 0)
    rate = jnp.asarray(rate, jnp.float32)
    counted = moments is not None and "count" in moments._fields
    settings = options.decay.settings(dict(whole))

    def scalars_of(leaf: LeafSettings) -> Any:
        return method.scalars(
            rate * leaf.learning_rate_factor,
            weight_decay=leaf.weight_decay,
            count=optax.safe_increment(moments.count) if counted else None,
            gradient_scale=context.gradient_scale,
            skip=context.skip,
        )

    if context.numbers is None:
        # One set of scalars for all parameters with equal settings.
        by_settings = {leaf: scalars_of(leaf) for leaf in dict.fromkeys(settings.values())}
    else:
        # The given scalars are inputs of the program, but these two depend on this step's
        # gradients.
        now = {"gradient_scale": context.gradient_scale, "skip": context.skip}
        now = {name: jnp.asarray(value, jnp.float32) for name, value in now.items()}
        given = zip(_different(settings), context.numbers.scalars, strict=True)
        by_settings = {leaf: scalars._replace(**now) for leaf, scalars in given}

    def run(
        params: Arrays, before: tuple[Arrays, ...], grads: Arrays, piece: jax.Array | None
    ) -> tuple[Arrays, tuple[Arrays, ...]]:
        if not params:  # happens if all parameters are updated in slices
            return params, before
        numbers = Numbers(
            scalars={name: by_settings[settings[name]] for name in params},
            stochastic=options.stochastic,
            context=dataclasses.replace(context, piece=piece),
            average_rate=average_rate,
        )
        return method.run(params, before, grads, numbers)

    def end(after: tuple[dict[str, Any], ...]) -> Tree:
        def advance(part: Tree) -> Any:
            changed: dict[str, Any] = {}
            if part is moments:
                changed |= zip(method.moments, after, strict=False)  # the average may be last
            if "count" in part._fields:
                changed["count"] = next_count(part.count, context)
            return part._replace(**changed)

        advanced = jax.tree.map(advance, state, is_leaf=_is_part)
        if average is None:
            return advanced
        return EmaState(advanced, next_count(average.count, context), after[-1])

    before = tuple(getattr(moments, field) for field in method.moments)
    if average is not None:
        before = (*before, average.ema)
    return BegunUpdate(moments=before, run=run, end=end)


def _step_numbers(
    method: Method, options: Options, count: jax.Array, whole: Mapping[str, Any]
) -> StepNumbers:
    """Implements `Optimizer.numbers`; computes what `begin_update` would compute in the step."""
    rate = jnp.asarray(as_schedule(options.learning_rate)(count), jnp.float32)

    def scalars_of(leaf: LeafSettings) -> Any:
        found = method.scalars(
            rate * leaf.learning_rate_factor,
            weight_decay=leaf.weight_decay,
            count=optax.safe_increment(count),
            gradient_scale=1.0,
            skip=False,
        )
        return type(found)(*(jnp.asarray(x, jnp.float32) for x in found))

    limit = options.clip_norm
    return StepNumbers(
        scalars=tuple(map(scalars_of, _different(options.decay.settings(dict(whole))))),
        clip_norm=None if limit is None else jnp.float32(limit),
    )


def _different(settings: Mapping[str, LeafSettings]) -> list[LeafSettings]:
    """Returns the different settings, in the order of the names."""
    return [*dict.fromkeys(settings[name] for name in sorted(settings))]


def next_count(count: jax.Array, context: UpdateContext) -> jax.Array:
    """Returns the number of updates applied including this step, int32 []."""
    return jnp.where(context.skip, count, optax.safe_increment(count))


def _is_part(node: object) -> bool:
    return isinstance(node, _PARTS)


def one_pass(rule: Rule) -> Run:
    """Builds the `Run` of a rule that updates (parameter, *moments) and reads the gradient."""

    def run(
        params: Arrays, moments: tuple[Arrays, ...], grads: Arrays, numbers: Numbers
    ) -> tuple[Arrays, tuple[Arrays, ...]]:
        new = numbers.update_params(rule, params, moments, (grads,))
        return new[0], new[1:]

    return run
