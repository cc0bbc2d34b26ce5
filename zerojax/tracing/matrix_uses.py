"""Finds how a traced loss uses each parameter as a matrix: products, experts, routers, tables,
heads.

The module follows each stored parameter, or one layer of it, to the products that read it. It
depends only on programs and shapes, not on an optimizer or a mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.extend.core import Jaxpr
from jax.extend.core import Literal as Constant

from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import expert_call, expert_weights_ndim, inner_programs
from zerojax.tracing.jaxpr import split_scan

Role = Literal["matrix", "expert", "router", "table", "head", "other"]

_SAME = frozenset(
    {
        "name",
        "convert_element_type",
        "optimization_barrier",
        "copy",
        "copy_p",
        "sharding_constraint",
    }
)
_NOBODY: frozenset[str] = frozenset()


class MatrixDims(NamedTuple):
    """Dimensions of a stored parameter that act as rows and columns in a matrix product.

    All remaining dimensions count matrices (layers or experts, for example).

    Attributes:
      rows: dimensions that the product sums over, ascending.
      columns: dimensions that the result keeps, ascending.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]


@dataclasses.dataclass
class ParameterUse:
    """Uses of one parameter in a traced loss.

    Attributes:
      shape: shape of the stored parameter.
      products: different products that read the parameter.
      expert_dim: dimension that counts experts, if the parameter is a weight of `zerojax.experts`;
        otherwise None.
      expert_ndim: number of dimensions of the weights of one expert.
      is_router: whether the gates of a call of `zerojax.experts` are computed from the parameter's
        product, without another product in between.
      is_table: whether rows of the parameter are looked up.
      is_head: whether the loss is computed from the parameter's product, without another product in
        between.
      others: names of other primitives that read the parameter.
    """

    shape: tuple[int, ...]
    products: set[MatrixDims] = dataclasses.field(default_factory=set)
    expert_dim: int | None = None
    expert_ndim: int = 0
    is_router: bool = False
    is_table: bool = False
    is_head: bool = False
    others: set[str] = dataclasses.field(default_factory=set)

    @property
    def role(self) -> Role:
        """Role of the parameter in the loss; "other" if no single product shows its matrices."""
        if self.expert_dim is not None:
            return "expert"
        if self.is_router:
            return "router"
        if self.is_table:
            return "table"
        if self.product is None:
            return "other"
        return "head" if self.is_head else "matrix"

    @property
    def product(self) -> MatrixDims | None:
        """Dimensions of the parameter's matrices in its single product; None if they are ambiguous.

        It is also None for vectors, and for matrices with a single row or column.
        """
        if len(self.products) != 1 or self.others:
            return None
        (product,) = self.products
        sides = (math.prod(self.shape[dim] for dim in side) for side in product)
        return product if min(sides) > 1 else None


def find_matrix_uses(
    program: Jaxpr, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ParameterUse]:
    """Finds how a traced loss uses each parameter as matrices: {name: uses of the parameter}.

    Args:
      program: traced loss. Its first inputs are the parameters, sorted by name; its first output is
        the loss or the sum of losses.
      shapes: {name: shape} of the stored parameters.
    """
    walk = _Walk({name: ParameterUse(tuple(shape)) for name, shape in shapes.items()})
    names = sorted(shapes)
    inputs = [
        _Value(_Held(name, tuple((dim,) for dim in range(len(shapes[name])))), _NOBODY)
        for name in names
    ]
    rest = len(program.invars) - len(names)
    outputs = walk.outputs(program, [*inputs, *[_NOTHING] * rest])
    for name in outputs[0].made_by:
        walk.uses[name].is_head = True
    return walk.uses


class _Held(NamedTuple):
    """The parameter whose values a variable contains.

    Attributes:
      name: name of the parameter.
      dims: for each dimension of the variable, the parameter's dimensions that it joins, outermost
        first.
    """

    name: str
    dims: tuple[tuple[int, ...], ...]


class _Value(NamedTuple):
    """Facts about one variable of the program.

    Attributes:
      held: parameter whose values the variable holds, all or some of them; None: another value.
      made_by: parameters from whose product or row the variable is computed, without another
        product in between.
    """

    held: _Held | None
    made_by: frozenset[str]


_NOTHING = _Value(None, _NOBODY)


