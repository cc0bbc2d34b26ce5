"""Plans 1-bit Adam, which sends the signs of momentum: raises for unsupported settings, and
plans stored state and bytes sent."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config import MeshConfig
from zerojax.optim import one_bit_of
from zerojax.optim.one_bit import message_bytes
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import AXES, DATA
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.state import ONE_BIT, TrainState
from zerojax.placement.table import Placement
from zerojax.tracing import trees
from zerojax.tracing.trees import format_bytes

FROZEN_AT, BEGUN, WORKER, SERVER = "frozen_at", "begun", "worker", "server"
"""Entries of the `ONE_BIT` part of a state.

frozen_at: int32 [], number of updates in the frozen second moment (0: not frozen).
Under `errors_key`:
  begun: int32 [], whether the errors contain anything.
  worker: {name: float32 [devices, devices, row]}, b1 times the agreed momentum plus the part that
    the device's last message left out.
  server: {name: float32 [devices, row]}, the part that the device's last message of a mean left
    out.
"""
_ERRORS = "errors_"


def check_one_bit(
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    precision: Precision,
    tx: Any,
) -> None:
    """Raises if 1-bit Adam conflicts with other settings.

    Raises:
      ValueError: the message states the first conflict and the remedy.
    """
    if one_bit_of(tx) is None:
        return
    if settings.zero > 1:
        devices = mesh.shape[DATA]
        gain = {
            2: "stage 2 would shard gradients, but momentum needs full gradients",
            3: "stage 3 would save only the 2 bytes of a weight in addition",
        }[settings.zero]
        raise ValueError(
            f"1-bit Adam with zero={settings.zero} is not supported: each device keeps the "
            "residual errors of its signs for the whole momentum, 4 bytes per parameter that "
            f"sharding cannot divide. Masters, moments and other errors take 16/{devices} = "
            f"{16 / devices:.2g} bytes at stage 1 already, and {gain}; use zero=0 or 1"
        )
    others = {
        **{f"{axis}={mesh.shape[axis]}": mesh.shape[axis] > 1 for axis in AXES if axis != DATA},
        f"deterministic={settings.deterministic}": settings.deterministic is not None,
        "offload": not settings.offload.is_off,
        f"lookup={settings.lookup}": settings.lookup == "owners",
        f"wire.gradients={settings.wire.gradients}": settings.wire.gradients != "reduce",
        "an average of the weights (ema)": tx.ema is not None,
    }
    for other, is_there in others.items():
        if is_there:
            raise ValueError(
                f"1-bit Adam with {other} is not supported: signs of the momentum are exchanged "
                "only between devices that split the batch, each with its whole momentum in "
                "device memory; leave one of them out"
            )
    if not precision.has_masters or precision.moments_dtype != jnp.float32:
        raise ValueError(
            "1-bit Adam with bfloat16 parameters or moments is not supported: the residual "
            "errors of signs accumulate over steps and would be lost in bfloat16; use param_dtype "
            "and moments_dtype float32"
        )


def sends_signs(leaf: LeafPlacement) -> bool:
    """Returns whether a parameter's momentum is sent as signs after the warm-up of 1-bit
    Adam."""
    return not (leaf.frozen or leaf.gradient_in_full)


def row_elements(leaf: LeafPlacement, devices: int) -> int:
    """Returns the number of elements of a parameter's momentum that one device reduces.

    They are the elements of a shard, or of one of `devices` equal parts. The last part of a
    parameter that is not sharded may have fewer elements; the rest of its row is zeros.
    """
    if leaf.zero_dim is not None:
        return trees.num_elements(leaf.stored_shape) // devices
    return math.ceil(trees.num_elements(leaf.shape) / devices)


def signed_leaves(placement: Placement) -> dict[str, LeafPlacement]:
    """Returns {name: placement} of the parameters whose momentum is sent as signs."""
    return {name: leaf for name, leaf in placement.leaves.items() if sends_signs(leaf)}


def errors_key(placement: Placement) -> str:
    """Returns the name of the residual errors (momentum minus the signs sent for it) in a state and
    in checkpoints.

    The name depends on how parameters are divided among devices, because the errors do.
    """
    devices = placement.axis_sizes[DATA]
    rows = [
        [name, list(leaf.shape), leaf.zero_dim, row_elements(leaf, devices)]
        for name, leaf in sorted(signed_leaves(placement).items())
    ]
    digest = hashlib.sha256(json.dumps([devices, rows]).encode()).hexdigest()[:8]
    return f"{_ERRORS}{devices}_{digest}"


def abstract_one_bit(placement: Placement, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Returns the `ONE_BIT` part of the state as `ShapeDtypeStruct`s with shardings."""
    devices = placement.axis_sizes[DATA]
    counter = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))

    def split(*shape: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P(DATA))
        return jax.ShapeDtypeStruct((devices, *shape), jnp.float32, sharding=sharding)

    rows = {n: row_elements(leaf, devices) for n, leaf in signed_leaves(placement).items()}
    errors = {
        BEGUN: counter,
        WORKER: {name: split(devices, row) for name, row in rows.items()},
        SERVER: {name: split(row) for name, row in rows.items()},
    }
    return {FROZEN_AT: counter, errors_key(placement): errors}


