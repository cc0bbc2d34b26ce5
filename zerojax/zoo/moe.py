"""Mixture of experts: router, expert MLPs, and what keeps experts equally busy.

The router computes in float32 whatever the compute dtype: two experts whose scores differ by less
than bfloat16 can say would be confused. Of its scores only those of the experts that a token goes
through become factors; which of two equal scores wins is not promised.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zerojax.config.expert_settings import MoEConfig
from zerojax.models.step_count import StepCount
from zerojax.operators.grouped_products import Product
from zerojax.operators.marks import mark_whole_sequences
from zerojax.operators.routed_experts import SLACK, experts, rounds_needed
from zerojax.operators.whole_batch import batch_max, batch_sum
from zerojax.zoo.layers import ACTIVATIONS, Mlp, normal

EXPERT_PARAMETERS = (r"experts/(gate|up|down)$",)
"""What the names of parameters that are experts' end with."""


class Routing(NamedTuple):
    """What a router saw of the tokens of this device, in sums; of one layer, or of several.

    All are float32; layers, where there are several, are the first dimension of all but `tokens`.
    """

    chosen: jax.Array
    """[num_experts]: how many tokens go through each expert. Without a gradient."""
    scores: jax.Array
    """[num_experts]: sums of each expert's scores, each token's scores divided by their sum."""
    squares: jax.Array
    """[]: sum of the squares of log(sum(exp(logits)))."""
    tokens: jax.Array
    """[]: number of tokens that count."""
    rounds: jax.Array
    """[]: rounds that the experts take for these tokens, padding too; 0: nobody counted them. Of
    several devices the most count, not the sum."""
    dropped: jax.Array | float = 0.0
    """[]: choices that were left out for `capacity_factor`, padding's too."""

    @classmethod
    def empty(cls, num_layers: int, num_experts: int) -> Routing:
        """Of layers that have seen nothing yet."""
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        each = zeros((num_layers, num_experts))
        of_layers = zeros(num_layers)
        return cls(each, each, of_layers, zeros(()), of_layers, of_layers)

    def push(self, layer: Routing) -> Routing:
        """With one more layer at the end, and without the first; so a loop needs no index."""

        def moved(rows: Any, new: Any) -> jax.Array:
            return jnp.concatenate([rows[1:], jnp.asarray(new)[None]])

        return Routing(
            chosen=moved(self.chosen, layer.chosen),
            scores=moved(self.scores, layer.scores),
            squares=moved(self.squares, layer.squares),
            tokens=layer.tokens,
            rounds=moved(self.rounds, layer.rounds),
            dropped=moved(self.dropped, layer.dropped),
        )


