"""Measures which slice size is fastest for optimizer state that is offloaded to the host.

Times the update of a part of one parameter on a GPU of the plan. As in the step, each slice is
loaded from pinned host memory, updated and stored. Results are bit-identical for every size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, HOST, HOST_KIND, NVME
from zerojax.config.tree_types import Tree
from zerojax.offload.sliced_update import LeafUpdate, begin
from zerojax.placement.slices import abstract_tiers, map_moments, on_host, without_moments
from zerojax.placement.state_layout import SlicedLeaf
from zerojax.plan.make import Plan
from zerojax.plan.open_choices import SIZES, sizes_of_slices
from zerojax.runtime.memory import least_room
from zerojax.step.offload_variants import with_slices
from zerojax.training.tuning.measured_choices import Answer, Question, Way
from zerojax.training.tuning.trials import Repeated, base_key, lone_context, room, share_of

SLICES = "slices of offloaded state"
AT_ONCE = 4
"""Minimum number of slices of the larger size that are updated, because the first and the last
slice are copied outside of the loop."""
SETS, RESULTS = 2, 3
"""Number of copies of the arrays that exist at once on device and host: the state of both sizes
while they are timed; or the inputs of one size, and compared results: one of the reference, two of
the other size."""
LOADED = 4
"""Number of slices of each host array that are on the device at once. Programs compiled for an H100
have 3.3: three slices that wait or are in use, the rest for values between two kernels."""


@dataclass(frozen=True, kw_only=True)
class SlicedPart:
    """The part of a parameter whose update is timed; arrays are `ShapeDtypeStruct`s.

    Fields have the order of the arguments of `LeafUpdate`.

    Attributes:
      leaf: the part as a sliced parameter: a shard made of complete slices, all on the host.
      weights: weights of the part, [elements].
      master: master weights as {"host": [slices, elements]}.
      moments: optimizer moments, each as {"host": [slices, elements]}.
      grad: gradient of the part, [elements].
    """

    leaf: SlicedLeaf
    weights: jax.ShapeDtypeStruct
    master: dict[str, jax.ShapeDtypeStruct]
    moments: tuple[dict[str, jax.ShapeDtypeStruct], ...]
    grad: jax.ShapeDtypeStruct

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.weights, self.master, self.moments, self.grad

    @property
    def host_bytes(self) -> int:
        """Maximum number of bytes of host memory that the measurement needs."""
        return self._held(is_host=True)

    @property
    def device_bytes(self) -> int:
        """Maximum number of bytes of device memory that the measurement needs."""
        on_host = sum(x.dtype.itemsize for x in jax.tree.leaves(self.arrays) if _is_host(x))
        loaded = LOADED * on_host * self.leaf.slice_elements
        filled = max(_bytes(x) for x in jax.tree.leaves(self.arrays))
        return self._held(is_host=False) + max(loaded, filled)

    def _held(self, *, is_host: bool) -> int:
        given, updated = (
            sum(_bytes(x) for x in jax.tree.leaves(tree) if _is_host(x) == is_host)
            for tree in (self.arrays, self.arrays[:3])
        )
        return max(SETS * given, given + RESULTS * updated)


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _is_host(x: jax.ShapeDtypeStruct) -> bool:
    assert x.sharding is not None
    return x.sharding.memory_kind == HOST_KIND


def choose_slices(
    plan: Plan, decided: Callable[[Callable[[], Question]], Answer]
) -> tuple[Plan, str]:
    """Returns (plan with the fastest slice size, reason for the log).

    Each size is compared with the best size so far.

    Args:
      plan: plan for which `why_slices_are_fixed` returns None.
      decided: function that answers a question, as `decide` does.
    """
    best, reasons = plan, []
    for size in SIZES:
        reference = best
        try:
            other = with_slices(plan, size)
        except ValueError as error:  # there are too many slices
            reasons.append(str(error))
            continue
        if sizes_of_slices(other) == sizes_of_slices(best):
            reasons.append(f"{_name(other)} gives the same slices")
            continue
        answer = decided(lambda: slice_question(reference, other))  # noqa: B023
        best = other if answer.choice == _name(other) else best
        reasons.append(answer.reason)
    return best, f"{SLICES}: {_name(best)} ({'; '.join(reasons)})"


def slice_question(plan: Plan, other: Plan) -> Question:
    """Builds the `Question` whether an update is faster with the slices of `plan` or of `other`.

    Times a part of the largest parameter that the plans slice differently.
    """
    assert isinstance(plan.mesh, Mesh)
    alone = Mesh([plan.mesh.local_devices[0]], ("alone",), axis_types=(AxisType.Auto,))
    parts = parts_of(plan, other, alone)
    ways = [
        _way(one, part, _name(one), alone) for one, part in zip((plan, other), parts, strict=True)
    ]
    return Question(
        title=SLICES,
        key={
            **base_key(plan, SLICES),
            "elements": math.prod(parts[0].leaf.shard_shape),
            "ways": [way.name for way in ways],
            "slices": [part.leaf.slice_elements for part in parts],
            "arrays": [
                f"{x.dtype} {x.sharding.memory_kind}" for x in jax.tree.leaves(parts[0].arrays)
            ],
            "update": [
                getattr(plan.tx, "kernel", ""),
                plan.program.kernels["update"].implementation,
            ],
        },
        reference=ways[0],
        other=dataclasses.replace(ways[1], obstacle=_no_room(plan, parts)),
        difference=difference,
    )


def parts_of(plan: Plan, other: Plan, mesh: Mesh) -> tuple[SlicedPart, SlicedPart]:
    """Returns the same part of the same parameter for both plans, each with the plan's slices.

    Args:
      plan: the first plan.
      other: the second plan.
      mesh: mesh of one device.
    """
    mine, theirs = sizes_of_slices(plan), sizes_of_slices(other)
    assert plan.offload is not None
    shards = {name: math.prod(plan.offload.leaves[name].shard_shape) for name in mine}
    name = max((name for name in mine if mine[name] != theirs[name]), key=lambda n: (shards[n], n))
    sizes = mine[name], theirs[name]
    elements = elements_of(shards[name], *sizes)
    first, second = (_part(plan, name, elements, size, mesh) for size in sizes)
    return first, second


def elements_of(shard: int, *sizes: int) -> int:
    """Returns how many elements of a shard are updated: a multiple of each size in `sizes`, if
    possible at least `AT_ONCE` times the largest.

    >>> elements_of(24000, 500, 2000)
    8000
    >>> elements_of(24000, 1000, 24000)
    24000
    """
    together = math.lcm(*sizes)
    return min(-(-AT_ONCE * max(sizes) // together) * together, shard)


def _part(plan: Plan, name: str, elements: int, size: int, mesh: Mesh) -> SlicedPart:
    assert plan.offload is not None
    leaf = dataclasses.replace(
        plan.offload.leaves[name],
        shard_shape=(elements,),
        axes=(),
        num_shards=1,
        slice_elements=size,
        counts={DEVICE: 0, HOST: elements // size, NVME: 0},
    )
    moments: list[Any] = []
    map_moments(
        {name: leaf},
        lambda leaf, _, moment: moments.append(abstract_tiers(leaf, moment.dtype, mesh)),
        plan.abstract_stored["opt_state"],
    )
    place = NamedSharding(mesh, P())
    place = on_host(place) if name in plan.offload.streamed else place
    precision = plan.precision
    added_up = plan.num_microbatches > 1
    gradient = precision.accumulate_dtype if added_up else precision.reduce_dtype
    weights = plan.abstract_state["params"][name].dtype
    return SlicedPart(
        leaf=leaf,
        weights=jax.ShapeDtypeStruct((elements,), weights, sharding=place),
        master=abstract_tiers(leaf, plan.abstract_stored["params"][name].dtype, mesh),
        moments=tuple(moments),
        grad=jax.ShapeDtypeStruct((elements,), gradient, sharding=place),
    )


def update_of(plan: Plan, part: SlicedPart, mesh: Mesh) -> Callable[..., Any]:
    """Returns a function (weights, master, moments, grad) -> (weights, master, moments), which the
    caller jits.

    Args:
      plan: plan whose optimizer is used.
      part: the part of the parameter that is updated.
      mesh: mesh of one device; the update runs under `shard_map`, as in a step.
    """
    assert plan.offload is not None
    name, counts = part.leaf.name, without_moments(plan.abstract_stored["opt_state"])

    def update(weights: Tree, master: Any, moments: Tree, grad: jax.Array) -> Any:
        # As in a step, the count is not a constant: the compiler would divide by a constant in
        # another way inside of a loop than outside.
        before = lax.optimization_barrier(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts)
        )
        begun = begin(plan, before, lone_context(plan, plan.program.kernels["update"]))
        streamed = name in plan.offload.streamed  # type: ignore[union-attr]
        return LeafUpdate(begun, part.leaf, on_host=streamed)(weights, master, moments, grad)

    return jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def _way(plan: Plan, part: SlicedPart, name: str, mesh: Mesh) -> Way:
    options = {
        "out_shardings": jax.tree.map(lambda x: x.sharding, part.arrays[:3]),
        "compiler_options": dict(plan.program.options) or None,
    }
    update = update_of(plan, part, mesh)
    once, again = jax.jit(update, **options), jax.jit(update, **options, donate_argnums=(0, 1, 2))

    def begin_with() -> tuple[Any, Any]:
        *held, grad = jax.tree.map(_filled, part.arrays)
        return held, grad

    def next_one(held: Tree, grad: jax.Array) -> tuple[Any, Any]:
        found = again(*held, grad)
        return found, found

    return Way(
        name=name,
        run=lambda: once(*jax.tree.map(_filled, part.arrays)),
        repeat=Repeated(begin_with, next_one),
    )


def _filled(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns numbers between 0 and 1 that depend only on the number of elements and the dtype."""
    sharding: Any = struct.sharding
    on_device = NamedSharding(sharding.mesh, sharding.spec)
    return jax.device_put(_filler(struct.shape, struct.dtype, on_device)(), sharding)


