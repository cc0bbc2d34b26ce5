"""A ds_config trains as the settings that it means, and a call may not say otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import zerojax
from tests.support.small_models import VOCAB, reference_model
from zerojax import cli
from zerojax.config import LogConfig, MeshConfig

ROWS, LENGTH, STEPS = 16, 8, 4
FILE = {
    "train_batch_size": ROWS,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,
    },
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_num_steps": 2,
            "warmup_max_lr": 0.01,
            "warmup_type": "linear",
            "total_num_steps": "auto",
        },
    },
    "bf16": {"enabled": "auto"},
    "steps_per_print": 1,
}


def batches(rows: int = ROWS) -> list[dict]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (STEPS, rows, LENGTH), dtype=np.int32)
    return [{"tokens": each, "targets": np.roll(each, -1, 1)} for each in tokens]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepspeed") / "ds_config.json"
    path.write_text(json.dumps(FILE))
    return path


def losses(mesh_config, **options) -> tuple[list[float], zerojax.Trainer]:
    found: list[float] = []
    trainer = zerojax.train(
        reference_model("gpt2"),
        mesh_config,
        batches(),
        steps=STEPS,
        run_dir=None,
        callbacks=[lambda _, metrics: found.append(metrics["loss"])],
        **options,
    )
    return found, trainer


@pytest.mark.thorough
def test_a_file_trains_as_the_settings_that_it_means(path):
    from_file, trainer = losses(path, precision="fp32")
    assert losses(FILE, precision="fp32")[0] == from_file, "its content, as a dict"

    def rate(count):
        """DeepSpeed's linear warm-up over two updates, then the peak."""
        return jax.numpy.asarray([0.0, 0.0, 0.005, 0.01])[count]

    tx = zerojax.adamw(rate, b2=0.999, weight_decay=0.1, mask=None, clip_norm=0.5)
    mesh = MeshConfig(zero=3, reduce_bucket_size=32 * 32, persistence_threshold=1)
    log = LogConfig(every=1)
    wanted, other = losses(mesh, optimizer=tx, precision="fp32", num_microbatches=2, log=log)
    assert from_file == wanted
    assert len(from_file) == STEPS
    assert trainer.plan.settings == other.plan.settings
    assert (trainer.plan.zero, trainer.plan.num_microbatches) == (3, 2)
    for found, expected in zip(
        jax.tree.leaves(trainer.state["params"]),
        jax.tree.leaves(other.state["params"]),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough
def test_what_the_file_leaves_to_deepspeeds_defaults_is_warned_of(tmp_path):
    file = tmp_path / "small.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.warns(UserWarning, match="small.json: gradient_clipping is not in the file"):
        zerojax.train(
            reference_model("gpt2"), str(file), batches(8), steps=1, run_dir=tmp_path / "run"
        )
    lines = (tmp_path / "run" / "plan.txt").read_text()
    assert "gradient_clipping is not in the file" in lines
    assert "precision fp32: the file enables neither" in lines


def run_cli(capsys, *words: str) -> tuple[int, str]:
    code = cli.main(["deepspeed", "explain", *words])
    return code, capsys.readouterr().out


def test_explain_prints_every_key_and_what_the_run_will_be(path, capsys):
    code, page = run_cli(
        capsys, str(path), "--devices", "8", "--steps", "100", "--hidden-size", "64"
    )
    assert code == 0
    for words in (
        "honoured   zero_optimization.stage = 3",
        "AdamW: in DeepSpeed Adam means AdamW",
        "scheduler.params.warmup_type",
        "16 rows of one step over all devices: 1 at once x 2 microbatches",
        "mesh       data=8, zero=3",
        "gradients clipped to 0.5",
        'optimizer.params.lr=5e-05 for "auto": Hugging Face\'s default',
    ):
        assert words in page, page
    assert max(map(len, page.splitlines())) <= 100


def test_explain_ends_with_2_where_something_is_refused_and_says_all_of_it(tmp_path, capsys):
    file = tmp_path / "bad.json"
    file.write_text('{"amp": {"enabled": true}, "zero_optimization": {"stge": 2}}')
    code, page = run_cli(capsys, str(file))
    assert code == 2
    assert "refused    amp" in page
    assert "did you mean 'stage'?" in page
    assert "2 refused" in page
    code, text = run_cli(capsys, str(file), "--json")
    assert code == 2
    verdicts = {line["key"]: line["verdict"] for line in json.loads(text)["lines"]}
    assert verdicts == {"amp": "refused", "zero_optimization.stge": "refused"}


def test_explain_ends_with_2_where_settings_exclude_each_other(tmp_path, capsys):
    file = tmp_path / "both.json"
    file.write_text(
        '{"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},'
        '"progressive_layer_drop": {"enabled": true, "theta": 0.5}}'
    )
    code, page = run_cli(capsys, str(file), "--devices", "8")
    assert code == 2
    assert "refused together on 8 devices\n  - layer_drop.theta: " in page
    assert "update     1-bit Adam" in page
    code, text = run_cli(capsys, str(file), "--json")
    assert code == 2
    assert "1-bit" in json.loads(text)["conflicts"][0]


def test_the_page_of_all_keys_is_the_table(capsys):
    page = Path(zerojax.__file__).parents[1] / "docs" / "ds_config_keys.md"
    assert cli.main(["deepspeed", "keys", "--markdown"]) == 0
    assert capsys.readouterr().out == page.read_text(), (
        "run: zerojax deepspeed keys --markdown > docs/ds_config_keys.md"
    )
    assert cli.main(["deepspeed", "keys", "bucket"]) == 0
    text = capsys.readouterr().out
    assert "honoured   zero_optimization.reduce_bucket_size (default 500000000)" in text
    assert "fp16" not in text


def test_explain_complains_of_its_words(capsys):
    assert cli.main(["deepspeed", "explain", "nowhere.json"]) == 2
    assert "'nowhere.json' is not a file" in capsys.readouterr().err
    assert cli.main(["deepspeed", "explain", "{}", "--devices", "0"]) == 2
    assert "--devices 0 must be at least 1" in capsys.readouterr().err
