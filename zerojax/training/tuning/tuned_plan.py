"""Plan with the kernels that were faster on its own GPUs: the update and gradient statistics."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, SingleDeviceSharding

import pallas_kernels
from pallas_kernels.choice import Choice, KernelUnavailable, choose
from pallas_kernels.gradients import GRADIENT_STATS
from zerojax.config.checks import names_keywords
from zerojax.optim import Optimizer, UpdateContext
from zerojax.parallel.update import sums_of_squares, true_shapes
from zerojax.plan.make import Plan, require_plan
from zerojax.plan.reasons import describe_update
from zerojax.training.tuning.kept_choices import KeptChoices
from zerojax.training.tuning.measured_choices import Answer, Exchange, Question, Way, decide

SHARE = 0.02
"""Of the free memory of a device that measuring may take."""
MAX_ELEMENTS = 16 * 2**20
BYTES_PER_ELEMENT = 48
"""Parameters, two moments and gradients in float32, of two ways and the results compared."""
SMALLEST = 128
AT_ONCE = 8
"""Times that a program computes, so that its start on the host is a small part of what is timed."""
MAX_ARRAYS = 24
"""A kernel over GPT-2's 148 takes some ten seconds to lower."""
FLOAT32_LIMIT = 1e-5
"""Relative to the largest element: kernels divide and take roots to two units in the last place,
and sums of squares are taken in another order."""
STORED_LIMIT = 2.0**-6
"""Relative, element by element, of what is stored in bfloat16: two of its neighbours."""
_KERNEL = "mosaic_gpu"
_TITLES = {"update": "optimizer update", "statistics": "gradient statistics"}


@names_keywords()
def tune(
    plan: Plan,
    *,
    again: bool = False,
    kept: KeptChoices | None = None,
    clock: Callable[[], float] = time.perf_counter,
    exchange: Exchange | None = None,
) -> Plan:
    """The plan with those kernels for update and gradient statistics that are faster here.

    `zerojax.train` calls it on GPUs, where `kernels` and `tune` are auto. Each way is checked
    against XLA's results at every start, and timed in turns on arrays of the plan's sizes, before
    the state exists, where no answer is kept. The plan's reasons say what was chosen. Collective:
    every process calls it.

    Args:
      plan: on GPUs that are here; any other is returned as it is.
      again: measures anew, and tries what an earlier start ended with.
      kept: earlier answers; None takes the user's cache.
      clock: seconds.
      exchange: see `decide`.

    Raises:
      TypeError: `plan` is not a plan.
    """
    require_plan(plan, "tune")
    if why_not_measured(plan) is not None:
        return plan
    kept = KeptChoices.of_user(jax.process_index()) if kept is None else kept
    decided = functools.partial(decide, kept=kept, again=again, clock=clock, exchange=exchange)
    answers = {"statistics": decided(lambda: statistics_question(plan, _KERNEL))}
    if _asks_for_update(plan.tx):
        answers["update"] = decided(lambda: update_question(plan, _KERNEL))
    return with_answers(plan, answers)


def why_not_measured(plan: Plan) -> str | None:
    """Why nothing is measured for a plan, with what to change; None where something is."""
    settings = plan.settings
    if settings.kernels != "auto":
        return f"kernels={settings.kernels} asks for them; use kernels=auto"
    if settings.tune == "off":
        return "tune=off; use tune=auto"
    if settings.deterministic is not None:
        return "deterministic runs have the same bits everywhere; leave deterministic away"
    if not is_on_gpus(plan):
        return "the devices are no NVIDIA GPUs of this machine; run it where the GPUs are"
    return None


def is_on_gpus(plan: Plan) -> bool:
    """Whether a plan's devices are GPUs that are here, not those of the compile-only client."""
    if not isinstance(plan.mesh, Mesh):
        return False
    devices = list(plan.mesh.devices.flat)
    return devices[0].platform in ("gpu", "cuda") and set(devices) <= set(jax.devices())


def with_answers(plan: Plan, answers: Mapping[str, Answer]) -> Plan:
    """The plan with these implementations, and reasons that say so."""
    chosen = {what: Choice(one.choice, one.reason) for what, one in answers.items()}  # type: ignore[arg-type]
    kernels = {**plan.program.kernels, **chosen}
    before = describe_update(plan.program.kernels, plan.tx, (), plan.mesh)
    rest = [reason for reason in plan.reasons if reason not in before]
    said = describe_update(kernels, plan.tx, (), plan.mesh)
    for what, one in chosen.items():  # also that a kernel was not taken, and why
        line = f"{_TITLES[what]} by {one.implementation}: {one.reason}"
        said += [line] if line not in said else []
    return dataclasses.replace(
        plan,
        program=dataclasses.replace(plan.program, kernels=kernels),
        reasons=(*rest, *said),
    )


