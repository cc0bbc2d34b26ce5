"""What a user's model is to zerojax: named arrays, and a way to call the model with other arrays.

The one door for Flax. The rest of zerojax never asks whether a model came as an `nnx.Module`, a
factory of one, a `linen.Module` or a pair of functions. Knows nothing of meshes, shardings or ZeRO: it only
lets a caller say what happens when the model reads a parameter (`on_read`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import meta, unfreeze
from flax.nnx import variablelib

from zerojax import trees

Arrays = dict[str, Any]
OnRead = Mapping[str, Callable[[Any], jax.Array]]
Loss = Callable[[Any, Any], Any]
ModelLike = Any


class Model(Protocol):
    """The internal form of every model.

    Attributes:
      kind: what the user gave, for people: "nnx module", "nnx factory", "linen module", "functions".
      source: the user's own object.
      reads_lazily: whether `on_read` runs where the model uses a parameter (True), or for all
        parameters before the model starts (False: a pair of functions has no point of use).
    """

    kind: str
    source: Any
    reads_lazily: bool

    def init(self, key: jax.Array, batch: Any, loss: Loss) -> tuple[Arrays, Arrays]:
        """New arrays, traceable: `({name: parameter}, {name: extra})`; extras hold PRNG key data."""
        ...

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        """The arrays that the user's object already holds, or None when `init` has to make them."""
        ...

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
        """Calls `function(model)` with these arrays bound into the model.

        Args:
          params: {name: array, or whatever pytree `on_read[name]` takes}.
          extras: {name: array}.
          key: typed PRNG key of this call; every random stream of the model is folded with it.
          function: usually a loss; gets an object to call like the user's model.
          train: False switches dropout off and uses running averages, as the model itself defines.
          on_read: per name, what the model gets when it reads that parameter.

        Returns:
          (what `function` returned, the extras afterwards).
        """
        ...

    def to_source(self, params: Arrays, extras: Arrays) -> Any:
        """The user's kind of object holding these arrays."""
        ...


def as_model(model: ModelLike) -> Model:
    """The internal form of whatever the user calls a model.

    Args:
      model: an `nnx.Module` instance; a callable `rngs -> nnx.Module` (needed when the model is larger
        than one device: it is then never built whole); a `linen.Module`; or `(init, apply)` with
        `init(key)` or `init(key, batch)` returning a tree of arrays and `apply(params, ...)`.

    Raises:
      TypeError: anything else.
    """
    if isinstance(model, (NnxModel, LinenModel, FunctionModel)):
        return model
    if isinstance(model, nnx.Module):
        return NnxModel(model, None)
    if isinstance(model, linen.Module):
        return LinenModel(model)
    if isinstance(model, tuple) and len(model) == 2 and all(callable(part) for part in model):
        return FunctionModel(*model)
    if callable(model):
        with nnx.use_eager_sharding(False):
            made = nnx.eval_shape(lambda: model(nnx.Rngs(0)))
        if isinstance(made, nnx.Module):
            return NnxModel(made, model)
        raise TypeError(
            f"the model factory {_name_of(model)} returned a {type(made).__name__}; "
            "it has to return an nnx.Module: lambda rngs: MyModel(..., rngs=rngs)"
        )
    raise TypeError(
        f"cannot train a {type(model).__name__}: give a flax nnx.Module, a callable rngs -> nnx.Module, "
        "a flax linen.Module, or a pair of functions (init, apply)"
    )


def default_loss(model: Model) -> Loss:
    """The loss that the model itself brings: its method `loss(batch)`.

    Raises:
      ValueError: the model has no such method.
    """
    target = model.source if model.kind != "nnx factory" else getattr(model, "template", None)
    if callable(getattr(target, "loss", None)):
        return lambda bound, batch: bound.loss(batch)
    raise ValueError(
        f"no loss: the {model.kind} {_name_of(model.source)} has no method loss(batch). Pass "
        "loss=lambda model, batch: ..., which returns a scalar or (sum, weight); "
        "zerojax.losses.next_token fits token models"
    )


def bound_attribute(model: Model, name: str) -> Any:
    """A static attribute of the user's model (such as `tensor_parallel_rules`), or None."""
    target = getattr(model, "template", None) or model.source
    return getattr(target, name, None)