def with_errors(
    state: TrainState,
    placement: Placement,
    mesh: Mesh | AbstractMesh,
    tx: optax.GradientTransformation,
) -> TrainState:
    """Adds the errors of signed momentum to an abstract state, if the optimizer has them."""
    if one_bit_of(tx) is None:
        return state
    return {**state, ONE_BIT: abstract_one_bit(placement, mesh)}


def signs_sent(placement: Placement) -> int:
    """Returns the bytes per step that one device sends for signs after the warm-up."""
    devices = placement.axis_sizes[DATA]
    rows = (row_elements(leaf, devices) for leaf in signed_leaves(placement).values())
    return 2 * (devices - 1) * sum(map(message_bytes, rows))


def compressed_bytes(placement: Placement, precision: Precision) -> int:
    """Returns the bytes that one device sends per step after the warm-up.

    They include signs, gathered weights, and gradients of parameters that `wire.exact` matches.
    """
    devices, sent = placement.axis_sizes[DATA], float(signs_sent(placement))
    ring = (devices - 1) / devices
    for leaf in placement.leaves.values():
        whole = trees.num_elements(leaf.stored_shape) * ring
        if leaf.zero_dim is not None and leaf.wire_codes is not None:
            row = -(-trees.num_elements(leaf.stored_shape) // devices)
            sent += (devices - 1) * leaf.wire_codes.num_bytes(row)
        elif leaf.zero_dim is not None and leaf.codes is None:
            sent += whole * jnp.dtype(precision.compute_dtype).itemsize
        elif leaf.codes is not None and leaf.zero_dim is not None:
            sent += whole
        if leaf.frozen or sends_signs(leaf):
            continue
        sent += whole * 4 * (1 if leaf.access.scatters_late else 2)
    return round(sent)


def describe_one_bit(
    placement: Placement,
    precision: Precision,
    tx: optax.GradientTransformation,
    settings: MeshConfig,
) -> list[str]:
    """Describes what 1-bit Adam changes after its warm-up, and the bytes that it sends and
    stores."""
    one_bit = one_bit_of(tx)
    if one_bit is None:
        return []
    signed, devices = signed_leaves(placement), placement.axis_sizes[DATA]
    trained = [leaf for leaf in placement.leaves.values() if not leaf.frozen]
    rows = sum(row_elements(leaf, devices) for leaf in signed.values())
    total = compressed_bytes(placement, precision)
    weights = "" if settings.zero == 0 else ", including the all-gather of weights"
    lines = [
        f"1-bit Adam: updates 1 to {one_bit.freeze_step} are AdamW; after them another program "
        "runs, which freezes the second moment and sends the momentum of "
        f"{len(signed)} of {len(trained)} parameters as signs with one scale per 256 values: "
        f"{format_bytes(signs_sent(placement))} per step and device, {format_bytes(total)} in "
        f"all{weights}",
        "1-bit Adam keeps the residual errors of signs, "
        f"{format_bytes(4 * rows * (devices + 1))} on each device; on another number of devices "
        "these errors start at zero",
    ]
    if one_bit.options.clip_norm is not None:
        lines.append(
            f"clip_norm={one_bit.options.clip_norm:g} after update {one_bit.freeze_step} limits "
            "the root mean square over devices of their gradient norms, since no device knows the "
            "norm of the mean gradient"
        )
    return lines


def errors_begin_anew(plan_state: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Returns whether the residual errors in a checkpoint do not fit the run, so that the run's
    errors start at zero.

    Errors do not fit if they belong to other devices or to other parts of parameters.

    Args:
      plan_state: abstract state of the run.
      saved: names of the arrays in the checkpoint.
    """
    if ONE_BIT not in plan_state:
        return False
    own = tuple(f"{ONE_BIT}/{key}/" for key in plan_state[ONE_BIT] if key.startswith(_ERRORS))
    has_any = any(name.startswith(f"{ONE_BIT}/{_ERRORS}") for name in saved)
    return has_any and not any(name.startswith(own) for name in saved)