def _asks_for_update(tx: Any) -> bool:
    """Whether an optimizer has two implementations, element by element, and asks for neither."""
    return isinstance(tx, Optimizer) and tx.impl == "auto" and tx.begin is not None


def statistics_question(plan: Plan, kernel: str) -> Question:
    """Sums of squares and finite check of all gradients: a fusion each, or one kernel."""
    shapes = sample_shapes(plan)
    make = _on_device(plan, lambda: _gradients(shapes))
    scale = jnp.float32(0.5)

    def way(name: str) -> Way:
        choice = Choice(name, "measured")  # type: ignore[arg-type]
        run = jax.jit(lambda grads: sums_of_squares(grads, scale, choice))

        @jax.jit
        def several(grads: Any) -> Any:
            def once_more(number: jax.Array, total: Any) -> Any:
                # Another scale each time, so that nothing is computed only once.
                found = sums_of_squares(grads, scale * (1 + number), choice)
                return jax.tree.map(jnp.add, total, found)

            return lax.fori_loop(0, AT_ONCE, once_more, dict.fromkeys(grads, jnp.float32(0)))

        return Way(
            name=name,
            run=lambda: run(make()),
            repeat=_Repeated(lambda: (make(), None), lambda grads, _: (several(grads), grads)),
            obstacle=_obstacle(plan, name, GRADIENT_STATS.name),
        )

    return Question(
        title="gradient statistics",
        key=key_of(plan, GRADIENT_STATS.name, shapes),
        reference=way("xla"),
        other=way(kernel),
        difference=difference,
    )


