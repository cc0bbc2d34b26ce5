"""A loader may fill the same arrays for every batch: the run trains on the rows of each batch."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support import torch_stand_in
from zerojax.data import DatasetSource, as_feed, prefetch
from zerojax.deepspeed_engine.engine_batches import as_batch
from zerojax.equality import make_request

ROWS, STEPS = 16, 6
X = np.random.default_rng(0).normal(size=(STEPS, ROWS, 8)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, (STEPS, ROWS))


def aligned(shape, dtype) -> np.ndarray:
    """An array whose memory JAX uses without a copy on the CPU."""
    memory = np.zeros(np.dtype(dtype).itemsize * int(np.prod(shape)) + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + memory.size - 64].view(dtype).reshape(shape)


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def borrowed(array: np.ndarray) -> np.ndarray:
    """A view through a pointer, whose base is not an array."""
    pointer = ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, array.shape)


class Memory:
    """Arrays that are filled again with each batch."""

    def __init__(self, folder=None) -> None:
        self.x, self.y = aligned(X.shape[1:], np.float32), aligned(Y.shape[1:], np.int32)
        if folder is not None:
            self.x = np.memmap(folder / "x", np.float32, "w+", shape=X.shape[1:])
        self.weight = aligned((ROWS,), np.float32)
        self.batch = {}

    def fill(self, number: int) -> None:
        self.x[:], self.y[:] = X[number % STEPS], Y[number % STEPS]
        self.weight[:] = 1 + number % 3


def fresh(number: int):
    number %= STEPS
    return {"x": X[number].copy(), "y": Y[number].copy().astype(np.int32), "w": weights(number)}


def weights(number: int) -> np.ndarray:
    return np.full(ROWS, 1 + number % 3, np.float32)


def filling(form):
    """A function of the step that fills the same memory; `form` makes the batch of it."""

    def make(folder):
        memory = Memory(folder if form is _memmap else None)

        def batch(number: int):
            memory.fill(number)
            return form(memory)

        return batch

    return make


def _plain(memory):
    return {"x": memory.x, "y": memory.y, "w": memory.weight}


def _same_dict(memory):
    memory.batch.update(_plain(memory))
    return memory.batch


def _memmap(memory):
    return _plain(memory)


def _tensors(batch):
    return jax.tree.map(lambda x: torch_stand_in.tensor(np.asarray(x)), batch)


FORMS = {
    "arrays": filling(_plain),
    "one dict": filling(_same_dict),
    "read-only views": filling(lambda m: jax.tree.map(read_only, _plain(m))),
    "pointers": filling(lambda m: {**_plain(m), "x": borrowed(m.x)}),
    "memmap": filling(_memmap),
    "torch": filling(lambda m: _tensors(_plain(m))),
    "columns": filling(lambda m: {**_plain(m), "x": m.x.T.copy(order="K").T}),
}


class Rows:
    """A dataset whose rows are one dict of the same arrays."""

    def __init__(self, *, reuse: bool, tensors: bool = False) -> None:
        self.reuse, self.tensors = reuse, tensors
        self.row = {"x": aligned((8,), np.float32), "y": aligned((), np.int32), "w": np.float32(1)}

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, number: int):
        x, y = X.reshape(-1, 8)[number], Y.reshape(-1)[number]
        if not self.reuse:
            return {"x": x.copy(), "y": np.int32(y), "w": np.float32(1)}
        self.row["x"][:], self.row["y"][...] = x, y
        if self.tensors:
            return _tensors(self.row)
        return self.row


def stacked(rows):
    return jax.tree.map(lambda *parts: np.stack([np.asarray(part) for part in parts]), *rows)


class Collated:
    """A collate function that returns the same batch each time."""

    def __init__(self) -> None:
        self.batch = None

    def __call__(self, rows):
        new = stacked(rows)
        if self.batch is None:
            self.batch = new
        jax.tree.map(lambda old, values: np.copyto(old, values), self.batch, new)
        return self.batch


def source(rows, collate=None) -> DatasetSource:
    return DatasetSource(dataset=rows, global_batch_size=ROWS, seed=0, collate=collate)


SOURCES = {
    "rows": lambda: source(Rows(reuse=True)),
    "rows, collated": lambda: source(Rows(reuse=True), stacked),
    "tensors, collated": lambda: source(Rows(reuse=True, tensors=True), stacked),
    "one collated batch": lambda: source(Rows(reuse=False), Collated()),
}
LOADERS = {
    **{f"function, {name}": form for name, form in FORMS.items()},
    "iterator": lambda folder: map(FORMS["arrays"](folder), itertools.count()),
    **{name: lambda folder, make=make: make() for name, make in SOURCES.items()},
}


def plain(name: str):
    """The same batches in new arrays."""
    return source(Rows(reuse=False), stacked) if name in SOURCES else fresh


@pytest.mark.parametrize("name", LOADERS)
def test_a_feed_keeps_every_batch(name, tmp_path):
    feed, wanted = as_feed(LOADERS[name](tmp_path)), as_feed(plain(name))
    kept = [next(feed) for _ in range(STEPS)]
    for number, batch in enumerate(kept):
        jax.tree.map(np.testing.assert_array_equal, batch, next(wanted))
        for leaf in jax.tree.leaves(batch):
            assert leaf.ctypes.data % 64 == 0, f"batch {number} is copied again by JAX"


def test_the_rows_of_a_process_and_batches_put_back_are_kept():
    feed = as_feed(FORMS["arrays"](None))
    feed.take_rows(4, 8)
    with prefetch(feed, put=lambda batch: batch) as incoming:
        first, _ = next(incoming)
        next(incoming)
    for number, batch in enumerate([first, None, *(next(feed) for _ in range(3))]):
        if batch is not None:
            jax.tree.map(np.testing.assert_array_equal, batch["x"], X[number][4:8])


def test_regrouped_rows_are_kept():
    ramp = zerojax.BatchRampConfig(start=8, increment=8, ramp_rows=8)
    with_ramp = {"global_batch_size": ROWS, "batch_ramp": ramp}
    assert_trains_equal(FORMS["arrays"](None), fresh, {"zero": 1}, **with_ramp)


def loss(model, batch):
    losses = optax_losses(model(batch["x"]), batch["y"])
    return jnp.sum(losses * batch["w"]), jnp.sum(batch["w"])


def optax_losses(logits, labels):
    logits = logits.astype(jnp.float32)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def model_of(width: int = 8):
    start = np.random.default_rng(2).normal(size=(width, 3)).astype(np.float32)
    return (lambda key: {"w": start.copy()}, lambda params, x: x @ params["w"])


def trained(batches, mesh, *, halves: bool = False, **settings) -> np.ndarray:
    trainer = zerojax.train(
        model_of(),
        mesh,
        batches,
        loss=loss,
        steps=STEPS // 2 if halves else STEPS,
        optimizer=zerojax.sgd(0.5),
        precision="fp32",
        run_dir=None,
        log=zerojax.LogConfig(console="quiet"),
        **settings,
    )
    if halves:  # batches that were read ahead are put back
        trainer.fit(batches, steps=STEPS)
    return np.asarray(trainer.to_model()["w"])


def assert_trains_equal(reused, new, mesh, **settings):
    assert np.array_equal(trained(reused, mesh, **settings), trained(new, mesh, **settings))


MESHES = {"zero 0": {"zero": 0}, "zero 3": {"zero": 3}, "1 device": None}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "mesh", "halves"), list(itertools.product(LOADERS, MESHES, (False, True)))
)
def test_a_run_trains_on_each_batch(name, mesh, halves, tmp_path):
    mesh = MESHES[mesh] or zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1])
    assert_trains_equal(LOADERS[name](tmp_path), plain(name), mesh, halves=halves)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("form", FORMS)
def test_a_placed_batch_is_kept(form, devices, tmp_path):
    mesh = zerojax.make_mesh({"data": devices}, devices=jax.devices()[:devices])
    plan = zerojax.make_plan(model_of(), mesh, example_batch=fresh(0), loss=loss)
    reused = FORMS[form](tmp_path)
    placed = [zerojax.shard_batch(plan, reused(number)) for number in range(STEPS)]
    for number, batch in enumerate(placed):
        jax.tree.map(np.testing.assert_array_equal, batch, fresh(number))


def test_micro_batches_of_an_engine_are_kept():
    reused = map(FORMS["arrays"](None), itertools.count())
    joined = as_batch(None, reused, STEPS)
    assert np.array_equal(joined["x"], X.reshape(-1, 8))


def test_batches_of_a_check_are_kept():
    request = make_request(model_of(), FORMS["arrays"](None), loss=loss, devices=2, steps=STEPS)
    for number, batch in enumerate(request.batches):
        jax.tree.map(np.testing.assert_array_equal, batch, fresh(number))


@pytest.mark.parametrize("rows", [STEPS * ROWS, STEPS * ROWS - 5])
def test_an_evaluation_reads_each_batch(rows):
    """The last batch of a dataset is filled with copies of a row, which are read separately."""

    class Fewer(Rows):
        def __len__(self) -> int:
            return rows

    def evaluated(reuse: bool):
        data = source(Fewer(reuse=reuse), Collated() if reuse else stacked)
        return trainer.evaluate(dataclasses.replace(data, shuffle=False))

    with zerojax.train(
        model_of(),
        {"zero": 1},
        fresh,
        loss=loss,
        steps=1,
        run_dir=None,
        log=zerojax.LogConfig(console="quiet"),
    ) as trainer:
        assert evaluated(True) == evaluated(False)