@dataclasses.dataclass(frozen=True)
class TowardsMean:
    """The rule of balance without a loss (arXiv:2408.15664): bias + rate * sign(mean - load)."""

    rate: float

    def __call__(self, bias: jax.Array, load: jax.Array) -> jax.Array:
        """float32 [experts], int32 [experts] -> the next bias.

        Which side of the mean a load is on is told in integers: a float32 sum of large loads
        depends on its order.
        """
        number = load.shape[-1]
        rest = jnp.sum(load % number)
        mean = jnp.sum(load // number) + rest // number  # rounded down; no sum of all loads
        is_equal = (load == mean) & (rest % number == 0)
        sign = jnp.where(is_equal, 0, jnp.where(load > mean, -1, 1))
        return bias + jnp.asarray(self.rate, bias.dtype) * sign.astype(bias.dtype)


class Router(nnx.Module):
    """Scores of experts, and each token's choice of them.

    With `config.bias_rate` it has `bias` float32 [experts] and `load` int32 [experts], the numbers
    of tokens that count, of the step so far (see `StepCount`).
    """

    bias: nnx.Variable[jax.Array] | None = None
    load: StepCount | None = None

    def __init__(self, embed_dim: int, config: MoEConfig, *, stddev: float, rngs: nnx.Rngs) -> None:
        number = config.num_experts
        self.config = config
        self.kernel = normal(rngs, (embed_dim, number), stddev)
        self.deterministic = False  # eval() sets it: nothing is counted
        if config.bias_rate is not None:
            self.bias = nnx.Variable(jnp.zeros(number, jnp.float32))
            rule = TowardsMean(config.bias_rate)
            self.load = StepCount(jnp.zeros(number, jnp.int32), changes="bias", rule=rule)

    def __call__(
        self, x: jax.Array, counts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Routing]:
        """[..., embed] -> (factors float32 [..., k], experts int32 [..., k], sums over all tokens).

        Args:
          x: any float dtype; cast to float32.
          counts: bool [...], tokens that the sums count; None: all.
        """
        config = self.config
        logits = jnp.matmul(
            x.astype(jnp.float32),
            self.kernel[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
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
        """[..., experts] -> (scores of the chosen experts, without biases, and their numbers)."""
        k = self.config.experts_per_token
        if self.bias is None:
            gates, ids = lax.top_k(self._in_best_groups(scores), k)
            return gates, ids
        bias = self.bias[...].astype(scores.dtype)
        biased = lax.stop_gradient(scores) + jnp.broadcast_to(bias, scores.shape)
        ids = lax.top_k(self._in_best_groups(biased), k)[1]
        return jnp.take_along_axis(scores, ids, axis=-1), ids

    def _in_best_groups(self, scores: jax.Array) -> jax.Array:
        """The scores [..., experts], less than any outside of the groups with the highest."""
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
    """The sum over the last dimension; that of scores which are all 0 is no divisor."""
    return jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-20)


class GatedExperts(nnx.Module):
    """The gated MLPs of all experts: gate, up [experts, embed, width], down [.., width, embed]."""

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
    ) -> None:
        self.activation = activation
        self.gate = normal(rngs, (number, embed_dim, width), stddev)
        self.up = normal(rngs, (number, embed_dim, width), stddev)
        self.down = normal(rngs, (number, width, embed_dim), output_stddev)

    def __call__(self, x: jax.Array, gates: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
        """[..., embed] -> the sum of the chosen experts' results times `gates`, [..., embed].

        Args:
          **options: of `zerojax.experts`.
        """
        weights = {name: getattr(self, name)[...] for name in ("gate", "up", "down")}
        x = x.astype(weights["gate"].dtype)
        return experts(x, gates, ids, weights, _GatedMlps(self.activation), **options)


def _batched(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    """[experts, rows, in], [experts, in, out] -> [experts, rows, out]."""
    return lax.dot_general(rows, kernels, (((2,), (1,)), ((0,), (0,))))


@dataclasses.dataclass(frozen=True)
class _GatedMlps:
    """down(f(gate(x)) * up(x)) of each expert, for its own rows."""

    activation: str

    def __call__(
        self, weights: dict[str, jax.Array], rows: jax.Array, product: Product = _batched
    ) -> jax.Array:
        """{name: [experts, in, out]}, [..., embed] -> the shape of the rows.

        Args:
          rows: [experts, rows, embed], or sorted by expert [rows, embed].
          product: of such rows with [experts, in, out].
        """
        opened = ACTIVATIONS[self.activation](product(rows, weights["gate"]))
        return product(opened * product(rows, weights["up"]), weights["down"])


class MoE(nnx.Module):
    """A mixture of gated experts, in place of an MLP; dropless.

    y = sum over the chosen experts e of factor_e * down_e(f(gate_e(x)) * up_e(x)), and the shared
    MLP's result where there is one. Expert e's parameters are row e of `experts.gate`, `experts.up`
    and `experts.down`.
    """

    expert_parameters: ClassVar[tuple[str, ...]] = EXPERT_PARAMETERS
    """Of a model with such mixtures; the mesh axis `expert` splits what these expressions find."""

    def __init__(
        self,
        embed_dim: int,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        activation: str = "silu",
        stddev: float = 0.02,
        output_stddev: float = 0.02,
    ) -> None:
        """Parameters are float32, drawn from N(0, stddev^2), `down` from N(0, output_stddev^2).

        Args:
          embed_dim: width of the tokens.
          config: with `num_experts` and `expert_dim`.
          activation: of the MLPs, as `DecoderConfig.activation`.

        Raises:
          ValueError: no experts, or experts without a width.
        """
        if not config.num_experts or config.expert_dim is None:
            raise ValueError(
                f"num_experts={config.num_experts}, expert_dim={config.expert_dim}: a mixture has "
                "at least one expert, and experts have a width; give both"
            )
        self.config = config
        self.deterministic = False  # eval() sets it: no choice is left out
        self.router = Router(embed_dim, config, stddev=stddev, rngs=rngs)
        options: dict[str, Any] = {
            "activation": activation,
            "stddev": stddev,
            "output_stddev": output_stddev,
            "rngs": rngs,
        }
        self.experts = GatedExperts(embed_dim, config.expert_dim, config.num_experts, **options)
        self.shared = (
            Mlp(embed_dim, config.shared_dim, gated=True, use_bias=False, **options)
            if config.shared_dim
            else None
        )

    def __call__(self, x: jax.Array, counts: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """[..., embed] -> ([..., embed] in the dtype of the experts, what the router saw).

        Args:
          counts: bool [...], the tokens that `Routing` counts; None: all. All go through experts.
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
        """(which choices [..., tokens, k] an expert takes, or None for all; slots per mean load).

        The first tokens of a sequence come first, so that nothing depends on later ones, nor on how
        sequences are divided over devices.
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
    """What is to be added to a mean loss so that experts are used equally, and numbers for a log.

    Sums are taken over the whole batch (`zerojax.batch_sum`), of a microbatch where there are
    several, so that the result is that of one device with all rows.

    Args:
      routing: of all layers, [layers, ...], from this device's tokens.
      config: its `balance`, `balance_weight` and `z_weight`.

    Returns:
      (float32 [], {"moe_balance": the unweighted balance, a mean over layers, least (1, or
      `experts_per_token` in transformers' form) where all experts are equally busy; "moe_fullest":
      rows of the fullest expert over the mean, of the worst layer; "moe_rounds": rounds of
      `zerojax.experts`, of the layer and device that take the most; with `capacity_factor`
      "moe_dropped": choices that were left out over those of the tokens that count, of the layer
      with the most}).
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
    }
    if config.capacity_factor is not None:
        metrics["moe_dropped"] = jnp.max(whole.dropped) / (tokens * experts_of_token)
    return added, metrics


def _summed(routing: Routing) -> Routing:
    """The sums over the whole batch, of all numbers together: one collective; most rounds."""
    sums = [jnp.asarray(x) for name, x in routing._asdict().items() if name != "rounds"]
    flat = batch_sum(jnp.concatenate([jnp.ravel(x) for x in sums]))
    found, first = [], 0
    for x in sums:
        found.append(flat[first : first + x.size].reshape(x.shape))
        first += x.size
    *first_ones, dropped = found
    return Routing(*first_ones, rounds=batch_max(jnp.max(routing.rounds)), dropped=dropped)
