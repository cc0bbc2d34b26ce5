"""AdamW with one-byte moments, as an in-place update of shards and as an optax transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pallas_kernels import optimizers
from pallas_kernels.adam8bit import Moments8bit
from pallas_kernels.adam8bit_kernel import update_adam8bit
from pallas_kernels.choice import Choice, Impl
from zerojax.config.checks import names_keywords
from zerojax.config.tree_types import Tree
from zerojax.optim import adam8bit_state as states
from zerojax.optim.ema import Ema, around
from zerojax.optim.fused import Method, Numbers, Options, make_optimizer, one_pass
from zerojax.optim.groups import Decay, as_groups
from zerojax.optim.methods import GroupsLike, adam_scalars, adamw, scale_by_adam
from zerojax.optim.optimizer import (
    Arrays,
    Optimizer,
    StateCoding,
    UpdateContext,
    coding_around,
)
from zerojax.optim.parameter_tree import ParameterTree
from zerojax.optim.schedules import Schedule
from zerojax.tracing import trees

_WHOLE = Choice("xla", "the update gets whole arrays, which cannot be split for a kernel")


@names_keywords()
def adam8bit(
    learning_rate: float | Schedule,
    *,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Tree = None,
    clip_norm: float | None = None,
    groups: GroupsLike = None,
    impl: Impl = "auto",
) -> Optimizer:
    """Builds AdamW with 8-bit moments: 2.02 instead of 8 bytes of optimizer state per parameter.

    Blocks of up to 512 elements share a scale (arXiv:2110.02861), and codes are rounded
    stochastically. Parameters with fewer than `SMALLEST_CODED` elements keep float32 moments.
    Checkpoints store the moments decoded to float32, in the format of `adamw`, so each optimizer
    restores the other's checkpoints.

    In a training step a kernel reads and writes a parameter and its moments once. Outside the step,
    `update` returns new minus old parameters in float32, as optax expects; adding them to the old
    parameters rounds once more (by 2^-24 of the larger of the two). The random bits of `update`
    depend only on the update count, and its blocks are cut from whole parameters, so the codes
    equal those of a step on one device with the same bits.

    Args:
      learning_rate, b1, b2, eps, weight_decay, mask, clip_norm, groups: the same arguments and
        defaults as for `zerojax.adamw`.
      impl: implementation of the step's update: "auto", "xla", "mosaic_gpu" or "interpret", see
        `pallas_kernels.choice.choose`. Outside the step, `update` always uses plain XLA.

    Raises:
      ValueError, TypeError: an argument is invalid, as for `zerojax.adamw`.
    """
    decay = {"weight_decay": weight_decay, "mask": mask}
    more = {"clip_norm": clip_norm, "impl": impl}
    plain = adamw(learning_rate, b1=b1, b2=b2, eps=eps, **decay, **more, groups=groups)
    method = Method(
        kernel="adam8bit",
        chain=lambda decays, rate: optax.chain(scale_by_adam(b1, b2, eps), decays, rate),
        moments=("mu", "nu"),
        scalars=adam_scalars(b1, b2, eps),
        run=_update_leaves,
        elementwise=False,
    )
    options = Options(
        learning_rate=learning_rate, decay=Decay(**decay, groups=as_groups(groups)), **more
    )
    return _make(plain, method, options)


def _make(plain: Optimizer, method: Method, options: Options) -> Optimizer:
    # Moments are float32 for every parameter dtype.
    portable_init = plain.with_dtypes(jnp.float32, options.stochastic).init
    applied = make_optimizer(method, options).apply

    def abstract(params: Tree, sizes: Mapping[str, int]) -> Tree:
        bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return states.abstract_state(jax.eval_shape(portable_init, bare), params, sizes)

    def init(params: Tree) -> Tree:
        options.decay.settings(params)  # raises if the mask or a group does not fit the parameters
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        sizes = {name: x.size for name, x in trees.flatten_names(whole).items()}
        return states.new_state(abstract(whole, sizes))

    def apply(
        grads: Arrays, state: Tree, params: Arrays, context: UpdateContext
    ) -> tuple[Arrays, Tree]:
        params, state = applied(grads, states.paired(state), params, context)
        return params, states.unpaired(state)

    def update(
        updates: Tree,
        state: Tree,
        params: Tree = None,
        *,
        grad_norm: jax.Array | None = None,
        **_: Any,
    ) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError("adam8bit needs the parameters: call update(gradients, state, params)")
        # `around` keeps the average, so the inner update must not.
        own = dataclasses.replace(options, ema=None)
        return _update_whole(method, own, (updates, state, params), grad_norm)

    def with_dtypes(moments_dtype: DTypeLike, stochastic: bool) -> Optimizer:
        if moments_dtype is not None and jnp.dtype(moments_dtype) != jnp.float32:
            raise ValueError(
                f"moments_dtype={jnp.dtype(moments_dtype)} is not possible for adam8bit, which "
                "stores moments as 8-bit codes; leave moments_dtype at float32, or use adamw"
            )
        return _make(plain, method, dataclasses.replace(options, stochastic=stochastic))

    def with_tree(tree: ParameterTree) -> Optimizer:
        mask = tree.choice_by_name(options.decay.mask)
        decay = dataclasses.replace(options.decay, mask=mask)
        return _make(plain.with_tree(tree), method, dataclasses.replace(options, decay=decay))

    def with_ema(ema: Ema) -> Optimizer:
        return _make(plain, method, dataclasses.replace(options, ema=ema))

    def with_clip_norm(limit: float | None) -> Optimizer:
        changed = dataclasses.replace(options, clip_norm=limit)
        return _make(plain.with_clip_norm(limit), method, changed)

    return Optimizer(
        *around(init, update, options.ema),
        apply=apply,
        kernel=method.kernel,
        impl=options.impl,
        clip_norm=options.clip_norm,
        with_dtypes=with_dtypes,
        learning_rate=plain.learning_rate,
        coding=coding_around(
            StateCoding(
                portable_init=portable_init,
                abstract_state=lambda stored, sizes: abstract(dict(stored), sizes),
                new_state=lambda structs, _: states.new_state(structs),
                to_portable_state=states.to_portable_state,
                from_portable_state=states.from_portable_state,
            ),
            options.ema,
        ),
        ema=options.ema,
        with_ema=with_ema,
        with_clip_norm=with_clip_norm,
        with_tree=with_tree,
    )


# The update


def _update_leaves(
    params: Arrays, moments: tuple[Any, ...], grads: Arrays, numbers: Numbers
) -> tuple[Arrays, tuple[Any, ...]]:
    """Runs AdamW on {name: array}; each moment is a pair ({name: codes}, {name: scales})."""
    moments, averages = moments[:2], moments[2:]
    (mu, _), (nu, _) = moments
    small = [name for name in params if mu[name].dtype != jnp.int8]
    coded = [name for name in params if mu[name].dtype == jnp.int8]
    state = (params, mu, nu, *averages)
    found = _update_small(small, state, grads, numbers) if small else {}
    for name in coded:
        if params[name].dtype == jnp.bfloat16 and not numbers.stochastic:
            raise TypeError(
                f"adam8bit: {name} is bfloat16 and would be rounded to nearest, which loses small "
                "updates; keep parameters in float32, or use stochastic rounding: "
                "adam8bit(...).with_dtypes(jnp.float32, True)"
            )
    found |= _update_coded(coded, (params, *averages), moments, grads, numbers) if coded else {}
    new = {name: found[name][0] for name in params}
    of = lambda field: {name: getattr(found[name][1], field) for name in params}  # noqa: E731
    moved = tuple({name: found[name][2] for name in params} for _ in averages)
    return new, ((of("mu"), of("mu_scale")), (of("nu"), of("nu_scale")), *moved)


def _update_coded(
    names: list[str],
    updated: tuple[Arrays, ...],
    moments: tuple[Any, ...],
    grads: Arrays,
    numbers: Numbers,
) -> dict[str, tuple[jax.Array, Moments8bit, Any]]:
    """Updates parameters with 8-bit moments, each by its own kernel or by plain XLA.

    Args:
      names: names of the parameters to update.
      updated: parameters, then their average (EMA) if there is one.
      moments: pairs ({name: codes}, {name: scales}).
      grads: gradients.
      numbers: scalars of the update.
    """
    params, *averages = updated
    scalars = {name: numbers.scalars[name] for name in names}
    if averages:
        scalars = numbers.with_rate(scalars)
    (mu, mu_scale), (nu, nu_scale) = moments
    coded = {n: Moments8bit(mu[n], nu[n], mu_scale[n], nu_scale[n]) for n in names}
    context = numbers.context
    if context.choice.implementation == "xla":
        # One seed per call: XLA 0.12 copies the updated arrays if all calls share an array of
        # seeds.
        seeds = [context.seed(name) for name in names]
    else:
        seeds = list(context.seeds(names))
    leaves = [
        update_adam8bit(
            params[name],
            coded[name],
            grads[name],
            scalars=scalars[name],
            seed=seed,
            average=averages[0][name] if averages else None,
            impl=context.choice,
        )
        for name, seed in zip(names, seeds, strict=True)
    ]
    return {name: (x.param, x.moments, x.average) for name, x in zip(names, leaves, strict=True)}


def _update_small(
    names: list[str], arrays: tuple[Arrays, ...], grads: Arrays, numbers: Numbers
) -> dict[str, tuple[jax.Array, Moments8bit, Any]]:
    """Updates parameters with float32 moments: {name: (parameter, moments, average or None)}."""
    part = lambda tree: {name: tree[name] for name in names}  # noqa: E731
    params, *moments = (part(tree) for tree in arrays)
    plain = dataclasses.replace(numbers, scalars=part(numbers.scalars))
    new, (mu, nu, *more) = one_pass(optimizers.ADAMW)(params, tuple(moments), part(grads), plain)
    none: Any = optax.MaskedNode()
    average = more[0] if more else dict.fromkeys(names)
    return {
        name: (new[name], Moments8bit(mu[name], nu[name], none, none), average[name])
        for name in names
    }


def _update_whole(
    method: Method, options: Options, arrays: tuple[Tree, Tree, Tree], grad_norm: jax.Array | None
) -> tuple[Tree, Tree]:
    """Computes (updates, new state) from whole arrays in any tree, as optax's `update` does."""
    grads, state, params = arrays
    names = list(trees.flatten_names(params))
    structure = jax.tree.structure(params)

    def by_name(tree: Tree) -> dict[str, Any]:
        return dict(zip(names, structure.flatten_up_to(tree), strict=True))

    context = UpdateContext(
        gradient_scale=_clipping(grads, grad_norm, options.clip_norm),
        skip=jnp.zeros((), jnp.bool_),
        key=jax.random.fold_in(jax.random.key(0), states.part_of(state).count),
        axes=dict.fromkeys(names, ()),
        choice=_WHOLE,
    )
    settings = options.decay.settings(params)  # a mask function expects the user's tree
    # The inner optimizer gets a dict by name, so the mask becomes one, too.
    mask = {name: _decays(leaf.weight_decay) for name, leaf in settings.items()}
    decay = dataclasses.replace(options.decay, mask=mask)
    inner = make_optimizer(method, dataclasses.replace(options, decay=decay))
    old = {name: x.astype(jnp.float32) for name, x in by_name(params).items()}
    flat_state = states.paired(states.map_trees(state, by_name))
    new, flat_state = inner.apply(by_name(grads), flat_state, old, context)

    def in_tree(flat: Mapping[str, Any]) -> Tree:
        return structure.unflatten([flat[name] for name in names])

    updates = in_tree({name: new[name] - old[name] for name in names})
    return updates, states.map_trees(states.unpaired(flat_state), in_tree)


def _clipping(grads: Tree, norm: jax.Array | None, limit: float | None) -> jax.Array:
    """Computes the factor that clips gradients to norm `limit`, float32 []. `norm` is their norm,
    if known."""
    if limit is None:
        return jnp.ones((), jnp.float32)
    norm = optax.tree.norm(grads) if norm is None else norm
    return jnp.where(norm < limit, 1.0, limit / norm.astype(jnp.float32))


def _decays(weight_decay: object) -> bool:
    return not isinstance(weight_decay, int | float) or weight_decay > 0