def _name_of(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or type(thing).__name__


# --- PRNG keys live in the state as plain uint32 arrays, so that every leaf is an ordinary array ---


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _fold_key(key_data: jax.Array, like: Any, bits: jax.Array) -> jax.Array:
    """Typed keys of `like`'s shape from stored key data, each folded with 32 bits of this call."""
    keys = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(like))
    fold = lambda one: jax.random.fold_in(one, bits)  # noqa: E731
    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys)


# --- nnx --------------------------------------------------------------------------------------------


class _ReadThrough:
    """Mixed into a Variable class: its value is what `on_read` makes of what it stores.

    An empty `__slots__` keeps the object layout, so that `__class__` of a Variable can be exchanged.
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
    return type("Reading" + variable_class.__name__, (_ReadThrough, variable_class), {"__slots__": ()})


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
        """The module's graph with the read variables' classes exchanged; made once per `on_read`."""
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


# --- linen ------------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class _ReadBox(meta.AxisMetadata):
    """A linen metadata box: `unbox`, which linen calls where a module uses the parameter, reads."""

    def __init__(self, value: Any, read: Callable[[Any], jax.Array]):
        self.value = value
        self.read = read

    def unbox(self) -> jax.Array:
        return self.read(self.value)

    def replace_boxed(self, val: Any) -> _ReadBox:
        return _ReadBox(val, self.read)

    def add_axis(self, index: int, params: dict) -> _ReadBox:
        return self

    def remove_axis(self, index: int, params: dict) -> _ReadBox:
        return self

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.value,), self.read

    @classmethod
    def tree_unflatten(cls, read: Any, children: tuple[Any]) -> _ReadBox:
        return cls(children[0], read)


class BoundLinen:
    """A `linen.Module` with its variables bound: call it, or any of its methods, like a function.

    Attributes:
      training: False during evaluation; pass it on as the flag that your module takes
        (`model(x, train=model.training)`), since linen has no such switch of its own.
      variables: the collections, after the calls made so far.
    """

    def __init__(self, module: linen.Module, variables: dict, key: jax.Array, *, training: bool):
        self._module = module
        self._key = key
        self.training = training
        self.variables = variables

    def _rngs(self) -> dict[str, jax.Array]:
        # One key for every stream name that linen modules ask for; unknown names fall back to "params".
        names = ("params", "dropout", "noise", "gate", "carry")
        return {name: jax.random.fold_in(self._key, index) for index, name in enumerate(names)}

    def _apply(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        mutable = [name for name in self.variables if name != "params"] if self.training else []
        rngs = self._rngs()
        if not mutable:
            return self._module.apply(self.variables, *args, rngs=rngs, method=method, **kwargs)
        result, changed = self._module.apply(
            self.variables, *args, rngs=rngs, method=method, mutable=mutable, **kwargs
        )
        self.variables = {**self.variables, **unfreeze(changed)}
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(type(self._module), name, None)
        if inspect.isfunction(attribute):
            return functools.partial(self._apply, method=attribute)
        return getattr(self._module, name)


class _InitialisingLinen(BoundLinen):
    """Makes the variables at the first call, from whatever inputs the user's loss passes."""

    def _apply(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        if self.variables:
            return super()._apply(*args, method=method, **kwargs)
        result, variables = self._module.init_with_output(self._rngs(), *args, method=method, **kwargs)
        self.variables = meta.unbox(unfreeze(variables))
        return result


class LinenModel:
    """A `linen.Module`; collections other than "params" (batch statistics) are extras."""

    kind = "linen module"
    reads_lazily = True

    def __init__(self, module: linen.Module):
        self.source = module
        self._templates: dict[str, Any] = {}

    def init(self, key: jax.Array, batch: Any, loss: Loss) -> tuple[Arrays, Arrays]:
        bound = _InitialisingLinen(self.source, {}, key, training=True)
        loss(bound, batch)
        if "params" not in bound.variables:
            raise ValueError(
                f"the loss never called the linen module {type(self.source).__name__}, so its parameters "
                "have no shapes; a loss is loss(model, batch) and calls model(...)"
            )
        variables = bound.variables
        extras = {name: tree for name, tree in variables.items() if name != "params"}
        shapes = jax.tree.map(lambda leaf: 0, (variables["params"], extras))
        self._templates = {"params": shapes[0], "extras": shapes[1]}
        return trees.flatten_names(variables["params"]), trees.flatten_names(extras)

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        return None

    def _variables(self, params: Arrays, extras: Arrays) -> dict:
        return {
            "params": trees.unflatten_like(self._templates["params"], params),
            **trees.unflatten_like(self._templates["extras"], extras),
        }

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
        reads = on_read or {}
        boxed = {
            name: _ReadBox(value, reads[name]) if name in reads else value
            for name, value in params.items()
        }
        bound = BoundLinen(self.source, self._variables(boxed, extras), key, training=train)
        result = function(bound)
        after = {name: tree for name, tree in bound.variables.items() if name != "params"}
        flat = trees.flatten_names(after)
        return result, {name: flat.get(name, extras[name]) for name in extras}

    def to_source(self, params: Arrays, extras: Arrays) -> dict:
        """The variables to give to `module.apply`."""
        return self._variables(params, extras)


# --- a pair of functions ------------------------------------------------------------------------------


class BoundFunction:
    """`apply` with its parameters bound. Attributes: `training`, `key` (PRNG key of this call)."""

    def __init__(self, apply: Callable, params: Any, key: jax.Array, *, training: bool):
        self._apply = apply
        self.params = params
        self.key = key
        self.training = training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(self.params, *args, **kwargs)


@dataclasses.dataclass
class FunctionModel:
    """`(init, apply)`: `init(key)` or `init(key, batch)` makes a tree of parameters; no extras."""

    init_function: Callable
    apply_function: Callable
    kind = "functions"
    reads_lazily = False
    _template: Any = None

    @property
    def source(self) -> tuple[Callable, Callable]:
        return self.init_function, self.apply_function

    def init(self, key: jax.Array, batch: Any, loss: Loss) -> tuple[Arrays, Arrays]:
        takes_batch = len(inspect.signature(self.init_function).parameters) > 1
        params = self.init_function(key, batch) if takes_batch else self.init_function(key)
        self._template = jax.tree.map(lambda leaf: 0, params)
        return trees.flatten_names(params), {}

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        return None

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
        reads = on_read or {}
        values = {name: reads[name](v) if name in reads else v for name, v in params.items()}
        tree = trees.unflatten_like(self._template, values)
        return function(BoundFunction(self.apply_function, tree, key, training=train)), extras

    def to_source(self, params: Arrays, extras: Arrays) -> Any:
        """The tree of parameters that `apply` takes."""
        return trees.unflatten_like(self._template, params)


# --- what a model does with its parameters, found by tracing it -----------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelTrace:
    """What one abstract forward pass tells.

    Attributes:
      read_shapes: name -> the shapes it was read with; a name that is missing is never read. A stack of
        layers that is scanned is read one slice at a time, so its shape is shorter than the stored one.
      result: the abstract value of the loss.
      checkpoints: whether the model recomputes activations itself (`jax.checkpoint`, `nnx.remat`).
      jaxpr: the traced forward pass, for counting.
    """

    read_shapes: Mapping[str, frozenset[tuple[int, ...]]]
    result: Any
    checkpoints: bool
    jaxpr: Any


class _Recorder:
    """Notes the shape of every read and passes the value on."""

    def __init__(self, seen: dict[str, set[tuple[int, ...]]], name: str):
        self._seen = seen
        self._name = name

    def __call__(self, value: Any) -> Any:
        self._seen.setdefault(self._name, set()).add(tuple(np.shape(value)))
        return value


def trace_model(
    model: Model, params: Arrays, extras: Arrays, batch: Any, loss: Loss
) -> ModelTrace:
    """Traces the loss once, without computing, and records how each parameter is read.

    Args:
      params, extras, batch: trees of `ShapeDtypeStruct`, as the model will see them.
    """
    seen: dict[str, set[tuple[int, ...]]] = {}
    on_read = {name: _Recorder(seen, name) for name in params}

    def traced(params: Arrays, extras: Arrays, batch: Any) -> Any:
        key = jax.random.key(0)
        return model.run(params, extras, key, lambda bound: loss(bound, batch), on_read=on_read)[0]

    jaxpr, result = jax.make_jaxpr(traced, return_shape=True)(params, extras, batch)
    return ModelTrace(
        read_shapes={name: frozenset(shapes) for name, shapes in seen.items()},
        result=result,
        checkpoints=_has_checkpoint(jaxpr.jaxpr),
        jaxpr=jaxpr,
    )


def _has_checkpoint(jaxpr: Any) -> bool:
    """Whether any equation, at any depth, is a `jax.checkpoint`."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("checkpoint", "remat", "remat2"):
            return True
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and _has_checkpoint(inner):
                return True
    return False
