"""Generates text: encodes prompts, continues them as rows of tokens, and decodes the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jax.sharding import NamedSharding

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.generation import check_decoder, check_length, continue_rows
from zerojax.zoo.sampling import Sampling

DEFAULT_NUM_TOKENS = 200
BATCH_SIZE = 32
"""Default number of prompts that are continued together."""


class TextTokenizer(Protocol):
    """What generation uses of a tokenizer; it may have `prefix` as well, ids that start a text."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: np.ndarray) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Prompt and its continuation.

    Attributes:
      prompt: prompt as it was passed.
      text: prompt and continuation, decoded together.
      added: continuation, decoded alone, without its end token.
      num_tokens: number of new tokens, including the end token.
      has_ended: whether the last new token is an end token.
    """

    prompt: str
    text: str
    added: str
    num_tokens: int
    has_ended: bool


def continue_texts(
    model: Decoder,
    tokenizer: TextTokenizer | None,
    prompts: Sequence[str],
    num_tokens: int | None,
    sampling: Sampling,
    *,
    batch_size: int = BATCH_SIZE,
    row_sharding: NamedSharding | None = None,
    cache_kind: str | None = None,
) -> list[Continuation]:
    """Continues prompts of any lengths.

    Args:
      model: a decoder, whose parameters may be sharded over a mesh.
      tokenizer: tokenizer of the model.
      prompts: texts of at least one token; a row's number is its index.
      num_tokens: number of new tokens; None uses `DEFAULT_NUM_TOKENS`, or for a long prompt as many
        as fit the model's context.
      sampling: options of the sampling. Ids that the tokenizer lacks are never drawn.
      batch_size: number of prompts that are continued together.
      row_sharding, cache_kind: arguments as for `generation.continue_rows`.

    Raises:
      TypeError: the model is not a decoder.
      ValueError: there is no tokenizer or no prompt, a prompt is empty, or it fills the context.
    """
    check_decoder(model)
    context = model.config.max_seq_len
    rows = encoded_prompts(tokenizer, prompts, num_tokens, context)
    assert tokenizer is not None, "encoded_prompts refuses it"
    sampling = dataclasses.replace(
        sampling, num_ids=min(tokenizer.vocab_size, model.config.vocab_size)
    )
    limits = [
        min(DEFAULT_NUM_TOKENS, context - row.size) if num_tokens is None else num_tokens
        for row in rows
    ]
    num_rows = min(batch_size, len(rows))
    options = {"row_sharding": row_sharding, "num_rows": num_rows, "cache_kind": cache_kind}
    added = continue_rows(model, rows, limits, sampling, **options)
    return [
        _decoded(tokenizer, prompt, row, new[:length], sampling.end_tokens)
        for prompt, row, new, length in zip(prompts, rows, *added, strict=True)
    ]


def encoded_prompts(
    tokenizer: TextTokenizer | None, prompts: Sequence[str], num_tokens: int | None, context: int
) -> list[np.ndarray]:
    """Encodes prompts, int32 [n] each; checks that they have tokens and leave space for new ones.

    Args:
      tokenizer: tokenizer of the model; None if there is none.
      prompts: texts.
      num_tokens: number of new tokens; None: at least one.
      context: maximum number of tokens of a prompt and its new tokens.

    Raises:
      ValueError: there is no tokenizer, or a prompt is empty, too long or no Unicode.
    """
    if tokenizer is None:
        raise ValueError(
            "this run has no tokenizer to decode tokens, because it was trained on token files "
            "that name none; train on text, or on token files from `zerojax data prepare`"
        )
    try:
        rows = [_encoded(tokenizer, prompt, context) for prompt in prompts]
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt={quoted(error.object)} has an unpaired surrogate (half a character) at index "
            f"{error.start}; remove it"
        ) from error
    if num_tokens is not None:
        check_length(max(map(len, rows), default=0), num_tokens, limit=context)
    return rows


def _encoded(tokenizer: TextTokenizer, prompt: str, context: int) -> np.ndarray:
    """Encodes a prompt; checks that it has tokens and leaves space for a new token."""
    tokens = prompt_ids(tokenizer, prompt)
    if not tokens.size:
        raise ValueError(
            "the prompt is empty, or the tokenizer encodes it as no tokens; pass at least one "
            'letter, such as "A"'
        )
    if tokens.size >= context:
        raise ValueError(
            f"the prompt has {tokens.size} tokens, but the model's context is {context}; "
            f"shorten it to at most {context - 1} tokens"
        )
    return tokens


def _decoded(
    tokenizer: TextTokenizer,
    prompt: str,
    ids: np.ndarray,
    new: np.ndarray,
    end_tokens: Sequence[int],
) -> Continuation:
    has_ended = bool(new.size) and int(new[-1]) in end_tokens
    shown = new[:-1] if has_ended else new
    return Continuation(
        prompt=prompt,
        text=tokenizer.decode(np.concatenate([ids[_prefix(tokenizer).size :], shown])),
        added=tokenizer.decode(shown),
        num_tokens=int(new.size),
        has_ended=has_ended,
    )


def prompt_ids(tokenizer: TextTokenizer, prompt: str) -> np.ndarray:
    """Returns int32 ids: the tokenizer's prefix, if it has one, and the prompt."""
    return np.concatenate([_prefix(tokenizer), np.asarray(tokenizer.encode(prompt), np.int32)])


def _prefix(tokenizer: TextTokenizer) -> np.ndarray:
    """Returns the ids that start each text, such as <|begin_of_text|> of Llama 3."""
    return np.asarray(getattr(tokenizer, "prefix", ()), np.int32)
