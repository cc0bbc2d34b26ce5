"""Mixture of experts: router, expert MLPs, and load balancing.

The router computes in float32 with every compute dtype, because bfloat16 could not distinguish
experts with close scores. Only the scores of the chosen experts weight the outputs. The order of
experts with equal scores is unspecified.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zerojax.config.expert_settings import MoEConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.models.step_count import StepCount
from zerojax.operators.grouped_products import Product
from zerojax.operators.marks import mark_whole_sequences
from zerojax.operators.routed_experts import SLACK, experts, rounds_needed
from zerojax.operators.whole_batch import batch_max, batch_sum
from zerojax.zoo.layers import ACTIVATIONS, Mlp, expand_rank, normal

EXPERT_PARAMETERS = (r"experts/(gate|up|down)(_bias)?$",)
"""Regular expressions that match the names of expert parameters."""


class Routing(NamedTuple):
    """Routing statistics of one or several layers, summed over the tokens of this device.

    All fields are float32. For several layers, all fields except `tokens` have a leading layer
    dimension.
    """

    chosen: jax.Array
    """[num_experts]: number of tokens routed to each expert; has no gradient."""
    scores: jax.Array
    """[num_experts]: sum of each expert's scores, normalized to sum 1 for each token."""
    squares: jax.Array
    """[]: sum of the squares of log(sum(exp(logits)))."""
    tokens: jax.Array
    """[]: number of tokens in these statistics (all except padding)."""
    rounds: jax.Array
    """[]: number of rounds in which the experts process all tokens, including padding; 0 if not
    counted. Combined over devices by maximum, not by sum."""
    dropped: jax.Array | float = 0.0
    """[]: number of choices dropped because of `capacity_factor`, including padding."""

    @classmethod
    def empty(cls, num_layers: int, num_experts: int) -> Routing:
        """Returns statistics of `num_layers` layers that are all zero."""
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        each = zeros((num_layers, num_experts))
        of_layers = zeros(num_layers)
        return cls(each, each, of_layers, zeros(()), of_layers, of_layers)

    def push(self, layer: Routing) -> Routing:
        """Returns statistics with `layer` appended and the first layer removed.

        A loop over layers therefore needs no layer index.
        """

        def shift(rows: Any, new: jax.Array | float) -> jax.Array:
            return jnp.concatenate([rows[1:], jnp.asarray(new)[None]])

        return Routing(
            chosen=shift(self.chosen, layer.chosen),
            scores=shift(self.scores, layer.scores),
            squares=shift(self.squares, layer.squares),
            tokens=layer.tokens,
            rounds=shift(self.rounds, layer.rounds),
            dropped=shift(self.dropped, layer.dropped),
        )


