"""Trials of a sweep: their settings, and the steps that successive halving gives to each.

Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) trains all trials for a few steps
and drops the worse ones before it trains the others on. This module only computes settings and
numbers of steps. It trains nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from zerojax.config import ConfigError, RunConfig, SweepAxis, SweepConfig, to_dict
from zerojax.config.checks import MAX_SIZE, check_whole_number
from zerojax.config.features import FEATURES
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import load_dataclass, resolve_key, type_of_key
from zerojax.config.sweep_settings import MAX_TRIALS
from zerojax.optim.schedules import default_warmup

_ONE_LENGTH = "trials with other lengths of the run cannot be compared at equal steps"
_SAME_WORK = "trials would train on other numbers of tokens in the same steps"
_SAME_ROWS = "losses over other rows or tokens cannot be compared"
_NO_PART = "it changes nothing that is trained"
_FIXED = {
    "steps": _ONE_LENGTH,
    "global_batch_size": _SAME_WORK,
    **{kind.keyword: _SAME_WORK for kind in FEATURES if kind.changes_work},
    "elasticity": _SAME_WORK,
    "data": _SAME_ROWS,
    "eval_batches": _SAME_ROWS,
    "model.pretrained": f"{_SAME_ROWS} (the folder has a tokenizer of its own)",
    "model.config": f"{_SAME_ROWS} (the folder has a tokenizer of its own)",
    "eval_every": _NO_PART,
    "checkpoint": _NO_PART,
    "log": _NO_PART,
    "watch": _NO_PART,
    "expect": _NO_PART,
    "run_dir": _NO_PART,
    "cpu_devices": "it is the same for the whole process",
    "sweep": "a sweep cannot vary itself",
}
"""{setting or section: reason why trials cannot differ in it}."""
_MAY_DIFFER = ("data.shuffle_seed",)
"""Settings in these sections that trials may differ in."""


@dataclass(frozen=True, kw_only=True)
class SweepTrial:
    """One combination of settings.

    Attributes:
      number: number of the trial, from 0.
      values: {full key of a setting: value}.
      config: settings of the trial's run, with a run folder of its own.
    """

    number: int
    values: Mapping[str, Any]
    config: RunConfig

    @property
    def name(self) -> str:
        """Name of the trial and of its folder."""
        return f"{self.number:03d}"

    def describe(self) -> str:
        """Returns the settings of the trial as KEY=VALUE words."""
        return " ".join(f"{key}={value_text(value)}" for key, value in self.values.items())


@dataclass(frozen=True, kw_only=True)
class SweepRung:
    """A part of the sweep at whose end trials are ranked.

    Attributes:
      steps: number of steps of a trial's run at the end of the rung.
      trials: number of trials that train in the rung.
    """

    steps: int
    trials: int


def make_rungs(trials: int, steps: int, sweep: SweepConfig) -> tuple[SweepRung, ...]:
    """Returns the rungs of successive halving, first to last.

    The last rung ends at `steps`. Each earlier rung has 1 / eta of the steps of the next, and eta
    times as many trials. There are as many rungs as leave one trial to the last, but no more than
    `min_steps` allows.

    Args:
      trials: number of trials.
      steps: number of steps of a whole run.
      sweep: settings; `eta` and `min_steps` are used.

    Raises:
      ConfigError: `min_steps` is above `steps`.
    """
    check_whole_number("trials", trials, 1, MAX_TRIALS)
    check_whole_number("steps", steps, 1, MAX_SIZE)
    if sweep.min_steps > steps:
        raise ConfigError(
            f"{sweep.min_steps} is above steps ({steps}); lower it or train longer",
            ("sweep", "min_steps"),
        )
    rungs = [SweepRung(steps=steps, trials=trials)]
    for number in itertools.count(1):
        kept, first = trials // sweep.eta**number, round(steps / sweep.eta**number)
        if kept < 1 or first < sweep.min_steps or first >= rungs[0].steps:
            return tuple(rungs)
        later = [dataclasses.replace(r, trials=r.trials // sweep.eta) for r in rungs]
        rungs = [SweepRung(steps=first, trials=trials), *later]
    raise AssertionError("the loop ends by its return")


def steps_to_train(rungs: Sequence[SweepRung]) -> int:
    """Returns the number of steps of all trials together, each of which goes on from its last
    rung."""
    ends = (0, *(rung.steps for rung in rungs))
    return sum(
        rung.trials * (rung.steps - before) for rung, before in zip(rungs, ends, strict=False)
    )


def make_trials(config: RunConfig, folder: str) -> tuple[SweepTrial, ...]:
    """Returns the trials of a run file's `sweep` section, in the order of their numbers.

    Args:
      config: settings of the run, with axes.
      folder: folder of the sweep; each trial has a run folder in it.

    Raises:
      ConfigError: the axes are missing or invalid, a value of one is invalid, or trials would
        differ in something that makes their losses incomparable.
    """
    sweep = config.sweep
    if not sweep.axes:
        raise ConfigError(
            "there is nothing to vary; set for example "
            "axes: {optimizer.learning_rate: [1e-3, 3e-3]}",
            ("sweep", "axes"),
        )
    axes = {_full_key(key): axis for key, axis in sweep.axes}
    if len(axes) < len(sweep.axes):
        raise ConfigError("a setting has two axes; keep one of them", ("sweep", "axes"))
    _check_folders(config)
    plain = dataclasses.replace(config, sweep=SweepConfig())
    return tuple(
        _trial(plain, number, values, folder) for number, values in enumerate(_values(sweep, axes))
    )


def _full_key(text: str) -> str:
    """Returns the full key of an axis.

    Raises:
      ConfigError: the key is unknown or a section, or trials cannot differ in it.
    """
    try:
        key = resolve_key(RunConfig, text)
    except ConfigError as error:
        raise ConfigError(error.message, ("sweep", "axes", text)) from None
    name = ".".join(key)
    if dataclasses.is_dataclass(type_of_key(RunConfig, key)):
        reason = f"{name} is a section; write one of its settings, such as optimizer.learning_rate"
        raise ConfigError(reason, ("sweep", "axes", text))
    parents = [".".join(key[:length]) for length in range(1, len(key) + 1)]
    reason = next((_FIXED[parent] for parent in parents if parent in _FIXED), None)
    if reason is not None and name not in _MAY_DIFFER:
        raise ConfigError(
            f"trials cannot differ in {name}: {reason}; leave this axis out, and make one sweep "
            "for each value",
            ("sweep", "axes", text),
        )
    return name


def _check_folders(config: RunConfig) -> None:
    """Raises if the trials could not keep their checkpoints apart, or would not have them."""
    if config.checkpoint.path is not None:
        raise ConfigError(
            f"{config.checkpoint.path!r} would hold the checkpoints of all trials; leave it out",
            ("checkpoint", "path"),
        )
    if not config.checkpoint.save_on_exit:
        raise ConfigError(
            "a sweep continues trials from the checkpoint at the end of a rung; set it to true",
            ("checkpoint", "save_on_exit"),
        )


def _values(sweep: SweepConfig, axes: Mapping[str, SweepAxis]) -> list[dict[str, Any]]:
    """Returns {full key: value} of each trial.

    Raises:
      ConfigError: `trials` is not set, although an axis is a range or the lists have more than
        `MAX_TRIALS` combinations; or a range is for a setting that is not a number.
    """
    ranges = [key for key, axis in axes.items() if not axis.values]
    rng = np.random.default_rng(sweep.seed)
    if ranges:
        if sweep.trials is None:
            raise ConfigError(
                f"a number is needed, since {ranges[0]} is a range; set for example 27",
                ("sweep", "trials"),
            )
        return [
            {key: _draw(key, axis, rng) for key, axis in axes.items()} for _ in range(sweep.trials)
        ]
    total = math.prod(len(axis.values) for axis in axes.values())
    if sweep.trials is None and total > MAX_TRIALS:
        raise ConfigError(
            f"the lists have {total:,} combinations; set how many of them to try, such as 27",
            ("sweep", "trials"),
        )
    chosen: Sequence[int] = range(total)
    if sweep.trials is not None and sweep.trials < total:
        chosen = sorted(int(x) for x in rng.choice(total, sweep.trials, replace=False))
    return [_combination(axes, index) for index in chosen]


def _combination(axes: Mapping[str, SweepAxis], index: int) -> dict[str, Any]:
    """Returns a combination of the lists; the values of the last axis change first."""
    values = {}
    for key, axis in reversed([*axes.items()]):
        index, place = divmod(index, len(axis.values))
        values[key] = axis.values[place]
    return {key: values[key] for key in axes}


def _draw(key: str, axis: SweepAxis, rng: np.random.Generator) -> Any:
    """Draws a value: a number of four digits from a range, rounded for an integer setting, or an
    item of a list."""
    if axis.values:
        return axis.values[int(rng.integers(len(axis.values)))]
    hint = type_of_key(RunConfig, tuple(key.split(".")))
    kinds = {hint, *get_args(hint)}
    if not kinds & {int, float}:
        raise ConfigError(
            "this setting is not a number, so it has no range; give a list of values",
            ("sweep", "axes", key),
        )
    low, high = float(axis.low or 0), float(axis.high or 0)
    if axis.scale == "log":
        number = math.exp(rng.uniform(math.log(low), math.log(high)))
    else:
        number = rng.uniform(low, high)
    # Rounding can leave the range.
    number = min(max(float(f"{number:.4g}"), low), high)
    return number if float in kinds else round(number)


def describe_warmup(trials: Sequence[SweepTrial], rungs: Sequence[SweepRung]) -> str | None:
    """Returns a sentence if the longest warm-up of the trials reaches the end of the first rung,
    else None. Warm-ups in tokens are not looked at."""
    end, longest = rungs[0].steps, 0
    for trial in trials:
        optimizer = trial.config.optimizer
        if optimizer.warmup_tokens is None:
            steps = optimizer.warmup_steps
            longest = max(longest, default_warmup(trial.config.steps) if steps is None else steps)
    if longest < end:
        return None
    return (
        f"the first rung ends at step {end}, within a warm-up of {longest} steps, so it compares "
        f"rates that were not reached yet; set sweep.min_steps above {longest}"
    )


def value_text(value: object) -> str:
    """Returns a value as the text that KEY=VALUE words have."""
    return value if isinstance(value, str) else json.dumps(value)


def _trial(config: RunConfig, number: int, values: Mapping[str, Any], folder: str) -> SweepTrial:
    words = [f"{key}={value_text(value)}" for key, value in values.items()]
    try:
        changed = load_dataclass(RunConfig, None, words, base=config)
    except ConfigError as error:
        what = f"trial {number:03d} ({' '.join(words)}): {error.message}"
        raise ConfigError(what, error.key) from None
    trial = SweepTrial(number=number, values=values, config=changed)
    own = dataclasses.replace(changed, run_dir=f"{folder}/{trial.name}")
    return dataclasses.replace(trial, config=own)


def settings_of_sweep(config: RunConfig, trials: Sequence[SweepTrial]) -> dict[str, Any]:
    """Returns the settings that decide the ranking, and the values of each trial, as JSON values: a
    sweep goes on only with equal ones."""
    kept = to_dict(config)
    for name in ("run_dir", "checkpoint", "log", "watch", "expect"):
        del kept[name]
    kept["drawn"] = {trial.name: trial.values for trial in trials}
    # In the form that the file has when it is read, for example with lists instead of tuples.
    return json.loads(json.dumps(kept))
