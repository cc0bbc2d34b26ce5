"""Refusals that a newcomer meets: the loss, the batches, the optimizer, the engine, a run's folder.

What the message tells to write is written, and works.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import Refusal, check_words, code_in, refused
from zerojax.config import ConfigError
from zerojax.models.adapt import as_model
from zerojax.placement.state import run_key_data


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


def plan(batch: Any = None, mesh: Any = None, loss=squared, **options: Any) -> zerojax.Plan:
    batch = rows() if batch is None else batch
    return zerojax.make_plan(Line, mesh or {}, example_batch=batch, loss=loss, **options)


wrong_type = functools.partial(refused, error=TypeError)


def typed(message: str, start: str, **names: Any) -> Any:
    """What the code in a message that begins so gives when it is typed."""
    return eval(code_in(message, start), {"zerojax": zerojax, "numpy": np, **names})


# --- models, losses and batches -------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["regression", "pair", "tokens"])
def test_a_missing_loss(kind):
    tokens = np.arange(64).reshape(8, 8) % 16
    model, batch = {
        "regression": (Line, rows()),
        "pair": (Line, tuple(rows().values())),
        "tokens": (Tokens, {"tokens": tokens, "targets": tokens}),
    }[kind]
    message = refused(lambda: train(model, [batch], loss=None), ["loss", model.__name__])
    loss = typed(message, "lambda model, batch")
    assert np.isfinite(train(model, [batch], loss=loss).metrics["loss"])


@pytest.mark.thorough
def test_a_factory_without_random_streams():
    message = wrong_type(lambda: as_model(lambda: Line(nnx.Rngs(0))), "<lambda>", "rngs")
    written = code_in(message.replace("...", "width=8"), "lambda rngs: MyModel")
    train(eval(written, {"MyModel": Line}))
    message = wrong_type(lambda: as_model(Sized), "Sized", "rngs Sized(...)")
    written = code_in(message.replace("...", "8"), "lambda rngs: Sized")
    assert written == "lambda rngs: Sized(8, rngs=rngs)"
    train(eval(written, {"Sized": Sized}))
    wrong_type(lambda: as_model(Defaulted), "Defaulted width", "rngs")
    # Functions in place of a model.
    wrong_type(lambda: as_model(lambda params, x: x), "<lambda> x", "rngs nnx.Module")
    wrong_type(lambda: as_model(lambda x: x), "<lambda> Rngs", "nnx.Module")


@pytest.mark.thorough
def test_rows_as_python_lists():
    lists = {name: value.tolist() for name, value in rows().items()}
    for name in "xy":
        value = [f"batch['{name}']", "list"]
        message = wrong_type(lambda: train(Line, [lists]), value)
        lists[name] = typed(message, "numpy.asarray(", batch=lists)
    train(Line, [lists])
    # Also in a later batch, and where the plan is made by hand.
    later = [rows(), {name: value.tolist() for name, value in rows().items()}]
    two = lambda: zerojax.train(Line, {}, later, loss=squared, steps=2, run_dir=None)  # noqa: E731
    refused(two, "x/0/0 x/0/1")
    wrong_type(lambda: plan(([[1.0]] * 8,)), "batch[0] list", "numpy.asarray(batch[0])")


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (["a"] * 16, ["batch['id'][0]", "a"]),
        (np.array(["a"] * 16), ["batch['id']", "<U1"]),
        (np.array([None] * 16), ["batch['id']", "object"]),
    ],
)
def test_what_is_no_number_is_refused_by_name(names, value):
    wrong_type(lambda: train(Line, [{**rows(), "id": names}]), value, "numbers")
    train()


def test_forgotten_batches_of_a_model_that_is_not_for_text():
    for loss in (squared, None):
        given = functools.partial(zerojax.train, Line, {"zero": 1}, loss=loss)
        refused(lambda given=given: given(steps=1, run_dir=None), "text", "batches")
    # Another mistake keeps its own message.
    config = zerojax.zoo.GPT2Config(vocab_size=256, num_layers=1, num_heads=2, embed_dim=16)
    gpt2 = lambda rngs: zerojax.zoo.GPT2(config, rngs=rngs)  # noqa: E731
    given = functools.partial(zerojax.train, gpt2, None, seq_len=16, steps=1, run_dir=None)
    refused(lambda: given(freeze="no_such_name"), "freeze no_such_name", "plan.table()")


def test_numbers_of_another_kind_are_trained_on():
    """float64 of NumPy and JAX's arrays as batches."""
    train(Line, [{name: value.astype(np.float64) for name, value in rows().items()}])
    train(Line, [{name: jnp.asarray(value) for name, value in rows().items()}])


