"""Options of the device mesh: axes, ZeRO stage and pipeline."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerojax.config.checks import check_at_least, check_regex, refuse
from zerojax.config.keywords import names_keywords
from zerojax.config.loader import ConfigError, coerce_fields, from_dict
from zerojax.config.offload import OffloadConfig

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]

PARTITIONS = ("uniform", "parameters", "flops")
"""Names of ways to divide layers; `zerojax.plan.pipeline` does it."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the devices are laid out, and what each axis splits."""

    data: int = -1
    """Devices over which the batch and, with ZeRO, the state are split. -1: all devices that
    the other axes leave."""
    model: int = 1
    """Devices over which each matrix is split (tensor parallelism). 1: no split; a split pays
    only when a layer does not fit or the batch cannot be split further."""
    stage: int = 1
    """Pipeline stages. 1: no pipeline, since stages idle while it fills and empties. A pipeline
    pays where links are too slow for what zero=3 or `model` sends."""
    pipeline_schedule: str | object = "1f1b"
    """Pipeline schedule: 1f1b, gpipe, interleaved, zb_h1, zb_v, or a CSV file; `zerojax
    schedule 1f1b --stages 4 --microbatches 8` draws it. 'pipeline_schedule=interleaved(2)' (in
    quotes) gives each stage two chunks, which shortens the idle time. With 1f1b the memory of a
    stage does not grow with the number of microbatches. From Python also a
    zerojax.schedules.Schedule. Unused without stage > 1."""
    partition: tuple[int, ...] | str = "uniform"
    """Layers of each pipeline stage. uniform: equally many; flops: for the shortest step,
    including the head; parameters: for the smallest largest stage, including embedding and
    head; or a list with one entry per stage and chunk: 'partition=[3, 3, 2, 2]'. A stage with
    fewer layers waits for the others; with zero > 1, model > 1 or layers without checkpoints it
    computes padding."""
    stash: Literal["residuals", "input"] = "residuals"
    """What a pipeline stage stores of a microbatch between forward and backward. residuals:
    what the model's own checkpointing stores, so that nothing more is recomputed; input: only
    the stage's input, for the least memory and one more forward pass."""
    replica: int = 1
    """Copies of the ZeRO-sharded state: sharded inside a node, replicated across nodes. 1:
    sharded over all devices of `data`."""
    zero: int = 1
    """ZeRO stage. 0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also
    parameters. 1 is the largest saving without additional communication."""
    persistence_threshold: int = 100_000
    """Elements. At zero=3 smaller parameters are not sharded: gathering them costs more time
    than it saves memory (DeepSpeed's default)."""
    reduce_bucket_size: int = 50_000_000
    """Elements of gradients per collective. DeepSpeed's 500 million costs a GPT of 1.3 billion
    parameters at zero=2 2.3 GB more per device (compiled for 8 H100)."""
    allgather_bucket_size: int = 50_000_000
    """Elements of parameters per all-gather outside the layer loop; for the same reason."""
    sequence_sharding: bool = False
    """Also split norms and residuals over `model`, along the sequence. No effect at model=1."""
    deterministic: Literal["mesh"] | None = None
    """mesh: the same bits on any number of devices that divides virtual_shards. The batch is
    cut into that many pieces, which are computed one by one and summed in one order. null:
    faster; bits repeat on the same mesh and differ in the last digits on another."""
    virtual_shards: int = 8
    """Pieces of the batch with deterministic=mesh, a power of two: the largest number of data
    shards. More pieces are slower on few devices, since each is smaller. Another number changes
    the last digits."""
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    """What lies outside device memory; null leaves everything on the device."""
    rules: Rules | None = None
    """Tensor-parallel rules, first match wins: (regular expression on the parameter's name,
    mesh axis or null for each trailing dimension). null: the model's own
    `tensor_parallel_rules`, if any."""

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
        for pattern, axes in self.rules or ():
            check_regex("rules", pattern)
            for axis in axes:
                if axis not in (None, "model"):
                    refuse("rules", axis, f"is no axis of rule {pattern!r}; use model or null")
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
