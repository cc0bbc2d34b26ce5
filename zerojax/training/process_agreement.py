"""Checks that all processes of a group are about to start the same run.

A process with another learning rate, seed or number of steps would train another model, or wait
forever in a collective. So each process sends a description of its run before any array exists, and
every process raises at the first difference. A single process sends nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, Mesh

from zerojax.checkpoint.agreement import gather
from zerojax.config.batch_division import BatchDivision
from zerojax.config.features import FEATURES, Features
from zerojax.config.loader import to_dict
from zerojax.config.tree_types import Batch, Tree
from zerojax.data import abstract_global, local_rows_of_mesh
from zerojax.data.feed import Feed, SourceFeed
from zerojax.operators.marks import inner_programs
from zerojax.optim import extra_arguments
from zerojax.placement.device_mesh import num_data_shards
from zerojax.plan.make import Plan
from zerojax.plan.refusals import check_rows
from zerojax.tracing.source_lines import line_of_equation

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_TEXT_BYTES = 200
_CODE = "the code of the model or of the loss (as traced)"
_OWN_PATHS = ("folder",)
"""Settings that may differ between hosts, because they are paths on local disks."""


def check_same_run(described: Mapping[str, str], forward: ClosedJaxpr | None = None) -> None:
    """Raises ValueError on every process if two processes describe different runs.

    Every process must call it, with the same keys.

    Args:
      described: {readable name of a setting: its value as text}; compared in this order.
      forward: the traced loss, to name the lines at which the code of two processes differs.
    """
    if jax.process_count() == 1:
        return
    # Texts can differ in length, but all processes must send arrays of one shape.
    digests = [_digest(value.encode()) for value in described.values()]
    rows = gather(np.array(digests, np.uint32))
    for number, (what, value) in enumerate(described.items()):
        differing = np.flatnonzero(rows[:, number] != rows[0, number])
        if differing.size:
            process = int(differing[0])
            if what == _CODE and forward is not None:
                value = _line_that_differs(forward, process)
            raise ValueError(_difference(what, value, process))


def divide_batches(feed: Feed, mesh: Mesh | AbstractMesh) -> tuple[Any, tuple[str, ...]]:
    """Makes a feed return this process's rows, whether its batches are global or per process.

    Every process must call it. If all processes have the same first batch, it is the global batch,
    and each process takes its rows from it. Otherwise each process passes its own rows; processes
    that hold different stages of one pipeline must then have the same first batch.

    Args:
      feed: feed of the run; its first batch is read and put back.
      mesh: mesh of the run.

    Returns:
      (shapes and dtypes of the global batch, sentences for the log about the kind of batches).

    Raises:
      ValueError: there is no batch, or the first batches are neither the same global batch in
        every process nor each process's own rows; or data shards do not divide the global batch.
    """
    before = feed.state()
    try:
        batch = next(feed)
    except StopIteration:
        raise ValueError(
            "batches is empty: there is no first batch to plan with; pass at least one batch"
        ) from None
    # Only the shapes are needed now; training gets the batch again.
    feed.give_back([(batch, feed.state())], before)
    example = abstract_global(batch, mesh)
    check_rows(example)
    if jax.process_count() == 1 or isinstance(feed, SourceFeed):
        return example, ()
    num_rows = [x.shape[0] for x in jax.tree.leaves(example) if x.shape]
    if not _is_global(batch, mesh):
        return example, (
            f"batches: each process has rows of its own of a global batch of {num_rows[0]}",
        )
    # `check_rows` has found the same number of rows in all arrays.
    [size] = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    why = BatchDivision(num_data_shards(mesh)).why_not(size)
    if why is not None:
        raise ValueError(
            "all processes have the same batch, which is then the global batch, but its size "
            f"{size} {why}, or give each process rows of its own"
        )
    low, high = local_rows_of_mesh(mesh, size)
    feed.take_rows(low, high)
    (sliced, _), *_ = feed.peek()
    return abstract_global(sliced, mesh), (
        f"batches: all processes have the same {size} rows, the global batch; each takes its part",
    )


def check_regrouping(feed: Feed, features: Features) -> None:
    """Raises if a feature cannot regroup the rows of a feed among several processes.

    Raises:
      ValueError: there are several processes, and rows cannot be read by index.
    """
    name = features.regroups
    if name is not None and jax.process_count() > 1 and not isinstance(feed, SourceFeed):
        raise ValueError(
            f"{name}: batches of type {feed.kind!r} cannot be regrouped in "
            f"{jax.process_count()} processes, which would need rows of each other; pass a dataset "
            "of rows, a TokenSource or text, or use one process"
        )


def _is_global(batch: Batch, mesh: Mesh | AbstractMesh) -> bool:
    """Returns True if all processes have the same global batch, False if they have their own rows.

    Processes of one pipeline whose devices hold the same rows have equal batches in both cases.

    Raises:
      ValueError: the batches fit neither case.
    """
    arrays = [np.asarray(x) for x in jax.tree.leaves(batch)]
    # With shape and dtype, since other batches can have the same bytes.
    content = b"".join(str((x.shape, x.dtype)).encode() + x.tobytes() for x in arrays)
    place = local_rows_of_mesh(mesh, num_data_shards(mesh))
    gathered = gather(np.array([*place, _digest(content)], np.uint32))
    *places, digests = gathered.T.tolist()
    places = list(zip(*places, strict=True))
    num_places, num_batches = len({*places}), len({*digests})
    if num_batches == 1:
        return num_places > 1
    if num_batches == num_places == len({*zip(places, digests, strict=True)}):
        return False
    process = next(n for n in range(1, len(digests)) if digests[n] != digests[0])
    raise ValueError(
        "the processes' first batches are neither all equal (that of process "
        f"{process} differs from that of process 0) nor one for each part of the global batch "
        f"(number of parts: {num_places}); pass the global batch in every process, or in each "
        "process the rows of its part (processes with the same part pass the same rows)"
    )


def describe_run(
    plan: Plan, feed: Feed, *, seed: int, steps: int | None, loop: Mapping[str, Any]
) -> dict[str, str]:
    """Returns {name of a setting: its value as text} of a run, which `check_same_run` compares
    between processes.

    Args:
      plan: plan of the run.
      feed: batches of the run; a `RowSource` is compared, because each process reads its rows of
        the same data.
      seed: seed of the run.
      steps: number of steps of the run.
      loop: {name: value} of settings that decide when all processes act together.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    placed = [
        (name, x.shape, x.dtype.name) for name, x in sorted(plan.abstract_stored["params"].items())
    ]
    data = feed.state() if isinstance(feed, SourceFeed) else {"kind": feed.kind}
    return {
        "the versions of packages": json.dumps(versions),
        "seed": str(seed),
        "steps": str(steps),
        "the mesh settings": json.dumps(_without_paths(to_dict(plan.settings)), default=str),
        "num_microbatches": str(plan.num_microbatches),
        "precision": str(plan.precision),
        "the parameters": str(placed),
        "the batch": str([(x.shape, x.dtype.name) for x in jax.tree.leaves(plan.abstract_batch)]),
        **{kind.keyword: json.dumps(to_dict(plan.inputs.features.get(kind))) for kind in FEATURES},
        "the data": json.dumps(data, default=str),
        "the optimizer (its learning rate or another number of its update)": _update_of(plan),
        _CODE: _digest_of(plan.traced.forward),
        **{name: str(value) for name, value in loop.items()},
    }


