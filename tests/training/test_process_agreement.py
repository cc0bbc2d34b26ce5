"""Processes that are about to start different runs end with the first difference."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.offload_disk_runs import Regression
from tests.support.process_groups import run_group
from tests.support.trajectories import TOLERANCE, plan_for, regression_batch
from zerojax.data import as_feed, shard_batch
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.training import process_agreement
from zerojax.training.process_agreement import check_same_run, describe_run

OPTIMIZERS = {
    "optax": lambda rate: optax.adamw(rate),
    "schedule": lambda rate: optax.sgd(optax.cosine_decay_schedule(rate, 100)),
    "zerojax": lambda rate: zerojax.adamw(rate),
    "8 bits": lambda rate: zerojax.adam8bit(rate),
    "muon": lambda rate: zerojax.muon(rate, dimensions=None),
}


def described(optimizer=None, *, zero=1, seed=0, steps=5, loss=None):
    optimizer = optimizer or optax.sgd(0.1)
    plan = plan_for(Regression, batch=regression_batch, optimizer=optimizer, zero=zero, loss=loss)
    loop = {"eval_every": 10}
    return describe_run(plan, as_feed(regression_batch), seed=seed, steps=steps, loop=loop)


def compare(monkeypatch, *runs):
    """Checks the last of several runs, as the last process of a group would."""
    values = [{**run} for run in runs]

    def gather(own):
        if own.dtype == np.uint32:
            digest = process_agreement._digest
            return np.array([[digest(x.encode()) for x in v.values()] for v in values], np.uint32)
        return np.stack([own] * len(runs))

    monkeypatch.setattr(jax, "process_count", lambda: len(runs))
    monkeypatch.setattr(process_agreement, "gather", gather)
    check_same_run(values[-1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_learning_rate_is_found(name, monkeypatch):
    first, same, other = (described(OPTIMIZERS[name](rate)) for rate in (0.01, 0.01, 0.02))
    compare(monkeypatch, first, same)
    with pytest.raises(ValueError, match="process 0 and process 1"):
        compare(monkeypatch, first, other)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"seed": 1}, "seed"), ({"steps": 6}, "steps"), ({"zero": 2}, "the mesh settings")],
)
def test_the_difference_is_named(change, what, monkeypatch):
    with pytest.raises(ValueError, match=f"^{what} differs between process 0 and process 2"):
        compare(monkeypatch, described(), described(), described(**change))


def halved(model, batch):
    total, weight = model.loss(batch)
    return 0.5 * total, weight


def with_decay(power):
    def loss(model, batch):
        total, weight = model.loss(batch)
        return total + weight * jnp.sum(model.up.kernel[...] ** power), weight

    return loss


@pytest.mark.parametrize(
    "losses", [(lambda model, batch: model.loss(batch), halved), (with_decay(2), with_decay(4))]
)
def test_other_code_of_the_loss_is_found(losses, monkeypatch):
    """Reported as horovod #2640: two nodes had different versions of the code."""
    first, same, other = (described(loss=one) for one in (losses[0], *losses))
    compare(monkeypatch, first, same)
    with pytest.raises(ValueError, match="loss.* differs between process 0 and process 1"):
        compare(monkeypatch, first, other)


def test_the_line_of_the_other_code_is_named(monkeypatch):
    """Each process finds its own line with the operations of all processes."""
    programs = [
        plan_for(Regression, batch=regression_batch, loss=one).traced.forward
        for one in (with_decay(2), with_decay(4), lambda model, batch: model.loss(batch))
    ]
    counts, digests = [], []
    for program in programs:
        operations = [text for text, _ in process_agreement._operations(program.jaxpr)]
        counts.append(len(operations))
        digests.append([process_agreement._digest(text) for text in operations])
    rows = np.zeros((3, max(counts)), np.uint32)
    for row, values in zip(rows, digests, strict=True):
        row[: len(values)] = values

    def gather(own):
        assert own.dtype == np.int32  # what JAX gathers without 64 bits
        return np.array(counts)[:, None] if own.size == 1 else rows.view(np.int32)

    monkeypatch.setattr(process_agreement, "gather", gather)
    for other in (1, 2):
        lines = [process_agreement._line_that_differs(program, other) for program in programs]
        assert all("test_process_agreement.py" in lines[one] for one in (0, 1))
        assert "** power" in lines[0]
    assert process_agreement._line_that_differs(programs[0], 0) == ""


ROWS = np.arange(8, dtype=np.float32)
PARTS = {
    "the global batch": ([(0, 4), (4, 8)], [ROWS, ROWS], True),
    "own rows": ([(0, 4), (4, 8)], [ROWS[:4], ROWS[4:]], False),
    "stages of one pipeline": ([(0, 8), (0, 8)], [ROWS, ROWS], False),
    "pipelines, own rows": (
        [(0, 4), (0, 4), (4, 8), (4, 8)],
        [ROWS[:4], ROWS[:4], ROWS[4:], ROWS[4:]],
        False,
    ),
    "some have the same": ([(0, 2), (2, 4), (4, 6)], [ROWS, ROWS, ROWS + 1], None),
    "stages that differ": ([(0, 8), (0, 8)], [ROWS, ROWS + 1], None),
}


