"""Recognition of errors that follow from the end of another process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import jax

from zerojax.runtime.exit_codes import FAILED

_SIGNS = re.compile(
    r"\bgloo\b|\bNCCL\b|nccl(UnhandledCuda|System|Remote|Internal)Error"
    r"|coordination service|CoordinationService|coordination agent|PjRt-Client-Connect"
    r"|Connection reset by peer|Connection closed by peer|heartbeat",
    re.IGNORECASE,
)


class PeerLostError(RuntimeError):
    """Another process of this run has ended, so that this one cannot go on.

    Args:
      step: the last that was begun here.
      saved: steps of the checkpoints there are.
      resume_hint: how the run goes on.
    """

    exit_code = FAILED
    is_bad_input = False

    def __init__(self, step: int, saved: Sequence[int], resume_hint: str) -> None:
        last = f"the last checkpoint is step {saved[-1]}" if saved else "no step is saved"
        super().__init__(
            f"another process of this run has ended, which this one (process {jax.process_index()}"
            f" of {jax.process_count()}) saw after step {step}; its own words say why; {last}; "
            f"{resume_hint}"
        )


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error, or what led to it, comes from a connection to another process."""
    return any(_SIGNS.search(str(each)) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
