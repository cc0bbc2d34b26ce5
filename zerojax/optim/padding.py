"""Proves that an optimizer's update does not depend on padding, or runs it on the true shapes.

An array is padded with zeros at the end of a dimension, or stored with its rows in another order.
An elementwise update does not depend on padding or order, nor does an update that sums values which
are zero in the padding. Other updates do: a mean divides by the number of elements, noise depends
on the shape, and a padded matrix is another matrix. Such an update gets arrays of the true shape
(`OnTrueShapes`).

For the proof the update is traced twice, on true and on stored (padded) shapes. Both programs must
have the same operations and constants. The proof then follows the second program, and tracks for
each value which dimensions are padded, for which parameter, and the value in the padding if it is
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.typing import ArrayLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation, Operand
from zerojax.optim.optimizer import map_state
from zerojax.optim.transforms import extra_arguments

Structs = Mapping[str, jax.ShapeDtypeStruct]

UNIFORM = "uniform"
"""Marker of a dimension along which all elements of an array are equal."""
PLAIN = "plain"
"""Marker of a dimension that is not padded."""
_ZERO = np.float32(0)
_NOTHING = {"reduce_sum": 0, "reduce_or": 0, "reduce_and": 1, "reduce_prod": 1}
"""{primitive of a reduction: padding value that does not change its result}."""
_REDUCTIONS = {*_NOTHING, "reduce_max", "reduce_min"}
_PASSED_ON = {"optimization_barrier"}
Convert = Callable[[str, jax.Array], jax.Array]
"""Function (name of a parameter, array with its true or stored shape) that returns the array in the
other shape."""


class NotProven(Exception):
    """Raised if an update may depend on padding; the message names the operation."""


@dataclass(frozen=True)
class _Value:
    """Known facts about the padding of one array in a traced program.

    Attributes:
      dims: for each dimension: `UNIFORM`, `PLAIN`, or (name, dimension) of the padded parameter.
      padding: value of all padding, or of every element if the array is uniform; None if
        unknown.
    """

    dims: tuple[Any, ...]
    padding: Any = None

    @property
    def padded(self) -> frozenset[Any]:
        return frozenset(dim for dim in self.dims if dim not in (UNIFORM, PLAIN))

    @property
    def is_uniform(self) -> bool:
        return all(dim == UNIFORM for dim in self.dims)

    @property
    def is_zero(self) -> bool:
        return self.padding is not None and bool(self.padding == 0)


def why_padding_shows(
    tx: optax.GradientTransformation,
    true: Structs,
    stored: Structs,
    dims: Mapping[str, Collection[int]],
    layers: frozenset[str],
    *,
    stays_zero: bool = False,
    traced: ClosedJaxpr | None = None,
) -> str | None:
    """Returns why an optimizer's update may depend on padding; None if it is proven not to.

    Args:
      tx: optimizer.
      true, stored: {name: struct} of the trained parameters, with true (unpadded) shapes and with
        stored (padded) shapes.
      dims: {name: dimensions in which the two shapes differ, in size or in the order of rows}.
      layers: names of parameters whose dimension 0 counts layers.
      stays_zero: whether parameters must stay zero in their padding.
      traced: result of `trace_update` on the true shapes, if already computed.

    Returns:
      None if the update of padded arrays equals the update of arrays of true shapes. Otherwise the
      operation that prevents the proof, as a short phrase such as "reduce_max of padded arrays".
    """
    try:
        _Proof(tx, (true, stored), dims, layers, traced).run(stays_zero=stays_zero)
    except NotProven as reason:
        return str(reason)
    return None


class _Proof:
    """Traces `init` and `update` of an optimizer on true and on stored shapes, for the proof."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        shapes: tuple[Structs, Structs],
        dims: Mapping[str, Collection[int]],
        layers: frozenset[str],
        traced: ClosedJaxpr | None,
    ) -> None:
        self._dims, stored = dims, shapes[1]
        states = [jax.eval_shape(tx.init, dict(params)) for params in shapes]
        # Sorted, as JAX flattens a dict.
        self._params = [self._of_param(name, x) for name, x in sorted(stored.items())]
        owners = map_state(tx, lambda _, name: name, states[1], {name: name for name in stored})
        self._state = []
        leaves = [jax.tree.leaves(tree) for tree in (*states, owners)]
        for before, after, owner in zip(*leaves, strict=True):
            if owner and after.shape == stored[owner].shape:
                self._state.append(self._of_param(owner, after))
            elif before.shape == after.shape:
                self._state.append(_plain(after))
            else:
                raise NotProven(f"state of shape {list(before.shape)} for true shapes")
        self._inits = [jax.make_jaxpr(tx.init)(dict(params)) for params in shapes]
        self._updates = [traced or trace_update(tx, shapes[0], layers)]
        self._updates.append(trace_update(tx, stored, layers))

    def _of_param(self, name: str, leaf: jax.ShapeDtypeStruct) -> _Value:
        padded = self._dims.get(name, ())
        dims = tuple((name, at) if at in padded else PLAIN for at in range(len(leaf.shape)))
        return _Value(dims, _ZERO if padded else None)

    def run(self, *, stays_zero: bool) -> None:
        """Runs the proof: assumes that all padding is zero, and drops assumptions that fail, until
        the remaining ones hold.
        """
        num_params, expected = len(self._params), [*self._params, *self._state]
        zero = [True] * len(expected)
        born = _walk(self._inits, self._params)
        for number, (value, wanted) in enumerate(zip(born, self._state, strict=True), num_params):
            _check_follows(value, wanted)
            zero[number] = value.is_zero or not wanted.padded
        scalars = [_Value(()), _Value(())]
        # Each pass can only drop assumptions, so the loop ends.
        while True:
            now = [x if z else _Value(x.dims) for x, z in zip(expected, zero, strict=True)]
            params, state = now[:num_params], now[num_params:]
            # The first inputs are the gradients: their padding is taken as 0 in every pass, like
            # that of parameters at the start.
            found = _walk(self._updates, [*self._params, *state, *params, *scalars])
            for value, wanted in zip(found, expected, strict=True):
                _check_follows(value, wanted)
            after = [
                z and (value.is_zero or not wanted.padded)
                for z, value, wanted in zip(zero, found, expected, strict=True)
            ]
            if after == zero:
                break
            zero = after
        if stays_zero and not all(zero[:num_params]):
            raise NotProven("padding that does not stay zero")


