"""AdamW, Lion, LAMB and SGD: as optax transformations and as equivalent fused rules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from pallas_kernels import optimizers
from pallas_kernels.choice import Impl, choose
from zerojax.config.checks import names_keywords
from zerojax.config.tree_types import Tree
from zerojax.optim.fused import Method, Numbers, Options, make_optimizer, one_pass
from zerojax.optim.groups import Decay, as_groups
from zerojax.optim.optimizer import Arrays, Optimizer, UpdateContext
from zerojax.optim.schedules import Schedule
from zerojax.optim.transforms import map_layers

GroupsLike = Mapping[str, Any] | Iterable[tuple[str, Any]] | None


@names_keywords()
def adamw(
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
    """Builds AdamW (arXiv:1711.05101), with the defaults and the state of `optax.adamw`.

    With clipping, the state has the form of an `optax.chain`. The usual recipe for language models
    is the default of `zerojax.OptimizerConfig`: b2 0.95, weight_decay 0.1 with mask
    `zerojax.optim.decay_mask`, clip_norm 1.

    Args:
      learning_rate: a number, or a function of the number of updates applied.
      b1, b2: decay of the first and second moment. b1 may also be a function of the number of
        updates applied.
      eps: number added to the root of the second moment.
      weight_decay: weight decay per unit of learning rate.
      mask: mask of decaying parameters, as in optax; None decays all parameters.
        `zerojax.optim.decay_mask` decays matrices, but not biases, norms and scales.
      clip_norm: maximum of the global gradient norm; None does not clip.
      groups: {regular expression on names: {"learning_rate_factor": 0.1, "weight_decay": 0.0}}; a
        parameter belongs to the first group that matches. A group's learning rate is the
        optimizer's learning rate times the factor. Omitted settings keep the optimizer's values,
        and the mask applies within groups as well.
      impl: implementation of the update: "auto", "xla", "mosaic_gpu" or "interpret", see
        `pallas_kernels.choice.choose`.

    Raises:
      ValueError, TypeError: a number is out of range, or a setting is unknown. `init` raises for a
        group that matches nothing or a mask that does not fit.
    """
    check_numbers(b1=b1, b2=b2, eps=eps)
    return make_optimizer(
        Method(
            kernel="adamw",
            chain=lambda decay, rate: optax.chain(scale_by_adam(b1, b2, eps), decay, rate),
            moments=("mu", "nu"),
            scalars=adam_scalars(b1, b2, eps),
            run=one_pass(optimizers.ADAMW),
        ),
        _options("adamw", learning_rate, weight_decay, mask, groups, clip_norm, impl),
    )


@names_keywords()
def lion(
    learning_rate: float | Schedule,
    *,
    b1: float | Schedule = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Tree = None,
    clip_norm: float | None = None,
    groups: GroupsLike = None,
    impl: Impl = "auto",
) -> Optimizer:
    """Builds Lion (arXiv:2302.06675): one moment, and updates by the sign of an average.

    Defaults and state are those of `optax.lion`; further arguments and errors are those of
    `adamw`. The paper recommends a learning rate 3 to 10 times smaller than AdamW's, and a weight
    decay larger by the same factor.

    Args:
      b1: weight of the moment in the average whose sign is the update.
      b2: decay of the moment.
    """
    check_numbers(b1=b1, b2=b2)

    def scaled(b1: float | Schedule) -> optax.GradientTransformation:
        return _scheduled(lambda b1: optax.scale_by_lion(b1, b2), b1)

    return make_optimizer(
        Method(
            kernel="lion",
            chain=lambda decay, rate: optax.chain(scaled(b1), decay, rate),
            moments=("mu",),
            scalars=lambda rate, *, count, **step: optimizers.lion_scalars(
                rate, b1=_at(b1, count), b2=b2, **step
            ),
            run=one_pass(optimizers.LION),
        ),
        _options("lion", learning_rate, weight_decay, mask, groups, clip_norm, impl),
    )


@names_keywords()
def lamb(
    learning_rate: float | Schedule,
    *,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Tree = None,
    clip_norm: float | None = None,
    groups: GroupsLike = None,
    impl: Impl = "auto",
    per_layer: bool = True,
) -> Optimizer:
    """Builds LAMB (arXiv:1904.00962): AdamW with each array's update scaled to the array's norm.

    Defaults and state are those of `optax.lamb`; further arguments and errors are those of `adamw`.
    Each array has one trust ratio (ratio of norms) over all of its shards, as in optax. If layers
    are stacked in an array [layers, ...] for a loop, each layer has its own ratio within the step,
    as in the paper and in `optax.lamb` with one array per layer; the plan lists these arrays.
    Outside of the step, `update` does not know which arrays are stacks; pass their names:
    `update(gradients, state, params, layers={"blocks/kernel"})`.

    Parameters are updated after the ratios are known, from the moments as stored: bfloat16 moments
    are rounded before the update uses them.

    Args:
      per_layer: whether each layer of a stack has its own ratio; False uses one for the array.
    """
    check_numbers(b1=b1, b2=b2, eps=eps)
    return make_optimizer(
        Method(
            kernel="lamb",
            chain=lambda decay, rate: optax.chain(
                scale_by_adam(b1, b2, eps), decay, _scale_by_trust_ratio(), rate
            ),
            moments=("mu", "nu"),
            scalars=adam_scalars(b1, b2, eps),
            run=_lamb_passes,
            elementwise=False,
            per_layer=per_layer,
        ),
        _options("lamb", learning_rate, weight_decay, mask, groups, clip_norm, impl),
    )


@names_keywords()
def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Tree = None,
    clip_norm: float | None = None,
    groups: GroupsLike = None,
    impl: Impl = "auto",
) -> Optimizer:
    """Builds stochastic gradient descent, optionally with momentum.

    Defaults and state are those of `optax.sgd`; with weight decay the state is that of
    `optax.chain(add_decayed_weights, sgd)`. Other arguments and errors are those of `adamw`.

    Args:
      momentum: decay of the running sum of gradients; None keeps no sum.
      nesterov: whether to use Nesterov momentum (Sutskever et al., ICML 2013); needs `momentum`.
      weight_decay: factor of the parameter that is added to the gradient before the momentum.
    """
    if momentum is None and nesterov:
        raise ValueError("nesterov=True needs momentum, which is None; 0.9 is usual")
    if momentum is not None:
        check_numbers(momentum=momentum)
    options = _options("sgd", learning_rate, weight_decay, mask, groups, clip_norm, impl)
    decays = any(group.weight_decay for _, group in options.decay.groups)
    # An array is not compared: it may be traced, and the state's form must not depend on it.
    decays = decays or not isinstance(weight_decay, int | float) or weight_decay > 0

    def chain(
        decay: optax.GradientTransformation, rate: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        trace = optax.identity() if momentum is None else optax.trace(momentum, nesterov)
        descent = optax.chain(trace, rate)
        return optax.chain(decay, descent) if decays else descent

    def scalars(rate: jax.Array, *, count: jax.Array | None, **step: Any) -> optimizers.SgdScalars:
        return optimizers.SgdScalars(rate, momentum=momentum or 0.0, **step)

    rule = optimizers.SGD_NESTEROV if nesterov else optimizers.SGD
    method = Method(
        kernel="sgd",
        chain=chain,
        moments=() if momentum is None else ("trace",),
        scalars=scalars,
        run=one_pass(optimizers.SGD_PLAIN if momentum is None else rule),
    )
    return make_optimizer(method, options)


def scale_by_adam(b1: float | Schedule, b2: float, eps: float) -> optax.GradientTransformation:
    """Builds `optax.scale_by_adam` for a `b1` that may be a schedule; the state is the same."""
    return _scheduled(lambda b1: optax.scale_by_adam(b1, b2, eps), b1)


def adam_scalars(b1: float | Schedule, b2: float, eps: float) -> Callable[..., Any]:
    """Builds the function `Method.scalars` of AdamW and LAMB."""

    def scalars(rate: jax.Array, *, count: jax.Array, **step: Any) -> optimizers.AdamScalars:
        now = _at(b1, count)
        return optimizers.adam_scalars(rate, count=count, b1=now, b2=b2, eps=eps, **step)

    return scalars


def _at(b1: float | Schedule, count: ArrayLike) -> Any:
    """Evaluates b1 for update `count`, counted from 1; a constant keeps double precision."""
    return jnp.asarray(b1(count - 1), jnp.float32) if callable(b1) else b1


def _scheduled(
    make: Callable[[Any], optax.GradientTransformation], b1: float | Schedule
) -> optax.GradientTransformation:
    """Returns `make(b1)`; for a schedule, a transformation that calls `make` at each update."""
    if not callable(b1):
        return make(b1)

    def update(updates: Tree, state: Tree, params: Tree = None) -> Any:
        # The state does not depend on the decay, so a new transformation can use it.
        return make(_at(b1, state.count + 1)).update(updates, state, params)

    # `init` does not depend on the decay, so any number serves.
    return optax.GradientTransformation(make(0.9).init, update)


def _scale_by_trust_ratio() -> optax.GradientTransformationExtraArgs:
    """Builds `optax.scale_by_trust_ratio`, applied per layer to the parameters in `layers`."""
    plain = optax.scale_by_trust_ratio()

    def update(
        updates: Tree, state: Tree, params: Tree = None, *, layers: Container[str] = (), **_: Any
    ) -> tuple[Any, Any]:
        # Weight decay comes before, and refuses a call without parameters.
        def one(param: jax.Array, update: jax.Array) -> Any:
            return plain.update(update, state, param)[0]

        return map_layers(one, layers, params, updates), state

    return optax.GradientTransformationExtraArgs(plain.init, update)


def _lamb_passes(
    params: Arrays, moments: tuple[Arrays, ...], grads: Arrays, numbers: Numbers
) -> tuple[Arrays, tuple[Arrays, ...]]:
    """Runs LAMB's two passes (a `Run`): new moments and their norms, then new parameters."""
    layers = numbers.context.layers
    moments, average = moments[:2], moments[2:]
    half = numbers.update(optimizers.LAMB_MOMENTS, moments, (params, grads), by_row=layers)
    ratios = _trust_ratios(half.sums, numbers.context, layers)
    second = dataclasses.replace(
        numbers,
        scalars={
            name: optimizers.lamb_scalars(scalars, trust_ratio=ratios[name])
            for name, scalars in numbers.scalars.items()
        },
    )
    # With another salt the random bits differ from those that rounded the first moment.
    new = second.update_params(
        optimizers.LAMB_APPLY, params, average, half.updated, salt=0x5BD1E995, by_row=layers
    )
    return new[0], (*half.updated, *new[1:])


