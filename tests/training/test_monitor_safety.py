"""No secret is in what a run writes or says, and not everybody may write it."""

from __future__ import annotations

import io
import json
import os
import stat

import pytest

from zerojax.cli import main
from zerojax.config import DataConfig, LogConfig, ModelConfig, RunConfig
from zerojax.runtime.redaction import HIDDEN, is_secret_name, redact
from zerojax.runtime.user_files import not_for_everybody, open_to_everybody
from zerojax.training.metrics import RunLog, write_report
from zerojax.training.run_file import run_from_config

SECRET = "not-a-real-key-0123456789"

# --- what is secret -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://mary:pa55word@bucket/corpus", f"s3://{HIDDEN}@bucket/corpus"),
        ("https://x-token@host.example/a?b=c", f"https://{HIDDEN}@host.example/a?b=c"),
        (
            "https://host/f.txt?X-Amz-Signature=abcdef012&part=1",
            f"https://host/f.txt?X-Amz-Signature={HIDDEN}&part=1",
        ),
        ("https://h/f?sv=2022-11-02&sig=a%2Bb", f"https://h/f?sv={HIDDEN}&sig={HIDDEN}"),
        ("read with token=abcdefgh12345 twice", f"read with token={HIDDEN} twice"),
        ("WANDB_API_KEY=0123456789abcdef", f"WANDB_API_KEY={HIDDEN}"),
        ("data/hf_" + "a1B2" * 8 + "/x", f"data/{HIDDEN}/x"),
        ("ghp_" + "a1B2" * 9, HIDDEN),
        ("AKIA" + "ABCD1234" * 2, HIDDEN),
    ],
)
def test_secrets_in_texts_are_left_out(text, shown):
    assert redact(text, {}) == shown


@pytest.mark.parametrize(
    "text",
    [
        "tokens/s/device 12,345",
        "8,192 tokens per step, tokenizer=bpe:2048",
        "step 12: loss 2.5, first in the gradient of 'layers/attention/key/kernel'",
        "s3://bucket/corpus?part=3",
        "user@host:/data",
        "the key of a mapping: value",
        "vocab_size=256: what the tokenizer has",
        "runs/2026-11-21-key-lookup",
    ],
)
def test_ordinary_texts_stay_as_they_are(text):
    assert redact(text, {}) == text


def test_values_of_secret_variables_are_left_out_wherever_they_stand():
    environment = {"WANDB_API_KEY": SECRET, "HF_TOKEN": "short", "HOME": "/home/mary-anne"}
    value = {"path": f"/data/{SECRET}/x", "list": [SECRET, 5, ("short", "/home/mary-anne")]}
    assert redact(value, environment) == {
        "path": f"/data/{HIDDEN}/x",
        "list": [HIDDEN, 5, ("short", "/home/mary-anne")],
    }


def test_the_working_folder_of_a_shell_is_no_secret():
    """Every shell sets PWD; a path below it once came out as [hidden] in the files of a run."""
    environment = {"PWD": "/home/mary-anne/work", "DB_PWD": SECRET}
    text = f"/home/mary-anne/work/model {SECRET}"
    assert redact(text, environment) == f"/home/mary-anne/work/model {HIDDEN}"


def test_paths_that_exist_are_no_secrets(tmp_path):
    environment = {"CLOUD_CREDENTIALS": str(tmp_path), "MY_TOKEN": SECRET}
    below = tmp_path / f"token={SECRET}"
    assert redact(f"read {tmp_path}/model, {SECRET}", environment) == (
        f"read {tmp_path}/model, {HIDDEN}"
    )
    assert SECRET not in redact({"path": str(below)}, environment)["path"]
    below.mkdir()
    assert redact({"path": str(below)}, environment) == {"path": str(below)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in ("WANDB_API_KEY", "HF_TOKEN", "password", "aws_secret")),
        *((name, True) for name in ("AWS_SECRET_ACCESS_KEY", "auth_token", "client.secret")),
        *((name, False) for name in ("tokenizer", "tokens_per_step", "max_tokens", "monkey")),
        *((name, False) for name in ("key", "num_kv_heads", "keep", "JAX_PLATFORMS", "pass")),
    ],
)
def test_names_that_are_secret(name, is_secret):
    assert is_secret_name(name) == is_secret


def test_a_setting_with_a_secret_name_is_hidden_and_others_are_not():
    settings = {"password": "x", "tokens": "y", "inner": {"api_key": "z", "seed": 0}}
    shown = {"password": HIDDEN, "tokens": "y", "inner": {"api_key": HIDDEN, "seed": 0}}
    assert redact(settings, {}) == shown


# --- what a run writes ----------------------------------------------------------------------------


