"""A `linen.Module` as a `Model`; collections other than "params" are its own state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen
from flax.core import meta, unfreeze

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
"""What Python looks up on the class of an array, not on the array, without the underscores."""


_SWITCHES = {
    "train": True,
    "training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""{argument of a method: its value in training, of which evaluation has the opposite}."""


def _method_of_value(name: str) -> Callable[..., Any]:
    def method(self: _ReadBox, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.as_array(), name)(*args, **kwargs)

    method.__name__ = name
    return method


@jax.tree_util.register_pytree_node_class
class _ReadBox(meta.AxisMetadata):
    """A linen metadata box: `unbox`, which linen calls where a module uses the parameter, reads.

    A model that computes with `module.variables["params"]["kernel"]` has the box itself, so that it
    is an array in every other way: attributes, methods, operators and `jnp` functions are those of
    what reading gives. As a tree it is what is stored, which the trace of a plan finds. What takes
    nothing but arrays of JAX's own (`jax.lax.sin`, the carry of a loop) fails in that trace, which
    then goes without a box for this parameter (`zerojax.tracing.trace`).
    """

    def __init__(self, value: Any, read: Callable[[Any], jax.Array]):
        self.value = value
        self.read = read

    def unbox(self) -> jax.Array:
        return self.read(self.value)

    def as_array(self) -> jax.Array:
        """The same, for a model that has the box in its hands."""
        self._note_handed()
        return self.unbox()

    def _note_handed(self) -> None:
        if isinstance(self.read, MarkRead):
            self.read.handed.add(self.read.name)

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:
        # A property, since what cannot take the box asks no more than whether there is this method.
        self._note_handed()
        return self.unbox

    @property
    def __class__(self) -> Any:
        return jax.Array

    def __getattr__(self, name: str) -> Any:
        # Copying makes an object before it has these two.
        if name in ("value", "read"):
            raise AttributeError(name)
        if name in ("shape", "dtype", "ndim", "size"):
            return getattr(jax.eval_shape(self.as_array), name)
        return getattr(self.as_array(), name)

    def __repr__(self) -> str:
        return f"a parameter, {self.dtype.name}{list(self.shape)}"

    # An array is not hashable either.
    __hash__ = None  # type: ignore[assignment]

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


for _name in _ARRAY_METHODS:
    setattr(_ReadBox, f"__{_name}__", _method_of_value(f"__{_name}__"))


class BoundLinen:
    """A `linen.Module` with its variables bound: call it, or any of its methods, like a function.

    Attributes:
      training: False during evaluation. A method that takes `train`, `training`, `deterministic`
        or `use_running_average` gets it, unless the call says it; pass on any other switch
        (`model(x, dropout=model.training)`).
      variables: the collections, after the calls made so far.
      switched: names of the arguments that calls did not say.
    """

    def __init__(self, module: linen.Module, variables: dict, key: jax.Array, *, training: bool):
        self._module = module
        self._key = key
        self.training = training
        self.variables = variables
        self.switched: set[str] = set()

    def _rngs(self) -> dict[str, jax.Array]:
        # One key for every stream name that linen modules ask for; unknown names fall back to
        # "params".
        names = ("params", "dropout", "noise", "gate", "carry")
        return {name: jax.random.fold_in(self._key, index) for index, name in enumerate(names)}

    def _switches(self, args: Any, kwargs: Mapping[str, Any], method: Any) -> dict[str, bool]:
        """The mode, as arguments that the method has and the call does not say."""
        kind = type(self._module)
        function = method if callable(method) else getattr(kind, method or "__call__", None)
        try:
            signature = inspect.signature(function)  # type: ignore[arg-type]
            said = signature.bind_partial(self._module, *args, **kwargs).arguments
        except (TypeError, ValueError):  # the call itself says what is wrong
            return {}
        # An argument or an attribute: linen.merge_param refuses both.
        switches = {
            name: value == self.training
            for name, value in _SWITCHES.items()
            if name in signature.parameters.keys() - said.keys()
            and getattr(self._module, name, None) is None
        }
        self.switched |= switches.keys()
        return switches

    def _apply(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        kwargs |= self._switches(args, kwargs, method)
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
        kwargs |= self._switches(args, kwargs, method)
        result, variables = self._module.init_with_output(
            self._rngs(), *args, method=method, **kwargs
        )
        self.variables = meta.unbox(unfreeze(variables))
        return result


class LinenModel:
    """A `linen.Module`; collections other than "params" (batch statistics) are extras.

    Attributes:
      switched: arguments that methods get from the mode, known after a call, see `BoundLinen`.
    """

    kind = "linen module"
    reads_lazily = True
    step_rules: Mapping[str, StepRule] = NO_RULES

    def __init__(self, module: linen.Module):
        self.source = module
        self._templates: dict[str, Any] = {}
        self.switched: tuple[str, ...] = ()

    def parameter_names(self) -> Any:
        """Returns the tree of the collection "params"."""
        return trees.names_like(self._templates["params"])

    def init(self, key: jax.Array, batch: Any, loss: Loss) -> tuple[Arrays, Arrays]:
        bound = _InitialisingLinen(self.source, {}, key, training=True)
        loss(bound, batch)
        if "params" not in bound.variables:
            raise ValueError(
                f"the loss never called the linen module {type(self.source).__name__}, so its "
                "parameters have no shapes; a loss is loss(model, batch) and calls model(...)"
            )
        variables = bound.variables
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
        """The variables to give to `module.apply`."""
        return self._variables(params, extras)