def _trust_ratios(
    sums: tuple[Arrays, ...], context: UpdateContext, layers: Mapping[str, tuple[str, ...]]
) -> dict[str, jax.Array]:
    """Computes LAMB's trust ratios over all shards: {name: float32 [] or [layers of this shard]}.

    Uses one collective for all parameters with the same sharding. A layer's sums cover all shards
    of this layer.
    """
    split_alike: dict[tuple[str, ...], list[str]] = {}
    for name in sums[0]:
        # Devices of an axis that splits layers hold other layers, not other parts of the same one.
        over = tuple(axis for axis in context.axes[name] if axis not in layers.get(name, ()))
        split_alike.setdefault(over, []).append(name)
    ratios = {}
    for over, names in split_alike.items():
        local = tuple(jnp.concatenate([each[name].reshape(-1) for name in names]) for each in sums)
        agreed = context.sum_over(over, local)
        found = optimizers.trust_ratio_of(*(jnp.sqrt(x) for x in agreed))
        ends = itertools.accumulate(sums[0][name].size for name in names)
        for name, end in zip(names, ends, strict=True):
            first, shape = end - sums[0][name].size, sums[0][name].shape
            ratios[name] = found[first:end].reshape(shape)
    return ratios


def _options(
    kernel: str,
    learning_rate: float | Schedule,
    weight_decay: jax.Array | float,
    mask: Tree,
    groups: GroupsLike,
    clip_norm: float | None,
    impl: Impl,
) -> Options:
    if callable(weight_decay):
        raise TypeError(
            f"{kernel}: weight_decay must be a number, not a function; for a schedule of the "
            "decay use an optax.chain with optax.add_decayed_weights(schedule), which "
            "zerojax supports as well"
        )
    if impl not in get_args(Impl):
        choose(impl, kernel=kernel)  # raises an error that lists the valid values
    check_numbers(weight_decay=weight_decay, clip_norm=clip_norm)
    if not callable(learning_rate):
        check_numbers(learning_rate=learning_rate)
    return Options(
        learning_rate=learning_rate,
        decay=Decay(weight_decay=weight_decay, mask=mask, groups=as_groups(groups)),
        clip_norm=clip_norm,
        impl=impl,
    )


