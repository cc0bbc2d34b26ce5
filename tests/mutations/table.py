"""Faults that the test suite must find: one small change of the source each, and the tests for it.

`python -m tests.mutations` makes each change in a copy of the sources, runs the named tests there,
and lists the changes that no test noticed. `tests/test_mutations.py` holds the table to the source.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of the source.

    Attributes:
      old: text that occurs exactly once in the sources of both packages.
      new: the text that takes its place.
      tests: arguments of pytest, without the slow tests; at least one of these tests must fail.
    """

    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "return jnp.sum(values * weights), jnp.sum(weights)",
        "return jnp.sum(values * weights), jnp.float32(weights.size)",
        "tests/test_losses.py",
    ),
    Mutation(
        "logsumexp(logits, axis=-1) - picked\n    trusted",
        "logsumexp(logits[..., :-1], axis=-1) - picked\n    trusted",
        "tests/test_losses.py",
    ),
    Mutation(
        "known = (targets >= 0) & (targets < logits.shape[-1])",
        "known = targets >= 0",
        "tests/test_losses.py",
    ),
    Mutation(
        'return {"sum": jnp.where(weight == 0, 0, _float32(value) * weight), "weight": weight}',
        'return {"sum": _float32(value), "weight": weight}',
        "tests/test_own_metrics.py",
    ),
    Mutation(
        "good_steps % config.window == 0",
        "good_steps % config.window == 1",
        "tests/test_loss_scale.py",
    ),
    Mutation(
        "falls = ~finite & (hysteresis <= 1)",
        "falls = ~finite",
        "tests/test_loss_scale.py",
    ),
    Mutation(
        "jnp.clip(moved, config.minimum, config.maximum)",
        "jnp.maximum(moved, config.minimum)",
        "tests/test_loss_scale.py",
    ),
    Mutation(
        "refills = finite if config.consecutive_hysteresis else rises",
        "refills = rises",
        "tests/test_loss_scale.py",
    ),
    Mutation(
        "squares.append(read[name] / copies)",
        "squares.append(read[name])",
        "tests/test_updates.py",
    ),
    Mutation(
        "return now.scale * jnp.where(now.norm < tx.clip_norm, 1.0, tx.clip_norm / now.norm)",
        "return now.scale * jnp.where(now.norm < tx.clip_norm, 1.0, 1.0)",
        "tests/test_step.py tests/test_pieces.py",
    ),
    Mutation(
        "keep = lambda new, old: jnp.where(now.skip, old, new)",
        "keep = lambda new, old: new",
        "tests/test_step.py tests/test_engine.py",
    ),
    Mutation(
        "by_name[name] = square * scale * scale",
        "by_name[name] = square * scale",
        "tests/test_offload_params.py",
    ),
    Mutation(
        "whole = lax.slice_in_dim(whole, 0, self.size, axis=dim)",
        "whole = lax.slice_in_dim(whole, 0, self.size - 1, axis=dim)",
        "tests/test_zero_program.py tests/test_optax.py",
    ),
    Mutation(
        "if not buckets or filled + size > limit:",
        "if not buckets or filled > limit:",
        "tests/test_zero_program.py tests/test_equality.py",
    ),
    Mutation(
        "start += shard.size\n        return leaves",
        "start += 0\n        return leaves",
        "tests/test_equality.py",
    ),
    Mutation(
        "shards = collectives.sum_buckets(shards, axes, bucket_size, (REPLICA,))",
        "shards = collectives.sum_buckets(shards, axes, bucket_size, ())",
        "tests/test_equality.py -k hybrid",
    ),
    Mutation(
        "microbatch_key = jax.random.fold_in(key, index)",
        "microbatch_key = key",
        "tests/test_model.py",
    ),
    Mutation(
        "sums = jax.tree.map(jnp.add, sums, more)\n        return (sums,",
        "sums = more\n        return (sums,",
        "tests/test_equality.py",
    ),
    Mutation(
        "found[name] = jnp.where(new == old, 0, new - old)",
        "found[name] = new - old",
        "tests/test_model.py",
    ),
    Mutation(
        "(x if name in counted else x / count)",
        "(x / count)",
        "tests/test_pieces.py",
    ),
    Mutation(
        "jnp.maximum(earlier[name], x) for name, x in chosen.items()",
        "x for name, x in chosen.items()",
        "tests/test_fp8_training.py",
    ),
    Mutation(
        "return 1 - jnp.asarray(decay, jnp.float32) ** jnp.asarray(count, jnp.int32)",
        "return 1 - jnp.asarray(decay, jnp.float32) ** jnp.asarray(count + 1, jnp.int32)",
        "tests/test_kernels_optax.py",
    ),
    Mutation(
        "return (mu / s.correction1) / (root + s.eps) + s.weight_decay * param",
        "return (mu / s.correction1) / (root + s.eps)",
        "tests/test_kernels_optax.py",
    ),
    Mutation(
        "direction = jnp.sign(s.rest1 * grad + s.b1 * mu) + s.weight_decay * param",
        "direction = jnp.sign(s.rest1 * grad + s.b2 * mu) + s.weight_decay * param",
        "tests/test_kernels_optax.py",
    ),
    Mutation(
        "return _descend(updated, new_trace, grad + s.momentum * new_trace, s)",
        "return _descend(updated, new_trace, new_trace, s)",
        "tests/test_kernels_optax.py",
    ),
    Mutation(
        "jnp.where(skip == jnp.zeros_like(before), after, before)",
        "after",
        "tests/test_kernels_optax.py",
    ),
    Mutation(
        "is_zero = (param_norm == 0) | (update_norm == 0)",
        "is_zero = param_norm == 0",
        "tests/test_kernels_elementwise.py tests/test_kernels_optax.py",
    ),
    Mutation(
        "kept = (raw + bits) & _like(raw, 0xFFFF0000)",
        "kept = raw & _like(raw, 0xFFFF0000)",
        "tests/test_kernels_rounding.py",
    ),
    Mutation(
        "drawn >> _like(index, 16) if number % 2 else",
        "drawn & _like(index, 0xFFFF) if number % 2 else",
        "tests/test_kernels_rounding.py",
    ),
    Mutation(
        "bit = depth if order is TreeOrder.HIGHEST_FIRST else bits - 1 - depth",
        "bit = depth",
        "tests/test_deterministic.py",
    ),
    Mutation(
        "rows = rows[:half] + rows[half:]",
        "rows = rows[half:] + rows[half:]",
        "tests/test_deterministic.py",
    ),
    Mutation(
        "mixed *= _positions(bits.shape, [*at, 0], weights) + np.uint32(1)",
        "mixed *= np.uint32(1)",
        "tests/test_checkpoint_fingerprints.py",
    ),
    Mutation(
        "key = key + position * jnp.uint32(keys[dim])",
        "key = key + position",
        "tests/test_checkpoint_fingerprints.py",
    ),
    Mutation(
        "ordered[: -self.last] if not self.every or s % self.every",
        "ordered[: -self.last] if not self.every or not s % self.every",
        "tests/test_checkpoint.py",
    ),
    Mutation(
        "result[outside] = walked",
        "result[outside] = result[outside] % np.uint64(size)",
        "tests/test_data_shuffle.py",
    ),
    Mutation(
        'text = ",".join(str(int(part)) for part in key)',
        "text = str(int(key[0]))",
        "tests/test_data_shuffle.py",
    ),
    Mutation(
        ' = microbatch + 2 * (p - 1) - stage\n    return assemble("1f1b"',
        ' = microbatch + 2 * (p - 1)\n    return assemble("1f1b"',
        "tests/test_schedules.py",
    ),
    Mutation(
        'ticks["W", stage, microbatch] = microbatch + 2 * (p - 1)\n',
        'ticks["W", stage, microbatch] = microbatch + 2 * (p - 1) + 1\n',
        "tests/test_schedules.py",
    ),
    Mutation(
        "start = group * p * v + place",
        "start = group * p * v",
        "tests/test_schedules.py",
    ),
    Mutation(
        "size = 2 * _ring(shards * replicas) * whole",
        "size = _ring(shards * replicas) * whole",
        "tests/test_forecast_formulas.py",
    ),
    Mutation(
        "again = microbatches * plan.program.regather if lazily else 0",
        "again = 0",
        "tests/test_forecast_formulas.py",
    ),
    Mutation(
        "return (size - 1) / size",
        "return 1.0",
        "tests/test_forecast_formulas.py",
    ),
    Mutation(
        "return None if was_high else spike",
        "return spike",
        "tests/test_monitor.py",
    ),
    Mutation(
        "least = max(LEAST_JUMP * abs(median), LEAST_SETBACK * gained)",
        "least = LEAST_JUMP * abs(median)",
        "tests/test_monitor.py",
    ),
    Mutation(
        "excess = row.late - statistics.median(others)",
        "excess = row.late",
        "tests/test_monitor.py",
    ),
    Mutation(
        "if self._counts[process] < IN_A_ROW:",
        "if self._counts[process] < 1:",
        "tests/test_monitor.py",
    ),
    Mutation(
        "(_UNSAFE_IN_PAGE if is_page else _UNSAFE).sub(_escape, text)",
        "_UNSAFE_IN_PAGE.sub(_escape, text)",
        "tests/test_display.py",
    ),
    Mutation(
        '    text = _IN_QUERY.sub(rf"\\g<name>={HIDDEN}", text)\n',
        "",
        "tests/test_monitor_safety.py",
    ),
    Mutation(
        "name: HIDDEN if _holds_secret(name, inner) else _redact(inner, secrets)",
        "name: _redact(inner, secrets)",
        "tests/test_monitor_safety.py",
    ),
    Mutation(
        "    if len(text) > max_digits:",
        "    if len(text) > 100 * max_digits:",
        "tests/test_bounded_json.py",
    ),
    Mutation(
        "    if len(found) != len(pairs):",
        "    if len(found) > len(pairs):",
        "tests/test_bounded_json.py",
    ),
    Mutation(
        'return all(part not in ("", ".", "..") for part in name.split("/"))',
        'return all(part not in ("", ".") for part in name.split("/"))',
        "tests/test_bounded_json.py tests/test_checkpoint_mutations.py",
    ),
    Mutation(
        "lambda value: type(value) is int and least <= value <= _LARGEST",
        "lambda value: isinstance(value, int)",
        "tests/test_checkpoint_mutations.py",
    ),
    Mutation(
        "        if holder.token != self._token:\n            self.give_up(",
        "        if not holder.token:\n            self.give_up(",
        "tests/test_folder_lock.py",
    ),
    Mutation(
        "is_known, is_alive = True, not locked",
        "is_known, is_alive = True, False",
        "tests/test_folder_lock.py",
    ),
    Mutation(
        "return max(size for size in self.micro_batch_sizes if rows % size == 0)",
        "return min(size for size in self.micro_batch_sizes if rows % size == 0)",
        "tests/test_elasticity.py",
    ),
    Mutation(
        "sign = 1 if prefer_larger else -1",
        "sign = 1",
        "tests/test_elasticity.py",
    ),
    Mutation(
        '"left": [(target, source) for source, target in right]',
        '"left": right',
        "tests/test_pipeline_executor.py",
    ),
    Mutation(
        "busy = max(compute or 0.0, memory or 0.0)",
        "busy = compute or 0.0",
        "tests/test_forecast_roofline.py",
    ),
    Mutation(
        "else busy + exposed + offload",
        "else busy + offload",
        "tests/test_forecast_roofline.py",
    ),
    Mutation(
        "marks = [0 if placement.leaves[name].frozen else 1 << i for i, name in enumerate(names)]",
        "marks = [0 for name in names]",
        "tests/test_own_metrics.py",
    ),
    Mutation(
        'gain = self.best - value if self.mode == "min" else value - self.best',
        "gain = self.best - value",
        "tests/test_callbacks.py",
    ),
    Mutation(
        "        return gain > self.min_delta",
        "        return gain > 0",
        "tests/test_callbacks.py",
    ),
    Mutation(
        "            shape[self.zero_dim] = self.padded_size\n",
        "            shape[self.zero_dim] = self.shape[self.zero_dim]\n",
        "tests/test_placement.py",
    ),
    Mutation(
        "if self.shape[self.zero_dim] % math.prod(axis_sizes[axis] for axis in own) == 0:",
        "if True:",
        "tests/test_placement.py tests/test_arrays.py",
    ),
    Mutation(
        'PASS_AXES = names_of(AXIS_TABLE, manual="always")',
        "PASS_AXES = DATA_AXES",
        "tests/test_mesh.py tests/test_context_training.py",
    ),
    Mutation(
        "jax.tree.map(config.context.in_order, config.before_cut(batch)), P(DATA_AXES",
        "config.before_cut(batch), P(DATA_AXES",
        "tests/test_context_training.py",
    ),
    Mutation(
        "    grad = _decayed(param, read[0], s)\n    new_trace = grad",
        "    grad = read[0]\n    new_trace = grad",
        "tests/test_kernels_optax.py",
    ),
    Mutation(
        "rows[name] = jax.tree.map(lambda x, i=number: x[i], params[stack])",
        "rows[name] = jax.tree.map(lambda x: x[0], params[stack])",
        "tests/test_rolling.py",
    ),
    Mutation(
        "return next((name for name in names if value_of(name) != first), None)",
        "return None",
        "tests/test_rolled_training.py",
    ),
    Mutation(
        "jax.checkpoint(run, policy=REMAT_POLICIES[remat], prevent_cse=False)",
        "run",
        "tests/test_rolled_training.py",
    ),
    Mutation(
        "and layer_of(name) != layer and held_until < at:",
        "and layer_of(name) != layer:",
        "tests/test_unrolled_layers.py",
    ),
    Mutation(
        "slowest = exchange(mine).max(axis=0)",
        "slowest = exchange(mine)[0]",
        "tests/test_tuning.py",
    ),
    Mutation(
        "is_faster = time_ <= MARGIN * base",
        "is_faster = time_ <= base",
        "tests/test_tuning.py",
    ),
    Mutation(
        "keys = fold_all(keys, lax.axis_index(axis))",
        "keys = fold_all(keys, 0)",
        "tests/test_optim_dtypes.py",
    ),
    Mutation(
        "if method.per_layer or name in options.decay.stacks]",
        "if method.per_layer]",
        "tests/test_optim_layers.py",
    ),
    Mutation(
        "x.update(sharding=on_host(x.sharding)) for x in leaf.values",
        "x for x in leaf.values",
        "tests/test_rolled_training.py",
    ),
)
