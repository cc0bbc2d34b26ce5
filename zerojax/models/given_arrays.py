"""Converts users' arrays, such as the leaves of a batch, to arrays that JAX accepts.

Tensors of other libraries become NumPy arrays; leaves that are not numeric arrays are refused. A
type's module name identifies its library, so that no library has to be imported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from zerojax.tracing.trees import Tree

_ALIGNMENT = 64
"""Alignment in bytes of host memory that JAX uses on the CPU without a copy."""


def is_of_torch(thing: object) -> bool:
    """Returns whether an object or class is, or derives from, a class of PyTorch."""
    classes = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
    return any(base.__module__.partition(".")[0] == "torch" for base in classes)


def as_arrays(batch: Tree) -> Tree:
    """Replaces other libraries' tensors in a batch by NumPy arrays.

    A mapping that is not a pytree for JAX, such as the result of a Hugging Face tokenizer, becomes
    a dict. All other values are unchanged. Memory is shared if the library permits it.

    Raises:
      TypeError: a tensor is not on the CPU, or NumPy cannot read it.
    """
    if not any(isinstance(x, Mapping) or _is_foreign(x) for x in jax.tree.leaves(batch)):
        return batch
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
    return treedef.unflatten(_as_array(path, leaf) for path, leaf in leaves)


def own_arrays(batch: Tree) -> Tree:
    """Copies the NumPy arrays of a batch, whose memory its maker may fill again.

    A batch is used later than it is made: it is read ahead, it is sent to GPUs in the background,
    and on the CPU `jax.device_put` uses aligned memory without a copy. JAX's arrays are immutable
    and are not copied. The copies are aligned, so that JAX need not copy them again.

    Args:
      batch: result of `as_arrays`.
    """
    return jax.tree.map(lambda x: own_array(x) if isinstance(x, np.ndarray) else x, batch)


def own_array(array: np.ndarray) -> np.ndarray:
    """Copies an array to memory that JAX can use without another copy."""
    array = np.asarray(array)  # without subclasses, such as `np.memmap`
    if array.dtype.hasobject:  # no batch may hold objects, which `check_arrays` says
        return array.copy()
    own = aligned_empty(array.shape, array.dtype)
    own[...] = array
    return own


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array in memory that JAX uses on the CPU without another copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    # The number of bytes up to the next aligned address.
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def _is_foreign(leaf: object) -> bool:
    is_known = isinstance(leaf, jax.Array) or isinstance(getattr(leaf, "dtype", None), np.dtype)
    return hasattr(leaf, "__array__") and not is_known


def _as_array(path: Sequence[Any], leaf: object) -> Any:
    if isinstance(leaf, Mapping):
        return as_arrays(dict(leaf))
    if not _is_foreign(leaf):
        return leaf
    return _of_torch(typed(path), leaf) if is_of_torch(leaf) else np.asarray(leaf)


def _of_torch(where: str, tensor: Any) -> np.ndarray:
    """Converts a torch tensor to a NumPy array of the same dtype.

    Args:
      where: Python expression of the tensor, for messages.
      tensor: the tensor.
    """
    device, dtype = tensor.device, str(tensor.dtype).removeprefix("torch.")
    if device.type != "cpu":
        remedy = "a tensor with values" if device.type == "meta" else f"{where}.cpu()"
        raise TypeError(
            f"{where} is a torch tensor on {device}, but batches are read from host memory; "
            f"pass {remedy}"
        )
    tensor = tensor.detach()
    try:
        if (own := getattr(ml_dtypes, dtype, None)) is None:
            return tensor.numpy()
        bits = getattr(sys.modules["torch"], f"int{8 * tensor.element_size()}")
        return tensor.view(bits).numpy().view(own)  # NumPy has no such dtype, only ml_dtypes has
    except (TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        is_dense = str(tensor.layout) == "torch.strided"
        remedy = "a tensor of plain numbers" if is_dense else f"{where}.to_dense()"
        raise TypeError(
            f"{where} is a torch tensor that NumPy cannot read ({dtype}, {tensor.layout}: "
            f"{reason}); pass {remedy}"
        ) from None


def check_no_torch(params: Mapping[str, Any]) -> None:
    """Checks that no parameter is a torch tensor, which JAX cannot differentiate.

    Args:
      params: {name: value}.

    Raises:
      TypeError: a parameter is a torch tensor; the message names the first one.
    """
    for name, value in params.items():
        if is_of_torch(value):
            raise TypeError(
                f"parameter {name!r} is a torch tensor ({value.dtype}), which JAX cannot train; "
                "convert it: jax.numpy.asarray(tensor.detach().cpu().numpy())"
            )


def check_arrays(batch: Tree) -> None:
    """Checks that all values of a batch are numeric arrays.

    Raises:
      TypeError: a value is text, a date, an object, a random key, or a number inside a Python list;
        the message states the remedy.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        kind = getattr(getattr(leaf, "dtype", None), "kind", None)
        where = typed(path)
        if isinstance(leaf, str | bytes) or kind in ("U", "S", "O", "M", "m"):
            content = f"text ({leaf!r:.40})" if isinstance(leaf, str | bytes) else f"{leaf.dtype}"
            raise TypeError(
                f"{where} holds {content}, but a batch may hold only numeric arrays [rows, ...]; "
                "remove it, or convert it to numbers"
            )
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            raise TypeError(
                f"{where} holds random keys ({leaf.dtype}), but a batch may hold only numeric "
                "arrays [rows, ...]; use the keys that the run derives from seed=, or pass "
                "jax.random.key_data(keys) with one key per row"
            )
        if (
            isinstance(leaf, bool | int | float)
            and (inside := _path_of_list(batch, path)) is not None
        ):
            raise TypeError(
                f"{typed(inside)} is a Python list of numbers, which JAX treats as a tree of "
                f"scalars; pass an array: numpy.asarray({typed(inside)})"
            )


def _path_of_list(tree: Tree, path: Sequence[Any]) -> Sequence[Any] | None:
    """Returns the path of the outermost list that contains a leaf, or None."""
    for depth, part in enumerate(path):
        if isinstance(tree, list):
            return path[:depth]
        index: Any = getattr(part, "key", getattr(part, "idx", None))
        if index is None or not hasattr(tree, "__getitem__"):
            return None
        tree = tree[index]
    return None


def typed(path: Sequence[Any]) -> str:
    """Returns the Python expression of an element of a batch, such as batch['x']."""
    keys = (getattr(part, "key", getattr(part, "idx", None)) for part in path)
    names = (getattr(part, "name", None) for part in path)
    pairs = zip(keys, names, strict=True)
    return "batch" + "".join(f"[{key!r}]" if name is None else f".{name}" for key, name in pairs)
