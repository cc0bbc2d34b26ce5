"""Adapts an `nnx.Module`, passed as an instance or a factory, as a `Model`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.typing import DTypeLike

from zerojax.config.tree_types import Batch, Tree
from zerojax.models.dim_names import DimNames, names_in_variable
from zerojax.models.given_arrays import check_no_torch
from zerojax.models.step_count import find_step_rules
from zerojax.tracing import trees
from zerojax.tracing.protocol import Arrays, Loss, OnRead, StepRule

# PRNG keys are stored as uint32 arrays, so that every array of the state is an ordinary array.


def _is_key(value: object) -> bool:
    return hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


@functools.cache
def _key_impl(dtype: DTypeLike) -> str:
    """Returns the name of the random generator of keys with this dtype, such as "threefry2x32"."""
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    for name in names:
        if jax.eval_shape(functools.partial(jax.random.key, 0, impl=name)).dtype == dtype:
            return name
    raise ValueError(f"a random stream of the model has keys of dtype {dtype}; use one of {names}")


def _fold_key(
    key_data: jax.Array, like: jax.Array | jax.ShapeDtypeStruct, bits: jax.Array
) -> jax.Array:
    """Converts stored key data to typed keys, each folded with the 32 random bits of this call."""
    keys = jax.random.wrap_key_data(key_data, impl=_key_impl(like.dtype))
    fold = lambda key: jax.random.fold_in(key, bits)  # noqa: E731
    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys)


class _TracedStream(nnx.RngStream):
    """Random stream for traced constructors; yields the same keys as `nnx.RngStream`.

    `nnx.RngStream` writes its count by item assignment, which reads the sharding of the traced
    count. JAX 0.10 then raises an error whose text visits everything traced before. That took 95 of
    100 s of planning a model with 2,000 parameters.
    """

    def __call__(self) -> jax.Array:
        self.count.set_metadata(tag=self.tag)  # raises if the count belongs to another trace
        count = self.count.get_value()
        key = jax.random.fold_in(self.key.get_value(), count)
        self.count.set_value(count + 1)
        return key


class _ReadThrough:
    """Mixin for Variable classes whose value is `on_read(stored value)`.

    The empty `__slots__` keeps the object layout, so that `__class__` of a Variable can be
    assigned.
    """

    __slots__ = ()
    variable_class: type

    def get_value(self, **index: object) -> Any:
        return _opened(self).get_value(**index)

    def set_value(self, value: Tree, **index: object) -> None:
        """Stores a value that the model writes; the variable is an ordinary one afterwards."""
        opened = _opened(self)
        object.__setattr__(self, "__class__", type(opened))
        self.set_raw_value(opened.get_raw_value())
        self.del_metadata("on_read")
        self.set_value(value, **index)

    @property
    def shape(self) -> tuple[int, ...]:
        return _abstract_value(self).shape

    def __getattr__(self, name: str) -> Any:
        # Without this, `w.T`, `w.astype(...)`, `w.dtype` bypass get_value and read the stored
        # shard.
        if self.has_metadata(name):
            return self.get_metadata(name)
        value = _abstract_value(self) if name in ("dtype", "ndim", "size") else self.get_value()
        return getattr(value, name)


def _opened(variable: Any) -> nnx.Variable:
    """Returns a variable of the user's class that holds the value after `on_read`.

    A `get_value` or a hook of this class therefore still applies, and gets the whole value.
    """
    metadata = variable.get_metadata()
    read = metadata.pop("on_read")
    return variable.variable_class.from_metadata(read(variable.get_raw_value()), metadata)


def _abstract_value(variable: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the value without adding a gather to the program."""
    return jax.eval_shape(lambda: variable.get_value())


@functools.cache
def _reading_class(variable_class: type) -> type:
    members = {"__slots__": (), "variable_class": variable_class}
    return type("Reading" + variable_class.__name__, (_ReadThrough, variable_class), members)


