"""Counts the bytes that generation reads per decoded position, and bounds its rate from below.

One position is one new token of every row. A device reads every weight once, except the tables of
tokens and positions, of which it reads one row per token, and the whole cache. Activations, kernel
launches and latencies are left out, so a run is slower than these bounds.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from flax import nnx

from zerojax.config.generation_limits import CACHES
from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.forecast_numbers import TrafficRow
from zerojax.forecasting.roofline import link_bandwidth, members_per_node
from zerojax.hardware.gpus import Gpu
from zerojax.placement.device_mesh import MODEL, STAGE
from zerojax.plan.make import Plan
from zerojax.tracing.trees import format_bytes
from zerojax.zoo.decoder import MEGATRON_RULES, Decoder
from zerojax.zoo.generation import count_shards
from zerojax.zoo.lora import KERNEL_SUFFIX

BATCHES = (1, 32)
"""Numbers of rows for which rates are stated."""
DEGREES = (1, 2, 4, 8)
"""Sizes of the axis `model` for weights that stay whole on `model` devices."""
_BLOCKS, _TABLES = "blocks/", ("token_embedding/", "position_embedding/")
_CODE_BYTES = 1
_INT8 = "int8"
"""Format of weights; those of "fp8" have the same bytes."""


@dataclass(frozen=True, kw_only=True)
class GenerationBound:
    """Bytes and time of one decoded position, for one way of generating and one number of rows.

    Attributes:
      way: "gathered": weights in the shards of ZeRO-3, gathered layer by layer; "in place": the
        same shards, and devices send activations; "model N": weights whole over N devices of the
        axis `model`, and rows divided over the other devices.
      quantize, cache: formats of weights and cache; None for the compute dtype.
      batch: number of rows of all devices.
      weight_bytes, cache_bytes: bytes that one device reads from its memory.
      wire_bytes: bytes that one device sends: weights, unless they stay whole, and activations.
      held_bytes: bytes of weights and cache in the memory of one device.
      seconds: lower bound of the time: the larger one of reading and sending.
      tokens_per_second: upper bound for all rows.
      fits: whether the memory of the GPU holds `held_bytes`.
    """

    way: str
    quantize: str | None
    cache: str | None
    batch: int
    weight_bytes: int
    cache_bytes: int
    wire_bytes: int
    held_bytes: int
    seconds: float
    tokens_per_second: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """One parameter: name, shape, number of dimensions that count layers, share of its elements
    that one device stores, and the mesh axes of ZeRO that split it, joined by "+"."""

    name: str
    shape: tuple[int, ...]
    stack_dims: int
    share: float
    zero_axes: str

    def num_bytes(self, itemsize: int, quantize: str | None, num_outputs: int) -> int:
        """Returns the bytes of the whole parameter; if `quantize` rounds it, those of its codes and
        of one scale per layer and output. `num_outputs` is the number of its last dimensions that
        are outputs."""
        size = math.prod(self.shape)
        if quantize is None or not self.has_codes:
            return size * itemsize
        layers = math.prod(self.shape[: self.stack_dims])
        outputs = math.prod(self.shape[len(self.shape) - num_outputs :])
        return size * _CODE_BYTES + layers * outputs * itemsize

    @property
    def has_codes(self) -> bool:
        """Returns whether `quantize` rounds this parameter."""
        return self.name.startswith(_BLOCKS) and self.name.endswith(KERNEL_SUFFIX)

    def is_read(self, *, tied: bool) -> bool:
        """Returns whether a position reads the whole parameter, not single rows of it."""
        is_head = tied and self.name.startswith(_TABLES[0])
        return is_head or not self.name.startswith(_TABLES)

    def splits(self, degree: int) -> int:
        """Returns the number of parts over `model` devices by the model's rules: `degree` or 1."""
        for pattern, axes in MEGATRON_RULES:
            if MODEL in axes and re.search(pattern, self.name):
                size = self.shape[len(self.shape) - len(axes) + axes.index(MODEL)]
                return degree if size % degree == 0 else 1
        return 1


def generation_bounds(plan: Plan, gpu: Gpu) -> list[GenerationBound]:
    """Counts bytes and bounds rates of all ways of generating with the model of a plan.

    The cache is counted with the model's `max_seq_len` positions.

    Args:
      plan: plan of a run; at ZeRO-3 its mesh is that of "gathered" and "in place".
      gpu: specification of the GPU.

    Raises:
      TypeError: the model is not a decoder.
      ValueError: the model has experts, or the mesh has pipeline stages.
    """
    model = getattr(plan.users_model, "template", None)
    if not isinstance(model, Decoder):
        raise TypeError("--generation counts decoders only; use a GPT2, a Llama or a Decoder")
    if model.moe is not None:
        raise ValueError(
            f"--generation does not count models with experts; this one has "
            f"{model.moe.num_experts}; leave out --generation"
        )
    mesh = {str(name): size for name, size in plan.mesh.shape.items()}
    if (stages := mesh.get(STAGE, 1)) > 1:
        raise ValueError(f"--generation does not count stage={stages}; set mesh.stage=1")
    counter = _Counter(plan, model, gpu, mesh)
    devices = math.prod(mesh.values())
    # Weights whole over devices of several nodes would send sums over the network in every layer.
    degrees = [n for n in DEGREES if devices % n == 0 and n <= gpu.node_devices]
    kinds = itertools.product((None, _INT8), (None, *CACHES), BATCHES)
    options = [{"quantize": q, "cache": c, "batch": b} for q, c, b in kinds]
    shards = (counter.gathered, counter.in_place) if plan.zero == 3 and devices > 1 else ()
    return [
        *(way(**each) for way in shards for each in options),
        *(counter.resident(degree, devices, **each) for degree in degrees for each in options),
    ]


