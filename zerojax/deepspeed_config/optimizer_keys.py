"""Translates ds_config keys for optimizer, scheduler and clipping into arguments of `train`.

Optimizer names select classes as in `_configure_basic_optimizer` of `deepspeed/runtime/engine.py`;
defaults of parameters are those of these classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from zerojax.config import ConfigError, OptimizerConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.deepspeed_config.ds_config import File
from zerojax.deepspeed_config.key_schema import (
    Key,
    Table,
    check,
    honoured,
    left_to_compiler,
    nearest,
)
from zerojax.deepspeed_config.translation import CallerValues
from zerojax.deepspeed_config.unfused_optimizers import bounded_lamb, plain_adamw
from zerojax.optim import (
    DeepSpeedSchedule,
    Optimizer,
    Schedule,
    adamw,
    build_deepspeed_schedule,
    clip_by_global_norm,
    decay_mask,
    lion,
    matrices_by_shape,
    muon,
    one_bit_adam,
    sgd,
)
from zerojax.optim.building import describe_numbers
from zerojax.optim.schedules import as_schedule

_EAGER = "an option of PyTorch's update, and here the update is compiled"
_DECAY = "on every parameter, as in DeepSpeed (Hugging Face's Trainer leaves out biases and norms)"
_STATES = honoured(
    True,
    "moments are float32",
    (True,),
    "moments are float32; for bfloat16 set bf16.bf16_optimizer_states",
)
_ADAM: Table = {
    "lr": honoured(1e-3, "learning rate; a scheduler may use it as its peak"),
    "betas": honoured([0.9, 0.999], "b1 and b2"),
    "eps": honoured(1e-8, "added to the root of the second moment"),
    "weight_decay": honoured(0.0, _DECAY),
    "bias_correction": honoured(True, "bias correction of the moments"),
    "amsgrad": honoured(
        False,
        "only false is supported",
        (False,),
        "AMSGrad is not supported; set amsgrad to false",
    ),
    **left_to_compiler(
        _EAGER,
        **dict.fromkeys(
            ("set_grad_none", "foreach", "fused", "capturable", "differentiable"), object
        ),
        torch_adam=False,
    ),
    "adam_w_mode": honoured(True, "true: decay apart from the moments, which is AdamW"),
    "fp32_optimizer_states": _STATES,
}
_LION = {name: _ADAM[name] for name in ("lr", "betas", "weight_decay", "set_grad_none")} | {
    "fp32_optimizer_states": _STATES
}
_LAMB = {
    **{name: _ADAM[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")},
    "bias_correction": honoured(
        True, "multiplies the learning rate by the correction, as in DeepSpeed"
    ),
    "eps_inside_sqrt": honoured(False, "as in DeepSpeed"),
    "max_coeff": honoured(10.0, "upper bound of the ratio of norms"),
    "min_coeff": honoured(0.01, "lower bound of the ratio of norms"),
}
_SGD = {
    **{name: _ADAM[name] for name in ("lr", "weight_decay", "foreach", "fused", "differentiable")},
    "momentum": honoured(0.0, "decay of the sum of gradients"),
    "nesterov": honoured(False, "Nesterov momentum"),
    "dampening": honoured(0.0, "none", (0.0,), "dampening is not supported; set it to 0"),
    "maximize": honoured(
        False,
        "only false is supported",
        (False,),
        "the loss is always minimized; set maximize to false",
    ),
}
_MUON = {
    "lr": honoured(
        float, "learning rate of all parameters; absent: 0.02 for matrices, 3e-4 for the others"
    ),
    "muon_lr": honoured(float, "learning rate of matrices, in place of lr"),
    "adam_lr": honoured(float, "learning rate of the other parameters (Adam), in place of lr"),
    "momentum": honoured(0.95, "decay of the momentum of matrices"),
    "betas": honoured([0.9, 0.95], "b1 and b2 of Adam, for the other parameters"),
    "eps": honoured(1e-10, "added to the root of Adam's second moment"),
    "weight_decay": honoured(0.0, _DECAY),
    "ns_steps": honoured(5, "Newton-Schulz iterations; DeepSpeed has no such key and uses 5"),
    "ns_method": Key(
        "text",
        "gram",
        "not needed",
        "no effect; gram and standard compute the same function; here in float32",
        ("gram", "standard"),
        "use gram or standard",
    ),
    "per_head_muon": honoured(
        False,
        "only false is supported",
        (False,),
        "heads are not orthogonalized separately; set this key to false",
    ),
}
_ONE_BIT_ADAM = {
    **{name: _ADAM[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")},
    "freeze_step": honoured(100000, "warm-up steps with AdamW, before signs are sent"),
    "bias_correction": Key(
        "bool", True, "ignored", "DeepSpeed's 1-bit Adam has no bias correction"
    ),
    "eps_inside_sqrt": Key("bool", False, "ignored", "DeepSpeed's 1-bit Adam ignores this key"),
    **left_to_compiler(
        "XLA's collectives send the quantized values", cuda_aware=False, comm_backend_name="nccl"
    ),
}
OPTIMIZERS: Mapping[str, Table] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": _LION,
    "lamb": _LAMB,
    "sgd": _SGD,
    "muon": _MUON,
    "onebitadam": _ONE_BIT_ADAM,
}

_INSTEAD = "remove the section and pass optimizer="
_ABSENT = {
    "adagrad": f"is not implemented; {_INSTEAD}optax.adagrad(lr)",
    "onebitlamb": "(1-bit LAMB) is not implemented; use Lamb or OneBitAdam, with its own keys",
    "zerooneadam": "(0/1 Adam) is not implemented; use OneBitAdam",
    "muadam": "is part of the torch package mup; use Adam with learning rates by parameter group",
    "muadamw": "is part of the torch package mup; use AdamW with learning rates by parameter group",
    "musgd": "is part of the torch package mup; use SGD with learning rates by parameter group",
}
_GROUPS = "max_grad_norm is not a parameter of an optimizer (DeepSpeed refuses it, too); write "


@dataclass(frozen=True)
class Update:
    """The optimizer of a ds_config, or the caller's optimizer with the clipping of the ds_config.

    Attributes:
      optimizer: optax transformation or `OptimizerConfig`, as `zerojax.train` takes it.
      learning_rate: schedule; None if the schedule is inside `optimizer`.
      clip: maximum global gradient norm; 0: no clipping.
    """

    optimizer: optax.GradientTransformation | OptimizerConfig
    learning_rate: Schedule | None
    clip: float


def update_of(file: File, given: CallerValues) -> Update:
    """Returns the optimizer, schedule and clip norm of a ds_config.

    Without an optimizer section they come from the caller's optimizer or the default. Errors are
    added to `file.notes`; an optimizer that cannot be built is replaced by the default one.
    """
    clip = _clipping(file, given)
    kind = file.optional("optimizer.type")
    _refuse_own_schedule(file, given.optimizer)
    if kind is None:
        return _without_section(file, given, clip)
    if isinstance(given.optimizer, optax.GradientTransformation):
        file.notes.refuse(
            "optimizer.type",
            kind,
            "both the file and the call (optimizer=) set an optimizer (DeepSpeed would use the "
            "caller's); remove one of them",
        )
    params = _params(file, kind)
    if params is None:
        return Update(OptimizerConfig(), None, clip)
    rate = params["lr"]
    schedule = _schedule(file, rate)
    if schedule is None and file.optional("scheduler.type") is None:
        file.notes.reasons.append(f"learning rate {rate:g} throughout: the file has no scheduler")
    try:
        return _build(file, kind.lower(), params, schedule, clip)
    except (ValueError, TypeError) as error:
        file.notes.refuse("optimizer.params", dict(params), str(error))
        return Update(OptimizerConfig(), None, clip)


def _refuse_own_schedule(file: File, caller: object) -> None:
    """Notes an error if the file sets the schedule, and the caller's configuration sets how a
    schedule counts or follows the batch."""
    sections = [name for name in ("optimizer", "scheduler") if file.has(f"{name}.type")]
    if not sections or not isinstance(caller, OptimizerConfig):
        return
    for name in ("scaling", "warmup_tokens", "schedule_unit"):
        value = getattr(caller, name)
        if value != getattr(OptimizerConfig(), name):
            file.notes.refuse(
                f"{sections[-1]}.type",
                file[f"{sections[-1]}.type"],
                f"sets the learning rate, so {name}={value} of the OptimizerConfig that was passed "
                f"has no effect; leave {name} out, or remove the section {sections[-1]}",
            )


def _clipping(file: File, given: CallerValues) -> float:
    clip = max(0.0, file["gradient_clipping"])
    caller = given.optimizer
    own = caller.clip_norm if isinstance(caller, (Optimizer, OptimizerConfig)) else None
    # A zerojax optimizer without clipping is treated like one of optax, which does not say if it
    # clips.
    says = isinstance(caller, OptimizerConfig) or own is not None
    if not file.has("gradient_clipping") and says:
        return own or 0.0
    if not file.has("gradient_clipping"):
        file.notes.warnings.append(
            "gradient_clipping is not in the file: 1.0 is used, DeepSpeed's default since "
            "June 2026 (before it was 0, no clipping); set gradient_clipping explicitly"
        )
    elif says and (own or 0.0) != clip:
        file.notes.refuse(
            "gradient_clipping",
            clip,
            f"the optimizer passed as optimizer= has clip_norm={own}: build it with "
            f"clip_norm={clip or None}",
        )
    return clip


def _without_section(file: File, given: CallerValues, clip: float) -> Update:
    """Returns the caller's optimizer, or the default optimizer, with the clipping and schedule of a
    ds_config that has no optimizer section."""
    caller = given.optimizer
    if isinstance(caller, optax.GradientTransformation):
        if file.has("scheduler.type"):
            file.notes.refuse(
                "scheduler.type",
                file["scheduler.type"],
                "the optimizer passed as optimizer= has its own learning rate; write an "
                "optimizer section, or remove "
                "the scheduler section",
            )
        rate = caller.learning_rate if isinstance(caller, Optimizer) else None
        if clip and getattr(caller, "clip_norm", None) is None:
            file.notes.reasons.append(
                f"gradients are clipped to {clip:g} before the update of optimizer="
            )
            caller = _clipped(caller, clip)
        return Update(caller, rate, clip)
    config = dataclasses.replace(caller or OptimizerConfig(), clip_norm=clip or None)
    schedule = _schedule(file, config.learning_rate)
    if schedule is None:
        return Update(config, None, clip)
    if config.name != "adamw":
        file.notes.refuse(
            "scheduler.type",
            file["scheduler.type"],
            "needs an optimizer section, or an OptimizerConfig of adamw",
        )
    file.notes.reasons.append("optimizer adamw: the file has a scheduler and no optimizer")
    if schedule.b1 is None:
        file.notes.reasons.append(describe_numbers(config))
    tx = adamw(
        schedule.learning_rate,
        b1=schedule.b1 or config.beta1,
        b2=schedule.b2 or config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
        clip_norm=clip or None,
        groups=config.groups,
        impl=config.impl,
    )
    return Update(tx, schedule.learning_rate, clip)


def _params(file: File, kind: str) -> dict[str, Any] | None:
    """Returns an optimizer's parameters completed by DeepSpeed's defaults; None if the optimizer is
    not known or a parameter is out of range."""
    name = kind.lower()
    table = OPTIMIZERS.get(name)
    if table is None:
        why = _ABSENT.get(name)
        why = why or f"is not one of {', '.join(OPTIMIZERS)}; {_INSTEAD} any optax transformation"
        if name not in _ABSENT and nearest(name, [*OPTIMIZERS]).startswith("did"):
            why = f"is not an optimizer; {nearest(name, [*OPTIMIZERS])}"
        file.notes.refuse("optimizer.type", kind, why)
        return None
    given = dict(file.optional("optimizer.params") or {})
    limit = given.pop("max_grad_norm", None)
    if limit is not None:
        file.notes.refuse(
            "optimizer.params.max_grad_norm", limit, f'{_GROUPS}"gradient_clipping": {limit}'
        )
    found = check(given, table, file.notes, "optimizer.params.")
    values = {key: entry.default for key, entry in table.items() if isinstance(entry, Key)}
    for path, value in found.items():
        values[path.rpartition(".")[2]] = value
    if name == "muon":
        values |= _rates_of_muon(values)
    return values if _are_in_range(file, values) else None


def _rates_of_muon(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns Muon's learning rates with DeepSpeed's defaults: {"lr": rate of matrices, "adam_lr":
    rate of other parameters}."""
    own = [("lr", "muon_lr", 0.02), ("adam_lr", "adam_lr", 3e-4)]
    pick = lambda *rates: next(rate for rate in rates if rate is not None)  # noqa: E731
    return {to: pick(values[name], values["lr"], default) for to, name, default in own}