def trace_update(
    tx: optax.GradientTransformation, params: Structs, layers: frozenset[str]
) -> ClosedJaxpr:
    """Traces `(gradients, state, parameters, norm, loss) -> (updates, state)`."""
    params = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    update = optax.with_extra_args_support(tx).update

    def run(grads: Tree, state: Tree, params: Tree, norm: jax.Array, loss: jax.Array) -> Any:
        return update(grads, state, params, **extra_arguments(grads, norm, loss, layers))

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(tx.init, params)
    return jax.make_jaxpr(run)(params, state, params, scalar, scalar)


def _plain(leaf: jax.ShapeDtypeStruct) -> _Value:
    return _Value((PLAIN,) * len(leaf.shape))


def _check_follows(value: _Value, wanted: _Value) -> None:
    for dim, other in zip(value.dims, wanted.dims, strict=True):
        if dim not in (other, UNIFORM):
            raise NotProven("a result whose dimensions differ from its parameter's")


# Following both programs


def _walk(programs: Sequence[Any], inputs: Sequence[_Value]) -> list[_Value]:
    """Returns the known facts about the results of a program.

    Args:
      programs: the program traced on true shapes, and the program traced on stored shapes.
      inputs: known facts about the inputs of the second program.
    """
    true, stored = programs
    if len(true.consts) != len(stored.consts):
        raise NotProven("constants that differ for padded shapes")
    consts = [_of_const(*pair) for pair in zip(true.consts, stored.consts, strict=True)]
    return _walk_jaxpr(true.jaxpr, stored.jaxpr, consts, inputs)


def _of_const(one: ArrayLike, other: ArrayLike) -> _Value:
    shapes = jnp.shape(one), jnp.shape(other)
    if shapes[0] != shapes[1]:
        raise NotProven("constants that differ for padded shapes")
    if one is not other and not _same_bits(one, other):
        raise NotProven("constants that differ for padded shapes")
    # Only scalars are followed by value.
    if shapes[0] or jnp.issubdtype(jnp.result_type(other), jax.dtypes.prng_key):
        return _Value((PLAIN,) * len(shapes[0]))
    return _Value((), np.asarray(other))


