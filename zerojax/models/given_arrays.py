"""Arrays that users give, such as the leaves of a batch, as arrays that JAX knows.

Tensors of other libraries become NumPy's; what is no array of numbers is refused. A library is
recognised by the module of a type, so that none is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from zerojax.tracing.trees import PyTree


def is_of_torch(thing: Any) -> bool:
    """Whether PyTorch made an object or a class, or a class that it is derived from."""
    classes = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
    return any(each.__module__.partition(".")[0] == "torch" for each in classes)


def as_arrays(batch: PyTree) -> PyTree:
    """A batch with arrays of NumPy in the place of other libraries' tensors.

    A mapping that JAX does not know, as a tokenizer of Hugging Face returns, becomes a dict. All
    other leaves stay what they are. Memory is shared where the library allows it.

    Raises:
      TypeError: a tensor that is not on the CPU, or that NumPy cannot read.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
    if not any(isinstance(leaf, Mapping) or _is_foreign(leaf) for _, leaf in leaves):
        return batch
    return treedef.unflatten(_as_array(path, leaf) for path, leaf in leaves)


def _is_foreign(leaf: Any) -> bool:
    is_known = isinstance(leaf, jax.Array) or isinstance(getattr(leaf, "dtype", None), np.dtype)
    return hasattr(leaf, "__array__") and not is_known


def _as_array(path: Sequence[Any], leaf: Any) -> Any:
    if isinstance(leaf, Mapping):
        return as_arrays(dict(leaf))
    if not _is_foreign(leaf):
        return leaf
    return _of_torch(typed(path), leaf) if is_of_torch(leaf) else np.asarray(leaf)


def _of_torch(where: str, tensor: Any) -> np.ndarray:
    """A tensor of torch as an array of the same dtype.

    Args:
      where: how the tensor is written in Python.
    """
    place, dtype = tensor.device, str(tensor.dtype).removeprefix("torch.")
    if place.type != "cpu":
        remedy = "a tensor with values" if place.type == "meta" else f"{where}.cpu()"
        raise TypeError(
            f"{where} is a tensor of torch on {place}, and batches are read from the memory of the "
            f"host; give {remedy}"
        )
    tensor = tensor.detach()
    try:
        if (own := getattr(ml_dtypes, dtype, None)) is None:
            return tensor.numpy()
        bits = getattr(sys.modules["torch"], f"int{8 * tensor.element_size()}")
        return tensor.view(bits).numpy().view(own)  # NumPy itself has no such dtype
    except (TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        is_dense = str(tensor.layout) == "torch.strided"
        remedy = "a tensor of plain numbers" if is_dense else f"{where}.to_dense()"
        raise TypeError(
            f"{where} is a tensor of torch that NumPy cannot read ({dtype}, {tensor.layout}: "
            f"{reason}); give {remedy}"
        ) from None


def check_no_torch(params: Mapping[str, Any]) -> None:
    """Refuses parameters that are tensors of torch: JAX does not differentiate by them.

    Args:
      params: {name: value}.

    Raises:
      TypeError: with the name of the first one.
    """
    for name, value in params.items():
        if is_of_torch(value):
            raise TypeError(
                f"parameter {name!r} is a tensor of torch ({value.dtype}), which JAX cannot train; "
                "make it an array: jax.numpy.asarray(tensor.detach().cpu().numpy())"
            )


def check_arrays(batch: PyTree) -> None:
    """Refuses a batch whose leaves are not arrays of numbers.

    Raises:
      TypeError: text, objects, or rows as Python lists, with how an array is made.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        kind = getattr(getattr(leaf, "dtype", None), "kind", None)
        where = typed(path)
        if isinstance(leaf, str | bytes) or kind in ("U", "S", "O", "M", "m"):
            found = f"text ({leaf!r:.40})" if isinstance(leaf, str | bytes) else f"{leaf.dtype}"
            raise TypeError(
                f"{where} holds {found}, and a batch holds arrays of numbers [rows, ...]; leave it "
                "out, or make numbers of it before the batches are given"
            )
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            raise TypeError(
                f"{where} holds random keys ({leaf.dtype}), and a batch holds arrays of numbers "
                "[rows, ...]; models draw from the run's own keys (seed=), or give "
                "jax.random.key_data(keys) with a key for each row"
            )
        if (
            isinstance(leaf, bool | int | float)
            and (inside := _path_of_list(batch, path)) is not None
        ):
            raise TypeError(
                f"{typed(inside)} is a Python list of numbers, which is read as a tree of single "
                f"values; give an array: numpy.asarray({typed(inside)})"
            )


def _path_of_list(tree: Any, path: Sequence[Any]) -> Sequence[Any] | None:
    """Where the outermost list around a leaf is; None: there is none."""
    for depth, part in enumerate(path):
        if isinstance(tree, list):
            return path[:depth]
        index: Any = getattr(part, "key", getattr(part, "idx", None))
        if index is None or not hasattr(tree, "__getitem__"):
            return None
        tree = tree[index]
    return None


def typed(path: Sequence[Any]) -> str:
    """How a part of a batch is written in Python."""
    keys = (getattr(part, "key", getattr(part, "idx", None)) for part in path)
    names = (getattr(part, "name", None) for part in path)
    pairs = zip(keys, names, strict=True)
    return "batch" + "".join(f"[{key!r}]" if name is None else f".{name}" for key, name in pairs)
