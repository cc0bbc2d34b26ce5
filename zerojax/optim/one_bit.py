"""1-bit Adam: after a warm-up the second moment is frozen, and devices send signs of momentum.

Tang et al. 2021 (arXiv:2102.02888), algorithm 1. A device keeps the error of each compressed
message and adds it to its next message (error feedback). This module computes the shards and
messages of one device; it does not send messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pallas_kernels import optimizers
from pallas_kernels.choice import Impl, choose
from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.optim.fused import Method, Options, begin_update, make_optimizer, one_pass
from zerojax.optim.groups import Decay, as_groups
from zerojax.optim.methods import GroupsLike, adam_scalars, check_numbers, scale_by_adam
from zerojax.optim.optimizer import Arrays, Optimizer, UpdateContext
from zerojax.optim.schedules import Schedule, as_schedule

TwoScalars = tuple[optimizers.AdamScalars, optimizers.AdamScalars]

BLOCK = 256
"""Number of values that share a scale."""
_SCALE_BYTES = 2


# --- messages: signs, and the mean magnitude of each block ----------------------------------------


def message_bytes(elements: int) -> int:
    """Returns the size of a message in bytes: one bit per value, and a bfloat16 scale per block.

    >>> message_bytes(256), message_bytes(1000)
    (34, 133)
    """
    return math.ceil(elements / 8) + _SCALE_BYTES * math.ceil(elements / BLOCK)


def encode_signs(values: jax.Array) -> jax.Array:
    """Quantizes float32 [..., elements] to uint8 [..., message_bytes]: signs, then scales.

    A zero gets the positive sign.
    """
    lead, elements = values.shape[:-1], values.shape[-1]
    blocks = math.ceil(elements / BLOCK)
    padded = _padded(jnp.abs(values), blocks * BLOCK).reshape(*lead, blocks, BLOCK)
    # The zeros that fill the last block must not lower its mean.
    counts = np.minimum(elements - BLOCK * np.arange(blocks), BLOCK).astype(np.float32)
    sums = jnp.sum(padded, axis=-1)
    means = sums / jnp.broadcast_to(counts, sums.shape)
    # Rounded explicitly, because XLA may remove a cast and its inverse. The error feedback would
    # then use another scale than the one sent.
    scales = lax.reduce_precision(means, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
    size = math.ceil(elements / 8)
    bits = _padded((values >= 0).astype(jnp.uint8), size * 8).reshape(*lead, size, 8)
    signs = jnp.sum(bits << _places(bits.shape), axis=-1, dtype=jnp.uint8)
    scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*lead, -1)
    return jnp.concatenate([signs, scales], axis=-1)


def decode_signs(message: jax.Array, elements: int) -> jax.Array:
    """Decodes uint8 [..., message_bytes] to float32 [..., elements]; each value is plus or minus
    the scale of its block."""
    lead, size = message.shape[:-1], math.ceil(elements / 8)
    each_byte = jnp.broadcast_to(message[..., :size, None], (*lead, size, 8))
    bits = (each_byte >> _places(each_byte.shape)) & np.uint8(1)
    positive = bits.reshape(*lead, -1)[..., :elements] != 0
    pairs = message[..., size:].reshape(*lead, -1, _SCALE_BYTES)
    scales = lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)
    each = jnp.repeat(scales, BLOCK, axis=-1)[..., :elements]
    return jnp.where(positive, each, -each)


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Returns the shift of each bit within its byte, uint8 [..., 8]."""
    return lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 1)


def _padded(values: jax.Array, size: int) -> jax.Array:
    widths = [(0, 0)] * (values.ndim - 1) + [(0, size - values.shape[-1])]
    return jnp.pad(values, widths)


