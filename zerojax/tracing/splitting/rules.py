"""Rules for each primitive: which dimensions of its results equal which dimensions of its
operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerojax.operators.equations import Equation, Operand
from zerojax.tracing.row_rules import ELEMENTWISE, REDUCTIONS
from zerojax.tracing.splitting.factors import Dim, Dims
from zerojax.tracing.splitting.record import Record, Value, WeightUse

Rule = Callable[[Record, Any, Sequence[Value]], Sequence[Dims]]
"""`(record, equation, operands) -> dimensions of each result`."""
_ALONG = {
    "concatenate": "dimension",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "sort": "dimension",
    "split": "axis",
}
_SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")
_DRAWS = ("iota", "random_bits", "rng_bit_generator", "rng_uniform")
"""Primitives whose results have new dimensions; every device can compute its own part of them."""


def dims_after(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    """Returns the dimensions of each result of an equation, expressed by the dimensions of its
    operands.

    The equation has no nested program. If there is no rule for its primitive, no dimension of its
    operands can be split.
    """
    kind = equation.primitive.name
    if kind in ELEMENTWISE or kind == "optimization_barrier":
        return _elementwise(record, equation, operands)
    if kind in REDUCTIONS:
        return _reduction(record, equation, operands)
    rule = _RULES.get(kind)
    return (
        _unknown(record, equation, operands) if rule is None else rule(record, equation, operands)
    )


def _shape(atom: Operand) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _unknown(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    for operand in operands:
        for dim in operand.dims:
            record.block(dim, f"goes into `{equation.primitive.name}`, which is not followed")
    return [record.factors.new_dims(_shape(variable)) for variable in equation.outvars]


def _new(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    return [record.factors.new_dims(_shape(variable)) for variable in equation.outvars]


def _elementwise(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    if len(equation.outvars) > 1:  # each result equals its operand
        return [operand.dims for operand in operands]
    ndim = len(_shape(equation.outvars[0]))
    first, *others = [operand.dims for operand in operands if len(operand.dims) == ndim]
    for other in others:
        for a, b in zip(first, other, strict=True):
            record.unify(a, b)
    # An operand of size 1 along a dimension is broadcast; the result has the other one's.
    return [tuple(max(dims, key=record.factors.total) for dims in zip(first, *others, strict=True))]


def _bitcast(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    same = _shape(equation.invars[0]) == _shape(equation.outvars[0])
    return (_elementwise if same else _unknown)(record, equation, operands)


def _reduction(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    axes, (value, *_) = equation.params["axes"], operands
    record.add_sum("reduction", tuple(value.dims[axis] for axis in axes), equation.outvars[0])
    return [tuple(dim for axis, dim in enumerate(value.dims) if axis not in axes)]


def _general_reduction(
    record: Record, equation: Equation, operands: Sequence[Value]
) -> Sequence[Dims]:
    """Follows a reduction of several arrays of one shape by a function of their entries."""
    axes, number = equation.params["dimensions"], len(equation.outvars)
    results = []
    for value, result in zip(operands[:number], equation.outvars, strict=True):
        for one, other in zip(operands[0].dims, value.dims, strict=True):
            record.unify(one, other)
        record.add_sum("reduction", tuple(value.dims[axis] for axis in axes), result)
        results.append(tuple(dim for axis, dim in enumerate(value.dims) if axis not in axes))
    return results


def _dot_general(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    contracted, batched = equation.params["dimension_numbers"]
    return [_product(record, equation, operands[:2], contracted, batched)]


def _product(
    record: Record,
    equation: Equation,
    operands: Sequence[Value],
    contracted: Sequence[Sequence[int]],
    batched: Sequence[Sequence[int]],
) -> Dims:
    """Records the sum of a product; returns the dimensions (batch, free of the left, free of the
    right).
    """
    left, right = operands
    for pairs in (contracted, batched):
        for a, b in zip(*pairs, strict=True):
            record.unify(left.dims[a], right.dims[b])
    shared = [{*contracted[side], *batched[side]} for side in (0, 1)]
    free = [
        tuple(dim for place, dim in enumerate(value.dims) if place not in taken)
        for value, taken in zip(operands, shared, strict=True)
    ]
    over = tuple(left.dims[place] for place in contracted[0])
    both = left.weights is None and right.weights is None
    record.add_sum(
        "product",
        over,
        equation.outvars[0],
        weights=_weights(operands),
        is_matrix=both and any(free[0]) and any(free[1]),
    )
    common = tuple(left.dims[place] for place in batched[0])
    for value, own in zip(operands, free, strict=True):
        if value.weights:
            record.uses.append(WeightUse(weights=value.weights, free=own, contracted=over))
    return (*common, *free[0], *free[1])


def _weights(operands: Sequence[Value]) -> frozenset[str]:
    return frozenset().union(*(value.weights or () for value in operands))


def _ragged_dot(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    contracted, batched = numbers.dot_dimension_numbers
    left, right, *_ = operands
    why = "has one row for each group of `ragged_dot`"
    groups = [right.dims[place] for place in numbers.rhs_group_dimensions]
    for dim in groups:
        record.block(dim, why)
    ragged = numbers.lhs_ragged_dimensions[0] in contracted[0]
    # `_product` knows no dimension of groups, so the others are numbered without it.
    kept = [p for p in range(len(right.dims)) if p not in numbers.rhs_group_dimensions]
    places = {place: new for new, place in enumerate(kept)}
    within = [[places[place] for place in side[1]] for side in (contracted, batched)]
    made = _product(
        record,
        equation,
        (left, Value(tuple(right.dims[p] for p in kept), right.weights)),
        (contracted[0], within[0]),
        (batched[0], within[1]),
    )
    # If the sum runs over the ragged dimension, each group has a sum of its own.
    if not ragged:
        return [made]
    number = record.factors.new_dim(_shape(equation.outvars[0])[0])
    record.block(number, why)
    return [(number, *made)]


def _convolution(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    params, (left, right) = equation.params, operands
    numbers = params["dimension_numbers"]
    shape = _shape(equation.outvars[0])
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return _unknown(record, equation, operands)
    # The first two entries are the rows and features, or outputs and inputs of the weight; the
    # rest are places in space.
    for spec, value in ((numbers.lhs_spec, left), (numbers.rhs_spec, right)):
        for place in spec[2:]:
            record.block(value.dims[place], "is moved over by the window of a convolution")
    (rows, features), (out, inner) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    record.unify(left.dims[features], right.dims[inner])
    over = (left.dims[features],)
    record.add_sum("product", over, equation.outvars[0], weights=_weights(operands))
    for value, free in ((left, left.dims[rows]), (right, right.dims[out])):
        if value.weights:
            record.uses.append(WeightUse(weights=value.weights, free=(free,), contracted=over))
    made = [record.factors.new_dim(size) for size in shape]
    made[numbers.out_spec[0]], made[numbers.out_spec[1]] = left.dims[rows], right.dims[out]
    return [tuple(made)]


def _broadcast_in_dim(
    record: Record, equation: Equation, operands: Sequence[Value]
) -> Sequence[Dims]:
    shape, value = equation.params["shape"], operands[0]
    made = [*record.factors.new_dims(shape)]
    for dim, place in zip(value.dims, equation.params["broadcast_dimensions"], strict=True):
        # A dimension of size 1 is repeated here, and the result has a new one.
        made[place] = dim or made[place]
    return [tuple(made)]


def _reshape(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    shape, value = _shape(equation.outvars[0]), operands[0]
    made = None if 0 in shape else record.factors.reshape(value.dims, shape)
    if made is not None:
        return [made]
    why = f"is reshaped to {list(shape)}, which cuts across it"
    made = record.factors.new_dims(shape)
    for dim in (*value.dims, *made):
        record.block(dim, why)
    return [made]


def _squeeze(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    gone = equation.params["dimensions"]
    return [tuple(dim for place, dim in enumerate(operands[0].dims) if place not in gone)]


def _transpose(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    return [tuple(operands[0].dims[place] for place in equation.params["permutation"])]


def _part(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    """Handles slices and padding: a dimension whose size changes becomes a new dimension."""
    kind, value = equation.primitive.name, operands[0]
    shape = _shape(equation.outvars[0])
    # Slices have no padding.
    padding = equation.params.get("padding_config", [(0, 0, 0)] * len(shape))
    made = []
    for dim, size, edges in zip(value.dims, shape, padding, strict=True):
        whole = record.factors.total(dim) == size and not any(edges)
        made.append(dim if whole else record.cut_from(dim, size, f"is cut by `{kind}`"))
    return [tuple(made)]


def _rev(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    for place in equation.params["dimensions"]:
        record.block(operands[0].dims[place], "is reversed")
    return [operands[0].dims]


def _along(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    """Handles operations that need one dimension complete and keep all other dimensions."""
    kind = equation.primitive.name
    axis = equation.params[_ALONG[kind]]
    arrays = [value.dims for value in operands]
    for other in arrays[1:]:
        for place, (a, b) in enumerate(zip(arrays[0], other, strict=True)):
            # Arrays that are sorted together have the axis in common; parts of a concatenation do
            # not.
            if place != axis or kind == "sort":
                record.unify(a, b)
    results = []
    for variable in equation.outvars:
        made = [*arrays[0]]
        why = f"is cut by `{kind}`" if kind in ("concatenate", "split") else f"`{kind}` needs all"
        size = _shape(variable)[axis]
        if kind in ("concatenate", "split"):
            made[axis] = record.cut_from(arrays[0][axis], size, why)
            for other in arrays[1:]:
                record.block(other[axis], why)
                if other[axis] and made[axis]:
                    record.links.append((other[axis], made[axis]))
        else:
            record.block(made[axis], why)
        results.append(tuple(made))
    return results


def _top_k(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    dims = operands[0].dims
    axis = equation.params.get("axis", len(dims) - 1) % len(dims)
    number = record.cut_from(dims[axis], _shape(equation.outvars[0])[axis], "`top_k` needs all")
    return [(*dims[:axis], number, *dims[axis + 1 :])] * len(equation.outvars)


def _stack(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    axis, first = equation.params["axis"], operands[0].dims
    for other in operands[1:]:
        for a, b in zip(first, other.dims, strict=True):
            record.unify(a, b)
    return [(*first[:axis], record.factors.new_dim(len(operands)), *first[axis:])]


def _unstack(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    axis, dims = equation.params["axis"], operands[0].dims
    record.block(dims[axis], "is cut by `unstack`")
    return [(*dims[:axis], *dims[axis + 1 :])] * len(equation.outvars)


def _dynamic_update_slice(
    record: Record, equation: Equation, operands: Sequence[Value]
) -> Sequence[Dims]:
    array, update = operands[0].dims, operands[1].dims
    for a, b in zip(array, update, strict=True):
        if record.factors.total(a) == record.factors.total(b):
            record.unify(a, b)
        else:
            record.block(a, "is written in parts")
            record.block(b, "is written in parts")
    return [array]


def _gather(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    """Handles lookups by an index; a dimension of the table that they slice becomes a new one."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    table, index = operands[:2]
    variable = equation.outvars[0]
    made: list[Dim] = [*record.factors.new_dims(_shape(variable))]
    batch = [place for place in range(len(made)) if place not in numbers.offset_dims]
    # The last dimension of an index holds its components.
    for place, dim in zip(batch, index.dims[:-1], strict=True):
        made[place] = dim
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for a, b in pairs:
        record.unify(table.dims[a], index.dims[b])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [place for place in range(len(table.dims)) if place not in gone]
    for place, target in zip(kept, numbers.offset_dims, strict=True):
        if record.factors.total(table.dims[place]) == sizes[place]:
            made[target] = table.dims[place]
        else:
            why = "is cut by `gather`"
            made[target] = record.cut_from(table.dims[place], sizes[place], why)
    looked_up = tuple(table.dims[place] for place in numbers.collapsed_slice_dims)
    record.add_sum("lookup", looked_up, variable, weights=table.weights or frozenset())
    if table.weights:
        free = tuple(made[place] for place in numbers.offset_dims)
        record.uses.append(
            WeightUse(
                weights=table.weights,
                free=free,
                looked_up=looked_up,
                by_batch=index.weights is None,
            )
        )
    return [tuple(made)]


def _scatter(record: Record, equation: Equation, operands: Sequence[Value]) -> Sequence[Dims]:
    """Handles the derivative of a lookup, which adds rows at the places of an index."""
    numbers = equation.params["dimension_numbers"]
    array, index, updates = (value.dims for value in operands[:3])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [place for place in range(len(array)) if place not in gone]
    for place, target in zip(kept, numbers.update_window_dims, strict=True):
        if record.factors.total(array[place]) == record.factors.total(updates[target]):
            record.unify(array[place], updates[target])
        else:
            record.block(array[place], "is written in parts")
            record.block(updates[target], "is written in parts")
    batch = [place for place in range(len(updates)) if place not in numbers.update_window_dims]
    for place, dim in zip(batch, index[:-1], strict=True):
        record.unify(updates[place], dim)
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for a, b in pairs:
        record.unify(array[a], index[b])
    return [array]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(_DRAWS, _new),
    **dict.fromkeys(["slice", "dynamic_slice", "pad"], _part),
    "bitcast_convert_type": _bitcast,
    "reduce": _general_reduction,
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "ragged_dot_general": _ragged_dot,
    "reshape": _reshape,
    "rev": _rev,
    "squeeze": _squeeze,
    "stack": _stack,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
