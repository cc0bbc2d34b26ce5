"""Tunes a plan on its GPUs: selects the fastest measured kernels, attention and slice size."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from pallas_kernels.choice import Choice, KernelUnavailable, choose
from pallas_kernels.gradients import GRADIENT_STATS
from zerojax.config import WatchConfig
from zerojax.config.checks import names_keywords
from zerojax.config.tree_types import Tree
from zerojax.optim import EmaState, Optimizer
from zerojax.passes.update import stacks_of, sums_of_squares
from zerojax.plan.make import Plan, require_plan
from zerojax.plan.open_choices import (
    open_calls,
    open_kernels,
    planned_kernels,
    why_closed,
    why_slices_are_fixed,
)
from zerojax.plan.reasons import describe_update
from zerojax.runtime.watchdog import Watchdog
from zerojax.training.tuning.attention_choices import choose_attention
from zerojax.training.tuning.kept_choices import KeptChoices
from zerojax.training.tuning.measured_choices import (
    AT_START,
    BY_ITSELF,
    Answer,
    Exchange,
    Question,
    Way,
    decide,
)
from zerojax.training.tuning.slice_choices import choose_slices
from zerojax.training.tuning.trials import Repeated, base_key, lone_context, on_device, room

MAX_ELEMENTS = 16 * 2**20
BYTES_PER_ELEMENT = 56
"""Memory per element: float32 parameters, two moments and gradients while random inputs are drawn,
two results of an update, and a third one that is compared with them."""
BYTES_OF_AVERAGE = 16
"""Additional memory per element if the update also computes an EMA of the parameters."""
SMALLEST = 128
AT_ONCE = 8
"""Number of computations in one timed program, so that the launch overhead is small."""
MAX_ARRAYS = 24
"""Maximum number of arrays in a trial, so that it compiles in seconds."""
FLOAT32_LIMIT = 1e-5
"""Maximum difference relative to the largest element. Kernels compute divisions and square roots to
two units in the last place, and add squares in another order."""
STORED_LIMIT = 2.0**-6
"""Maximum relative difference of bfloat16 elements: two units in the last place."""
CODES_LIMIT = 2.0**-9
"""Maximum fraction of 8-bit moment codes that may differ by one, which rounding can cause."""
TRIAL_SECONDS = 180.0
"""Seconds after which a trial counts as hanging. Compiling a kernel takes some seconds, and longer
if many processes share a few cores."""
OTHER_KERNEL = "mosaic_gpu"
"""Implementation that is compared with XLA's fusions."""
_TITLES = {"update": "optimizer update", "statistics": "gradient statistics"}


@names_keywords()
def tune(
    plan: Plan,
    *,
    again: bool = False,
    watch: WatchConfig | None = None,
    kept: KeptChoices | None = None,
    clock: Callable[[], float] = time.perf_counter,
    exchange: Exchange | None = None,
) -> Plan:
    """Returns the plan with the fastest update, statistics, attention and offload slice size.

    `zerojax.train` calls it on GPUs if `kernels` and `tune` are "auto". Each implementation is
    checked against XLA's results at every start. Without a cached answer, both are timed in turn on
    arrays of the plan's sizes, before the state exists. Nothing starts after 10 seconds
    (`AT_START`): choices not measured by then stay as planned until a later start. The reasons of
    the plan say what was chosen. Every process must call it.

    Args:
      plan: plan on GPUs of this machine; any other plan is returned unchanged.
      again: True: measure even if answers are cached, for longer, and repeat trials that failed in
        earlier starts.
      watch: settings that decide if a process that hangs in a trial is ended after `TRIAL_SECONDS`;
        None: it is, unless it is an interactive interpreter.
      kept: cached answers; None: those in the user's cache folder.
      clock: function that returns seconds.
      exchange: function that gathers numbers from all processes; None: gather through JAX.

    Raises:
      TypeError: `plan` is not a `Plan`.
      RuntimeError: the device cannot be used any more after a trial.
    """
    require_plan(plan, "tune")
    if why_not_measured(plan) is not None:
        return plan
    effort = BY_ITSELF if again else AT_START
    watchdog = Watchdog(
        watch or WatchConfig(),
        process=jax.process_index(),
        processes=jax.process_count(),
        resume_hint="start again: the failed trial is skipped then",
    )
    decided = functools.partial(
        decide,
        kept=KeptChoices.of_user(jax.process_index()) if kept is None else kept,
        again=again,
        effort=effort,
        deadline=clock() + effort.total,
        clock=clock,
        exchange=exchange,
        during=functools.partial(watchdog.during, limit=TRIAL_SECONDS),
    )
    with watchdog:
        return _tuned(plan, decided)


