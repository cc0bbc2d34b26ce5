"""Placement table of a traced model: gather mode of each parameter, and frozen parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from zerojax import models
from zerojax.config import MeshConfig
from zerojax.models.jaxpr import marked_reads
from zerojax.plan.mesh import MODEL
from zerojax.plan.pipeline_layout import PipelineLayout
from zerojax.plan.placement_rules import PlacementRules
from zerojax.plan.placement_table import Placement, place_parameters


def place_model(
    model: models.Model,
    params: Mapping[str, Any],
    trace: models.ModelTrace,
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    *,
    freeze: tuple[str, ...],
    stacked: frozenset[str],
    layout: PipelineLayout | None,
) -> Placement:
    """The table of a model's parameters.

    Args:
      model, params: what is trained; trace: of one microbatch.
      settings: the mesh options; mesh: made from them.
      freeze: regular expressions on names.
      stacked: names of the parameters that a pass takes layer by layer, whatever the model reads.
      layout: of a pipeline, None without one.
    """
    integers = {
        name: f"{leaf.dtype.name} has no gradient: frozen and kept whole"
        for name, leaf in params.items()
        if not jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    barriers, read_shapes = dict(trace.barriers), dict(trace.read_shapes)
    # Read whole, but what is read goes nowhere but into the loop, which slices it.
    early = [name for name in stacked if params[name].shape in read_shapes.get(name, ())]
    barriers |= dict.fromkeys(early, "is read before the loop over layers")
    read_shapes |= {name: frozenset([params[name].shape[1:]]) for name in early}
    virtual_shards = settings.virtual_shards if settings.deterministic else None
    if virtual_shards is not None:
        again = "is read more than once, and its sums have to be of one order"
        repeated = dict.fromkeys(_read_repeatedly(params, trace), again)
        barriers = repeated | barriers
    rules = settings.rules
    if rules is None:
        rules = models.bound_attribute(model, "tensor_parallel_rules") or ()
    return place_parameters(
        {name: tuple(leaf.shape) for name, leaf in params.items()},
        read_shapes,
        mesh.shape,
        PlacementRules(
            zero=settings.zero,
            tensor_parallel=rules if mesh.shape[MODEL] > 1 else (),
            freeze=freeze,
            persistence_threshold=settings.persistence_threshold,
            virtual_shards=virtual_shards,
        ),
        always_frozen=integers,
        barriers=barriers,
        reads_lazily=model.reads_lazily,
        mapped_dims=trace.mapped_dims,
        layer_rows=None if layout is None else dict.fromkeys(stacked, layout.rows),
    )


def _read_repeatedly(params: Mapping[str, Any], trace: models.ModelTrace) -> list[str]:
    """Parameters of which some value is read twice: tied ones, or whole ones inside a loop."""
    found: dict[str, bool] = {}
    for read in marked_reads(trace.jaxpr.jaxpr):
        sliced = len(params[read.name].shape) - len(read.shape) - read.mapped_dims
        found[read.name] = read.name in found or read.loops > sliced
    return [name for name, again in found.items() if again]
