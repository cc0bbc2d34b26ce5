"""Traced loss of a microbatch in three pieces: before, inside and after the layers.

What the layers compute is kept exactly as the model wrote it: checkpoints, custom derivatives,
reads. The model's own state is written by one of the pieces; another that reads it is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from zerojax.tracing.jaxpr import Piece, cut_piece
from zerojax.tracing.loops.detection import LayerLoop, find_layer_loop
from zerojax.tracing.loops.own_state import (
    Overwritten,
    check_readers,
    sort_extras,
    sort_overwritten,
)

Arrays = dict[str, Any]
Activations = tuple[jax.Array, ...]
Sums = dict[str, Any]


def cut_loss(
    function: Callable[..., tuple[Sums, Arrays]],
    values: Arrays,
    extras: Arrays,
    key: Any,
    batch: Any,
    *,
    padding: bool = False,
    skips: bool = False,
    overwritten: Set[str] = frozenset(),
) -> LossPieces:
    """The pieces of a loss.

    Args:
      function: `(values, extras, key, batch) -> (sums, extras afterwards)`, of one microbatch;
        sums {"loss", "weight", ...} as `zerojax.losses.as_sums` has them. It may close over
        arrays, traced ones too.
      values: {name: pytree of `ShapeDtypeStruct`}, parameters as the model gets them, stacked ones
        with the rows of all layers.
      extras, key, batch: pytrees of `ShapeDtypeStruct`.
      padding: whether rows may be padding (-1). Without it nothing is masked.
      skips: whether rows of padding are not computed at all, but under a `cond`: only where no
        collective is in a layer, and where a layer is checkpointed (`LayerLoop.is_checkpointed`)
        or its residuals are not kept, since what a `cond` hands on to a backward pass are copies.
      overwritten: names of the extras that are overwritten with their gradient.

    Raises:
      ValueError: the program has not the form that `find_layer_loop` asks for, or an extra is
        written or overwritten in a way that cannot be cut.
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


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LossPieces:
    """A loss in three pieces; embed, then layers once or more, then head give the whole loss.

    Each piece is a function to be traced, with derivatives by `jax.vjp`; `count` is a fourth, for
    the extras that only count. Their arguments are
    named alike: `outer` {name: value} holds at least those parameters without rows of layers that
    the piece reads; `extras`, `key` and `batch` are whole and of the form that the loss was traced
    with.

    Attributes:
      loop: the loop over layers.
      padding: whether rows may be -1.
      skips: whether those are passed over instead of computed and thrown away.
      overwritten: the extras that are overwritten with their gradient, by which piece reads them.
    """

    loop: LayerLoop
    padding: bool
    skips: bool
    overwritten: Overwritten
    _positions: tuple[Arrays, Arrays, Any, Any]
    _embed: Piece
    _around: Piece
    _head: Piece
    _sums: Any
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
        """What travels from layer to layer; PRNG keys do so as their data."""
        return tuple(map(_abstract_data, self.loop.activations))

    @property
    def embed_reads(self) -> frozenset[str]:
        """Names of the parameters that `embed` depends on."""
        return self.loop.names_of(self._embed.inputs)

    @property
    def layers_reads_outer(self) -> frozenset[str]:
        """Names of the parameters without rows of layers that `layers` depends on."""
        return self.loop.names_of(self._around.inputs)

    @property
    def head_reads(self) -> frozenset[str]:
        """Names of the parameters that `head` depends on."""
        return self.loop.names_of(self._head.inputs)

    def embed(
        self, outer: Arrays, extras: Arrays, key: Any, batch: Any
    ) -> tuple[Activations, Arrays]:
        """(what the first layer takes, {name: new value} of the extras that are written here)."""
        outputs = self._embed((), self._inputs(outer, extras, key, batch))
        count = len(self.activations)
        activations = tuple(map(_as_data, outputs[:count]))
        return activations, dict(zip(self._embed_extras, outputs[count:], strict=True))

    def layers(
        self,
        stacked: Arrays,
        outer: Arrays,
        extras: Arrays,
        key: Any,
        batch: Any,
        rows: jax.Array,
        activations: Activations,
    ) -> tuple[Activations, Arrays]:
        """Some layers, one after the other.

        What the loop takes beside parameters and activations (keys, masks, tables of positions) is
        computed by every call, for all layers.

        Args:
          stacked: {name: value whose arrays have n rows}.
          rows: int32 [n], which layer each row is. With `padding`, -1 is none: the activations go
            on as they are, and the row gets gradients of exactly zero, whatever the layer makes
            of its contents.
          activations: from `embed`, or from earlier layers.

        Returns:
          (activations, {name: [n, ...] rows of the new value} of the extras that the layers
          write); rows of padding are zeros.
        """
        inputs = self._inputs(outer, extras, key, batch)
        around = self._around((), inputs)
        consts = around[: len(self.loop.consts)]
        present = jnp.asarray(rows) >= 0 if self.padding else None
        sliced = self._slices(self._stack_inputs(stacked), around[len(consts) :], rows)
        if present is not None and not self.skips:
            # Zeros that come back into a layer may leave it as NaN (0 times infinity), so it is not
            # enough to pass over what a row of padding gives: the gradients of all that goes in
            # are masked, too.
            sliced = _mask_gradients(sliced, present)
        run = functools.partial(self._one_layer, consts)
        unroll = min(self.loop.equation.params["unroll"], max(1, rows.shape[0]))
        after, written = lax.scan(run, activations, (present, sliced), unroll=unroll)
        return after, dict(zip(self._layer_extras, written, strict=True))

    def surroundings(
        self, outer: Arrays, extras: Arrays, key: Any, batch: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """(what every layer takes whole, what has a row for each layer), beside parameters.

        Keys, masks, tables of positions: for whoever runs layers one by one with `layer`.
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
        """One layer: `rows` {name: its row of a stacked parameter}, see `surroundings`.

        Args:
          consts: the first of `surroundings`; others: this layer's row of each of the second.

        Returns:
          (activations, {name: this layer's row of the new value} of the extras it writes).
        """
        given, remaining = self._stack_inputs(rows), iter(others)
        sliced = [
            next(remaining) if stack is None else stack.apply(given[stack.input][None])[0]
            for stack in self.loop.slices
        ]
        after, written = self._one_layer(consts, activations, (None, sliced))
        return after, dict(zip(self._layer_extras, written, strict=True))

    def head(
        self, outer: Arrays, extras: Arrays, key: Any, batch: Any, activations: Activations
    ) -> tuple[Sums, Arrays]:
        """(sums, {name: new value} of the extras that are written here)."""
        inputs = self._inputs(outer, extras, key, batch)
        outputs = self._head(self._as_carried(activations), inputs)
        number = self._sums.num_leaves
        sums = jax.tree.unflatten(self._sums, outputs[:number])
        return sums, dict(zip(self._head_extras, outputs[number:], strict=True))

    def count(self, extras: Arrays) -> Arrays:
        """{name: new value} of the extras that count microbatches, whatever these hold.

        Each is found from such extras alone, so the value that a microbatch finds is known before
        any other has gone through the layers: whoever runs the pieces gives each its own.
        """
        written = self._count((), _pair(self._positions[1], extras))
        return dict(zip(self._counters, written, strict=True))

    # --- what a piece is given --------------------------------------------------------------------

    def _inputs(self, outer: Arrays, extras: Arrays, key: Any, batch: Any) -> dict[int, Any]:
        rest = _pair(self._positions[1:], (extras, key, batch))
        return _pair({name: self._positions[0][name] for name in outer}, outer) | rest

    def _stack_inputs(self, stacked: Arrays) -> dict[int, Any]:
        return _pair({name: self._positions[0][name] for name in stacked}, stacked)

    def _slices(
        self, stacks: dict[int, jax.Array], others: Sequence[jax.Array], rows: jax.Array
    ) -> list[jax.Array]:
        """What the loop slices: rows of parameters, and the same rows of everything else."""
        # Rows of padding take those of the first layer: any that exist will do.
        layer_of_row = jnp.maximum(rows, 0) if self.padding else rows
        remaining = iter(others)
        slices = []
        for stack in self.loop.slices:
            if stack is None:
                # A table of the model's is a NumPy array, which takes no traced index.
                slices.append(jnp.asarray(next(remaining))[layer_of_row])
                continue
            slices.append(stack.apply(stacks[stack.input]))
        return slices

    def _one_layer(
        self,
        consts: Sequence[jax.Array],
        activations: Activations,
        given: tuple[jax.Array | None, list[jax.Array]],
    ) -> tuple[Activations, list[jax.Array]]:
        present, sliced = given
        if present is not None and self.skips:
            return self._layer_or_nothing(consts, activations, present, sliced)
        entering = activations
        if present is not None:
            entering = tuple(_mask_gradients(activations, present))
            consts = _mask_gradients(consts, present)
        layer = jaxpr_as_fun(self.loop.layer)
        outputs = layer(*consts, *self._as_carried(entering), *sliced)
        after = tuple(map(_as_data, outputs[: len(activations)]))
        rows = outputs[len(activations) :]
        written = [_as_data(rows[index]) for index in self._layer_extras.values()]
        if present is None:
            return after, written
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
        """A layer where there is one, under a `cond`."""
        compute = lambda *given: self._one_layer(given[0], given[1], (None, given[2]))  # noqa: E731
        given = consts, activations, sliced
        nothing = jax.eval_shape(compute, *given)[1]

        def pass_on(*given: Any) -> tuple[Activations, list[jax.Array]]:
            return given[1], [jnp.zeros(x.shape, x.dtype) for x in nothing]

        # Without the checkpoint the residuals of the two branches, of which one has none, would be
        # made alike by copies: of the weights, too.
        run = jax.checkpoint(
            lambda *given: lax.cond(present, compute, pass_on, *given), prevent_cse=False
        )
        return run(*given)

    def _as_carried(self, activations: Activations) -> list[jax.Array]:
        """Activations as the program knows them, with PRNG keys made of their data."""
        pairs = zip(activations, self.loop.activations, strict=True)
        return [
            jax.random.wrap_key_data(x, impl=_key_impl(like)) if _is_key(like) else x
            for x, like in pairs
        ]


def _check_rest(loop: LayerLoop, sums: Sums) -> None:
    """Refuses a weight or a metric that no stage could compute; the loss was looked at before."""
    depends = loop.dependence()
    for what, parts in [("weight of the loss", sums["weight"]), *_metrics(sums)]:
        if any("rows" in depends(atom) for atom in jax.tree.leaves(parts)):
            raise ValueError(
                f"the {what} uses what the loop of {loop.num_layers} layers returns for each "
                "layer, but only carried values go from one pipeline stage to the next: add it up "
                "in the carried value instead"
            )


def _metrics(sums: Sums) -> list[tuple[str, Any]]:
    return [(f"loss's metric {name!r}", value) for name, value in sums.get("metrics", {}).items()]


def _pair(positions: Any, values: Any) -> dict[int, Any]:
    """{position: array}, for trees of the same form."""
    return dict(zip(jax.tree.leaves(positions), jax.tree.leaves(values), strict=True))


@jax.custom_vjp
def _mask_gradient(value: jax.Array, present: jax.Array) -> jax.Array:
    """`value`, whose gradient is zero where `present` is false (one bool for each leading row).

    A derivative rule and not a selection between `value` and a copy that has no gradient: the
    result is `value` itself, so that a backward pass does not keep it a second time.
    """
    return value


def _mask_forward(value: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, present


def _mask_backward(present: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    mask = present.reshape(present.shape + (1,) * (cotangent.ndim - present.ndim))
    return jnp.where(mask, cotangent, jnp.zeros_like(cotangent)), None


_mask_gradient.defvjp(_mask_forward, _mask_backward)


def _mask_gradients(values: Sequence[jax.Array], present: jax.Array) -> list[jax.Array]:
    """The same of each value that can have a gradient."""
    return [
        _mask_gradient(x, present) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in values
    ]


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _as_data(value: jax.Array) -> jax.Array:
    """A plain array of a definite dtype: the data of keys, what Python numbers became."""
    if _is_key(value):
        return jax.random.key_data(value)
    return lax.convert_element_type(value, value.dtype)


def _abstract_data(value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_as_data, value)


def _key_impl(like: jax.ShapeDtypeStruct) -> str:
    """The name of the generator of a key."""
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), like)
    return found[0]
