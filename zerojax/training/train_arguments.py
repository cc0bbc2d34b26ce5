"""Holds the arguments of `zerojax.train` in a frozen object, and checks their types and limits.

Does not read batches or devices. `LoopSettings` has the settings that the training loop needs.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

from zerojax.config import CheckpointConfig, LogConfig, WatchConfig
from zerojax.config.checks import MAX_SIZE, check_kind, check_whole_number
from zerojax.config.features import FEATURES, Features
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.run import OptimizerConfig
from zerojax.tracing.protocol import Loss, ModelLike


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `train`, under the same names.

    Attributes:
      model: model that the user passed; later a `tracing.Model`.
      features: settings of optional features, which `train` takes as a keyword each.
      reasons: one sentence for each default that was chosen.
    """

    model: ModelLike
    mesh_config: Any
    batches: Any
    data: Any
    loss: Loss | None
    optimizer: optax.GradientTransformation | OptimizerConfig | None
    precision: Any
    reduce_dtype: str | None
    accumulate_dtype: str | None
    num_microbatches: int | None
    deterministic: str | None
    steps: int | None
    global_batch_size: int | None
    seq_len: int | None
    freeze: Any
    features: Features
    checkpoint: Any
    run_dir: str | Path | None
    log: LogConfig | None
    watch: WatchConfig | None
    validation: Any
    eval_every: int | None
    eval_batches: int | None
    callbacks: Any
    seed: int
    reasons: tuple[str, ...] = ()

    @classmethod
    def of_call(cls, given: Mapping[str, Any]) -> Arguments:
        """Returns the arguments of a call of `train`, {keyword: value}.

        Raises:
          TypeError: settings of a feature have another type.
        """
        keywords = {kind.keyword for kind in FEATURES}
        features = Features.of(**{name: given[name] for name in given if name in keywords})
        others = {name: given[name] for name in given if name not in keywords}
        return cls(**others, features=features)


def checked(arguments: Arguments) -> Arguments:
    """Returns the arguments after checking types and ranges, with the callbacks as a tuple.

    Raises:
      ValueError, TypeError: an argument has a wrong value or type; the message names it.
    """
    limits = {
        "steps": (0, None),
        "num_microbatches": (1, MAX_SIZE),
        "global_batch_size": (1, MAX_SIZE),
        "seq_len": (1, MAX_SIZE),
        "eval_every": (1, None),
        "eval_batches": (1, None),
    }
    for name, (least, most) in limits.items():
        check_whole_number(name, getattr(arguments, name), least, most)
    wanted = "a function loss(model, batch) -> scalar | (sum, weight)"
    check_kind("loss", arguments.loss, Callable, wanted)
    callbacks = _as_callbacks(arguments.callbacks)
    check_kind("seed", arguments.seed, numbers.Integral, "a whole number")
    check_kind("log", arguments.log, LogConfig, "a zerojax.LogConfig")
    check_kind("watch", arguments.watch, WatchConfig, "a zerojax.WatchConfig")
    kinds = CheckpointConfig, str, os.PathLike
    wanted = "a folder, or a zerojax.CheckpointConfig"
    check_kind("checkpoint", arguments.checkpoint, kinds, wanted)
    return dataclasses.replace(arguments, callbacks=callbacks)


_METHODS = {
    "on_start": "trainer",
    "on_evaluation": "trainer, metrics",
    "state": "",
    "load_state": "state",
}
"""{optional method of a callback: names of the arguments with which it is called}."""


def _as_callbacks(callbacks: Any) -> tuple[Callable[..., Any], ...]:
    check_kind("callbacks", callbacks, Iterable, "a list of functions (trainer, metrics)")
    callbacks = tuple(callbacks)
    for number, callback in enumerate(callbacks):
        check_kind(f"callbacks[{number}]", callback, Callable, "a function (trainer, metrics)")
        _check_call(f"callbacks[{number}]", callback, "trainer, metrics")
        for name, taken in _METHODS.items():
            if callable(method := getattr(callback, name, None)):
                _check_call(f"callbacks[{number}].{name}", method, taken)
    return callbacks


def _check_call(name: str, function: Callable[..., Any], taken: str) -> None:
    """Raises TypeError if `function` cannot be called with the arguments in `taken`."""
    arguments = [None] * len(taken.split(", ") if taken else [])
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        made = f", or an instance, {function.__name__}(...)" if isinstance(function, type) else ""
        raise TypeError(
            f"{name} is called with ({taken}) and cannot be ({error}); pass a function "
            f"({taken}){made}"
        ) from None
    except ValueError:  # functions written in C may have no signature
        return


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings of the training loop: reports, evaluations, checkpoints and callbacks.

    Attributes:
      log_every: number of steps between reports.
      eval_every: number of steps between evaluations; None: evaluate only at the end.
      eval_batches: maximum number of batches per evaluation; None: all of a dataset, 8 of a text
        or a function.
      save_every: number of steps between checkpoints.
      save_on_exit: True: also save at the end and when interrupted.
      max_skipped: the run stops after this number of consecutive reports whose step was skipped
        because it was not finite.
      callbacks: functions called with `(trainer, metrics)` at every report; a function that returns
        True ends the run.
      resume_hint: sentence part that says how to resume an interrupted run.
    """

    log_every: int = 10
    eval_every: int | None = None
    eval_batches: int | None = None
    save_every: int = 500
    save_on_exit: bool = True
    max_skipped: int = 5
    callbacks: Sequence[Callable[[Any, dict[str, float]], Any]] = ()
    resume_hint: str = "call train again with the same checkpoint to resume"