def _are_in_range(file: File, values: Mapping[str, Any]) -> bool:
    """Returns True if an optimizer's parameters are in range; notes the parameters that are not."""
    betas = values.get("betas", (0.9, 0.999))
    two = len(betas) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas)
    right = {
        "betas": (two, "is not two numbers in [0, 1), such as [0.9, 0.999]"),
        "lr": (values["lr"] >= 0, "must be at least 0"),
        "adam_lr": (values.get("adam_lr", 0) >= 0, "must be at least 0"),
        "ns_steps": (values.get("ns_steps", 5) >= 1, "must be at least 1; 5 is usual"),
        "weight_decay": (values["weight_decay"] >= 0, "must be at least 0"),
        "eps": (values.get("eps", 1) > 0, "must be above 0; 1e-8 is usual"),
        "freeze_step": (values.get("freeze_step", 1) >= 1, "must be at least 1"),
        "momentum": (0 <= values.get("momentum", 0) < 1, "must be in [0, 1)"),
    }
    for name, (holds, limit) in right.items():
        if not holds:
            file.notes.refuse(f"optimizer.params.{name}", values[name], limit)
    return all(holds for holds, _ in right.values())


def _schedule(file: File, learning_rate: float) -> DeepSpeedSchedule | None:
    kind = file.optional("scheduler.type")
    if kind is None:
        if file.has("scheduler.params"):
            file.notes.refuse("scheduler.params", "", "needs scheduler.type")
        return None
    params = file.optional("scheduler.params") or {}
    for name, value in params.items():
        file.notes.say(f"scheduler.params.{name}", value, "honoured", "as in DeepSpeed's formula")
    try:
        built = build_deepspeed_schedule(kind, params, learning_rate=learning_rate)
    except ConfigError as error:
        key = ".".join(("scheduler", *(() if error.key == ("type",) else ("params",)), *error.key))
        file.notes.refuse(
            key, params.get(error.key[-1], kind) if error.key else kind, error.message
        )
        return None
    for note in built.notes:
        # A default that is not what its name suggests, and is hard to notice.
        unexpected = note.startswith("warmup_type is log") and "warmup_type" not in params
        said = file.notes.warnings if unexpected else file.notes.reasons
        said.append(f"scheduler {kind}: {note}")
    return built


