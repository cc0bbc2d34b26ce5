"""adapter_config.json of PEFT: which adapters a folder has, and their scales; refuses what is not
LoRA.

Source: `LoraConfig` of peft 0.21. Knows settings; never tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.folder import ADAPTER_CONFIG, read_json
from zerojax.zoo.task_heads import TaskKind

TASK_TYPES: Mapping[str, TaskKind] = {
    "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification",
    "QUESTION_ANS": "question_answering",
}
"""{task_type of PEFT: kind of a task}."""
_OF_CLASSES: Mapping[str, str] = {
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
}
# Settings that say which adapters there are, which the tensors say too; settings of initial values
# and of the run; fan_in_fan_out, which follows from the base model.
_NO_EFFECT = frozenset(
    (
        *("auto_mapping", "peft_version", "revision", "inference_mode", "megatron_core"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "fan_in_fan_out", "ensure_weight_tying", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    )
)
_READ = frozenset(
    (
        *("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout"),
        *("rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"),
    )
)
# These ways to draw A and B leave the weights of the base model as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Content of an adapter_config.json of LoRA.

    Attributes:
      path: folder of the adapters.
      base: folder or Hub name of the base model; None if the file states none.
      task_type: PEFT's name of the task, such as "CAUSAL_LM"; None if the file states none.
      rank, alpha: rank and numerator of the scale of modules without a pattern.
      ranks, alphas: {regular expression of the end of a module's name: its rank or alpha}.
      dropout: dropout probability of an adapter's input.
      by_root: whether scales are alpha / sqrt(rank) (arXiv:2312.03732).
    """

    path: Path
    base: str | None
    task_type: str | None
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    dropout: float
    by_root: bool

    def rank_of(self, module: str) -> int:
        """Returns the rank of the adapter of a module of the base model."""
        return _of_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of the adapter's product, alpha / rank or alpha / sqrt(rank)."""
        rank = self.rank_of(module)
        return _of_pattern(self.alphas, module, self.alpha) / (rank**0.5 if self.by_root else rank)

    def merging(self) -> str:
        """Returns the clause that says how to merge the adapters with the package peft."""
        of_class = _OF_CLASSES.get(self.task_type or "", "AutoPeftModelForCausalLM")
        return (
            f"merge them into their base model with the package peft: {of_class}.from_pretrained("
            f"{str(self.path)!r}).merge_and_unload().save_pretrained(OTHER), and read OTHER"
        )


def read_settings(folder: Path) -> AdapterSettings:
    """Reads the adapter_config.json of a folder.

    Raises:
      UnsupportedError: the adapters are not LoRA, or a setting is not supported; the message has
        the key and the remedy.
      ValueError: the file is damaged.
    """
    values = read_json(folder / ADAPTER_CONFIG)
    base, task = values.get("base_model_name_or_path"), values.get("task_type")
    settings = AdapterSettings(
        path=folder,
        base=base if isinstance(base, str) and base else None,
        task_type=task if isinstance(task, str) else None,
        rank=values.get("r", 8),
        alpha=values.get("lora_alpha", 8),
        ranks=values.get("rank_pattern") or {},
        alphas=values.get("alpha_pattern") or {},
        dropout=values.get("lora_dropout") or 0.0,
        by_root=values.get("use_rslora") is True,
    )
    kind = values.get("peft_type")
    if kind != "LORA":
        raise _error(
            settings, f"peft_type={quoted(kind)} is not supported, only LORA; {settings.merging()}"
        )
    start = values.get("init_lora_weights", True)
    if not any(start is known or start == known for known in _PLAIN_STARTS):
        raise _error(
            settings,
            f"init_lora_weights={quoted(start)} changes the weights of the base model; "
            f"{settings.merging()}",
        )
    if values.get("bias", "none") not in _BIASES:
        raise _error(
            settings,
            f"bias={quoted(values['bias'])} is unknown; use one of {', '.join(_BIASES)}",
        )
    for key in sorted(set(values) - _READ - _NO_EFFECT):
        if values[key]:
            raise _error(
                settings,
                f"{quoted(key)[1:-1]}={quoted(values[key])} is not supported; {settings.merging()}",
            )
    _check_numbers(settings)
    return settings


def base_folder(settings: AdapterSettings, given: str | Path | None) -> Path:
    """Returns the folder of the base model.

    Args:
      settings: settings of the adapters.
      given: folder that replaces the one in adapter_config.json, or None.

    Raises:
      FileNotFoundError: it is not a folder of this machine.
    """
    name = settings.base if given is None else given
    if name is not None and user_path(name).is_dir():
        return user_path(name).absolute()
    said = f"base={str(given)!r}" if given is not None else f"base_model_name_or_path={name!r}"
    fetch = ""
    if name is not None and not Path(name).is_absolute() and len(Path(name).parts) == 2:
        fetch = f", fetched with `hf download {name} --local-dir {Path(name).name}`"
    raise FileNotFoundError(
        f"{settings.path / ADAPTER_CONFIG}: the base model is needed, but {said} is not a folder; "
        f"pass base=FOLDER to zerojax.from_hugging_face{fetch}, or write its path into "
        "base_model_name_or_path"
    )


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the whole end of a module's name."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default


def _check_numbers(settings: AdapterSettings) -> None:
    """Raises an UnsupportedError unless ranks are whole numbers and scales positive."""
    for key, pattern_key, least, default, patterns in (
        ("r", "rank_pattern", 1, settings.rank, settings.ranks),
        ("lora_alpha", "alpha_pattern", None, settings.alpha, settings.alphas),
    ):
        if not isinstance(patterns, Mapping):
            raise _error(settings, f"{pattern_key}={quoted(patterns)} is not an object")
        for name, value in ((key, default), *((pattern_key, x) for x in patterns.values())):
            kinds, limit = ((int,), "a whole number of at least 1")
            if least is None:
                kinds, limit = (int, float), "a number above 0"
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                raise _error(settings, f"{name}: {quoted(value)} is not {limit}; use one")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise _error(
                    settings, f"{pattern_key}: {quoted(pattern)} is no regular expression ({error})"
                ) from None
    rate = settings.dropout
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise _error(settings, f"lora_dropout={quoted(rate)} is not in [0, 1); use 0.0 for none")


def _error(settings: AdapterSettings, problem: str) -> UnsupportedError:
    return UnsupportedError(f"{settings.path / ADAPTER_CONFIG}: {problem}")
