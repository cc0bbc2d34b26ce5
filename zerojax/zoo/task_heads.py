"""Heads for tasks: classes of texts, classes of tokens, and answers in a text; with their losses.

A head is one projection of the hidden states. Losses are those of transformers 5.23, as sums and
weights. Knows arrays and labels; never files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.models.losses import mean_squared_error, next_token, weighted
from zerojax.tracing.index_limits import IndexLimit
from zerojax.zoo.layers import Projection

TaskKind = Literal["sequence_classification", "token_classification", "question_answering"]
Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
TASK_KINDS: tuple[TaskKind, ...] = (
    "sequence_classification",
    "token_classification",
    "question_answering",
)
PROBLEMS: tuple[Problem, ...] = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
IGNORED_LABEL = -100
"""Label of texts and tokens that the loss ignores, as in PyTorch."""
TASK_HEAD = "task_head"
"""First part of the names of a head's parameters."""
INIT_STDDEV = 0.02


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Task of a model with a head other than the one for tokens.

    Attributes:
      kind: "sequence_classification": classes, or numbers, of a whole text.
        "token_classification": a class for each token. "question_answering": first and last token
        of an answer.
      labels: names of the outputs (`id2label` of Hugging Face), at least one.
      problem: problem of a sequence classification, with the losses of transformers.
        "single_label_classification": one class for each text, cross-entropy.
        "multi_label_classification": each class is true or false, binary cross-entropy.
        "regression": numbers, squared error.
      pad_token: id of padding, for decoders, which classify a text by its last token that has
        another id. None: the last token of `attention_mask`, or else of the row.
    """

    kind: TaskKind = "sequence_classification"
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    problem: Problem = "single_label_classification"
    pad_token: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))
        for field, known in (("kind", TASK_KINDS), ("problem", PROBLEMS)):
            if getattr(self, field) not in known:
                value = quoted(getattr(self, field))
                raise ValueError(f"task {field}={value} is unknown; use one of {', '.join(known)}")
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ValueError(
                f"task labels={quoted(list(self.labels))} must be one or more names, each once; "
                "labels=('LABEL_0', 'LABEL_1') are the default"
            )
        if self.kind != "sequence_classification" and self.problem != PROBLEMS[0]:
            raise ValueError(
                f"task problem={self.problem!r} is only for kind='sequence_classification', not "
                f"{self.kind!r}; use problem={PROBLEMS[0]!r}"
            )
        if self.kind == "question_answering" and len(self.labels) != 2:
            raise ValueError(
                f"task labels={quoted(list(self.labels))}: kind='question_answering' has 2 "
                "outputs, first and last token of the answer; use 2 labels"
            )
        if self.problem == PROBLEMS[0] and len(self.labels) == 1:
            raise ValueError(
                f"task labels={quoted(list(self.labels))}: the only class always has probability "
                "1; use 2 labels, or problem='regression' for a number"
            )

    def num_parameters(self, width: int, *, use_bias: bool) -> int:
        """Returns the number of the head's elements, for hidden states of this width."""
        return len(self.labels) * (width + use_bias)


def numbered_task(kind: TaskKind, num_labels: int) -> TaskConfig:
    """Returns a task with the labels LABEL_0, LABEL_1, ...; classes of texts with one label are a
    regression, as in transformers."""
    labels = tuple(f"LABEL_{number}" for number in range(num_labels))
    is_number = num_labels == 1 and kind == "sequence_classification"
    return TaskConfig(kind=kind, labels=labels, problem="regression" if is_number else PROBLEMS[0])


def limit_of_labels(task: TaskConfig | None, batch: Mapping[str, Any]) -> IndexLimit | None:
    """Returns which labels of a batch are classes of the task; None if other values are valid, too.

    Labels may have any value where `weights` are 0, so of a batch with weights nothing is known.
    """
    labels = batch.get("labels")
    if task is None or labels is None or "weights" in batch:
        return None
    if task.kind == "question_answering" or task.problem != PROBLEMS[0]:
        return None
    window = (slice(None),) * len(labels.shape)
    return IndexLimit(
        low=0, high=len(task.labels), parameter="", window=window, ignored=IGNORED_LABEL
    )


def build_task_head(task: TaskConfig, width: int, *, use_bias: bool, rngs: nnx.Rngs) -> Projection:
    """Builds the projection `[embed, labels]`, drawn from N(0, 0.02^2), with biases of 0."""
    shapes = (width,), (len(task.labels),)
    return Projection(*shapes, stddev=INIT_STDDEV, use_bias=use_bias, rngs=rngs)


def last_tokens(
    tokens: jax.Array, task: TaskConfig, attention_mask: jax.Array | None = None
) -> jax.Array:
    """Returns int32 [batch]: the index of each text's last token, by which a decoder classifies it.

    Args:
      tokens: integers [batch, seq].
      task: the task; see `TaskConfig.pad_token`.
      attention_mask: [batch, seq], 0 for padding; used only without a `pad_token`, as in
        transformers, whose decoders find padding by its id.
    """
    if task.pad_token is not None:
        real = tokens != task.pad_token
    elif attention_mask is not None:
        real = attention_mask != 0
    else:
        real = jnp.ones(tokens.shape, bool)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.max(jnp.where(real, index, 0), axis=1)