@functools.lru_cache(maxsize=16)
def _filler(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding
) -> Callable[[], jax.Array]:
    def make() -> jax.Array:
        # 2654435761 is 2^32 divided by the golden ratio: the products spread over all uint32.
        number = jnp.arange(math.prod(shape), dtype=jnp.uint32) * jnp.uint32(2654435761)
        return (number / jnp.float32(2**32)).astype(dtype).reshape(shape)

    return jax.jit(make, out_shardings=sharding)


def _no_room(plan: Plan, parts: tuple[SlicedPart, SlicedPart]) -> str | None:
    """Returns why the measurement would need too much memory; None if it fits."""
    free = least_room()
    needed = {
        "device": (max(part.device_bytes for part in parts), room(plan)),
        "host": (max(part.host_bytes for part in parts), share_of(free.free if free else 0)),
    }
    for where, (taken, most) in needed.items():
        if taken > most:
            return f"measuring takes {taken:,} bytes of {where} memory; {most:,} may be used"
    return None


def _name(plan: Plan) -> str:
    return f"{plan.settings.offload.slice_limit:,} elements at most"


def difference(ours: Tree, theirs: Tree) -> str | None:
    """Describes how the bits of two updated parts differ; None if they are equal."""
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = (np.asarray(x).reshape(-1) for x in (mine, other))
        if a.dtype != b.dtype or not np.array_equal(a, b):
            return "an element has other bits"
    return None
