"""Progressive layer drop: settings, and the probability with which each layer is kept.

Arithmetic only; imports no JAX. The schedule is DeepSpeed's (`runtime/progressive_layer_drop.py`),
the probabilities are those of Zhang and He 2020 (arXiv:2010.13369).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerojax.config.checks import check_at_least, names_keywords, refuse
from zerojax.config.loader import coerce_fields

GAMMA = 0.001


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LayerDropConfig:
    """Progressive layer drop (arXiv:2010.13369): steps leave out layers, drawn anew for each
    microbatch."""

    theta: float = 1.0
    """Probability of keeping the last layer, after many steps. The first layers are kept more
    often. 1: no layer is left out. DeepSpeed advises 0.5."""
    gamma: float = GAMMA
    """Rate at which the probability falls from 1 to theta: 63 % of the way in 1 / gamma steps."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if not 0 < self.theta <= 1:
            reason = "must be above 0 and at most 1; 0.5 is usual, and 1 keeps every layer"
            refuse("theta", self.theta, reason)
        check_at_least(self, 0, "gamma")
        if self.is_off and self.gamma != GAMMA:
            refuse("gamma", self.gamma, "has no effect with theta=1; set theta, such as 0.5")

    @property
    def is_off(self) -> bool:
        """Whether every layer is kept in every step."""
        return self.theta == 1.0

    def theta_of(self, step: Any, exp: Callable[[Any], Any] = math.exp) -> Any:
        """Returns the probability of keeping the last layer in a step.

        Args:
          step: number of steps before it.
          exp: exponential function for the type of `step`.
        """
        return (1 - self.theta) * exp(-self.gamma * step) + self.theta

    def kept(self, num_layers: int, step: int | None = None) -> float:
        """Returns the expected fraction of layers that a step keeps.

        Args:
          num_layers: of the loop.
          step: number of steps before it; None: after many steps.
        """
        theta = self.theta if step is None else self.theta_of(step)
        return 1 - (1 - theta) * (num_layers + 1) / (2 * num_layers)