def task_loss(logits: jax.Array, batch: Mapping[str, Any], task: TaskConfig) -> tuple[Any, ...]:
    """Computes the loss of a task in float32, as (sum, weight) or (sum, weight, metrics).

    Args:
      logits: [batch, labels] for texts; [batch, seq, labels] for tokens and answers.
      batch: dict with "labels": integers [batch] or [batch, seq], of which -100 is ignored; for
        several classes 0 or 1, [batch, labels]; for regression numbers [batch, labels], or [batch]
        if there is one label. For answers instead "start_positions" and "end_positions", integers
        [batch]: as in transformers, positions below 0 count as 0, and positions from seq on are
        ignored. Optional "weights", [batch], or [batch, seq] for tokens; weight 0 ignores.
      task: the task.

    Returns:
      (sum, weight), and for one class of many, metrics: "accuracy" as (sum, weight).

    Raises:
      ValueError: the batch has no labels, or labels have another shape.
      TypeError: labels are numbers where classes are needed.
    """
    if task.kind == "question_answering":
        return _answer_loss(logits, batch)
    labels, weights = _taken(batch, "labels"), batch.get("weights")
    if task.problem == "single_label_classification":
        return _class_loss(logits, labels, weights)
    if labels.ndim == 1 and len(task.labels) == 1:
        labels = labels[:, None]
    _check_shape("labels", labels, logits.shape, "[batch, labels]")
    weights = None if weights is None else weights.astype(jnp.float32)
    each = None if weights is None else jnp.broadcast_to(weights[:, None], logits.shape)
    logits, labels = logits.astype(jnp.float32), labels.astype(jnp.float32)
    if task.problem == "regression":
        total, weight = mean_squared_error(logits, labels, each)
    else:
        # -log sigmoid(x) if true, -log sigmoid(-x) if false.
        total, weight = weighted(jax.nn.softplus(logits) - labels * logits, each)
    return total / len(task.labels), weight / len(task.labels)


def _class_loss(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"batch['labels'] are {labels.dtype}, but must be integers, the numbers of classes; "
            "cast them with labels.astype('int32'), or use "
            "problem='multi_label_classification' or 'regression' of zerojax.zoo.TaskConfig"
        )
    dims = "[batch]" if logits.ndim == 2 else "[batch, seq]"
    _check_shape("labels", labels, logits.shape[:-1], dims)
    counted = (labels != IGNORED_LABEL).astype(jnp.float32)
    counted = counted if weights is None else counted * weights.astype(jnp.float32)
    total, weight = next_token(logits, labels, counted)
    right = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return total, weight, {"accuracy": (jnp.sum(right * counted), weight)}


def _answer_loss(logits: jax.Array, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Computes the mean of the losses of first and last token.

    If one of both is ignored in a text and the other is not, weights differ from those of
    transformers, which divides each by its own number of texts.
    """
    seq, weights = logits.shape[1], batch.get("weights")
    total, weight = jnp.float32(0), jnp.float32(0)
    for number, name in enumerate(("start_positions", "end_positions")):
        positions = _taken(batch, name)
        _check_shape(name, positions, logits.shape[:1], "[batch]")
        counted = (positions < seq).astype(jnp.float32)
        counted = counted if weights is None else counted * weights.astype(jnp.float32)
        # A negative position counts as 0, as in transformers.
        own = next_token(logits[:, :, number], jnp.maximum(positions, 0), counted)
        total, weight = total + own[0] / 2, weight + own[1] / 2
    return total, weight


def tokens_of(batch: Mapping[str, Any]) -> jax.Array:
    """Returns the tokens of a batch of texts, integers [batch, seq].

    Raises:
      ValueError: the batch has none; the message says what transformers' names are called here.
    """
    if "tokens" not in batch:
        raise ValueError(
            f"a batch of texts needs 'tokens', but has only {sorted(batch)}; zerojax calls "
            "transformers' input_ids 'tokens' and token_type_ids 'token_types'. "
            "zerojax.data.load_tokenizer(FOLDER).encode_texts(texts) returns 'tokens' and "
            "'attention_mask'"
        )
    return batch["tokens"]


def _taken(batch: Mapping[str, Any], name: str) -> jax.Array:
    if name not in batch:
        raise ValueError(
            f"a batch for this task needs {name!r}, but has only {sorted(batch)}; add it, or train "
            "the model without a task (task=None of its configuration)"
        )
    return jnp.asarray(batch[name])


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...], dims: str) -> None:
    if array.shape != shape:
        raise ValueError(
            f"batch[{name!r}] has shape {list(array.shape)}, but must be {dims} = {list(shape)}"
        )