# --- the optimizer --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OneBit:
    """Settings of 1-bit Adam, and its update after the warm-up.

    Attributes:
      freeze_step: number of warm-up updates, which are AdamW's; skipped steps do not count.
      b1: decay of the momentum.
      method, options: definition and options of the warm-up optimizer.
    """

    freeze_step: int
    b1: float
    method: Method
    options: Options

    def frozen_at(self, state: Tree) -> jax.Array:
        """Returns the number of updates in the second moment, from the state in which it is frozen:
        int32 [], at least 1."""
        # The bias correction divides by 1 - b2^count, which is 0 for a count of 0.
        return jnp.maximum(_adam_part(state).count, 1)

    def momentum(self, state: Tree) -> Arrays:
        """Returns {name: this device's shard of the momentum}."""
        momentum: Any = _adam_part(state).mu
        return momentum

    def apply(
        self,
        arrays: tuple[Arrays, Arrays, Arrays, Tree],
        context: UpdateContext,
        frozen_at: jax.Array,
    ) -> tuple[Arrays, Tree]:
        """Applies one update with all-reduced momentum to this device's shards.

        Parameters with an entry in the new momentum are updated with it and the frozen second
        moment. An element whose second moment is 0 had no gradient during the warm-up, so only
        weight decay changes it. AdamW updates the other parameters and their second moment.

        Args:
          arrays: (parameters, {name: gradient} of those that AdamW updates, {name: float32 new
            momentum} of the others, the optimizer's state).
          context: context of the update; its gradient scale applies to the gradients only.
          frozen_at: result of the method `frozen_at`.

        Returns:
          (parameters, the optimizer's state).
        """
        params, grads, momentum, state = arrays
        whole = context.whole(params)
        begun = begin_update(self.method, self.options, state, whole, context)
        mu, nu = begun.moments
        plain = [name for name in params if name not in momentum]
        pick = lambda tree: {name: tree[name] for name in plain}  # noqa: E731
        new, moments = begun.run(pick(params), (pick(mu), pick(nu)), grads, None)
        updates: Any = optax.safe_increment(_adam_part(state).count)
        scalars = self._scalars_of(momentum, state, whole, (updates, frozen_at))
        moved = {}
        for name, agreed in momentum.items():
            param, (now, frozen) = params[name], scalars[name]
            # The second moment has had no updates since it was frozen, so its bias is still that
            # of then.
            root = jnp.sqrt(nu[name] / frozen.correction2) + now.eps
            step = jnp.where(nu[name] > 0, (agreed / now.correction1) / root, 0.0)
            moved[name] = param - now.learning_rate * (step + now.weight_decay * param)
        new = {**new, **_unless(context.skip, moved, params)}
        kept = _unless(context.skip, momentum, mu)
        after = {**moments[0], **kept}, {**nu, **moments[1]}
        ordered = tuple({name: tree[name] for name in params} for tree in after)
        return {name: new[name] for name in params}, begun.end(ordered)

    def _scalars_of(
        self,
        names: Iterable[str],
        state: Tree,
        whole: Mapping[str, jax.ShapeDtypeStruct],
        counts: tuple[jax.Array, jax.Array],
    ) -> dict[str, TwoScalars]:
        """Returns {name: scalars of the parameter at each of the two update counts}."""
        is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
        parts = jax.tree.leaves(state, is_leaf=is_schedule)
        count = next((part.count for part in parts if is_schedule(part)), 0)
        rate = jnp.asarray(as_schedule(self.options.learning_rate)(count), jnp.float32)
        settings = self.options.decay.settings(dict(whole))
        found = {}
        for name in names:
            one = settings[name]
            given = rate * one.learning_rate_factor, one.weight_decay
            now, frozen = (self._scalars(*given, count) for count in counts)
            found[name] = now, frozen
        return found

    def _scalars(
        self, rate: jax.Array, weight_decay: jax.Array | float, count: jax.Array
    ) -> optimizers.AdamScalars:
        # The momentum is already scaled, and `_unless` handles skipped steps.
        nothing = {"gradient_scale": 1.0, "skip": False}
        return self.method.scalars(rate, weight_decay=weight_decay, count=count, **nothing)


def _unless(skip: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    """Selects the new arrays, or the old ones if the step is skipped."""
    return {name: jnp.where(skip, old[name], x) for name, x in new.items()}


def _adam_part(state: Tree) -> optax.ScaleByAdamState:
    """Returns the part of an optimizer's state that holds Adam's count and moments."""
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    (found,) = (part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part))
    return found