def _value_of(leaf: object) -> Any:
    """Returns the array of a leaf: the raw value of a Variable, or the leaf itself."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _with_value(leaf: object, value: Tree) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def _check_no_torch(module: nnx.Module) -> None:
    variables = ((path, x) for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Variable))
    check_no_torch({trees.path_name(path): x.get_raw_value() for path, x in variables})


class NnxModel:
    """Model of an `nnx.Module`, passed as an instance or as a factory.

    Every `nnx.Param` is a parameter. All other state (batch statistics, counts of random streams,
    plain array attributes) is extras. `template` is the instance, or, for a factory, an abstract
    module without arrays.
    """

    reads_lazily = True

    def __init__(self, source: nnx.Module | Callable[[nnx.Rngs], nnx.Module]):
        self.source = source
        if isinstance(source, nnx.Module):
            _check_no_torch(source)
            self.kind, self.template = "nnx module", source
            self._graphdef, self._state = nnx.split(source, graph=True)
        else:
            self.kind = "nnx factory"
            made = jax.eval_shape(lambda: nnx.split(self._make(jax.random.key(0)), graph=True))
            self._graphdef, self._state = made
            self.template = nnx.merge(*made)
        self._templates = dict(nnx.to_flat_state(self._state))
        self._param_paths, self._extra_paths = _paths_by_name(self._templates)
        self._graphdefs: dict[Any, tuple[Any, dict]] = {}

    @property
    def overwritten(self) -> frozenset[str]:
        overwritten = nnx.variable_type_from_name(
            linen.fp8_ops.OVERWRITE_WITH_GRADIENT, allow_register=True
        )
        paths = self._extra_paths.items()
        return frozenset(n for n, path in paths if isinstance(self._templates[path], overwritten))

    def parameter_names(self) -> Any:
        """Returns the tree of `nnx.to_pure_dict(nnx.state(model, nnx.Param))` with the name of each
        parameter in its place."""
        nested: dict[Any, Any] = {}
        for name, path in self._param_paths.items():
            part = nested
            for key in path[:-1]:
                part = part.setdefault(key, {})
            part[path[-1]] = name
        return nested

    @property
    def dim_names(self) -> Mapping[str, DimNames]:
        """Names that the model gives the dimensions of its parameters; without those it does not
        name."""
        found = {n: names_in_variable(self._templates[p]) for n, p in self._param_paths.items()}
        return {name: names for name, names in found.items() if names is not None}

    @property
    def step_rules(self) -> Mapping[str, StepRule]:
        return find_step_rules(self._templates, self._extra_paths)

    def _make(self, key: jax.Array) -> nnx.Module:
        """Calls the factory and returns the new module, with traced arrays."""
        if isinstance(self.source, nnx.Module):
            raise ValueError(
                "the model is an instance with arrays without values (jax.ShapeDtypeStruct), which "
                "can be planned, but not trained; pass an instance with values, or a function that "
                "makes it, such as `lambda rngs: MyModel(..., rngs=rngs)`"
            )
        rngs = nnx.Rngs(key)
        for _, stream in rngs.items():
            object.__setattr__(stream, "__class__", _TracedStream)
        with nnx.use_eager_sharding(False):
            module = self.source(rngs)
        if not isinstance(module, nnx.Module):
            name = getattr(self.source, "__qualname__", type(self.source).__name__)
            raise TypeError(
                f"the model factory {name} returned a {type(module).__name__}, but must return an "
                "nnx.Module: lambda rngs: MyModel(..., rngs=rngs)"
            )
        _check_no_torch(module)
        for _, node in nnx.iter_graph(module):
            if isinstance(node, _TracedStream):
                object.__setattr__(node, "__class__", nnx.RngStream)
            if isinstance(node, nnx.Module):
                for name, value in list(vars(node).items()):
                    # Flax treats a plain array attribute as state only if it is concrete.
                    if isinstance(value, jax.Array):
                        setattr(node, name, nnx.data(value))
        return module

    def init(self, key: jax.Array, batch: Batch, loss: Loss) -> tuple[Arrays, Arrays]:
        return self._arrays_of(self._make(key))

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        return self._arrays_of(self.source) if isinstance(self.source, nnx.Module) else None

    def abstract_arrays(self) -> tuple[Arrays, Arrays]:
        """Returns what `init` returns, as `ShapeDtypeStruct`s, without calling the factory."""
        return jax.eval_shape(self._arrays_in, self._state)

    def _arrays_of(self, module: nnx.Module) -> tuple[Arrays, Arrays]:
        return self._arrays_in(nnx.split(module, graph=True)[1])

    def _arrays_in(self, state: nnx.State) -> tuple[Arrays, Arrays]:
        flat = dict(nnx.to_flat_state(state))
        params = {name: _value_of(flat[path]) for name, path in self._param_paths.items()}
        extras = {}
        for name, path in self._extra_paths.items():
            value = _value_of(flat[path])
            extras[name] = jax.random.key_data(value) if _is_key(value) else jnp.asarray(value)
        return params, extras

    def _reading_graphdef(self, on_read: OnRead) -> tuple[Any, dict]:
        """Returns (graphdef, templates) in which variables to read have a `_ReadThrough` class;
        cached.
        """
        cache_key = frozenset(on_read.items())
        if cache_key not in self._graphdefs:
            names = {path: name for name, path in self._param_paths.items()}

            def exchange(state: nnx.State) -> tuple[Any, Any]:
                module = nnx.merge(self._graphdef, state)
                for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
                    read = on_read.get(names[path])
                    if read is not None:
                        object.__setattr__(variable, "__class__", _reading_class(type(variable)))
                        variable.set_metadata(on_read=read)
                return nnx.split(module, graph=True)

            graphdef, state = jax.eval_shape(exchange, self._state)
            self._graphdefs[cache_key] = graphdef, dict(nnx.to_flat_state(state))
        return self._graphdefs[cache_key]

    def _bind(self, params: Arrays, extras: Arrays, bits: jax.Array | None, on_read: OnRead) -> Any:
        if on_read:
            graphdef, templates = self._reading_graphdef(on_read)
        else:
            graphdef, templates = self._graphdef, self._templates
        flat = []
        for name, path in self._param_paths.items():
            flat.append((path, _with_value(templates[path], params[name])))
        for name, path in self._extra_paths.items():
            value, like = extras[name], _value_of(self._templates[path])
            if _is_key(like):
                value = (
                    jax.random.wrap_key_data(value, impl=_key_impl(like.dtype))
                    if bits is None
                    else _fold_key(value, like, bits)
                )
            flat.append((path, _with_value(templates[path], value)))
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
        """Calls `function(model)`, see `Model.run`; written parameters keep their value in this
        call only."""
        module = self._bind(params, extras, jax.random.bits(key, dtype=jnp.uint32), on_read or {})
        if not train:
            module.eval()
        result = function(module)
        after = dict(nnx.to_flat_state(nnx.split(module, graph=True)[1]))
        new_extras = {}
        for name, path in self._extra_paths.items():
            value = _value_of(after[path]) if path in after else extras[name]
            # The module has folded keys; the stored keys stay the same.
            new_extras[name] = extras[name] if _is_key(value) else value
        return result, new_extras

    def to_source(self, params: Arrays, extras: Arrays) -> nnx.Module:
        return self._bind(params, extras, None, {})


def _paths_by_name(flat: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns ({parameter name: path}, {extra name: path}) for a module's flat state.

    Raises:
      TypeError: a variable does not hold exactly one array.
      ValueError: two arrays have the same name.
    """
    params: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for path, leaf in flat.items():
        name, value = trees.path_name(path), _value_of(leaf)
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(
                f"{type(leaf).__name__} {name} holds a {type(value).__name__}, but every variable "
                "must hold one array: split it, or remove it (nnx.pop(model, nnx.Intermediate))"
            )
        if name in params or name in extras:
            raise ValueError(
                f"two variables are named {name!r}, because a key contains {trees.SEPARATOR!r}; "
                "rename this key"
            )
        (params if isinstance(leaf, nnx.Param) else extras)[name] = path
    return params, extras