def _same_bits(one: Any, other: Any) -> bool:
    try:
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    except (AttributeError, TypeError):
        return False


def _walk_jaxpr(
    true: Jaxpr, stored: Jaxpr, consts: Sequence[_Value], inputs: Sequence[_Value]
) -> list[_Value]:
    values: dict[Any, _Value] = {}
    twins: dict[Any, Any] = {}

    def define(one: Sequence[Any], other: Sequence[Any], found: Sequence[_Value]) -> None:
        for twin, variable, value in zip(one, other, found, strict=True):
            twins[twin] = variable
            values[variable] = value

    def read(one: Operand, other: Operand) -> _Value:
        if isinstance(other, Literal) and isinstance(one, Literal):
            return _of_const(np.asarray(one.val), np.asarray(other.val))
        # The same operations are not enough: they must also read the same results.
        if isinstance(other, Literal) or isinstance(one, Literal) or twins[one] is not other:
            raise NotProven("a program that differs for padded shapes")
        return values[other]

    define(true.constvars, stored.constvars, consts)
    define(true.invars, stored.invars, inputs)
    if len(true.eqns) != len(stored.eqns):
        raise NotProven("a program that differs for padded shapes")
    for one, other in zip(true.eqns, stored.eqns, strict=True):
        if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
            raise NotProven("a program that differs for padded shapes")
        operands = [read(*pair) for pair in zip(one.invars, other.invars, strict=True)]
        define(one.outvars, other.outvars, _of_equation(one, other, operands))
    return [read(*pair) for pair in zip(true.outvars, stored.outvars, strict=True)]


def _of_equation(one: Equation, other: Equation, operands: list[_Value]) -> list[_Value]:
    name = other.primitive.name
    if name in _ELEMENTWISE:
        if _settings(one) != _settings(other):
            raise NotProven("a program that differs for padded shapes")
        return [_of_elements(other, operands)]
    if name in _PASSED_ON:
        return operands
    if name in _REDUCTIONS:
        return [_of_reduction(one, other, operands[0])]
    if name in _SHAPES:
        return [_SHAPES[name](one, other, operands)]
    if name == "cond":
        return _of_cond(one, other, operands)
    inner = [_inner(equation) for equation in (one, other)]
    if None not in inner:
        return _walk((inner[0], inner[1]), operands)
    if any(operand.padded for operand in operands):
        raise NotProven(f"{name} of padded arrays")
    shapes = [[x.aval.shape for x in (*e.invars, *e.outvars)] for e in (one, other)]
    if shapes[0] != shapes[1]:
        raise NotProven(f"{name} in another shape")
    return [_Value((PLAIN,) * x.aval.ndim) for x in other.outvars]


def _settings(equation: Equation) -> dict[str, str]:
    return {key: str(value) for key, value in equation.params.items() if key != "sharding"}


def _same(one: Equation, other: Equation, setting: str) -> Any:
    if one.params[setting] != other.params[setting]:
        raise NotProven("a program that differs for padded shapes")
    return other.params[setting]


def _inner(equation: Equation) -> Any:
    """Returns the closed jaxpr that an equation calls with exactly its operands, or None.

    None for a loop: its jaxpr gets slices of the operands, or runs again on its results.
    """
    if equation.primitive.name in ("scan", "while"):
        return None
    for value in equation.params.values():
        program = getattr(value, "jaxpr", value)
        if hasattr(program, "eqns") and len(program.invars) == len(equation.invars):
            return value if hasattr(value, "consts") else ClosedJaxpr(program, ())
    return None


def _of_cond(one: Equation, other: Equation, operands: list[_Value]) -> list[_Value]:
    pairs = zip(one.params["branches"], other.params["branches"], strict=True)
    results = [_walk(pair, operands[1:]) for pair in pairs]
    if operands[0].padded:
        raise NotProven("cond of padded arrays")
    return [_choose(list(each)) for each in zip(*results, strict=True)]