def one_bit_of(tx: optax.GradientTransformation) -> OneBit | None:
    """Returns the `OneBit` of 1-bit Adam, or None for other optimizers."""
    return getattr(tx, "one_bit", None)


def _check_warm_up(*, freeze_step: object, b1: object) -> None:
    """Checks that `freeze_step` and `b1` are valid for 1-bit Adam.

    Raises:
      ValueError, TypeError: a value is not valid; the message states its limit.
    """
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int):
        raise TypeError(f"freeze_step={freeze_step!r} is not an integer; pass a number of steps")
    if freeze_step < 1:
        raise ValueError(
            f"freeze_step={freeze_step} must be at least 1, because without a warm-up there is no "
            "second moment to divide by; a few times 1 / (1 - b2) is usual"
        )
    if callable(b1):
        raise TypeError("one_bit_adam: b1 must be a number, such as 0.9, not a function")


def _scalars_with(corrected: Callable[..., Any], bias_correction: bool) -> Callable[..., Any]:
    """Builds `Method.scalars` of AdamW, with or without bias correction of the moments."""

    def scalars(rate: jax.Array, **step: Any) -> optimizers.AdamScalars:
        made = corrected(rate, **step)
        if bias_correction:
            return made
        one = jnp.ones_like(made.correction1)
        return made._replace(correction1=one, correction2=one)

    return scalars


@names_keywords()
def one_bit_adam(
    learning_rate: float | Schedule,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Tree = None,
    clip_norm: float | None = None,
    groups: GroupsLike = None,
    impl: Impl = "auto",
    bias_correction: bool = True,
) -> Optimizer:
    """Builds 1-bit Adam (arXiv:2102.02888): data parallelism over slow networks, at stages 0 and 1.

    The first `freeze_step` updates are AdamW's; skipped steps do not count. After them the second
    moment is frozen. Instead of gradients each device then sends its own momentum as signs with one
    scale per 256 values, 0.13 bytes per parameter; the mean is sent back in the same format. Each
    device keeps its compression error and adds it to the next message. AdamW always updates the
    parameters that `wire.exact` names. The warm-up and the later steps run different compiled
    programs; the number of updates decides which one.
    The state has the form of `adamw`, so a run can start from a checkpoint of `adamw` and continue.
    The state also stores each device's compression errors. The optimizer cannot be part of an optax
    chain: `update` raises, because each device computes momentum from its own gradients.

    Args:
      learning_rate, b1, b2, eps, weight_decay, mask, groups, impl: the same arguments as for
        `zerojax.adamw`, but b1 must be a number.
      freeze_step: number of updates of the warm-up. The paper uses 15 to 25 % of a run. The second
        moment must be stable by then, so use at least a few times 1 / (1 - b2).
      clip_norm: maximum of the gradient norm; None does not clip. After the warm-up the norm of the
        mean gradient is unknown; the root mean square of all devices' gradient norms replaces it,
        which is not smaller.
      bias_correction: whether to correct the bias of both moments; False as in the paper and
        DeepSpeed, where the first steps are larger by (1 - b1) / sqrt(1 - b2).
    Raises:
      ValueError, TypeError: a number is out of range.
    """
    check_numbers(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps)
    check_numbers(weight_decay=weight_decay, clip_norm=clip_norm)
    _check_warm_up(freeze_step=freeze_step, b1=b1)
    if impl not in get_args(Impl):
        choose(impl, kernel="adamw")  # raises an error that lists the valid values
    method = Method(
        kernel="adamw",
        chain=lambda decay, rate: optax.chain(scale_by_adam(b1, b2, eps), decay, rate),
        moments=("mu", "nu"),
        scalars=_scalars_with(adam_scalars(b1, b2, eps), bias_correction),
        run=one_pass(optimizers.ADAMW),
        one_bit=lambda method, options: OneBit(
            freeze_step=freeze_step, b1=b1, method=method, options=options
        ),
    )
    options = Options(
        learning_rate=learning_rate,
        decay=Decay(weight_decay=weight_decay, mask=mask, groups=as_groups(groups)),
        clip_norm=clip_norm,
        impl=impl,
    )
    return make_optimizer(method, options)