def _tuned(plan: Plan, decided: Callable[..., Answer]) -> Plan:
    questions = {"statistics": statistics_question, "update": update_question}
    answers = {
        what: decided(functools.partial(questions[what], plan, OTHER_KERNEL))
        for what in open_kernels(plan)
    }
    for what in planned_kernels(plan):
        choice = plan.program.kernels[what]
        planned = Answer(choice=choice.implementation, reason=choice.reason)
        ask = functools.partial(questions[what], plan, choice.implementation)
        answers[what] = decided(ask, planned=planned)
    for kind, call in open_calls(plan).items():
        answers[kind] = choose_attention(plan, call, decided)
    plan = with_answers(plan, answers)
    if why_slices_are_fixed(plan) is not None:
        return plan
    plan, reason = choose_slices(plan, decided)
    return dataclasses.replace(plan, reasons=(*plan.reasons, reason))


def why_not_measured(plan: Plan) -> str | None:
    """Returns why nothing is measured for a plan, with a remedy; None if something is measured."""
    why = why_closed(plan)
    if why is None and not is_on_gpus(plan):
        return (
            "the devices are not NVIDIA GPUs of this machine; run it on the machine with the GPUs"
        )
    return why


def is_on_gpus(plan: Plan) -> bool:
    """Returns True if a plan's devices are GPUs of this machine, not of a compile-only client."""
    if not isinstance(plan.mesh, Mesh):
        return False
    devices = list(plan.mesh.devices.flat)
    return devices[0].platform in ("gpu", "cuda") and set(devices) <= set(jax.devices())


def with_answers(plan: Plan, answers: Mapping[str, Answer]) -> Plan:
    """Returns the plan with its kernel choices replaced by measured ones."""
    chosen = {what: Choice(one.choice, one.reason) for what, one in answers.items()}  # type: ignore[arg-type]
    kernels = {**plan.program.kernels, **chosen}
    describe = functools.partial(
        describe_update,
        tx=plan.tx,
        stacks=(),
        params=plan.abstract_stored["params"],
        mesh=plan.mesh,
    )
    before = describe(plan.program.kernels)
    for call in plan.traced.attention_calls:
        if call.kind in answers and answers[call.kind].choice != call.implementation:
            before.append(call.describe())
    rest = [reason for reason in plan.reasons if reason not in before]
    said = describe(kernels)
    for what, one in chosen.items():  # also reasons why a kernel was not chosen
        line = f"{_TITLES.get(what, what)} by {one.implementation}: {one.reason}"
        said += [line] if line not in said else []
    return dataclasses.replace(
        plan,
        program=dataclasses.replace(plan.program, kernels=kernels),
        reasons=(*rest, *said),
    )


