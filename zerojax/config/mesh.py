"""Options of the device mesh: axes, ZeRO stage and pipeline."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerojax.config.checks import check_at_least, check_regex, refuse
from zerojax.config.keywords import names_keywords
from zerojax.config.offload import OffloadConfig
from zerojax.config_loader import ConfigError, coerce_fields, from_dict

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]

PARTITIONS = ("uniform", "parameters", "flops")
"""Names of ways to divide layers; `zerojax.partition` does it."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the devices are laid out, and what each axis splits."""

    data: int = -1
    """Devices that split the batch and, with ZeRO, the state; -1 takes all the others leave."""
    model: int = 1
    """Devices that split each matrix (tensor parallelism); 1 = whole, since it pays only when a
    layer does not fit or the batch cannot be split further."""
    stage: int = 1
    """Pipeline stages, each with its own layers; 1 = none, since a pipeline idles while it fills
    and empties. It pays where links are too slow for what zero=3 or `model` sends."""
    pipeline_schedule: str | object = "1f1b"
    """Which microbatch a pipeline stage works on when: 1f1b, gpipe, interleaved, zb_h1, zb_v, or a
    CSV file of your own; `zerojax schedule 1f1b --stages 4 --microbatches 8` draws it. With
    'pipeline_schedule=interleaved(2)' (in quotes) each stage has two chunks, so less time is idle.
    1f1b = what a stage keeps does not grow with the number of microbatches. From Python also a
    zerojax.schedules.Schedule. Without stage > 1 it does not matter."""
    partition: tuple[int, ...] | str = "uniform"
    """Layers on each pipeline stage: uniform = equally many; flops = so that a step takes least,
    the head counted; parameters = so that the largest stage is smallest, embedding and head
    counted; or a list from first to last, one entry per stage and chunk:
    'partition=[3, 3, 2, 2]'. A stage with fewer layers than others waits; with zero > 1, model > 1
    or layers without checkpoints it computes padding instead."""
    stash: Literal["residuals", "input"] = "residuals"
    """What a pipeline stage keeps of a microbatch from its forward to its backward pass: residuals
    = what the model's own remat would keep, so that nothing more is computed again; input = only
    what the stage was sent: the least memory, and one more forward pass."""
    replica: int = 1
    """Copies of the ZeRO-sharded state: shard in a node, replicate across. 1 = shard over all."""
    zero: int = 1
    """ZeRO 0..3. 0: nothing split; 1: optimizer state; 2: and gradients; 3: and parameters. 1 = the
    largest saving that adds no communication."""
    persistence_threshold: int = 100_000
    """Elements. At zero=3 a smaller leaf stays whole: gathering it costs more time than it saves
    memory (DeepSpeed's default)."""
    reduce_bucket_size: int = 50_000_000
    """Elements of gradient per reduction: one collective for many leaves. DeepSpeed's 500 million
    costs a 1.3-billion-parameter GPT at zero=2 2.3 GB per device more (compiled for 8 H100)."""
    allgather_bucket_size: int = 50_000_000
    """Elements of parameters per gather outside the layer loop; the same reason."""
    sequence_sharding: bool = False
    """Also split norms and residuals over `model`, along the sequence. Off: no use at model=1."""
    deterministic: Literal["mesh"] | None = None
    """mesh = the same bits on any number of devices that divides virtual_shards: the batch is cut
    into that many pieces everywhere, which are computed one by one and added up in one order. None
    = fastest: bits repeat on the same mesh, and differ in last places on another."""
    virtual_shards: int = 8
    """Pieces of the batch with deterministic=mesh, a power of two: the most devices that can share
    the work. More are slower on few devices, since each piece is smaller; changing it changes
    last places."""
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    """What lies outside device memory; null leaves everything on the device."""
    rules: Rules | None = None
    """Tensor-parallel rules, first match wins: (regex on the parameter's name, mesh axis or null
    for each trailing dim). None: the model's own `tensor_parallel_rules` if it has some."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.data < 1 and self.data != -1:
            refuse("data", self.data, "must be >= 1, or -1 for all devices the other axes leave")
        check_at_least(self, 1, "model", "stage", "replica")
        if self.zero not in range(4):
            message = f"zero={self.zero} is not valid; use 0, 1, 2 or 3"
            raise ConfigError(message, ("zero",))
        check_at_least(self, 0, "persistence_threshold")
        check_at_least(self, 1, "reduce_bucket_size", "allgather_bucket_size")
        count = self.virtual_shards
        if count < 1 or count & (count - 1):
            low = 2 ** max(count, 1).bit_length() // 2
            refuse(
                "virtual_shards",
                count,
                f"is no power of two, and sums follow a binary tree; use {low} or {2 * low}",
            )
        for pattern, _ in self.rules or ():
            check_regex("rules", pattern)
        _check_schedule(self.pipeline_schedule)
        _check_partition(self.partition)


def _check_schedule(schedule: Any) -> None:
    # Classes of schedules are not known here: one is what has a table, also as `to_dict` writes it.
    has_table = hasattr(schedule, "table") or (
        isinstance(schedule, Mapping) and "table" in schedule
    )
    if not schedule or not (isinstance(schedule, str) or has_table):
        refuse(
            "pipeline_schedule",
            schedule,
            "is no schedule; use a name such as 1f1b, the path of a CSV file, or a "
            "zerojax.schedules.Schedule",
        )


def _check_partition(partition: tuple[int, ...] | str) -> None:
    if isinstance(partition, str):
        if partition in PARTITIONS:
            return
        near = difflib.get_close_matches(partition, PARTITIONS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "a list is written [3, 3, 2, 2]"
        refuse(
            "partition",
            partition,
            f"is not one of {', '.join(PARTITIONS)}, nor a list of whole numbers; {hint}",
        )
    if not partition or any(int(count) < 1 for count in partition):
        refuse(
            "partition",
            list(partition),
            "must give every stage at least 1 layer; a list for 4 stages is [3, 3, 2, 2]",
        )


def as_mesh_config(value: MeshConfig | Mapping[str, Any] | None) -> MeshConfig:
    """A MeshConfig from itself, a mapping of its fields, or None (the defaults)."""
    if value is None:
        return MeshConfig()
    if isinstance(value, MeshConfig):
        return value
    if isinstance(value, Mapping):
        return from_dict(MeshConfig, value)
    raise TypeError(
        f"mesh_config is a {type(value).__name__}; give a MeshConfig, a dict of its fields, or None"
    )
