"""Options of a mixture of experts: the number of experts, the choice of experts for each token, and
the load balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerojax.config.checks import check_at_least, check_positive, check_size, names_keywords, refuse
from zerojax.config.loader import coerce_fields


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Settings of a mixture of experts, which replaces the MLP of each layer (arXiv:1701.06538,
    arXiv:2401.04088).

    A router computes a score of each expert for each token. The experts with the highest scores
    process the token, and their results are added with the scores as weights. No token is dropped,
    unless `capacity_factor` is set.
    """

    num_experts: int = 0
    """Number of experts in each layer; 8 to 128 are usual. 0: one MLP that processes all tokens."""
    experts_per_token: int = 2
    """Number of experts that process each token, namely the experts with its highest scores; 2 to 8
    are usual."""
    expert_dim: int | None = None
    """Hidden width of one expert, which is a gated MLP. null: mlp_dim of the model."""
    shared_dim: int = 0
    """Hidden width of an additional gated MLP that processes every token; its result is added with
    weight 1 (DeepSeek's shared experts, arXiv:2401.06066). 0: no such MLP."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores: softmax over all experts, or a sigmoid of each
    logit."""
    num_groups: int = 1
    """Number of groups of neighbouring experts. A token first chooses groups by the sum of the two
    highest scores in each group (DeepSeek-V3's n_group, arXiv:2412.19437), so that it is sent to
    few devices. 1: each token chooses among all experts."""
    groups_per_token: int = 1
    """Number of groups from which a token chooses its experts."""
    renormalize: bool = True
    """Whether the scores of a token's experts are divided by their sum (as in Mixtral)."""
    scale: float = 1.0
    """Factor that multiplies the scores last (DeepSeek's routed_scaling_factor)."""
    balance: Literal["layers", "hugging_face"] = "layers"
    """Auxiliary loss that keeps all experts equally busy. layers: computed for each layer, as the
    number of experts times the sum over experts of (share of choices) x (mean score); it is 1 if
    all experts are equally busy (arXiv:2101.03961). hugging_face: computed once over the tokens of
    all layers and multiplied by experts_per_token, as transformers does."""
    balance_weight: float | None = None
    """Factor of the auxiliary loss. null: 0.01 as in arXiv:2101.03961, or 0 if bias_rate is set. 0:
    no auxiliary loss."""
    z_weight: float = 0.0
    """Factor of an additional loss that keeps the router's logits small: the mean square of their
    log-sum-exp (arXiv:2202.08906 uses 0.001). 0: no such loss."""
    bias_rate: float | None = None
    """Rate of balancing without a loss (arXiv:2408.15664). Each expert has a bias that is added to
    its scores only for the choice of experts. After each step the bias is raised by this rate if
    the expert had fewer tokens than the mean, and lowered if it had more. 0.001 is usual
    (DeepSeek-V3). 0: biases stay constant. null: no biases."""

    capacity_factor: float | None = None
    """Limit of the tokens that an expert takes from each sequence in training: capacity_factor
    times the mean load, rounded up. Later tokens of the sequence skip the expert (GShard,
    arXiv:2006.16668), so time and memory do not depend on the load. 1.25 is usual. null: no
    limit."""
    products: Literal["batched", "grouped", "loop"] = "batched"
    """Implementation of the experts' matrix products. batched: one product for all experts, with
    room for 1.25 times the mean load of each expert; runs on any device. grouped: a kernel for
    Hopper GPUs that multiplies only the occupied tiles of rows, for bfloat16 or float16 and widths
    that are multiples of 64; timed on one H200, with equal loads, where it took 0.79 of the time of
    batched. loop: the occupied tiles one after the other; runs on any device, slowly, for tests."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_size(self, "num_experts", "shared_dim", least=0)
        check_at_least(self, 0, "balance_weight", "z_weight", "bias_rate")
        check_size(self, "experts_per_token", "expert_dim", "num_groups", "groups_per_token")
        check_positive(self, "scale", "capacity_factor")
        if self.num_experts and self.experts_per_token > self.num_experts:
            refuse(
                "experts_per_token",
                self.experts_per_token,
                f"is more than num_experts ({self.num_experts}); use at most {self.num_experts}",
            )
        self._check_groups()
        names = ("expert_dim", "shared_dim", "bias_rate")
        changed = [name for name in names if getattr(self, name)]
        if not self.num_experts and changed:
            refuse(
                changed[0],
                getattr(self, changed[0]),
                "applies only to a mixture of experts, but num_experts is 0; set num_experts, "
                "or leave it out",
            )

    @property
    def weight_of_balance(self) -> float:
        """Factor of the auxiliary loss: `balance_weight`, or for null 0.01 without biases and 0
        with biases."""
        if self.balance_weight is not None:
            return self.balance_weight
        return 0.01 if self.bias_rate is None else 0.0

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            refuse(
                "num_groups",
                self.num_groups,
                f"does not divide num_experts ({self.num_experts}); use 1 for no groups",
            )
        if self.groups_per_token > self.num_groups:
            refuse(
                "groups_per_token",
                self.groups_per_token,
                f"is more than num_groups ({self.num_groups}); use at most {self.num_groups}",
            )
        within = self.num_experts // self.num_groups * self.groups_per_token
        if self.num_experts and self.experts_per_token > within:
            refuse(
                "experts_per_token",
                self.experts_per_token,
                f"is more than the {within} experts of groups_per_token={self.groups_per_token} "
                "groups; raise groups_per_token",
            )