def files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def tiny_run(folder, text="corpus.txt"):
    """Two steps on a text of this name."""
    corpus = folder.parent / text
    corpus.write_text("To be, or not to be, that is the question. " * 100)
    config = RunConfig(
        model=ModelConfig(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16),
        data=DataConfig(path=str(corpus), seq_len=16),
        log=LogConfig(every=1, console="lines"),
        global_batch_size=8,
        steps=2,
        eval_batches=1,
        run_dir=str(folder),
    )
    return run_from_config(config)


@pytest.mark.thorough
def test_files_of_a_run_hold_a_secret_only_in_paths_that_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    folder = tmp_path / "run"
    tiny_run(folder, text=f"{SECRET}.txt").close()
    write_report(folder)
    found = {path.name for path in files_below(folder) if SECRET.encode() in path.read_bytes()}
    assert found == {"run.json", "config.json", "metadata.json", "report.html"}
    assert SECRET not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_on_relative_paths_is_read_back(tmp_path, monkeypatch):
    """Variables that name the working folder, or the text itself, once hid the path in run.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_corpus.txt").write_text("To be, or not to be, that is the question. " * 100)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("MY_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("DATA_TOKEN", "my_corpus.txt")
    overrides = ["data.path=my_corpus.txt", "run_dir=runs/mine", "steps=1", "global_batch_size=8"]
    sizes = ["model.num_layers=1", "model.num_heads=2", "model.embed_dim=16", "data.seq_len=16"]
    assert main(["train", *overrides, *sizes, "eval_batches=1", "log.console=quiet"]) == 0
    record = json.loads((tmp_path / "runs/mine/run.json").read_text())
    assert record["data"]["path"] == str(tmp_path / "my_corpus.txt")
    assert main(["eval", "runs/mine"]) == 0
    assert main(["generate", "runs/mine", "To be", "--tokens", "2"]) == 0


def test_plan_and_terminal_show_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    screen = io.StringIO()
    log = RunLog(tmp_path, LogConfig(tensorboard=False), total_steps=1, stream=screen)
    address = f"https://mary:{SECRET}@host/corpus.txt"
    log.start(
        f"plan of {address}",
        [f"data: {address}"],
        f"table {SECRET}",
        {"rules": [address]},
        {"data": {"path": address}},
    )
    log.write(1, {"loss": 2.0})
    log.close()
    write_report(tmp_path)
    assert SECRET not in screen.getvalue()
    assert "host/corpus.txt" in screen.getvalue()
    for path in files_below(tmp_path):
        assert SECRET.encode() not in path.read_bytes(), path
        assert b"mary" not in path.read_bytes(), path


def test_the_report_of_an_older_run_shows_none_either(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","step":1,"loss":2.0,"seconds":1}\n')
    (tmp_path / "plan.txt").write_text(f"a plan\ns3://mary:{SECRET}@bucket\n")
    (tmp_path / "config.json").write_text(json.dumps({"path": f"s3://mary:{SECRET}@bucket"}))
    assert SECRET not in write_report(tmp_path).read_text()


@pytest.mark.parametrize("words", [["env"], ["env", "--json"]])
def test_zerojax_env_shows_none(words, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to=/t/{SECRET}")
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert SECRET not in printed
    assert f"--xla_dump_to=/t/{HIDDEN}" in printed


# --- who may write --------------------------------------------------------------------------------


@pytest.fixture
def umask():
    """Sets the umask; it comes back."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def modes_below(folder):
    return {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


@pytest.mark.thorough
@pytest.mark.parametrize(("mask", "never"), [(0o000, 0o002), (0o022, 0o022), (0o077, 0o077)])
def test_a_run_respects_the_umask_and_is_never_open_to_everybody(tmp_path, umask, mask, never):
    umask(mask)
    folder = tmp_path / "run"
    tiny_run(folder).close()
    modes = modes_below(folder)
    assert len(modes) > 8
    assert not {path: oct(mode) for path, mode in modes.items() if mode & never}
    assert os.umask(mask) == mask, "the process has its umask back"


def test_the_umask_comes_back_after_an_error(umask):
    umask(0o000)
    with pytest.raises(KeyError), not_for_everybody():
        raise KeyError
    assert umask(0o022) == 0


def test_a_folder_that_everybody_may_write_is_said(tmp_path):
    assert open_to_everybody(tmp_path) is None
    assert open_to_everybody(tmp_path / "missing") is None
    tmp_path.chmod(0o777)
    assert open_to_everybody(tmp_path) == (
        f"warning: every user of this machine may write into '{tmp_path}' (0777), where "
        f"checkpoints and settings are read back; chmod o-w '{tmp_path}'"
    )
    tmp_path.chmod(0o1777)
    assert open_to_everybody(tmp_path) is None, "as /tmp is: others cannot touch what is there"
