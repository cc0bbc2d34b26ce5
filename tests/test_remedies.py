"""What an error tells a newcomer to write is written, and works."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.config import ConfigError, load
from zerojax.models.adapt import as_model


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


def rows(count: int = 16) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.parametrize(
    ("optimizer", "pattern"),
    [
        (optax.adam, r"such as (optax\.adam\(3e-4\))$"),
        (zerojax.lion, r"such as (zerojax\.lion\(3e-4\))$"),
        (lambda rate: optax.sgd(rate), r"such as (optax\.adamw\(3e-4\))$"),
        ("adam", r"such as (optax\.adamw\(3e-4\)), a zerojax"),
        (1e-3, r"such as (zerojax\.OptimizerConfig\(name='lion'\)), or"),
        ([1e-3], r"or (None) for AdamW"),
        (optax.MultiSteps(optax.adam(1e-3), 2), r"its (optimizer\.gradient_transformation\(\)),"),
    ],
)
def test_what_is_no_optimizer(optimizer, pattern):
    plan = functools.partial(zerojax.make_plan, Line, {}, example_batch=rows(), loss=squared)
    sentence = sentence_of(plan, optimizer=optimizer)
    plan(optimizer=typed(sentence, pattern, optax=optax, optimizer=optimizer))


@pytest.mark.thorough
def test_an_optimizer_of_flax_with_a_state_of_its_own():
    optimizer = nnx.Optimizer(Line(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param)
    sentence = sentence_of(train, optimizer=optimizer)
    train(optimizer=typed(sentence, r"transformation, (optimizer\.tx)$", optimizer=optimizer))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "loss", [zerojax.losses.mean_squared_error, optax.squared_error, optax.losses.huber_loss]
)
def test_a_function_of_predictions_and_targets_as_a_loss(loss):
    sentence = sentence_of(train, loss=loss)
    assert "is a function of predictions and targets" in sentence
    written = typed(sentence, r"use loss=(lambda .*)$", optax=optax)
    model, batch = Line(nnx.Rngs(0)), rows()
    found = train(model, loss=written).metrics["loss"]
    value = loss(model(batch["x"]), batch["y"])
    value = value[0] / value[1] if isinstance(value, tuple) else value.mean()
    np.testing.assert_allclose(found, value, rtol=1e-6)


def test_an_error_inside_the_loss_tells_what_it_was_given():
    with pytest.raises(KeyError) as caught:
        train(loss=lambda model, batch: jnp.mean(model(batch["input"])))
    note = caught.value.__notes__[-1]
    assert "batch['x'] float32[2, 8], batch['y'] float32[2, 1]" in note
    with pytest.raises(TypeError, match="dot_general") as caught:
        train(loss=lambda model, batch: jnp.mean(model(batch["x"][:, :4])))
    assert caught.value.__notes__[-1] == note
    # What zerojax itself refuses has its own sentence.
    with pytest.raises(TypeError, match="needs the value") as caught:
        train(loss=lambda model, batch: float(squared(model, batch)))
    assert not any("The loss was called" in each for each in getattr(caught.value, "__notes__", ()))


def test_microbatches_that_do_not_divide():
    plan = functools.partial(zerojax.make_plan, Line, {"data": 8}, loss=squared)
    sentence = sentence_of(plan, example_batch=rows(40), num_microbatches=4)
    near = re.search(r"use (\d+) or (\d+) rows, or num_microbatches=(\d)$", sentence)
    low, high, parts = map(int, near.groups())
    plan(example_batch=rows(40), num_microbatches=parts)
    for count in (low, high):
        plan(example_batch=rows(count), num_microbatches=4)


# --- the engine -----------------------------------------------------------------------------------


def initialize(**options):
    given = {"config": {"train_batch_size": 16, "gradient_clipping": 1.0}, "loss": squared}
    return zerojax.initialize(Line, **{**given, **options})


def test_a_schedule_for_the_engine():
    """`lr_scheduler=` is answered with two ways, which both give the schedule's rates."""
    sentence = sentence_of(initialize, lr_scheduler=lambda step: 1e-3)
    written = re.search(
        r"(optimizer=zerojax\.adamw\(schedule\)), or .* configuration, (\w+)", sentence
    )
    schedule = optax.linear_schedule(1e-3, 0.0, 10)
    names = {"zerojax": zerojax, "schedule": schedule, "initialize": initialize}
    with eval(f"initialize({written[1]})", names) as engine:
        assert engine.get_lr() == [pytest.approx(1e-3)]
    rates = {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "warmup_type": "linear"}
    section = {"type": "WarmupLR", "params": rates}
    config = {
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        written[2]: section,
    }
    with initialize(config=config) as engine:
        assert engine.get_lr() == [0.0]


def test_training_data_for_the_engine():
    sentence = sentence_of(initialize, training_data=[rows()])
    calls = re.findall(r"engine\.train_batch\(.*?(?:\)\)|\))", sentence)
    assert calls == [
        "engine.train_batch(batch)",
        "engine.train_batch(data_iter=iter(loader))",
    ]
    with initialize() as engine:
        for call in calls:
            found = eval(call, {"engine": engine, "batch": rows(), "loader": [rows()]})
            assert np.isfinite(float(found))
        assert engine.global_steps == 2


