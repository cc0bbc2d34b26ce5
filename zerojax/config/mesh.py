"""Options of the device mesh: axes, ZeRO stage, pipeline, and the memory tier of each state."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerojax.config.checks import (
    check_at_least,
    check_regex,
    check_size,
    expand_folders,
    names_keywords,
    refuse,
)
from zerojax.config.loader import ConfigError, coerce_fields, from_dict, parse_text

DEVICE, HOST, NVME = TIERS = ("device", "host", "nvme")
"""Memory tiers, nearest first: the accelerator's memory, pinned host memory, files on a disk."""
HOST_KIND = "pinned_host"
"""JAX's memory kind of the tier host; the only one from which GPUs copy without the CPU."""
SLICE_ELEMENTS = 2**24
"""Default of `OffloadConfig.slice_elements` if it is neither set nor measured."""
MAX_VIRTUAL_SHARDS = 2**16

Shares = tuple[tuple[str, float], ...]
Rules = tuple[tuple[str, tuple[str | None, ...]], ...]
PARTITIONS = ("uniform", "parameters", "flops")
"""Names of ways to divide layers into stages; implemented in `zerojax.plan.pipeline`."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Parts of a run's state outside device memory. The default keeps everything on the device."""

    opt_state: str | Shares = DEVICE
    """Memory of moments and float32 master weights: device, host (pinned memory), nvme (files on a
    disk, see folder), or shares of them: {device: 0.4, host: 0.6}. The update moves them to the
    device slice by slice and computes the same bits. With any value but device, the weights of
    forward and backward are stored separately, in the compute dtype."""
    params: Literal["device", "host", "nvme"] = DEVICE
    """Memory of the layer weights that forward and backward read. host: weights are moved to
    the device layer by layer, and gradients back, so that device memory does not grow with
    depth. nvme: weights and gradients of layers are in files, too, so that host memory does not
    grow with depth either; opt_state is then nvme. For models whose layers run in one scan or are
    equal layers of a Python list."""
    activations: Literal["device", "host", "nvme"] = DEVICE
    """Memory of each layer's input until the backward pass. host: one activation per layer is moved
    to the host, and layers are recomputed in the backward pass. nvme: to files, with params: nvme
    alone, so that host memory grows with neither depth nor batch."""
    update_in_backward: bool = False
    """Update each layer as soon as its gradient exists, so that gradients are never stored; for the
    largest models. Needs params: host, one microbatch, no clipping, and bf16 or fp32. A non-finite
    gradient is detected after the layers behind it have been updated."""
    tile_bytes: int | None = None
    """Bytes, in the compute dtype: the largest part of a layer's weight that a device gathers at
    once, with params: host or nvme. A larger weight that one product alone reads is gathered, used
    and its gradient sent in tiles, each by collectives of its own, so that layers larger than
    device memory train. null: whole weights."""
    folder: str | None = None
    """Folder for the files of nvme, one folder for each process. null: next to the run's
    checkpoints."""
    durable: bool = False
    """Keep two generations on disk, so that a killed run resumes from its last complete step (of
    all processes), for twice the disk space. false: it resumes from the last checkpoint."""
    slice_elements: int | None = None
    """Elements of a parameter's shard that are moved and updated at once. The device holds
    three slices of each array: 600 MB for Adam with 16 million elements. null: 16 million (2**24),
    or a quarter or twice as many if that is measured to be faster, see tune of the mesh."""
    min_elements: int = 2**16
    """Elements. Parameters with smaller shards stay on the device: each would cost a transfer and
    save almost no memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "opt_state", _normal_shares(self.opt_state))
        coerce_fields(self)
        if self.params == NVME:
            self._imply_files()
        expand_folders(self, "folder")
        check_at_least(self, 1, "slice_elements", "min_elements", "tile_bytes")
        if self.tile_bytes is not None and self.params == DEVICE:
            refuse(
                "tile_bytes",
                self.tile_bytes,
                "cuts the weights of layers that stream through the device; set params: host or "
                "nvme as well, or leave it out",
            )
        if self.update_in_backward and self.params != HOST:
            refuse(
                "update_in_backward",
                True,
                "updates layers while they are streamed through the device; set params: host as "
                "well",
            )
        if self.activations == NVME and self.params != NVME:
            refuse(
                "activations",
                NVME,
                "needs layers that run one by one, as files are read and written between them; set "
                "params: nvme as well, or activations: host",
            )
        if self.durable and not self.on_disk:
            refuse(
                "durable", True, "applies to files on a disk; set opt_state: nvme, or leave it out"
            )

    def _imply_files(self) -> None:
        """Puts the optimizer's state into files, where its weights are."""
        if self.opt_state == DEVICE:
            object.__setattr__(self, "opt_state", NVME)
        if self.opt_state != NVME:
            refuse(
                "opt_state",
                self.opt_state,
                "cannot be combined with params: nvme, whose layers are updated from files to "
                "files; set opt_state: nvme, or leave it out",
            )

    @property
    def slice_limit(self) -> int:
        """Largest number of elements of a slice."""
        return SLICE_ELEMENTS if self.slice_elements is None else self.slice_elements

    @property
    def shares(self) -> dict[str, float]:
        """{tier: share of the optimizer's state}, nearest first; the sum is 1."""
        if isinstance(self.opt_state, str):
            return {self.opt_state: 1.0}
        return dict(self.opt_state)

    @property
    def moves_opt_state(self) -> bool:
        """Whether any of the optimizer's state is outside device memory."""
        return list(self.shares) != [DEVICE]

    @property
    def on_disk(self) -> bool:
        """Whether any of the optimizer's state is on a disk."""
        return NVME in self.shares

    @property
    def on_host(self) -> bool:
        """Whether anything is in host memory."""
        return HOST in self.shares or HOST in (self.params, self.activations)

    @property
    def is_off(self) -> bool:
        """Whether everything stays on the device."""
        return not (self.moves_opt_state or self.on_host)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """Formats of values that devices send each other. By default values are sent in the dtype of
    their computation."""

    weights: Literal["compute", "fp8", "int8", "delta_int8", "delta_int4"] = "compute"
    """Format of gathered weights. compute: in the compute dtype. fp8: for weights that the model
    uses only as 8-bit floats (matmul_dtype=fp8) and that zero=3 gathers, round before sending
    instead of after; half the bytes and bit-equal results. int8 (zero=1, 2, 3): as integers with
    one scale per 256 values, half the bytes of bfloat16; master weights are exact, losses are close
    to those of exact weights, not equal. delta_int8, delta_int4 (zero=1, 2): every device keeps the
    weights in the compute dtype, and codes of their difference from the master weights are sent
    once per step, half or a quarter of the bytes of bfloat16; more accurate than int8."""
    gradients: Literal["reduce", "int8", "int4"] = "reduce"
    """Format of reduce-scattered gradients (zero=1, 2, 3). reduce: in reduce_dtype. int8, int4: as
    integers with one scale per 256 or 64 values, summed in float32, in two levels if devices are on
    several nodes: half or a quarter of the bytes of bfloat16. Losses are close to those of exact
    sums, not equal."""
    exact: tuple[str, ...] = ()
    """Regular expressions on parameter names. Their gradients are sent in float32, and their
    weights in the compute dtype."""
    secondary: bool = False
    """Secondary shards (hpZ of ZeRO++), zero=3 over several nodes: once per step the devices of a
    node fetch all weights from the other nodes, each device its part, and the node gathers these
    parts where weights are used. Gradients return the same way. Equal results, fewer bytes between
    nodes, more memory: during a step weights and summed gradients are sharded only over a node."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for pattern in self.exact:
            check_regex("exact", pattern)


def _normal_shares(value: Any) -> Any:
    """Returns one tier as text, or several as ((tier, share), ...), nearest first."""
    if isinstance(value, str):
        text = str(value)
        if not text.startswith(("{", "[")):
            _check_tier(text)
            return text
        return _normal_shares(parse_text(text))
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (tuple, list)) or not value:
        refuse(
            "opt_state", value, "is not a tier; use device, host, nvme, or {device: 0.4, host: 0.6}"
        )
    shares: dict[str, float] = {}
    for pair in value:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            refuse(
                "opt_state", pair, "is not a pair of tier and share; write {device: 0.4, host: 0.6}"
            )
        tier, share = pair
        _check_tier(tier)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            refuse("opt_state", share, f"is not a share of {tier}; give a number from 0 to 1")
        if tier in shares:
            refuse("opt_state", tier, "is listed twice; write one entry with the sum of its shares")
        shares[tier] = float(share)
    total = sum(shares.values())
    if abs(total - 1) > 1e-6:
        refuse("opt_state", dict(shares), f"adds up to {total:g}; shares must add up to 1")
    held = tuple((tier, shares[tier]) for tier in TIERS if shares.get(tier))
    return held[0][0] if len(held) == 1 else held


def _check_tier(tier: Any) -> None:
    if tier in TIERS:
        return
    near = {"cpu": HOST, "gpu": DEVICE, "disk": NVME, "none": DEVICE}.get(str(tier).lower())
    near = near or next(iter(difflib.get_close_matches(str(tier), TIERS, 1)), None)
    hint = f"did you mean {near!r}?" if near else "use device, host or nvme"
    refuse("opt_state", tier, f"is not one of {', '.join(TIERS)}; {hint}")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Axes of the device mesh, and what each axis splits."""

    data: int = -1
    """Devices over which the batch and, with ZeRO, the state are split. -1: all devices that the
    other axes do not use."""
    model: int = 1
    """Devices over which each matrix is split (tensor parallelism). 1: no split; a split pays
    only when a layer does not fit or the batch cannot be split further."""
    stage: int = 1
    """Pipeline stages. 1: no pipeline, since stages idle while it fills and empties. A pipeline is
    worthwhile if links are too slow for the traffic of zero=3 or `model`."""
    pipeline_schedule: str | object = "1f1b"
    """Pipeline schedule: 1f1b, gpipe, interleaved, zb_h1, zb_v, or a CSV file; `zerojax
    schedule 1f1b --stages 4 --microbatches 8` draws it. 'pipeline_schedule=interleaved(2)' (in
    quotes) gives each stage two chunks, which shortens the idle time. With 1f1b the memory of a
    stage does not grow with the number of microbatches. From Python also a
    zerojax.pipeline_schedules.Schedule. Unused without stage > 1."""
    partition: tuple[int, ...] | str = "uniform"
    """Layers of each pipeline stage. uniform: equal numbers; flops: for the shortest step,
    including the head; parameters: minimizes the largest stage, including embedding and head; or a
    list with one entry per stage and chunk: 'partition=[3, 3, 2, 2]'. A stage with fewer layers
    waits for the others; with zero > 1, model > 1 or layers without checkpoints it computes
    padding."""
    stash: Literal["residuals", "input"] = "residuals"
    """What a pipeline stage stores of a microbatch between forward and backward. residuals: what
    the model's own checkpointing stores, so that nothing more is recomputed; input: only the
    stage's input, for the least memory and one more forward pass."""
    context: int = 1
    """Devices over which each sequence is split, for lengths whose activations do not fit one. ZeRO
    shards the state over data and context together. 1: no split. For the reference decoders."""
    context_parallel: Literal["auto", "ulysses", "ring", "allgather"] = "auto"
    """Attention over a split sequence. ulysses: each device computes some of the heads; ring: keys
    and values are passed from device to device; allgather: they are gathered. auto: the method that
    sends the fewest bytes within a node, and ring between nodes. Unused without context > 1."""
    expert: int = 1
    """Devices over which the experts of `zerojax.experts` are split; it must divide their number.
    Rows of the batch are also split over them and sent to their experts. ZeRO shards experts over
    `data` only and all else over data and expert together. 1: no split."""
    node: int | None = None
    """Devices of one node, in the order of the mesh, for two-level communication (wire.gradients,
    wire.secondary). null: the devices of one process; 8 if each GPU has its own process."""
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
    """mesh: bit-equal results on any number of devices that divides virtual_shards. The batch is
    cut into that many pieces, which are computed one by one and summed in a fixed order. null:
    faster; results are bit-equal on the same mesh and differ in the last digits on another."""
    virtual_shards: int = 8
    """Pieces of the batch with deterministic=mesh, a power of two: the largest number of data
    shards. More pieces are slower on few devices, since each is smaller. Changing the number
    changes the last digits."""
    roll: Literal["auto", "off"] = "auto"
    """Run layers that a Python loop calls as one compiled loop over stacked parameters. auto: if at
    least four layers have the same program and are gathered, streamed, pipelined or recomputed one
    by one; off: as written. All names stay those of the model."""
    roll_remat: Literal["auto", "model", "none", "full", "attention", "dots", "elementwise"] = (
        "auto"
    )
    """What the backward pass recomputes of rolled layers: full, the whole layer from its input;
    attention, all but the attention result; dots, all but matrix products; elementwise, all
    operations that are neither matrix products nor otherwise costly; none, nothing; model, as the
    model's own jax.checkpoint says; auto, as model, or elementwise if layers without checkpoints
    would store more than their weights. Reference models have `model.remat` instead."""
    unroll: bool = False
    """Unroll the model's loops over layers (`jax.lax.scan` over stacked parameters, as in reference
    models). The step then stacks no copies of the values for the backward pass: less memory and
    fewer bytes moved, for a longer compilation. Not with zero=3, stage > 1, checkpoints around
    layers or offload by layer, which need the loop."""
    kernels: Literal["auto", "xla", "mosaic_gpu", "interpret"] = "auto"
    """Implementation of the gradient statistics (with the loss scale) and the update. xla: the
    compiler's fusions; mosaic_gpu: this project's Pallas kernels, one for many arrays, or an error;
    auto: the kernel if it moves fewer bytes; interpret: the kernels, slowly, on a CPU, for tests.
    On available GPUs auto is measured before training, see `tune`. An optimizer's own `impl` takes
    precedence."""
    tune: Literal["auto", "off"] = "auto"
    """Whether to measure the choices of `kernels: auto`, attention "auto" and the slice size of
    offloaded state on the run's GPUs, in about ten seconds at most before its first step; the
    faster choice is kept for the next run. off: choose by counted bytes."""
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    """State outside device memory; null keeps everything on the device."""
    lookup: Literal["gather", "owners"] = "gather"
    """How rows of embedding tables are read, for tables that are used only for lookups (embeddings
    that are not tied to a head) and that ZeRO shards. gather: like other parameters, the table is
    gathered, and its gradient reduced. owners: rows are fetched from the devices that store them,
    and their gradients sent back (DeepSpeed's sparse_gradients). The plan lists the tables, and the
    reasons for others."""
    wire: WireConfig = dataclasses.field(default_factory=WireConfig)
    """Compressed formats of communication; null sends values uncompressed."""
    rules: Rules | None = None
    """Tensor-parallel rules, first match wins: (regular expression on the parameter's name,
    mesh axis or null for each trailing dimension). null: the model's own
    `tensor_parallel_rules`, if any."""

    @property
    def devices_per_shard(self) -> int:
        """Devices that share the rows of one data shard."""
        return self.context * self.stage * self.model

    def expert_on(self, num_devices: int) -> int:
        """Returns the expert degree for another number of devices: the largest divisor of `expert`
        that divides the devices left by the other axes. It divides the experts, since `expert`
        does.

        >>> [MeshConfig(expert=8, model=2).expert_on(count) for count in (16, 8, 12, 2)]
        [8, 4, 2, 1]
        """
        return math.gcd(self.expert, num_devices // (self.replica * self.devices_per_shard))

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.data < 1 and self.data != -1:
            refuse(
                "data", self.data, "must be >= 1, or -1 for all devices that the other axes leave"
            )
        check_size(self, "model", "stage", "context", "expert", "replica", "node")
        check_size(self, "data", least=-1)
        check_size(self, "virtual_shards", most=MAX_VIRTUAL_SHARDS)
        if self.zero not in range(4):
            message = f"zero={self.zero} is not valid; use 0, 1, 2 or 3"
            raise ConfigError(message, ("zero",))
        check_at_least(self, 0, "persistence_threshold")
        check_at_least(self, 1, "reduce_bucket_size", "allgather_bucket_size")
        count = self.virtual_shards
        if count & (count - 1):
            low = 2 ** count.bit_length() // 2
            refuse(
                "virtual_shards",
                count,
                f"is not a power of two, which summation in a binary tree needs; use {low} or "
                f"{2 * low}",
            )
        for pattern, axes in self.rules or ():
            check_regex("rules", pattern)
            for axis in axes:
                if axis not in (None, "model"):
                    refuse("rules", axis, f"is not an axis of rule {pattern!r}; use model or null")
        _check_schedule(self.pipeline_schedule)
        _check_partition(self.partition)


def _check_schedule(schedule: Any) -> None:
    # Schedule classes are not imported here: a schedule has a table, also in the form of `to_dict`.
    has_table = hasattr(schedule, "table") or (
        isinstance(schedule, Mapping) and "table" in schedule
    )
    if not schedule or not (isinstance(schedule, str) or has_table):
        refuse(
            "pipeline_schedule",
            schedule,
            "is not a schedule; use a name such as 1f1b, the path of a CSV file, or a "
            "zerojax.pipeline_schedules.Schedule",
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
    """Returns a MeshConfig from a MeshConfig, a mapping of its fields, or None (the defaults)."""
    if value is None:
        return MeshConfig()
    if isinstance(value, MeshConfig):
        return value
    if isinstance(value, Mapping):
        return from_dict(MeshConfig, value)
    raise TypeError(
        f"mesh_config is a {type(value).__name__}; give a MeshConfig, a dict of its fields, or None"
    )
