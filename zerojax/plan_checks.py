"""What a plan refuses before it is made: batches that cannot be cut, losses that are none.

Knows shapes; formats the value, the limit and the remedy.
"""

from __future__ import annotations

import contextlib
import difflib
import linecache
import os
import traceback
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from zerojax import mesh as meshes
from zerojax import trees
from zerojax.placement import Placement

Tree = Any


def check_batch(batch: Tree, mesh: Mesh | AbstractMesh, num_microbatches: int) -> None:
    """Refuses a batch that cannot be cut evenly over data shards and microbatches.

    Raises:
      ValueError: no arrays, different batch sizes, or an uneven cut.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} must be at least 1; 1 cuts nothing")
    leaves = trees.flatten_names(batch)
    if not leaves or any(len(leaf.shape) == 0 for leaf in leaves.values()):
        raise ValueError(
            f"example_batch has leaves {list(leaves)}: every leaf needs a leading batch dimension"
        )
    sizes = {name: leaf.shape[0] for name, leaf in leaves.items()}
    first = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != first:
            raise ValueError(
                f"batch leaf {name!r} has {size} rows, others have {first}; "
                "dimension 0 is the batch"
            )
    shards = meshes.num_data_shards(mesh)
    unit = shards * num_microbatches
    if first % unit or first == 0:
        low, high = first // unit * unit, (first // unit + 1) * unit
        near = f"{low} or {high}" if low else f"{high}"
        raise ValueError(
            f"global batch size {first} is not divisible by data shards ({shards}) x "
            f"num_microbatches ({num_microbatches}) = {unit}; use {near}"
        )


def check_mesh_options(options: Collection[str], allowed: Collection[str]) -> None:
    """Refuses options that no plan has.

    Raises:
      TypeError: with the nearest name.
    """
    for name in options:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(allowed)}"
            raise TypeError(f"make_plan has no option {name!r}; {hint}")


def check_trained(placement: Placement) -> None:
    """Refuses a plan that trains nothing.

    Raises:
      ValueError: every parameter is frozen.
    """
    if all(leaf.frozen for leaf in placement.leaves.values()):
        raise ValueError(
            f"freeze= leaves none of the {len(placement.leaves)} parameters to train; "
            "freeze fewer, see plan.table() for their names"
        )


def check_reads(names: Collection[str], read: Collection[str]) -> None:
    """Refuses a loss that computes with none of the model's parameters.

    Args:
      names: all parameters.
      read: those that the loss reads.

    Raises:
      ValueError: nothing is read.
    """
    if not read:
        raise ValueError(
            f"the loss reads none of the model's {len(names)} parameters (such as "
            f"{next(iter(names))}): loss(model, batch) has to call the model that it is given, not "
            "one from outside"
        )


def check_loss(result: Any) -> None:
    """Refuses a loss that is neither a floating-point scalar nor a pair of scalars.

    Raises:
      ValueError: with what it returned instead.
    """
    parts = result if isinstance(result, tuple) else (result,)
    shapes = [getattr(part, "shape", None) for part in parts]
    if len(parts) not in (1, 2) or any(shape != () for shape in shapes):
        found = jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", result)
        raise ValueError(
            f"the loss returned {found}; it has to return a scalar, or a pair of scalars "
            "(sum, weight)"
        )
    if not jnp.issubdtype(parts[0].dtype, jnp.floating):
        raise ValueError(
            f"the loss is {parts[0].dtype.name}, which has no gradient; it has to be floating-point"
        )


@contextlib.contextmanager
def naming_the_call() -> Iterator[None]:
    """Around the tracing of a model: says which of its lines asked for a value.

    Raises:
      TypeError: a line needed the value of an array of which only the shape is known.
    """
    try:
        yield
    except jax.errors.JAXTypeError as error:
        frame = _frame_of_user(error)
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        raise TypeError(
            f"the model cannot be planned without values: {frame.filename}:{frame.lineno}, "
            f"`{line}`, needs the value of an array of which only the shape is known "
            f"({type(error).__name__}); use jnp.where, jax.lax.cond or a static argument there"
        ) from error


def _frame_of_user(error: BaseException) -> traceback.FrameSummary:
    """The innermost line that is neither a library's nor of zerojax's core."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [f"{os.sep}{name}{os.sep}" for name in ("jax", "flax", "numpy", "optax", "zerojax")]
    models = f"{os.sep}zerojax{os.sep}models{os.sep}"
    theirs = [
        frame
        for frame in frames
        if models in frame.filename or not any(part in frame.filename for part in libraries)
    ]
    # Also `contextlib`, through which this very frame is reached, is no user's.
    theirs = [frame for frame in theirs if not frame.filename.endswith("contextlib.py")]
    return (theirs or frames)[-1]
