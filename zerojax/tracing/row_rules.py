"""Rules for `batch_rows`: how the result of a primitive depends on the rows of a batch.

The result of a primitive without a rule is `Other`.
"""

from __future__ import annotations

import math

from zerojax.operators.equations import Equation
from zerojax.tracing.row_dependence import FIXED, OTHER, Dependence, Fixed, Rows, Total, join

_ELEMENTWISE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2
expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p log2
logistic lt max min mul mulhi name ne neg nextafter not one_minus_square or polygamma
population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor zeta
"""
_REDUCTION_NAMES = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
"""
_MATRIX_NAMES = "cholesky eigh lu qr svd triangular_solve"
_SCATTER_NAMES = "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub"
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
"""Primitives with one output, computed element by element from inputs of the same shape."""
REDUCTIONS = frozenset(_REDUCTION_NAMES.split())
"""Primitives that reduce the dimensions `axes` of their only input."""
_WINDOWS = frozenset(f"reduce_window{kind}" for kind in ("", "_max", "_min", "_sum"))
_SCATTERS = frozenset(_SCATTER_NAMES.split())
# The last two dimensions are the matrix; all earlier dimensions are batch dimensions.
_OF_MATRICES = frozenset(_MATRIX_NAMES.split())
SEVERAL_OUTPUTS = frozenset(["sort", "split", "top_k", "unstack"]) | _OF_MATRICES
"""Primitives with several outputs, which all have the same dependence."""
_ALONG_A_DIM = {
    "concatenate": "dimension",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "sort": "dimension",
    "split": "axis",
}


def rows_after(equation: Equation, operands: list[Dependence], num_rows: int) -> Dependence:
    """Returns the dependence of each output of an equation without a nested program.

    Args:
      equation: equation of a traced program.
      operands: dependence of each operand; at least one is `Rows`, and none is `Total`.
      num_rows: number of rows of the batch.
    """
    kind = equation.primitive.name
    if kind in ELEMENTWISE:
        return join([operand for operand in operands if not isinstance(operand, Fixed)])
    if kind == "reshape":
        return _reshape(equation, operands, num_rows)
    rule = _RULES.get(kind)
    return OTHER if rule is None else rule(equation, operands)


def pairs_rows(equation: Equation, operands: list[Dependence]) -> bool:
    """Returns whether an equation computes a value for each pair of rows.

    An example is the matrix of all products of two rows.
    """
    rows = [
        (place, operand.dim) for place, operand in enumerate(operands) if isinstance(operand, Rows)
    ]
    if equation.primitive.name in ELEMENTWISE:
        return len({dim for _, dim in rows}) > 1
    if equation.primitive.name != "dot_general" or len(rows) < 2:
        return False
    contracted, batched = equation.params["dimension_numbers"]
    return all(dim not in (*contracted[place], *batched[place]) for place, dim in rows)