def update_question(plan: Plan, kernel: str) -> Question:
    """The update of all parameters, with the plan's optimizer."""
    tx = plan.tx
    assert isinstance(tx, Optimizer)
    shapes = sample_shapes(plan)
    structs = plan.abstract_state["params"]
    opt_state = jax.eval_shape(tx.init, structs)

    def pick(node: Any) -> Any:
        if not isinstance(node, dict):
            return jnp.zeros(node.shape, node.dtype)
        return {name: jnp.zeros(shape, node[name].dtype) for name, shape in shapes.items()}

    def state() -> tuple[Any, Any, Any]:
        drawn = _gradients(shapes, 1.0)
        params = {name: x.astype(structs[name].dtype) for name, x in drawn.items()}
        of_sample = jax.tree.map(pick, opt_state, is_leaf=lambda node: isinstance(node, dict))
        return params, of_sample, _gradients(shapes)

    make = _on_device(plan, state)
    whole = {
        name: jax.ShapeDtypeStruct(shape, structs[name].dtype)
        for name, shape in true_shapes(plan).items()
    }

    def way(name: str) -> Way:
        context = _Context(plan, Choice(name, "measured"))  # type: ignore[arg-type]

        def update(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
            # Settings of all parameters, whose masks and groups may be given by name, and arrays
            # of some.
            assert tx.begin is not None
            begun = tx.begin(opt_state, whole, context())
            new, moments = begun.run(params, begun.moments, grads, None)
            return new, begun.end(moments)

        once = jax.jit(update)

        @functools.partial(jax.jit, donate_argnums=0)
        def several(held: Any, grads: Any) -> Any:
            return lax.fori_loop(0, AT_ONCE, lambda _, now: update(now[0], now[1], grads), held)

        def again(held: Any, grads: Any) -> tuple[Any, Any]:
            found = several(held, grads)
            return found, found

        def begin() -> tuple[Any, Any]:
            params, opt_state, grads = make()
            return (params, opt_state), grads

        return Way(
            name=name,
            run=lambda: once(*make()),
            repeat=_Repeated(begin, again),
            obstacle=_obstacle(plan, name, tx.kernel),
        )

    return Question(
        title=f"update by {tx.kernel}",
        key=key_of(plan, tx.kernel, shapes),
        reference=way("xla"),
        other=way(kernel),
        difference=difference,
    )


class _Repeated:
    """Calls a function on what its last call left, as steps do; inputs are made at the first."""

    def __init__(self, begin: Callable[[], Any], again: Callable[[Any, Any], Any]) -> None:
        self._begin, self._again = begin, again
        self._held: Any = None

    def __call__(self) -> Any:
        if self._held is None:
            self._held = jax.block_until_ready(self._begin())
        held, fixed = self._held
        found, held = self._again(held, fixed)
        self._held = held, fixed
        return found


@dataclasses.dataclass(frozen=True)
class _Context:
    """What an update is told beside arrays, for one device by itself."""

    plan: Plan
    choice: Choice

    def __call__(self) -> UpdateContext:
        return UpdateContext(
            gradient_scale=jnp.float32(0.5),
            skip=jnp.bool_(False),
            key=jax.random.key(0),
            axes=dict.fromkeys(self.plan.abstract_state["params"], ()),
            choice=self.choice,
        )


def sample_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Shapes of a device's shards of some parameters, small and large, cut to what may be taken."""
    params = plan.abstract_state["params"]
    shapes = {name: x.sharding.shard_shape(x.shape) for name, x in params.items()}
    by_size = sorted(shapes, key=lambda name: (math.prod(shapes[name]), name))
    count = min(len(by_size), MAX_ARRAYS)
    chosen = [by_size[(len(by_size) - 1) * k // max(count - 1, 1)] for k in range(count)]
    left = max(_room(plan) // BYTES_PER_ELEMENT, SMALLEST)
    found: dict[str, tuple[int, ...]] = {}
    for number, name in enumerate(chosen):
        shape, most = shapes[name], max(left // (count - number), SMALLEST)
        if math.prod(shape) > most:
            shape = (most // SMALLEST * SMALLEST,)
        left -= math.prod(shape)
        found[name] = shape
    return found


def _room(plan: Plan) -> int:
    """Bytes of a device that may be taken; the same on all devices of one kind."""
    assert isinstance(plan.mesh, Mesh)
    stats = plan.mesh.local_devices[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    # A power of two, so that processes with a little more or less free ask the same question.
    share = 2 ** int(math.log2(max(free * SHARE, 2**20)))
    return min(share, MAX_ELEMENTS * BYTES_PER_ELEMENT)


def _gradients(shapes: Mapping[str, tuple[int, ...]], size: float = 1e-2) -> dict[str, jax.Array]:
    """float32, random, the same each time; drawn as one array, so that compiling takes little."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    drawn = size * jax.random.normal(jax.random.key(1), (sum(sizes),))
    parts = jnp.split(drawn, np.cumsum(sizes)[:-1])
    return {name: x.reshape(s) for (name, s), x in zip(shapes.items(), parts, strict=True)}


def _on_device(plan: Plan, make: Callable[[], Any]) -> Callable[[], Any]:
    """The function, jitted, with its results on this process's first device of the plan."""
    assert isinstance(plan.mesh, Mesh)
    place = SingleDeviceSharding(plan.mesh.local_devices[0])
    return jax.jit(make, out_shardings=place)


def _obstacle(plan: Plan, name: str, kernel: str) -> str | None:
    if name == "xla":
        return None
    assert isinstance(plan.mesh, Mesh)
    try:
        choose(name, kernel=kernel, devices=list(plan.mesh.devices.flat))  # type: ignore[arg-type]
    except KernelUnavailable as error:
        return str(error)
    return None


def difference(ours: Any, theirs: Any) -> str | None:
    """Why two results are not equal within the rounding of their dtypes; None if they are."""
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
        if jnp.issubdtype(mine.dtype, jnp.integer):
            limit = np.zeros(())
        elif mine.dtype == jnp.float32:
            limit = FLOAT32_LIMIT * np.abs(b).max(initial=0)
        else:
            limit = STORED_LIMIT * np.abs(b) + 1e-6
        if (far > limit).any():
            return f"{name} differs by {far.max():.2g}, where its largest is {np.abs(b).max():.2g}"
    return None


def key_of(plan: Plan, what: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What a kept answer has to agree with."""
    assert isinstance(plan.mesh, Mesh)
    device = plan.mesh.local_devices[0]
    params = plan.abstract_state["params"].values()
    moments = jax.tree.leaves(plan.abstract_state["opt_state"])
    return {
        "what": what,
        "device": device.device_kind,
        "devices": plan.mesh.size,
        "platform": getattr(device.client, "platform_version", ""),
        "versions": [importlib.metadata.version(name) for name in ("jax", "jaxlib", "zerojax")],
        "source": source_hash(),
        "dtypes": sorted({x.dtype.name for x in (*params, *moments)}),
        "arrays": len(shapes),
        "elements": 2 ** round(math.log2(sum(math.prod(shape) for shape in shapes.values()))),
    }


@functools.cache
def source_hash() -> str:
    """Of the kernels' source: a kernel that was changed is measured anew."""
    folder = Path(pallas_kernels.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
