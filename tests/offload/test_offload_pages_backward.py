"""Layers in files that are updated in the backward pass train as by a sweep after it, to the bit.

The update assumes that gradients are finite and not clipped. So steps that are clipped, that are
skipped and that are neither are compared, and each test checks that the steps took the way it
means.
"""

import errno
import functools
import os
from typing import Any

import pytest

from tests.offload.test_offload_pages import batch_on, options_of, paged
from tests.offload.test_offload_params import make_optimizer
from tests.offload.test_offload_plan import CARD, RATES
from tests.support.offload_disk_runs import (
    close,
    counted_bytes,
    differing,
    fail_after,
    portable,
    steps_as_undisturbed,
)
from tests.support.pipeline_runs import small
from tests.support.trajectories import plan_for
from zerojax.checkpoint.store import StoreError, store
from zerojax.config import OffloadConfig
from zerojax.config.loader import ConfigError
from zerojax.offload import paged_step
from zerojax.offload.disk_durable import resume
from zerojax.offload.disk_errors import DiskErrors
from zerojax.offload.paged_step import PagedStep
from zerojax.optim.precision import LossScale, as_precision
from zerojax.plan.counts import layer_update_bytes
from zerojax.plan.offload_costs import hiding, moved_bytes, redone_bytes
from zerojax.step.build import build_step
from zerojax.step.host_budget import disk_bytes
from zerojax.step.initialization import init_state

pytestmark = pytest.mark.thorough

NORM = 0.43
"""Between the norms of the gradients of the first and of the last steps of `train`."""


def planned(folder: Any, *, in_backward: bool = True, **options: Any) -> Any:
    """A plan whose layers are in durable files."""
    place = {"durable": True, "update_in_backward": in_backward}
    place |= options.pop("offload", {})
    model = small(layers=3, width=options.pop("width", 16), rate=0.2)
    return plan_for(model, offload=paged(folder, **place), **options_of(**options))


