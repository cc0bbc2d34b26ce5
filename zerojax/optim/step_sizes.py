"""Numbers of rows and tokens of a run's steps, as functions of the number of updates applied.

Features that change the size of steps fix it before the run. The numbers of rows and
tokens seen are therefore pure functions of the number of steps, which checkpoints hold: no other
state is needed. As in every schedule here, a skipped step counts as no step. A batch may
however grow with the batches consumed, so the plan of each size states its own rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from zerojax.config import ConfigError
from zerojax.config.late_dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of the steps of a run: parts of successive steps with one size, in order.

    Attributes:
      after: number of steps before each part; the first is 0.
      rows: number of rows of the global batch of a step in each part.
      tokens: number of tokens of the global batch of a step in each part; None: not known.
      why_unknown: what to say if the tokens are needed but not known.
      own_rows: number of rows of every batch of this plan, the plan of one compiled size; None:
        the rows follow from the number of updates.
    """

    after: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: tuple[int, ...] | None = None
    why_unknown: str = ""
    own_rows: int | None = None

    @classmethod
    def constant(cls, rows: int, tokens: int | None = None, why_unknown: str = "") -> StepSizes:
        """Returns the sizes of a run whose steps all have the same batch."""
        known = None if tokens is None else (tokens,)
        return cls(after=(0,), rows=(rows,), tokens=known, why_unknown=why_unknown)

    def check_tokens(self, name: str, value: object) -> None:
        """Raises if a setting counts tokens, but their number is not known.

        Raises:
          ConfigError: names the setting and the remedy.
        """
        if self.tokens is None:
            text = f"{value} counts tokens, but {self.why_unknown}; count steps instead"
            raise ConfigError(text, ("optimizer", name))

    @functools.cached_property
    def _tokens_before(self) -> tuple[int, ...]:
        """Number of tokens before each part."""
        assert self.tokens is not None
        before = [0]
        # The last part has no end, so nothing follows it.
        for (low, high), tokens in zip(
            zip(self.after, self.after[1:], strict=False), self.tokens, strict=False
        ):
            before.append(before[-1] + (high - low) * tokens)
        return tuple(before)

    def tokens_until(self, steps: int) -> int:
        """Returns the exact number of tokens of the first `steps` steps."""
        assert self.tokens is not None
        # No part begins before step 0.
        part = sum(after < steps for after in self.after) - 1 if steps else 0
        return self._tokens_before[part] + (steps - self.after[part]) * self.tokens[part]

    def steps_until(self, tokens: int) -> int:
        """Returns the smallest number of steps that have at least `tokens` tokens."""
        assert self.tokens is not None
        part = max(sum(before < tokens for before in self._tokens_before) - 1, 0)
        # A quotient of negative numbers is rounded down, so its negative is rounded up.
        return self.after[part] - (self._tokens_before[part] - tokens) // self.tokens[part]

    def tokens_of(self, count: ArrayLike) -> jax.Array:
        """Returns the number of tokens of the first `count` steps, float32, rounded.

        Args:
          count: number of steps, a scalar or an array of integers.
        """
        assert self.tokens is not None
        part = self._part(count)
        # float32, because a run can have more tokens than int32 can count.
        before = jnp.asarray(np.asarray(self._tokens_before, np.float32))[part]
        each = jnp.asarray(np.asarray(self.tokens, np.float32))[part]
        return before + self._steps_in(count, part) * each

    def rows_of(self, count: ArrayLike) -> jax.Array:
        """Returns the number of rows of the batch after `count` updates, float32."""
        if self.own_rows is not None:
            return jnp.float32(self.own_rows)
        return jnp.asarray(np.asarray(self.rows, np.float32))[self._part(count)]

    def _part(self, count: ArrayLike) -> jax.Array:
        # Not a binary search, whose loop would be part of the compiled step.
        count = jnp.asarray(count, jnp.int32)
        starts = np.asarray(self.after, np.int32).reshape((1,) * count.ndim + (-1,))
        return jnp.sum(starts <= count[..., None], -1) - 1

    def _steps_in(self, count: ArrayLike, part: jax.Array) -> jax.Array:
        starts = jnp.asarray(np.asarray(self.after, np.int32))
        return (jnp.asarray(count, jnp.int32) - starts[part]).astype(jnp.float32)
