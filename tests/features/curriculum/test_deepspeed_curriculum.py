"""DeepSpeed's section `curriculum_learning`: the trainer shortens the rows."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.features.curriculum.curriculum_runs import ROWS, TOKENS, Causal, batch_of, plain_training
from tests.support.refusals import refused
from zerojax import deepspeed_config as deepspeed
from zerojax.config import ConfigError, CurriculumConfig

GROWTH = {"total_curriculum_step": 15000, "difficulty_step": 8}
LISTS = {"difficulty": [8, 64, 128], "max_step": [5, 100]}
LIMITS = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 128}


def file(schedule="fixed_linear", schedule_config=GROWTH, **changes):
    section = {"enabled": True, **LIMITS, "schedule_type": schedule}
    section |= {"schedule_config": dict(schedule_config), **changes}
    return {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 1e-4}},
        "zero_optimization": {"stage": 1},
        "curriculum_learning": section,
    }


def curriculum_of(given):
    return deepspeed.translate(given, num_devices=8).features.get(zerojax.CurriculumConfig)


@pytest.mark.parametrize(
    ("given", "config"),
    [
        (
            file(),
            CurriculumConfig(type="seqlen", min_length=8, max_length=128, total_steps=15000),
        ),
        (
            file("fixed_root", GROWTH | {"root_degree": 3}),
            CurriculumConfig(
                type="seqlen",
                schedule_type="fixed_root",
                root_degree=3,
                min_length=8,
                max_length=128,
                total_steps=15000,
            ),
        ),
        (
            file("fixed_discrete", LISTS),
            CurriculumConfig(
                type="seqlen",
                schedule_type="fixed_discrete",
                lengths=(8, 64, 128),
                until_steps=(5, 100),
            ),
        ),
        (file(enabled=False), CurriculumConfig()),
        ({"train_batch_size": ROWS}, CurriculumConfig()),
    ],
    ids=["linear", "root", "discrete", "off", "absent"],
)
def test_a_section_is_a_curriculum(given, config):
    assert curriculum_of(given) == config


def test_keys_of_another_schedule_have_no_effect_and_a_warning():
    says = deepspeed.translate(file(schedule_config=GROWTH | LISTS), num_devices=8)
    verdicts = {line.key: line.verdict for line in says.lines}
    for name in LISTS:
        key = f"curriculum_learning.schedule_config.{name}"
        assert verdicts[key] == "ignored"
        assert any(f"{key}=" in warning for warning in says.warnings)
    assert verdicts["curriculum_learning.min_difficulty"] == "honoured"


@pytest.mark.parametrize(
    ("given", "value", "remedy"),
    [
        (file("custom"), "schedule_type custom", "fixed_linear"),
        (file(curriculum_type="vocabularyrarity"), "curriculum_type", "seqlen"),
        (file(schedule_config={"difficulty_step": 8}), "total_curriculum_step", "set"),
        (file(min_difficulty=4), "min_difficulty", "raise"),
        (file("fixed_discrete", {**LISTS, "max_step": [5]}), "max_step", "one"),
        (file("fixed_discrete", {**LISTS, "difficulty": [8, 64, "x"]}), "difficulty", "integer"),
        (file("fixed_discrete", LISTS, max_difficulty=64), "max_difficulty", "128"),
        (file(schedule=None), "schedule_type", "set"),
    ],
)
def test_a_section_that_cannot_be_followed_is_refused(given, value, remedy):
    refused(lambda: curriculum_of(given), f"curriculum_learning {value}", remedy, error=ConfigError)


@pytest.mark.thorough
def test_train_and_initialize_follow_it():
    config = file(
        schedule_config={"total_curriculum_step": TOKENS - 6, "difficulty_step": 1},
        min_difficulty=6,
        max_difficulty=TOKENS,
    )
    losses, _ = plain_training(3, lambda step: 6 + step)
    loss = zerojax.losses.next_token_of_call
    trainer = zerojax.train(
        Causal(nnx.Rngs(0)),
        config,
        batch_of,
        loss=loss,
        steps=3,
        run_dir=None,
        log=zerojax.LogConfig(every=1, console="quiet"),
    )
    # float32 sums over 8 shards instead of one, in another order, over 3 steps
    assert [one["loss"] for one in trainer.history] == pytest.approx(losses, rel=2e-6)

    engine = zerojax.initialize(Causal(nnx.Rngs(0)), config, loss=loss)
    found = [float(engine.train_batch(batch_of(step))) for step in range(3)]
    assert found == pytest.approx(losses, rel=2e-6)
    whole = float(engine.eval_batch(batch_of(3)))
    assert np.isfinite(whole)
    assert engine.plan.abstract_batch["tokens"].shape == (ROWS, TOKENS)
    engine.close()


def test_a_call_with_another_curriculum_is_refused():
    other = zerojax.CurriculumConfig(type="seqlen", total_steps=7)
    call = lambda: zerojax.train(  # noqa: E731
        Causal(nnx.Rngs(0)),
        file(),
        batch_of,
        loss=zerojax.losses.next_token_of_call,
        curriculum=other,
        run_dir=None,
    )
    refused(call, "curriculum_learning", "one")
