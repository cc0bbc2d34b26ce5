"""Updates with momentum of which devices exchange only the signs (1-bit Adam).

Each device adds its own gradient to the common momentum and to the error that its last message
left. The momentum has one part per device, and a device sends the signs of each part to that part's
device. That device averages the received signs of its part, keeps the error that encoding the mean
leaves, and sends the signs of the mean to all devices (arXiv:2102.02888, section 4). A run has two
programs: one for the warm-up, one for the compressed steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.config.tree_types import Batch
from zerojax.features.one_bit.sign_plan import (
    BEGUN,
    FROZEN_AT,
    SERVER,
    WORKER,
    errors_key,
    row_elements,
    signed_leaves,
)
from zerojax.optim import Optimizer, UpdateContext, one_bit_of
from zerojax.optim.one_bit import decode_signs, encode_signs
from zerojax.passes.update import (
    Arrays,
    ThisStep,
    axes_of_leaves,
    clipped_scale,
    specs_of_leaves,
    true_shapes,
)
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import DATA, PASS_AXES
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.state import ONE_BIT, TrainState
from zerojax.tracing import trees
from zerojax.transport.collectives import LeafCollectives, leaf_collectives, make_buckets


class _Parts:
    """Divides one parameter's momentum into one part ("row") per device.

    Padding is treated like other elements; it is cut off afterwards or has no effect.
    """

    def __init__(self, leaf: LeafPlacement, devices: int) -> None:
        self.shape, self.devices = leaf.shape, devices
        self.row = row_elements(leaf, devices)
        self._sharded: LeafCollectives | None = None
        if leaf.zero_dim is not None:
            float32 = {"compute_dtype": jnp.float32, "reduce_dtype": jnp.float32}
            self._sharded = leaf_collectives(leaf, devices, **float32)

    def split(self, whole: jax.Array) -> jax.Array:
        """Divides an unsharded array into [devices, elements of a row]."""
        if self._sharded is not None:
            return self._sharded.split_rows(whole)
        flat = whole.reshape(-1)
        return jnp.pad(flat, (0, self.devices * self.row - flat.size)).reshape(self.devices, -1)

    def stored(self, rows: jax.Array, own: jax.Array) -> jax.Array:
        """Returns the momentum as this device stores it: its shard, or the unsharded array.

        Args:
          rows: [devices, elements of a row], all parts.
          own: [elements of a row], this device's part.
        """
        if self._sharded is not None:
            return own.reshape(self._sharded.shard_shape(self.shape))
        return rows.reshape(-1)[: trees.num_elements(self.shape)].reshape(self.shape)

    def row_of(self, stored: jax.Array) -> jax.Array | None:
        """Returns this device's part of the stored momentum if it is sharded; None if it is
        unsharded.
        """
        return None if self._sharded is None else stored.reshape(-1)


def _parts_of(plan: Decisions) -> dict[str, _Parts]:
    devices = plan.mesh.shape[DATA]
    return {name: _Parts(leaf, devices) for name, leaf in signed_leaves(plan.placement).items()}


def build_signed_update(plan: Decisions) -> Callable[..., dict[str, Any]]:
    """Builds the traced update of the compressed steps, in which signs of the momentum are sent.

    The update is `(gradients, state, ThisStep) -> changed parts of the state`. Gradients of
    parameters whose momentum is sent as signs have shape [devices, ...] and are not summed over
    devices; other gradients are summed.
    """
    tx = plan.tx
    assert isinstance(tx, Optimizer)
    one_bit = one_bit_of(tx)
    assert one_bit is not None
    parts, devices = _parts_of(plan), plan.mesh.shape[DATA]
    abstract, key = plan.abstract_state, errors_key(plan.placement)
    params, opt_state, kept = (
        specs_of_leaves(abstract[n]) for n in ("params", "opt_state", ONE_BIT)
    )
    grads = {name: P(PASS_AXES) if name in parts else spec for name, spec in params.items()}
    context_of = _context(plan)
    limit = plan.settings.reduce_bucket_size

    def local(
        grads: Arrays,
        state: TrainState,
        shards: Arrays,
        kept: dict[str, Any],
        scale: jax.Array,
        skip: jax.Array,
        key_data: jax.Array,
    ) -> tuple[Arrays, Any, dict[str, Any]]:
        before = kept[key]
        made = {
            name: before[WORKER][name][0]
            + (1 - one_bit.b1) * part.split(grads[name][0].astype(jnp.float32) * (scale * devices))
            for name, part in parts.items()
        }
        rows, own, left, left_of_mean = _agree(made, before[SERVER], parts, limit)
        worker = {name: (one_bit.b1 * rows[name] + left[name])[None] for name in parts}
        server = {name: x[None] for name, x in left_of_mean.items()}
        after = {WORKER: worker, SERVER: server}
        then = {name: before[name] for name in after}
        after = jax.tree.map(lambda new, old: jnp.where(skip, old, new), after, then)
        momentum = {name: part.stored(rows[name], own[name]) for name, part in parts.items()}
        plain = {name: grad for name, grad in grads.items() if name not in parts}
        arrays = shards, plain, momentum, state
        context = context_of(scale, skip, key_data)
        shards, state = one_bit.apply(arrays, context, kept[FROZEN_AT])
        return shards, state, {**kept, key: {**before, **after}}

    mapped = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(grads, opt_state, params, kept, P(), P(), P()),
        out_specs=(params, opt_state, kept),
        check_vma=False,
    )

    def update(grads: Arrays, state: TrainState, now: ThisStep) -> dict[str, Any]:
        scale, key_data = clipped_scale(tx, now), jax.random.key_data(now.key)
        given = grads, state["opt_state"], state["params"], state[ONE_BIT]
        new, opt_state, kept = mapped(*given, scale, now.skip, key_data)
        return {"params": new, "opt_state": opt_state, "masters": {}, ONE_BIT: kept}

    return update


def _agree(
    made: Arrays, left_before: Arrays, parts: Mapping[str, _Parts], limit: int
) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """Averages the momentum over devices by exchanging its signs.

    Args:
      made: {name: momentum computed on this device, float32 [devices, elements of a row]}.
      left_before: {name: error that this device's last message of a mean left, float32 [1, elements
        of a row]}.
      parts: {name: division of the parameter into rows}.
      limit: largest number of elements per collective.

    Returns:
      ({name: common momentum, [devices, elements of a row]}, {name: this device's row of it},
      {name: error of the message that sends `made`}, {name: error of the message that sends the
      mean}).
    """
    rows, own, left, left_of_mean = {}, {}, {}, {}
    sizes = {name: x.size for name, x in made.items()}
    for names in make_buckets(sizes, limit):
        widths = {name: parts[name].row for name in names}
        sent = {name: encode_signs(made[name]) for name in names}
        got = _in_one(sent, lambda message: lax.all_to_all(message, DATA, 0, 0))
        messages = {}
        for name, row in widths.items():
            left[name] = made[name] - decode_signs(sent[name], row)
            mean = jnp.mean(decode_signs(got[name], row), axis=0) + left_before[name][0]
            messages[name] = encode_signs(mean)
            own[name] = decode_signs(messages[name], row)
            left_of_mean[name] = mean - own[name]
        all_of_it = _in_one(messages, lambda message: lax.all_gather(message, DATA))
        rows |= {name: decode_signs(all_of_it[name], row) for name, row in widths.items()}
    return rows, own, left, left_of_mean


def _in_one(messages: Arrays, collective: Callable[[jax.Array], jax.Array]) -> Arrays:
    """Concatenates several messages, uint8 [..., bytes], and runs one collective on them."""
    joined = collective(jnp.concatenate(list(messages.values()), axis=-1))
    found, start = {}, 0
    for name, message in messages.items():
        found[name] = lax.slice_in_dim(joined, start, start + message.shape[-1], axis=-1)
        start += message.shape[-1]
    return found


def _context(plan: Decisions) -> Callable[..., UpdateContext]:
    """Builds `(scale, skip, key data) -> UpdateContext` for an update of all shards."""
    fixed = {
        "axes": axes_of_leaves(plan.mesh, plan.abstract_state["params"]),
        "shapes": true_shapes(plan),
        "choice": plan.program.kernels["update"],
    }

    def context(scale: jax.Array, skip: jax.Array, key_data: jax.Array) -> UpdateContext:
        key = jax.random.wrap_key_data(key_data)
        return UpdateContext(gradient_scale=scale, skip=skip, key=key, **fixed)

    return context


def build_beginning(plan: Decisions) -> Any:
    """Builds the jitted `state -> state` that begins the compressed steps; it donates the state.

    It sets the errors of messages to zero, and records the step at which the second moment is
    frozen, if it is not frozen yet.
    """
    one_bit = one_bit_of(plan.tx)
    assert one_bit is not None
    parts, key = _parts_of(plan), errors_key(plan.placement)
    opt_state, kept = (specs_of_leaves(plan.abstract_state[n]) for n in ("opt_state", ONE_BIT))

    def local(state: TrainState, kept: dict[str, Any]) -> dict[str, Any]:
        momentum = one_bit.momentum(state)
        frozen_at = jnp.where(kept[FROZEN_AT] > 0, kept[FROZEN_AT], one_bit.frozen_at(state))
        worker = {}
        for name, part in parts.items():
            row = part.row_of(momentum[name])
            rows = part.split(momentum[name]) if row is None else lax.all_gather(row, DATA)
            worker[name] = one_bit.b1 * rows[None]
        server = jax.tree.map(jnp.zeros_like, kept[key][SERVER])
        errors = {**kept[key], BEGUN: jnp.int32(1), WORKER: worker, SERVER: server}
        return {**kept, FROZEN_AT: frozen_at, key: errors}

    mapped = jax.shard_map(
        local, mesh=plan.mesh, in_specs=(opt_state, kept), out_specs=kept, check_vma=False
    )

    def begin(state: TrainState) -> TrainState:
        begun = state.copy()
        begun["one_bit"] = mapped(state["opt_state"], state["one_bit"])
        return begun

    return jax.jit(begin, donate_argnums=0, out_shardings=plan.state_shardings)


class TwoPrograms:
    """A step that runs one program until `freeze_step` updates are applied, and then another one.

    The host chooses the program. If the state is the result of the previous call, the host counts
    the batches itself; otherwise it reads the counters of the state. A skipped batch applies no
    update, and only the devices know whether a batch was skipped. So the host waits for the
    previous step where the warm-up would end, and once more for each batch that was skipped before.

    Attributes:
      warm_up: `(state, batch) -> (state, metrics)` for the first `freeze_step` updates.
      compressed: `(state, batch) -> (state, metrics)` for the updates after them.
      begin: `state -> state`, run before the first compressed step, and after loading a state that
        has no errors of messages.
      trace, lower: methods of `warm_up`.
    """

    def __init__(self, plan: Decisions, warm_up: Any, compressed: Any) -> None:
        one_bit = one_bit_of(plan.tx)
        assert one_bit is not None
        self.warm_up, self.compressed, self.begin = warm_up, compressed, build_beginning(plan)
        self.trace, self.lower = warm_up.trace, warm_up.lower
        self._freeze_step = one_bit.freeze_step
        self._key = errors_key(plan.placement)
        self._last: Any = None
        self._updates, self._begun = 0, False

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        if state["step"] is not self._last or self._last is None:
            self._updates, self._begun = int(state["step"]) - int(state["skipped"]), False
        elif not self._begun and self._updates >= self._freeze_step:
            self._updates = int(state["step"]) - int(state["skipped"])
        if self._updates < self._freeze_step:
            new, metrics = self.warm_up(state, batch)
        else:
            if not self._begun and int(state[ONE_BIT][self._key][BEGUN]) == 0:
                state = self.begin(state)
            self._begun = True
            new, metrics = self.compressed(state, batch)
        self._last, self._updates = new["step"], self._updates + 1
        return new, metrics


def unsummed_names(plan: Decisions) -> frozenset[str]:
    """Returns the parameters whose gradients are not summed over devices after the warm-up."""
    return frozenset(signed_leaves(plan.placement))
