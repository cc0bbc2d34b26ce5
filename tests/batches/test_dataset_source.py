"""Datasets of rows: Hugging Face's and PyTorch's as they are, in an order that a run resumes in."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import zerojax
from zerojax.data import DatasetSource

ROWS, SIZE = 50, 16
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 4)).astype(np.float32), RNG.integers(0, 9, size=ROWS)


class Rows:
    """A dataset of dicts."""

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return {"x": X[number], "y": int(Y[number])}


class HuggingFace:
    """The part of `datasets.Dataset` that is read: columns of Python lists, formats, many rows."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, columns, form=None):
        self.columns, self.form = columns, form

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def with_format(self, form):
        return HuggingFace(self.columns, form)

    def __getitem__(self, key):
        if isinstance(key, int):
            return {name: values[key] for name, values in self.columns.items()}
        found = {name: [values[place] for place in key] for name, values in self.columns.items()}
        return found if self.form is None else {n: _formatted(v) for n, v in found.items()}


def _formatted(values):
    """As numpy's format of `datasets`: rows of different lengths are objects."""
    try:
        return np.array(values)
    except ValueError:
        column = np.empty(len(values), object)
        column[:] = [np.array(value) for value in values]
        return column


class TorchRows(Rows):
    """As a subclass of `torch.utils.data.Dataset`."""

    __module__ = "torch.utils.data.dataset"


THEIRS = HuggingFace({"x": X.tolist(), "y": Y.tolist()})


def source(dataset=None, **changes):
    options = {"global_batch_size": SIZE, "seed": 3} | changes
    return DatasetSource(dataset=Rows() if dataset is None else dataset, **options)


def order(found):
    """The numbers of the rows of a batch, by their contents."""
    return [int(np.flatnonzero((row == X).all(axis=1))[0]) for row in found["x"]]


def test_every_epoch_has_each_row_once_in_another_order():
    epochs = [order(source().rows(epoch * ROWS, (epoch + 1) * ROWS)) for epoch in range(3)]
    assert all(sorted(numbers) == list(range(ROWS)) for numbers in epochs)
    assert len({tuple(numbers) for numbers in epochs}) == 3
    assert order(source(shuffle=False).rows(ROWS, 2 * ROWS)) == list(range(ROWS))


@pytest.mark.parametrize("dataset", [Rows(), TorchRows(), THEIRS])
def test_rows_of_all_kinds_are_the_same_arrays(dataset):
    batch, expected = source(dataset).batch(2), source().batch(2)
    assert batch.keys() == expected.keys() == {"x", "y"}
    assert (batch["x"].shape, batch["y"].shape) == ((SIZE, 4), (SIZE,))
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(batch[name], array.dtype), array)


def test_processes_read_their_rows_alone():
    whole, read = source().batch(1), []
    parts = [source().batch(1, lo, lo + 4) for lo in range(0, SIZE, 4)]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)

    class Watched(Rows):
        def __getitem__(self, number):
            read.append(number)
            return super().__getitem__(number)

    source(Watched()).rows(SIZE, SIZE + 4)
    assert len(read) == 4


def test_tuples_and_a_function_that_collates():
    class Pairs(Rows):
        def __getitem__(self, number):
            return [1.0] * (number + 1), number

    found = source(Pairs(), collate=lambda rows: {"sizes": np.array([len(x) for x, _ in rows])})
    assert sorted(found.rows(0, ROWS)["sizes"]) == list(range(1, ROWS + 1))

    class Fixed(Rows):
        def __getitem__(self, number):
            return [1.0, number], np.float32(number)

    first, second = source(Fixed(), shuffle=False).rows(0, 4)
    assert (first.tolist(), second.tolist()) == ([[1.0, n] for n in range(4)], [0, 1, 2, 3])


def init(key):
    return {"w": jax.random.normal(key, (4, 1))}


def loss(model, batch):
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()


def train(batches, folder=None, **options):
    model = (init, lambda params, x: x @ params["w"])
    options = {"loss": loss, "optimizer": optax.adam(0.1), "run_dir": None} | options
    return zerojax.train(model, {"zero": 2}, batches, checkpoint=folder, **options)


def test_a_dataset_trains_as_its_batches_do_and_resumes_at_the_row(tmp_path):
    batches = [source(seed=0).batch(step) for step in range(6)]
    expected = [report["loss"] for report in train(batches, log=EVERY).history]
    found = train(TorchRows(), log=EVERY, steps=6, global_batch_size=SIZE)
    assert [report["loss"] for report in found.history] == expected
    train(THEIRS, tmp_path / "run", log=EVERY, steps=3, global_batch_size=SIZE).close()
    resumed = train(THEIRS, tmp_path / "run", log=EVERY, steps=6, global_batch_size=SIZE)
    assert [report["loss"] for report in resumed.history] == expected[3:]


