"""Options of the device mesh: its axes, the ZeRO stage, the pipeline, and the memory in which each
part of the training state is stored."""

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
"""JAX's memory kind for the tier host: pinned host memory, the only host memory from which GPUs
copy without the CPU."""
SLICE_ELEMENTS = 2**24
"""Number of elements in a slice if `OffloadConfig.slice_elements` is null and no measurement chose
another number."""
MAX_VIRTUAL_SHARDS = 2**16

Shares = tuple[tuple[str, float], ...]
Rules = tuple[tuple[str, tuple[str | None, ...]], ...]
RollRemat = Literal["auto", "model", "none", "full", "attention", "dots", "elementwise"]
PARTITIONS = ("uniform", "parameters", "flops")
"""Names of the methods that divide layers among pipeline stages; `zerojax.pipeline.planning`
implements them."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Memory of the parts of a training state that are stored outside device memory. By default all
    parts are in device memory."""

    opt_state: str | Shares = DEVICE
    """Memory of moments and float32 master weights: device, host (pinned memory), nvme (files on a
    disk, see folder), or shares of several, as in {device: 0.4, host: 0.6}. The update moves slices
    to the device and back, with bit-equal results. With any value but device, forward and backward
    use separate weights in the compute dtype."""
    params: Literal["device", "host", "nvme"] = DEVICE
    """Memory of the layer weights that forward and backward read. host: each layer's weights are
    moved to the device when needed and its gradients back to the host, so that device memory does
    not grow with depth. nvme: weights and gradients of layers are in files, so that host memory
    does not grow with depth either; opt_state is then nvme, too. For models whose layers run in one
    scan or are equal layers of a Python list."""
    activations: Literal["device", "host", "nvme"] = DEVICE
    """Memory of each layer's input until the backward pass, which recomputes the layer from it.
    host: host memory. nvme: files, only with params: nvme, so that host memory grows neither with
    depth nor with the batch."""
    update_in_backward: bool = False
    """Whether each layer is updated as soon as its gradient exists. With params: host, gradients
    are never stored; it needs one microbatch, no clipping, and bf16 or fp32, and a non-finite
    gradient is detected only after later layers were updated. With params: nvme it needs durable:
    true and has no such limits: the files' previous generation undoes an update whose gradients
    turn out to be clipped or not finite."""
    delayed_update: bool = False
    """Whether an update uses the gradients of the step before, so that it runs beside the backward
    pass (the one-step delay of ZeRO-Offload): from the second step on, the new weights are those of
    the step before, updated with the gradients of the step before. Losses differ slightly from
    training without delay; clipping and loss scaling work. Needs opt_state: host, params: device
    and one microbatch. The device holds the gradients between steps."""
    update_in_forward: bool = False
    """Whether each layer is updated in the forward pass of the next step, just before it is used.
    Losses and weights are those of the plain way, clipping and loss scaling included, and the
    update hides behind the forward pass; but between steps the last update is waiting, and
    `build_finish` completes it (`train` does so before anything reads the weights). Needs
    opt_state: host, params: device and one microbatch. The device holds the gradients between
    steps."""
    tile_bytes: int | None = None
    """Largest part of a layer's weight that a device gathers at once, in bytes of the compute
    dtype; with zero: 3, or with params: host or nvme. A larger weight of a loop over layers that
    only one matrix product reads is split into tiles, which are gathered, used and reduced one
    after the other, so that layers larger than device memory can be trained. null: weights are not
    split."""
    auto: bool = False
    """Choose opt_state, params and activations by compiling the step for the run's GPUs: as little
    offload as fits device and host memory, files last. The choice is made by zerojax.train, run
    files and zerojax plan; on a CPU nothing is offloaded."""
    folder: str | None = None
    """Folder for the files of nvme, with a folder for each process. null: a folder next to the
    run's checkpoints."""
    durable: bool = False
    """true: two generations of the files are kept, so that a killed run resumes from the last step
    that all processes completed, for twice the disk space. false: a killed run resumes from its
    last checkpoint."""
    slice_elements: int | None = None
    """Number of elements of a parameter's shard that are moved and updated at once. The device
    holds three slices of each array: 600 MB for Adam with 16 million elements. null: 16 million
    (2**24), or a quarter or twice as many if the measurement of `tune` finds that faster."""
    min_elements: int = 2**16
    """Smallest number of elements in a shard that is offloaded. Smaller shards stay on the device,
    because each costs a transfer and saves almost no memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "opt_state", _normal_shares(self.opt_state))
        coerce_fields(self)
        if self.params == NVME:
            self._imply_files()
        expand_folders(self, "folder")
        check_at_least(self, 1, "slice_elements", "min_elements", "tile_bytes")
        if self.auto:
            self._check_auto()
        if self.update_in_backward and self.params == DEVICE:
            refuse(
                "update_in_backward",
                True,
                "updates layer weights that are stored in host memory or in files; set params: "
                "host, or params: nvme and durable: true",
            )
        if self.update_in_backward and self.params == NVME and not self.durable:
            refuse(
                "update_in_backward",
                True,
                "with params: nvme goes back to the previous generation of the files if gradients "
                "are clipped or not finite; set durable: true as well, which keeps it",
            )
        if self.delayed_update and self.update_in_forward:
            refuse(
                "update_in_forward",
                True,
                "updates with the gradients of a step before the next forward pass, and "
                "delayed_update: true after it; leave one of the two out",
            )
        if self.late_key is not None:
            self._check_late(self.late_key)
        if self.activations == NVME and self.params != NVME:
            refuse(
                "activations",
                NVME,
                "needs layers that run one by one, because files are read and written between "
                "layers; set "
                "params: nvme as well, or activations: host",
            )
        if self.durable and not (self.on_disk or self.auto):
            refuse(
                "durable", True, "applies to files on a disk; set opt_state: nvme, or leave it out"
            )

    def _check_late(self, name: str) -> None:
        """Refuses settings with which an update cannot run beside a pass of the next step.

        Args:
          name: the setting that asks for it.
        """
        if self.params != DEVICE:
            refuse(
                name,
                True,
                f"is for weights on the device, and params is {self.params}; set params: device, "
                "or update_in_backward: true instead",
            )
        if HOST not in self.shares or NVME in self.shares:
            refuse(
                name,
                True,
                f"is for optimizer state on the host, and opt_state is {self.opt_state!r}; set "
                "opt_state: host, or leave it out",
            )

    def _check_auto(self) -> None:
        """Refuses settings that `auto` chooses, or that need one of its choices."""
        parts = "opt_state", "params", "activations"
        for name in (*parts, "update_in_backward", "delayed_update", "update_in_forward"):
            value = getattr(self, name)
            if value not in (DEVICE, False, None):
                refuse(
                    name,
                    value,
                    "is set, and auto: true chooses the memory of each part of the state; leave "
                    "one of the two out",
                )

    def chosen(self, **parts: object) -> "OffloadConfig":
        """Returns the settings with `auto` replaced by its choice.

        Args:
          **parts: `opt_state`, `params` and `activations` that are not on the device.
        """
        on_disk = NVME in parts.values()
        durable = self.durable and on_disk
        return dataclasses.replace(self, auto=False, durable=durable, **parts)

    def _imply_files(self) -> None:
        """Sets opt_state to nvme if the layer weights are on nvme, because both are updated
        together in files."""
        if self.opt_state == DEVICE:
            object.__setattr__(self, "opt_state", NVME)
        if self.opt_state != NVME:
            refuse(
                "opt_state",
                self.opt_state,
                "cannot be combined with params: nvme, whose layers are updated in "
                "files; set opt_state: nvme, or leave opt_state out",
            )

    @property
    def slice_limit(self) -> int:
        """Largest number of elements in a slice."""
        return SLICE_ELEMENTS if self.slice_elements is None else self.slice_elements

    @property
    def shares(self) -> dict[str, float]:
        """{memory tier: share of the optimizer state in it}, in the order device, host, nvme; the
        shares add up to 1."""
        if isinstance(self.opt_state, str):
            return {self.opt_state: 1.0}
        return dict(self.opt_state)

    @property
    def moves_opt_state(self) -> bool:
        """Whether a part of the optimizer state is outside device memory."""
        return list(self.shares) != [DEVICE]

    @property
    def on_disk(self) -> bool:
        """Whether a part of the optimizer state is in files on a disk."""
        return NVME in self.shares

    @property
    def on_host(self) -> bool:
        """Whether optimizer state, parameters or activations are in host memory."""
        return HOST in self.shares or HOST in (self.params, self.activations)

    @property
    def late_key(self) -> str | None:
        """The setting with which an update runs in the next step; None without one."""
        names = "delayed_update", "update_in_forward"
        return next((name for name in names if getattr(self, name)), None)

    @property
    def by_layer(self) -> bool:
        """Whether the layers' weights are read, or updated, one layer at a time."""
        return self.params != DEVICE or self.late_key is not None

    @property
    def updates_in_pass(self) -> bool:
        """Whether the program of the forward or backward pass updates layers, in memory."""
        in_backward = self.update_in_backward and self.params == HOST
        return self.late_key is not None or in_backward

    @property
    def by_layer_key(self) -> str:
        """The setting that makes `by_layer` true, as messages name it."""
        return "offload." + (self.late_key or f"params={self.params}")

    @property
    def is_off(self) -> bool:
        """Whether optimizer state, parameters and activations are all in device memory."""
        return not (self.moves_opt_state or self.on_host)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """Compression of the values that devices send each other. By default values are sent
    uncompressed, in the dtype of the computation."""

    weights: Literal["compute", "fp8", "int8", "delta_int8", "delta_int4"] = "compute"
    """Format in which weights are gathered. compute: the compute dtype. fp8: rounds weights before
    sending instead of after it, if the model uses them only as 8-bit floats (matmul_dtype=fp8) and
    zero=3 gathers them; half the bytes, bit-equal results. int8 (zero=1, 2, 3): integers with one
    scale per 256 values, half the bytes of bfloat16; master weights are exact, losses are close to
    exact training, not equal. delta_int8, delta_int4 (zero=1, 2): every device keeps the weights in
    the compute dtype, and each step sends codes of their difference from the master weights, half
    or a quarter of the bytes of bfloat16; more accurate than int8."""
    gradients: Literal["reduce", "int8", "int4"] = "reduce"
    """Format in which gradients are reduce-scattered (zero=1, 2, 3). reduce: in reduce_dtype. int8,
    int4: as integers with one scale per 256 or 64 values, summed in float32, in two levels if
    devices are on several nodes; half or a quarter of the bytes of bfloat16. Losses are close to
    those of exact sums, not equal."""
    exact: tuple[str, ...] = ()
    """Regular expressions on parameter names. Gradients of matching parameters are sent in float32,
    and their weights in the compute dtype."""
    secondary: bool = False
    """Whether secondary shards are used (hpZ of ZeRO++), for zero=3 on several nodes. Once per step
    each device fetches a part of all weights from the other nodes, and the devices of a node gather
    these parts where weights are used; gradients return the same way. Results are equal and fewer
    bytes are sent between nodes, but during a step weights and summed gradients are sharded only
    over a node, which needs more memory."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for pattern in self.exact:
            check_regex("exact", pattern)


def _normal_shares(value: Any) -> Any:
    """Converts `opt_state` to its standard form: one tier as text, or several tiers as ((tier,
    share), ...) in the order device, host, nvme."""
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


def _check_tier(tier: object) -> None:
    if tier in TIERS:
        return
    near = {"cpu": HOST, "gpu": DEVICE, "disk": NVME, "none": DEVICE}.get(str(tier).lower())
    near = near or next(iter(difflib.get_close_matches(str(tier), TIERS, 1)), None)
    hint = f"did you mean {near!r}?" if near else "use device, host or nvme"
    refuse("opt_state", tier, f"is not one of {', '.join(TIERS)}; {hint}")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Axes of the device mesh, and the arrays that each axis splits."""

    data: int = -1
    """Number of devices over which the batch and, with ZeRO, the training state are split. -1: all
    devices that the other axes do not use."""
    model: int = 1
    """Number of devices over which each matrix is split (tensor parallelism). 1: no split. A split
    pays only if a layer does not fit on a device or the batch cannot be split further."""
    stage: int = 1
    """Number of pipeline stages. 1: no pipeline, because stages are idle while a pipeline fills and
    empties. A pipeline pays if links are too slow for the traffic of zero=3 or `model`."""
    pipeline_schedule: str | object = "1f1b"
    """Pipeline schedule: 1f1b, gpipe, interleaved, zb_h1, zb_v, or a CSV file; `zerojax
    schedule 1f1b --stages 4 --microbatches 8` draws it. 'pipeline_schedule=interleaved(2)' (in
    quotes) gives each stage two chunks, which shortens the idle time. With 1f1b the memory of a
    stage does not grow with the number of microbatches. From Python also a
    zerojax.pipeline_schedules.Schedule. Unused without stage > 1."""
    partition: tuple[int, ...] | str = "uniform"
    """Number of layers in each pipeline stage. uniform: equal numbers; flops: for the shortest
    step, with the head counted; parameters: minimizes the largest stage, with embedding and head
    counted; or a list with one entry per stage and chunk: 'partition=[3, 3, 2, 2]'. A stage with
    fewer layers waits for the others; with zero > 1, model > 1 or layers without checkpoints it
    computes padding instead."""
    stash: Literal["residuals", "input"] = "residuals"
    """Values of a microbatch that a pipeline stage stores between forward and backward. residuals:
    the values that the model's own checkpointing stores, so that nothing more is recomputed; input:
    only the stage's input, which needs the least memory and one more forward pass."""
    context: int = 1
    """Number of devices over which each sequence is split, for sequences whose activations do not
    fit on one device. ZeRO shards the state over the data and context axes together. 1: no split.
    Only for the reference decoders."""
    context_parallel: Literal["auto", "ulysses", "ring", "allgather"] = "auto"
    """Method of attention over a split sequence. ulysses: each device computes some of the heads;
    ring: keys and values are passed from device to device; allgather: keys and values are gathered.
    auto: the method that sends the fewest bytes within a node, and ring between nodes. Unused
    without context > 1."""
    expert: int = 1
    """Number of devices over which the experts of `zerojax.experts` are split; it must divide the
    number of experts. Rows of the batch are also split over these devices and sent to their
    experts. ZeRO shards experts over `data` only, and all other parameters over data and expert
    together. 1: no split."""
    node: int | None = None
    """Number of devices in one node, in the order of the mesh, for communication in two levels
    (wire.gradients, wire.secondary). null: the devices of one process, or 8 if each GPU has its own
    process."""
    replica: int = 1
    """Number of copies of the ZeRO-sharded state: sharded inside a node, replicated across nodes.
    1: sharded over all devices of `data`."""
    zero: int = 1
    """ZeRO stage. 0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters.
    The default 1 is the largest saving that needs no additional communication."""
    persistence_threshold: int = 100_000
    """Number of elements. At zero=3 parameters with fewer elements are not sharded, because
    gathering them costs more time than the saved memory is worth (DeepSpeed's default)."""
    reduce_bucket_size: int = 50_000_000
    """Number of gradient elements in one collective. DeepSpeed's default of 500 million needs 2.3
    GB more per device for a GPT of 1.3 billion parameters at zero=2 (compiled for 8 H100)."""
    allgather_bucket_size: int = 50_000_000
    """Number of parameter elements in one all-gather outside the layer loop. A large bucket needs
    more memory, as with reduce_bucket_size."""
    sequence_sharding: bool = False
    """Whether norms and residuals are also split over `model`, along the sequence. No effect at
    model=1."""
    deterministic: Literal["mesh"] | None = None
    """mesh: results are bit-equal on any number of devices that divides virtual_shards, because the
    batch is split into virtual_shards pieces that are computed one by one and summed in a fixed
    order. null: faster; results are bit-equal on the same mesh and differ in the last digits on
    another mesh."""
    virtual_shards: int = 8
    """Number of pieces of the batch with deterministic=mesh, a power of two. It is the largest
    number of data shards. More pieces are slower on few devices, because each is smaller. Another
    number changes the last digits of results."""
    roll: Literal["auto", "off"] = "auto"
    """Whether layers that a Python loop calls are rolled, which means that they run as one compiled
    loop over stacked parameters. auto: if at least four layers have the same program and are
    gathered, streamed, pipelined or recomputed one by one; off: the layers run as written.
    Parameter names do not change."""
    roll_remat: RollRemat | tuple[tuple[str, RollRemat], ...] = "auto"
    """Values of rolled layers (see `roll`) that the backward pass recomputes. full: the whole layer
    from its input; attention: all but the attention result; dots: all but matrix products;
    elementwise: all operations that are neither matrix products nor otherwise costly; none:
    nothing; model: as the model's own jax.checkpoint says; auto: as model, or elementwise if layers
    without checkpoints would store more than their weights. A mapping {pattern: value} sets each
    list of layers separately, as in {encoder: full, decoder: dots}: a pattern is the name of a loop
    in the plan, or a regular expression on that name or on parameter names. The first match counts,
    and loops without a match have auto. Reference models have `model.remat` instead."""
    unroll: bool | None = None
    """Whether the model's loops over layers (`jax.lax.scan` over stacked parameters, as in
    reference models) are unrolled. The step then does not stack the values for the backward pass,
    which saves memory and copies but takes longer to compile. Not with zero=3, stage > 1,
    checkpoints around layers or offload by layer, which need the loop. null: on GPUs, for at most
    32 layers, where nothing needs the loop."""
    kernels: Literal["auto", "xla", "mosaic_gpu", "interpret"] = "auto"
    """Implementation of the gradient statistics (with the loss scale) and of the optimizer's
    update. xla: fusions of the compiler; mosaic_gpu: this project's Pallas kernels, one for each
    array, or an error; auto: the kernel if it moves fewer bytes, or by measurement on available
    GPUs (see `tune`); interpret: the kernels on a CPU, slowly, for tests. An optimizer's own `impl`
    takes precedence."""
    tune: Literal["auto", "off"] = "auto"
    """Whether the choices of `kernels: auto`, attention "auto" and the slice size of offloaded
    state are measured on the run's GPUs before the first step, in about ten seconds at most. The
    faster choice is stored for later runs. off: choices are made from counted bytes."""
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    """Parts of the training state that are stored outside device memory; null: none."""
    lookup: Literal["gather", "owners"] = "gather"
    """Method of reading embedding tables that are used only for lookups (not tied to a head) and
    that ZeRO shards. gather: the table is gathered and its gradient reduced, like other parameters.
    owners: only the rows that are needed are fetched from the devices that store them, and their
    gradients are sent back (DeepSpeed's sparse_gradients). The plan lists the tables that use this,
    and says why others do not."""
    wire: WireConfig = dataclasses.field(default_factory=WireConfig)
    """Compression of the values that devices send each other; null: none."""
    rules: Rules | None = None
    """Tensor-parallel rules as pairs: a regular expression on the parameter's name, and a mesh axis
    or null for each trailing dimension. The first matching rule counts. null: the model's own
    `tensor_parallel_rules`, if it has any, or those that follow from the names that it gives the
    dimensions of its parameters."""
    logical_axis_rules: tuple[tuple[str, str | tuple[str, ...] | None], ...] | None = None
    """Table of the names that a Flax model gives the dimensions of its parameters
    (`nnx.with_partitioning`, `nn.with_logical_partitioning`): a name, and the mesh axes over which
    such a dimension is split, such as `{mlp: model, embed: null}`. Only `model` is used, because
    ZeRO shards over the other axes. null: the table of Flax's `logical_axis_rules` context in which
    the run is planned, if there is one."""

    @property
    def fixed_pieces(self) -> int | None:
        """Number of pieces into which every mesh divides the batch, to sum them in one order; None:
        the order of sums depends on the mesh."""
        return None if self.deterministic is None else self.virtual_shards

    @property
    def devices_per_shard(self) -> int:
        """Number of devices that share the rows of one data shard."""
        return self.context * self.stage * self.model

    def expert_on(self, num_devices: int) -> int:
        """Computes the expert degree for another number of devices: the largest divisor of `expert`
        that divides the number of devices that the other axes leave. It also divides the number of
        experts, because `expert` does.

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
                f"is not a power of two, which the sum in a binary tree needs; use {low} or "
                f"{2 * low}",
            )
        mapping = () if isinstance(self.roll_remat, str) else self.roll_remat
        patterns = [pattern for pattern, _ in mapping]
        for number, pattern in enumerate(patterns):
            check_regex("roll_remat", pattern)
            if pattern in patterns[:number]:
                raise ValueError(f"roll_remat has {pattern!r} twice; give each list one value")
        for pattern, axes in self.rules or ():
            check_regex("rules", pattern)
            for axis in axes:
                if axis not in (None, "model"):
                    refuse("rules", axis, f"is not an axis of rule {pattern!r}; use model or null")
        _check_schedule(self.pipeline_schedule)
        _check_partition(self.partition)


def _check_schedule(schedule: object) -> None:
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
    """Converts its argument to a MeshConfig: a MeshConfig is returned as it is, a mapping gives the
    fields, None gives the defaults."""
    if value is None:
        return MeshConfig()
    if isinstance(value, MeshConfig):
        return value
    if isinstance(value, Mapping):
        return from_dict(MeshConfig, value)
    raise TypeError(
        f"mesh_config is a {type(value).__name__}; give a MeshConfig, a dict of its fields, or None"
    )
