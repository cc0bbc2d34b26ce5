"""Stores frozen weights as quantized codes of 4 or 8 bits: chooses the parameters, raises for
unsupported settings, and describes the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.optim.precision import Precision
from zerojax.optim.weight_codes import BLOCK, WeightCodes, bytes_per_parameter, codes_for
from zerojax.placement import device_mesh as meshes
from zerojax.placement.leaf_placement import LeafPlacement, Shape
from zerojax.tracing import trees

KERNEL = "kernel"
"""Last part of the names of parameters that may be quantized: Flax's name for weight matrices."""


def choose_codes(
    name: str, shape: Shape, stack_dims: int, mapped_dims: int, barrier: str | None, kind: str
) -> tuple[WeightCodes | None, str | None]:
    """Chooses whether and how a frozen parameter is quantized.

    Only kernels (weight matrices) are quantized: parameters with at least two dimensions besides
    the layers that the model reads where it multiplies with them, so that each layer is decoded
    only where it is used. Norms, biases and tables (embeddings, positions) are not quantized; a
    table is read in single rows.

    Args:
      name: name of the parameter.
      shape: shape of the parameter.
      stack_dims: number of leading dimensions that a scan over layers or `jax.vmap` removes.
      mapped_dims: number of these dimensions that `jax.vmap` maps.
      barrier: reason why the parameter cannot be gathered where it is read; None: it can.
      kind: "nf4" or "int8".

    Returns:
      (codes, None), or (None, reason why it is not quantized). The reason is None for a parameter
      that is not a kernel, because nobody expects codes there.
    """
    if name.rpartition(trees.SEPARATOR)[2] != KERNEL or len(shape) - stack_dims < 2:
        return None, None
    if barrier is not None:
        return (
            None,
            f"{barrier}: not stored in {kind}, because codes are decoded where a kernel is read",
        )
    if mapped_dims:
        return None, f"jax.vmap maps its leading dimension: not stored in {kind}"
    codes = codes_for(kind, shape, stack_dims)
    if codes is None:
        return None, f"no dimension is a multiple of {BLOCK}: not stored in {kind}"
    return codes, None


def check_cut(
    name: str,
    shape: Shape,
    axes: Sequence[str | None],
    codes: WeightCodes,
    axis_sizes: Mapping[str, int],
) -> None:
    """Raises if tensor parallelism would split a block of quantized values.

    Raises:
      ValueError: the message states the dimension and the remedy.
    """
    axis = axes[codes.dim]
    size = axis_sizes[axis] if axis else 1
    if shape[codes.dim] % (BLOCK * size):
        raise ValueError(
            f"{name}: dim {len(shape) + codes.dim} of size {shape[codes.dim]} is stored in blocks "
            f"of {BLOCK} values ({codes.kind}), which {axis}={size} would cut; use a smaller "
            f"size of the axis {axis}, or a freeze_dtype without codes, such as bf16"
        )


_REMEDY = "or a freeze_dtype without codes, such as bf16"


def check_lazy_reads(precision: Precision, *, reads_lazily: bool) -> None:
    """Raises if `freeze_dtype` (nf4, int8) quantizes parameters, and the model does not show where
    it reads them.

    Raises:
      ValueError: the message states the remedy.
    """
    if precision.freeze_codes is not None and not reads_lazily:
        raise ValueError(
            f"freeze_dtype={precision.freeze_codes} decodes each weight matrix (kernel) where the "
            "model uses it. A model that is a pair of functions (init, apply) does not show where "
            "weights are used, so all would be decoded when apply starts; use an nnx or linen "
            f"module, {_REMEDY}"
        )


