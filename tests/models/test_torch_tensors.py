"""Tensors of torch in a batch train as arrays do; models and losses of torch are refused by name.

By a stand-in, and by torch itself where it is installed.
"""

import sys
from collections import UserDict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support import torch_stand_in
from zerojax.data import as_feed, one_pass
from zerojax.equality import make_request
from zerojax.models.adapt import as_loss, as_model
from zerojax.models.given_arrays import as_arrays

REAL = pytest.param("torch", id="torch itself", marks=pytest.mark.thorough)


@pytest.fixture(params=["stand-in", REAL])
def tensor(request, monkeypatch):
    """Makes a tensor of an array."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "torch", torch_stand_in.as_module())
        return torch_stand_in.tensor
    torch = pytest.importorskip("torch", reason="torch is an extra of the tests")

    def make(array, *, requires_grad=False):
        array = np.array(array)
        is_bf16 = array.dtype == ml_dtypes.bfloat16
        found = torch.from_numpy(array.view(np.int16) if is_bf16 else array)
        found = found.view(torch.bfloat16) if is_bf16 else found
        return found.requires_grad_(requires_grad)

    return make


def rows(step: int = 0, count: int = 16) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(count, 8)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def line(rngs):
    return nnx.Linear(8, 1, rngs=rngs)


class Loader:
    """As torch's `DataLoader` of an iterable data set: it has no length, and says so late."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)

    def __len__(self):
        raise TypeError("object of type 'IterableDataset' has no len()")


@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16])
def test_values_and_dtype_stay(tensor, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = as_arrays({"a": [tensor(array)], "b": UserDict(c=tensor(array[0]))})
    assert isinstance(found["b"], dict)
    for one, expected in ((found["a"][0], array), (found["b"]["c"], array[0])):
        assert type(one) is np.ndarray
        assert one.dtype == expected.dtype
        np.testing.assert_array_equal(one, expected)


def test_a_tensor_with_gradients_is_detached(tensor):
    array = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(as_arrays([tensor(array, requires_grad=True)])[0], array)


def test_other_leaves_stay_what_they_are():
    batch = {"a": np.ones(2), "b": jnp.ones(2), "c": jax.ShapeDtypeStruct((2,), "f4"), "d": "text"}
    assert as_arrays(batch) is batch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"place": "cuda:1"}, r"batch\['x'\] .*cuda:1.*batch\['x'\]\.cpu\(\)"),
        ({"place": "meta"}, "with values"),
    ],
)
def test_tensors_that_cannot_be_read_are_refused(options, words, monkeypatch):
    tensor = torch_stand_in.tensor
    batch = {"x": tensor(np.ones((16, 8), np.float32), **options), "y": rows()["y"]}
    for take in (
        lambda: zerojax.train(line, None, [batch], loss=squared, run_dir=None),
        lambda: zerojax.make_plan(line, None, example_batch=batch, loss=squared),
        lambda: make_request(line, batch, loss=squared),
    ):
        with pytest.raises(TypeError, match=words):
            take()


@pytest.mark.thorough
def test_training_takes_tensors_everywhere(tensor):
    """From a loader, as validation with a short batch, and in a step of one's own."""
    batches = [rows(step) for step in range(3)]
    short = rows(9, count=5)

    def losses(convert):
        given = [jax.tree.map(convert, batch) for batch in batches]
        trainer = zerojax.train(
            line,
            zerojax.make_mesh(devices=jax.devices()[:1]),
            Loader(given),
            loss=squared,
            validation=[given[0], jax.tree.map(convert, short)],
            run_dir=None,
            log=zerojax.LogConfig(console="quiet"),
        )
        assert trainer.num_steps == 3
        step = trainer.step(given[0])
        return [float(step["loss"]), *(x["loss"] for x in (*trainer.history, *trainer.evaluations))]

    assert losses(lambda array: tensor(array, requires_grad=True)) == losses(np.asarray)


def test_each_door_takes_tensors(tensor):
    batch = rows()
    tensors = {name: tensor(array, requires_grad=True) for name, array in batch.items()}
    assert all(type(array) is np.ndarray for array in next(as_feed([tensors])).values())
    plan = zerojax.make_plan(line, None, example_batch=tensors, loss=squared)
    assert plan.abstract_batch["x"].shape == (16, 8)
    placed = zerojax.shard_batch(plan, tensors)
    np.testing.assert_array_equal(placed["x"], batch["x"])
    request = make_request(line, tensors, loss=squared)
    np.testing.assert_array_equal(request.batches[0]["x"], batch["x"])


@pytest.mark.thorough
def test_an_engine_takes_tensors_of_16_bits(tensor):
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    config = {"train_batch_size": 16, "gradient_clipping": 1.0, "optimizer": adam}
    batch = {name: array.astype(ml_dtypes.bfloat16) for name, array in rows().items()}

    def loss(convert):
        with zerojax.initialize(line, config, loss=squared) as engine:
            return float(engine.train_batch(jax.tree.map(convert, batch)))

    assert loss(tensor) == loss(np.asarray)


def test_a_loader_without_a_length_is_read_to_its_end():
    batches, count = one_pass(Loader([1, 2]))
    assert (list(batches), count) == ([1, 2], None)


@pytest.mark.thorough
def test_a_loader_of_torch():
    torch = pytest.importorskip("torch", reason="torch is an extra of the tests")
    data = rows(count=64)
    pairs = torch.utils.data.TensorDataset(*map(torch.from_numpy, data.values()))
    loader = torch.utils.data.DataLoader(pairs, batch_size=16)
    loss = lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2)  # noqa: E731
    trainer = zerojax.train(line, None, loader, loss=loss, run_dir=None)
    assert trainer.num_steps == 4


class Held(nnx.Module):
    def __init__(self, rngs=None):
        self.weight = nnx.Param(torch_stand_in.tensor(np.ones((8, 1), np.float32)))

    def __call__(self, x):
        return x @ self.weight


def test_a_module_that_holds_a_tensor_is_refused_as_it_is_given():
    with pytest.raises(TypeError, match="parameter 'weight'"):
        as_model(Held())
    assert as_loss(squared, as_model(line)) is squared
