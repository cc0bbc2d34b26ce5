"""A small stand-in for torch, with tensors that zerojax meets as it meets torch's.

Where they refuse to become NumPy's, they do it with torch's own sentences.
"""

from __future__ import annotations

import types
from typing import Any

import ml_dtypes
import numpy as np


class DType:
    """What `torch.float32` is: no dtype of NumPy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {name: DType(name) for name in ("float32", "bfloat16", "int16", "int32", "int64")}


class Tensor:
    """The part of `torch.Tensor` that a batch meets."""

    def __init__(
        self,
        array: Any,
        *,
        place: str = "cpu",
        layout: str = "strided",
        requires_grad: bool = False,
    ) -> None:
        self._array = np.asarray(array)
        self.device = Device(place)
        self.layout, self.requires_grad = f"torch.{layout}", requires_grad

    @property
    def dtype(self) -> DType:
        return DTYPES[self._array.dtype.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __len__(self) -> int:
        return len(self._array)

    def element_size(self) -> int:
        return self._array.itemsize

    def detach(self) -> Tensor:
        return Tensor(self._array, place=str(self.device), layout=self.layout[6:])

    def clone(self) -> Tensor:
        return Tensor(self._array.copy(), place=str(self.device), layout=self.layout[6:])

    def cpu(self) -> Tensor:
        return Tensor(self._array, layout=self.layout[6:])

    def to_dense(self) -> Tensor:
        return Tensor(self._array, place=str(self.device))

    def view(self, dtype: DType) -> Tensor:
        return Tensor(self._array.view(dtype.name))

    def numpy(self) -> np.ndarray:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if str(self.device) != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy.")
        if self.layout != "torch.strided":
            raise TypeError("can't convert Sparse layout tensor to numpy.")
        if self._array.dtype == ml_dtypes.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)


class Device:
    """A `torch.device`."""

    def __init__(self, name: str) -> None:
        self._name, self.type = name, name.partition(":")[0]

    def __str__(self) -> str:
        return self._name


class Module:
    """A `torch.nn.Module`."""

    def __call__(self, x: Any) -> Any:
        return x


def mse_loss(prediction: Any, target: Any) -> Any:
    """A function of `torch.nn.functional`."""
    return prediction - target


Tensor.__module__, Module.__module__ = "torch", "torch.nn"
mse_loss.__module__ = "torch.nn.functional"


def as_module() -> types.ModuleType:
    """What `import torch` would give."""
    module = types.ModuleType("torch")
    vars(module).update(DTYPES, Tensor=Tensor)
    return module


def tensor(array: Any, **options: Any) -> Tensor:
    """A tensor with the values of an array."""
    return Tensor(array, **options)
