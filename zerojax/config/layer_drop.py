"""Progressive layer drop: its settings, and the probability with which a step keeps each layer.

This module only computes numbers and imports no JAX. The schedule is DeepSpeed's
(`runtime/progressive_layer_drop.py`). The probabilities are from Zhang and He 2020
(arXiv:2010.13369).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerojax.config.checks import check_at_least, names_keywords, refuse
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.loader import coerce_fields

GAMMA = 0.001


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LayerDropConfig(FeatureSettings):
    """Settings of progressive layer drop (arXiv:2010.13369): each step skips randomly chosen
    layers, which are drawn again for every microbatch."""

    keyword = "layer_drop"
    switch = "theta"
    ds_section = "progressive_layer_drop"

    theta: float = 1.0
    """Probability, after many steps, that the last layer is kept. Earlier layers are kept more
    often. 1: no layer is skipped. DeepSpeed recommends 0.5."""
    gamma: float = GAMMA
    """Rate at which the probability falls from 1 to theta: after 1 / gamma steps it has fallen 63 %
    of the way."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if not 0 < self.theta <= 1:
            reason = "must be above 0 and at most 1; 0.5 is usual, and 1 keeps every layer"
            refuse("theta", self.theta, reason)
        check_at_least(self, 0, "gamma")
        if self.theta == 1 and self.gamma != GAMMA:
            refuse("gamma", self.gamma, "has no effect with theta=1; set theta, such as 0.5")

    def summary(self) -> list[tuple[str, str]]:
        text = f"kept with a probability that falls from 1 to {self.theta:g} (the last)"
        return [("layers", text)]

    @staticmethod
    def resume_note(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
        return (
            f"the layer_drop of this call, {new or 'none'}, is used from step {step} on; the saved "
            f"run had {old or 'none'}"
        )

    def theta_of(self, step: Any, exp: Callable[[Any], Any] = math.exp) -> Any:
        """Returns the probability of keeping the last layer in a step.

        Args:
          step: number of completed steps.
          exp: exponential function for the type of `step`, such as `jnp.exp` for an array.
        """
        return (1 - self.theta) * exp(-self.gamma * step) + self.theta

    def kept(self, num_layers: int, step: int | None = None) -> float:
        """Returns the expected fraction of layers that a step keeps.

        Args:
          num_layers: number of layers that can be skipped.
          step: number of completed steps. None: the limit after many steps.
        """
        theta = self.theta if step is None else self.theta_of(step)
        return 1 - (1 - theta) * (num_layers + 1) / (2 * num_layers)
