"""Raises for invalid plans: batches that cannot be divided evenly, models without trained
parameters, and conflicting settings."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.config.batch_division import BatchDivision
from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Tree
from zerojax.optim import one_bit_of
from zerojax.placement import device_mesh as meshes
from zerojax.placement.table import Placement
from zerojax.placement.user_shardings import is_about_meshes
from zerojax.tracing import trees
from zerojax.tracing.source_lines import is_of_zerojax


def check_no_other_way(
    asked: str, what: str, settings: MeshConfig, mesh: Mesh | AbstractMesh
) -> None:
    """Raises if a `wire` setting conflicts with another setting that sends the same values in
    another way.

    Args:
      asked: the `wire` setting, as it is written.
      what: what both settings change, such as "gathers weights".
      settings: mesh options.
      mesh: the device mesh.

    Raises:
      ValueError: the message states the other setting.
    """
    stages, experts = mesh.shape[meshes.STAGE], mesh.shape[meshes.EXPERT]
    others = {
        f"deterministic={settings.deterministic}": settings.deterministic is not None,
        f"offload.params={settings.offload.params}": settings.offload.params != "device",
        f"stage={stages}": stages > 1,
        f"expert={experts}": experts > 1,
    }
    for other, is_there in others.items():
        if is_there:
            raise ValueError(
                f"{asked} with {other} is not supported, because {other} {what} differently; "
                "leave one of them out"
            )


def check_rows(batch: Tree) -> int:
    """Returns the number of rows of a batch, after checking that every array has them.

    Args:
      batch: tree of arrays or structs, of a global batch or of the rows of one process.

    Raises:
      ValueError: the batch has no arrays, an array is a scalar, or arrays have different numbers
        of rows.
    """
    shapes = {name: np.shape(leaf) for name, leaf in trees.flatten_names(batch).items()}
    if not shapes:
        raise ValueError("the batch has no arrays; pass a tree of arrays [rows, ...]")
    rows = max(shape[0] if shape else 0 for shape in shapes.values())
    for name, shape in shapes.items():
        if not shape:
            raise ValueError(
                f"batch[{name!r}] is a scalar, but dimension 0 of every array must be the rows "
                "of the "
                f"batch; repeat it: numpy.full({rows or 'rows'}, value)"
            )
    (first, *_), *_ = shapes.values()
    for name, (size, *_) in shapes.items():
        if size != first:
            raise ValueError(
                f"batch[{name!r}] has {size} rows, but other arrays of the batch have {first}; "
                "dimension 0 is the rows: give every array the same number of rows"
            )
    return first


def check_batch(batch: Tree, mesh: Mesh | AbstractMesh, num_microbatches: int) -> None:
    """Raises if the rows of a batch cannot be divided evenly over data shards and microbatches.

    Raises:
      ValueError: `num_microbatches` is below 1, the batch has no rows (`check_rows`), or they are
        not divisible.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} is below 1; give at least 1")
    rows = check_rows(batch)
    why = BatchDivision(meshes.num_data_shards(mesh), num_microbatches).why_not(rows)
    if why is not None:
        raise ValueError(f"global batch size {rows} {why}")


def check_wire(settings: MeshConfig, eight_bits: Collection[str]) -> None:
    """Raises if `wire.weights=fp8` is set but no weight could be sent so.

    Args:
      settings: mesh options.
      eight_bits: names of the parameters that the model uses only as 8-bit floats.

    Raises:
      ValueError: the ZeRO stage is not 3, or the model uses no weight only as 8-bit floats.
    """
    if settings.wire.weights != "fp8":
        return
    asked = f"wire.weights={settings.wire.weights}"
    stage = "" if settings.zero == 3 else "zero=3 and "
    if not eight_bits:
        raise ValueError(
            f"{asked} needs parameters that the model uses only as 8-bit floats, but this model "
            f"has none; set {stage}matmul_dtype='fp8' of a reference model, or use "
            "wire.weights=compute"
        )
    if stage:
        raise ValueError(
            f"{asked} needs weights that are gathered on use (in each layer), but "
            f"zero={settings.zero} gathers none on use; use zero=3, or wire.weights=compute"
        )


def check_layer_norms(settings: MeshConfig, tx: optax.GradientTransformation) -> None:
    """Raises if the step cannot compute norms of layers (`log.per_layer`), because it does not have
    all gradients, or all weights before and after the update.

    Raises:
      ValueError: the message states the other setting.
    """
    offload = settings.offload
    others = {
        f"deterministic={settings.deterministic}": settings.deterministic is not None
        and "its sums of squares are in an order of their own",
        f"offload.params={offload.params}": offload.params != DEVICE
        and "weights are not in device memory",
        f"offload.opt_state={offload.opt_state}": offload.opt_state != DEVICE
        and "float32 weights are not in device memory",
        "1-bit Adam": one_bit_of(tx) is not None and "its gradients are not summed over devices",
    }
    for other, why in others.items():
        if why:
            raise ValueError(
                f"log.per_layer=True with {other} is not supported: {why}; leave one of them out"
            )


