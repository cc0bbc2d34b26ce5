"""Generation of tokens and text with a cache: one pass over the prompt, then token by token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from zerojax.zoo.decoder import Decoder, check_tokens
from zerojax.zoo.t5 import T5

PROMPT_MULTIPLE = 32  # prompts are padded to a multiple, so that many lengths share a compilation
DEFAULT_NUM_TOKENS = 200


def generate(
    model: Decoder,
    tokens: jax.Array | np.ndarray,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    num_ids: int | None = None,
    seed: int = 0,
) -> jax.Array:
    """Continues each prompt by `num_tokens` sampled tokens. Dropout is off; `model` is unchanged.

    Args:
      model: a decoder of this package.
      tokens: prompts, integers [batch, prompt], all of one length of at least 1.
      num_tokens: number of new tokens; prompt + num_tokens <= the model's max_seq_len.
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: sample only among the `top_k` likeliest tokens; None: among all.
      num_ids: sample only ids below this number, for models whose vocabulary is larger than that of
        the tokenizer; None: all ids.
      seed: seed of the sampling; equal arguments give equal tokens.

    Returns:
      int32 [batch, prompt + num_tokens]: the prompts and their continuations.

    Raises:
      TypeError: `model` is not a `Decoder`, or `tokens` are not integers.
      ValueError: `tokens` are not [batch, prompt], exceed the vocabulary or, with `num_tokens`,
        exceed max_seq_len; or an option is out of range.
    """
    if not isinstance(model, Decoder):
        of_t5 = "; for the targets of a T5 use generate_from_source"
        raise TypeError(
            f"{type(model).__name__} cannot continue texts; use a "
            f"Decoder, a GPT2 or a Llama{of_t5 * isinstance(model, T5)}"
        )
    tokens = np.asarray(tokens)
    limit, vocab_size = model.config.max_seq_len, model.config.vocab_size
    check_tokens(tokens, max_seq_len=limit)
    prompt = tokens.shape[1]
    _check_request(prompt, num_tokens, limit=limit)
    _check_vocabulary(tokens, vocab_size=vocab_size)
    if num_ids is not None and not 1 <= num_ids <= vocab_size:
        raise ValueError(
            f"num_ids={num_ids} must be between 1 and the vocabulary's {vocab_size}; use None for "
            "all ids"
        )
    _check_sampling(temperature, top_k, vocab_size=num_ids or vocab_size)
    padded_length = min(-(-prompt // PROMPT_MULTIPLE) * PROMPT_MULTIPLE, limit)
    padded = np.zeros((tokens.shape[0], padded_length), np.int32)
    padded[:, :prompt] = tokens
    graphdef, state = nnx.split(model)
    added = _continue(
        state,
        jnp.asarray(padded),
        prompt,
        temperature,
        jax.random.key(seed),
        graphdef=graphdef,
        num_tokens=num_tokens,
        top_k=top_k,
        num_ids=num_ids,
        is_greedy=temperature == 0,
    )
    return jnp.concatenate([jnp.asarray(padded[:, :prompt]), added], axis=1)


# jax.jit is otherwise used in step, plan and kernels only; without it decoding would be too slow.
@functools.partial(
    jax.jit, static_argnames=("graphdef", "num_tokens", "top_k", "num_ids", "is_greedy")
)
def _continue(
    state: nnx.State,
    padded: jax.Array,
    prompt: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    *,
    graphdef: nnx.GraphDef[Decoder],
    num_tokens: int,
    top_k: int | None,
    num_ids: int | None,
    is_greedy: bool,
) -> jax.Array:
    """Returns `num_tokens` tokens that follow the first `prompt` tokens of `padded`.

    Cache entries of the padding come after the prompt; new tokens overwrite them before they are
    read.

    Args:
      padded: int32 [batch, padded_length], prompts padded at the end.
      prompt: int32 [], length of the prompts.
    """
    model = nnx.merge(graphdef, state)
    length = min(padded.shape[1] + num_tokens, model.config.max_seq_len)
    cache = model.init_cache(padded.shape[0], length)
    hidden, cache = model.extend(padded, cache, jnp.int32(0))
    last = lax.dynamic_slice_in_dim(hidden, prompt - 1, 1, axis=1)

    def draw(last: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.head(last)[:, 0, :num_ids]
        return _draw(logits, key, temperature, top_k=top_k, is_greedy=is_greedy)

    def advance(carry, step_key):
        token, cache, position = carry
        hidden, cache = model.extend(token[:, None], cache, position)
        return (draw(hidden, step_key), cache, position + 1), token

    keys = jax.random.split(key, num_tokens)
    start = draw(last, keys[0]), cache, jnp.int32(prompt)
    (token, _, _), earlier = lax.scan(advance, start, keys[1:])
    return jnp.concatenate([earlier.T, token[:, None]], axis=1)


def _draw(
    logits: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    top_k: int | None,
    is_greedy: bool,
) -> jax.Array:
    """Samples tokens, int32 [batch], from logits [batch, vocab]."""
    logits = logits.astype(jnp.float32)
    if is_greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None:
        smallest = lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)


def generate_from_source(
    model: T5,
    tokens: jax.Array | np.ndarray,
    num_tokens: int,
    *,
    attention_mask: jax.Array | np.ndarray | None = None,
    end_token: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> jax.Array:
    """Generates a target, such as a translation, for each source. Dropout is off.

    Args:
      model: an encoder-decoder model of this package.
      tokens: sources, integers [batch, source].
      num_tokens: length of the targets, at most the model's max_seq_len.
      attention_mask: [batch, source], 0 for padding; None: no padding.
      end_token: ends a target: all tokens after it are `end_token`. None: targets do not end early.
      temperature, top_k, seed: see `generate`.

    Returns:
      int32 [batch, num_tokens], without the start token.

    Raises:
      TypeError: `model` is not a `T5`, or `tokens` are not integers.
      ValueError: as for `generate`.
    """
    if not isinstance(model, T5):
        raise TypeError(
            f"{type(model).__name__} has no encoder for a source; use generate(model, prompts, ...)"
        )
    tokens, config = np.asarray(tokens), model.config
    check_tokens(tokens, max_seq_len=config.max_seq_len)
    _check_request(1, num_tokens, limit=config.max_seq_len + 1)
    _check_vocabulary(tokens, vocab_size=config.vocab_size)
    _check_sampling(temperature, top_k, vocab_size=config.vocab_size)
    if end_token is not None and not 0 <= end_token < config.vocab_size:
        raise ValueError(
            f"end_token={end_token} is outside the vocabulary of {config.vocab_size} token ids; "
            "use the tokenizer's id, such as 1 for T5"
        )
    graphdef, state = nnx.split(model)
    return _from_source(
        state,
        jnp.asarray(tokens),
        None if attention_mask is None else jnp.asarray(attention_mask),
        temperature,
        jax.random.key(seed),
        graphdef=graphdef,
        num_tokens=num_tokens,
        top_k=top_k,
        is_greedy=temperature == 0,
        end_token=end_token,
    )


@functools.partial(
    jax.jit, static_argnames=("graphdef", "num_tokens", "top_k", "is_greedy", "end_token")
)
def _from_source(
    state: nnx.State,
    tokens: jax.Array,
    attention_mask: jax.Array | None,
    temperature: jax.Array,
    key: jax.Array,
    *,
    graphdef: nnx.GraphDef[T5],
    num_tokens: int,
    top_k: int | None,
    is_greedy: bool,
    end_token: int | None,
) -> jax.Array:
    model = nnx.merge(graphdef, state)
    model.eval()
    cache = model.init_cache(tokens, num_tokens, attention_mask)

    def advance(carry, step_key):
        token, cache, position = carry
        hidden, cache = model.extend(token[:, None], cache, position)
        logits = model.head(hidden)[:, 0]
        new = _draw(logits, step_key, temperature, top_k=top_k, is_greedy=is_greedy)
        if end_token is not None:
            new = jnp.where((token == end_token) & (position > 0), end_token, new)
        return (new, cache, position + 1), new

    first = jnp.full(tokens.shape[0], model.config.start_token, jnp.int32)
    _, drawn = lax.scan(advance, (first, cache, jnp.int32(0)), jax.random.split(key, num_tokens))
    return drawn.T


def _check_request(prompt: int, num_tokens: int, *, limit: int) -> None:
    if prompt < 1:
        raise ValueError("the prompt is empty; pass at least one token")
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens} must be at least 1")
    if prompt + num_tokens > limit:
        raise ValueError(
            f"a prompt of {prompt} tokens and num_tokens={num_tokens} are {prompt + num_tokens}"
            f" tokens, but the model takes at most max_seq_len={limit};"
            f" {_remedies(prompt, num_tokens, limit=limit)}"
        )


def _remedies(prompt: int, num_tokens: int, *, limit: int) -> str:
    """Returns remedies for prompt + num_tokens > limit; both must stay at least 1."""
    fewer, shorter = f"use num_tokens={limit - prompt}", f"cut the prompt to {limit - num_tokens}"
    if limit < 2:
        return "build the model with a larger max_seq_len"
    if prompt >= limit and num_tokens >= limit:
        return f"cut the prompt to {limit - 1} and use num_tokens=1"
    if prompt >= limit:
        return shorter
    return fewer if num_tokens >= limit else f"{fewer}, or {shorter}"


def _check_vocabulary(tokens: np.ndarray, *, vocab_size: int) -> None:
    for token in (tokens.min(initial=0), tokens.max(initial=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"the prompt has token {token}, but the model's table has {vocab_size} rows; encode"
                " the text with the tokenizer that the model was trained with"
            )


def _check_sampling(temperature: float, top_k: int | None, *, vocab_size: int) -> None:
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature} must be a finite number >= 0; use 1.0 for the model's own "
            "probabilities, 0 for the likeliest token"
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(
            f"top_k={top_k} must be between 1 and the vocabulary's {vocab_size}; use None for no"
            " limit"
        )


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
    """Returns the prompt and its continuation as text.

    Args:
      num_tokens: number of new tokens; None: `DEFAULT_NUM_TOKENS`, or fewer if the model's context
        is shorter.

    Raises:
      ValueError: there is no tokenizer, the prompt is empty, or it fills the context.
    """
    if tokenizer is None:
        raise ValueError(
            "this run has no tokenizer to decode tokens: it was trained on token files that name "
            "none; train on text, or on token files from `zerojax data prepare`"
        )
    tokens = prompt_ids(tokenizer, prompt)
    if not tokens.size:
        raise ValueError(
            "the prompt is empty, or the tokenizer encodes it as no tokens; pass at least one "
            'letter, such as "A"'
        )
    context = model.config.max_seq_len
    room = context - tokens.size
    if room < 1:
        raise ValueError(
            f"the prompt has {tokens.size} tokens, but the model's context is {context}; "
            f"shorten it to at most {context - 1} tokens"
        )
    num_tokens = min(DEFAULT_NUM_TOKENS, room) if num_tokens is None else num_tokens
    drawn = generate(
        model,
        tokens[None],
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        num_ids=min(tokenizer.vocab_size, model.config.vocab_size),
        seed=seed,
    )
    return tokenizer.decode(np.asarray(drawn[0, _prefix(tokenizer).size :]))


def prompt_ids(tokenizer: Any, prompt: str) -> np.ndarray:
    """Returns int32 ids: the tokenizer's prefix, if it has one, and the prompt."""
    return np.concatenate([_prefix(tokenizer), np.asarray(tokenizer.encode(prompt), np.int32)])


def _prefix(tokenizer: Any) -> np.ndarray:
    """Returns the ids that start each text, such as <|begin_of_text|> of Llama 3."""
    return np.asarray(getattr(tokenizer, "prefix", ()), np.int32)
