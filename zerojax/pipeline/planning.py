"""Plans the pipeline of a run: how many layers each stage has, and the memory of a stage."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.config.tree_types import Batch, Tree
from zerojax.models.losses import as_sums
from zerojax.pipeline.pipeline_costs import executed_flops
from zerojax.placement.device_mesh import DATA, MODEL, STAGE, num_data_shards
from zerojax.placement.state_layout import PipelineLayout
from zerojax.schedules import lower, make_schedule
from zerojax.tracing import trees
from zerojax.tracing.flops import count_program_flops
from zerojax.tracing.jaxpr import holds_collectives
from zerojax.tracing.loops import LayerLoop, cut_loss, find_layer_loop, split_layers
from zerojax.tracing.protocol import Loss, Model, on_batch
from zerojax.tracing.trace import ModelTrace

Arrays = Mapping[str, Any]

METHODS = ("uniform", "parameters", "flops")
"""Names of the methods that divide layers among stages, by number or by cost; the caller provides
the costs."""


def plan_pipeline(
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    num_microbatches: int,
    model: Model,
    loss: Loss,
    trace: ModelTrace,
    arrays: tuple[Arrays, Arrays, Any],
) -> PipelineLayout:
    """Plans the pipeline of a model on `settings.stage` stages.

    Args:
      settings: mesh options.
      mesh: the device mesh.
      num_microbatches: number of microbatches of a step.
      model, loss: model that is trained, and its loss.
      trace: trace of the loss on one microbatch.
      arrays: (parameters as they are read, extras, microbatch), as `ShapeDtypeStruct`s.

    Raises:
      ValueError: the model has no layers to divide, or a feature that pipelines do not support;
        `ScheduleError`: the schedule cannot run with these numbers.
    """
    params, extras, batch = arrays
    names = [*sorted(params), *[None] * len(jax.tree.leaves((extras, batch)))]
    loop = find_layer_loop(trace.jaxpr, names)
    source: Any = settings.pipeline_schedule
    schedule = make_schedule(source, stages=settings.stage, microbatches=num_microbatches)
    draft = PipelineLayout(
        table=lower(schedule, stash=settings.stash),
        layers=(loop.num_layers,) * schedule.num_virtual_stages,
        stacked=loop.stacked,
        activations=loop.activations,
        embed_flops=count_program_flops(loop.embed),
        layer_flops=count_program_flops(loop.layer),
        head_flops=count_program_flops(loop.head),
        stash_bytes=0,
        skips_padding=_may_skip(settings, mesh, loop),
    )
    layers = _divide(settings.partition, loop, params, draft)
    padding = len(set(layers)) > 1
    skips = padding and draft.skips_padding

    def run(values: Tree, extras: Tree, key: jax.Array, batch: Batch) -> Any:
        result, after = model.run(values, extras, key, on_batch(loss, batch))
        return as_sums(result), after

    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = run, dict(params), dict(extras), key, batch
    cuts = {"padding": padding, "skips": skips, "overwritten": model.overwritten}
    pieces = cut_loss(*arguments, **cuts)
    stash = sum(x.size * x.dtype.itemsize for x in pieces.activations)
    if settings.stash == "residuals":
        stash = split_layers(pieces, params, dict(extras), key, batch, max(layers)).num_bytes
    return dataclasses.replace(
        draft,
        layers=layers,
        activations=pieces.activations,
        stash_bytes=stash,
        skips_padding=skips,
    )


def _may_skip(settings: MeshConfig, mesh: Mesh | AbstractMesh, loop: LayerLoop) -> bool:
    """Returns whether a stage may skip rows of padding (rows without a layer) instead of computing
    them."""
    gathers = settings.zero > 1 and mesh.shape[DATA] > 1
    collective = mesh.shape[MODEL] > 1 or gathers or holds_collectives(loop.layer)
    return not collective and (settings.stash == "input" or loop.is_checkpointed)


def choose_microbatches(
    given: int | None, mesh: Mesh | AbstractMesh, batch: Batch
) -> tuple[int, list[str]]:
    """Returns (number of microbatches, reasons): the user's number, or a default.

    More microbatches reduce the share of a step in which stages are idle, but make matrices
    smaller. Multiples of the number of stages are preferred, because some schedules need them.
    """
    stages = mesh.shape[STAGE]
    if given is not None or stages == 1:
        return (1 if given is None else given), []
    rows = jax.tree.leaves(batch)[0].shape[0] // num_data_shards(mesh)
    fitting = [n for n in range(1, 4 * stages + 1) if rows % n == 0]
    number = max(fitting, key=lambda n: (n % stages == 0, n), default=1)
    idle = (stages - 1) / (number + stages - 1)
    return number, [
        f"num_microbatches={number}: chosen for {rows} rows per data shard, up to 4 per stage "
        f"with {stages} stages; with 1f1b, {idle:.0%} of a step is idle time"
    ]


def _divide(
    method: str | tuple[int, ...], loop: LayerLoop, params: Arrays, draft: PipelineLayout
) -> tuple[int, ...]:
    """Returns the number of layers of each virtual stage (chunk of a stage).

    "flops" chooses the fastest division for the executor. In every tick the executor computes a
    forward slot, in which the last virtual stage computes the whole head, and a backward slot; each
    takes as long as its slowest stage. So the head counts for more than its share of a step, or, if
    padding is computed, for nothing. The best divisions for several weights of the head are
    compared.
    """
    divide = functools.partial(
        partition_layers, method, loop.num_layers, draft.schedule.num_virtual_stages
    )
    if method != "flops":
        return divide(**_sizes(loop, params))
    costs = {"layer_cost": draft.layer_flops, "embed_cost": draft.embed_flops}
    weights = [weight * draft.head_flops / 2 for weight in range(7)]
    candidates = dict.fromkeys(divide(**costs, head_cost=head) for head in weights)

    def time(layers: tuple[int, ...]) -> float:
        skips = draft.skips_padding and len(set(layers)) > 1
        return executed_flops(dataclasses.replace(draft, layers=layers, skips_padding=skips))

    return min(candidates, key=time)


def _sizes(loop: LayerLoop, params: Arrays) -> dict[str, float]:
    """Returns numbers of parameters: {"layer_cost": of one layer, "embed_cost", "head_cost"}."""
    sizes = {name: trees.num_elements(leaf.shape) for name, leaf in params.items()}
    before = loop.names_of(loop.embed_piece.inputs)
    rest = {name: size for name, size in sizes.items() if name not in loop.stacked}
    return {
        "layer_cost": sum(sizes[name] for name in loop.stacked) / loop.num_layers,
        "embed_cost": sum(size for name, size in rest.items() if name in before),
        "head_cost": sum(size for name, size in rest.items() if name not in before),
    }


def partition_layers(
    method: str | tuple[int, ...] | Sequence[int],
    num_layers: int,
    num_parts: int,
    *,
    layer_cost: float = 1.0,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
) -> tuple[int, ...]:
    """Divides the layers of a model into consecutive parts; returns the number of layers in each
    part.

    "parameters" and "flops" minimize the cost of the most expensive part. Among equal solutions the
    most even is chosen: with the fewest layers in the largest part, then in the second largest, and
    so on; then the solution whose smaller parts come last.

    Args:
      method: a name in `METHODS`, or the numbers themselves.
      num_layers: number of layers of the model; all cost the same.
      num_parts: number of parts, which is pipeline stages times chunks per stage.
      layer_cost: cost of one layer, at least 0, in any unit.
      embed_cost: additional cost of the first part, in the same unit.
      head_cost: additional cost of the last part, in the same unit; with one part it adds to
        embed_cost.

    Raises:
      ValueError: an unknown method, more parts than layers, "uniform" with layers that the parts do
        not divide, or a list that does not fit.

    >>> partition_layers("flops", 8, 4, head_cost=2.0)
    (3, 2, 2, 1)
    """
    if not isinstance(method, str):
        return _check_list(tuple(method), num_layers, num_parts)
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(METHODS)} or a list"
        raise ValueError(f"partition={method!r} is not known; {hint}")
    if num_parts > num_layers:
        raise ValueError(
            f"{num_parts} parts (stages x chunks) for {num_layers} layers: each part needs at "
            f"least one layer; use at most {num_layers} parts, or more layers"
        )
    if method != "uniform":
        return _balance(num_layers, num_parts, layer_cost, embed_cost, head_cost)
    if num_layers % num_parts:
        divisors = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        near = " or ".join(str(n) for n in _around(divisors, num_parts))
        even = list(_even(num_layers, num_parts))
        raise ValueError(
            f"{num_layers} layers do not divide by {num_parts} parts (stages x chunks), which "
            f'partition="uniform" needs; use {near} parts, partition="flops", or a list such as '
            f"partition={even}. Set it in the mesh: "
            f'{{"stage": ..., "partition": "flops"}}, mesh.partition in a run file'
        )
    return (num_layers // num_parts,) * num_parts


def _check_list(layers: tuple[int, ...], num_layers: int, num_parts: int) -> tuple[int, ...]:
    """Returns `layers`, the user's number of layers of each part, unchanged.

    Raises:
      ValueError: there are not `num_parts` entries, one is below 1, or the sum is not
        `num_layers`.
    """
    example = ""
    if num_parts <= num_layers:
        example = f", such as {list(_even(num_layers, num_parts))}"
    if len(layers) != num_parts:
        raise ValueError(
            f"partition={list(layers)} has {len(layers)} entries for {num_parts} parts (stages x "
            f"chunks); give one for each{example}"
        )
    if min(layers) < 1:
        raise ValueError(
            f"partition={list(layers)} has a part without layers; give each part at least "
            f"1{example}"
        )
    if sum(layers) != num_layers:
        raise ValueError(
            f"partition={list(layers)} has {sum(layers)} layers, but the model has {num_layers}; "
            f"the entries must add up to {num_layers}{example}"
        )
    return layers


def _around(divisors: Sequence[int], number: int) -> list[int]:
    """Returns the nearest divisors below and above a number, if there are any."""
    below = [n for n in divisors if n < number]
    above = [n for n in divisors if n > number]
    return below[-1:] + above[:1]


def _even(num_layers: int, num_parts: int) -> tuple[int, ...]:
    """Returns part sizes that are as equal as possible, larger parts first."""
    size, larger = divmod(num_layers, num_parts)
    return (size + 1,) * larger + (size,) * (num_parts - larger)


def _balance(
    num_layers: int, num_parts: int, layer: float, embed: float, head: float
) -> tuple[int, ...]:
    """Divides layers into parts so that the cost of the most expensive part is minimal.

    All parts between the first and the last cost the same per layer, so the search tries only the
    numbers of layers of these two; the others are as equal as possible.
    """
    if num_parts == 1:
        return (num_layers,)
    best, found = None, ()
    for first in range(1, num_layers - num_parts + 2):
        middle_parts = num_parts - 2
        # With two parts the last gets the rest; otherwise it leaves each middle part one layer.
        least = 1 if middle_parts else num_layers - first
        for last in range(least, num_layers - first - middle_parts + 1):
            middle = _even(num_layers - first - last, middle_parts) if middle_parts else ()
            layers = (first, *middle, last)
            heaviest = max(embed + first * layer, head + last * layer, layer * max(layers))
            rank = (heaviest, sorted(layers, reverse=True), [-count for count in layers])
            if best is None or rank < best:
                best, found = rank, layers
    return found