def check_trained(placement: Placement) -> None:
    """Raises if all parameters are frozen.

    Raises:
      ValueError: all parameters are frozen.
    """
    if all(leaf.frozen for leaf in placement.leaves.values()):
        raise ValueError(
            f"freeze= matches all {len(placement.leaves)} parameters, so nothing is trained; "
            "freeze fewer, see plan.table() for their names"
        )


def check_reads(names: Collection[str], read: Collection[str]) -> None:
    """Raises if a loss reads none of the model's parameters.

    Args:
      names: names of all parameters.
      read: names of the parameters that the loss reads.

    Raises:
      ValueError: the loss reads no parameter.
    """
    if not read:
        raise ValueError(
            f"the loss reads none of the model's {len(names)} parameters (such as "
            f"{next(iter(names))}); loss(model, batch) must use its argument `model`, "
            "not a model from an outer scope"
        )


def check_not_per_example(result: Tree, batch: Tree, piece: Tree) -> None:
    """Raises if a loss returns a value for each row instead of one value.

    Args:
      result: value that the loss returned.
      batch: the global batch.
      piece: the rows of `batch` with which the loss was traced.

    Raises:
      ValueError: the message states the returned shape for the global batch and for the traced
        rows.
    """
    first = result[0] if isinstance(result, tuple) and result else result
    shape: tuple[int, ...] = getattr(first, "shape", ())
    rows, all_rows = (jax.tree.leaves(each)[0].shape[0] for each in (piece, batch))
    if len(shape) not in (1, 2) or shape[0] != rows or shape[1:] not in ((), (1,)):
        return
    whole = [all_rows, *shape[1:]]
    raise ValueError(
        f"the loss returned a value for each row, {first.dtype.name}{whole} of the {all_rows} rows "
        f"of a batch ({list(shape)} on each device and microbatch); return their "
        "mean, with .mean(), or the pair (values.sum(), values.size)"
    )


def check_arguments(loss: Callable[..., Any]) -> None:
    """Raises if a loss cannot be called as loss(model, batch).

    Raises:
      TypeError: the message states the arguments of the loss.
    """
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # not every callable has a signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"a loss is called as loss(model, batch), but {name}{signature} cannot be called "
            f"so: {error}; "
            "use one argument for the whole batch, and take the arrays from it"
        ) from None


@contextlib.contextmanager
def errors_with_users_lines(batch: Tree) -> Iterator[None]:
    """Context manager for tracing a model: errors state the user's line that needed the value of an
    array.

    Other errors of the user's code or of a library pass with a note about the arguments of the
    loss.

    Args:
      batch: the rows with which the loss is traced.

    Raises:
      TypeError: a line needs the value of an array of which only the shape is known.
      ValueError: a line uses a `PartitionSpec`, and no mesh is set.
    """
    try:
        yield
    except jax.errors.JAXTypeError as error:
        frame = _frame_of_user(error)
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        raise TypeError(
            f"the model cannot be planned without values: {frame.filename}:{frame.lineno}, "
            f"`{line}`, needs the value of an array of which only the shape is known "
            f"({type(error).__name__}); {_instead(line)}"
        ) from error
    except Exception as error:
        frame = _frame_of_user(error)
        if is_about_meshes(error):
            raise ValueError(
                f"{frame.filename}:{frame.lineno} gives an array a sharding that cannot be "
                f"followed: {error}; leave it out: zerojax splits rows, weights and state itself"
            ) from error
        if not is_of_zerojax(error):
            error.add_note(f"The loss was called as loss(model, batch) with {_described(batch)}.")
        raise


def _described(batch: Tree) -> str:
    """Describes the arrays of a batch as text, `batch['x'] float32[2, 8], ...`, at most eight of
    them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
    shown = [
        f"batch{jax.tree_util.keystr(path)} {leaf.dtype.name}{list(leaf.shape)}"
        for path, leaf in leaves[:8]
    ]
    more = f" and {len(leaves) - 8} more" if len(leaves) > 8 else ""
    return ", ".join(shown) + more


def _instead(line: str) -> str:
    """Suggests what to write instead of a line that needs the value of an array."""
    asked = re.search(r"\b(float|int|bool)\(|\.(item|tolist)\(|\bnp\.|\bnumpy\.", line)
    if asked is not None and not re.match(r"(if|elif|while|assert)\b", line):
        word = asked[1] or asked[2]
        what = f"{word}()" if word else "numpy's functions"
        return f"leave the array as it is, without {what}, or use jax.numpy"
    return "use jnp.where, jax.lax.cond or a static argument there"


def _frame_of_user(error: BaseException) -> traceback.FrameSummary:
    """Returns the innermost frame of a traceback that is not in a library or in zerojax's core."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [f"{os.sep}{name}{os.sep}" for name in ("jax", "flax", "numpy", "optax", "zerojax")]
    models = f"{os.sep}zerojax{os.sep}models{os.sep}"
    theirs = [
        frame
        for frame in frames
        if models in frame.filename or not any(part in frame.filename for part in libraries)
    ]
    # Frames of `contextlib`, which calls this frame, are not the user's either.
    theirs = [frame for frame in theirs if not frame.filename.endswith("contextlib.py")]
    return (theirs or frames)[-1]
