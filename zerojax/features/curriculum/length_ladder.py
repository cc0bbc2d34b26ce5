"""Decides which arrays of a batch a curriculum shortens; raises if shorter rows would change the
meaning of the loss.

This module reads shapes and the traced loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import ConfigError, CurriculumConfig
from zerojax.config.curriculum import MAX_RUNGS
from zerojax.config.tree_types import Batch
from zerojax.features.curriculum.length_check import LengthCheck
from zerojax.features.curriculum.row_lengths import WEIGHTS, shorten
from zerojax.features.several_sizes import Ladder
from zerojax.models import losses
from zerojax.placement.decisions import Decisions
from zerojax.tracing.expert_calls import find_rows

SEGMENTS = "segments"
LANGUAGE_MODEL_KEYS = ("tokens", "targets", WEIGHTS)
_KEYS = "name the arrays [rows, tokens, ...] to shorten: curriculum.keys=[...]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthLadder(Ladder):
    """Compiled row lengths of a run with a curriculum.

    Attributes:
      config: curriculum, with `max_length` resolved.
      seq_len: number of tokens of a full row.
      keys: names of the batch arrays that are shortened.
      adds_weights: whether an array "weights" is added to batches, because they have none.
    """

    kind = CurriculumConfig
    event = "sequence_length", "length"
    remedy = (
        "use a model and settings that support shorter rows, or other lengths (min_length, "
        "length_step)"
    )
    config: CurriculumConfig
    seq_len: int
    keys: tuple[str, ...]
    adds_weights: bool
    plans: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # type: ignore[bad-override]

    @property
    def whole(self) -> int:
        return self.seq_len

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.config.rungs

    def size(self, step: int) -> int:
        return self.config.length(step)

    def rung_of(self, size: int) -> int:
        return self.config.rung(size)

    def next_step(self, step: int) -> int | None:
        return self.config.first_step_above(self.rung_of(self.size(step)), step)

    def spans(self, after: int, until: int) -> Iterator[tuple[int, int]]:
        return self.config.spans(after, until)

    @property
    def is_weighted(self) -> bool:
        """Whether some steps use fewer tokens than their compiled length, with weights of 0 for the
        others."""
        return self.config.rungs != self.config.all_lengths

    def describe(self) -> list[str]:
        config = self.config
        lengths, rungs = config.all_lengths, ", ".join(map(str, config.rungs))
        how = (
            "other lengths use a longer row with weights of 0 at its end"
            if self.is_weighted
            else "no others"
        )
        end = config.first_step_above(self.last_below, 0)
        return [
            f"curriculum: rows of {config.length(1)} to {config.last_length} of {self.seq_len} "
            f"tokens ({config.schedule_type}), the last from step {end or 1} on; "
            f"evaluations have {self.seq_len}",
            f"curriculum: {len(config.rungs)} compiled lengths for {len(lengths)} lengths: "
            f"{rungs}; {how}",
        ]

    def describe_size(self, size: int) -> str:
        rung = self.rung_of(size)
        compiled = "" if rung == size else f", computed with {rung}"
        return f"rows of {size} of {self.seq_len} tokens{compiled}"

    def describe_rung(self, rung: int) -> str:
        return f"rows of {rung} tokens"

    def structs(self, batch: Batch, size: int) -> Any:
        def short(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (leaf.shape[0], size, *leaf.shape[2:]) if name in self.keys else leaf.shape
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        structs = {name: short(name, leaf) for name, leaf in batch.items()}
        if self.adds_weights:
            rows = batch[self.keys[0]].shape[0]
            structs[WEIGHTS] = jax.ShapeDtypeStruct((rows, size), jnp.float32)
        return structs

    def cut(self, batch: Batch, step: int) -> dict[str, Any]:
        fields = {"keys": self.keys, "seq_len": self.seq_len, "adds_weights": self.adds_weights}
        return shorten(batch, self.config, step, **fields)

    def first_check(self, build_evaluation: Callable[[Any], Any]) -> Callable[..., bool] | None:
        if not self.is_weighted:
            return None
        return LengthCheck(self.config, self.keys, build_evaluation).passes

    @property
    def last_below(self) -> int:
        """Largest length below the last length; 0 if there is only one length."""
        return max((n for n in self.config.all_lengths if n < self.config.last_length), default=0)


def ladder_of(plan: Decisions, curriculum: CurriculumConfig, *, own_loss: bool) -> LengthLadder:
    """Finds the compiled lengths of a run, without plans, after checking that shorter rows give
    exact results.

    Args:
      plan: plan for full rows.
      curriculum: curriculum whose type is set.
      own_loss: whether the caller passed a loss.

    Raises:
      ConfigError: the batch, the loss or a setting does not fit; the message states the problem and
        the remedy.
    """
    batch = plan.abstract_batch
    keys = _keys(plan, curriculum, own_loss=own_loss)
    seq_len = batch[keys[0]].shape[1]
    most = curriculum.max_length or seq_len
    most = max([most, *curriculum.lengths])
    if most > seq_len:
        name = "max_length" if curriculum.max_length else "lengths"
        raise _refusal(
            f"{most} is above the {seq_len} tokens of the data's rows; lower the value", name
        )
    if curriculum.schedule_type != "fixed_discrete" and curriculum.first_length > seq_len:
        name = "length_step" if curriculum.min_length is None else "min_length"
        first = curriculum.first_length
        raise _refusal(
            f"{first} is above the {seq_len} tokens of the data's rows; lower the value", name
        )
    if curriculum.schedule_type != "fixed_discrete" and curriculum.max_length is None:
        curriculum = dataclasses.replace(curriculum, max_length=seq_len)
    ladder = LengthLadder(config=curriculum, seq_len=seq_len, keys=keys, adds_weights=False)
    if not ladder.is_weighted:
        return ladder
    _check_weights(plan, ladder)
    return dataclasses.replace(ladder, adds_weights=WEIGHTS not in batch)


def _keys(plan: Decisions, curriculum: CurriculumConfig, *, own_loss: bool) -> tuple[str, ...]:
    """Returns the names of the batch arrays to shorten, which all have the shape [rows, tokens,
    ...] and one length."""
    batch = plan.abstract_batch
    if not isinstance(batch, Mapping):
        raise _refusal(
            f"batches are a {type(batch).__name__}; make each a dict of arrays by name, and "
            f"{_KEYS}",
            "keys",
        )
    if SEGMENTS in batch:
        raise _refusal(
            "rows are packed (batch['segments']), so a shorter row would split texts; leave the "
            "curriculum or the packing out",
            "type",
        )
    keys = curriculum.keys
    if not keys:
        others = [name for name in batch if name not in LANGUAGE_MODEL_KEYS]
        if not _is_next_token(plan, own_loss=own_loss):
            raise _refusal(
                "the loss is not a next-token loss of zerojax, so it is not known which arrays "
                "have "
                f"tokens; {_KEYS}",
                "keys",
            )
        if others or not {*LANGUAGE_MODEL_KEYS[:2]} <= {*batch}:
            raise _refusal(
                f"the batch has {sorted(batch)}, not only tokens, targets and weights; {_KEYS}",
                "keys",
            )
        keys = tuple(name for name in LANGUAGE_MODEL_KEYS if name in batch)
    elif missing := [name for name in keys if name not in batch]:
        raise _refusal(f"the batch has no {missing[0]!r}; it has {sorted(batch)}", "keys")
    shapes = {name: getattr(batch[name], "shape", ()) for name in keys}
    lengths = {shape[1] if len(shape) > 1 else None for shape in shapes.values()}
    if None in lengths or len(lengths) != 1:
        raise _refusal(
            f"arrays of the batch have the shapes {shapes}; all must be [rows, tokens, ...] of one "
            "length",
            "keys",
        )
    return keys


def _is_next_token(plan: Decisions, *, own_loss: bool) -> bool:
    """Returns whether a loss is zerojax's own next-token loss: of `model(tokens)`, or the method of
    a model of `zerojax.zoo`."""
    loss: Any = plan.loss
    while isinstance(loss, losses.LossWithUnit):
        loss = loss.function
    if loss is losses.next_token_of_call:
        return True
    model = plan.users_model
    target = getattr(model, "template", None) or model.source
    method = getattr(type(target), "loss", None)
    is_of_zoo = getattr(method, "__module__", "").startswith("zerojax.zoo.")
    return not own_loss and is_of_zoo and losses.loss_unit(plan.loss) == losses.NATS_PER_TOKEN


def _check_weights(plan: Decisions, ladder: LengthLadder) -> None:
    """Raises if rows that are shortened by weights of 0 at their end would give another loss than
    shorter rows.

    A curriculum shortens rows so if their length is not among its compiled lengths.
    """
    config, batch = ladder.config, plan.abstract_batch
    lengths = len(config.all_lengths)
    remedy = (
        f"a schedule of at most {MAX_RUNGS} lengths needs no weights: raise length_step, "
        "or use fixed_discrete"
    )
    why = f"not all of the {lengths} lengths are compiled, so the others need weights of 0"
    if config.keys and (WEIGHTS not in config.keys or batch[WEIGHTS].ndim != 2):
        raise _refusal(
            f"{why}: but curriculum.keys has no 'weights' [rows, tokens]; add it, or {remedy}",
            "keys",
        )
    if not plan.traced.has_weight:
        raise _refusal(f"{why}: but the loss returns a mean, not (sum, weight); {remedy}", "type")
    if any(True for _ in find_rows(plan.traced.forward.jaxpr)):
        raise _refusal(
            f"{why}: but routed experts count tokens of weight 0 in their balance; {remedy}", "type"
        )
    written = sorted(plan.traced.written_state)
    if written:
        raise _refusal(
            f"{why}: the loss changes the model's state {written[0]}, to which tokens of weight "
            "0 also "
            f"contribute; {remedy}",
            "type",
        )


def _refusal(text: str, key: str) -> ConfigError:
    return ConfigError(text, ("curriculum", key))
