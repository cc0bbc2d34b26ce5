"""Options of the watchdog: time limits of a run without progress."""

from dataclasses import dataclass

from zerojax.config.checks import check_at_least, check_positive
from zerojax.config.keywords import names_keywords
from zerojax.config.loader import coerce_fields

MIN_STEP_SECONDS = 600.0
"""What PyTorch gives an NCCL collective."""
LONGEST_STEPS = 3.0
MIN_STOP_SECONDS, MAX_STOP_SECONDS = 60.0, 600.0
STOP_STEPS = 3.0
"""When a signal comes one step may be on the devices and the next one be given to them; several
processes may agree on the one after that."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """A process that gets no further dumps the stacks of its threads and ends, with code 79."""

    step_timeout: float | None = None
    """Seconds for one step, for one batch of data, and for one batch of an evaluation. 0: no
    limit. null: 600, or three times the longest step so far if that is more; no limit in an
    interactive interpreter."""
    long_timeout: float = 3600.0
    """Seconds for rare, long work: compilation with the first step, a callback, saving and
    restoring a checkpoint. None of these counts for `step_timeout` or for the longest step."""
    stop_timeout: float | None = None
    """Seconds after the first Ctrl-C or SIGTERM for the work in progress to end; then the
    process exits with status 128 + the signal's number. Saving is waited for. 0: no limit.
    null: 60, or three times the longest step so far if that is more, at most 600; no limit in
    an interactive interpreter."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "step_timeout", "stop_timeout")
        check_positive(self, "long_timeout")

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever ended."""
        return self.step_timeout == 0

    def step_limit(self, longest_step: float | None) -> float:
        """Seconds that a step may take.

        Args:
          longest_step: seconds of the longest one so far, without compiling; None: there was none.
        """
        if self.step_timeout is not None:
            return self.step_timeout
        if longest_step is None:
            return self.long_timeout
        return max(MIN_STEP_SECONDS, LONGEST_STEPS * longest_step)

    def stop_limit(self, longest_step: float | None) -> float | None:
        """Seconds that what is under way may still take after a signal; None: any number.

        Args:
          longest_step: as in `step_limit`.
        """
        if self.stop_timeout is not None:
            return self.stop_timeout or None
        return min(max(MIN_STOP_SECONDS, STOP_STEPS * (longest_step or 0.0)), MAX_STOP_SECONDS)