def statistics_question(plan: Plan, kernel: str) -> Question:
    """Builds the `Question` which gradient statistics are faster: XLA's fusions, or kernels.

    The statistics are the sums of squares and the finite check of all gradients.
    """
    shapes = sample_shapes(plan)
    make = on_device(plan, lambda: _gradients(shapes))
    scale = jnp.float32(0.5)

    def way(name: str) -> Way:
        choice = Choice(name, "measured")  # type: ignore[arg-type]
        run = jax.jit(lambda grads: sums_of_squares(grads, scale, choice))

        @jax.jit
        def several(grads: Tree) -> Any:
            def once_more(number: jax.Array, total: jax.Array) -> Any:
                # A different scale each time, so that XLA does not move the computation out of the
                # loop.
                found = sums_of_squares(grads, scale * (1 + number), choice)
                return jax.tree.map(jnp.add, total, found)

            return lax.fori_loop(0, AT_ONCE, once_more, dict.fromkeys(grads, jnp.float32(0)))

        return Way(
            name=name,
            run=lambda: run(make()),
            repeat=Repeated(lambda: (make(), None), lambda grads, _: (several(grads), grads)),
            obstacle=obstacle_of(plan, name, GRADIENT_STATS.name),
        )

    return Question(
        title="gradient statistics",
        key={**key_of(plan, GRADIENT_STATS.name, shapes), "ways": ["xla", kernel]},
        reference=way("xla"),
        other=way(kernel),
        difference=difference,
    )


def update_question(plan: Plan, kernel: str) -> Question:
    """Builds the `Question` which update of all parameters is faster: XLA's fusions, or kernels."""
    tx = plan.tx
    assert isinstance(tx, Optimizer)
    shapes = sample_shapes(plan)
    structs = plan.abstract_state["params"]
    layers = {name: () for name in stacks_of(plan) if name in shapes}

    def state() -> tuple[Any, Any, Any]:
        drawn = _gradients(shapes, 1.0)
        params = {name: x.astype(structs[name].dtype) for name, x in drawn.items()}
        # Masks and groups may name any parameter; those outside of the sample are not computed.
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in structs.items()}
        return params, _of_sample(tx.init(zeros | params), params), _gradients(shapes)

    make = on_device(plan, state)

    def way(name: str) -> Way:
        choice = Choice(name, "measured")  # type: ignore[arg-type]

        def update(params: Tree, opt_state: Tree, grads: Tree) -> tuple[Any, Any]:
            context = dataclasses.replace(lone_context(plan, choice), layers=layers)
            return tx.apply(grads, opt_state, params, context)

        once = jax.jit(update)

        @functools.partial(jax.jit, donate_argnums=0)
        def several(held: Tree, grads: Tree) -> Any:
            return lax.fori_loop(0, AT_ONCE, lambda _, now: update(now[0], now[1], grads), held)

        def again(held: Tree, grads: Tree) -> tuple[Any, Any]:
            found = several(held, grads)
            return found, found

        def begin() -> tuple[Any, Any]:
            params, opt_state, grads = make()
            return (params, opt_state), grads

        return Way(
            name=name,
            run=lambda: once(*make()),
            repeat=Repeated(begin, again),
            obstacle=obstacle_of(plan, name, tx.kernel),
        )

    what = tx.kernel if tx.ema is None else f"{tx.kernel} with ema"
    return Question(
        title=f"update by {what}",
        key={
            **key_of(plan, what, shapes),
            "ways": ["xla", kernel],
            "stacks": len(layers) * tx.per_layer,
        },
        reference=way("xla"),
        other=way(kernel),
        difference=difference,
    )


def _of_sample(opt_state: Tree, params: Mapping[str, Any]) -> Any:
    """Returns an optimizer state restricted to the parameters in `params`."""

    def pick(node: Tree) -> Any:
        return {name: node[name] for name in params} if isinstance(node, dict) else node

    return jax.tree.map(pick, opt_state, is_leaf=lambda node: isinstance(node, dict))