_RANGES = {
    "learning_rate": (lambda x: x >= 0, "at least 0; 3e-4 is usual for AdamW"),
    "b1": (lambda x: 0 <= x < 1, "in [0, 1); 0.9 is usual"),
    "b2": (lambda x: 0 <= x < 1, "in [0, 1); 0.95 to 0.999 is usual"),
    "momentum": (lambda x: 0 <= x < 1, "in [0, 1); 0.9 is usual"),
    "eps": (lambda x: x > 0, "above 0; 1e-8 is usual"),
    "weight_decay": (lambda x: x >= 0, "at least 0; 0.1 is usual for AdamW"),
    "clip_norm": (lambda x: x > 0, "above 0, or None for no clipping; 1.0 is usual"),
    "beta": (lambda x: 0 <= x < 1, "in [0, 1); 0.95 is usual"),
    "ns_steps": (lambda x: x >= 1, "at least 1; 5 is usual"),
    "consistent_rms": (lambda x: x > 0, "above 0, or None; 0.2 is usual"),
}
_RANGES |= {f"adam_{name}": _RANGES[name] for name in ("b1", "b2", "learning_rate", "weight_decay")}
_RANGES["ns_eps"] = _RANGES["eps"]


def check_numbers(**numbers: Any) -> None:
    """Checks that hyperparameters are in their ranges; raises a ValueError if not.

    Arrays, which `optax.inject_hyperparams` passes, are not checked.
    """
    for name, value in numbers.items():
        holds, limit = _RANGES[name]
        if not isinstance(value, int | float):
            continue
        # An infinite clip_norm is valid: it never clips.
        is_known = math.isfinite(value) or (name == "clip_norm" and value > 0)
        if not (is_known and holds(value)):
            raise ValueError(f"{name}={value!r} must be {limit}")
