"""Adapts a `linen.Module` as a `Model`; collections other than "params" become extras."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen
from flax.core import meta, unfreeze

from zerojax.config.tree_types import Batch, Tree
from zerojax.models.dim_names import DimNames, names_in_boxes
from zerojax.tracing import trees
from zerojax.tracing.protocol import NO_RULES, Arrays, Loss, OnRead, StepRule
from zerojax.tracing.reads import MarkRead

_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_ARRAY_METHODS = (
    *("abs", "neg", "pos", "invert", "bool", "int", "float", "complex", "index", "round"),
    *("lt", "le", "eq", "ne", "gt", "ge", "len", "iter", "reversed", "contains", "getitem"),
    *("setitem", "array", "dlpack", "copy", "deepcopy", "format"),
    *(side + name for name in _BINARY for side in ("", "r")),
)
"""Names, without underscores, of special methods that Python looks up on the class."""


_SWITCHES = {
    "train": True,
    "training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""{argument of a method: its value in training}; the value in evaluation is the opposite."""


def _method_of_value(name: str) -> Callable[..., Any]:
    def method(self: _ReadBox, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.as_array(), name)(*args, **kwargs)

    method.__name__ = name
    return method


@jax.tree_util.register_pytree_node_class
class _ReadBox(meta.AxisMetadata):
    """Linen metadata box whose `unbox`, called by linen at each use, reads the parameter.

    A model that computes with `module.variables["params"]["kernel"]` uses the box itself. The box
    therefore forwards attributes, methods, operators and `jnp` functions to the array that `read`
    returns. As a pytree it has one leaf, the stored value, which the trace of a plan uses.
    Functions that accept only real JAX arrays (`jax.lax.sin`, the carry of a loop) fail in that
    trace; the trace is then repeated without a box for this parameter (`zerojax.tracing.trace`).
    """

    def __init__(self, value: Tree, read: Callable[[Any], jax.Array]):
        self.value = value
        self.read = read

    def unbox(self) -> jax.Array:
        return self.read(self.value)

    def as_array(self) -> jax.Array:
        """Returns `unbox()`, and records that the model used the box itself."""
        self._note_handed()
        return self.unbox()

    def _note_handed(self) -> None:
        if isinstance(self.read, MarkRead):
            self.read.handed.add(self.read.name)

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:
        # A property, because functions that do not accept the box only test that the attribute
        # exists.
        self._note_handed()
        return self.unbox

    @property
    def __class__(self) -> Any:
        return jax.Array

    def __getattr__(self, name: str) -> Any:
        # copy.copy creates the object before these two attributes are set.
        if name in ("value", "read"):
            raise AttributeError(name)
        if name in ("shape", "dtype", "ndim", "size"):
            return getattr(jax.eval_shape(self.as_array), name)
        return getattr(self.as_array(), name)

    def __repr__(self) -> str:
        return f"a parameter, {self.dtype.name}{list(self.shape)}"

    # Arrays are not hashable.
    __hash__ = None  # type: ignore[assignment]

    def replace_boxed(self, val: Tree) -> _ReadBox:
        return _ReadBox(val, self.read)

    def add_axis(self, index: int, params: dict) -> _ReadBox:
        return self

    def remove_axis(self, index: int, params: dict) -> _ReadBox:
        return self

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.value,), self.read

    @classmethod
    def tree_unflatten(cls, read: Callable[[Any], jax.Array], children: tuple[Any]) -> _ReadBox:
        return cls(children[0], read)


for _name in _ARRAY_METHODS:
    setattr(_ReadBox, f"__{_name}__", _method_of_value(f"__{_name}__"))


