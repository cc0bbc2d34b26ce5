"""Program rules: what the compiled program of a run's training step must keep.

Settings only. `zerojax.forecasting.program_rules` reads the compiled step and checks it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from zerojax.config.checks import check_at_least, check_positive, check_regex, names_keywords
from zerojax.config.loader import coerce_fields


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class ExpectConfig:
    """Rules that the compiled training step must keep; `zerojax plan` and `zerojax.expect` check
    them. Training does not.

    Sizes are per device. A rule that is null, false or empty is not checked.
    """

    no_gather: tuple[str, ...] = ()
    """Regular expressions on names of parameters that no device may gather whole. One layer of a
    stack counts as whole. A gather over `data` of a tensor-parallel part is not whole."""
    max_gather_mb: float | None = None
    """Megabytes (10^6 bytes): the largest all-gather that the plan does not make on purpose. On
    purpose are gathers of parameters over the axes of ZeRO, as often as the plan says, and those of
    attention over `context` and of optimizers of whole matrices."""
    max_wire_gb: float | None = None
    """Gigabytes (10^9 bytes) that one device may send per step."""
    max_network_gb: float | None = None
    """Gigabytes that one device may send per step between nodes; needs a GPU's name, whose nodes
    are known."""
    gradients_in: Literal["fp32", "bf16", "fp16"] | None = None
    """Narrowest dtype in which gradients may be summed over devices; fp32 refuses 16-bit floats and
    codes."""
    max_replicated_mb: float | None = None
    """Megabytes: the largest value computed from the batch that collectives make whole on every
    device: gathered over any axis, or summed over the axes that split the batch."""
    rules_split: bool = False
    """Every sharding rule (mesh.rules, or those of the model) is the first that matches some
    parameter, and splits it or exempts it from a later rule."""
    max_peak_gib: float | None = None
    """GiB (2^30 bytes): the most device memory that the step may use at once."""
    layer_loops: int | None = None
    """Most loops over layers; usually 1. The step must have at least one, and no layers of a list
    outside of loops."""
    fused_attention: bool = False
    """Attention runs in a kernel (cuDNN or Pallas) everywhere: no products store scores, and the
    step calls a kernel. Needs a GPU's name or GPUs, as CPUs have no such kernel."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for pattern in self.no_gather:
            check_regex("no_gather", pattern)
        limits = ("max_gather_mb", "max_wire_gb", "max_network_gb", "max_replicated_mb")
        check_at_least(self, 0, *limits)
        check_positive(self, "max_peak_gib")
        check_at_least(self, 1, "layer_loops")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rules that are set, in the order of the fields."""
        return tuple(
            field.name
            for field in dataclasses.fields(self)
            if not any(getattr(self, field.name) is unset for unset in (None, False, ()))
        )
