"""Translates the section `expert_parallel` (AutoEP) into the mesh axis `expert`; checks the router.

DeepSpeed finds experts in torch modules by name, and the file may describe their router. In zerojax
the model defines both, so a description in the file must match the model's router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax import models, tracing
from zerojax.config import ConfigError, MeshConfig, MoEConfig
from zerojax.deepspeed_config.ds_config import File

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
"""{key of the section `expert_parallel`: field of the model's `MoEConfig` with the same value}."""
_SHARED = "has_shared_experts"


def expert_size(file: File) -> int:
    """Returns the number of devices over which experts are split; 1 if `expert_parallel` is
    disabled."""
    if file[f"{SECTION}.enabled"]:
        if file[SIZE] < 1:
            file.notes.refuse(SIZE, file[SIZE], "must be at least 1")
        return max(1, file[SIZE])
    for name in ("autoep_size", *_ROUTER, _SHARED):
        if file.has(f"{SECTION}.{name}"):
            why = f"{SECTION}.enabled is false, so DeepSpeed ignores all other keys of the section"
            file.notes.change(f"{SECTION}.{name}", "ignored", why)
    if file[SIZE] > 1:
        file.notes.warnings.append(f"{SIZE}={file[SIZE]} has no effect: enabled is false")
    return 1


def data_size(file: File, experts: int) -> int:
    """Returns `mesh.data`, which is data_parallel_size divided by the expert degree; -1 if the
    ds_config does not set data_parallel_size, or it is not divisible (which is noted as a
    refusal)."""
    whole = file.optional("data_parallel_size")
    if not whole:
        return -1
    if whole % experts:
        file.notes.refuse(
            SIZE, experts, f"does not divide data_parallel_size {whole}; use a divisor of {whole}"
        )
        return -1
    return whole // experts


def check_experts_of_mesh(file: File, mesh: MeshConfig, shards: int | None) -> None:
    """Notes a refusal if the expert degree does not fit the number of devices or other options.

    Args:
      file: the ds_config.
      mesh: mesh options of the ds_config.
      shards: number of devices over which rows are split; None if it is not known.
    """
    if mesh.expert == 1:
        return
    if shards is not None and shards % mesh.expert:
        file.notes.refuse(
            SIZE,
            mesh.expert,
            f"does not divide the {shards} devices over which rows are split; use a divisor "
            f"of {shards}",
        )
    if mesh.replica > 1:
        file.notes.refuse(
            SIZE,
            mesh.expert,
            "does not work with mics_shard_size, as in DeepSpeed; remove one of the two",
        )
    if file["elasticity.enabled"]:
        file.notes.refuse(
            SIZE,
            mesh.expert,
            "must divide the number of devices, which elasticity changes; set it to 1, or "
            "elasticity.enabled to false",
        )


def router_of(file: File) -> dict[str, Any]:
    """Returns {key: value} of the router described in a ds_config; {} if `expert_parallel` is
    disabled."""
    if not file[f"{SECTION}.enabled"]:
        return {}
    found = {name: file.optional(f"{SECTION}.{name}") for name in (*_ROUTER, _SHARED)}
    return {name: value for name, value in found.items() if value is not None}


def check_router(model: tracing.Model, router: Mapping[str, Any]) -> None:
    """Raises if the router described in a ds_config does not match the model's router.

    Args:
      model: the model of the run.
      router: the description, from `router_of`.

    Raises:
      ConfigError: the model's router differs, or the model has no `MoEConfig`.
    """
    own = getattr(models.bound_attribute(model, "config"), "moe", None)
    for name, value in router.items():
        key = (SECTION, name)
        if not isinstance(own, MoEConfig):
            raise ConfigError(
                f"{value!r} describes a router, but the model has no zerojax.config.MoEConfig to "
                "compare it with; set the router in the model's code and remove this key",
                key,
            )
        field = "shared_dim" if name == _SHARED else _ROUTER[name]
        found = getattr(own, field)
        same = (found > 0) == value if name == _SHARED else found == value
        if not same:
            raise ConfigError(
                f"{value!r} differs from the model's moe.{field}={found!r}; build the model with "
                "this value, or remove the key",
                key,
            )
