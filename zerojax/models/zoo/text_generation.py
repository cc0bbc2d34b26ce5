"""Text generation: a prompt as text in, its continuation as text out."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerojax.models.zoo.generate import generate

DEFAULT_NUM_TOKENS = 200


def continue_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    num_tokens: int | None,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """The prompt and its continuation.

    Args:
      num_tokens: None: `DEFAULT_NUM_TOKENS`, or as many as the model's context holds.

    Raises:
      ValueError: the model's tokens have no text, or the prompt is empty or fills the context.
    """
    if tokenizer is None:
        raise ValueError(
            "this run has no tokenizer: it was trained on token files that name none, so that its "
            "tokens have no text; train on text, or on token files of `zerojax data prepare`"
        )
    tokens = prompt_ids(tokenizer, prompt)
    if not tokens.size:
        raise ValueError(
            "the prompt is empty, or this tokenizer makes no token of it; give at least one "
            'letter, such as "A"'
        )
    context = model.config.max_seq_len
    room = context - tokens.size
    if room < 1:
        raise ValueError(
            f"the prompt has {tokens.size} tokens and the model's context is {context}; "
            f"shorten it to at most {context - 1} tokens"
        )
    num_tokens = min(DEFAULT_NUM_TOKENS, room) if num_tokens is None else num_tokens
    drawn = generate(
        model, tokens[None], num_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    return tokenizer.decode(np.asarray(drawn[0, _prefix(tokenizer).size :]))


def prompt_ids(tokenizer: Any, prompt: str) -> np.ndarray:
    """int32 ids: what a text begins with where the tokenizer comes from, and the prompt."""
    return np.concatenate([_prefix(tokenizer), np.asarray(tokenizer.encode(prompt), np.int32)])


def _prefix(tokenizer: Any) -> np.ndarray:
    """Such as <|begin_of_text|> of Llama 3."""
    return np.asarray(getattr(tokenizer, "prefix", ()), np.int32)
