"""Samples tokens from logits, and checks the options of sampling.

The options are defined as in Hugging Face's transformers. They are inputs of the compiled program,
so another temperature, `top_k` or `top_p` compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.config.generation_limits import check_generation
from zerojax.config.late_dataclasses import dataclass

PRNG = "threefry2x32"
"""Random generator whose numbers do not depend on how many keys are drawn from together, unlike
those of "rbg"."""
END_SLOTS = 8
"""End tokens are padded to a multiple of this number, so that most counts share one program."""


class Controls(NamedTuple):
    """Options of the sampling as arrays; only `end_tokens` has a dimension."""

    temperature: np.ndarray
    """float32 []; 0 takes the most likely token."""
    top_k: np.ndarray
    """int32 [], from 1 to the number of logits, which means no limit."""
    top_p: np.ndarray
    """float32 [], above 0; 1 means no limit."""
    repetition_penalty: np.ndarray
    """float32 [], above 0; 1 means no penalty."""
    num_ids: np.ndarray
    """int32 []: ids from this number on are never drawn."""
    key: np.ndarray
    """uint32 [2], random key of the generator `PRNG`."""
    end_tokens: np.ndarray
    """int32 [a multiple of `END_SLOTS`]: ids that end a row; -1 in unused entries."""
    pad_token: np.ndarray
    """int32 []: id that fills a row after its end."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of the sampling, defined as in Hugging Face's transformers.

    Attributes:
      temperature: divisor of the logits; 0 always takes the most likely token.
      top_k: number of most likely tokens to sample from, together with tokens as likely as the last
        of them; None samples from all.
      top_p: sample only from the most likely tokens whose probabilities, after temperature and
        `top_k`, sum to at least `top_p`; None samples from all.
      repetition_penalty: number that divides the positive logits of tokens that the row already
        has, and multiplies the negative ones; 1 for no penalty.
      end_tokens: ids that end a row; such an id is the row's last token.
      pad_token: id after a row's end; None uses the first of `end_tokens`, or 0.
      num_ids: sample only ids below this number; None samples from all ids.
      seed: random seed. A token depends on the seed, the number of its row, its position and the
        text before it.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    end_tokens: Sequence[int] = ()
    pad_token: int | None = None
    num_ids: int | None = None
    seed: int = 0

    def check(self, vocab_size: int) -> None:
        """Checks the options for a vocabulary of `vocab_size` ids.

        Raises:
          TypeError: an option has the wrong type.
          ValueError: an option is out of range.
        """
        check_generation(**dataclasses.asdict(self), vocab_size=vocab_size)

    @property
    def pad(self) -> int:
        """Id that fills a row after its end."""
        if self.pad_token is not None:
            return self.pad_token
        return next(iter(self.end_tokens), 0)

    def controls(self, vocab_size: int) -> Controls:
        """Converts the options to arrays for logits of `vocab_size` ids."""
        slots = -(-max(len(self.end_tokens), 1) // END_SLOTS) * END_SLOTS
        ends = np.full(slots, -1, np.int32)
        ends[: len(self.end_tokens)] = self.end_tokens
        return Controls(
            temperature=np.asarray(self.temperature, np.float32),
            top_k=np.asarray(vocab_size if self.top_k is None else self.top_k, np.int32),
            top_p=np.asarray(1.0 if self.top_p is None else self.top_p, np.float32),
            repetition_penalty=np.asarray(self.repetition_penalty, np.float32),
            num_ids=np.asarray(self.num_ids or vocab_size, np.int32),
            key=np.asarray(jax.random.key_data(jax.random.key(self.seed, impl=PRNG))),
            end_tokens=ends,
            pad_token=np.asarray(self.pad, np.int32),
        )


class DrawnRows(NamedTuple):
    """Tokens drawn for each row so far."""

    token: jax.Array
    """int32 [batch]: the newest token of each row."""
    lengths: jax.Array
    """int32 [batch]: number of tokens drawn for each row until it ended, including the end
    token."""
    has_ended: jax.Array
    """bool [batch]: whether the row has ended."""
    seen: jax.Array
    """bool [batch, vocab]: ids that the row already has."""
    drawn: jax.Array
    """int32 [batch, room]: drawn tokens, then pad tokens."""

    @classmethod
    def start(
        cls, tokens: jax.Array, lengths: jax.Array, room: int, *, vocab_size: int, pad: jax.Array
    ) -> DrawnRows:
        """Returns the state of rows before the first token is drawn.

        Args:
          tokens: prompts, int32 [batch, prompt].
          lengths: int32 [batch], number of valid tokens in each row; 0 for a row that has ended.
          room: maximum number of tokens to draw.
          vocab_size: number of logits.
          pad: int32 [], id that fills a row after its end.
        """
        batch, prompt = tokens.shape
        valid = jnp.arange(prompt)[None] < lengths[:, None]
        nothing = jnp.zeros((batch, vocab_size), bool)
        return cls(
            token=tokens[:, -1],
            lengths=jnp.zeros(batch, jnp.int32),
            has_ended=lengths == 0,
            # The maximum, because a position of padding may have the id of a valid token.
            seen=nothing.at[jnp.arange(batch)[:, None], tokens].max(valid),
            drawn=jnp.broadcast_to(pad, (batch, room)),
        )

    def num_active(self) -> jax.Array:
        """Returns the number of rows that have not ended, int32 []."""
        return jnp.sum(~self.has_ended, dtype=jnp.int32)

    def replace(self, takes: jax.Array, new: DrawnRows) -> DrawnRows:
        """Returns these rows, with the rows of `new` where `takes`, bool [batch], is true."""

        def one(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(takes.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(one, self, new)

    def draw(
        self,
        logits: jax.Array,
        start: jax.Array,
        limits: jax.Array,
        rows: jax.Array,
        controls: Controls,
    ) -> DrawnRows:
        """Draws one more token for each row; returns the new state.

        Args:
          logits: logits [batch, vocab] of the next token.
          start: int32 [batch], position of a row's first drawn token.
          limits: int32 [batch], maximum number of tokens of each row.
          rows: int32 [batch], number of each row, for the random numbers.
          controls: options of the sampling.
        """
        positions = start + self.lengths
        token = draw_tokens(logits, self.seen, rows, positions, controls)
        is_token = jnp.arange(logits.shape[1])[None] == token[:, None]
        ends = jnp.any(token[:, None] == jnp.asarray(controls.end_tokens)[None], axis=1)
        lengths = self.lengths + ~self.has_ended
        is_next = jnp.arange(self.drawn.shape[1])[None] == self.lengths[:, None]
        return DrawnRows(
            token=token,
            lengths=lengths,
            has_ended=self.has_ended | ends | (lengths >= limits),
            seen=self.seen | is_token,
            drawn=jnp.where(is_next & ~self.has_ended[:, None], token[:, None], self.drawn),
        )


def draw_tokens(
    logits: jax.Array,
    seen: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    controls: Controls,
) -> jax.Array:
    """Draws a token for each row, int32 [batch]; computes in float32.

    Args:
      logits: [batch, vocab].
      seen: bool [batch, vocab], ids that the row already has.
      rows: int32 [batch], number of each row.
      positions: int32 [batch], position of each token in its text; row, position and seed determine
        the random numbers.
      controls: options of the sampling.
    """
    logits = penalized(logits.astype(jnp.float32), seen, controls)

    def sample(logits: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.asarray(controls.key), impl=PRNG)
        fold = jax.random.fold_in
        keys = jax.vmap(lambda row, at: fold(fold(key, row), at))(rows, positions)
        return jax.vmap(jax.random.categorical)(keys, limited(logits, controls)).astype(jnp.int32)

    def likeliest(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return lax.cond(controls.temperature > 0, sample, likeliest, logits)


def penalized(logits: jax.Array, seen: jax.Array, controls: Controls) -> jax.Array:
    """Applies the repetition penalty, and excludes ids from `num_ids` on.

    Args:
      logits: float32 [batch, vocab].
      seen: bool [batch, vocab], ids that the row already has.
      controls: options of the sampling.
    """
    penalty = controls.repetition_penalty
    changed = jnp.where(logits < 0, logits * penalty, logits / penalty)
    is_id = jnp.arange(logits.shape[1])[None] < controls.num_ids
    return jnp.where(is_id, jnp.where(seen, changed, logits), -jnp.inf)


def limited(logits: jax.Array, controls: Controls) -> jax.Array:
    """Divides logits by the temperature and excludes ids by `top_k`, then by `top_p`.

    Args:
      logits: float32 [batch, vocab].
      controls: options of the sampling; the temperature is above 0.

    Returns:
      Logits, float32 [batch, vocab], -inf for excluded ids.
    """
    vocab_size = logits.shape[1]
    scaled = logits / controls.temperature

    def limit(scaled: jax.Array) -> jax.Array:
        ordered = -jnp.sort(-scaled, axis=-1)
        last = lax.dynamic_slice_in_dim(ordered, controls.top_k - 1, 1, axis=1)
        kept = jnp.where(ordered >= last, ordered, -jnp.inf)
        probabilities = jax.nn.softmax(kept, axis=-1)
        # Without the token itself, so that the likeliest one is always kept.
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        of_nucleus = jnp.where(likelier < controls.top_p, kept, jnp.inf)
        smallest = jnp.min(of_nucleus, axis=-1, keepdims=True)
        # Without a limit, rounding of the sums must not exclude a token.
        smallest = jnp.where(controls.top_p < 1, smallest, last)
        return jnp.where(scaled >= smallest, scaled, -jnp.inf)

    has_limit: Any = (controls.top_k < vocab_size) | (controls.top_p < 1)
    return lax.cond(has_limit, limit, lambda scaled: scaled, scaled)
