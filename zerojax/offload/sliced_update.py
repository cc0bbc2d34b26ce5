"""Updates parameters whose optimizer state is in slices, with one slice on the device at a time.

Reason: moving the whole state to the device, updating it and moving it back takes twice its size in
device memory (compiled for an H200: 1,536 MB for 768 MB of state). A loop that loads a slice,
updates it and stores it in place takes the memory of two slices of each array, and no additional
host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.config.mesh import DEVICE, HOST
from zerojax.config.tree_types import Tree
from zerojax.offload.slice_pipeline import SliceStack, update_slices
from zerojax.optim import BegunUpdate, Optimizer, UpdateContext
from zerojax.passes.update import ThisStep, axes_of_leaves, clipped_scale, true_shapes
from zerojax.placement.decisions import Decisions
from zerojax.placement.slices import as_slices
from zerojax.placement.state import TrainState
from zerojax.placement.state_layout import SlicedLeaf

Arrays = dict[str, Any]


def build_offload_update(plan: Decisions, *, whole: bool = False) -> Callable[..., dict[str, Any]]:
    """Builds the traced update of a state with offload.

    Args:
      plan: plan of the run.
      whole: whether to update also the parameters of layers that a pass updates in a step.

    The update maps `(gradients, state, ThisStep)` to `{"params": ..., "opt_state": ..., "masters":
    ...}`. It leaves unchanged: optimizer-state slices in files, the part of `params` that is
    computed from them, and parameters that the backward pass has already updated (`gradients` lacks
    them). Parameters whose weights are in files are not in the state.
    """
    tx, layout = plan.tx, plan.offload
    assert isinstance(tx, Optimizer)
    assert tx.begin is not None
    assert layout is not None
    fields = ("params", "opt_state", "masters")
    specs = {name: specs_of(plan.abstract_state[name]) for name in fields}  # type: ignore[literal-required]

    done = frozenset() if whole else layout.updated_in_pass
    given = {name: spec for name, spec in specs["params"].items() if name not in done}

    def local(grads: Arrays, old: dict[str, Any], *numbers: jax.Array) -> dict[str, Any]:
        context = context_of(plan, *numbers)
        begun = begin(plan, old["opt_state"], context)
        kept = [name for name in old["params"] if name not in layout.leaves]
        pick = lambda tree: {name: tree[name] for name in kept}  # noqa: E731
        params, others = begun.run(
            pick(old["params"]), tuple(map(pick, begun.moments)), pick(grads), None
        )
        after: tuple[Arrays, ...] = tuple(map(dict, others))
        masters: Arrays = {}
        last: Any = None
        for name, leaf in layout.leaves.items():
            moments = tuple(moment[name] for moment in begun.moments)
            if name in layout.paged:
                masters[name] = old["masters"][name]
                for moment, empty in zip(after, moments, strict=True):
                    moment[name] = empty
                continue
            before = 0 if whole else layout.updated_beside(name)
            update = LeafUpdate(begun, leaf, on_host=name in layout.streamed, before=before)
            master = old["masters"].get(name)
            if last is not None and name not in done:
                # XLA unrolls a loop over one slice: without a barrier the compiler would load
                # the slices of all such parameters at once.
                (master, moments), _ = lax.optimization_barrier(((master, moments), last))
            now = old["params"][name], master, moments
            params[name], new_master, new = now if name in done else update(*now, grads[name])
            last = params[name] if leaf.counts[HOST] and name not in done else last
            if master is not None:
                masters[name] = new_master
            for moment, own in zip(after, new, strict=True):
                moment[name] = own
        ordered = {name: params[name] for name in old["params"]}
        return {"params": ordered, "opt_state": begun.end(after), "masters": masters}

    mapped = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(given, specs, P(), P(), P()),
        out_specs=specs,
        check_vma=False,
    )

    def update(grads: Arrays, state: TrainState, now: ThisStep) -> dict[str, Any]:
        old = {name: state[name] for name in fields}  # type: ignore[literal-required]
        grads = {name: grads[name] for name in given}
        return mapped(grads, old, clipped_scale(tx, now), now.skip, jax.random.key_data(now.key))

    return update


def context_of(
    plan: Decisions, scale: jax.Array, skip: jax.Array, key_data: jax.Array
) -> UpdateContext:
    """Returns the `UpdateContext` for an update inside a `shard_map` over the whole mesh."""
    params = plan.abstract_stored["params"]
    return UpdateContext(
        gradient_scale=scale,
        skip=skip,
        key=jax.random.wrap_key_data(key_data),
        axes=axes_of_leaves(plan.mesh, params),
        shapes=true_shapes(plan),
        choice=plan.program.kernels["update"],
    )


def begin(plan: Decisions, opt_state: Tree, context: UpdateContext) -> BegunUpdate:
    """Computes the scalars of this step's update, for all parameters, before any array is
    loaded.
    """
    assert isinstance(plan.tx, Optimizer)
    assert plan.tx.begin is not None
    whole = {
        name: jax.ShapeDtypeStruct(shape, plan.abstract_stored["params"][name].dtype)
        for name, shape in true_shapes(plan).items()
    }
    return plan.tx.begin(opt_state, whole, context)


def update_slice(
    begun: BegunUpdate,
    name: str,
    number: Any,
    master: jax.Array,
    moments: tuple[jax.Array, ...],
    grad: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Updates one or several slices of a parameter on the device; returns (master, moments).

    Args:
      number: number of the (first) slice in its shard, int32 []; random bits depend on it.
    """
    new, after = begun.run(
        {name: master}, tuple({name: m} for m in moments), {name: grad}, jnp.int32(number)
    )
    return new[name], tuple(moment[name] for moment in after)