@pytest.mark.thorough
def test_a_loss_for_each_row():
    def of_rows(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2)[:, 0]

    message = refused(lambda: train(loss=of_rows), "float32[16] 16 [2]", ".mean()")
    mean = train(loss=lambda model, batch: of_rows(model, batch).mean())
    pair = code_in(message, "(values.sum()")
    found = train(loss=lambda model, batch: eval(pair, {"values": of_rows(model, batch)}))
    np.testing.assert_allclose(found.metrics["loss"], mean.metrics["loss"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "loss", [zerojax.losses.mean_squared_error, optax.squared_error, optax.losses.huber_loss]
)
def test_a_function_of_predictions_and_targets_as_a_loss(loss):
    message = wrong_type(lambda: train(loss=loss), [loss.__name__, "predictions"])
    model, batch = Line(nnx.Rngs(0)), rows()
    found = train(model, loss=typed(message, "lambda model, batch", optax=optax)).metrics["loss"]
    value = loss(model(batch["x"]), batch["y"])
    value = value[0] / value[1] if isinstance(value, tuple) else value.mean()
    np.testing.assert_allclose(found, value, rtol=1e-6)


def test_an_error_inside_the_loss_tells_what_it_was_given():
    def notes(error: type[Exception], loss: Any) -> list[str]:
        with pytest.raises(error) as caught:
            train(loss=loss)
        return getattr(caught.value, "__notes__", [])

    given = ["batch['x']", "float32[2, 8]", "batch['y']", "float32[2, 1]"]
    note = notes(KeyError, lambda model, batch: jnp.mean(model(batch["input"])))[-1]
    check_words(note, given)
    assert notes(TypeError, lambda model, batch: jnp.mean(model(batch["x"][:, :4])))[-1] == note
    # What zerojax itself refuses has its own message.
    own = notes(TypeError, lambda model, batch: float(squared(model, batch)))
    assert not any("float32[2, 8]" in each for each in own)


def test_microbatches_that_do_not_divide():
    made = lambda given: plan(rows(given[0]), {"data": 8}, num_microbatches=given[1])  # noqa: E731
    remedy = "32 64 num_microbatches=1"
    Refusal((40, 4), "40 8 4", remedy, [(40, 1), (32, 4), (64, 4)]).check(made)


# --- optimizers and other arguments ---------------------------------------------------------------

USUAL = "optax.adamw(3e-4)"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("bad", "value", "remedy"),
    [
        (optax.adam, "adam", "optax.adam(3e-4)"),
        (zerojax.lion, "lion", "zerojax.lion(3e-4)"),
        (lambda rate: optax.sgd(rate), "<lambda>", USUAL),
        (optax.constant_schedule(1e-3), "schedule", "optax.adamw(schedule)"),
        ("adam", "'adam' str", USUAL),
        (1e-3, "0.001 float", "zerojax.OptimizerConfig(name='lion')"),
        ([1e-3], "[0.001] list", "None"),
        (
            optax.MultiSteps(optax.adam(1e-3), 2),
            "optax.MultiSteps num_microbatches",
            "optimizer.gradient_transformation()",
        ),
    ],
)
def test_what_is_no_optimizer(bad, value, remedy):
    wrong_type(lambda: plan(optimizer=bad), f"optimizer {value}", remedy)
    names = {"optax": optax, "zerojax": zerojax, "optimizer": bad, "schedule": bad}
    plan(optimizer=eval(remedy, names))


STATE = "nnx.state(model, nnx.Param)"


@pytest.mark.parametrize("bad", [STATE, "{'out': {}}", "lambda params: {'out': True, 'up': True}"])
def test_masks_of_another_form(bad):
    """A mask of Flax's own tree, and masks in which parameters are missing."""
    model = Line(nnx.Rngs(0))
    names = {"jax": jax, "nnx": nnx, "model": model}
    masked = lambda mask: plan(optimizer=optax.adamw(1e-3, mask=mask))  # noqa: E731
    remedy = "mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)"
    given = jax.tree.map(lambda _: True, eval(bad, names)) if bad == STATE else eval(bad, names)
    message = refused(lambda: masked(given), "mask", [remedy, "nnx.to_pure_dict"])
    assert "zerojax.adamw" not in message
    masked(eval(remedy.removeprefix("mask="), names))
    masked(jax.tree.map(lambda _: True, eval(f"nnx.to_pure_dict({STATE})", names)))


@pytest.mark.thorough
def test_an_optimizer_of_flax_with_a_state_of_its_own():
    optimizer = nnx.Optimizer(Line(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param)
    wrong_type(lambda: train(optimizer=optimizer), "optimizer flax", "optimizer.tx")
    train(optimizer=optimizer.tx)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "value", "remedy"),
    [
        ({"callbacks": [print, 3]}, "callbacks[1] int", "function"),
        ({"seed": "a"}, "seed str", "whole"),
        ({"freeze": 3}, "freeze=3", "expression list"),
        ({"freeze": [None]}, "freeze=[None]", "expression list"),
        ({"num_microbatches": "2"}, "num_microbatches='2' str", "whole"),
        ({"num_microbatches": 2.0}, "num_microbatches=2.0 float", "whole"),
    ],
)
def test_arguments_of_another_kind(options, value, remedy):
    wrong_type(lambda: train(**options), value, remedy)


