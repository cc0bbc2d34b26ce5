"""A run from `zerojax train` to `zerojax report`, with a model small enough for every test run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import zerojax
from tests.support.refusals import complaint
from zerojax.checkpoint.retention import keep_step
from zerojax.cli import main
from zerojax.config.display import printable
from zerojax.data import ByteTokenizer, save_tokenizer
from zerojax.training import loading

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "num_layers=1",
    "num_heads=2",
    "embed_dim=32",
    "max_seq_len=48",
    "seq_len=32",
    "global_batch_size=8",
    "precision=fp32",
    "eval_batches=2",
    "log.every=2",
)


def train(run_dir: Path, *words: str) -> int:
    return main(["train", *TINY, f"run_dir={run_dir}", *words])


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of four steps at zero=3, and what it printed."""

    folder: Path
    printed: str


def trained(folder: Path, *words: str) -> str:
    """What the command printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train(folder, *words, "schedule=constant", "warmup_steps=0") == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return Finished(folder, trained(folder, "steps=4", "zero=3"))


@pytest.fixture
def run(finished) -> Path:
    return finished.folder


@pytest.fixture(scope="module")
def continued(finished, tmp_path_factory) -> Finished:
    """A copy of it that the same command continued to six steps, at another stage."""
    folder = tmp_path_factory.mktemp("runs") / "continued"
    shutil.copytree(finished.folder, folder)
    return Finished(folder, trained(folder, "steps=6", "zero=2"))


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_train_leaves_a_complete_run_folder(run):
    names = {path.name.split(".tfevents")[0] for path in run.iterdir()}
    assert names >= {
        "config.json",
        "plan.txt",
        "plan.json",
        "metrics.jsonl",
        "tokenizer.json",
        "checkpoints",
        "events.out",
    }
    assert json.loads((run / "config.json").read_text())["mesh"]["zero"] == 3


def test_train_ends_with_a_sample_and_the_next_commands(finished):
    assert "What the model writes after 4 steps:" in finished.printed
    assert re.search(r"loss .* from \d\.\d+ \(step 1\) to \d\.\d+ \(step 4\)", finished.printed)
    for command in ("generate", "eval", "report"):
        assert f"zerojax {command} {finished.folder}" in finished.printed


@pytest.mark.thorough  # quick: test_trainer.py, test_a_resumed_run_...
def test_the_same_command_continues_a_run(finished, continued):
    assert "resuming after step 4 of 6" in continued.printed
    rows = [row for row in rows_of(continued.folder) if row["kind"] == "train"]
    assert rows[-1]["step"] == 6
    assert "resuming" not in finished.printed


@pytest.mark.thorough
def test_generate_continues_the_prompt(run, capsys):
    words = ["generate", str(run), "To be", "--tokens", "9", "--seed", "3"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("To be")
    assert main(words) == 0
    assert capsys.readouterr().out == out, "the same seed gives the same text"


@pytest.mark.thorough
def test_generate_continues_the_prompts_of_a_file(run, tmp_path, capsys):
    prompts = ["To be, or", "ROMEO:", "the"]
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("\n\n".join(prompts) + "\n")
    objects.write_text("".join(json.dumps({"prompt": each, "id": 1}) + "\n" for each in prompts))
    options = ["--tokens", "7", "--seed", "2", "--top-p", "0.9", "--repetition-penalty", "1.1"]
    words = ["generate", str(run), "--prompts"]
    assert main([*words, str(objects), "--format", "jsonl", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    assert [row["num_tokens"] for row in rows] == [7, 7, 7]
    assert not any(row["has_ended"] for row in rows)
    assert main([*words, str(lines), "mesh.data=4", "--batch-size", "2", *options]) == 0
    texts = [row["prompt"] + row["continuation"] for row in rows]
    assert capsys.readouterr().out == printable("\n\n".join(texts), is_page=True) + "\n"
    end = next(ord(each) for each in rows[0]["continuation"] if each.isascii())
    chosen = [*options, "--format", "jsonl", "--end-tokens", f"{end},3"]
    assert main([*words, str(objects), *chosen]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["has_ended"]
    assert 1 <= first["num_tokens"] <= 7
    assert rows[0]["continuation"].startswith(first["continuation"])


@pytest.mark.thorough
def test_the_prompt_may_follow_the_options(run, capsys):
    assert main(["generate", str(run), "--tokens", "3", "To be", "mesh.data=4"]) == 0
    assert capsys.readouterr().out.startswith("To be")


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate", "RUN", ""], "the prompt is empty"),
        (["generate", "RUN", "x" * 60], "shorten it to at most 47 tokens"),
        (["generate", "RUN", "abc", "--tokens", "60"], "max_seq_len=48"),
        (["generate", "RUN", "abc", "--end-tokens", "999"], "end_tokens=999"),
        (["generate", "RUN"], "--prompts FILE"),
        (["generate", "RUN", "abc", "--prompts", "RUN/plan.txt"], "use one"),
        (["generate", "RUN", "--prompts", "no/such/file"], "no/such/file"),
        (["generate", "RUN", "--prompts", "RUN/metrics.jsonl"], 'no "prompt" string'),
        (["generate", "no/such/run", "abc"], "no/such/run holds no run"),
        (["report", "no/such/run"], "no/such/run"),
        (["data", "prepare", "no/such/text", "OUT"], "no/such/text"),
        (["data", "prepare", "RUN/plan.txt", "OUT", "--tokenizer", "words"], "words"),
        (["train", *TINY, "global_batch_size=12", "steps=2"], "use 8 or 16"),
        (["train", *TINY, "mesh.data=3", "steps=2"], "found 8"),
        (["train", *TINY, "data.path=no/such/text", "steps=2"], "no/such/text"),
        (["train", *TINY, "vocab_size=64", "steps=2"], "64"),
        (["train", *TINY, "embed_dim=64", "steps=8", "run_dir=RUN"], "another model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, part, run, tmp_path, monkeypatch, capsys):
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in words]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("zerojax: error: ")
    assert len(err.splitlines()) == 1
    assert part in err


@pytest.mark.parametrize(
    ("words", "value", "remedy"),
    [
        (["--tokens", "999999999999"], "num_tokens 48", "47"),
        (["--tokens", "-3"], "num_tokens=-3", "1"),
        (["--batch-size", "0"], "batch_size=0", "1"),
        (["--seed", "9" * 30], "seed 64", str(2**63 - 1)),
        (["--top-k", "300"], "top_k=300 256", "None"),
        (["--top-k", "-1"], "top_k=-1", "1"),
        (["--top-p", "nan"], "top_p=nan", "1"),
        (["--temperature", "nan"], "temperature=nan", "0"),
        (["--temperature", "inf"], "temperature=inf", "0"),
        (["--temperature", "-1"], "temperature=-1.0", "0"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0", "1.0"),
        (["--end-tokens", "999"], "end_tokens=999 256", "255"),
        (["--tokens", "46"], "num_tokens=46 48", "num_tokens=45"),
        (["x" * 48], "prompt 48", "47"),
    ],
)
def test_bad_arguments_of_generate_are_refused_before_the_run_is_read(
    words, value, remedy, tmp_path, monkeypatch, capsys
):
    """What run.json says of the model is enough; all but the prompts need no JAX either."""
    sizes = {"vocab_size": 256, "max_seq_len": 48}
    (tmp_path / "run.json").write_text(json.dumps({"sizes": sizes, "platform": "cpu"}))
    save_tokenizer(ByteTokenizer(), tmp_path / "tokenizer.json")
    monkeypatch.setattr(loading, "load_run", lambda *args, **options: pytest.fail("was read"))
    prompt = [] if len(words) == 1 else ["abc"]
    complaint(capsys, ["generate", str(tmp_path), *prompt, *words], value, remedy)


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file" / "run", "steps=1") != 0
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert f"cannot create the run folder '{tmp_path / 'file' / 'run'}'" in err
    assert "choose another folder with run_dir=" in err


def test_eval_agrees_with_the_validation_loss_of_training(run, capsys):
    assert main(["eval", str(run), "--batches", "2"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("step 4: loss ")
    loss = float(line.split()[3].rstrip(","))
    measured = [row["loss"] for row in rows_of(run) if row["kind"] == "eval"]
    assert loss == pytest.approx(measured[-1], abs=1e-4)  # four digits are printed


def test_eval_reads_a_text_of_ones_own_whole(run, tmp_path, capsys):
    text = tmp_path / "held.txt"
    text.write_text("To be, or not to be, that is the question. " * 40)  # 1720 bytes
    assert main(["eval", str(run), "--data", str(text)]) == 0
    line = capsys.readouterr().out
    loaded = zerojax.load_run(run)
    seq_len, ids = loaded.record.data.seq_len, np.frombuffer(text.read_bytes(), np.uint8)
    [found] = re.findall(r"over ([\d,]+) tokens of", line)
    count = int(found.replace(",", "")) // seq_len
    assert 45 < count <= (len(ids) - 1) // seq_len == 53
    tokens = ids[: count * seq_len].reshape(count, seq_len).astype(np.int32)
    targets = ids[1 : count * seq_len + 1].reshape(count, seq_len).astype(np.int32)
    measured = loaded.evaluate([{"tokens": tokens, "targets": targets}])["loss"]
    assert float(line.split()[3].rstrip(",")) == pytest.approx(measured, abs=1e-4)


@pytest.mark.thorough
def test_a_kept_step_is_evaluated_and_exported_by_its_name(continued, tmp_path, capsys):
    run = continued.folder
    assert main(["eval", str(run), "--step", "best"]) == 2
    assert "no step is kept as 'best'" in capsys.readouterr().err
    keep_step(run / "checkpoints", "best", 4, {"loss": 1.0})
    assert main(["eval", str(run), "--batches", "1", "--step", "best"]) == 0
    assert capsys.readouterr().out.startswith("step 4: loss ")
    assert main(["checkpoint", "export", str(run), "best", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("step 4: ")
    to = tmp_path / "for_transformers"
    zerojax.to_hugging_face(run, to, step="best")
    assert (to / "config.json").is_file()
    assert main(["generate", str(run), "abc", "--step", "5"]) == 2
    assert "has no step 5; the saved steps are: 4, 6" in capsys.readouterr().err


def test_report_is_one_page_without_a_network(run, capsys):
    assert main(["report", str(run)]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page


@pytest.mark.slow
def test_prepared_tokens_train_and_generate(tmp_path, capsys):
    text, tokens = tmp_path / "text.txt", tmp_path / "tokens"
    text.write_text("the cat sat on the mat, and the dog on the log. " * 200)
    words = ["data", "prepare", str(text), str(tokens), "--tokenizer", "bpe:300"]
    assert main([*words, "--validation-fraction", "0.2"]) == 0
    assert f"data.path={tokens}" in capsys.readouterr().out
    assert train(tmp_path / "run", "steps=2", f"data.path={tokens}", "global_batch_size=8") == 0
    loaded = zerojax.load_run(tmp_path / "run")
    assert loaded.config.model.vocab_size == loaded.tokenizer.vocab_size <= 300
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "run"), "the cat"]) == 0
    assert capsys.readouterr().out.startswith("the cat")


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    words = [
        "train",
        *TINY,
        "steps=100000",
        "cpu_devices=2",
        "log.every=1",
        f"run_dir={tmp_path}/r",
    ]
    command = [sys.executable, "-u", "-m", "zerojax", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    assert process.stdout is not None
    for line in process.stdout:
        assert time.monotonic() < deadline
        if line.startswith("step") and "tokens/s" in line:
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert f"saved in {tmp_path}/r/checkpoints" in err
    assert f"zerojax {shlex.join(words)}" in err.split("to go on: ")[1]
    assert zerojax.load_run(tmp_path / "r").step > 0