def _build(
    file: File,
    name: str,
    params: Mapping[str, Any],
    schedule: DeepSpeedSchedule | None,
    clip: float,
) -> Update:
    rate = as_schedule(params["lr"] if schedule is None else schedule.learning_rate)
    b1, b2 = params.get("betas", (0.9, 0.999))
    if schedule is not None and name != "sgd":
        b1, b2 = schedule.b1 or b1, schedule.b2 or b2
    decay, momentum = params["weight_decay"], params.get("momentum") or None
    common = {"weight_decay": decay, "mask": None, "clip_norm": clip or None}
    tx: optax.GradientTransformation
    if name == "sgd":
        if schedule is not None and schedule.b1 is not None:
            file.notes.warnings.append("cycle_momentum is off, as in DeepSpeed: SGD has no betas")
        tx = sgd(rate, momentum=momentum, nesterov=params["nesterov"], **common)
    elif name == "muon":
        tx = _muon(file, params, rate, schedule, clip)
    elif name == "lion":
        tx = lion(rate, b1=b1, b2=b2, **common)
    elif name == "onebitadam":
        numbers = {each: params[each] for each in ("eps", "freeze_step")}
        tx = one_bit_adam(rate, b1=b1, b2=b2, bias_correction=False, **numbers, **common)
    elif name == "lamb":
        names = ("eps", "min_coeff", "max_coeff", "eps_inside_sqrt", "bias_correction")
        numbers = {each: params[each] for each in names}
        lamb = bounded_lamb(rate, b1=b1, b2=b2, weight_decay=decay, **numbers)
        tx = _clipped(lamb, clip)
    elif name == "adam" and not params["adam_w_mode"] and decay:
        key = "optimizer.params.adam_w_mode"
        file.notes.change(key, "honoured", "false: weight decay is added to the gradient (L2)")
        adam = plain_adamw(rate, b1=b1, b2=b2, weight_decay=0.0, **_corrections(params))
        tx = _clipped(optax.chain(optax.add_decayed_weights(decay), adam), clip)
    elif not params["bias_correction"]:
        adam = plain_adamw(rate, b1=b1, b2=b2, weight_decay=decay, **_corrections(params))
        tx = _clipped(adam, clip)
    else:
        if name == "adam" and params["adam_w_mode"]:
            why = "AdamW: in DeepSpeed Adam means AdamW unless adam_w_mode is false"
            file.notes.change("optimizer.type", "honoured", why)
        tx = adamw(rate, b1=b1, b2=b2, eps=params["eps"], **common)
    return Update(tx, rate, clip)