class _Counter:
    """Counts the bytes, and from them the shortest time, of each way to generate with one model."""

    def __init__(self, plan: Plan, model: Decoder, gpu: Gpu, mesh: Mapping[str, int]) -> None:
        self._gpu, self._mesh, self._model = gpu, mesh, model
        self._itemsize = np.dtype(plan.precision.compute_dtype).itemsize
        self._row_shards = count_shards(plan.batch_sharding)
        self._outputs = dict(_output_dims(model))
        self._leaves = list(_leaves(plan))
        self._tied = model.lm_head is None

    def gathered(self, *, quantize: str | None, cache: str | None, batch: int) -> GenerationBound:
        """Returns the bound of generating with the shards of the run, gathered where they are
        read."""
        degree = self._mesh.get(MODEL, 1)
        missing = dict.fromkeys((leaf.zero_axes for leaf in self._leaves), 0.0)
        read = held = 0.0
        for leaf, whole in self._sizes(quantize):
            held += whole * leaf.share
            if leaf.is_read(tied=self._tied):
                part = whole / leaf.splits(degree)
                read += part
                # A device may hold more than it needs, and then nothing is missing.
                missing[leaf.zero_axes] += max(part - whole * leaf.share, 0.0)
        # The slowest device sets the rate, so rows are rounded up.
        rows = math.ceil(batch / self._row_shards)
        sent = [self._row("all-gather", axes, size) for axes, size in missing.items() if size]
        sent += self._sums(rows, degree, self._mesh)
        return self._bound(
            *("gathered", quantize, cache, batch),
            *(read, self._cache(rows, degree, cache), held),
            [(row, link_bandwidth(self._gpu, self._mesh, row)) for row in sent],
        )

    def in_place(self, *, quantize: str | None, cache: str | None, batch: int) -> GenerationBound:
        """Counts generation with the shards of the run, if devices send activations of all rows.

        A device reads only its shards. It sends at least two activations of each row and layer.
        """
        sizes = [(leaf, whole * leaf.share) for leaf, whole in self._sizes(quantize)]
        read = sum(size for leaf, size in sizes if leaf.is_read(tied=self._tied))
        config, shards = self._model.config, math.prod(self._mesh.values())
        payload = 2 * config.num_layers * batch * config.embed_dim * self._itemsize
        row = self._row(
            "all-gather", "+".join(self._mesh), payload * (shards - 1) / shards, self._mesh
        )
        degree = self._mesh.get(MODEL, 1)
        rows = math.ceil(batch / self._row_shards)
        return self._bound(
            *("in place", quantize, cache, batch),
            *(read, self._cache(rows, degree, cache), sum(size for _, size in sizes)),
            [(row, link_bandwidth(self._gpu, self._mesh, row))],
        )

    def resident(
        self, degree: int, devices: int, *, quantize: str | None, cache: str | None, batch: int
    ) -> GenerationBound:
        """Returns the bound of generating with weights that are whole over each `degree`
        neighbouring devices."""
        parts = [(leaf, whole / leaf.splits(degree)) for leaf, whole in self._sizes(quantize)]
        read = sum(size for leaf, size in parts if leaf.is_read(tied=self._tied))
        held = sum(size for _, size in parts)
        # Devices beyond one group of `degree` hold copies of the weights and take other rows.
        rows = math.ceil(batch / (devices // degree))
        mesh = {MODEL: degree}
        sent = self._sums(rows, degree, mesh)
        return self._bound(
            *(f"model {degree}", quantize, cache, batch),
            *(read, self._cache(rows, degree, cache), held),
            [(row, link_bandwidth(self._gpu, mesh, row)) for row in sent],
        )

    def _sizes(self, quantize: str | None) -> Iterator[tuple[_Leaf, int]]:
        """Yields each parameter and the bytes of the whole parameter."""
        for leaf in self._leaves:
            outputs = self._outputs.get(leaf.name, 0)
            yield leaf, leaf.num_bytes(self._itemsize, quantize, outputs)

    def _cache(self, rows: int, degree: int, kind: str | None) -> int:
        """Returns the bytes of the cache of `rows` full rows on one device."""
        config = self._model.config
        heads = config.num_kv_heads or config.num_heads
        head_dim = config.head_dim or config.embed_dim // config.num_heads
        width = head_dim * self._itemsize
        if kind is not None:
            width = head_dim * _CODE_BYTES + self._itemsize  # codes and their scale
        # Heads that do not divide stay whole on every device, as their weights do in `splits`.
        own_heads = heads // degree if heads % degree == 0 else heads
        return 2 * config.num_layers * rows * config.max_seq_len * own_heads * width

    def _sums(self, rows: int, degree: int, mesh: Mapping[str, int]) -> list[TrafficRow]:
        """Returns one all-reduce over `model` with the bytes of the sums after the two row-parallel
        products of all layers; [] if `degree` is 1."""
        if degree == 1:
            return []
        config = self._model.config
        payload = 2 * config.num_layers * rows * config.embed_dim * self._itemsize
        # A ring sends 2 (g-1)/g of the payload: it scatters sums, then gathers them.
        return [self._row("all-reduce", MODEL, payload * 2 * (degree - 1) / degree, mesh)]

    def _row(
        self, kind: str, axis: str, size: float, mesh: Mapping[str, int] | None = None
    ) -> TrafficRow:
        mesh = self._mesh if mesh is None else mesh
        group = math.prod(mesh.get(name, 1) for name in axis.split("+"))
        return TrafficRow(
            kind=kind,
            axis=axis,
            dtype="",
            count=1,
            payload_bytes=round(size),
            wire_bytes=round(size),
            loop_depth=0,
            crosses_nodes=members_per_node(mesh, axis, self._gpu.node_devices) < group,
            hidden=1.0,
        )

    def _bound(
        self,
        way: str,
        quantize: str | None,
        cache: str | None,
        batch: int,
        read: float,
        cache_bytes: float,
        held: float,
        sent: Sequence[tuple[TrafficRow, float]],
    ) -> GenerationBound:
        held_bytes = round(held + cache_bytes)
        reading = (read + cache_bytes) / self._gpu.memory_bandwidth
        # Sending may overlap with reading, so the bound is the longer one and not the sum.
        seconds = max(reading, math.fsum(row.wire_bytes / rate for row, rate in sent))
        return GenerationBound(
            way=way,
            quantize=quantize,
            cache=cache,
            batch=batch,
            weight_bytes=round(read),
            cache_bytes=round(cache_bytes),
            wire_bytes=sum(row.wire_bytes for row, _ in sent),
            held_bytes=held_bytes,
            seconds=seconds,
            tokens_per_second=batch / seconds,
            fits=held_bytes <= self._gpu.memory_bytes,
        )


def _leaves(plan: Plan) -> Iterator[_Leaf]:
    # Frozen parameters are read in every position too, although they have no optimizer state.
    stored = {**plan.abstract_stored["params"], **plan.abstract_stored["frozen"]}
    for name, leaf in plan.users_placement.leaves.items():
        x = stored[name]
        share = math.prod(x.sharding.shard_shape(x.shape)) / math.prod(x.shape)
        yield _Leaf(
            name=name,
            shape=tuple(leaf.shape),
            stack_dims=leaf.stack_dims,
            share=share,
            zero_axes="+".join(leaf.zero_axes),
        )


def _output_dims(model: Decoder) -> Iterator[tuple[str, int]]:
    """Yields (name, number of output dimensions) of each kernel of a projection."""
    for path, part in nnx.iter_modules(model):
        if (outputs := getattr(part, "num_outputs", None)) is not None:
            yield "/".join(map(str, path)) + KERNEL_SUFFIX, outputs


def generation_page(bounds: Sequence[GenerationBound], plan: Plan, gpu: Gpu) -> str:
    """Formats bounds as a table of at most 100 columns, with one line for each pair of batches."""
    dtype = plan.precision.compute_dtype.name
    one, many = BATCHES
    head = ("way", "weights", "cache", "reads", f"+cache {one}|{many}", "sends", "holds")
    rows = [(*head, f"ms {one}|{many}", f"tokens/s {one}|{many}")]
    # `generation_bounds` lists the two batch sizes of each way side by side.
    for first, second in zip(bounds[::2], bounds[1::2], strict=True):
        rows.append(
            (
                first.way,
                first.quantize or dtype,
                first.cache or dtype,
                format_bytes(first.weight_bytes),
                f"{format_bytes(first.cache_bytes)}|{format_bytes(second.cache_bytes)}",
                format_bytes(second.wire_bytes),
                format_bytes(second.held_bytes),
                "|".join(f"{x.seconds * 1e3:.2f}" if x.fits else "-" for x in (first, second)),
                "|".join(f"{x.tokens_per_second:,.0f}" if x.fits else "-" for x in (first, second)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)) for row in rows]
    notes = (
        f"Per decoded position and device, {gpu.title}; cache full, at max_seq_len positions.",
        f"sends, holds: at batch {many}. Counted by formula; no GPU has run it.",
        "Weights in fp8 have the bytes of int8.",
        "ms is a lower bound and tokens/s an upper bound: activations and launches are left out.",
        "gathered, in place: shards of ZeRO-3; devices send weights, or activations of all rows.",
    )
    if not all(bound.fits for bound in bounds):
        memory = format_bytes(gpu.memory_bytes)
        notes = (*notes, f"-: weights and cache do not fit in the {memory} of a GPU.")
    return "\n".join(["GENERATION", *(f"  {line.rstrip()}" for line in lines), *notes])