class BoundLinen:
    """A `linen.Module` with bound variables; the module and its methods are called like functions.

    Attributes:
      training: False during evaluation. The arguments `train`, `training`, `deterministic` and
        `use_running_average` are set from it unless the call passes them. Pass any other switch
        explicitly (`model(x, dropout=model.training)`).
      variables: the collections, updated by each call.
      switched: names of the arguments that were set from the mode.
    """

    def __init__(self, module: linen.Module, variables: dict, key: jax.Array, *, training: bool):
        self._module = module
        self._key = key
        self.training = training
        self.variables = variables
        self.switched: set[str] = set()

    def _rngs(self) -> dict[str, jax.Array]:
        # One key per common stream name of linen; for other names linen falls back to "params".
        names = ("params", "dropout", "noise", "gate", "carry")
        return {name: jax.random.fold_in(self._key, index) for index, name in enumerate(names)}

    def _switches(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        method: Callable[..., Any] | str | None,
    ) -> dict[str, bool]:
        """Returns the mode (training or evaluation) as keyword arguments that the method accepts
        and the call does not pass.
        """
        kind = type(self._module)
        function = method if callable(method) else getattr(kind, method or "__call__", None)
        try:
            signature = inspect.signature(function)  # type: ignore[arg-type]
            passed = signature.bind_partial(self._module, *args, **kwargs).arguments
        except (TypeError, ValueError):  # the call itself will raise a clearer error
            return {}
        # Skips arguments that are module attributes: linen.merge_param refuses both at once.
        switches = {
            name: value == self.training
            for name, value in _SWITCHES.items()
            if name in signature.parameters.keys() - passed.keys()
            and getattr(self._module, name, None) is None
        }
        self.switched |= switches.keys()
        return switches

    def _apply(
        self, *args: Any, method: Callable[..., Any] | str | None = None, **kwargs: Any
    ) -> Any:
        kwargs |= self._switches(args, kwargs, method)
        mutable = [name for name in self.variables if name != "params"] if self.training else []
        rngs = self._rngs()
        # With `mutable`, linen returns a pair.
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
    """Bound module that initializes its variables at the first call, from the inputs of this call.

    The user's loss makes the call.

    Attributes:
      dim_names: {parameter: names that the model gives its dimensions}.
    """

    dim_names: Mapping[str, DimNames] = types.MappingProxyType({})

    def _apply(
        self, *args: Any, method: Callable[..., Any] | str | None = None, **kwargs: Any
    ) -> Any:
        if self.variables:
            return super()._apply(*args, method=method, **kwargs)
        kwargs |= self._switches(args, kwargs, method)
        # As `module.init(key, ...)` does, so that a seed gives the same weights.
        rngs = self._rngs() | {"params": self._key}
        result, boxed = self._module.init_with_output(rngs, *args, method=method, **kwargs)
        self.dim_names = names_in_boxes(unfreeze(boxed))
        self.variables = meta.unbox(unfreeze(boxed))
        return result


class LinenModel:
    """Model of a `linen.Module`; collections other than "params" (batch statistics) are extras.

    Attributes:
      switched: names of arguments that were set from the mode; known after a call, see
        `BoundLinen`.
      dim_names: {parameter: names that the model gives its dimensions}; known after `init`.
    """

    kind = "linen module"
    reads_lazily = True
    step_rules: Mapping[str, StepRule] = NO_RULES

    def __init__(self, module: linen.Module):
        self.source = module
        self._templates: dict[str, Any] = {}
        self.switched: tuple[str, ...] = ()
        self.dim_names: Mapping[str, DimNames] = {}

    def parameter_names(self) -> Any:
        """Returns the tree of the collection "params" with the name of each parameter in its
        place."""
        return trees.names_like(self._templates["params"])

    def init(self, key: jax.Array, batch: Batch, loss: Loss) -> tuple[Arrays, Arrays]:
        bound = _InitialisingLinen(self.source, {}, key, training=True)
        loss(bound, batch)
        if "params" not in bound.variables:
            raise ValueError(
                f"the loss never called the linen module {type(self.source).__name__}, so the "
                "shapes of its parameters are unknown; call model(...) in loss(model, batch)"
            )
        variables, self.dim_names = bound.variables, bound.dim_names
        extras = {name: tree for name, tree in variables.items() if name != "params"}
        shapes = jax.tree.map(lambda leaf: 0, (variables["params"], extras))
        self._templates = {"params": shapes[0], "extras": shapes[1]}
        return trees.flatten_names(variables["params"]), trees.flatten_names(extras)

    @property
    def overwritten(self) -> frozenset[str]:
        prefix = linen.fp8_ops.OVERWRITE_WITH_GRADIENT + trees.SEPARATOR
        names = trees.flatten_names(self._templates.get("extras", {}))
        return frozenset(name for name in names if name.startswith(prefix))

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
        self.switched = tuple(sorted({*self.switched, *bound.switched}))
        after = {name: tree for name, tree in bound.variables.items() if name != "params"}
        flat = trees.flatten_names(after)
        return result, {name: flat.get(name, extras[name]) for name in extras}

    def to_source(self, params: Arrays, extras: Arrays) -> dict:
        """Returns the variables that `module.apply` accepts."""
        return self._variables(params, extras)
