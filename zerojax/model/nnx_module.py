"""An `nnx.Module`, given as an instance or as a factory, as a `Model`.

Knows nnx's graph and its variables; never knows what reading a parameter does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import variablelib

from zerojax import trees
from zerojax.model.protocol import Arrays, Loss, OnRead

# PRNG keys live in the state as plain uint32 arrays, so that every leaf is an ordinary array.


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _fold_key(key_data: jax.Array, like: Any, bits: jax.Array) -> jax.Array:
    """Typed keys of `like`'s shape from stored key data, each folded with 32 bits of this call."""
    keys = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(like))
    fold = lambda one: jax.random.fold_in(one, bits)  # noqa: E731
    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys)


class _ReadThrough:
    """Mixed into a Variable class: its value is what `on_read` makes of what it stores.

    An empty `__slots__` keeps the object layout, so that `__class__` of a Variable can be
    exchanged.
    """

    __slots__ = ()

    def get_value(self, *, index: Any = variablelib.MISSING) -> Any:
        raw = object.__getattribute__(self, "_raw_value")
        value = object.__getattribute__(self, "_var_metadata")["on_read"](raw)
        return value if index is variablelib.MISSING or index is Ellipsis else value[index]

    def __getattr__(self, name: str) -> Any:
        # `w.T`, `w.astype(...)`, `w.shape` go past get_value and would see the stored shard.
        metadata = object.__getattribute__(self, "_var_metadata")
        return metadata[name] if name in metadata else getattr(self.get_value(), name)


@functools.cache
def _reading_class(variable_class: type) -> type:
    return type(
        "Reading" + variable_class.__name__, (_ReadThrough, variable_class), {"__slots__": ()}
    )


class NnxModel:
    """An `nnx.Module`, given as an instance or as a factory (then `template` is abstract)."""

    reads_lazily = True

    def __init__(self, template: nnx.Module, factory: Callable[[nnx.Rngs], nnx.Module] | None):
        self.template = template
        self.factory = factory
        self.source = template if factory is None else factory
        self.kind = "nnx module" if factory is None else "nnx factory"
        self._graphdef, self._state = nnx.split(template, graph=True)
        self._param_paths, self._extra_paths = {}, {}
        for path, variable in nnx.to_flat_state(self._state):
            target = self._param_paths if isinstance(variable, nnx.Param) else self._extra_paths
            target[trees.path_name(path)] = path
        self._templates = dict(nnx.to_flat_state(self._state))
        self._graphdefs: dict[Any, tuple[Any, dict]] = {}

    def init(self, key: jax.Array, batch: Any, loss: Loss) -> tuple[Arrays, Arrays]:
        if self.factory is None:
            raise AssertionError("an nnx instance brings its own arrays: use initial_arrays()")
        with nnx.use_eager_sharding(False):
            return self._arrays_of(self.factory(nnx.Rngs(key)))

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        return None if self.factory is not None else self._arrays_of(self.template)

    def _arrays_of(self, module: nnx.Module) -> tuple[Arrays, Arrays]:
        flat = dict(nnx.to_flat_state(nnx.split(module, graph=True)[1]))
        params = {name: flat[path].get_raw_value() for name, path in self._param_paths.items()}
        extras = {}
        for name, path in self._extra_paths.items():
            value = flat[path].get_raw_value()
            extras[name] = jax.random.key_data(value) if _is_key(value) else jnp.asarray(value)
        return params, extras

    def _reading_graphdef(self, on_read: OnRead) -> tuple[Any, dict]:
        """The graph with the classes of read variables exchanged; made once per `on_read`."""
        cache_key = frozenset(on_read.items())
        if cache_key not in self._graphdefs:
            module = nnx.merge(self._graphdef, jax.tree.map(lambda leaf: leaf, self._state))
            names = {path: name for name, path in self._param_paths.items()}
            for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
                read = on_read.get(names[path])
                if read is not None:
                    object.__setattr__(variable, "__class__", _reading_class(type(variable)))
                    variable.set_metadata(on_read=read)
            graphdef, state = nnx.split(module, graph=True)
            self._graphdefs[cache_key] = graphdef, dict(nnx.to_flat_state(state))
        return self._graphdefs[cache_key]

    def _bind(self, params: Arrays, extras: Arrays, bits: jax.Array | None, on_read: OnRead) -> Any:
        if on_read:
            graphdef, templates = self._reading_graphdef(on_read)
        else:
            graphdef, templates = self._graphdef, self._templates
        flat = []
        for name, path in self._param_paths.items():
            flat.append((path, templates[path].replace(params[name])))
        for name, path in self._extra_paths.items():
            value, like = extras[name], self._templates[path].get_raw_value()
            if _is_key(like):
                value = (
                    jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
                    if bits is None
                    else _fold_key(value, like, bits)
                )
            flat.append((path, templates[path].replace(value)))
        return nnx.merge(graphdef, nnx.from_flat_state(flat))

    def run(
        self,
        params: Arrays,
        extras: Arrays,
        key: jax.Array,
        function: Callable[[Any], Any],
        *,
        train: bool = True,
        on_read: OnRead | None = None,
    ) -> tuple[Any, Arrays]:
        module = self._bind(params, extras, jax.random.bits(key, dtype=jnp.uint32), on_read or {})
        if not train:
            module.eval()
        result = function(module)
        after = dict(nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param))))
        new_extras = {}
        for name, path in self._extra_paths.items():
            value = after[path].get_raw_value() if path in after else extras[name]
            new_extras[name] = extras[name] if _is_key(value) else value
        return result, new_extras

    def to_source(self, params: Arrays, extras: Arrays) -> nnx.Module:
        return self._bind(params, extras, None, {})