class LeafUpdate:
    """Updates one parameter's optimizer-state slices in memory: first the slices on the device,
    then those on the host.

    Args:
      begun: the update of this step.
      leaf: slices of the parameter.
      on_host: whether the weights are in host memory.
      before: number of slices on the host that were updated before.
    """

    def __init__(
        self, begun: BegunUpdate, leaf: SlicedLeaf, *, on_host: bool, before: int = 0
    ) -> None:
        self._begun, self._leaf, self._on_host = begun, leaf, on_host
        self._before = {DEVICE: 0, HOST: before}

    def __call__(
        self,
        weights: jax.Array,
        master: Mapping[str, jax.Array] | None,
        moments: tuple[Mapping[str, jax.Array], ...],
        grad: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array], tuple[dict[str, jax.Array], ...]]:
        """Updates one parameter; returns (weights in their dtype, master weights, moments).

        Without masters, the update changes the weights directly.
        """
        leaf, new_master = self._leaf, {}
        new_moments: tuple[dict[str, jax.Array], ...] = tuple({} for _ in moments)
        weights, grad = as_slices(leaf, weights), as_slices(leaf, grad)
        for tier in (DEVICE, HOST):
            if not leaf.counts[tier]:
                continue
            state = (None if master is None else master[tier], *(m[tier] for m in moments))
            at_once = tier == DEVICE and not self._on_host
            run = self._together if at_once else self._in_loop
            if leaf.counts[tier] > self._before[tier]:
                weights, state = run(tier, weights, state, grad)
            if master is not None:
                new_master[tier] = state[0]
            for own, new in zip(new_moments, state[1:], strict=True):
                own[tier] = new
        return weights.reshape(leaf.shard_shape), new_master, new_moments

    def _together(self, tier: str, weights: Any, state: tuple[Any, ...], grad: Any) -> Any:
        """Updates all slices of a tier in device memory together, without a loop.

        Returns (weights, (master or None, *moments)) after the update.
        """
        first, count = self._leaf.first(tier), self._leaf.counts[tier]
        part = lambda x: lax.slice_in_dim(x, first, first + count)  # noqa: E731
        master, *moments = state
        old = part(weights) if master is None else master
        new, after = update_slice(
            self._begun, self._leaf.name, first, old, tuple(moments), part(grad)
        )
        weights = lax.dynamic_update_slice_in_dim(weights, new.astype(weights.dtype), first, 0)
        return weights, (None if master is None else new, *after)

    def _in_loop(self, tier: str, weights: Any, state: tuple[Any, ...], grad: Any) -> Any:
        """Updates one slice after the other, in place, in a loop."""
        before = self._before[tier]
        first, count = self._leaf.first(tier) + before, self._leaf.counts[tier] - before
        master, *moments = state
        sliced = moments if master is None else [master, *moments]
        stacks = [SliceStack(array=x, first=before, on_host=tier == HOST) for x in sliced]
        on_host = self._on_host
        stacks.append(SliceStack(array=grad, first=first, on_host=on_host, is_written=False))
        # Without a master the update starts from the weights.
        reads = master is None
        stacks.append(SliceStack(array=weights, first=first, on_host=on_host, is_read=reads))

        def update(index: jax.Array | int, slices: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            if master is None:
                *old, gradient, own = slices
            else:
                own, *old, gradient = slices
            new, after = update_slice(
                self._begun, self._leaf.name, index + first, own, tuple(old), gradient
            )
            new_weights = new.astype(weights.dtype)
            return (*after, new_weights) if master is None else (new, *after, new_weights)

        *after, weights = update_slices(count, stacks, update)
        return weights, (None, *after) if master is None else tuple(after)


def specs_of(tree: Tree) -> Any:
    """Returns the partition specs of a tree of `ShapeDtypeStruct`s with shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