def train(plan: Any, steps: int = 5) -> tuple[Any, list[dict[str, float]]]:
    state, step, found = init_state(plan), build_step(plan), []
    for number in range(steps):
        state, metrics = step(state, batch_on(plan, number))
        found.append({name: float(value) for name, value in metrics.items()})
    return state, found


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each update after a backward pass."""
    calls, real = [], PagedStep._sweep

    def sweep(*args: Any) -> None:
        calls.append(1)
        real(*args)

    monkeypatch.setattr(PagedStep, "_sweep", sweep)
    return calls


def both(folder: Any, sweeps: list[int], **options: Any) -> tuple[Any, list[dict[str, float]], int]:
    """Trains in both ways, compares their bits, and returns (state in the backward pass, its
    metrics, number of its updates after a backward pass)."""
    steps = options.pop("steps", 5)
    plan = planned(folder / "in", **options)
    assert bool(plan.tiles.cut) == ("tile_bytes" in options.get("offload", {}))
    state, found = train(plan, steps)
    swept = len(sweeps)
    other = planned(folder / "after", in_backward=False, **options)
    after, expected = train(other, steps)
    assert str(found) == str(expected)  # NaN in skipped steps
    assert differing(portable(plan, state), portable(other, after)) == []
    assert sum(one["skipped"] for one in found) < len(found)
    close(after)
    return state, found, swept


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("clip_norm", "options"),
    [
        (NORM, {"zero": 1, "microbatches": 2, "devices": 2}),
        slow(None, {"zero": 3}),
        slow(0.05, {"zero": 3}),
        slow(NORM, {"zero": 0, "devices": 2, "offload": {"activations": "nvme"}}),
        slow(NORM, {"zero": 2, "devices": 2, "offload": {"tile_bytes": 256}}),
        slow(NORM, {"zero": 2, "devices": 2, "precision": "bf16"}),
    ],
)
def test_the_bits_of_a_sweep(tmp_path, sweeps, clip_norm, options):
    """Without clipping, with clipping in some steps, and in all steps."""
    optimizer = make_optimizer(clip_norm)
    state, found, swept = both(tmp_path, sweeps, optimizer=optimizer, **options)
    clipped = sum(clip_norm is not None and one["grad_norm"] >= clip_norm for one in found)
    assert swept == clipped
    assert clipped in {None: (0,), NORM: range(1, len(found)), 0.05: (len(found),)}[clip_norm]
    close(state)


def test_skipped_steps_commit_nothing(tmp_path, sweeps):
    """The first scale of the loss overflows, with and without clipping afterwards."""
    precision = as_precision("fp16", loss_scale=LossScale(initial=2.0**20, hysteresis=1))
    given = {"zero": 2, "devices": 2, "precision": precision, "steps": 9}
    state, found, swept = both(tmp_path, sweeps, optimizer=make_optimizer(NORM), **given)
    skipped = int(sum(one["skipped"] for one in found))
    assert 0 < skipped < len(found) - swept
    assert swept > 0
    assert state["disk"].store.generation == 1 + len(found) - skipped
    close(state)


def one_device(folder: Any, **options: Any) -> Any:
    """A plan of one device without clipping, whose pages are whole blocks of the disk."""
    place = {"slice_elements": 1024, "min_elements": 2048, **options.pop("offload", {})}
    given = {"devices": 1, "width": 32, "optimizer": make_optimizer(None), **options}
    return planned(folder, offload=place, **given)


def state_files(descriptor: int) -> bool:
    """Whether a file has the optimizer's state."""
    return "process_0/buckets" in os.readlink(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_a_failed_read_in_the_backward_pass_loses_nothing(tmp_path, monkeypatch, ends_at_once):
    """The same state steps again, to the bits of a run without the failure.

    One of several processes ends the pass first, since the others wait for it in collectives.
    """
    kept = functools.partial(DiskErrors, several=not ends_at_once)
    monkeypatch.setattr(paged_step, "DiskErrors", kept)
    plan = one_device(tmp_path / "failing")
    state, step = init_state(plan), build_step(plan)
    before = state["disk"].store.generation
    fail_after(monkeypatch, "preadv", 2, counts=state_files)
    with pytest.raises(StoreError, match="Input/output error") as error:
        step(state, batch_on(plan))
    monkeypatch.undo()
    assert "\n" not in str(error.value)
    assert state["disk"].store.generation == before
    other = one_device(tmp_path / "whole", in_backward=False)
    steps_as_undisturbed(plan, state, step, other, batch_on(plan))


def failing_writes(patched: pytest.MonkeyPatch) -> None:
    """Lets the third write of the optimizer's state fail, of which the end of the step learns."""
    fail_after(patched, "pwritev", 2, error=errno.ENOSPC, counts=state_files)


def failing_commit(patched: pytest.MonkeyPatch) -> None:
    """Lets the commit of the optimizer's state fail."""
    real = store.save_manifest

    def fail(folder: Any, manifest: Any) -> None:
        if folder.name == "process_0":
            raise OSError(28, "No space left on device")
        real(folder, manifest)

    patched.setattr(store, "save_manifest", fail)


@pytest.mark.parametrize("failing", [failing_writes, failing_commit])
def test_a_state_survives_a_failed_write(tmp_path, monkeypatch, failing):
    """It goes on from its last whole step, to the bits of a run without the failure."""
    plan, other = one_device(tmp_path / "a"), one_device(tmp_path / "b", in_backward=False)
    step = build_step(plan)
    state, _ = step(init_state(plan), batch_on(plan))
    failing(monkeypatch)
    with pytest.raises(StoreError, match="No space left.*the last whole step"):
        step(state, batch_on(plan, 1))
    monkeypatch.undo()
    close(state)
    again, _ = resume(plan)
    again, metrics = step(again, batch_on(plan, 1))
    expected, found = train(other, 2)
    assert float(metrics["loss"]) == found[1]["loss"]
    assert differing(portable(plan, again), portable(other, expected)) == []
    for each in (again, expected):
        close(each)


def test_bytes_are_those_of_the_plan(tmp_path, monkeypatch):
    """In a step that is not clipped, and in one that is."""
    for clip_norm in (None, 0.05):
        plan = one_device(tmp_path / str(clip_norm), optimizer=make_optimizer(clip_norm))
        state, step = init_state(plan), build_step(plan)
        with counted_bytes(monkeypatch) as done:
            state, _ = step(state, batch_on(plan))
        close(state)
        moved = [*moved_bytes(plan), *([redone_bytes(plan)] if clip_norm else [])]
        assert done["preadv"] == sum(part.read for part in moved)
        assert done["pwritev"] == sum(part.written for part in moved)
        files = (tmp_path / str(clip_norm)).rglob("buckets*.bin")
        assert sum(path.stat().st_size for path in files) == disk_bytes(plan)
        layer = plan.offload.slices_at_once * 1024
        assert state["disk"].store.buffer_bytes == 3 * 12 * layer  # float32 master and moments
        assert layer_update_bytes(plan) == (2 * 12 + 4 + 4) * layer


def test_files_are_read_and_written_while_other_layers_are_computed(tmp_path, monkeypatch):
    """The state of a layer is read before its backward pass starts, and written after that of the
    layer below has started, so that the devices need not wait for files."""
    plan = one_device(tmp_path)
    state, step = init_state(plan), build_step(plan)
    disk, events = state["disk"], []
    layer_of = {bucket: layer for layer in range(3) for bucket in disk.pages.order_of([layer])}
    for kind in ("_start_read", "_start_write"):
        real = getattr(disk.store, kind)

        def start(index: int, *args: Any, kind: str = kind, real: Any = real) -> Any:
            events.append((kind, layer_of.get(index)))
            return real(index, *args)

        monkeypatch.setattr(disk.store, kind, start)
    backward = step.compiled.programs.backward

    def noted(context: Any, rows: Any, layer: Any, *args: Any) -> Any:
        events.append(("backward", int(layer)))
        return backward(context, rows, layer, *args)

    monkeypatch.setattr(step.compiled.programs, "backward", noted)
    state, _ = step(state, batch_on(plan))
    at = lambda kind, layer: [n for n, one in enumerate(events) if one == (kind, layer)]  # noqa: E731
    for layer in (0, 1):
        assert max(at("_start_read", layer)) < at("backward", layer)[0]
        assert at("backward", layer)[0] < min(at("_start_write", layer + 1))
        assert at("backward", layer + 1)[0] < min(at("_start_read", layer))  # one layer ahead
    close(state)


def test_what_an_update_of_files_in_backward_needs(tmp_path):
    with pytest.raises(ConfigError, match=r"update_in_backward.*durable: true"):
        OffloadConfig(params="nvme", update_in_backward=True)
    plan = planned(tmp_path)
    again = plan.remake(plan.mesh).settings.offload
    assert again.update_in_backward
    other = planned(tmp_path, in_backward=False)
    assert "once more" in plan.table()
    assert "once more" not in other.table()
    within, after = (hiding(one, CARD, RATES) for one in (plan, other))
    assert within is not None
    assert after is not None
    assert within.update_seconds == 0 < after.update_seconds
    assert within.stream_seconds > after.stream_seconds
    assert within.disk_seconds < after.disk_seconds  # gradients are not read
