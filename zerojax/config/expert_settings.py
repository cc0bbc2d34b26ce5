"""Options of a mixture of experts: their number, the choice of tokens, and the load balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerojax.config.checks import check_at_least, check_positive, check_size, names_keywords, refuse
from zerojax.config.loader import coerce_fields


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts instead of each layer's MLP (arXiv:1701.06538, arXiv:2401.04088).

    A router gives each token a score for each expert; the token is processed by the experts with
    the highest scores, and their results are added, weighted by the scores. No token is dropped.
    """

    num_experts: int = 0
    """Experts of each layer; 8 to 128 are usual. 0: an MLP that processes all tokens."""
    experts_per_token: int = 2
    """Experts that process each token, those with its highest scores; 2 to 8 are usual."""
    expert_dim: int | None = None
    """Hidden width of one expert, a gated MLP. null: mlp_dim of the model."""
    shared_dim: int = 0
    """Hidden width of one more gated MLP that processes every token; its result is added unweighted
    (DeepSeek's shared experts, arXiv:2401.06066). 0: none."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores: softmax over all experts, or sigmoid of each."""
    num_groups: int = 1
    """Groups of neighbouring experts. A token first chooses some groups by the sum of the two
    highest scores in each (DeepSeek-V3's n_group, arXiv:2412.19437), so that it is sent to few
    devices. 1: each token chooses among all experts."""
    groups_per_token: int = 1
    """Groups that a token chooses its experts from."""
    renormalize: bool = True
    """Divide the scores of a token's experts by their sum (Mixtral)."""
    scale: float = 1.0
    """Factor of the scores, applied last (DeepSeek's routed_scaling_factor)."""
    balance: Literal["layers", "hugging_face"] = "layers"
    """Auxiliary loss that keeps experts equally busy. layers: for each layer, number of experts
    times the sum over experts of (share of choices) x (mean score), which is 1 if all are equally
    busy (arXiv:2101.03961). hugging_face: once, over the tokens of all layers together, times
    experts_per_token, as transformers computes it."""
    balance_weight: float | None = None
    """Factor of the auxiliary loss. null: 0.01 as in arXiv:2101.03961, with bias_rate 0. 0: no
    auxiliary loss."""
    z_weight: float = 0.0
    """Factor of the mean square of the router's log-sum-exp, which keeps its logits small
    (arXiv:2202.08906 uses 0.001). 0: not added."""
    bias_rate: float | None = None
    """Balances experts without a loss (arXiv:2408.15664): each expert has a bias, which is added to
    its scores only for the choice. After each step the bias is raised by this amount if the expert
    had fewer tokens than the mean, and lowered if it had more. 0.001 is usual (DeepSeek-V3); 0:
    biases stay constant. null: no biases."""

    capacity_factor: float | None = None
    """In training each expert takes at most capacity_factor times the mean load of each sequence,
    rounded up; later tokens of the sequence skip the expert (GShard, arXiv:2006.16668). Time and
    memory then do not depend on the load. 1.25 is usual. null: no token skips its experts."""
    products: Literal["batched", "grouped", "loop"] = "batched"
    """Implementation of the experts' matrix products. batched: one product of all experts, with
    room for 1.25 times the mean load of each, on any device. grouped: a kernel for Hopper GPUs
    multiplies only the occupied tiles of rows, in bfloat16 or float16, widths in multiples of
    64; not yet timed on a GPU. loop: these tiles one after the other, on any device; slow, for
    tests."""

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
                "belongs to a mixture of experts, but there are no experts; set num_experts, "
                "or leave it out",
            )

    @property
    def weight_of_balance(self) -> float:
        """`balance_weight`, or the value that null means."""
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
                "groups; choose from more groups",
            )