def _reduction(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    assert isinstance(rows, Rows)
    axes = equation.params["axes"]
    if rows.dim in axes:
        if equation.primitive.name != "reduce_sum":
            return OTHER
        before, after = equation.invars[0].aval, equation.outvars[0].aval
        return Total(num_added=before.size // max(after.size, 1))
    return Rows(rows.dim - sum(axis < rows.dim for axis in axes))


def _along_a_dim(equation: Equation, operands: list[Dependence]) -> Dependence:
    rows = join([operand for operand in operands if not isinstance(operand, Fixed)])
    along = equation.params[_ALONG_A_DIM[equation.primitive.name]]
    return rows if isinstance(rows, Rows) and rows.dim != along else OTHER


def _reshape(equation: Equation, operands: list[Dependence], num_rows: int) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for a reshape.

    The result is `Rows` if the reshape keeps each row as one block. For this, the sizes of the
    dimensions before the rows must keep their product.
    """
    (rows, *_) = operands
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    # With `dimensions` the operand is transposed first.
    if not isinstance(rows, Rows) or equation.params.get("dimensions") is not None:
        return OTHER
    before = math.prod(old[: rows.dim])
    for dim, size in enumerate(new):
        fits = math.prod(new[:dim]) == before and size % num_rows == 0
        # With a single row any size is a multiple of the number of rows; then a dimension of size
        # 1 has the rows only if their dimension had size 1 before.
        if fits and (size > 1 or old[rows.dim] == 1):
            return Rows(dim)
    return OTHER


def _reduce(equation: Equation, operands: list[Dependence]) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for a custom
    reduction.

    The result is `Rows` if the reduction stays within each row.
    """
    rows, *rest = operands
    removed = equation.params["dimensions"]
    fixed = all(isinstance(operand, Fixed) for operand in rest)
    if not (isinstance(rows, Rows) and fixed) or rows.dim in removed:
        return OTHER
    return Rows(rows.dim - sum(dim < rows.dim for dim in removed))


def _window(equation: Equation, operands: list[Dependence]) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for windows.

    The result is `Rows` if windows stay within each row, as in pooling.
    """
    rows, *rest = operands
    if not isinstance(rows, Rows) or any(not isinstance(operand, Fixed) for operand in rest):
        return OTHER
    dim, params = rows.dim, equation.params
    # Strides leave out rows; padding and dilation add some.
    one_row = params["window_dimensions"][dim] == 1 == params["window_strides"][dim]
    dilated = params.get("base_dilation")
    unpadded = tuple(params["padding"][dim]) == (0, 0) and (not dilated or dilated[dim] == 1)
    return rows if one_row and unpadded else OTHER


def _stack(equation: Equation, operands: list[Dependence]) -> Dependence:
    rows = join([operand for operand in operands if not isinstance(operand, Fixed)])
    axis = equation.params["axis"] % equation.outvars[0].aval.ndim
    return Rows(rows.dim + (axis <= rows.dim)) if isinstance(rows, Rows) else OTHER


def _unstack(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    assert isinstance(rows, Rows)
    axis = equation.params["axis"] % equation.invars[0].aval.ndim
    return OTHER if rows.dim == axis else Rows(rows.dim - (axis < rows.dim))


def _of_matrices(equation: Equation, operands: list[Dependence]) -> Dependence:
    rows = join([operand for operand in operands if not isinstance(operand, Fixed)])
    ndims = [atom.aval.ndim for atom in equation.invars]
    return rows if isinstance(rows, Rows) and rows.dim < min(ndims) - 2 else OTHER


def _fft(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    kept = equation.invars[0].aval.ndim - len(equation.params["fft_lengths"])
    return rows if isinstance(rows, Rows) and rows.dim < kept else OTHER


def _scatter(equation: Equation, operands: list[Dependence]) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for a scatter.

    The result is `Rows` if each row of the updates is written to the same row.
    """
    (array, index, updates), numbers = operands, equation.params["dimension_numbers"]
    rows = array if isinstance(array, Rows) else None
    own = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    shapes = [atom.aval.shape for atom in equation.invars]
    windows = [
        dim for dim in range(len(shapes[0])) if dim not in (*numbers.inserted_window_dims, *own[0])
    ]
    batch = [dim for dim in range(len(shapes[2])) if dim not in numbers.update_window_dims]
    fits: list[tuple[int, Dependence, Dependence]] = [  # for array, index, updates
        (a, Rows(b), Rows(batch[b])) for a, b in zip(*own, strict=True)
    ]
    for dim, place in zip(windows, numbers.update_window_dims, strict=True):
        if dim not in numbers.scatter_dims_to_operand_dims and shapes[0][dim] == shapes[2][place]:
            fits.append((dim, FIXED, Rows(place)))
    for dim, of_index, of_updates in fits:
        known = [(array, Rows(dim)), (index, of_index), (updates, of_updates)]
        if all(isinstance(operand, Fixed) or operand == expected for operand, expected in known):
            return rows or Rows(dim)
    return OTHER


def _squeeze(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    assert isinstance(rows, Rows)
    removed = equation.params["dimensions"]
    if rows.dim in removed:
        return OTHER
    return Rows(rows.dim - sum(dim < rows.dim for dim in removed))


def _expand_dims(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    assert isinstance(rows, Rows)
    made = set(equation.params["dimensions"])
    kept = [d for d in range(equation.outvars[0].aval.ndim) if d not in made]
    return Rows(kept[rows.dim])


def _broadcast_in_dim(equation: Equation, operands: list[Dependence]) -> Dependence:
    rows, *rest = operands
    if not isinstance(rows, Rows) or any(not isinstance(operand, Fixed) for operand in rest):
        return OTHER
    dim = equation.params["broadcast_dimensions"][rows.dim]
    same = equation.invars[0].aval.shape[rows.dim] == equation.outvars[0].aval.shape[dim]
    return Rows(dim) if same else OTHER


def _transpose(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    assert isinstance(rows, Rows)
    return Rows(equation.params["permutation"].index(rows.dim))


def _rev(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    assert isinstance(rows, Rows)
    return OTHER if rows.dim in equation.params["dimensions"] else rows


def _top_k(equation: Equation, operands: list[Dependence]) -> Dependence:
    (rows,) = operands
    last = equation.invars[0].aval.ndim - 1
    along = equation.params.get("axis", last) % (last + 1)
    return rows if isinstance(rows, Rows) and rows.dim != along else OTHER


def _keeping(equation: Equation, operands: list[Dependence]) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for an operation.

    The result is `Rows` if the operation keeps the size of the row dimension.
    """
    rows, *rest = operands
    if not isinstance(rows, Rows) or any(not isinstance(operand, Fixed) for operand in rest):
        return OTHER
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return rows if before[rows.dim] == after[rows.dim] else OTHER


def _dynamic_update_slice(equation: Equation, operands: list[Dependence]) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for an update.

    The result is `Rows` if the update covers all rows.
    """
    rows, *places = (
        join([operand for operand in operands[:2] if not isinstance(operand, Fixed)]),
        *operands[2:],
    )
    if not isinstance(rows, Rows) or any(not isinstance(operand, Fixed) for operand in places):
        return OTHER
    array, update = (atom.aval.shape for atom in equation.invars[:2])
    return rows if array[rows.dim] == update[rows.dim] else OTHER


def _dot_general(equation: Equation, operands: list[Dependence]) -> Dependence:
    (contracted, batched), sides = equation.params["dimension_numbers"], []
    for side, operand in enumerate(operands):
        if isinstance(operand, Rows):
            sides.append((side, operand.dim))
    if len(sides) == 2:
        pair = sides[0][1], sides[1][1]
        if pair in zip(*batched, strict=True):
            return Rows(list(batched[0]).index(pair[0]))
        # Each row meets only the same row of the other operand, as in the gradient of a weight.
        return Total() if pair in zip(*contracted, strict=True) else OTHER
    ((side, dim),) = sides
    # Each row has its own factor, so this is no plain total.
    if dim in contracted[side]:
        return OTHER
    if dim in batched[side]:
        return Rows(list(batched[side]).index(dim))
    # The result has the batch dimensions, then the free ones of the left, then those of the right.
    ndim = [atom.aval.ndim for atom in equation.invars]
    taken = {*contracted[side], *batched[side]}
    place = [d for d in range(ndim[side]) if d not in taken].index(dim) + len(batched[0])
    if side == 1:
        place += ndim[0] - len(contracted[0]) - len(batched[0])
    return Rows(place)


def _conv_general_dilated(equation: Equation, operands: list[Dependence]) -> Dependence:
    rows, kernel = operands
    numbers = equation.params["dimension_numbers"]
    alone = equation.params["batch_group_count"] == 1 and isinstance(kernel, Fixed)
    if not alone or not isinstance(rows, Rows) or rows.dim != numbers.lhs_spec[0]:
        return OTHER
    return Rows(numbers.out_spec[0])


def _gather(equation: Equation, operands: list[Dependence]) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for a gather.

    The result is `Rows` for a lookup by the indices of each row; other gathers are left to `_take`.
    """
    numbers = equation.params["dimension_numbers"]
    table, index = operands
    if not isinstance(index, Rows):
        return _take(equation, table)
    if isinstance(table, Rows):
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        if (table.dim, index.dim) not in pairs:
            return OTHER
    out = equation.outvars[0].aval.ndim
    batch = [dim for dim in range(out) if dim not in numbers.offset_dims]
    return Rows(batch[index.dim])


def _take(equation: Equation, table: Dependence) -> Dependence:
    """Returns `Rows` (each row still depends on one row of the batch) or `Other` for a gather.

    The result is `Rows` if the gather takes the same positions of every row.
    """
    numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    if not isinstance(table, Rows) or table.dim not in kept:
        return OTHER
    if equation.params["slice_sizes"][table.dim] != shape[table.dim]:
        return OTHER
    return Rows(numbers.offset_dims[kept.index(table.dim)])


_RULES = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(_ALONG_A_DIM, _along_a_dim),
    **dict.fromkeys(["slice", "dynamic_slice", "pad", "tile"], _keeping),
    **dict.fromkeys(_OF_MATRICES, _of_matrices),
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(_WINDOWS, _window),
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _expand_dims,
    "fft": _fft,
    "gather": _gather,
    "reduce": _reduce,
    "rev": _rev,
    "squeeze": _squeeze,
    "stack": _stack,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