@dataclass(frozen=True)
class TowardsMean:
    """Rule that balances experts without a loss (arXiv:2408.15664): bias + rate * sign(mean -
    load)."""

    rate: float

    def __call__(self, bias: jax.Array, load: jax.Array) -> jax.Array:
        """Computes the next bias, float32 [experts], from the bias and the load, int32 [experts].

        Loads are compared with their mean in integers, because a float32 sum of large loads depends
        on the order of summation.
        """
        number = load.shape[-1]
        rest = jnp.sum(load % number)
        mean = jnp.sum(load // number) + rest // number  # rounded down; sum(load) could overflow
        is_equal = (load == mean) & (rest % number == 0)
        sign = jnp.where(is_equal, 0, jnp.where(load > mean, -1, 1))
        return bias + jnp.asarray(self.rate, bias.dtype) * sign.astype(bias.dtype)


class Router(nnx.Module):
    """Computes scores of all experts, and chooses the experts of each token.

    With `use_bias` a learned `logit_bias`, float32 [experts], is added to the logits. With
    `config.bias_rate` it has a `bias`, float32 [experts], and a `load`, int32 [experts]: the number
    of tokens, without padding, that this step routes to each expert (see `StepCount`).
    """

    bias: nnx.Variable[jax.Array] | None = None
    load: StepCount | None = None

    def __init__(
        self,
        embed_dim: int,
        config: MoEConfig,
        *,
        stddev: float,
        rngs: nnx.Rngs,
        use_bias: bool = False,
    ) -> None:
        number = config.num_experts
        self.config = config
        self.kernel = normal(rngs, (embed_dim, number), stddev)
        self.logit_bias = nnx.Param(jnp.zeros(number, jnp.float32)) if use_bias else None
        self.deterministic = False  # set by eval(): the load is then not counted
        if config.bias_rate is not None:
            self.bias = nnx.Variable(jnp.zeros(number, jnp.float32))
            rule = TowardsMean(config.bias_rate)
            self.load = StepCount(jnp.zeros(number, jnp.int32), changes="bias", rule=rule)

    def __call__(
        self, x: jax.Array, counts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Routing]:
        """Chooses k experts for each token.

        Args:
          x: [..., embed], any float dtype; cast to float32.
          counts: bool [...], False for tokens to exclude from the statistics (padding); None
            includes all.

        Returns:
          (factors of the experts' outputs, float32 [..., k]; indices of the experts, int32
          [..., k]; statistics).
        """
        config = self.config
        logits = jnp.matmul(
            x.astype(jnp.float32),
            self.kernel[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        if self.logit_bias is not None:
            logits = logits + expand_rank(self.logit_bias[...].astype(jnp.float32), logits.ndim)
        softmax = config.scores == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
        gates, ids = self._choose(scores)
        shares = scores if softmax else scores / _positive_sum(scores)
        if config.renormalize:
            gates = gates / _positive_sum(gates)
        if config.scale != 1.0:
            gates = gates * config.scale
        return gates, ids, self._sums(logits, shares, ids, counts)

    def _choose(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chooses experts by scores [..., experts]; returns their (unbiased scores, indices)."""
        k = self.config.experts_per_token
        if self.bias is None:
            gates, ids = lax.top_k(self._in_best_groups(scores), k)
            return gates, ids
        bias = self.bias[...].astype(scores.dtype)
        biased = lax.stop_gradient(scores) + jnp.broadcast_to(bias, scores.shape)
        ids = lax.top_k(self._in_best_groups(biased), k)[1]
        return jnp.take_along_axis(scores, ids, axis=-1), ids

    def _in_best_groups(self, scores: jax.Array) -> jax.Array:
        """Returns scores [..., experts] with -inf outside the `groups_per_token` best groups.

        A group's score is the sum of its two highest scores.
        """
        groups = self.config.num_groups
        if groups == 1:
            return scores
        size = self.config.num_experts // groups
        grouped = scores.reshape(*scores.shape[:-1], groups, size)
        best = lax.top_k(grouped, min(2, size))[0].sum(-1)
        chosen = lax.top_k(best, self.config.groups_per_token)[1]
        kept = jax.nn.one_hot(chosen, groups, dtype=jnp.bool_).any(-2)
        return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)

    def _sums(
        self, logits: jax.Array, shares: jax.Array, ids: jax.Array, counts: jax.Array | None
    ) -> Routing:
        number = self.config.num_experts
        size = ids.shape[:-1]
        weights = jnp.ones(size, jnp.float32) if counts is None else counts.astype(jnp.float32)
        hot = jax.nn.one_hot(ids, number, dtype=jnp.float32).sum(-2)
        dims = tuple(range(len(size)))
        if self.load is not None and not self.deterministic:
            self.load[...] += jnp.sum((hot * weights[..., None]).astype(jnp.int32), dims)
        return Routing(
            chosen=jnp.sum(hot * weights[..., None], dims),
            scores=jnp.sum(shares * weights[..., None], dims),
            squares=jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2 * weights),
            tokens=jnp.sum(weights),
            rounds=jnp.zeros((), jnp.float32),
            dropped=jnp.zeros((), jnp.float32),
        )


def _positive_sum(scores: jax.Array) -> jax.Array:
    """Computes the sum over the last dimension, at least 1e-20, for use as a divisor."""
    return jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-20)


class GatedExperts(nnx.Module):
    """Gated MLPs of all experts: gate, up [experts, embed, width], down [experts, width, embed].

    With `use_bias` also gate_bias, up_bias [experts, width] and down_bias [experts, embed]. `limit`
    is `DecoderConfig.expert_limit`.
    """

    def __init__(
        self,
        embed_dim: int,
        width: int,
        number: int,
        *,
        activation: str,
        stddev: float,
        output_stddev: float,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        limit: float | None = None,
    ) -> None:
        self.activation, self.limit = activation, limit
        self.gate = normal(rngs, (number, embed_dim, width), stddev)
        self.up = normal(rngs, (number, embed_dim, width), stddev)
        self.down = normal(rngs, (number, width, embed_dim), output_stddev)
        self.names = ("gate", "up", "down")
        if use_bias:
            self.gate_bias = nnx.Param(jnp.zeros((number, width), jnp.float32))
            self.up_bias = nnx.Param(jnp.zeros((number, width), jnp.float32))
            self.down_bias = nnx.Param(jnp.zeros((number, embed_dim), jnp.float32))
            self.names = (*self.names, "gate_bias", "up_bias", "down_bias")

    def __call__(self, x: jax.Array, gates: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
        """Computes the sum of the chosen experts' outputs times `gates`, [..., embed].

        Args:
          x: [..., embed].
          gates, ids: factors and indices of the chosen experts, [..., k].
          **options: options of `zerojax.experts`.
        """
        weights = {name: getattr(self, name)[...] for name in self.names}
        x = x.astype(weights["gate"].dtype)
        apply = _GatedMlps(self.activation, self.limit)
        return experts(x, gates, ids, weights, apply, **options)


def _batched(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    """Multiplies [experts, rows, in] with [experts, in, out] to [experts, rows, out]."""
    return lax.dot_general(rows, kernels, (((2,), (1,)), ((0,), (0,))))


@dataclass(frozen=True)
class _GatedMlps:
    """Function that computes down(f(gate(x)) * up(x)) of each expert for the expert's rows; with
    `limit` as described for `DecoderConfig.expert_limit`."""

    activation: str
    limit: float | None = None

    def __call__(
        self, weights: dict[str, jax.Array], rows: jax.Array, product: Product = _batched
    ) -> jax.Array:
        """Computes the experts' outputs for their rows, in the shape of `rows`.

        Args:
          weights: {name: [experts, in, out]}, and biases {name + "_bias": [experts, out]} or none.
          rows: [experts, rows, embed], or, without biases, [rows, embed] sorted by expert.
          product: function that multiplies such rows with [experts, in, out].
        """

        def project(rows: jax.Array, name: str) -> jax.Array:
            result, bias = product(rows, weights[name]), weights.get(f"{name}_bias")
            return result if bias is None else result + bias.astype(result.dtype)[:, None]

        gates, wide = project(rows, "gate"), project(rows, "up")
        if self.limit is not None:
            gates = jnp.minimum(gates, self.limit)
            wide = jnp.clip(wide, -self.limit, self.limit) + 1
        return project(ACTIVATIONS[self.activation](gates) * wide, "down")


class MoE(nnx.Module):
    """Mixture of gated experts that replaces an MLP; dropless unless `capacity_factor` is set.

    y = sum over the chosen experts e of factor_e * down_e(f(gate_e(x)) * up_e(x)), plus the output
    of the shared MLP, if there is one. Row e of `experts.gate`, `experts.up` and `experts.down`
    has the parameters of expert e.
    """

    expert_parameters: ClassVar[tuple[str, ...]] = EXPERT_PARAMETERS
    """Regular expressions for parameters that are sharded over the mesh axis `expert`."""

    def __init__(
        self,
        embed_dim: int,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        activation: str = "silu",
        stddev: float = 0.02,
        output_stddev: float = 0.02,
        use_bias: bool = False,
        limit: float | None = None,
    ) -> None:
        """Draws float32 parameters from N(0, stddev^2), `down` from N(0, output_stddev^2).

        Args:
          embed_dim: number of features of a token.
          config: settings of the experts, with `num_experts` and `expert_dim`.
          rngs: random streams of the parameters.
          activation: activation of the MLPs, as in `DecoderConfig`.
          stddev, output_stddev: standard deviations of the parameters.
          use_bias: whether experts and the router's logits have biases, which start at 0.
          limit: limit of the experts' hidden units, see `DecoderConfig.expert_limit`.

        Raises:
          ValueError: `num_experts` is 0, `expert_dim` is None, or biases are combined with products
            other than "batched".
        """
        if not config.num_experts or config.expert_dim is None:
            raise ValueError(
                f"num_experts={config.num_experts}, expert_dim={config.expert_dim}: a mixture "
                "needs at least one expert and the width of its experts; set both"
            )
        if use_bias and config.products != "batched":
            raise ValueError(
                f"moe.products={config.products!r} with biases of experts is not supported, since "
                "rows sorted by expert do not tell whose bias they need; use products='batched'"
            )
        self.config = config
        self.deterministic = False  # set by eval(): no choice is then dropped
        self.router = Router(embed_dim, config, stddev=stddev, rngs=rngs, use_bias=use_bias)
        options: dict[str, Any] = {
            "activation": activation,
            "stddev": stddev,
            "output_stddev": output_stddev,
            "rngs": rngs,
        }
        self.experts = GatedExperts(
            embed_dim,
            config.expert_dim,
            config.num_experts,
            use_bias=use_bias,
            limit=limit,
            **options,
        )
        self.shared = (
            Mlp(embed_dim, config.shared_dim, gated=True, use_bias=False, **options)
            if config.shared_dim
            else None
        )

    def __call__(self, x: jax.Array, counts: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """Computes (outputs [..., embed] in the dtype of the experts, routing statistics).

        Args:
          x: [..., embed].
          counts: bool [...], False for tokens to exclude from the statistics (padding); None
            includes all. All tokens are routed to experts.
        """
        gates, ids, routing = self.router(x, counts)
        keep, slack = self._within_capacity(ids)
        products = self.config.products
        y = self.experts(x, gates, ids, slack=slack, keep=keep, products=products)
        number = self.config.num_experts
        if keep is not None:
            routing = routing._replace(dropped=jnp.sum(~keep, dtype=jnp.float32))
            ids = jnp.where(keep, ids, number)
        rounds = rounds_needed(ids, number, slack, products=products)
        routing = routing._replace(rounds=rounds.astype(jnp.float32))
        return (y if self.shared is None else y + self.shared(x).astype(y.dtype)), routing

    def _within_capacity(self, ids: jax.Array) -> tuple[jax.Array | None, float]:
        """Computes (mask of the kept choices, or None for all; ratio of slots to the mean load).

        The mask is bool [..., tokens, k]. Earlier tokens of a sequence have priority, so that the
        mask depends neither on later tokens nor on how sequences are distributed over devices.
        """
        factor, number = self.config.capacity_factor, self.config.num_experts
        if factor is None or self.deterministic:
            return None, SLACK
        ids = mark_whole_sequences(ids, f"moe.capacity_factor={factor:g}")
        tokens, k = ids.shape[-2:]
        capacity = math.ceil(factor * tokens * k / number)
        hot = jax.nn.one_hot(ids, number, dtype=jnp.int32).sum(-2)
        earlier = jnp.cumsum(hot, axis=-2) - hot
        keep = jnp.take_along_axis(earlier, ids, axis=-1) < capacity
        return keep, capacity * number / (tokens * k)


def balance_losses(routing: Routing, config: MoEConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the balance loss to add to a mean loss, and metrics.

    Statistics are summed over the whole batch (`zerojax.batch_sum`), or over each microbatch, so
    that the result equals the result of one device with all rows.

    Args:
      routing: statistics of all layers, [layers, ...], for this device's tokens.
      config: settings, of which `balance`, `balance_weight` and `z_weight` are used.

    Returns:
      (loss, float32 []: weighted balance loss, which is summed over layers unless
      balance="hugging_face", plus z-loss, summed over layers; metrics). "moe_balance": unweighted
      balance loss, the mean over layers unless balance="hugging_face"; its value at equal loads is
      1, or `experts_per_token` with balance="hugging_face". "moe_fullest": load of the fullest
      expert divided by the mean load, the maximum over layers. "moe_rounds": number of rounds of
      `zerojax.experts`, the maximum over layers and devices. "moe_dropped": dropped choices,
      including those of padding, divided by the choices of all tokens without padding, the maximum
      over layers; 0 without `capacity_factor`.
    """
    whole = _summed(routing)
    experts_of_token, number = config.experts_per_token, config.num_experts
    layers = whole.squares.shape[0]
    tokens = jnp.maximum(whole.tokens, 1)
    shares = lax.stop_gradient(whole.chosen) / (tokens * experts_of_token)
    scores = whole.scores / tokens
    if config.balance == "hugging_face":
        shares_of_all, scores_of_all = jnp.mean(shares, 0), jnp.mean(scores, 0)
        balance = number * experts_of_token * jnp.sum(shares_of_all * scores_of_all)
        added = balance
    else:
        added = number * jnp.sum(shares * scores)
        balance = added / layers
    added = config.weight_of_balance * added
    if config.z_weight:
        added = added + config.z_weight * jnp.sum(whole.squares) / tokens
    metrics = {
        "moe_balance": balance,
        "moe_fullest": jnp.max(shares) * number,
        "moe_rounds": jnp.max(whole.rounds),
        "moe_dropped": jnp.max(whole.dropped) / (tokens * experts_of_token),
    }
    return added, metrics


def _summed(routing: Routing) -> Routing:
    """Sums statistics over the whole batch in one collective; `rounds` is the maximum."""
    sums = [jnp.asarray(x) for name, x in routing._asdict().items() if name != "rounds"]
    flat = batch_sum(jnp.concatenate([jnp.ravel(x) for x in sums]))
    totals, start = [], 0
    for x in sums:
        totals.append(flat[start : start + x.size].reshape(x.shape))
        start += x.size
    *other_totals, dropped = totals
    return Routing(*other_totals, rounds=batch_max(jnp.max(routing.rounds)), dropped=dropped)
