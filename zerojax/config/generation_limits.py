"""Checks the arguments of generation, with what is known of the model before it is loaded."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from zerojax.config.checks import check_whole_number
from zerojax.config.display import quoted

_LARGEST, _SMALLEST = 3.4e38, 1.2e-38
"""Numbers that are finite, or not 0, in float32, with which devices sample."""
_SEEDS = 2**63
CODES = ("int8", "fp8")
"""Formats of weights for generation, besides the compute dtype."""
CACHES = ("int8",)
"""Formats of keys and values in the cache, besides the dtype of the activations."""


def check_generation(
    *,
    num_tokens: Any = None,
    batch_size: object = None,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    repetition_penalty: Any = 1.0,
    end_tokens: Any = None,
    pad_token: Any = None,
    num_ids: Any = None,
    seed: object = 0,
    quantize: object = None,
    cache: object = None,
    vocab_size: int | None = None,
    context: int | None = None,
) -> None:
    """Checks arguments of generation, which are described at `zerojax.zoo.generate`.

    Args:
      num_tokens, batch_size: numbers of new tokens and of prompts that are continued together.
      temperature, top_k, top_p, repetition_penalty, end_tokens, pad_token, num_ids, seed: options
        of the sampling.
      quantize, cache: formats of weights and of the cache.
      vocab_size: number of ids of the model; None if it is not known.
      context: maximum number of tokens of a text, with its prompt; None if it is not known.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range.
    """
    check_whole_number("num_tokens", num_tokens, 1)
    if num_tokens is not None and context is not None and num_tokens >= context:
        raise ValueError(
            f"num_tokens={quoted(num_tokens)} and a prompt of at least 1 token are more than the "
            f"model's context, max_seq_len={context}; use at most {max(context - 1, 1)}"
        )
    check_whole_number("batch_size", batch_size, 1)
    _check_seed(seed)
    _check_numbers(temperature, top_p, repetition_penalty)
    _check_ids(top_k, end_tokens, pad_token, num_ids, vocab_size)
    for name, value, known in (("quantize", quantize, CODES), ("cache", cache, CACHES)):
        if value is not None and value not in known:
            raise ValueError(
                f"{name}={quoted(value)} is unknown; use {' or '.join(map(repr, known))}, or None "
                "for the compute dtype"
            )


def _check_seed(seed: object) -> None:
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise TypeError(f"seed={quoted(seed)} is not an integer; use an integer, as in seed=0")
    if not -_SEEDS <= int(seed) < _SEEDS:
        raise ValueError(f"seed={quoted(seed)} does not fit into 64 bits; use 0 to {_SEEDS - 1}")


def _check_numbers(temperature: float, top_p: float | None, repetition_penalty: float) -> None:
    for name, value in (
        ("temperature", temperature),
        ("top_p", 1.0 if top_p is None else top_p),
        ("repetition_penalty", repetition_penalty),
    ):
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{name}={quoted(value)} is a {type(value).__name__}; use a number")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(
            f"temperature={temperature} must be a finite number >= 0; use 1.0 for the "
            "model's own probabilities, 0 for the likeliest token"
        )
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(
            f"top_p={top_p} must be above 0 and at most 1; use None for no limit, or "
            "temperature=0 for the likeliest token"
        )
    if not 0.0 < repetition_penalty < math.inf:
        raise ValueError(
            f"repetition_penalty={repetition_penalty} must be a finite number above 0; "
            "use 1.0 for none"
        )
    for name, value in (
        ("temperature", temperature or 1.0),
        ("top_p", 1.0 if top_p is None else top_p),
        ("repetition_penalty", repetition_penalty),
    ):
        if not _SMALLEST <= value <= _LARGEST:
            raise ValueError(
                f"{name}={quoted(value)} is 0 or infinite in float32, in which tokens are drawn; "
                f"use a number from {_SMALLEST} to {_LARGEST}"
            )


def _check_ids(
    top_k: int | None,
    end_tokens: Iterable[int] | None,
    pad_token: int | None,
    num_ids: int | None,
    vocab_size: int | None,
) -> None:
    for name, value in (("top_k", top_k), ("num_ids", num_ids)):
        if value is not None and not _is_whole(value):
            check_whole_number(name, value, 1)
    if num_ids is not None and not (num_ids >= 1 and _is_at_most(num_ids, vocab_size)):
        raise ValueError(
            f"num_ids={quoted(num_ids)} must be between 1 and the vocabulary's {vocab_size}; use "
            "None for all ids"
        )
    most = num_ids or vocab_size
    if top_k is not None and not (top_k >= 1 and _is_at_most(top_k, most)):
        limit = "at least 1" if most is None else f"between 1 and the vocabulary's {most}"
        raise ValueError(f"top_k={quoted(top_k)} must be {limit}; use None for no limit")
    if end_tokens is not None and not (
        isinstance(end_tokens, Iterable) and not isinstance(end_tokens, str)
    ):
        raise TypeError(
            f"end_tokens={quoted(end_tokens)} is not a list of token ids; write it as [2], or [] "
            "for none"
        )
    pads = [] if pad_token is None else [("pad_token", pad_token)]
    for name, token in [*(("end_tokens", token) for token in end_tokens or ()), *pads]:
        if not _is_whole(token):
            raise TypeError(f"{name}={quoted(token)} is no token id; use an integer")
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            of = "" if vocab_size is None else f" of {vocab_size} token ids"
            limit = "" if vocab_size is None else f", at most {vocab_size - 1}"
            raise ValueError(
                f"{name}={quoted(token)} is outside the vocabulary{of}; use an id of the "
                f"tokenizer{limit}"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_at_most(value: int, most: int | None) -> bool:
    return most is None or value <= most
