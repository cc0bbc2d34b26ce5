"""Finds groups of dimensions that can only be split together, and the sums that a split needs.

A group corresponds to one factor (see `factors`), the outermost of its dimensions. The heads of a
layer, for example, are one group: the output dimensions of queries, keys and values, their biases,
and the input dimension of the output projection. Splitting a group over devices leaves every
operation unchanged, except operations that sum over the group, which need an all-reduce.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.tracing.flops import without_waste
from zerojax.tracing.splitting.factors import Dim
from zerojax.tracing.splitting.record import Record, Sum, Value, WeightUse
from zerojax.tracing.splitting.walk import follow_dims

_INSIDE = "is the inner part of a dimension with {} outer parts, so its shards are not contiguous"
_TWICE = "occurs twice in one array"
_SCORES = "is summed over in a product of two activations, whose full result would be all-reduced"


@dataclass(frozen=True, kw_only=True)
class DimGroup:
    """Dimensions of parameters that can only be split over devices together.

    Attributes:
      factor: number of the group in the program.
      size: largest number of equal parts into which the dimensions can be split.
      dims: {parameter: number of the dimension that belongs to the group}, counted from 0.
      columns: parameters of products whose result has a dimension of the group.
      rows: parameters of products that sum over the group.
      tables: parameters whose rows, along the group, are looked up.
      by_batch: whether the batch decides which rows of `tables` are looked up.
      inputs: names of other inputs than parameters that have a dimension of the group.
      obstacles: reasons why the group cannot be split without moving values between devices.
      is_part: whether the group is an inner factor of a parameter's output dimension, such as the
        features within a head, which the scores of attention sum over.
      sums: operations that sum over the group, so that their result lacks it.
    """

    factor: int
    size: int
    dims: Mapping[str, int]
    columns: frozenset[str]
    rows: frozenset[str]
    tables: frozenset[str]
    by_batch: bool
    inputs: tuple[str, ...]
    obstacles: tuple[str, ...]
    is_part: bool
    sums: tuple[Sum, ...]


@dataclasses.dataclass
class _Role:
    """Uses of the parameters that have a dimension in one group; the fields are those of
    `DimGroup`.
    """

    columns: set[str] = dataclasses.field(default_factory=set)
    rows: set[str] = dataclasses.field(default_factory=set)
    tables: set[str] = dataclasses.field(default_factory=set)
    by_batch: bool = False


class DimGroups:
    """Finds the groups of dimensions of one program that can only be split together.

    Args:
      program: traced program.
      weights: names of the parameters, which are the first inputs.
      state: names of the next inputs, which are neither parameters nor part of the batch.
      batch: names of the remaining inputs.
      outputs: names of parameters in the order of the outputs, if the outputs are their gradients.
        A gradient is split like its parameter.
    """

    def __init__(
        self,
        program: Jaxpr,
        weights: Sequence[str],
        state: Sequence[str],
        batch: Sequence[str],
        *,
        outputs: Sequence[str] = (),
    ) -> None:
        self._record = record = Record()
        avals: list[Any] = [variable.aval for variable in program.invars]
        dims = [record.factors.new_dims(aval.shape) for aval in avals]
        self._weights = dict(zip(weights, dims[: len(weights)], strict=True))
        self._others = dict(zip([*state, *batch], dims[len(weights) :], strict=True))
        inputs = [Value(dims, frozenset([name])) for name, dims in self._weights.items()]
        # The empty set says that state does not depend on the batch.
        inputs += [Value(self._others[name], frozenset()) for name in state]
        inputs += [Value(self._others[name]) for name in batch]
        results = follow_dims(record, program, inputs)
        # The last result is the loss, to which no parameter belongs.
        for name, gradient in zip(outputs, results, strict=False):
            for a, b in zip(self._weights[name], gradient.dims, strict=True):
                record.unify(a, b)

    def find(self) -> list[DimGroup]:
        """Returns groups of parameter dimensions that can only be split over devices together.

        They are in the order of the parameters.
        """
        of_weights: dict[int, dict[str, int]] = {}
        for name, dims in self._weights.items():
            for place, dim in enumerate(dims):
                for factor in self._groups(dim):
                    of_weights.setdefault(factor, {}).setdefault(name, place)
        return [self._group(factor, dims) for factor, dims in of_weights.items()]

    def group_at(self, name: str, dim: int) -> int | None:
        """Returns the number of the outermost group of a parameter's dimension; None for size 1."""
        return next(iter(self._groups(self._weights[name][dim])), None)

    def sums_over(self, factor: int) -> tuple[Sum, ...]:
        """Returns the operations that sum over group number `factor`."""
        return tuple(self._sums.get(factor, ()))

    def totals(self, factors: Collection[int], *, added_first: bool) -> list[tuple[int, Sum]]:
        """Returns (group, sum) for each all-reduce of a program in which these groups are split.

        Args:
          factors: numbers of the groups, which are split over the same devices.
          added_first: whether results of sums that are only added to each other are added before
            the all-reduce. Of these sums only the first is returned.
        """
        found: dict[int, tuple[int, Sum]] = {}
        for number, one in enumerate(self._record.totals):
            if isinstance(one, Sum):
                held = [g for dim in one.over for g in self._groups(dim) if g in factors]
                if held:
                    found[number] = held[0], one
            # The compiler adds the parts first, so both sums need one all-reduce.
            elif added_first and one[0] in found and one[1] in found:
                found[number] = found.pop(one[0])
                del found[one[1]]
        return list(found.values())

    def meet(self, first: int, second: int) -> bool:
        """Returns whether any value has dimensions of both groups; then only one of them can be
        split.
        """
        return any(first in held and second in held for held in self._held)

    def _group(self, factor: int, dims: Mapping[str, int]) -> DimGroup:
        role = self._roles.get(factor, _Role())
        of_inputs = {
            name: {group for dim in dims for group in self._groups(dim)}
            for name, dims in self._others.items()
        }
        return DimGroup(
            factor=factor,
            size=self._record.factors.size(factor),
            dims=dims,
            columns=frozenset(role.columns),
            rows=frozenset(role.rows),
            tables=frozenset(role.tables),
            by_batch=role.by_batch,
            inputs=tuple(name for name, held in of_inputs.items() if factor in held),
            obstacles=tuple(dict.fromkeys(self._obstacles.get(factor, ()))),
            is_part=self._is_inner(factor) or any(one.is_matrix for one in self.sums_over(factor)),
            sums=self.sums_over(factor),
        )

    def _is_inner(self, factor: int) -> bool:
        """Returns whether the group is an inner factor of a parameter's dimension."""
        every = (dim for dims in self._weights.values() for dim in dims)
        return any(factor in self._groups(dim)[1:] for dim in every)

    def _groups(self, dim: Dim) -> list[int]:
        """Returns the numbers of the groups (factors split together) that make up a dimension,
        outermost first.
        """
        leaves = self._record.factors.leaves(dim)
        return [self._linked.get(factor, factor) for factor in leaves]

    @functools.cached_property
    def _linked(self) -> dict[int, int]:
        """Returns {factor: group} for factors that are merged with another factor, or are a part of
        it.
        """
        parents: dict[int, int] = {}

        def root(factor: int) -> int:
            while parents.get(factor, factor) != factor:
                factor = parents[factor]
            return factor

        leaves = self._record.factors.leaves
        for first, second in self._record.links:
            a, b = root(leaves(first)[0]), root(leaves(second)[0])
            if a != b:
                parents[b] = a
        return {factor: root(factor) for factor in parents}

    @functools.cached_property
    def _held(self) -> list[frozenset[int]]:
        """Returns the sets of groups whose dimensions occur together in one value of the
        program.
        """
        arrays = (*self._weights.values(), *self._record.seen)
        held = (frozenset(group for dim in dims for group in self._groups(dim)) for dims in arrays)
        # Many values have the same dimensions.
        return list(dict.fromkeys(held))

    @functools.cached_property
    def _sums(self) -> dict[int, list[Sum]]:
        """Returns {group: operations whose result lacks the dimensions of the group (sums over
        it)}.
        """
        found: dict[int, list[Sum]] = {}
        for one in self._record.totals:
            if isinstance(one, Sum):
                for group in {group for dim in one.over for group in self._groups(dim)}:
                    found.setdefault(group, []).append(one)
        return found

    @functools.cached_property
    def _obstacles(self) -> dict[int, list[str]]:
        """Returns {number of a group: reasons why its dimensions cannot be split over devices}."""
        found: dict[int, list[str]] = {}
        for dim, why in self._record.obstacles:
            for group in self._groups(dim):
                found.setdefault(group, []).append(why)
        for dims in (*self._weights.values(), *self._record.seen):
            seen: set[int] = set()
            for dim in dims:
                outer = 1
                for factor in self._record.factors.leaves(dim):
                    group = self._linked.get(factor, factor)
                    if outer > 1:
                        found.setdefault(group, []).append(_INSIDE.format(outer))
                    if group in seen:
                        found.setdefault(group, []).append(_TWICE)
                    seen.add(group)
                    outer *= self._record.factors.size(factor)
        for group, sums in self._sums.items():
            if any(one.is_matrix for one in sums):
                found.setdefault(group, []).append(_SCORES)
        return found

    @functools.cached_property
    def _roles(self) -> dict[int, _Role]:
        """Returns {number of a group: how products use the parameters with a dimension in the
        group}.
        """
        roles: dict[int, _Role] = {}
        for use in self._record.uses:
            places = {"columns": use.free, "rows": use.contracted, "tables": use.looked_up}
            for kind, dims in places.items():
                for group in {group for dim in dims for group in self._groups(dim)}:
                    role = roles.setdefault(group, _Role())
                    getattr(role, kind).update(self._holding(use, group))
                    role.by_batch |= kind == "tables" and use.by_batch
        return roles

    def _holding(self, use: WeightUse, group: int) -> Iterator[str]:
        """Yields the parameters of a product that have a dimension in the group."""
        for name in use.weights:
            if any(group in self._groups(dim) for dim in self._weights[name]):
                yield name


def gradient_program(forward: ClosedJaxpr, trained: Sequence[int]) -> Jaxpr:
    """Returns the program of a loss and its gradients, without dead code.

    The program recomputes layers in a `jax.checkpoint`, like a training step.

    Args:
      forward: traced loss; its first output is the scalar to differentiate.
      trained: positions of the inputs to differentiate by.

    Returns:
      A program with the same inputs. Its outputs are the gradients in the order of `trained`, then
      the loss.
    """
    function = jaxpr_as_fun(forward)

    def gradients(*inputs: jax.Array) -> list[Any]:
        def loss(*weights: jax.Array) -> Any:
            arrays = [*inputs]
            for place, weight in zip(trained, weights, strict=True):
                arrays[place] = weight
            return function(*arrays)[0]

        weights = [inputs[place] for place in trained]
        value, found = jax.value_and_grad(loss, argnums=tuple(range(len(trained))))(*weights)
        return [*found, value]

    avals: list[Any] = [variable.aval for variable in forward.jaxpr.invars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return without_waste(jax.make_jaxpr(gradients)(*shapes))
