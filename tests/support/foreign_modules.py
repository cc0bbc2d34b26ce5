"""Modules of checkouts, executed as they lie there, without what serves and reads data.

Stand-ins take the place of packages that models only annotate with or that serve and read data
(`STAND_INS`), and of the `__init__` of packages that would import all of these (`BARE`).
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import flax
import jax

READING = ("clu", "ml_collections", "sentencepiece", "tensorflow", "tensorflow_datasets")
STAND_INS = {
    "BONSAI_CHECKOUT": ("jaxtyping",),  # annotations
    "TUNIX_CHECKOUT": ("einops", "jaxtyping"),  # pictures, which are not given; annotations
    "TRANSFORMERS_CHECKOUT": (),
    "FLAX_CHECKOUT": (*READING, "jaxtyping", "tensorflow_text"),
}
"""Packages that a model does not compute with, by the variable that names its checkout."""

BARE = {
    "BONSAI_CHECKOUT": ("bonsai.models",),
    "TUNIX_CHECKOUT": ("tunix", "tunix.models.llama3", "tunix.models.qwen3"),
    "TRANSFORMERS_CHECKOUT": (),
    "FLAX_CHECKOUT": (),
}
"""Packages whose `__init__` is left out, by the variable that names their checkout."""


def is_given(variable: str) -> bool:
    """Whether the environment names a checkout, and what it needs can be imported."""
    if variable == "TRANSFORMERS_CHECKOUT" and not importlib.util.find_spec("huggingface_hub"):
        return False
    return bool(os.environ.get(variable))


@functools.cache
def load(variable: str, name: str, folder: str = "") -> ModuleType:
    """A module of a checkout, executed as it lies there; its package is forgotten afterwards.

    Args:
      variable: of the environment, that names the checkout.
      name: of the module, as the checkout imports it.
      folder: of the checkout, in which its packages lie.
    """
    root = Path(os.environ[variable], folder)
    stand_ins: dict[str, Any] = {each: mock.MagicMock(name=each) for each in STAND_INS[variable]}
    stand_ins |= {package: _bare(package, root) for package in BARE[variable]}
    warned = warnings.catch_warnings(action="ignore")
    modules = mock.patch.dict(sys.modules, stand_ins)
    with warned, modules, mock.patch.object(sys, "path", [str(root), *sys.path]), kept_settings():
        importlib.invalidate_caches()
        return importlib.import_module(name)


def _bare(package: str, root: Path) -> ModuleType:
    """A package that has its folder, but not what its `__init__` imports."""
    made = ModuleType(package)
    made.__path__ = [str(root.joinpath(*package.split(".")))]
    return made


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Flax's settings as they were; tunix changes one while it is imported."""
    before = flax.config.flax_always_shard_variable
    try:
        yield
    finally:
        flax.config.update("flax_always_shard_variable", before)


class _Wider:
    """A module in which `float32` is float64 and `int32` int64."""

    NAMES: ClassVar[dict[str, str]] = {"float32": "float64", "int32": "int64"}

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, self.NAMES.get(name, name))


@contextlib.contextmanager
def in_64_bits(module: ModuleType) -> Iterator[None]:
    """What a module calls `jnp.float32` and `np.int32` has 64 bits while it runs, and JAX has them.

    The program is otherwise its own: nothing of the module's source is changed.
    """
    names = [name for name in ("jnp", "np") if hasattr(module, name)]
    with jax.enable_x64(True), contextlib.ExitStack() as wider:
        for name in names:
            wider.enter_context(mock.patch.object(module, name, _Wider(getattr(module, name))))
        yield