@pytest.mark.parametrize("name", ["init_state", "build_step", "build_evaluation", "forecast"])
def test_a_model_in_place_of_its_plan(name):
    options = {"gpu": "h100"} if name == "forecast" else {}
    remedy = '"zerojax.make_plan(model, mesh_config"'
    wrong_type(lambda: getattr(zerojax, name)(Line, **options), [name, "Plan", "Line"], remedy)


def test_seeds():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows())
    most = 2**63 - 1
    for seed in (functools.partial(zerojax.init_state, plan(shapes)), run_key_data):
        refused(lambda seed=seed: seed(2**70), [f"seed={2**70}"], ["0", most])
        for bad in ("x", 1.5):
            wrong_type(lambda bad=bad, seed=seed: seed(bad), [f"seed={bad!r}"], "integer seed=0")
    for good in (0, most):
        run_key_data(good)


def test_the_name_of_a_run_file_in_place_of_what_it_holds(tmp_path):
    message = wrong_type(lambda: zerojax.run_from_config("run.yaml"), "RunConfig str")
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3", encoding="utf-8")
    written = code_in(message, "zerojax.config.load(").replace("FILE.yaml", str(file))
    assert eval(written).steps == 3


def test_a_stage_of_deepspeed_that_does_not_exist_is_refused_once(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 5}}', encoding="utf-8")
    given = lambda: zerojax.train(Line, file, [rows()], loss=squared, steps=1)  # noqa: E731
    value = ["zero_optimization.stage", 5, file]
    message = refused(given, value, "0 1 2 3", error=ConfigError)
    assert message.count("zero_optimization.stage") == 1


# --- the engine -----------------------------------------------------------------------------------

RATE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def initialize(*, config: Any = (), **options: Any) -> Any:
    config = {"train_batch_size": 16, "gradient_clipping": 1.0, **dict(config)}
    return zerojax.initialize(Line, config=config, **{"loss": squared, **options})


def test_a_schedule_for_the_engine():
    """`lr_scheduler=` is answered with two ways, which both give the schedule's rates."""
    given = lambda: initialize(lr_scheduler=lambda step: 1e-3)  # noqa: E731
    wrong_type(given, "lr_scheduler", "optimizer=zerojax.adamw(schedule) scheduler")
    schedule = optax.linear_schedule(1e-3, 0.0, 10)
    with initialize(optimizer=zerojax.adamw(schedule)) as engine:
        assert engine.get_lr() == [pytest.approx(1e-3)]
    rates = {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "warmup_type": "linear"}
    section = {"type": "WarmupLR", "params": rates}
    with initialize(config={**RATE, "scheduler": section}) as engine:
        assert engine.get_lr() == [0.0]


def test_training_data_for_the_engine():
    message = wrong_type(lambda: initialize(training_data=[rows()]), "training_data")
    names = {"batch": rows(), "loader": [rows()]}
    with initialize() as engine:
        for start in ("engine.train_batch(batch", "engine.train_batch(data_iter"):
            assert np.isfinite(float(typed(message, start, engine=engine, **names)))
        assert engine.global_steps == 2


def test_questions_to_an_engine_before_its_first_batch():
    with initialize() as engine:
        message = refused(engine.get_lr, "batch")
        typed(message, "engine.prepare(", engine=engine, example_batch=rows())
        assert engine.get_lr() == [pytest.approx(3e-5)]
    wrong_type(lambda: initialize(optimizer=lambda params: params), "optimizer <lambda>", USUAL)


# --- folders and runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint", "run_dir"])
def test_a_url_as_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = lambda: train(**{name: "gs://bucket/run"})  # noqa: E731
    refused(given, [name, "gs://bucket/run"], "mount", error=ConfigError)
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_another_optimizer_than_the_one_that_was_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(checkpoint="mine", run_dir="auto")
    other = lambda folder: train(  # noqa: E731
        checkpoint=folder, run_dir="auto", optimizer=optax.sgd(1e-2)
    )
    value, error = "opt_state/1/0/count optimizer", zerojax.errors.CheckpointError
    Refusal("mine", value, "metadata.json another", ["other"], error).check(other)


@pytest.mark.thorough
def test_stopping_early_and_keeping_the_best(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop, keep = zerojax.EarlyStopping, zerojax.KeepBest
    value, given = "EarlyStopping validation/loss", {"validation": [rows()]}
    remedy = "validation= eval_every= metric='loss'"
    refused(lambda: train(callbacks=[stop()]), value, remedy)
    refused(lambda: train(callbacks=[stop()], **given), value, "eval_every=")
    refused(lambda: train(callbacks=[keep("loss")]), "KeepBest", "checkpoint='runs/NAME'")
    train(callbacks=[stop("loss")])
    given |= {"eval_every": 1, "checkpoint": "runs/NAME"}
    assert train(callbacks=[stop(), keep()], **given).kept_steps()["best"]["step"] == 1
