"""Options of low-rank adapters (LoRA): rank, strength and target projections."""

from __future__ import annotations

from dataclasses import dataclass

from zerojax.config.checks import check_at_least, check_fraction, check_positive, check_regex
from zerojax.config.keywords import names_keywords
from zerojax.config.loader import ConfigError, coerce_fields

ADAPTERS_ONLY = (r"^(?!(?:.*/)?lora/[ab]$)",)
"""For `freeze=`: every parameter that is not of an adapter."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): y = W x + alpha / rank * B A x, and only A and B are trained."""

    rank: int = 0
    """Rank of the adapters; 8 is usual. An adapter has rank x (inputs + outputs) parameters. 0:
    no adapters. With adapters all other parameters are frozen."""
    alpha: float = 16.0
    """alpha / rank scales the adapter's output. It is fixed, so that a learning rate keeps its
    meaning at another rank."""
    dropout: float = 0.0
    """Dropout probability of the input of A."""
    targets: tuple[str, ...] = ("attention/", "mlp/")
    """Regular expressions on names of projections, such as blocks/attention/query. The default
    is every projection of the layers, which matched full fine-tuning where query and value
    alone did not (arXiv:2305.14314, section 4)."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "rank")
        check_positive(self, "alpha")
        check_fraction(self, "dropout", below_one=True)
        if not self.targets:
            raise ConfigError(
                "names no projection; give regexes such as attention/(query|value)", ("targets",)
            )
        for pattern in self.targets:
            check_regex("targets", pattern)

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / self.rank if self.rank else 0.0

    @property
    def freeze(self) -> tuple[str, ...]:
        """For `freeze=`: everything but the adapters stays as it is; nothing without adapters."""
        return ADAPTERS_ONLY if self.rank else ()