def _muon(
    file: File,
    params: Mapping[str, Any],
    rate: Schedule,
    schedule: DeepSpeedSchedule | None,
    clip: float,
) -> optax.GradientTransformation:
    """Builds Muon for matrices as in `deepspeed/runtime/zero/muon/original_muon.py`, with Adam for
    all other parameters."""
    others = params["adam_lr"]
    if schedule is not None:
        if schedule.b1 is not None:
            raise ValueError("Muon's betas are numbers; set scheduler.params.cycle_momentum: false")
        built = build_deepspeed_schedule(
            file["scheduler.type"], file.optional("scheduler.params") or {}, learning_rate=others
        )
        others = built.learning_rate
    b1, b2 = params["betas"]
    file.notes.change("optimizer.type", "honoured", "its matrix products are computed in float32")
    return muon(
        rate,
        adam_learning_rate=others,
        beta=params["momentum"],
        ns_steps=params["ns_steps"],
        weight_decay=params["weight_decay"],
        adam_b1=b1,
        adam_b2=b2,
        adam_weight_decay=params["weight_decay"],
        eps=params["eps"],
        ns_eps=1e-7,
        bias_correction=False,
        adam_nesterov=False,
        dimensions=matrices_by_shape,
        clip_norm=clip or None,
    )


def _corrections(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in ("eps", "bias_correction")}


def _clipped(tx: optax.GradientTransformation, clip: float) -> optax.GradientTransformation:
    if clip and isinstance(tx, Optimizer):
        return tx.with_clip_norm(clip)
    return optax.chain(clip_by_global_norm(clip), tx) if clip else tx
