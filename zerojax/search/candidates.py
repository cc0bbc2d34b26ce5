"""Which combinations of settings are looked at. Counts devices and rows; makes no plan.

Knows what divides what; never what a combination needs or how fast it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
"""Of a reference model, from the most memory to the least."""
MODEL_SIZES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The settings that the search varies.

    Attributes:
      zero: 0..3; model: size of that mesh axis; num_microbatches; remat: "none", "dots" or "full".
    """

    zero: int
    model: int
    num_microbatches: int
    remat: Remat

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The least is the simplest: of equal ones it is preferred."""
        return (self.model, self.num_microbatches, REMATS.index(self.remat), self.zero)

    def words(self) -> tuple[str, ...]:
        """The KEY=VALUE words that set it; `data` takes what the other axes leave."""
        return (
            "mesh.data=-1",
            f"mesh.zero={self.zero}",
            f"mesh.model={self.model}",
            f"num_microbatches={self.num_microbatches}",
            f"model.remat={self.remat}",
        )

    def describe(self) -> str:
        """For people, in one line."""
        plural = "es" if self.num_microbatches > 1 else ""
        return (
            f"zero={self.zero}, model={self.model}, {self.num_microbatches} microbatch{plural}, "
            f"remat={self.remat}"
        )


def list_candidates(
    devices: int,
    global_batch_size: int,
    *,
    node_devices: int,
    replicas: int = 1,
    remats: Sequence[Remat] = REMATS,
) -> list[Candidate]:
    """Every combination that cuts the devices and the batch evenly, from the simplest on.

    Tensor parallelism stays inside a node, and microbatches are powers of two. With one device on
    `data` ZeRO splits nothing, so that only stage 0 is listed.

    Args:
      devices: all; node_devices: that one fast fabric joins.
      global_batch_size: rows.
      replicas: size of the mesh axis `replica`.
      remats: of `REMATS`, what the model takes.
    """
    found = []
    for model in MODEL_SIZES:
        if devices % (model * replicas) or model > node_devices:
            continue
        shards = devices // model
        rows, rest = divmod(global_batch_size, shards)
        if rest:
            continue
        pieces = [2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
        found += [
            Candidate(zero=zero, model=model, num_microbatches=number, remat=remat)
            for zero in range(4 if shards > replicas else 1)
            for number in pieces
            for remat in remats
        ]
    return sorted(found, key=lambda candidate: candidate.simplicity)
