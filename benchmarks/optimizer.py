"""AdamW, Lion, 8-bit Adam and gradient statistics: plain references under XLA compared with optax.

On a CPU no kernel runs; `benchmarks/gpu/optimizer.py` measures the same ways with kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, least_of, ratio_of, sample
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from pallas_kernels import gradients, optimizers
from pallas_kernels.adam8bit import init_moments
from pallas_kernels.adam8bit_kernel import update_adam8bit
from pallas_kernels.choice import Choice
from pallas_kernels.mosaic import BLOCK
from pallas_kernels.update import update, update_trees

LIMIT = 1.10
RATE, B1, B2, DECAY = 1e-4, 0.9, 0.95, 0.1
BYTES = {"adamw": 28, "lion": 20, "adam8bit": 16, "stats": 2}
"""Minimum bytes per parameter: float32 parameters and moments (8-bit: one byte each) read and
written once, a bfloat16 gradient read, bfloat16 parameters written. Statistics only read."""

Leaves = Sequence[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Ours:
    """Settings of zerojax's own update.

    Attributes:
      choice: implementation of the update.
      block: number of elements of a tile of the kernel.
      options: options of XLA's compiler.
    """

    choice: Choice
    block: int = BLOCK
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute one kind of update on given leaves.

    Attributes:
      init: function `() -> state`.
      step: function `(state, gradients, step number) -> (state, new arrays)`.
      options: pairs (name, value) of XLA's compiler options.
    """

    init: Callable[[], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    options: tuple[tuple[str, Any], ...] = ()


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns one row per kind of update and way."""
    shapes = [(64, 48), (48,)] if smoke else [(2048, 1024), (1024,), (1024, 1024)]
    oracle = Ours(Choice("xla", "the reference is what is measured"))
    rows: list[dict[str, Any]] = []
    goals = []
    for kind in BYTES:
        ways = ways_of(kind, shapes, {"reference": oracle})
        samples = take_samples(ways, shapes, rounds=2 if smoke else 7, steps=2 if smoke else 5)
        for name, taken in samples.items():
            rows.append(
                {
                    "kind": kind,
                    "way": name,
                    "cpu_ms": least_of(taken, "cpu") * 1e3,
                    "wall_ms": least_of(taken, "wall") * 1e3,
                    "temp_bytes_per_parameter": temporary_bytes(ways[name], shapes)
                    / num_parameters(shapes),
                }
            )
        if "optax" in samples:
            ratio = ratio_of(samples["reference"], samples["optax"], "cpu")
            goals.append(
                Goal(name=f"{kind}: reference / optax, CPU time", value=ratio, limit=LIMIT)
            )
    notes = [f"{num_parameters(shapes)} parameters in {len(shapes)} leaves; no kernel runs here"]
    return Record(name="optimizer", rows=rows, goals=goals, notes=notes)


def num_parameters(shapes: Leaves) -> int:
    """Returns the number of elements of all leaves."""
    return sum(_size(shape) for shape in shapes)


def ways_of(kind: str, shapes: Leaves, ours: Mapping[str, Ours]) -> dict[str, Way]:
    """Returns optax's way, if it has one, and zerojax's way with each of the implementations.

    Args:
      kind: kind of update, a key of `BYTES`.
      shapes: shapes of the leaves.
      ours: {name of a way: implementation}.
    """
    build = {"adamw": _adamw, "lion": _lion, "adam8bit": _adam8bit, "stats": _stats}[kind]
    ways = {name: build(shapes, one) for name, one in ours.items()}
    if kind == "stats":
        ways["optax"] = Way(tuple, _optax_stats)
    elif kind in ("adamw", "lion"):
        make = {"adamw": optax.adamw, "lion": optax.lion}[kind]
        ways["optax"] = _optax(shapes, make(RATE, B1, B2, weight_decay=DECAY))
    return ways


def make_gradients(shapes: Leaves) -> list[jax.Array]:
    """Returns random bfloat16 gradients."""
    return jax.jit(lambda: _random(shapes, 1e-2, jnp.bfloat16))()


def take_samples(
    ways: Mapping[str, Way],
    shapes: Leaves,
    *,
    rounds: int,
    steps: int,
    warm_up: int = 3,
    updates: int = 1,
) -> dict[str, list[Sample]]:
    """Times the ways in turns, all on the same gradients.

    Args:
      ways, shapes: ways to time, and shapes of their leaves.
      rounds, steps, warm_up: numbers for `interleave`; a step is one start of a program.
      updates: number of updates in one program. With several updates, the host time for hundreds of
        arguments, which a training step pays only once, is not counted as time of the update.

    Returns:
      Samples whose times are those of one update.
    """
    grads = make_gradients(shapes)
    held: dict[Any, Any] = {}
    sides = {name: _side(way, shapes, grads, updates, held) for name, way in ways.items()}
    return interleave(sides, warm_up=warm_up, steps=steps, rounds=rounds)


def compile_way(way: Way, shapes: Leaves, updates: int = 1, sharding: Any = None) -> Any:
    """Compiles the timed program once; donates its state and, with several updates, `new`.

    Args:
      way, shapes: way to compile, and shapes of its leaves.
      updates: 1 compiles `(state, gradients, count) -> (state, new)`; more compile a loop over
        `(state, new, gradients, count)`.
      sharding: sharding on the device for which it is compiled; None: the default device.
    """
    return _compile_way(way, tuple(shapes), updates, sharding)


def forget_programs() -> None:
    """Frees the programs that `compile_way` caches."""
    _compile_way.cache_clear()


@functools.lru_cache(maxsize=16)
def _compile_way(way: Way, shapes: tuple[tuple[int, ...], ...], updates: int, sharding: Any) -> Any:
    state, new, grads, count = _abstract(way, shapes)
    if updates == 1:
        program, arguments, donated = way.step, (state, grads, count), (0,)
    else:
        program, donated = functools.partial(_repeat, way.step, updates), (0, 1)
        arguments = (state, new, grads, count)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    jitted = jax.jit(program, donate_argnums=donated, compiler_options=dict(way.options) or None)
    return jitted.lower(*jax.tree.map(place, arguments)).compile()


def _abstract(way: Way, shapes: Leaves) -> tuple[Any, Any, Any, Any]:
    grads = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state, new = jax.eval_shape(lambda g, c: way.step(way.init(), g, c), grads, count)
    return state, new, grads, count


def _repeat(step: Any, updates: int, state: Any, new: Any, grads: Any, count: Any) -> Any:
    def one(index: Any, carry: Any) -> Any:
        # The gradients are read again in each iteration.
        now, read = jax.lax.optimization_barrier((count + index, grads))
        return step(carry[0], read, now)

    return jax.lax.fori_loop(0, updates, one, (state, new))


def temporary_bytes(way: Way, shapes: Leaves) -> int:
    """Returns the temporary memory of one step in bytes, as the compiler counts it."""
    return compile_way(way, shapes).memory_analysis().temp_size_in_bytes


def _side(
    way: Way, shapes: Leaves, grads: Any, updates: int, held: dict[Any, Any]
) -> Callable[[int], Sample]:
    """Returns the side of a way. Ways with equal arrays share one state, which `held` contains."""
    program = compile_way(way, shapes, updates)
    state, new, _, _ = _abstract(way, shapes)
    leaves, structure = jax.tree.flatten((state, new))
    key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
    if key not in held:
        # Separate arrays, which can be donated.
        new = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), new)
        held[key] = (jax.jit(way.init)(), new)
    done = 0

    def run(steps: int) -> Sample:
        def one_after_the_other() -> None:
            nonlocal done
            for _ in range(steps):
                state, new = held[key]
                given = (state, grads) if updates == 1 else (state, new, grads)
                held[key] = state, new = program(*given, jnp.int32(done + 1))
                done += updates
            jax.block_until_ready(held[key])

        return sample(one_after_the_other, steps * updates)

    return run


def _adamw(shapes: Leaves, ours: Ours) -> Way:
    def step(state: Any, grads: Any, count: Any) -> Any:
        scalars = optimizers.adam_scalars(RATE, count=count, b1=B1, b2=B2, weight_decay=DECAY)
        return _by_rule(optimizers.ADAMW, state, grads, scalars, ours)

    return Way(lambda: _state(shapes, 2), step, tuple(ours.options.items()))


def _lion(shapes: Leaves, ours: Ours) -> Way:
    def step(state: Any, grads: Any, count: Any) -> Any:
        scalars = optimizers.lion_scalars(RATE, b1=B1, b2=B2, weight_decay=DECAY)
        return _by_rule(optimizers.LION, state, grads, scalars, ours)

    return Way(lambda: _state(shapes, 1), step, tuple(ours.options.items()))


def _by_rule(rule: Any, state: Any, grads: Any, scalars: Any, ours: Ours) -> Any:
    more = {"scalars": scalars, "out_dtypes": (jnp.bfloat16,)}
    more |= {"impl": ours.choice, "block": ours.block}
    result = update_trees(functools.partial(update, rule, **more), state, (grads,))
    return result.updated, result.outputs


def _adam8bit(shapes: Leaves, ours: Ours) -> Way:
    def init() -> Any:
        return _random(shapes, 1.0, jnp.float32), [init_moments(shape) for shape in shapes]

    def step(state: Any, grads: Any, count: Any) -> Any:
        scalars = optimizers.adam_scalars(RATE, count=count, b1=B1, b2=B2, weight_decay=DECAY)
        key = jax.random.fold_in(jax.random.key(0), count)
        seeds = jax.random.bits(key, (len(shapes), 2), jnp.uint32)
        more = {"scalars": scalars, "compute_dtype": jnp.bfloat16, "impl": ours.choice}
        found = [
            update_adam8bit(param, moments, grad, seed=seed, **more)
            for param, moments, grad, seed in zip(*state, grads, seeds, strict=True)
        ]
        new_state = ([leaf.param for leaf in found], [leaf.moments for leaf in found])
        return new_state, [leaf.compute for leaf in found]

    return Way(init, step, tuple(ours.options.items()))


def _stats(shapes: Leaves, ours: Ours) -> Way:
    def step(state: Any, grads: Any, count: Any) -> Any:
        scalars = gradients.StatsScalars(0.5)
        more = {"scalars": scalars, "impl": ours.choice, "block": ours.block}
        found = [update(gradients.GRADIENT_STATS, (), (g,), **more).sums for g in grads]
        return state, tuple(sum(column) for column in zip(*found, strict=True))

    return Way(tuple, step, tuple(ours.options.items()))


def _optax_stats(state: Any, grads: Any, count: Any) -> Any:
    unscaled = [0.5 * g.astype(jnp.float32) for g in grads]
    bad = sum(jnp.sum(~jnp.isfinite(g)) for g in grads)
    return state, (optax.tree.norm(unscaled), bad)


def _optax(shapes: Leaves, tx: optax.GradientTransformation) -> Way:
    def init() -> Any:
        params = _random(shapes, 1.0, jnp.float32)
        return params, tx.init(params)

    def step(state: Any, grads: Any, count: Any) -> Any:
        params, moments = state
        grads = [g.astype(jnp.float32) for g in grads]
        updates, moments = tx.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        return (params, moments), [x.astype(jnp.bfloat16) for x in params]

    return Way(init, step)


def _state(shapes: Leaves, num_moments: int) -> tuple[Any, ...]:
    moments = [[jnp.zeros(shape) for shape in shapes] for _ in range(num_moments)]
    return (_random(shapes, 1.0, jnp.float32), *moments)


def _random(shapes: Leaves, scale: float, dtype: Any) -> list[jax.Array]:
    """Returns slices of one random array, which compiles faster than one generator per leaf."""
    drawn = scale * jax.random.normal(jax.random.key(0), (num_parameters(shapes),))
    flat = jax.lax.optimization_barrier(drawn.astype(dtype))
    leaves, at = [], 0
    for shape in shapes:
        leaves.append(flat[at : at + _size(shape)].reshape(shape))
        at += _size(shape)
    return leaves


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


if __name__ == "__main__":
    main()