EVERY = zerojax.LogConfig(every=1)


class PlainRows:
    """Rows of neither library, over which one cannot iterate."""

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return TorchRows()[number]


def test_any_class_of_rows_is_a_dataset():
    expected = train(TorchRows(), log=EVERY, steps=3, global_batch_size=SIZE)
    found = train(PlainRows(), log=EVERY, steps=3, global_batch_size=SIZE)
    assert [r["loss"] for r in found.history] == [r["loss"] for r in expected.history]


def test_without_steps_each_row_is_read_once_and_validation_may_be_a_dataset():
    trainer = train(THEIRS, global_batch_size=SIZE, validation=TorchRows(), eval_batches=3)
    assert trainer.num_steps == -(-ROWS // SIZE)
    found = source(shuffle=False).rows(0, 3 * SIZE)
    model = trainer.to_model()
    expected = float(np.mean((found["x"] @ np.asarray(model["w"])[:, 0] - found["y"]) ** 2))
    np.testing.assert_allclose(trainer.evaluations[-1]["loss"], expected, rtol=1e-5)


def test_a_ds_config_gives_the_batch_size():
    config = {"train_batch_size": SIZE, "gradient_clipping": 1.0, "optimizer": {"type": "Adam"}}
    model = (init, lambda params, x: x @ params["w"])
    trainer = zerojax.train(model, config, THEIRS, loss=loss, run_dir=None, steps=1)
    assert trainer.plan.abstract_batch["x"].shape == (SIZE, 4)


@pytest.mark.parametrize("batches", [THEIRS, [source(seed=0).batch(step) for step in range(4)]])
def test_a_schedule_of_a_ds_config_has_the_length_of_the_data(batches):
    scheduler = {"total_num_steps": "auto", "warmup_num_steps": 1, "warmup_type": "linear"}
    config = {
        "train_batch_size": SIZE,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": scheduler},
    }
    model = (init, lambda params, x: x @ params["w"])
    assert zerojax.train(model, config, batches, loss=loss, run_dir=None).num_steps == 4


def test_other_data_are_noticed_on_a_resume(tmp_path):
    train(THEIRS, tmp_path, steps=1, global_batch_size=SIZE).close()
    changed = HuggingFace({"x": (X + 1).tolist(), "y": Y.tolist()})
    with pytest.raises(ValueError, match="checksum"):
        train(changed, tmp_path, steps=2, global_batch_size=SIZE)


RAGGED = {"x": [[0.0] * (1 + n % 3) for n in range(ROWS)]}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: train(THEIRS), ValueError, ("50 rows", "global_batch_size=")),
        (lambda: train(PlainRows()), ValueError, ("50 rows", "global_batch_size=")),
        *(
            (
                lambda batches=batches: train(batches, global_batch_size=SIZE + 1),
                ValueError,
                (f"global_batch_size={SIZE + 1}", f"{SIZE} rows", "DatasetSource"),
            )
            for batches in ([source(seed=0).batch(0)], source(seed=0).batch, source(seed=0))
        ),
        (lambda: source(iter([])), TypeError, ("list_iterator", "iterable of batches")),
        (lambda: source(HuggingFace({"x": []})), ValueError, ("no rows",)),
        (lambda: source(global_batch_size=0), ValueError, ("global_batch_size=0",)),
        (lambda: source(HuggingFace(RAGGED)).batch(0), ValueError, ("'x'", "(1,)", "collate=")),
        (
            lambda: source(HuggingFace({"text": ["a"] * 9})).batch(0),
            TypeError,
            ("'text'", "remove"),
        ),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_position_of_a_run_is_json():
    json.dumps(source().fingerprint())
    assert dataclasses.replace(source(), seed=4).fingerprint() != source().fingerprint()


LIBRARY = """
import datasets, numpy as np, zerojax
x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
theirs = datasets.Dataset.from_dict({"x": x.tolist(), "y": list(range(50))})
source = zerojax.data.DatasetSource(dataset=theirs, global_batch_size=16)
batch = source.batch(2)
np.testing.assert_array_equal(np.asarray(batch["x"], np.float32), x[batch["y"]])
ragged = datasets.Dataset.from_dict({"x": [[0.0] * (1 + n % 3) for n in range(50)]})
try:
    zerojax.data.DatasetSource(dataset=ragged, global_batch_size=16).batch(0)
except ValueError as error:
    assert "collate=" in str(error), error
else:
    raise SystemExit("rows of different lengths were stacked")
"""


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not here")
def test_the_library_itself_gives_the_same_rows(tmp_path):
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LIBRARY]
    subprocess.run(command, cwd=tmp_path, env=os.environ | variables, check=True)
