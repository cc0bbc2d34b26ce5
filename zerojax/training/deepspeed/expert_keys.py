"""The section `expert_parallel` (AutoEP), as the mesh axis `expert` and checks of the router.

DeepSpeed finds experts in torch modules by names, and the file may say how their router computes.
Here the model says both; what a file says of the router has to be what the model does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax import models
from zerojax.config import ConfigError, MeshConfig, MoEConfig
from zerojax.training.deepspeed.ds_config import File

SECTION = "expert_parallel"
SIZE = f"{SECTION}.autoep_size"

_ROUTER = {
    "top_k": "experts_per_token",
    "score_func": "scores",
    "route_norm": "renormalize",
    "route_scale": "scale",
    "routed_scaling_factor": "scale",
    "num_expert_groups": "num_groups",
    "num_limited_groups": "groups_per_token",
}
"""{key of the section: field of `MoEConfig` that has to be the same}."""
_SHARED = "has_shared_experts"


def expert_size(file: File) -> int:
    """Over how many devices experts are split, which the section says where it is enabled."""
    if file[f"{SECTION}.enabled"]:
        if file[SIZE] < 1:
            file.notes.refuse(SIZE, file[SIZE], "must be at least 1")
        return max(1, file[SIZE])
    for name in ("autoep_size", *_ROUTER, _SHARED):
        if file.has(f"{SECTION}.{name}"):
            why = f"{SECTION}.enabled is false, and DeepSpeed reads no other key then"
            file.notes.change(f"{SECTION}.{name}", "ignored", why)
    if file[SIZE] > 1:
        file.notes.warnings.append(f"{SIZE}={file[SIZE]} has no effect: enabled is false")
    return 1


def data_size(file: File, experts: int) -> int:
    """`mesh.data`: what the file's data parallelism, which counts experts' devices, leaves."""
    whole = file.optional("data_parallel_size")
    if not whole:
        return -1
    if whole % experts:
        file.notes.refuse(SIZE, experts, f"does not divide data_parallel_size {whole}")
        return -1
    return whole // experts


def check_experts_of_mesh(file: File, mesh: MeshConfig, shards: int | None) -> None:
    """Refuses a degree that the devices do not have.

    Args:
      shards: devices over which rows are split; None: open.
    """
    if mesh.expert == 1:
        return
    if shards is not None and shards % mesh.expert:
        file.notes.refuse(
            SIZE, mesh.expert, f"does not divide the {shards} devices that rows are split over"
        )
    if mesh.replica > 1:
        file.notes.refuse(
            SIZE, mesh.expert, "together with mics_shard_size is not supported, as in DeepSpeed"
        )
    if file["elasticity.enabled"]:
        file.notes.refuse(
            SIZE,
            mesh.expert,
            "has to divide the devices, and elasticity changes their number; set it to 1, or "
            "elasticity.enabled to false",
        )


def router_of(file: File) -> dict[str, Any]:
    """{key: value} of what a file says of the router; {} where the section is not enabled."""
    if not file[f"{SECTION}.enabled"]:
        return {}
    found = {name: file.optional(f"{SECTION}.{name}") for name in (*_ROUTER, _SHARED)}
    return {name: value for name, value in found.items() if value is not None}


def check_router(model: models.Model, says: Mapping[str, Any]) -> None:
    """Refuses what a file says of a router and the model does not do.

    Args:
      says: from `router_of`.

    Raises:
      ConfigError: the model's router is another one, or nobody knows.
    """
    own = getattr(models.bound_attribute(model, "config"), "moe", None)
    for name, value in says.items():
        key = (SECTION, name)
        if not isinstance(own, MoEConfig):
            raise ConfigError(
                f"{value!r} is of a router, and the model has no configuration of one "
                "(zerojax.config.MoEConfig) to compare it with; the model's code says it: take it "
                "out",
                key,
            )
        field = "shared_dim" if name == _SHARED else _ROUTER[name]
        found = getattr(own, field)
        same = (found > 0) == value if name == _SHARED else found == value
        if not same:
            raise ConfigError(
                f"{value!r}, and the model has moe.{field}={found!r}; build the model so, or take "
                "it out",
                key,
            )
