"""Options are typed, explained and refused with value, limit and remedy."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zerojax import config as config_module
from zerojax.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
    as_mesh_config,
    from_dict,
    load,
    to_dict,
)
from zerojax.schedules import ScheduleError, make_schedule

SECTIONS = [
    MeshConfig,
    OffloadConfig,
    ModelConfig,
    DataConfig,
    OptimizerConfig,
    CheckpointConfig,
    LogConfig,
]

FILE = """\
# a comment
mesh:
  zero: 2
  reduce_bucket_size: 5e8
  rules:
    - ["attn/query/kernel", [null, model]]
optimizer:
  learning_rate: 1e-3
  clip_norm: null
steps: 50
freeze: ["embed/.*"]
"""


def write(tmp_path: Path, text: str, name: str = "tiny.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_file_gives_typed_values_and_the_rest_are_defaults(tmp_path):
    run = load(RunConfig, write(tmp_path, FILE))
    assert run.mesh.zero == 2
    assert type(run.mesh.reduce_bucket_size) is int
    assert run.mesh.reduce_bucket_size == 500_000_000
    assert run.mesh.rules == (("attn/query/kernel", (None, "model")),)
    assert type(run.optimizer.learning_rate) is float
    assert run.optimizer.learning_rate == 1e-3
    assert run.optimizer.clip_norm is None
    assert run.freeze == ("embed/.*",)
    assert run.steps == 50
    assert run.model == ModelConfig()


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_is_the_defaults(tmp_path, text):
    run = load(RunConfig, write(tmp_path, text))
    assert run == dataclasses.replace(RunConfig(), run_dir="runs/tiny")


def test_the_run_folder_is_named_for_the_file_unless_it_is_given(tmp_path):
    assert load(RunConfig, write(tmp_path, "steps: 5", "gpt2_124m.yaml")).run_dir == (
        "runs/gpt2_124m"
    )
    assert load(RunConfig, write(tmp_path, "run_dir: elsewhere")).run_dir == "elsewhere"
    assert load(RunConfig).run_dir == "runs/default"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("mesh.zero=3", lambda run: run.mesh.zero, 3),
        ("zero=3", lambda run: run.mesh.zero, 3),
        ("--zero=3", lambda run: run.mesh.zero, 3),
        ("learning_rate=3e-4", lambda run: run.optimizer.learning_rate, 3e-4),
        ("reduce_bucket_size=2e6", lambda run: run.mesh.reduce_bucket_size, 2_000_000),
        ("seed=7", lambda run: run.seed, 7),
        ("clip_norm=none", lambda run: run.optimizer.clip_norm, None),
        ("eval_every=null", lambda run: run.eval_every, None),
        ("offload=null", lambda run: run.mesh.offload, OffloadConfig()),
        ("remat=none", lambda run: run.model.remat, "none"),
        ("tensorboard=false", lambda run: run.log.tensorboard, False),
        ("wandb=2024", lambda run: run.log.wandb, "2024"),
        ("tokenizer=bpe:2048", lambda run: run.data.tokenizer, "bpe:2048"),
        ("data.path=a: b", lambda run: run.data.path, "a: b"),
        ("freeze=embed/.*", lambda run: run.freeze, ("embed/.*",)),
        ("freeze=[a, b]", lambda run: run.freeze, ("a", "b")),
        ("mesh={zero: 3, model: 2}", lambda run: (run.mesh.zero, run.mesh.model), (3, 2)),
        ("tie_embeddings=true", lambda run: run.model.tie_embeddings, True),
        ("pipeline_schedule=zb_v", lambda run: run.mesh.pipeline_schedule, "zb_v"),
        ("schedule=linear", lambda run: run.optimizer.schedule, "linear"),
        (
            "pipeline_schedule=interleaved(2)",
            lambda run: run.mesh.pipeline_schedule,
            "interleaved(2)",
        ),
        ("partition=[3, 3, 2]", lambda run: run.mesh.partition, (3, 3, 2)),
        ("partition=flops", lambda run: run.mesh.partition, "flops"),
        ("stash=input", lambda run: run.mesh.stash, "input"),
    ],
)
def test_overrides_are_read_as_their_field_wants(override, read, expected):
    value = read(load(RunConfig, None, [override]))
    assert value == expected
    assert type(value) is type(expected)


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path):
    path = write(tmp_path, FILE)
    run = load(RunConfig, path, ["zero=1", "mesh.zero=3", "steps=9"])
    assert (run.mesh.zero, run.steps) == (3, 9)
    assert run.optimizer.learning_rate == 1e-3


BAD_FILES = [
    ("mesh:\n  zeroo: 3", "mesh.zeroo: unknown key; did you mean 'mesh.zero'? ({path}:2)"),
    ("learning_rat: 1", "learning_rat: unknown key; did you mean 'optimizer.learning_rate'?"),
    ("optimizer:\n\n  lr: 1", "did you mean 'optimizer.learning_rate'? ({path}:3)"),
    ("1: 2", "1: unknown key; known keys here: model, mesh"),
    ("steps: many", "steps: expected an integer, got 'many' (str) ({path}:1)"),
    ("steps: 2.5", "steps: expected an integer, got 2.5 (float)"),
    ("steps: true", "steps: expected an integer, got True (bool)"),
    ("optimizer: {eps: [1]}", "optimizer.eps: expected a number, got [1] (list)"),
    ("optimizer: {eps: .nan}", "optimizer.eps: expected a finite number, got nan (float)"),
    ("log: {tensorboard: 1}", "log.tensorboard: expected true or false, got 1 (int)"),
    ("data: {path: 1.10}", "data.path: expected text (put it in quotes), got 1.1 (float)"),
    ("freeze: {a: b}", "freeze: expected a list, got {{'a': 'b'}} (dict)"),
    ("mesh:\n  rules: [[a]]", "mesh.rules: expected a list of 2 items, got ['a'] (list)"),
    (
        "optimizer: {name: adam}",
        "'adam' is not one of adamw, lion, sgd, lamb, adam8bit; did you mean",
    ),
    ("mesh: 3", "mesh: expected a section with the keys data, model"),
    ("mesh:\n  offload: cpu", "mesh.offload: expected a section with the keys opt_state"),
    ("mesh:\n  zero: 4", "mesh.zero=4 is not valid; use 0, 1, 2 or 3 ({path}:2)"),
    ("mesh: {data: 0}", "mesh.data: 0 must be >= 1, or -1 for all devices"),
    ("mesh: {model: -1}", "mesh.model: -1 must be >= 1"),
    (
        "mesh: {pipeline_schedule: 4}",
        "pipeline_schedule: 4 is not a schedule; use a name such as",
    ),
    (
        "mesh: {pipeline_schedule: ''}",
        "pipeline_schedule: '' is not a schedule; use a name",
    ),
    ("mesh: {partition: flop}", "mesh.partition: 'flop' is not one of uniform, parameters, flops"),
    ("mesh: {partition: flop}", "nor a list of whole numbers; did you mean 'flops'?"),
    ("mesh: {partition: [2, 2.5]}", "mesh.partition: expected an integer, got 2.5 (float)"),
    ("mesh: {partition: [2, 0]}", "mesh.partition: [2, 0] must give every stage at least 1 layer"),
    ("mesh: {partition: []}", "mesh.partition: [] must give every stage at least 1 layer"),
    ("mesh: {partition: 4}", "mesh.partition: expected a list, got 4 (int)"),
    ("mesh: {stash: inputs}", "mesh.stash: 'inputs' is not one of residuals, input; did you mean"),
    ("mesh:\n  rules: [['(', [model]]]", "mesh.rules: '(' is not a regular expression"),
    ("freeze: ['*']", "freeze: '*' is not a regular expression"),
    ("model: {embed_dim: 250}", "embed_dim: 250 is not divisible by num_heads (4); use 248"),
    ("model: {num_kv_heads: 3}", "num_kv_heads: 3 does not divide num_heads (4); use 1 or 4"),
    ("model: {dropout: 1}", "model.dropout: 1.0 must be in [0, 1)"),
    ("optimizer: {clip_norm: 0}", "optimizer.clip_norm: 0.0 must be above 0"),
    (
        "num_microbatches: 5",
        "global_batch_size: 32 is not divisible by num_microbatches=5",
    ),
    ("data: {seq_len: 512}", "data.seq_len: 512 is above model.max_seq_len (256)"),
    ("optimizer:\n  warmup_steps: 999", "warmup_steps: 999 is above steps (300); lower it"),
    ("steps: 0", "steps: 0 must be >= 1"),
    ("steps: 1\nsteps: 2", "steps: the key appears twice, first on line 1; keep one ({path}:2)"),
    ("a: [", "not valid YAML: "),
    ("- a\n- b", "expected KEY: VALUE lines, got ['a', 'b'] ({path}:1)"),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("text", "sentence"), BAD_FILES)
def test_a_mistake_in_a_file_is_named(tmp_path, text, sentence):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, path)
    assert sentence.format(path=path) in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("zero", "override 'zero' is not KEY=VALUE; an example is mesh.zero=3"),
        ("every=3", "every: ambiguous key; write checkpoint.every or log.every (command line)"),
        ("zerro=3", "zerro: unknown key; did you mean 'mesh.zero'? (command line)"),
        ("mesh.x.y=3", "mesh.x.y: unknown key"),
        ("mesh.pipe=2", "mesh.pipe: unknown key; known keys here: data, model, stage"),
        ("data=8", "not a value; write mesh.data=8 (command line)"),
        ("log=3", "log: this is a section (log.every, "),
        ("zero=three", "mesh.zero: expected an integer, got 'three' (str) (command line)"),
        ("zero=7", "mesh.zero=7 is not valid; use 0, 1, 2 or 3 (command line)"),
        ("offload=cpu", "this is a section (mesh.offload.opt_state"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(override, sentence):
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, [override])
    assert sentence in str(caught.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file at '.*gone\.yaml'"):
        load(RunConfig, tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load(RunConfig, tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load(RunConfig, tmp_path / "binary.yaml")


def test_a_bad_value_of_the_file_does_not_matter_when_it_is_overridden(tmp_path):
    assert load(RunConfig, write(tmp_path, "mesh: {zero: 9}"), ["zero=1"]).mesh.zero == 1


@pytest.mark.parametrize("cls", [*SECTIONS, RunConfig])
def test_dict_round_trip_goes_through_json(cls):
    assert from_dict(cls, json.loads(json.dumps(to_dict(cls())))) == cls()


def test_round_trip_of_nested_lists():
    run = RunConfig(mesh=MeshConfig(rules=[["a/b", ["model", None]]]), freeze=["x"])
    again = from_dict(RunConfig, json.loads(json.dumps(to_dict(run))))
    assert again == run
    assert again.mesh.rules == (("a/b", ("model", None)),)
    assert hash(again) == hash(run)


def test_off_is_a_word_where_it_is_a_choice(tmp_path):
    """In a field of another type it is false."""
    path = tmp_path / "run.yaml"
    path.write_text("mesh: {tune: off, roll: off}\n")
    for settings in (load(RunConfig, path).mesh, load(RunConfig, None, ["tune=off"]).mesh):
        assert settings.tune == "off"
    assert load(RunConfig, path).mesh.roll == "off"
    with pytest.raises(ConfigError, match="mesh.tune: 'on' is not one of auto, off"):
        load(RunConfig, None, ["mesh.tune=on"])
    with pytest.raises(ConfigError, match="is not one of uniform, parameters, flops"):
        load(RunConfig, None, ["mesh.partition=off"])


def test_python_callers_get_the_same_checks():
    assert MeshConfig(data=np.int64(4)).data == 4
    assert RunConfig(mesh={"zero": 3}).mesh.zero == 3
    assert RunConfig(run_dir=Path("runs") / "x").run_dir == "runs/x"
    with pytest.raises(ConfigError, match="zero: expected an integer, got None"):
        MeshConfig(zero=None)
    with pytest.raises(ConfigError, match=r"mesh\.zeroo: unknown key; did you mean 'zero'"):
        RunConfig(mesh={"zeroo": 3})
    with pytest.raises(ValueError, match="clip_norm"):
        OptimizerConfig(clip_norm=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MeshConfig().zero = 2


def test_a_schedule_of_ones_own_is_kept_and_written_down_whole():
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    config = MeshConfig(pipeline_schedule=schedule)
    assert config.pipeline_schedule is schedule
    written = json.loads(json.dumps(to_dict(config)))
    read = from_dict(MeshConfig, written).pipeline_schedule
    assert (read["name"], read["placement"]) == ("1f1b", "loop")
    assert read["table"][1][0] == [["F", 1, 0]]
    assert to_dict(MeshConfig(pipeline_schedule=read)) == to_dict(config)
    assert make_schedule(read, stages=2, microbatches=2) == schedule
    with pytest.raises(
        ScheduleError, match="mapping with table is not a schedule .*it has name, tab"
    ):
        make_schedule({"table": []})


def test_as_mesh_config():
    mesh = MeshConfig(zero=3)
    assert as_mesh_config(mesh) is mesh
    assert as_mesh_config({"zero": 3}) == mesh
    assert as_mesh_config(None) == MeshConfig()
    with pytest.raises(ConfigError, match="did you mean 'zero'"):
        as_mesh_config({"zer": 1})
    with pytest.raises(TypeError, match="mesh_config is a int"):
        as_mesh_config(3)


def test_a_required_key_is_asked_for():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Needy:
        steps: int

    with pytest.raises(ConfigError, match="steps: Needy needs this key"):
        from_dict(Needy, {})


@pytest.mark.parametrize("cls", [*SECTIONS, RunConfig], ids=lambda cls: cls.__name__)
def test_every_field_is_explained(cls):
    body = ast.parse(inspect.getsource(cls)).body[0].body
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and "Config" not in ast.unparse(node.annotation):
            explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert explained, f"{cls.__name__}.{ast.unparse(node.target)} has no text under it"


def test_reading_a_config_does_not_wait_for_jax():
    code = "import sys, zerojax.config; print('jax' in sys.modules)"
    root = Path(config_module.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
