"""Builds the optimizer of a run, with dtypes, kernels, and a reason for each default.

Any `optax.GradientTransformation` can be used as well.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from pallas_kernels.choice import Choice, Impl, choose, choose_for_others
from pallas_kernels.gradients import GRADIENT_STATS
from zerojax.config import OptimizerConfig
from zerojax.config.checks import names_keywords
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.hardware.gpus import gpu_of_device, named_gpu
from zerojax.optim.adam8bit import adam8bit
from zerojax.optim.ema import Ema, WithEma
from zerojax.optim.groups import decay_mask
from zerojax.optim.methods import adamw, lamb, lion, sgd
from zerojax.optim.optax_rates import schedule_of
from zerojax.optim.optimizer import Optimizer
from zerojax.optim.parameter_tree import OnParameterTree, ParameterTree
from zerojax.optim.precision import Precision
from zerojax.optim.schedules import Schedule, build_schedule
from zerojax.optim.step_sizes import StepSizes
from zerojax.tracing.protocol import Model


@dataclass(frozen=True)
class BuiltOptimizer:
    """Optimizer with its learning-rate schedule and the reasons for its defaults.

    Attributes:
      tx: optax transformation that computes the updates.
      learning_rate: schedule, used for reports; None if `schedule_of` does not find that of the
        user's transformation.
      reasons: one line for each default that was chosen.
    """

    tx: optax.GradientTransformation
    learning_rate: Schedule | None
    reasons: tuple[str, ...] = ()

    def on_tree_of(self, model: Model) -> BuiltOptimizer:
        """Adapts the optimizer to a dict of parameters by name; masks still see the model's
        tree."""
        tree = ParameterTree(model.parameter_names())
        if tree.is_flat:
            return self
        if not isinstance(self.tx, Optimizer):
            return dataclasses.replace(self, tx=OnParameterTree(self.tx, tree))
        return dataclasses.replace(self, tx=self.tx.with_tree(tree))


def build_optimizer(
    optimizer: optax.GradientTransformation | OptimizerConfig | None,
    steps: int | None,
    sizes: StepSizes | None = None,
) -> BuiltOptimizer:
    """Builds the transformation from the user's `optimizer` argument.

    Args:
      optimizer: a transformation, used unchanged; an `OptimizerConfig`; or None for the default
        `OptimizerConfig`.
      steps: number of steps of the run, which the schedules cosine, linear and wsd need; with None
        the rate is constant after the warm-up.
      sizes: rows and tokens of the steps, for rates that depend on them; None: not known.

    Raises:
      TypeError: the optimizer is of any other type.
      ConfigError: the rate depends on tokens or rows that are not known.
    """
    check_optimizer(optimizer)
    if isinstance(optimizer, optax.GradientTransformation):
        is_own = isinstance(optimizer, Optimizer)
        rate = optimizer.learning_rate if is_own else schedule_of(optimizer)
        return BuiltOptimizer(optimizer, rate, _describe_ema(optimizer))
    config = optimizer or OptimizerConfig()
    schedule, reason = build_schedule(config, steps, sizes)
    tx = with_rate(config, schedule)
    origin = "default" if optimizer is None else "configured"
    named = f"optimizer {config.name} ({origin}), learning rate {config.learning_rate:g}: {reason}"
    return BuiltOptimizer(tx, schedule, (named, describe_numbers(config), *_describe_ema(tx)))


def with_rate(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    """Returns the configured optimizer with another learning rate; the form of its state is equal.

    Args:
      config: configuration, of which `learning_rate`, `schedule` and `warmup_steps` are ignored.
      schedule: function from the number of updates applied so far to the learning rate.
    """
    tx = _configured(config, schedule)
    if config.ema_decay is None:
        return tx
    return with_ema(tx, config.ema_decay, warmup=config.ema_warmup)


def describe_numbers(config: OptimizerConfig) -> str:
    """Formats in one line the configured numbers that this optimizer uses."""
    unread = {"sgd": ("beta2", "eps"), "lion": ("eps",)}.get(config.name, ())
    names = (name for name in ("beta1", "beta2", "eps") if name not in unread)
    numbers = ", ".join(f"{name} {getattr(config, name):g}" for name in names)
    clip = "no clipping" if config.clip_norm is None else f"clip_norm {config.clip_norm:g}"
    decay = f"weight_decay {config.weight_decay:g} on matrices"
    return f"{config.name}'s {numbers}, {decay}, {clip}"


def _describe_ema(tx: optax.GradientTransformation) -> tuple[str, ...]:
    ema = getattr(tx, "ema", None)
    return (ema.describe(),) if isinstance(ema, Ema) else ()


def check_optimizer(optimizer: object) -> None:
    """Checks that the argument is a transformation, an `OptimizerConfig` or None.

    Raises:
      TypeError: it is something else; the message says what to pass.
    """
    if isinstance(optimizer, optax.MultiSteps):
        raise TypeError(
            "optimizer is an optax.MultiSteps, which is not a transformation; pass its "
            "optimizer.gradient_transformation(), or use the inner optimizer with "
            "num_microbatches, which accumulates gradients within a step"
        )
    known = optax.GradientTransformation | OptimizerConfig | None
    if not isinstance(optimizer, known):
        raise TypeError(_not_taken(optimizer))


def _not_taken(optimizer: object) -> str:
    """Returns the error message for an optimizer of an unsupported type, with what to pass."""
    if isinstance(getattr(optimizer, "tx", None), optax.GradientTransformation):
        kind = type(optimizer)  # a class of Flax: nnx.Optimizer, TrainState
        return (
            f"optimizer is a {kind.__module__.partition('.')[0]} {kind.__name__}, which stores its "
            "own state; pass its transformation, optimizer.tx"
        )
    name = getattr(optimizer, "__name__", None)
    if callable(optimizer) and name is not None:
        module = (getattr(optimizer, "__module__", None) or "").partition(".")[0]
        # A function inside of another is no function of optax, but may be a schedule from one.
        if module not in ("optax", "zerojax") or "<locals>" in getattr(
            optimizer, "__qualname__", ""
        ):
            return (
                f"optimizer is the function {name}; if it is a schedule of learning rates, pass an "
                "optimizer with these rates, optax.adamw(schedule); if it makes an optimizer, pass "
                "what it returns, such as optax.adamw(3e-4)"
            )
        return (
            f"optimizer is the function {name}; pass what it returns, such as {module}.{name}(3e-4)"
        )
    return (
        f"optimizer={quoted(optimizer)} ({type(optimizer).__name__}) is not valid; use an "
        "optax.GradientTransformation such as optax.adamw(3e-4), a zerojax.OptimizerConfig such as "
        "zerojax.OptimizerConfig(name='lion'), or None for its defaults"
    )


def fit_optimizer(
    tx: optax.GradientTransformation, precision: Precision
) -> optax.GradientTransformation:
    """Returns the optimizer adapted to a precision: to its moments' dtype and missing masters.

    Without master weights, bfloat16 parameters are rounded stochastically, as are bfloat16 moments.

    Raises:
      ValueError: the precision needs stochastic rounding, but the optimizer is a plain optax
        transformation, which does not support it.
    """
    if precision.has_masters and precision.moments_dtype == jnp.float32:
        return tx
    if not isinstance(tx, Optimizer):
        name = "moments_dtype" if precision.has_masters else "param_dtype"
        raise ValueError(
            f"Precision.{name}=bfloat16 needs an optimizer with stochastic rounding, but this "
            "optimizer "
            "is a plain optax transformation, which would lose small updates; use zerojax.adamw, "
            "lion, lamb or sgd (not inside optax.chain; in a ds_config AdamW, Lion, or Adam with "
            "adam_w_mode true), or float32"
        )
    return tx.with_dtypes(precision.moments_dtype, True)


def choose_update(
    tx: optax.GradientTransformation, mesh: Mesh | AbstractMesh, kernels: Impl = "auto"
) -> Mapping[str, Choice]:
    """Chooses XLA or a kernel for the optimizer's update and for statistics of gradients.

    Args:
      tx: optimizer; its own `impl`, unless "auto", takes precedence over `kernels`.
      mesh: mesh of the plan.
      kernels: value of `MeshConfig.kernels`.

    Returns:
      {"update": choice, "statistics": choice}, each with its reason.

    Raises:
      KernelUnavailable: a kernel was requested that cannot run on these devices.
    """

    def of(impl: Impl, kernel: str, option: str) -> Choice:
        if isinstance(mesh, Mesh):
            devices = list(mesh.devices.flat)
            return choose(impl, kernel=kernel, devices=devices, option=option)
        device = _described(mesh.abstract_device)
        return choose_for_others(impl, kernel=kernel, device=device, option=option)

    statistics = of(kernels, GRADIENT_STATS.name, "kernels")
    if not isinstance(tx, Optimizer):
        return {"update": Choice("xla", "an optax transformation"), "statistics": statistics}
    asked = (kernels, tx.kernel, "kernels") if tx.impl == "auto" else (tx.impl, tx.kernel, "impl")
    return {"update": of(*asked), "statistics": statistics}


def _described(device: AbstractDevice | None) -> Any | None:
    """Returns what the choice of a kernel reads of a device; None if its kind is not known."""
    if device is None:
        return None
    kind = str(device.device_kind)
    card = gpu_of_device(kind) or named_gpu(kind)
    target = None if card is None else card.target
    return types.SimpleNamespace(
        platform=device.platform,
        device_kind=kind,
        compute_capability=None if target is None else target.capability.rstrip("af"),
    )


def _configured(config: OptimizerConfig, schedule: Schedule) -> Optimizer:
    common = {
        "weight_decay": config.weight_decay,
        "mask": decay_mask,
        "clip_norm": config.clip_norm,
        "groups": config.groups,
        "impl": config.impl,
    }
    betas = {"b1": config.beta1, "b2": config.beta2}
    if config.name == "sgd":
        # optax would keep a sum for a momentum of 0.
        momentum = config.beta1 or None
        return sgd(schedule, momentum=momentum, nesterov=config.nesterov, **common)
    if config.name == "lion":
        return lion(schedule, **betas, **common)
    build = {"adamw": adamw, "adam8bit": adam8bit, "lamb": lamb}[config.name]
    return build(schedule, eps=config.eps, **betas, **common)


@names_keywords()
def with_ema(
    optimizer: optax.GradientTransformation, decay: float = 0.999, *, warmup: bool = True
) -> optax.GradientTransformation:
    """Adds an exponential moving average (EMA) of the weights to an optimizer.

    After each update the average becomes average + (1 - decay) (parameter - average), in float32,
    with the parameter as it is stored (Polyak and Juditsky, 1992; arXiv:1803.05407). A skipped step
    does not change the average. It is sharded like the parameter's moments, costs 4 bytes per
    parameter, and is updated in the same pass as the parameter. Frozen parameters and the model's
    other arrays have no average.

    With `weights="ema"`, the functions `evaluate`, `to_model`, `load_run` and `to_hugging_face` use
    the average instead of the trained weights.

    Args:
      optimizer: optimizer of zerojax or optax; for a chain, the average follows the update of the
        whole chain.
      decay: fraction of the average that each update keeps; the average covers about
        1 / (1 - decay) updates.
      warmup: whether to limit the decay of update t, counted from 0, to (1 + t) / (10 + t).

    Raises:
      ValueError: the decay is out of range, or the optimizer already has an average.
      TypeError: `optimizer` is not a transformation.
    """
    ema = Ema(decay=decay, warmup=warmup)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"with_ema takes an optimizer, but got a {type(optimizer).__name__}; pass a "
            "transformation such as zerojax.adamw(3e-4), or set OptimizerConfig(ema_decay=...)"
        )
    if getattr(optimizer, "ema", None) is not None:
        raise ValueError("the optimizer already has an ema; use with_ema once")
    if isinstance(optimizer, Optimizer):
        return optimizer.with_ema(ema)
    return WithEma(optimizer, ema)