def test_questions_to_an_engine_before_its_first_batch():
    with initialize() as engine:
        sentence = sentence_of(engine.get_lr)
        call = re.search(r"call (engine\.prepare\(example_batch\)) to", sentence)[1]
        eval(call, {"engine": engine, "example_batch": rows()})
        assert engine.get_lr() == [pytest.approx(3e-5)]
    assert "such as optax.adamw(3e-4)" in sentence_of(initialize, optimizer=lambda params: params)


# --- folders and runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint", "run_dir"])
def test_a_url_as_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = sentence_of(train, **{name: "gs://bucket/run"})
    assert sentence.startswith(f"{name}: 'gs://bucket/run' is a URL; only folders")
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_run_of_a_model_and_loss_of_ones_own_is_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = train(checkpoint="mine", run_dir="auto")
    names = {"MODEL": Line, "LOSS": squared}
    sentence = sentence_of(zerojax.load_run, "mine")
    loaded = typed(sentence, r"in Python: (zerojax\.load_run\(.*?\)) with", **names)
    assert "evaluate(batches)" in sentence_of(loaded.evaluate)
    found = loaded.evaluate([rows()])["loss"]
    np.testing.assert_allclose(found, trainer.evaluate([rows()])["loss"], rtol=1e-6)
    # Another optimizer than the one that was saved.
    with pytest.raises(zerojax.CheckpointError, match="use another checkpoint folder"):
        train(checkpoint="mine", run_dir="auto", optimizer=optax.sgd(1e-2))
    train(checkpoint="other", run_dir="auto", optimizer=optax.sgd(1e-2))


@pytest.mark.thorough
def test_stopping_early_and_keeping_the_best(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop, keep = zerojax.EarlyStopping, zerojax.KeepBest
    sentence = sentence_of(train, callbacks=[stop()])
    assert "pass validation=BATCHES and eval_every=STEPS, or watch metric='loss'" in sentence
    assert "pass eval_every=STEPS" in sentence_of(train, callbacks=[stop()], validation=[rows()])
    assert "pass checkpoint='runs/NAME'" in sentence_of(train, callbacks=[keep("loss")])
    train(callbacks=[stop("loss")])
    trainer = train(
        callbacks=[stop(), keep()], validation=[rows()], eval_every=1, checkpoint="runs/NAME"
    )
    assert trainer.kept_steps()["best"]["step"] == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"callbacks": [print, 3]}, "callbacks[1] is a int; give a function"),
        ({"seed": "a"}, "seed is a str; give a whole number"),
        ({"freeze": 3}, "freeze=3 is not valid; use a regular expression, or a list of them"),
        ({"freeze": [None]}, "freeze=[None] is not valid"),
        ({"num_microbatches": "2"}, "num_microbatches='2' is a str; give a whole number"),
        ({"num_microbatches": 2.0}, "num_microbatches=2.0 is a float; give a whole number"),
    ],
)
def test_arguments_of_another_kind(options, part):
    assert part in sentence_of(train, **options)


def a_plan():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows())
    return zerojax.make_plan(Line, {"zero": 1}, example_batch=shapes, loss=squared)


@pytest.mark.parametrize(
    ("function", "name", "options"),
    [
        (zerojax.init_state, "init_state", {}),
        (zerojax.build_step, "build_step", {}),
        (zerojax.build_evaluation, "build_evaluation", {}),
        (zerojax.forecast, "forecast", {"gpu": "h100"}),
    ],
)
def test_a_model_in_place_of_its_plan(function, name, options):
    with pytest.raises(TypeError, match=f"^{name} takes a Plan, not Line; make one") as raised:
        function(Line, **options)
    assert "zerojax.make_plan(model, mesh_config, " in str(raised.value)


@pytest.mark.parametrize(
    ("seed", "kind", "message"),
    [
        ("x", TypeError, "seed='x' is not an integer; use one, as in seed=0"),
        (1.5, TypeError, "seed=1.5 is not an integer"),
        (2**70, ValueError, f"seed={2**70} does not fit into 64 bits; use 0 to {2**63 - 1}"),
    ],
)
def test_seeds_of_a_state(seed, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        zerojax.init_state(a_plan(), seed=seed)


def test_the_name_of_a_run_file_in_place_of_what_it_holds(tmp_path):
    remedy = 'zerojax.config.load(zerojax.RunConfig, "{}")'
    with pytest.raises(TypeError, match=re.escape(remedy.format("FILE.yaml"))):
        zerojax.run_from_config("run.yaml")
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3", encoding="utf-8")
    assert eval(remedy.format(file)).steps == 3


def test_a_key_below_a_value():
    with pytest.raises(ConfigError, match="mesh.zero is a value and has no keys; write mesh.zero="):
        load(zerojax.RunConfig, None, ["mesh.zero.x=3"])


def test_a_stage_of_deepspeed_that_does_not_exist_is_refused_once(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 5}}', encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        zerojax.train(Line, file, [rows()], loss=squared, steps=1)
    assert str(raised.value).count("use 0, 1, 2 or 3") == 1