def sample_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns {name: shard shape} of at most `MAX_ARRAYS` parameters, small and large, reduced to
    fit the memory limit."""
    params = plan.abstract_state["params"]
    shapes = {name: x.sharding.shard_shape(x.shape) for name, x in params.items()}
    by_size = sorted(shapes, key=lambda name: (math.prod(shapes[name]), name))
    count = min(len(by_size), MAX_ARRAYS)
    chosen = [by_size[(len(by_size) - 1) * k // max(count - 1, 1)] for k in range(count)]
    each = BYTES_PER_ELEMENT + BYTES_OF_AVERAGE * has_average(plan)
    left = max(min(room(plan) // each, MAX_ELEMENTS), SMALLEST)
    found: dict[str, tuple[int, ...]] = {}
    for number, name in enumerate(chosen):
        # The smallest come first; what they leave of their parts goes to the larger ones.
        shape, most = shapes[name], max(left // (count - number), SMALLEST)
        if math.prod(shape) > most:
            has_rows = isinstance(plan.tx, Optimizer) and plan.tx.per_layer
            shape = _cut_rows(shape, most) if has_rows else (most // SMALLEST * SMALLEST,)
        left -= math.prod(shape)
        found[name] = shape
    return found


def _cut_rows(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Returns the shape reduced to at most `most` elements by halving dimensions; dimension 0 is
    halved last."""
    cut = list(shape)
    for dim in (*range(1, len(cut)), 0):
        while math.prod(cut) > most and cut[dim] > 1:
            cut[dim] = -(-cut[dim] // 2)
    return tuple(cut)


def has_average(plan: Plan) -> bool:
    """Returns True if the update also computes an EMA of the weights."""
    return isinstance(plan.abstract_state["opt_state"], EmaState)


def _gradients(shapes: Mapping[str, tuple[int, ...]], size: float = 1e-2) -> dict[str, jax.Array]:
    """Returns fixed random float32 arrays; drawn as one array, so that it compiles quickly."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    drawn = size * jax.random.normal(jax.random.key(1), (sum(sizes),))
    parts = jnp.split(drawn, np.cumsum(sizes)[:-1])
    return {name: x.reshape(s) for (name, s), x in zip(shapes.items(), parts, strict=True)}


def obstacle_of(plan: Plan, name: str, kernel: str) -> str | None:
    """Returns why an implementation cannot run on a plan's devices; None if it can."""
    if name == "xla":
        return None
    assert isinstance(plan.mesh, Mesh)
    try:
        choose(name, kernel=kernel, devices=list(plan.mesh.devices.flat))  # type: ignore[arg-type]
    except KernelUnavailable as error:
        return str(error)
    return None


def difference(ours: Tree, theirs: Tree) -> str | None:
    """Describes how two results differ by more than the rounding of their dtypes; else None."""
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return "they have another structure"
    named, _ = jax.tree_util.tree_flatten_with_path(theirs)
    for mine, (path, other) in zip(jax.tree.leaves(ours), named, strict=True):
        name = jax.tree_util.keystr(path)
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return f"{name} is {mine.dtype}{list(mine.shape)}"
        a, b = (np.asarray(x).astype(np.float64) for x in (mine, other))
        if not np.isfinite(a).all():
            return f"{name} is not finite"
        far = np.abs(a - b)
        if mine.dtype == jnp.int8:
            # A moment between two codes may be rounded to either code, which is rare.
            limit = np.ones(())
            if (far > 0).mean() > CODES_LIMIT:
                return f"{name}: {(far > 0).mean():.2%} of its codes differ"
        elif jnp.issubdtype(mine.dtype, jnp.integer):
            limit = np.zeros(())
        elif mine.dtype == jnp.float32:
            limit = FLOAT32_LIMIT * np.abs(b).max(initial=0)
        else:
            limit = STORED_LIMIT * np.abs(b) + 1e-6
        if (far > limit).any():
            return f"{name} differs by {far.max():.2g}, where its largest is {np.abs(b).max():.2g}"
    return None


def key_of(plan: Plan, what: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the key under which the choice of kernel `what` for these shapes is cached."""
    params = plan.abstract_state["params"].values()
    moments = jax.tree.leaves(plan.abstract_state["opt_state"])
    return {
        **base_key(plan, what),
        "dtypes": sorted({x.dtype.name for x in params}),
        # The number of arrays per parameter is part of the key, because SGD may have none.
        "moments": sorted({x.dtype.name for x in moments}),
        "arrays_of_state": len(moments) // max(len(params), 1),
        "arrays": len(shapes),
        # Rounded, so that nearly equal sizes share a decision.
        "elements": 2 ** round(math.log2(sum(math.prod(shape) for shape in shapes.values()))),
    }
