"""Candidate settings of a search."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
"""Of a reference model, from the most memory to the least."""
MODEL_SIZES = (1, 2, 4, 8)
STAGE_SIZES = (1, 2, 4, 8)
MICROBATCHES_PER_STAGE = 2
"""Fewest with which a pipeline is looked at: its bubble is then below a third."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The settings that the search varies.

    Attributes:
      zero: 0..3; model, stage: sizes of these mesh axes; num_microbatches; remat: "none", "dots" or
        "full".
    """

    zero: int
    model: int
    num_microbatches: int
    remat: Remat
    stage: int = 1

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The least is the simplest: of equal ones it is preferred."""
        remat = REMATS.index(self.remat)
        return (self.stage, self.model, self.num_microbatches, remat, self.zero)

    def words(self) -> tuple[str, ...]:
        """The KEY=VALUE words that set it; `data` takes what the other axes leave."""
        return (
            "mesh.data=-1",
            f"mesh.zero={self.zero}",
            f"mesh.model={self.model}",
            f"mesh.stage={self.stage}",
            f"num_microbatches={self.num_microbatches}",
            f"model.remat={self.remat}",
        )

    def describe(self) -> str:
        """For people, in one line."""
        plural = "es" if self.num_microbatches > 1 else ""
        stages = f"stage={self.stage}, " if self.stage > 1 else ""
        return (
            f"zero={self.zero}, model={self.model}, {stages}"
            f"{self.num_microbatches} microbatch{plural}, remat={self.remat}"
        )


def list_candidates(
    devices: int,
    global_batch_size: int,
    *,
    node_devices: int,
    replicas: int = 1,
    remats: Sequence[Remat] = REMATS,
    num_layers: int = 1,
) -> list[Candidate]:
    """Every combination that cuts the devices and the batch evenly, from the simplest on.

    Tensor parallelism stays inside a node, and microbatches are powers of two. With one device on
    `data` ZeRO splits nothing, so that only stage 0 is listed. Of pipelines those are listed that
    cut the layers evenly, with the two largest numbers of microbatches: the more there are, the
    less they idle. Stage 0 beside a pipeline sends what stage 1 sends and needs more memory.

    Args:
      devices: all; node_devices: that one fast fabric joins.
      global_batch_size: rows.
      replicas: size of the mesh axis `replica`.
      remats: of `REMATS`, what the model takes.
      num_layers: of the loop that a pipeline cuts; 1 lists no pipelines.
    """
    found = []
    for stage, model in itertools.product(STAGE_SIZES, MODEL_SIZES):
        if devices % (stage * model * replicas) or model > node_devices or num_layers % stage:
            continue
        shards = devices // (stage * model)
        rows, rest = divmod(global_batch_size, shards)
        if rest:
            continue
        pieces = [2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
        zeros = range(4) if shards > replicas else range(1)
        if stage > 1:
            pieces = [number for number in pieces if number >= MICROBATCHES_PER_STAGE * stage][-2:]
            zeros = zeros[1:] or zeros
        found += [
            Candidate(zero=zero, model=model, stage=stage, num_microbatches=number, remat=remat)
            for zero in zeros
            for number in pieces
            for remat in remats
        ]
    return sorted(found, key=lambda candidate: candidate.simplicity)