def check_codes(settings: MeshConfig, mesh: Mesh | AbstractMesh, precision: Precision) -> None:
    """Raises if other settings prevent that parameters that `freeze_dtype` (nf4, int8) quantizes
    are decoded layer by layer.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if precision.freeze_codes is None:
        return
    asked = f"freeze_dtype={precision.freeze_codes}"
    if mesh.shape[meshes.STAGE] > 1:
        raise ValueError(
            f"{asked} with stage={mesh.shape[meshes.STAGE]}: the stages of a pipeline cannot "
            f"decode the weights that they use; use stage=1 (no pipeline), {_REMEDY}"
        )
    if settings.offload.by_layer:
        what = settings.offload.by_layer_key
        raise ValueError(
            f"{asked} with {what}: the weights of layers that run one by one cannot be decoded; "
            f"leave {what.split('=')[0]} out, {_REMEDY}"
        )
    if settings.deterministic is not None:
        raise ValueError(
            f"{asked} with deterministic={settings.deterministic!r}: decoded weights are not "
            "proven "
            f"to give the same bits on every mesh; leave deterministic out, {_REMEDY}"
        )


def check_some(leaves: Mapping[str, LeafPlacement], kind: str) -> None:
    """Raises if `freeze_dtype` requests quantization but no parameter can be quantized.

    Raises:
      ValueError: the message states which parameters can be quantized.
    """
    if any(leaf.codes is not None for leaf in leaves.values()):
        return
    reasons = [reason for leaf in leaves.values() for reason in leaf.reasons if kind in reason]
    why = f" ({reasons[0]})" if reasons else ""
    raise ValueError(
        f"freeze_dtype={kind} needs a frozen parameter that is named .../{KERNEL} and has a "
        f"dimension divisible by {BLOCK}, but this model has none{why}; leave freeze_dtype out, "
        "or freeze such parameters"
    )


def check_evaluation(leaves: Mapping[str, LeafPlacement], barriers: Mapping[str, str]) -> None:
    """Raises if an evaluation uses quantized weights in another way than reading them in the
    model's layers.

    Args:
      leaves: placement table of the run.
      barriers: {name: reason why the evaluation cannot gather the parameter where it is read}, from
        the trace of the evaluation.

    Raises:
      ValueError: the message states the parameter and its use.
    """
    for name, why in barriers.items():
        codes = leaves[name].codes
        if codes is not None:
            raise ValueError(
                f"{name} is stored in {codes.kind} and decoded where the model uses it, but in "
                f"this evaluation {why}; evaluate with a loss that uses it as in training, or "
                "train with a freeze_dtype without codes, such as bf16"
            )


def describe_codes(frozen: Sequence[LeafPlacement], precision: Precision) -> list[str]:
    """Describes which frozen parameters are quantized, that quantization rounds them, and which are
    not quantized."""
    kind = precision.freeze_codes
    if kind is None:
        return []
    coded = [leaf for leaf in frozen if leaf.codes is not None]
    rest = [leaf for leaf in frozen if leaf.codes is None]
    sizes = [sum(trees.num_elements(leaf.shape) for leaf in some) for some in (coded, rest)]
    computed = jnp.dtype(precision.compute_dtype).name
    lines = [
        f"freeze_dtype={kind}: {len(coded)} frozen kernels ({sizes[0]:,} weights) are rounded to "
        f"{kind} in blocks of {BLOCK} with a bfloat16 scale, {bytes_per_parameter(kind):.3g} bytes "
        f"a weight, and decoded to {computed} where they are read; exports hold the rounded weights"
    ]
    if rest:
        lines.append(
            f"not stored in {kind}: {len(rest)} other frozen parameters (such as {rest[0].name}, "
            f"{sizes[1]:,} weights) in {precision.frozen_dtype.name}; only kernels are stored "
            "in codes, no "
            "norms, biases or tables"
        )
    return lines


def decoded(
    leaves: Mapping[str, LeafPlacement], arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Decodes quantized arrays of a portable state on the host to float32; other arrays stay as
    they are.

    Args:
      leaves: {name: placement of the parameter}.
      arrays: {name: stored array}, with the same names.
    """
    return {
        name: array if (codes := leaves[name].codes) is None else codes.decode_on_host(array)
        for name, array in arrays.items()
    }