def _choose(values: list[_Value]) -> _Value:
    """Returns the facts that all values of a selection or of branches have in common."""
    dims = _join([value.dims for value in values])
    known = [value.padding for value in values]
    same = all(x is not None and x == known[0] for x in known)
    return _Value(dims, known[0] if same else None)


def _join(dims: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Combines the padded dimensions of the operands of an elementwise operation; scalars fit any
    array."""
    longest = max(map(len, dims), default=0)
    result = []
    for each in zip(*(d for d in dims if len(d) == longest), strict=True):
        kinds = set(each) - {UNIFORM}
        if len(kinds) > 1:
            raise NotProven("padded arrays combined with others")
        result.append(kinds.pop() if kinds else UNIFORM)
    return tuple(result)


def _of_elements(equation: Equation, operands: list[_Value]) -> _Value:
    name = equation.primitive.name
    dims = _join([operand.dims for operand in operands])
    known = [operand.padding for operand in operands]
    if all(x is not None for x in known):
        return _Value(dims, _evaluate(equation, known))
    first, last = operands[0], operands[-1]
    # A constant operand for which the result is infinite or NaN makes it so in all elements.
    if name == "mul" and any(x.is_zero and not y.padded for x, y in ((first, last), (last, first))):
        return _Value(dims, _zero_of(equation))
    if name == "div" and first.is_zero and not last.padded:
        return _Value(dims, _zero_of(equation))
    if name == "select_n" and not first.padded:
        return _Value(dims, _choose([_Value((), x.padding) for x in operands[1:]]).padding)
    return _Value(dims)


def _zero_of(equation: Equation) -> Any:
    return np.zeros((), equation.outvars[0].aval.dtype)


def _evaluate(equation: Equation, known: list[Any]) -> Any:
    """Evaluates an elementwise operation on known numbers; None for an unsupported operation."""
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    if name == "integer_pow":
        known = [*known, equation.params["y"]]
    function = _NUMPY.get("pow" if name == "integer_pow" else name)
    whole = jnp.issubdtype(dtype, jnp.integer)
    # For integers these functions of NumPy compute something else: a quotient that is not an
    # integer, logical in place of bitwise results.
    if function is None or (whole and name in ("div", "pow", "integer_pow", "not", "or", "and")):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(function(*(np.asarray(x) for x in known))).astype(dtype)


def _of_reduction(one: Equation, equation: Equation, operand: _Value) -> _Value:
    name, axes = equation.primitive.name, _same(one, equation, "axes")
    kept = tuple(dim for at, dim in enumerate(operand.dims) if at not in axes)
    taken = [dim for at, dim in enumerate(operand.dims) if at in axes]
    over_padding = any(dim not in (UNIFORM, PLAIN) for dim in taken)
    if over_padding and not (name in _NOTHING and _is(operand.padding, _NOTHING[name])):
        raise NotProven(f"{name} of padded arrays")
    sizes = [[e.invars[0].aval.shape[at] for at in axes] for e in (one, equation)]
    if UNIFORM in taken and sizes[0] != sizes[1]:  # the number of terms depends on the shape
        raise NotProven(f"{name} of a constant in another shape")
    unchanged = name in _NOTHING and _is(operand.padding, _NOTHING[name])
    return _Value(kept, operand.padding if unchanged and _Value(kept).padded else None)


def _is(value: np.ndarray | np.generic | None, constant: float) -> bool:
    return value is not None and bool(value == constant)


def _broadcast(one: Equation, other: Equation, operands: list[_Value]) -> _Value:
    operand, places = operands[0], _same(one, other, "broadcast_dimensions")
    before, shape = other.invars[0].aval.shape, other.outvars[0].aval.shape
    dims: list[Any] = [UNIFORM] * len(shape)
    for at, place in enumerate(places):
        # A dimension that is repeated has equal elements.
        if before[at] == shape[place]:
            dims[place] = operand.dims[at]
    return _Value(tuple(dims), operand.padding)


def _squeeze(one: Equation, other: Equation, operands: list[_Value]) -> _Value:
    gone = _same(one, other, "dimensions")
    kept = tuple(dim for at, dim in enumerate(operands[0].dims) if at not in gone)
    return _Value(kept, operands[0].padding)


def _transpose(one: Equation, other: Equation, operands: list[_Value]) -> _Value:
    order = _same(one, other, "permutation")
    return _Value(tuple(operands[0].dims[at] for at in order), operands[0].padding)


def _reshape(one: Equation, other: Equation, operands: list[_Value]) -> _Value:
    operand = operands[0]
    before, after = other.invars[0].aval.shape, other.outvars[0].aval.shape
    if operand.is_uniform:
        return _Value((UNIFORM,) * len(after), operand.padding)
    if not operand.padded and one.outvars[0].aval.shape == after:
        return _Value((PLAIN,) * len(after), operand.padding)
    # Dimensions of size 1 may come and go; all others must stay.
    kept = [dim for dim, size in zip(operand.dims, before, strict=True) if size != 1]
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        raise NotProven("reshape of padded arrays")
    left = iter(kept)
    return _Value(tuple(UNIFORM if size == 1 else next(left) for size in after), operand.padding)


_SHAPES: dict[str, Callable[..., _Value]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "div": np.divide,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "name": lambda x: x,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "and": np.logical_and,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: cases[int(which)],
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
}
"""NumPy functions that evaluate operations on known numbers."""
_ELEMENTWISE = {*_NUMPY} | {
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "sin", "sinh"),
    *("tan", "tanh", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "logistic", "integer_pow"),
    *("erf", "erf_inv", "erfc", "ceil", "floor", "round", "rem", "clamp", "nextafter", "xor"),
    *("complex", "conj", "imag", "real", "copy_p", "reduce_precision"),
}
"""Names of JAX's elementwise operations."""


class OnTrueShapes(optax.GradientTransformationExtraArgs):
    """Transformation on stored (padded) arrays that computes on arrays of the true shapes.

    Arrays of the state that have a parameter's shape are stored like the parameter; all others keep
    the shape that the transformation gives them.

    Attributes:
      inner: transformation that computes on true shapes.
      owners: tree of the state's structure: the name of a parameter for each array with its shape,
        else "".
    """

    inner: optax.GradientTransformationExtraArgs
    owners: Tree

    def __new__(
        cls,
        tx: optax.GradientTransformation,
        true: Mapping[str, jax.ShapeDtypeStruct],
        stored: Mapping[str, tuple[int, ...]],
        *,
        cut: Convert,
        pad: Convert,
    ) -> OnTrueShapes:
        """Wraps a transformation for true (unpadded) shapes to accept arrays of stored (padded)
        shapes.

        Args:
          tx: transformation to wrap.
          true: {name: true shape and dtype} of all trained parameters.
          stored: {name: stored shape}.
          cut: traceable function that converts from the stored shape to the true shape.
          pad: traceable function that converts back, padding with zeros.
        """
        inner = optax.with_extra_args_support(tx)
        state = jax.eval_shape(inner.init, dict(true))

        def owner(leaf: jax.ShapeDtypeStruct, name: str) -> str:
            return name if leaf.shape == true[name].shape else ""

        owners = map_state(inner, owner, state, {name: name for name in true})

        def cut_all(arrays: Mapping[str, Any]) -> dict[str, Any]:
            return {name: cut(name, x) for name, x in arrays.items()}

        def pad_state(state: Tree) -> Tree:
            return jax.tree.map(lambda name, x: pad(name, x) if name else x, owners, state)

        def init(params: Tree) -> Tree:
            shapes = {name: getattr(x, "shape", None) for name, x in params.items()}
            if shapes != dict(stored):  # true shapes (the portable form), or optax's placeholders
                return inner.init(params)
            return pad_state(inner.init(cut_all(params)))

        def update(
            updates: Tree, state: Tree, params: Tree = None, **extra: Any
        ) -> tuple[dict[str, Any], Tree]:
            state = jax.tree.map(lambda name, x: cut(name, x) if name else x, owners, state)
            # The other extra arguments are numbers and names (`extra_arguments`).
            if "grad" in extra:
                extra["grad"] = cut_all(extra["grad"])
            params = None if params is None else cut_all(params)
            found, state = inner.update(cut_all(updates), state, params, **extra)
            new: Any = found
            return {name: pad(name, x) for name, x in new.items()}, pad_state(state)

        self = super().__new__(cls, init, update)
        self.inner, self.owners = inner, owners
        return self