@pytest.mark.parametrize("case", PARTS)
def test_the_first_batches_tell_whose_rows_they_are(case, monkeypatch):
    places, batches, expected = PARTS[case]
    mesh, sent = zerojax.make_mesh({"data": 8}), []
    monkeypatch.setattr(process_agreement, "gather", lambda own: sent.append(own) or own[None])
    for place, batch in zip(places, batches, strict=True):
        rows = lambda *_, place=place: place  # noqa: E731
        monkeypatch.setattr(process_agreement, "local_rows_of_mesh", rows)
        process_agreement._is_global({"x": batch}, mesh)
    monkeypatch.setattr(process_agreement, "gather", lambda own: np.stack(sent))
    if expected is None:
        with pytest.raises(ValueError, match=r"that of process [12] differs"):
            process_agreement._is_global({"x": batches[0]}, mesh)
    else:
        assert process_agreement._is_global({"x": batches[0]}, mesh) == expected


def test_a_feed_takes_its_rows_of_batches_given_back_and_to_come():
    feed = as_feed(lambda step: {"x": np.arange(8) + 10 * step, "weight": 2})
    before, first = feed.state(), next(feed)
    feed.give_back([(first, feed.state())], before)
    feed.take_rows(4, 6)
    assert [next(feed)["x"].tolist() for _ in range(2)] == [[4, 5], [14, 15]]
    assert feed.state()["position"] == 2


SCRIPT = """
import jax, numpy as np, optax, zerojax
from tests.support.offload_disk_runs import Regression
from tests.support.trajectories import regression_batch
zerojax.join_processes()
process = jax.process_index()
low, high = (0, 16) if process == 0 else (16, 32)
def whole(step):
    return regression_batch(step)
def own(step):
    return {{name: x[low:high] for name, x in regression_batch(step).items()}}
def other(model, batch):
    total, weight = model.loss(batch)
    return 0.5 * total, weight
losses = []
try:
    zerojax.train(Regression, {{"zero": 1}}, {batches}, optimizer=optax.sgd({rate}), steps={steps},
                  precision="fp32", run_dir=None, loss={loss}, log=zerojax.LogConfig(every=1),
                  callbacks=[lambda trainer, metrics: losses.append(metrics["loss"])])
except ValueError as error:
    print("REFUSED", error)
else:
    print("TRAINED", *losses)
"""


@pytest.mark.multihost
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("batches", "rate", "steps", "expected"),
    [
        ("whole", "0.1", "3", "TRAINED"),
        ("own", "0.1", "3", "TRAINED"),
        ("[own(0), own(1), own(2)]", "0.1", "3", "TRAINED"),
        ("whole", "0.1 + 0.1 * process", "3", "REFUSED the optimizer"),
        ("whole", "0.1", "3 + process", "REFUSED steps differs"),
    ],
)
def test_two_processes_start_one_run_or_none(batches, rate, steps, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(batches=batches, rate=rate, steps=steps, loss=None))
    variables = {"JAX_NUM_CPU_DEVICES": "2"}
    outputs = run_group([[str(script)]] * 2, folder=tmp_path, variables=variables, join=True)
    assert all(expected in output for output in outputs), outputs
    if expected != "TRAINED":
        return
    plan = plan_for(Regression, batch=regression_batch, optimizer=optax.sgd(0.1), zero=1)
    state, step, losses = init_state(plan, seed=0), build_step(plan), []
    for number in range(3):
        state, metrics = step(state, shard_batch(plan, regression_batch(number)))
        losses.append(float(metrics["loss"]))
    for output in outputs:
        found = output.partition("TRAINED")[2].split()
        np.testing.assert_allclose([float(x) for x in found], losses, rtol=0, atol=TOLERANCE)


@pytest.mark.multihost
@pytest.mark.thorough
def test_two_processes_with_other_code_name_their_lines(tmp_path):
    script = tmp_path / "script.py"
    loss = "other if process else None"
    script.write_text(SCRIPT.format(batches="whole", rate=0.1, steps=3, loss=loss))
    variables = {"JAX_NUM_CPU_DEVICES": "2"}
    for output in run_group([[str(script)]] * 2, folder=tmp_path, variables=variables, join=True):
        assert "REFUSED the code of the model or of the loss" in output
        assert re.search(r"script\.py:\d+: return 0\.5 \* total", output)


def test_a_global_batch_that_data_shards_do_not_divide_is_refused(monkeypatch):
    monkeypatch.setattr(process_agreement.jax, "process_count", lambda: 2)
    monkeypatch.setattr(process_agreement, "_is_global", lambda *_: True)
    feed = as_feed(lambda step: {"x": np.arange(6, dtype=np.float32)})
    with pytest.raises(ValueError, match=r"its size 6 .*8 data shards; use 8 rows"):
        process_agreement.divide_batches(feed, zerojax.make_mesh())


def test_a_global_batch_is_refused_with_the_rows_that_data_shards_divide(monkeypatch):
    mesh = zerojax.make_mesh({"data": 8})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(process_agreement, "_is_global", lambda *_: True)
    monkeypatch.setattr(process_agreement, "abstract_global", lambda batch, mesh: batch)
    monkeypatch.setattr(process_agreement, "local_rows_of_mesh", lambda mesh, n: (0, n // 2))
    divide = lambda rows: process_agreement.divide_batches(  # noqa: E731
        as_feed([{"x": np.zeros((rows, 3), np.float32)}] * 2), mesh
    )
    with pytest.raises(ValueError, match=r"its size 13 .*use (\d+ or )?\d+ rows") as refused:
        divide(13)
    rows = int(re.search(r"(\d+) rows, or give", str(refused.value))[1])
    part, _ = divide(rows)
    assert part["x"].shape == (rows // 2, 3)
