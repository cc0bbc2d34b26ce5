"""Splits the traced loss of a microbatch into three parts: before, inside and after the layers.

The computation of the layers is unchanged, with its checkpoints, custom derivatives and parameter
reads. Each extra (non-parameter array) is written by one part; an extra that another part reads is
refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch, Tree
from zerojax.tracing.jaxpr import Piece, cut_piece
from zerojax.tracing.loops.detection import LayerLoop, find_layer_loop
from zerojax.tracing.loops.own_state import (
    Overwritten,
    check_readers,
    sort_extras,
    sort_overwritten,
)
from zerojax.tracing.tiled_products import WeightProduct, find_product
from zerojax.tracing.tiled_programs import ShardedWeight, run_with_tiles

Arrays = dict[str, Any]
Activations = tuple[jax.Array, ...]
Sums = dict[str, Any]


def cut_loss(
    function: Callable[..., tuple[Sums, Arrays]],
    values: Arrays,
    extras: Arrays,
    key: jax.Array,
    batch: Batch,
    *,
    padding: bool = False,
    skips: bool = False,
    masks: bool = True,
    overwritten: Set[str] = frozenset(),
) -> LossPieces:
    """Splits a loss into three parts around its loop over layers.

    Args:
      function: `(values, extras, key, batch) -> (sums, new extras)`, for one microbatch; `sums` is
        {"loss": ..., "weight": ..., ...} as in `zerojax.losses.as_sums`. The function may close
        over arrays, also traced ones.
      values: {name: pytree of `ShapeDtypeStruct`}, the parameters that the model gets; stacked
        parameters have the rows of all layers.
      extras, key, batch: pytrees of `ShapeDtypeStruct`.
      padding: whether rows may be padding (numbered -1); if not, nothing is masked.
      skips: whether a `cond` skips the computation of rows of padding. This needs layers without
        collectives. The layers must also be checkpointed (`LayerLoop.is_checkpointed`) or run
        without residuals, because a `cond` copies its residuals for the backward pass.
      masks: whether gradients of computed rows of padding are masked. False if the layers have
        scales, which skip these rows and need loops that slice the parameters themselves.
      overwritten: names of the extras (non-parameter arrays) that are replaced by their gradient.

    Raises:
      ValueError: the program does not have the form that `find_layer_loop` needs, or an extra is
        written or overwritten in a way that cannot be split.
    """
    arguments = values, extras, key, batch
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    positions = jax.tree.unflatten(tree, range(len(leaves)))
    names: list[str | None] = [None] * len(leaves)
    for name, places in positions[0].items():
        for place in jax.tree.leaves(places):
            names[place] = name
    loop = find_layer_loop(closed, names)
    sums, written = jax.tree.unflatten(jax.tree.structure(result), loop.program.jaxpr.outvars)
    inputs = loop.program.jaxpr.invars
    # An extra that is returned as it came in needs no part that writes it.
    unchanged = [n for n, atom in written.items() if atom is inputs[positions[1][n]]]
    written = {name: atom for name, atom in written.items() if name not in unchanged}
    writers = sort_extras(loop, written, positions[1])
    _check_rest(loop, sums)
    before = loop.embed_piece.closed.jaxpr.outvars
    around = cut_piece(loop.program, [*loop.consts, *loop.others])
    head = loop.cut_after([*jax.tree.leaves(sums), *writers.head.values()])
    read_by = {"embed": loop.embed_piece, "around": around, "head": head}
    check_readers(writers, positions[1], **read_by)
    return LossPieces(
        loop=loop,
        padding=padding,
        skips=skips,
        masks=masks,
        overwritten=sort_overwritten(loop, overwritten, positions[1], **read_by),
        _positions=positions,
        _embed=cut_piece(loop.program, [*before, *writers.embed.values()]),
        _around=around,
        _head=head,
        _sums=jax.tree.structure(sums),
        _count=cut_piece(loop.program, list(writers.counters.values())),
        _embed_extras=tuple(writers.embed),
        _layer_extras=writers.layers,
        _head_extras=tuple(writers.head),
        _counters=tuple(writers.counters),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class LossPieces:
    """Loss in three parts: calling `embed`, then `layers` once or more, then `head` computes the
    loss.

    Each part is a function to trace, and can be differentiated by `jax.vjp`. `count` is a fourth
    part, for the extras (non-parameter arrays) that only count. The parts have common arguments.
    `outer` is {name: value} and has at least the unstacked parameters that the part reads.
    `extras`, `key` and `batch` are the full arguments of the traced loss.

    Attributes:
      loop: the loop over layers.
      padding: whether rows may be padding (numbered -1).
      skips: whether rows of padding are skipped; if not, they are computed and discarded.
      masks: whether gradients of computed rows of padding are masked.
      overwritten: extras that are replaced by their gradient, grouped by the part that reads them.
    """

    loop: LayerLoop
    padding: bool
    skips: bool
    masks: bool
    overwritten: Overwritten
    _positions: tuple[Arrays, Arrays, Any, Any]
    _embed: Piece
    _around: Piece
    _head: Piece
    _sums: Tree
    _count: Piece
    _embed_extras: tuple[str, ...]
    _layer_extras: dict[str, int]
    _head_extras: tuple[str, ...]
    _counters: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        return self.loop.num_layers

    @property
    def stacked(self) -> frozenset[str]:
        """Names of the parameters that have one row for each layer."""
        return self.loop.stacked

    @property
    def activations(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the values that go from layer to layer; PRNG keys are represented by their
        data.
        """
        return tuple(map(_abstract_data, self.loop.activations))

    @property
    def embed_reads(self) -> frozenset[str]:
        """Names of the parameters that `embed` depends on."""
        return self.loop.names_of(self._embed.inputs)

    @property
    def layers_reads_outer(self) -> frozenset[str]:
        """Names of the unstacked parameters that `layers` depends on."""
        return self.loop.names_of(self._around.inputs)

    @property
    def head_reads(self) -> frozenset[str]:
        """Names of the parameters that `head` depends on."""
        return self.loop.names_of(self._head.inputs)

    def embed(
        self, outer: Arrays, extras: Arrays, key: jax.Array, batch: Batch
    ) -> tuple[Activations, Arrays]:
        """Runs the part before the layers: (inputs of the first layer, {name: new value} of its
        extras (non-parameter arrays)).
        """
        outputs = self._embed((), self._inputs(outer, extras, key, batch))
        count = len(self.activations)
        activations = tuple(map(_as_data, outputs[:count]))
        return activations, dict(zip(self._embed_extras, outputs[count:], strict=True))

    def layers(
        self,
        stacked: Arrays,
        outer: Arrays,
        extras: Arrays,
        key: jax.Array,
        batch: Batch,
        rows: jax.Array,
        activations: Activations,
    ) -> tuple[Activations, Arrays]:
        """Runs some layers in sequence.

        Every call computes the inputs of the loop that are not parameters (keys, masks, tables of
        positions) for all layers.

        Args:
          stacked: {name: value whose arrays have n rows}.
          outer, extras, key, batch: common arguments, described at the class.
          rows: number of the layer of each row, int32 [n]. With `padding`, -1 means no layer: the
            activations are unchanged, and the gradients of the row are exactly zero, whatever the
            row contains.
          activations: result of `embed` or of the previous layers.

        Returns:
          (activations, {name: rows [n, ...] of the new value} of the extras (non-parameter arrays)
          that the layers write). The rows of padding are zeros.
        """
        inputs = self._inputs(outer, extras, key, batch)
        around = self._around((), inputs)
        consts = around[: len(self.loop.consts)]
        present = jnp.asarray(rows) >= 0 if self.padding else None
        sliced = self._slices(self._stack_inputs(stacked), around[len(consts) :], rows)
        if present is not None and self.masks and not self.skips:
            # A zero cotangent may become NaN inside a layer (0 times infinity). So discarding the
            # results of a row of padding is not enough; the gradients of all inputs of the row are
            # masked as well.
            sliced = _mask_gradients(sliced, present)
        run = functools.partial(self._one_layer, consts)
        # A chunk may have fewer layers than the loop unrolls.
        unroll = min(self.loop.equation.params["unroll"], max(1, rows.shape[0]))
        after, written = lax.scan(run, activations, (present, sliced), unroll=unroll)
        return after, dict(zip(self._layer_extras, written, strict=True))

    def surroundings(
        self, outer: Arrays, extras: Arrays, key: jax.Array, batch: Batch
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Computes the layers' inputs that are not parameters, such as keys, masks or tables of
        positions.

        Returns (values that every layer uses unsliced, values with one row per layer), for a caller
        that runs layers one by one with `layer`.
        """
        around = self._around((), self._inputs(outer, extras, key, batch))
        return around[: len(self.loop.consts)], around[len(self.loop.consts) :]

    def layer(
        self,
        rows: Arrays,
        consts: Sequence[jax.Array],
        others: Sequence[jax.Array],
        activations: Activations,
    ) -> tuple[Activations, Arrays]:
        """Runs one layer.

        Args:
          rows: {name: the layer's row of a stacked parameter, as an array or a `ShardedWeight`}.
          consts: first result of `surroundings`.
          others: the layer's row of each value in the second result of `surroundings`.
          activations: result of `embed` or of the previous layer.

        Returns:
          (activations, {name: the layer's row of the new value} of the extras (non-parameter
          arrays) that the layer writes).
        """
        stacks, remaining = self._stack_inputs(rows), iter(others)
        sliced = []
        for stack in self.loop.slices:
            row = next(remaining) if stack is None else stacks[stack.input]
            if stack is not None and not isinstance(row, ShardedWeight):
                row = stack.apply(row[None])[0]
            sliced.append(row)
        after, written = self._one_layer(consts, activations, (None, sliced))
        return after, dict(zip(self._layer_extras, written, strict=True))

    def find_products(self) -> dict[str, WeightProduct | str]:
        """Returns {stacked parameter: the only product that reads its row, or the reason why there
        is none}.

        Casts between the parameter and the loop are included in the casts of the product.
        """
        layer = self.loop.layer.jaxpr
        sliced = layer.invars[len(layer.invars) - len(self.loop.slices) :]
        found: dict[str, WeightProduct | str] = {}
        for stack, variable in zip(self.loop.slices, sliced, strict=True):
            name = None if stack is None else self.loop.names[stack.input]
            if stack is None or name is None:
                continue
            product = find_product(layer, variable)
            if not isinstance(product, str):
                before = [step.params.get("new_dtype") for step in stack.steps]
                casts = *(dtype for dtype in before if dtype is not None), *product.casts
                product = dataclasses.replace(product, casts=casts)
            found[name] = "the loop slices it twice" if name in found else product
        return found

    def head(
        self, outer: Arrays, extras: Arrays, key: jax.Array, batch: Batch, activations: Activations
    ) -> tuple[Sums, Arrays]:
        """Runs the part after the layers: (loss sums, {name: new value} of the extras
        (non-parameter arrays) that it writes).
        """
        inputs = self._inputs(outer, extras, key, batch)
        outputs = self._head(self._as_carried(activations), inputs)
        number = self._sums.num_leaves
        sums = jax.tree.unflatten(self._sums, outputs[:number])
        return sums, dict(zip(self._head_extras, outputs[number:], strict=True))

    def count(self, extras: Arrays) -> Arrays:
        """Returns {name: new value} of the extras (non-parameter arrays) that only count forward
        passes.

        Such an extra depends only on other extras of this kind. So its value for each microbatch is
        known in advance, and the caller passes each microbatch its own value.
        """
        written = self._count((), _pair(self._positions[1], extras))
        return dict(zip(self._counters, written, strict=True))

    # --- inputs of a piece ------------------------------------------------------------------------

    def _inputs(
        self, outer: Arrays, extras: Arrays, key: jax.Array, batch: Batch
    ) -> dict[int, Any]:
        rest = _pair(self._positions[1:], (extras, key, batch))
        return _pair({name: self._positions[0][name] for name in outer}, outer) | rest

    def _stack_inputs(self, stacked: Arrays) -> dict[int, Any]:
        return _pair({name: self._positions[0][name] for name in stacked}, stacked)

    def _slices(
        self, stacks: dict[int, jax.Array], others: Sequence[jax.Array], rows: jax.Array
    ) -> list[jax.Array]:
        """Returns the arrays that the loop slices: rows of parameters and of other values."""
        # Rows of padding take the values of the first layer; any valid layer would do.
        layer_of_row = jnp.maximum(rows, 0) if self.padding else rows
        remaining = iter(others)
        slices = []
        for stack in self.loop.slices:
            if stack is None:
                # A constant table is a NumPy array, which does not support a traced index.
                slices.append(jnp.asarray(next(remaining))[layer_of_row])
                continue
            slices.append(stack.apply(stacks[stack.input]))
        return slices

    def _one_layer(
        self,
        consts: Sequence[jax.Array],
        activations: Activations,
        row: tuple[jax.Array | None, list[Any]],
    ) -> tuple[Activations, list[jax.Array]]:
        present, sliced = row
        if present is not None and self.skips:
            return self._layer_or_nothing(consts, activations, present, sliced)
        entering = activations
        if present is not None and self.masks:
            entering = tuple(_mask_gradients(activations, present))
            consts = _mask_gradients(consts, present)
        given = *consts, *self._as_carried(entering), *sliced
        outputs = run_with_tiles(self.loop.layer, given)
        after = tuple(map(_as_data, outputs[: len(activations)]))
        rows = outputs[len(activations) :]
        written = [_as_data(rows[index]) for index in self._layer_extras.values()]
        if present is None:
            return after, written
        # These activations are not masked: for a row of padding their gradient passes through.
        kept = zip(after, activations, strict=True)
        return (
            tuple(jnp.where(present, new, old) for new, old in kept),
            [jnp.where(present, row, jnp.zeros_like(row)) for row in written],
        )

    def _layer_or_nothing(
        self,
        consts: Sequence[jax.Array],
        activations: Activations,
        present: jax.Array,
        sliced: list[jax.Array],
    ) -> tuple[Activations, list[jax.Array]]:
        """Runs a layer, or returns the activations unchanged if the row is padding, by a `cond`."""
        compute = lambda *operands: self._one_layer(operands[0], operands[1], (None, operands[2]))  # noqa: E731
        operands = consts, activations, sliced
        nothing = jax.eval_shape(compute, *operands)[1]

        def pass_on(*operands: Any) -> tuple[Activations, list[jax.Array]]:
            return operands[1], [jnp.zeros(x.shape, x.dtype) for x in nothing]

        # Without the checkpoint, JAX would copy the residuals, weights included, so that both
        # branches return the same shapes, although one branch has no residuals.
        run = jax.checkpoint(
            lambda *operands: lax.cond(present, compute, pass_on, *operands), prevent_cse=False
        )
        return run(*operands)

    def _as_carried(self, activations: Activations) -> list[jax.Array]:
        """Returns activations as the traced loop carries them: data of PRNG keys become
        keys again.
        """
        pairs = zip(activations, self.loop.activations, strict=True)
        return [
            jax.random.wrap_key_data(x, impl=_key_impl(like)) if _is_key(like) else x
            for x, like in pairs
        ]


def _check_rest(loop: LayerLoop, sums: Sums) -> None:
    """Raises ValueError for a weight or metric of the loss that no pipeline stage can compute."""
    depends = loop.dependence()
    for title, parts in [("weight of the loss", sums["weight"]), *_metrics(sums)]:
        if any("rows" in depends(atom) for atom in jax.tree.leaves(parts)):
            raise ValueError(
                f"the {title} uses values that the loop of {loop.num_layers} layers returns for "
                "each layer, but pipeline stages exchange only carried values; sum them in the "
                "carried value instead"
            )


def _metrics(sums: Sums) -> list[tuple[str, Any]]:
    return [(f"loss's metric {name!r}", value) for name, value in sums.get("metrics", {}).items()]


def _pair(positions: Tree, values: Tree) -> dict[int, Any]:
    """Returns {position: array} of trees with equal structure."""
    is_leaf = lambda x: isinstance(x, ShardedWeight)  # noqa: E731
    leaves = jax.tree.leaves(values, is_leaf=is_leaf)
    return dict(zip(jax.tree.leaves(positions), leaves, strict=True))


@jax.custom_vjp
def _mask_gradient(value: jax.Array, present: jax.Array) -> jax.Array:
    """Returns `value`, with a gradient of zero where `present` is false.

    `present` has one bool for each row of the first dimensions of `value`.

    A custom derivative is used, not a selection between `value` and a copy without gradient, so
    that the result is `value` itself and a backward pass does not save it twice.
    """
    return value


def _mask_forward(value: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, present


def _mask_backward(present: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    mask = present.reshape(present.shape + (1,) * (cotangent.ndim - present.ndim))
    return jnp.where(mask, cotangent, jnp.zeros_like(cotangent)), None


_mask_gradient.defvjp(_mask_forward, _mask_backward)


def _mask_gradients(values: Sequence[jax.Array], present: jax.Array) -> list[jax.Array]:
    """Applies `_mask_gradient` to each value that can have a gradient."""
    return [
        _mask_gradient(x, present) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in values
    ]


def _is_key(value: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _as_data(value: jax.Array) -> jax.Array:
    """Converts a value to an array without weak dtype: PRNG keys to their data, Python numbers to
    arrays.
    """
    if _is_key(value):
        return jax.random.key_data(value)
    return lax.convert_element_type(value, value.dtype)


def _abstract_data(value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_as_data, value)


def _key_impl(like: jax.ShapeDtypeStruct) -> str:
    """Returns the name of the random generator (PRNG implementation) of a key."""
    # `key_impl` takes a key, and there is only its type here.
    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), like)
    return names[0]
