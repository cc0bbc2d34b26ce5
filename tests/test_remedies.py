"""What an error tells a newcomer to write is written, and works."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from zerojax.model import as_model


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 8) -> None:
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


class Sized(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


class Defaulted(nnx.Module):
    def __init__(self, width: int = 8, rngs: nnx.Rngs | None = None) -> None:
        self.out = nnx.Linear(width, 1, rngs=rngs or nnx.Rngs(0))


class Tokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(16, 16, rngs=rngs)

    def __call__(self, tokens):
        return self.table.attend(self.table(tokens))


def rows() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(model=Line, batches=None, loss=squared, **options):
    batches = [rows()] if batches is None else batches
    return zerojax.train(
        model, {"zero": 1}, batches, loss=loss, steps=1, **{"run_dir": None, **options}
    )


def sentence_of(function, *args, **options) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        function(*args, **options)
    return str(caught.value)


def typed(sentence: str, pattern: str, **names):
    """What a part of a sentence gives when it is typed."""
    return eval(re.search(pattern, sentence)[1], {"zerojax": zerojax, "numpy": np, **names})


@pytest.mark.parametrize("kind", ["regression", "pair", "tokens"])
def test_a_missing_loss(kind):
    tokens = np.arange(64).reshape(8, 8) % 16
    model, batch = {
        "regression": (Line, rows()),
        "pair": (Line, tuple(rows().values())),
        "tokens": (Tokens, {"tokens": tokens, "targets": tokens}),
    }[kind]
    sentence = sentence_of(train, model, [batch], loss=None)
    loss = typed(sentence, r"such as loss=(lambda .*)$")
    assert np.isfinite(train(model, [batch], loss=loss).metrics["loss"])


def test_a_factory_without_random_streams():
    sentence = sentence_of(as_model, lambda: Line(nnx.Rngs(0)))
    assert "cannot be called with one argument" in sentence
    factory = typed(sentence.replace("...", "width=8"), r"give (lambda rngs.*)$", MyModel=Line)
    train(factory)
    sentence = sentence_of(as_model, Sized)
    remedies = re.search(r"give (lambda .*), or an instance: (.*)$", sentence.replace("...", "8"))
    assert remedies[1] == "lambda rngs: Sized(8, rngs=rngs)"
    train(eval(remedies[1], {"Sized": Sized}))
    assert "its first argument is 'width'" in sentence_of(as_model, Defaulted)


def test_a_function_in_place_of_a_model():
    assert "cannot be called with one argument" in sentence_of(as_model, lambda params, x: x)
    assert "has to return an nnx.Module" in sentence_of(as_model, lambda x: x)


def test_a_module_of_pytorch():
    module = type("Net", (), {"__module__": "torch.nn", "__call__": lambda self, x: x})
    for each in (module, module()):
        assert "a module of PyTorch" in sentence_of(as_model, each)


def test_rows_as_python_lists():
    lists = {name: value.tolist() for name, value in rows().items()}
    sentence = sentence_of(train, Line, [lists])
    assert sentence.startswith("batch['x'] is a Python list of numbers")
    lists["x"] = typed(sentence, r"give an array: (.*)$", batch=lists)
    lists["y"] = typed(sentence_of(train, Line, [lists]), r"array: (.*)$", batch=lists)
    train(Line, [lists])
    # Also in a later batch, and where the plan is made by hand.
    later = [rows(), {name: value.tolist() for name, value in rows().items()}]
    sentence_of(zerojax.train, Line, {}, later, loss=squared, steps=2, run_dir=None)
    assert "batch[0] is a Python list" in sentence_of(
        zerojax.make_plan, Line, {}, example_batch=([[1.0]] * 8,), loss=squared
    )


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a"] * 16, r"batch\['id'\]\[0\] holds text \('a'\)"),
        (np.array(["a"] * 16), r"batch\['id'\] holds <U1"),
        (np.array([None] * 16), r"batch\['id'\] holds object"),
    ],
)
def test_what_is_no_number_is_refused_by_name(names, found):
    sentence = sentence_of(train, Line, [{**rows(), "id": names}])
    assert re.search(found, sentence)
    assert "leave it out" in sentence


def test_forgotten_batches_of_a_model_that_is_not_for_text():
    for loss in (squared, None):
        with pytest.raises(ValueError, match=r"no batches were given.*text inside the package"):
            zerojax.train(Line, {"zero": 1}, loss=loss, steps=1, run_dir=None)
    # Another mistake keeps its own sentence.
    config = zerojax.models.GPT2Config(vocab_size=256, num_layers=1, num_heads=2, embed_dim=16)
    gpt2 = lambda rngs: zerojax.models.GPT2(config, rngs=rngs)  # noqa: E731
    with pytest.raises(ValueError, match=r"^freeze"):
        zerojax.train(gpt2, None, freeze="no_such_name", seq_len=16, steps=1, run_dir=None)


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        (
            lambda model, batch: float(squared(model, batch)),
            r"as it is, without float\(\)",
        ),
        (lambda model, batch: squared(model, batch).item(), r"without item\(\)"),
        (lambda model, batch: 2 if squared(model, batch) > 1 else 1, r"jnp\.where"),
    ],
)
def test_a_value_where_only_the_shape_is_known(loss, remedy):
    sentence = sentence_of(train, Line, loss=loss)
    assert "test_remedies.py" in sentence
    assert re.search(remedy, sentence), sentence


def test_numbers_of_another_kind_are_trained_on(tmp_path):
    """float64 of NumPy, Python's tuples and JAX's arrays as batches."""
    batch = {name: value.astype(np.float64) for name, value in rows().items()}
    train(Line, [batch])
    train(Line, [{name: jax.numpy.asarray(value) for name, value in rows().items()}])


def test_a_loss_for_each_row():
    def of_rows(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2)[:, 0]

    sentence = sentence_of(train, Line, loss=of_rows)
    assert "float32[16] of the 16 rows of a batch ([2] where it is cut" in sentence
    assert "with .mean(), or the pair (values.sum(), values.size)" in sentence
    mean = train(Line, loss=lambda model, batch: of_rows(model, batch).mean())

    def pair(model, batch):
        values = of_rows(model, batch)
        return eval(re.search(r"the pair (\(.*\))$", sentence)[1], {"values": values})

    np.testing.assert_allclose(train(Line, loss=pair).metrics["loss"], mean.metrics["loss"])