def _difference(what: str, value: str, process: int) -> str:
    """Returns the message for a setting that differs between process 0 and process `process`."""
    shown = np.zeros(_TEXT_BYTES, np.uint8)
    if len(text := value.encode()) <= _TEXT_BYTES:
        shown[: len(text)] = np.frombuffer(text, np.uint8)
    rows = gather(shown)
    texts = [rows[n].tobytes().rstrip(b"\0").decode(errors="replace") for n in (0, process)]
    found = f": {texts[0]} and {texts[1]}" if all(texts) and texts[0] != texts[1] else ""
    if what == _CODE and texts[0] and texts[0] == texts[1]:
        found = f": both at {texts[0]}"
    return (
        f"{what} differs between process 0 and process {process}{found}; start every process with "
        "the same script, settings and packages"
    )


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "little")


def _without_paths(settings: object) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    return {k: _without_paths(v) for k, v in settings.items() if k not in _OWN_PATHS}


def _update_of(plan: Plan) -> str:
    """Returns a digest of the traced optimizer update; "" if it cannot be traced outside of a
    step."""
    params = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in plan.abstract_stored["params"].items()
    }

    def update(params: Tree, loss: jax.Array) -> Any:
        extra = extra_arguments(params, loss, loss, frozenset())
        return plan.tx.update(params, plan.tx.init(params), params, **extra)

    try:
        return _digest_of(jax.make_jaxpr(update)(params, jax.ShapeDtypeStruct((), np.float32)))
    except ValueError:  # 1-bit optimizers have no update outside of a step
        return ""


def _digest_of(closed: ClosedJaxpr) -> str:
    """Returns a digest of a traced program: operations, shapes, numbers and constants."""
    found = hashlib.sha256()
    for constant in closed.consts:
        if isinstance(constant, np.ndarray | jax.Array) and _is_readable(constant):
            found.update(np.asarray(constant).tobytes())
    for text, _ in _operations(closed.jaxpr):
        found.update(text)
    return found.hexdigest()


def _line_that_differs(forward: ClosedJaxpr, process: int) -> str:
    """Returns this process's line of the first operation in which processes 0 and `process` differ.

    Every process must call it. Returns "" if only constants differ.
    """
    operations = list(_operations(forward.jaxpr))
    digests = np.array([_digest(text) for text, _ in operations], np.uint32)
    # Programs may differ in length, but all processes must send arrays of one shape.
    most = int(gather(np.array([digests.size], np.int32)).max())
    own = np.zeros(most, np.int32)
    own[: digests.size] = digests.view(np.int32)
    rows = gather(own)
    differing = np.flatnonzero(rows[0] != rows[process])
    if not differing.size:
        return ""
    if differing[0] >= len(operations):
        return "the end of the loss"
    line = line_of_equation(operations[differing[0]][1]) or "an operation without a line"
    return line.encode()[:_TEXT_BYTES].decode(errors="ignore")


def _is_readable(value: np.ndarray | jax.Array) -> bool:
    """Returns whether this process has all numbers of an array; random keys are no numbers."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _operations(program: Jaxpr) -> Iterator[tuple[bytes, Any]]:
    """Yields what each equation of a program does, and the equation; inner programs follow it."""
    for equation in program.eqns:
        # Other parameters may hold objects, whose text has their memory addresses.
        plain = {name: value for name, value in equation.params.items() if _is_plain(value)}
        shapes = [getattr(one.aval, "shape", None) for one in equation.outvars]
        text = f"{equation.primitive.name} {sorted(plain.items())} {shapes}".encode()
        numbers = [one.val for one in equation.invars if isinstance(one, Literal)]
        yield text + b"".join(np.asarray(number).tobytes() for number in numbers), equation
        for inner in inner_programs(equation.params):
            yield from _operations(inner)


def _is_plain(value: object) -> bool:
    """Returns whether a value is a number, or a tuple of numbers."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float)