class _Walk:
    """Traverses a program and collects the uses of parameters."""

    def __init__(self, uses: dict[str, ParameterUse]) -> None:
        self.uses = uses

    def outputs(self, program: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """Returns the values of the outputs of a program."""
        values: dict[Any, _Value] = dict(zip(program.invars, inputs, strict=True))

        def value_of(atom: Operand) -> _Value:
            return _NOTHING if isinstance(atom, Constant) else values.get(atom, _NOTHING)

        for equation in program.eqns:
            operands = [value_of(atom) for atom in equation.invars]
            values |= zip(equation.outvars, self._equation(equation, operands), strict=True)
        return [value_of(atom) for atom in program.outvars]

    def _equation(self, equation: Equation, operands: list[_Value]) -> list[_Value]:
        kind, outputs = equation.primitive.name, len(equation.outvars)
        if kind == "name":
            self._mark(equation, operands[0])
        if kind in _SAME:
            return operands
        if kind == "dot_general":
            return [self._product(equation, operands)]
        if kind == "scan":
            return self._scan(equation, operands)
        if kind == "cond":
            branches = equation.params["branches"]
            return _joined([self.outputs(branch.jaxpr, operands[1:]) for branch in branches])
        if kind == "while":
            first, second = (equation.params[f"{part}_nconsts"] for part in ("cond", "body"))
            consts, carry = operands[first : first + second], operands[first + second :]
            return self._repeated(equation.params["body_jaxpr"].jaxpr, consts, carry, [])
        inner = list(inner_programs(equation.params))
        # The program of a kernel takes memory, not the values of the operands.
        if len(inner) == 1 and len(inner[0].invars) == len(operands) and kind != "pallas_call":
            return self.outputs(inner[0], operands)
        made_by = frozenset().union(*(value.made_by for value in operands))
        held = operands[0].held if operands else None
        moved = None if held is None else self._moved(equation, held)
        if moved is not None:
            return [_Value(moved, made_by)] * outputs
        for value in operands:
            if value.held is not None:
                made_by |= self._note(equation, value.held)
        return [_Value(None, made_by)] * outputs

    def _mark(self, equation: Equation, value: _Value) -> None:
        """Records the uses that a mark of `zerojax.experts` shows."""
        ndim = expert_weights_ndim(equation)
        if ndim is not None and value.held is not None:
            name, dims = value.held
            # The first dimension as the model sees it; `vmap` adds dimensions before it.
            use, at = self.uses[name], dims[len(dims) - ndim] if ndim <= len(dims) else ()
            if len(at) == 1:
                use.expert_dim, use.expert_ndim = at[0], ndim - 1
        numbers = expert_call(equation)
        for name in value.made_by if numbers is not None else ():
            use = self.uses[name]
            # A product with another number of columns belongs to the values that the gates scale.
            sizes = {math.prod(use.shape[dim] for dim in one.columns) for one in use.products}
            use.is_router |= numbers is not None and numbers[1] in sizes

    def _note(self, equation: Equation, held: _Held) -> frozenset[str]:
        """Records a use that is not a product; returns the parameter if its rows are looked up."""
        use = self.uses[held.name]
        if equation.primitive.name in ("gather", "take"):
            use.is_table = True
            return frozenset({held.name})
        use.others.add(equation.primitive.name)
        return _NOBODY

    def _product(self, equation: Equation, operands: list[_Value]) -> _Value:
        summed, counted = equation.params["dimension_numbers"]
        made_by = set()
        for value, contracted, batched in zip(operands, summed, counted, strict=True):
            if value.held is None:
                continue
            name, dims = value.held
            rows = sorted(dim for at in contracted for dim in dims[at])
            kept = [at for at in range(len(dims)) if at not in contracted and at not in batched]
            columns = sorted(dim for at in kept for dim in dims[at])
            self.uses[name].products.add(MatrixDims(tuple(rows), tuple(columns)))
            made_by.add(name)
        return _Value(None, frozenset(made_by))

    def _scan(self, equation: Equation, operands: list[_Value]) -> list[_Value]:
        num_consts, num_carry = split_scan(equation)
        consts, carry = operands[:num_consts], operands[num_consts:][:num_carry]
        rows = [_row(value) for value in operands[num_consts + num_carry :]]
        body = equation.params["jaxpr"].jaxpr
        outputs = self._repeated(body, consts, carry, rows)
        # Stacked outputs have one more dimension than the values in the body.
        return [*outputs[:num_carry], *(_Value(None, x.made_by) for x in outputs[num_carry:])]

    def _repeated(
        self, body: Jaxpr, consts: list[_Value], carry: list[_Value], rows: list[_Value]
    ) -> list[_Value]:
        """Follows the body of a loop until its carry no longer changes; returns the outputs of the
        body.
        """
        while True:
            outputs = self.outputs(body, [*consts, *carry, *rows])
            after = _joined([carry, outputs[: len(carry)]])
            if after == carry:
                return [*after, *outputs[len(carry) :]]
            for before, now in zip(carry, after, strict=True):
                if before.held is not None and now.held is None:
                    self.uses[before.held.name].others.add("a loop's carry")
            carry = after

    def _moved(self, equation: Equation, held: _Held) -> _Held | None:
        """Returns the `_Held` after an operation that only rearranges elements; None for other
        operations.
        """
        name, dims = held
        kind, params = equation.primitive.name, equation.params
        if kind == "transpose":
            return _Held(name, tuple(dims[at] for at in params["permutation"]))
        if kind == "squeeze":
            left = [at for at in range(len(dims)) if at not in params["dimensions"]]
            return _Held(name, tuple(dims[at] for at in left))
        if kind in ("slice", "dynamic_slice"):
            return _Held(name, dims)
        if kind == "gather" and _takes_one_layer(equation):
            return _Held(name, dims[1:])
        if kind == "broadcast_in_dim":
            return _broadcast(equation, held)
        if kind == "reshape":
            return _reshaped(equation, held, self.uses[name].shape)
        return None


def _row(value: _Value) -> _Value:
    """Returns the facts about one iteration's slice of a scanned array."""
    if value.held is None:
        return value
    return _Value(_Held(value.held.name, value.held.dims[1:]), value.made_by)


def _joined(alternatives: Sequence[Sequence[_Value]]) -> list[_Value]:
    """Merges the facts about alternative values, such as the results of branches."""
    joined = []
    for values in zip(*alternatives, strict=True):
        held = {value.held for value in values}
        made_by = frozenset().union(*(value.made_by for value in values))
        joined.append(_Value(held.pop() if len(held) == 1 else None, made_by))
    return joined


def _takes_one_layer(equation: Equation) -> bool:
    """Returns whether a gather takes one row, as `stack[i]` does with a traced i."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    operand, indices = equation.invars[0].aval, equation.invars[1].aval
    return (
        indices.shape == (1,)
        and tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(sizes) == (1, *operand.shape[1:])
    )


def _broadcast(equation: Equation, held: _Held) -> _Held | None:
    """Returns the `_Held` after a broadcast that adds dimensions of size 1; None if elements are
    repeated.
    """
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if math.prod(before) != math.prod(after):
        return None
    places = equation.params["broadcast_dimensions"]
    dims: list[tuple[int, ...]] = [()] * len(after)
    for at, place in enumerate(places):
        dims[place] = held.dims[at]
    return _Held(held.name, tuple(dims))


def _reshaped(equation: Equation, held: _Held, shape: Sequence[int]) -> _Held | None:
    """Returns the `_Held` after a reshape that joins or separates complete dimensions; else
    None.
    """
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    parts = [(dim, shape[dim]) for dims in held.dims for dim in dims]
    if equation.params.get("dimensions") is not None or any(
        # The parts of a joined dimension are not known any more after it was sliced.
        size != math.prod(shape[dim] for dim in dims)
        for size, dims in zip(before, held.dims, strict=True)
        if len(dims) > 1
    ):
        return None
    # Slices are shorter than the parameter.
    short = {dims[0]: size for size, dims in zip(before, held.dims, strict=True) if len(dims) == 1}
    sizes = [(dim, short.get(dim, size)) for dim, size in parts]
    dims: list[tuple[int, ...]] = []
    for size in after:
        taken, product = [], 1
        while product < size and sizes:
            dim, length = sizes.pop(0)
            taken.append(dim)
            product *= length
        if product != size:
            return None
        dims.append(tuple(taken))
    return _Held(held.name, tuple(dims)) if all(n == 1 for _, n in sizes) else None
