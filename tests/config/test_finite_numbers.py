"""Infinite numbers are refused by name where a run would fail later; where they mean "never", not.

A checkpoint holds the settings of its run as JSON, which has no infinity.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing

import pytest
from flax import nnx

import zerojax
from zerojax import config, optim, zoo
from zerojax.cli import main
from zerojax.config.loader import ConfigError, from_dict, load_dataclass
from zerojax.training.evaluation import EarlyStopping
from zerojax.zoo.layers import NormConfig
from zerojax.zoo.rope import Rope, RopeScaling

INFINITE = math.inf, -math.inf, math.nan
SECTIONS = [
    config.LogConfig,
    config.LossScale,
    config.LoraConfig,
    config.MixturePart,
    config.ModelConfig,
    config.OptimizerConfig,
    config.ParameterGroup,
    config.WatchConfig,
]


def numbers_of(section) -> list[str]:
    hints = typing.get_type_hints(section)
    return [name for name, hint in hints.items() if hint in (float, float | None)]


@pytest.mark.parametrize("section", SECTIONS)
def test_settings(section):
    needed = {"path": "a"} if section is config.MixturePart else {}
    assert numbers_of(section)
    for name in numbers_of(section):
        for value in INFINITE:
            with pytest.raises(ConfigError, match=rf"{name}: expected a finite number"):
                section(**needed, **{name: value})
            with pytest.raises(ConfigError, match=f"{name}: expected a finite number"):
                from_dict(section, {**needed, name: value})


@pytest.mark.parametrize("text", ["inf", ".inf", "-inf", "nan", "1e999"])
def test_settings_on_the_command_line(text):
    with pytest.raises(ConfigError, match="watch.step_timeout: expected a finite number"):
        load_dataclass(config.RunConfig, None, [f"watch.step_timeout={text}"])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (zoo.GPT2Config, "norm_eps"),
        (functools.partial(zoo.LlamaConfig, vocab_size=8), "rope_theta"),
        (zoo.BertConfig, "norm_eps"),
        (functools.partial(zoo.DecoderConfig, vocab_size=8), "logit_scale"),
        (zoo.T5Config, "norm_eps"),
        (NormConfig, "eps"),
        (Rope, "theta"),
        (functools.partial(RopeScaling, kind="linear"), "factor"),
        (lambda **options: optim.adamw(**options), "learning_rate"),
        (lambda **options: optim.sgd(0.1, **options), "weight_decay"),
        (lambda **options: optim.lion(**options), "learning_rate"),
        (lambda **options: optim.lamb(0.1, **options), "eps"),
    ],
)
def test_models_and_optimizers(make, name):
    with pytest.raises(ValueError, match=rf"{name}.*inf|inf.*{name}"):
        make(**{name: math.inf})


def test_options_of_commands(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--grace", "inf", "train.py"])
    assert "--grace: inf is not a finite number" in capsys.readouterr().err


def test_no_clipping_may_be_an_infinite_limit():
    optim.adamw(1e-3, clip_norm=math.inf)


# --- ds_config.json -------------------------------------------------------------------------------


def ds_config(**changes):
    return {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **changes,
    }


@pytest.mark.parametrize("is_file", [True, False])
def test_accelerate_never_prints(is_file, tmp_path):
    """Accelerate writes `"steps_per_print": inf`, in a file `Infinity`."""
    source = ds_config(steps_per_print=math.inf)
    if is_file:
        source, values = tmp_path / "ds_config.json", source
        source.write_text(json.dumps(values))
    engine = zerojax.initialize(
        model=lambda rngs: nnx.Linear(2, 2, rngs=rngs), config=source, loss=lambda m, b: m(b).mean()
    )
    assert engine.steps_per_print() is None
    engine.close()


# --- metrics --------------------------------------------------------------------------------------


def test_an_infinite_loss_is_no_best_one():
    """The best value is in checkpoints."""
    stopping = EarlyStopping("loss", patience=9)
    trainer = types.SimpleNamespace(num_steps=1)
    for step, loss in enumerate([math.inf, 2.0, -math.inf]):
        stopping(trainer, {"loss": loss, "step": step})
    assert (stopping.best, stopping.best_step) == (2.0, 1)
