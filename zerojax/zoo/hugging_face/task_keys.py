"""Tasks in config.json: the class in "architectures", names of labels, problem, id of padding.

Sources: `PreTrainedConfig` and the classes `...ForSequenceClassification`,
`...ForTokenClassification`, `...ForQuestionAnswering` of transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zerojax.config.display import quoted
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.task_heads import PROBLEMS, TaskConfig, TaskKind

SUFFIXES: Mapping[TaskKind, str] = {
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
}
"""{kind of a task: end of the names of its classes in transformers}."""
HEADS = (r"^(score|classifier|qa_outputs|lm_head|cls)\.",)
"""Regular expressions for tensors of heads."""
_OTHER_HEAD = re.compile(
    r"For(Sequence|Token|Image|Audio)\w*Classification$|For\w*QuestionAnswering$|For\w*Prediction$"
    r"|ForMultipleChoice$|DoubleHeadsModel$|RewardModel$|ForValueHead$"
)
# Classes of transformers have these ids if config.json has none; others have no padding.
_PAD_TOKENS = {
    "gemma": 0,
    "gemma2": 0,
    "gemma3_text": 0,
    "bert": 0,
    "phi3": 32000,
    "smollm3": 128004,
    "olmo": 1,
    "olmo2": 1,
    "olmo3": 1,
}
_NUM_LABELS = "num_labels"


def class_in(config: Mapping[str, Any], tasks: Mapping[str, TaskKind]) -> str | None:
    """Returns the class in "architectures" that has a task, or None.

    Args:
      config: content of config.json.
      tasks: {class of transformers: kind of its task}.
    """
    names = config.get("architectures")
    names = names if isinstance(names, list | tuple) else []
    return next((name for name in names if isinstance(name, str) and name in tasks), None)


def check_head(
    config: ConfigReading, known: tuple[str, ...], tasks: Mapping[str, TaskKind]
) -> None:
    """Checks that no class in "architectures" has a head that is not supported.

    Args:
      config: config.json.
      known: supported classes without a task.
      tasks: {supported class of transformers: kind of its task}.

    Raises:
      UnsupportedError: the message has the classes and the remedy.
    """
    names = [str(name) for name in config.get("architectures") or ()]
    others = [name for name in names if _OTHER_HEAD.search(name)]
    if not others or {*known, *tasks} & set(names):
        return
    raise UnsupportedError(
        f"{config.where}: architectures={quoted(names)} has a head that is not supported; use one "
        f"of {', '.join((*known, *tasks))}. {new_head(tasks)}"
    )


def new_head(tasks: Mapping[str, TaskKind]) -> str:
    """Returns the sentence that says how to use a folder's layers without its head."""
    if not tasks:
        return "Save it as a supported class with transformers"
    kind = next(iter(tasks.values()))
    return (
        "To train a new head on its layers, pass "
        f"task=zerojax.zoo.TaskConfig(kind={kind!r}, labels=...) to from_hugging_face"
    )


def read_task(config: ConfigReading, tasks: Mapping[str, TaskKind]) -> TaskConfig | None:
    """Reads the task of the class in "architectures"; None if the class has none.

    Args:
      config: config.json; only for a class with a task are its keys read.
      tasks: {class of transformers: kind of its task}.

    Raises:
      UnsupportedError: labels or problem have impossible values.
    """
    name = class_in(config.values, tasks)
    if name is None:
        return None
    labels = _labels(config)
    kind, problem = tasks[name], config.get("problem_type")
    config.asked.update(("label2id", "architectures", "_num_labels"))
    if kind != "sequence_classification":
        problem = None  # transformers reads it for classes of texts only
    elif problem is None:
        problem = "regression" if len(labels) == 1 else PROBLEMS[0]
    elif problem not in PROBLEMS:
        raise UnsupportedError(
            f"{config.where}: problem_type={quoted(problem)} is unknown; use one of "
            f"{', '.join(PROBLEMS)}"
        )
    try:
        return TaskConfig(
            kind=kind,
            labels=labels,
            problem=problem or PROBLEMS[0],
            pad_token=read_pad_token(config),
        )
    except ValueError as error:
        raise UnsupportedError(f"{config.where}: id2label, problem_type: {error}") from error


def read_pad_token(config: ConfigReading) -> int | None:
    """Reads the id of padding; if the key is missing, the default of the model's class.

    Raises:
      UnsupportedError: the id is no whole number, or negative.
    """
    value = config.get("pad_token_id", _PAD_TOKENS.get(config.values.get("model_type", "")))
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise UnsupportedError(
        f"{config.where}: pad_token_id={quoted(value)} is not an id of a token; use a whole number "
        "of at least 0, or null for no padding"
    )


def _labels(config: ConfigReading) -> tuple[str, ...]:
    """Reads names of labels: those of id2label, or else `num_labels` (default 2) numbered ones."""
    named, count = config.get("id2label"), config.get(_NUM_LABELS)
    if named is None:
        count = 2 if count is None else count
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 2**20:
            raise UnsupportedError(
                f"{config.where}: {_NUM_LABELS}={quoted(count)} is not a number of labels; use a "
                "whole number of at least 1"
            )
        return tuple(f"LABEL_{number}" for number in range(count))
    names = {str(key): value for key, value in named.items()} if isinstance(named, Mapping) else {}
    numbers = [str(number) for number in range(len(names))]
    if not names or set(names) != set(numbers):
        raise UnsupportedError(
            f"{config.where}: id2label={quoted(named)} must name the labels 0, 1, ...; write "
            '{"0": "LABEL_0", "1": "LABEL_1"}'
        )
    return tuple(str(names[number]) for number in numbers)


def write_task(task: TaskConfig | None, tasks: Mapping[str, TaskKind]) -> dict[str, Any]:
    """Builds the keys of config.json for a task; {} for none.

    Args:
      task: the task.
      tasks: {class of transformers: kind of its task}.

    Raises:
      UnsupportedError: transformers has no class of the model for this task.
    """
    if task is None:
        return {}
    problem = {"problem_type": task.problem} if task.kind == "sequence_classification" else {}
    return {
        "architectures": [class_of(task.kind, tasks)],
        "id2label": {str(number): label for number, label in enumerate(task.labels)},
        "label2id": {label: number for number, label in enumerate(task.labels)},
        "pad_token_id": task.pad_token,
        **problem,
    }


def class_of(kind: TaskKind, tasks: Mapping[str, TaskKind]) -> str:
    """Returns the class of transformers for a kind of task.

    Raises:
      UnsupportedError: transformers has no class of the model for this task.
    """
    for name, known in tasks.items():
        if known == kind:
            return name
    listed = ", ".join(dict.fromkeys(tasks.values())) or "no task; use task=None"
    raise UnsupportedError(
        f"task kind={kind!r} has no class for this model_type; supported: {listed}"
    )
