"""Inputs of planning that are the same on every mesh, and the resolution of mesh options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax import tracing
from zerojax.config import MeshConfig, as_mesh_config
from zerojax.config.checks import as_patterns, check_whole_number
from zerojax.config.features import Features
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.recognition import is_deepspeed
from zerojax.config.run import OptimizerConfig
from zerojax.config.tree_types import Tree
from zerojax.models.dim_names import AxisRules, rules_in_context
from zerojax.optim.precision import Precision
from zerojax.optim.step_sizes import StepSizes
from zerojax.placement import device_mesh as meshes
from zerojax.placement.device_mesh import DATA
from zerojax.placement.user_shardings import users_mesh

MESH_OPTIONS = (
    "rules",
    "logical_axis_rules",
    "persistence_threshold",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sequence_sharding",
    "context_parallel",
    "roll",
    "roll_remat",
    "unroll",
    "kernels",
    "tune",
    "offload",
    "wire",
    "lookup",
    "node",
    "pipeline_schedule",
    "partition",
    "stash",
    "deterministic",
    "virtual_shards",
)
"""Fields of `MeshConfig` that `make_plan` takes as keywords: all except axis sizes and the ZeRO
stage."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Inputs of planning that are the same on every mesh. Attributes that are not listed are
    arguments of `make_plan`.

    Attributes:
      features: settings of optional features of the run. Sizes of steps that change during the run
        are planned by `rung_plans.with_rungs`.
      numbers_are_inputs: whether the step takes learning rate, decays and clipping of an optimizer
        as inputs, if it can, so that runs that differ only in these run the same program.
      step_sizes: rows and tokens of the run's steps, if `example_batch` is a step of one compiled
        size only; None: they follow from the batch and the features.
      layer_norms: whether the step computes the norms of each layer (`passes.layer_norms`).
      axis_rules: table of Flax's `logical_axis_rules` context in which the inputs were made.
      users_mesh: mesh that the user had set (`jax.set_mesh`) when the inputs were made; None: none.
      reasons: sentences about the defaults that were chosen before planning; they become part of
        the plan.

    Raises:
      ValueError: the number of microbatches or a pattern of `freeze` is invalid.
    """

    model: tracing.ModelLike
    example_batch: Tree
    loss: tracing.Loss | None = None
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None
    precision: Precision | str | None = None
    reduce_dtype: str | None = None
    accumulate_dtype: str | None = None
    num_microbatches: int | None = None
    freeze: tuple[str, ...] = ()
    steps: int | None = None
    features: Features = dataclasses.field(default_factory=Features)
    step_sizes: StepSizes | None = None
    numbers_are_inputs: bool = False
    layer_norms: bool = False
    axis_rules: AxisRules | None = dataclasses.field(default_factory=rules_in_context)
    users_mesh: AbstractMesh | None = dataclasses.field(default_factory=users_mesh)
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_whole_number("num_microbatches", self.num_microbatches, 1)
        object.__setattr__(self, "freeze", as_patterns("freeze", self.freeze))


def plan_options(settings: MeshConfig) -> dict[str, Any]:
    """Returns the fields of `settings` that `make_plan` takes as keywords in addition to a mesh:
    all except axis sizes and the ZeRO stage."""
    return {name: getattr(settings, name) for name in MESH_OPTIONS}


def resolve_mesh(
    mesh: Any, zero: int | None, options: Mapping[str, Any]
) -> tuple[MeshConfig, Mesh | AbstractMesh]:
    """Returns (mesh options with every size and the ZeRO stage, the mesh).

    Args:
      mesh: a mesh, or the options from which it is made.
      zero: ZeRO stage; None: the stage in the options.
      options: fields of the mesh options that replace those of `mesh`.

    Raises:
      TypeError: `mesh` is a DeepSpeed configuration.
      ValueError: `offload.auto` is set, or the mesh cannot be made.
    """
    if isinstance(mesh, (Mesh, AbstractMesh)):
        if isinstance(mesh, Mesh):
            mesh = meshes.normalise_mesh(mesh)
        else:
            mesh = meshes.normalise_abstract_mesh(mesh)
        settings = MeshConfig(**{axis: mesh.shape.get(axis, 1) for axis in meshes.AXES}, **options)
    else:
        if isinstance(mesh, Mapping) and is_deepspeed(mesh):
            raise TypeError(
                "mesh is a DeepSpeed configuration, which zerojax.train and zerojax.initialize "
                "take; its plan is zerojax.initialize(model, config, example_batch=batch).plan"
            )
        settings = dataclasses.replace(as_mesh_config(mesh), **options)
        mesh = meshes.make_mesh(settings)
    settings = dataclasses.replace(settings, data=mesh.shape[DATA])
    if settings.offload.auto:
        raise ValueError(
            "offload.auto=True is decided by zerojax.train, run files and `zerojax plan`, which "
            "compile the step for the GPUs; set offload.opt_state, params or activations, or let "
            "zerojax.search choose"
        )
    if zero is not None:
        settings = dataclasses.replace(settings, zero=zero)
    return settings, mesh
