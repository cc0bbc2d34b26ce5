"""Replaces "auto" values in a ds_config by the rules of Hugging Face's integration.

The rules are those of `transformers/integrations/deepspeed.py` (version 5): "auto" becomes the
caller's value, or the default of `TrainingArguments` if the caller sets none. A value in the file
that is neither "auto" nor equal to the caller's value is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from zerojax.config import OptimizerConfig
from zerojax.deepspeed_config.key_schema import AUTO, KeyNotes
from zerojax.deepspeed_config.translation import CallerValues
from zerojax.optim.precision import DTYPES, Precision

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIPPING = 5e-5, (0.9, 0.999), 1e-8, 0.0, 1.0
"""Defaults of `TrainingArguments` in the package transformers."""


class Auto:
    """Replaces the "auto" values of a ds_config, and refuses contradictions with the caller's
    values.

    Args:
      values: content of the ds_config; it is copied.
      given: values that the caller passed.
      notes: collects reasons and refusals.
    """

    def __init__(self, values: Mapping[str, Any], given: CallerValues, notes: KeyNotes):
        self.values: dict[str, Any] = copy.deepcopy(dict(values))
        self._given, self._notes = given, notes

    def fill(self) -> dict[str, Any]:
        """Returns the ds_config with "auto" replaced where Hugging Face's rules give a value. Batch
        sizes, and keys without such a rule, keep "auto"."""
        self._precision()
        self._optimizer()
        self._scheduler()
        self._sizes()
        if self._find("pipeline.stages") == AUTO:
            self._set(
                "pipeline.stages",
                1,
                "one stage, because the file does not describe the model's layers",
            )
        return self.values

    def _find(self, path: str) -> Any:
        node: Any = self.values
        for name in path.split("."):
            if not isinstance(node, Mapping):
                return None
            node = node.get(name)
        return node

    def _set(self, path: str, value: object, why: str) -> None:
        *parents, name = path.split(".")
        node = self.values
        for parent in parents:
            node = node[parent]
        node[name] = value
        self._notes.reasons.append(f'{path}={value} for "auto": {why}')

    def _settle(self, path: str, wanted: object, default: object, keyword: str) -> None:
        """Replaces "auto" at a key by the caller's value or a default; refuses another value that
        differs from the caller's.

        Args:
          path: path of the key.
          wanted: the caller's value; None if the caller sets none.
          default: value used if `wanted` is None.
          keyword: name of the caller's keyword, for messages.
        """
        found = self._find(path)
        if found == AUTO:
            why = "Hugging Face's default" if wanted is None else f"from {keyword}"
            self._set(path, default if wanted is None else wanted, why)
        elif found is not None and wanted is not None and not _equal(found, wanted):
            self._notes.refuse(
                path,
                found,
                f"differs from {wanted}, the value of the call ({keyword}); set the "
                "value in one place: the file may "
                'have "auto"',
            )

    def _precision(self) -> None:
        wanted = compute_name(self._given.precision)
        for name in ("fp16", "bf16"):
            section = name
            if name == "bf16" and "bf16" not in self.values:
                section = "bfloat16"
            enabled = None if wanted is None else wanted == name
            path = f"{section}.enabled"
            is_elsewhere = wanted in ("fp16", "bf16") and wanted not in self.values
            if is_elsewhere and not enabled and self._find(path) == AUTO:
                # Setting it to false would select fp32.
                self._remove(path)
                self._notes.reasons.append(f'{path} is "auto": precision={wanted!r} decides it')
            else:
                self._settle(path, enabled, False, f"precision={wanted!r}")

    def _optimizer(self) -> None:
        config = self._given.optimizer
        config = config if isinstance(config, OptimizerConfig) else None
        params = "optimizer.params"

        def settle(path: str, name: str, default: object) -> None:
            wanted = None if config is None else getattr(config, name)
            self._settle(path, wanted, default, f"optimizer.{name}")

        settle(f"{params}.lr", "learning_rate", LEARNING_RATE)
        betas = None if config is None else [config.beta1, config.beta2]
        self._settle(f"{params}.betas", betas, [*BETAS], "optimizer.beta1 and beta2")
        settle(f"{params}.eps", "eps", EPS)
        settle(f"{params}.weight_decay", "weight_decay", WEIGHT_DECAY)
        clip = None if config is None else config.clip_norm or 0.0
        self._settle("gradient_clipping", clip, CLIPPING, "optimizer.clip_norm")

    def _scheduler(self) -> None:
        params, config = "scheduler.params", self._given.optimizer
        if self._find(f"{params}.warmup_min_lr") == AUTO:
            self._set(f"{params}.warmup_min_lr", 0, "Hugging Face's rule")
        if self._find(f"{params}.warmup_max_lr") == AUTO:
            rate = self._find("optimizer.params.lr")
            rate = LEARNING_RATE if rate is None else rate
            self._set(f"{params}.warmup_max_lr", rate, "the optimizer's lr")
        warmup = config.warmup_steps if isinstance(config, OptimizerConfig) else None
        warmup = None if warmup is None else max(1, warmup)
        self._settle(f"{params}.warmup_num_steps", warmup, 1, "optimizer.warmup_steps")
        steps = self._given.steps
        total = steps or self._given.default_steps
        if self._find(f"{params}.total_num_steps") == AUTO and total is None:
            self._notes.refuse(
                f"{params}.total_num_steps",
                AUTO,
                "is the length of the run, which is not known; pass steps=N, or write the number",
            )
            self._remove(f"{params}.total_num_steps")
        elif self._find(f"{params}.total_num_steps") == AUTO and steps is None:
            self._set(f"{params}.total_num_steps", total, "the default for batches without end")
        written = self._find(f"{params}.total_num_steps")
        if isinstance(written, int) and steps is not None and steps < written:
            self._notes.reasons.append(
                f"{params}.total_num_steps={written} is the length of the schedule; "
                f"this call runs steps={steps}"
            )
        else:
            self._settle(f"{params}.total_num_steps", steps, None, "steps")

    def _sizes(self) -> None:
        zero, hidden = "zero_optimization", self._given.hidden_size
        rules = {
            "reduce_bucket_size": (lambda width: width * width, "hidden_size^2"),
            "stage3_prefetch_bucket_size": (
                lambda width: int(0.9 * width * width),
                "0.9 x hidden_size^2",
            ),
            "stage3_param_persistence_threshold": (lambda width: 10 * width, "10 x hidden_size"),
        }
        for name, (size, formula) in rules.items():
            path = f"{zero}.{name}"
            if self._find(path) != AUTO:
                continue
            if name.startswith("stage3") and self._find(f"{zero}.stage") != 3:
                self._remove(path)
            elif hidden is None:
                self._notes.refuse(
                    path,
                    AUTO,
                    f"is computed as {formula} from the model's config.hidden_size or "
                    "config.embed_dim, which is not known; write the number, or give the width to "
                    "`zerojax deepspeed explain --hidden-size N`",
                )
                self._remove(path)
            else:
                self._set(path, size(hidden), f"{formula}, with {hidden}")

    def _remove(self, path: str) -> None:
        parent, _, name = path.rpartition(".")
        del self._find(parent)[name]


def compute_name(precision: Precision | str | None) -> str | None:
    """Returns "fp32", "bf16" or "fp16" for a precision; returns other text and None unchanged."""
    if precision is None or isinstance(precision, str):
        return precision
    names = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}
    return names.get(precision.compute_dtype, precision.compute_dtype.name)


def _equal(found: Any, wanted: Any) -> bool:
    """Returns True if a value of the ds_config equals the caller's value; numbers may be written in
    any form."""
    if isinstance(wanted, (list, tuple)):
        same_kind = isinstance(found, (list, tuple)) and len(found) == len(wanted)
        return same_kind and all(map(_equal, found, wanted))
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    try:
        return float(found) == float(wanted)
    except (TypeError, ValueError):
        return found == wanted
