"""Options of checkpoints, logs and reports."""

from dataclasses import dataclass
from typing import Literal

from zerojax.config.checks import check_at_least, check_positive, refuse
from zerojax.config.keywords import names_keywords
from zerojax.config.loader import coerce_fields


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the whole state is saved, and how many are kept."""

    path: str | None = None
    """Folder. null: `checkpoints` in the run folder."""
    every: int = 500
    """Steps between saves. A save overlaps with training."""
    keep: int = 3
    """Number of newest checkpoints to keep; one is not enough if the newest turns out to be
    damaged."""
    save_on_exit: bool = True
    """Also save after the last step and on Ctrl-C."""
    asynchronous: bool = True
    """Write in the background after one copy to the host."""
    fingerprints: bool = True
    """Compute a fingerprint of each array on its devices, and compare it after a restore."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 1, "every", "keep")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is reported, where and how often. metrics.jsonl is always written."""

    every: int = 10
    """Steps between reports. Reading metrics waits for the device, so the default is not every
    step."""
    tensorboard: bool = True
    """Write TensorBoard event files; this takes microseconds and no dependency."""
    wandb: str | None = None
    """Weights & Biases project; null: not used."""
    console: Literal["auto", "live", "lines", "quiet"] = "auto"
    """auto: one live line on a terminal, one line per report elsewhere."""
    spike: float | None = 8.0
    """A loss is reported as a spike if it is this many robust standard deviations above the
    median of the last 100 steps. null: no detection."""
    straggler: float | None = 0.2
    """A process is reported as a straggler if the others wait for it for more than this
    fraction of a step, at three reports in a row. null: no detection."""
    profile: tuple[int, ...] = ()
    """[FIRST, LAST] steps whose trace process 0 writes into the run folder, as in [10, 13]; not
    step 1, which compiles."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 1, "every")
        check_positive(self, "spike", "straggler")
        steps = self.profile
        if steps and not (len(steps) == 2 and 2 <= steps[0] <= steps[1]):
            refuse("profile", list(self.profile), "is not [FIRST, LAST] with 2 <= FIRST <= LAST")
