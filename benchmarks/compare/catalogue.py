"""The programs that are compared, and the groups (windows) in which they alternate.

Contains names; starts nothing and imports none of the frameworks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare.lines import code_lines

WAYS_FOLDER = Path(__file__).resolve().parent / "ways"
MODEL_FRAMEWORK = {"jax": "jax", "torch": "torch", "deepspeed": "torch"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One program, a row of the table.

    Attributes:
      name: name of the row.
      file: name of the file in `ways`, without `.py`.
      needs: package that its Python must have: "jax", "torch" or "deepspeed".
      processes: number of processes that train together.
      bare: program that gives its time T1, the bare step of its framework in one process.
      zero: ZeRO stage of its sharding.
      options: keyword arguments of the file's `prepare`.
    """

    name: str
    file: str
    needs: str
    processes: int
    bare: str
    zero: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def framework(self) -> str:
        """Returns the framework of its model: "jax" or "torch"."""
        return MODEL_FRAMEWORK[self.needs]

    @property
    def lines(self) -> int:
        """Returns the number of lines of code of its file."""
        return code_lines(WAYS_FOLDER / f"{self.file}.py")


BARE_JAX = "optax + nnx, jax.jit"
BARE_TORCH = "torch eager"


def _zerojax(zero: int) -> Way:
    return Way(
        name=f"zerojax ZeRO {zero}",
        file="zerojax_step",
        needs="jax",
        processes=2,
        bare=BARE_JAX,
        zero=zero,
        options={"zero": zero},
    )


def _deepspeed(zero: int) -> Way:
    return Way(
        name=f"DeepSpeed ZeRO {zero}",
        file="deepspeed_zero",
        needs="deepspeed",
        processes=2,
        bare=BARE_TORCH,
        zero=zero,
        options={"zero": zero},
    )


_ONE_PROCESS = (
    Way(name=BARE_JAX, file="optax_jit", needs="jax", processes=1, bare=BARE_JAX),
    Way(name="optax + nnx.jit", file="optax_nnx", needs="jax", processes=1, bare=BARE_JAX),
    Way(name="zerojax", file="zerojax_step", needs="jax", processes=1, bare=BARE_JAX),
    Way(name="zerojax.train", file="zerojax_train", needs="jax", processes=1, bare=BARE_JAX),
    Way(name=BARE_TORCH, file="torch_eager", needs="torch", processes=1, bare=BARE_TORCH),
    Way(
        name="torch.compile",
        file="torch_eager",
        needs="torch",
        processes=1,
        bare=BARE_TORCH,
        options={"compiled": True},
    ),
)
_DATA_PARALLEL = (
    Way(
        name="optax + nnx, data parallel",
        file="optax_data_parallel",
        needs="jax",
        processes=2,
        bare=BARE_JAX,
    ),
    Way(name="torch DDP", file="torch_ddp", needs="torch", processes=2, bare=BARE_TORCH),
)
_FSDP2 = Way(
    name="torch FSDP2",
    file="torch_fsdp2",
    needs="torch",
    processes=2,
    bare=BARE_TORCH,
    zero=3,
)
_STAGES = tuple((_zerojax(zero), _deepspeed(zero)) for zero in range(4))

# Programs of a window run at the same time and alternate; each window also measures T1.
WINDOWS: dict[str, tuple[Way, ...]] = {
    "one": _ONE_PROCESS,
    "0": (*_DATA_PARALLEL, *_STAGES[0]),
    "1": _STAGES[1],
    "2": _STAGES[2],
    "3": (*_STAGES[3], _FSDP2),
}
BARE = {way.name: way for way in _ONE_PROCESS if way.name == way.bare}
