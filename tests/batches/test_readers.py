"""A file that is not what it should be ends in one sentence with its name, and no link is followed.

The neighbours: tests/config/test_bounded_json.py (JSON), tests/config/test_input_limits.py
(configurations),
tests/zoo/test_safetensors_files.py and tests/checkpoint/test_checkpoint_damage.py.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import io
import json
import os
import re
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerojax
from tests.support.syntax_trees import nodes_of
from zerojax.cli import main
from zerojax.cli.complaints import explain
from zerojax.config import ConfigError, LogConfig, RunConfig, load
from zerojax.config.display import MAX_MESSAGE
from zerojax.data import as_source
from zerojax.data.preparation import prepare
from zerojax.data.tokenizer import load_tokenizer
from zerojax.runtime.user_files import open_appending, replace_text, replacing
from zerojax.schedules.known_schedules import read_csv
from zerojax.training.loading import load_run
from zerojax.training.metrics import RunLog, write_report
from zerojax.training.metrics.metric_files import read_metrics
from zerojax.training.run_record import check_record, read_record
from zerojax.zoo.hugging_face import config_from_hugging_face

ROOT = Path(__file__).resolve().parents[2]


def refused(call: Callable[[], Any], words: str) -> str:
    """The sentence with which a call ends, which the command line shows with exit code 2."""
    with pytest.raises(Exception, match=words) as caught:
        call()
    sentence, is_bad_input = explain(caught.value)
    assert is_bad_input, caught.value
    assert sentence is not None
    assert len(sentence) < MAX_MESSAGE
    return sentence


# --- writing --------------------------------------------------------------------------------------


class TestReplacing:
    def test_a_reader_sees_the_old_text_until_the_new_one_is_whole(self, tmp_path):
        file = tmp_path / "a"
        file.write_text("old")

        def fail() -> None:
            with replacing(file) as stream:
                stream.write(b"half of the n")
                assert file.read_text() == "old"
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        replace_text(file, "né")
        assert file.read_bytes() == "né".encode()
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_the_umask_decides_who_may_read(self, tmp_path):
        before = os.umask(0o027)
        try:
            replace_text(tmp_path / "a", "")
            replace_text(tmp_path / "b", "", mode=0o600, durable=True)
        finally:
            os.umask(before)
        modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"]
        assert modes == [0o640, 0o600]

    @pytest.mark.parametrize("write", [lambda path: replace_text(path, "x"), open_appending])
    def test_only_regular_files_are_written(self, write, tmp_path):
        os.mkfifo(tmp_path / "a named pipe")
        (tmp_path / "a folder").mkdir()
        (tmp_path / "a device").symlink_to("/dev/null")
        for name in ("a named pipe", "a folder", "a device"):
            refused(lambda name=name: write(tmp_path / name), "not a regular file")
        assert len(list(tmp_path.iterdir())) == 3

    def test_a_failure_names_the_file_that_was_asked_for(self, tmp_path):
        with pytest.raises(OSError, match="No such file") as caught:
            replace_text(tmp_path / "gone" / "a", "x")
        assert caught.value.filename == str(tmp_path / "gone" / "a")

    def test_appending_goes_on_behind_what_is_there(self, tmp_path):
        for text in (b"1", b"2"):
            with open_appending(tmp_path / "a") as file:
                file.write(text)
        assert (tmp_path / "a").read_bytes() == b"12"


def a_log(folder: Path) -> None:
    with RunLog(folder, LogConfig(), total_steps=1, stream=io.StringIO()) as log:
        log.start("plan", [], "table", {}, {})


def a_corpus(folder: Path) -> None:
    text = folder.with_name("text.txt")
    text.write_text("some words " * 20)
    prepare(text, folder)


def a_picture(folder: Path) -> None:
    words = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
    assert main([*words, "--svg", str(folder / "a.svg"), "--csv", str(folder / "a.csv")]) == 0


def a_report(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(METRICS)
    write_report(folder)


WRITERS = {
    "a report": (a_report, ("report.html", "report.html.part")),
    "settings": (a_log, ("plan.txt", "plan.json", "config.json")),
    "tokens": (a_corpus, ("tokens.partial", "train.json", "train.partial", "tokenizer.json")),
    "a picture": (a_picture, ("a.svg", "a.csv")),
}


@pytest.mark.parametrize("case", WRITERS)
def test_a_link_in_the_place_of_a_file_is_not_written_through(case, tmp_path):
    write, names = WRITERS[case]
    folder, mine = tmp_path / "folder", tmp_path / "mine"
    folder.mkdir()
    mine.write_text("precious")
    for name in names:
        (folder / name).symlink_to(mine)
    with contextlib.suppress(ValueError):  # a folder whose files would be replaced may be refused
        write(folder)
    assert mine.read_text() == "precious"


def test_metrics_are_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "mine")
    refused(lambda: a_log(tmp_path), r"metrics\.jsonl is a symbolic link")
    assert (tmp_path / "mine").read_text() == "precious"


INTO_NEW_FOLDERS = {
    "checkpoint/export.py",
    "checkpoint/folders.py",
    "checkpoint/metadata.py",
    "checkpoint/packs.py",
    "cli/script_process.py",
    "zoo/hugging_face/peft.py",
    "zoo/hugging_face/safetensors.py",
    "equality/__init__.py",
    "equality/child.py",
    "equality/deepspeed_compare.py",
    "equality/deepspeed_reference.py",
    "training/hugging_face_export.py",
    "training/resume_check.py",
    "training/resumed_steps.py",
}
"""They fill a folder that they have made themselves, under a name that nobody had."""
ELSEWHERE = {
    "cli/__init__.py": "to /dev/null",
    "data/preparation.py": "the tail of tokens, where no token file is",
}


def opens_for_writing(node: ast.AST) -> bool:
    """Whether a call writes a file that may be there, or be a link."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in ("write_text", "write_bytes"):
        return True
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    words = [str(value.value) for value in values if isinstance(value, ast.Constant)]
    return name == "open" and any(re.fullmatch("[wa][bt+]*", word) for word in words)


def test_every_other_writer_replaces_a_file_as_a_whole():
    package = ROOT / "zerojax"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"open\(|write_(text|bytes)", path.read_text("utf-8"))
        and any(map(opens_for_writing, nodes_of(path)))
    }
    assert found == INTO_NEW_FOLDERS | set(ELSEWHERE)


# --- pipes, devices, sockets, folders -------------------------------------------------------------

A_RUN = {"kind": "start", "step": 0, "time": 1.0}, {"kind": "train", "step": 1, "loss": 2.0}
METRICS = "".join(json.dumps(record) + "\n" for record in A_RUN)


def source_of(path: Path | str, **options: Any) -> Any:
    return as_source(path, **{"seq_len": 8, "global_batch_size": 2, **options})


def report_of(path: Path) -> Any:
    if path.name != "metrics.jsonl":
        (path.parent / "metrics.jsonl").write_text(METRICS)
    return write_report(path.parent)


def tokens_beside(path: Path) -> Any:
    path.with_suffix(".bin").write_bytes(bytes(100))
    return source_of(path.with_suffix(".bin"))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run file": ("a.yaml", lambda path: load(RunConfig, path)),
    "schedule": ("a.csv", read_csv),
    "card": ("a.yaml", lambda path: zerojax.hardware.gpus.find_gpu(str(path))),
    "text": ("a.txt", source_of),
    "lines": ("a.jsonl", source_of),
    "tokens": ("a.bin", source_of),
    "array": ("a.npy", source_of),
    "sidecar": ("a.json", tokens_beside),
    "tokenizer": ("a.json", load_tokenizer),
    "sizes": ("config.json", config_from_hugging_face),
    "record": ("run.json", lambda path: load_run(path.parent)),
    "metrics": ("metrics.jsonl", lambda path: read_metrics(path.parent)),
    "plan of a run": ("plan.json", report_of),
    "words of a plan": ("plan.txt", report_of),
    "settings of a run": ("config.json", report_of),
}


@pytest.mark.sampled(8)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a named pipe", "a socket"])
@pytest.mark.parametrize("case", READERS)
def test_a_reader_does_not_wait_for_what_is_no_file(case, kind, tmp_path, monkeypatch):
    name, read = READERS[case]
    path = tmp_path / name
    if kind == "a named pipe":
        os.mkfifo(path)
        refused(lambda: read(path), f"{re.escape(name)}.* is {kind}, not a regular file")
        return
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        listening.bind(name)
        refused(lambda: read(path), f"{re.escape(name)}.* is {kind}, not a regular file")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_no_text(path):
    refused(lambda: source_of(path), "is a device, not a regular file")


def test_a_configuration_may_come_through_a_pipe_of_the_shell():
    reader, writer = os.pipe()
    os.write(writer, b"steps: 7")
    os.close(writer)
    try:
        assert load(RunConfig, f"/dev/fd/{reader}").steps == 7
    finally:
        os.close(reader)


# --- content --------------------------------------------------------------------------------------


def npy(header: str, body: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(text)) + text + body


def shaped(shape: str, descr: str = "<i4") -> bytes:
    return npy(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}", bytes(100))


ARRAYS = {
    "empty": (b"", "not a readable .npy"),
    "a zip": (b"PK\x03\x04" + bytes(30), "not a readable .npy"),
    "nested": (npy("[" * 9000), "not a readable .npy"),
    "another version": (npy("{}", version=(9, 0)), r"\(9, 0\)"),
    "more than 64 bits": (shaped(f"({10**25},)"), f"{10**25}.*truncated"),
    "more than the file": (shaped(f"({2**62},)"), f"{2**62}.*truncated"),
    "below zero": (shaped("(-5,)"), "-5"),
    "times": (shaped("(9,)", "<m8[s]"), "timedelta64.*integers"),
    "objects": (shaped("(9,)", "|O"), "object.*integers"),
    "a scalar": (shaped("()"), r"reshape\(-1\)"),
    "no tokens": (shaped("(0,)"), "0 tokens"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays(case, tmp_path):
    content, words = ARRAYS[case]
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    assert str(path) in refused(lambda: source_of(path), words)


def test_arrays_of_all_integers_are_read(tmp_path):
    for name in ("int8", "uint16", ">i4", "int64"):
        np.save(tmp_path / "a.npy", np.arange(100).astype(name))
        train, _, _ = source_of(tmp_path / "a.npy", validation_fraction=0.0)
        assert train.batch(0)["tokens"].max() < 100


GOOD_TEXTS = {"format": "zerojax-texts", "version": 1, "dtype": "uint16", "texts": 1, "tokens": 8}
BAD_TOKENIZER = {"kind": "bpe", "json": {"model": {"type": "X"}}}
SIDECARS = {
    "ids beyond 64 bits": ("a.json", {"vocab_size": 10**30}, f"vocab_size={10**30}.*2147483647"),
    "ids beyond 32 bits": ("a.json", {"vocab_size": 2**31}, "2147483648.*2147483647"),
    "a count beyond 64 bits": ("a.json", {"count": 10**30}, f"count={10**30}"),
    "a list as a dtype": ("a.json", {"dtype": [1]}, r"dtype=\[1\].*uint16"),
    "a megabyte": ("a.json", {"dtype": "x" * 2**20}, r"xxx\.\.\..*uint16"),
    "a tokenizer of another kind": ("a.json", {"tokenizer": {"kind": ["X"]}}, r"\['X'\].*bytes"),
    "a tokenizer of no type": ("a.json", {"tokenizer": BAD_TOKENIZER}, "tokenizers"),
    "texts with a list": ("t/texts.json", {**GOOD_TEXTS, "dtype": ["x"]}, r"dtype=\['x'\]"),
    "texts as text": ("t/texts.json", {**GOOD_TEXTS, "texts": "x"}, "texts='x'"),
    "texts beyond": ("t/texts.json", {**GOOD_TEXTS, "texts": 10**30}, f"texts={10**30}"),
    "texts of more ids": ("t/texts.json", {**GOOD_TEXTS, "vocab_size": 2**31}, "2147483648"),
    "a saved dataset of numbers": ("t/state.json", {"_data_files": [1]}, "lists no files"),
    "a saved dataset of a number": ("t/state.json", {"_data_files": 5}, "lists no files"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", SIDECARS)
def test_files_beside_the_data(case, tmp_path):
    name, content, words = SIDECARS[case]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (path.parent / "dataset_info.json").write_text("{}")
    path.write_text(json.dumps({"dtype": "uint16", "sha256": {}, **content}))
    (tmp_path / "a.bin").write_bytes(bytes(100))
    data = tmp_path / "a.bin" if name == "a.json" else path.parent
    sentence = refused(lambda: source_of(data), words)
    assert str(path.with_suffix("")) in sentence


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8 at byte 10"),
        (b'{"text": 5}', "'text': 5"),
        (b"null", "None"),
        (b'{"text": ["' + b"x" * 2**20 + b'"]}', r"xxx\.\.\."),
        (b"[" * 100_000, "64 levels"),
    ],
    ids=range(6),
)
def test_lines_of_a_corpus(line, words, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    assert "a.jsonl:2" in refused(lambda: source_of(tmp_path / "a.jsonl"), words)


TOKENIZERS = {
    "a type that is none": ({"model": {"type": "X"}}, "tokenizers"),
    "no model": ({"model": None}, "tokenizers"),
    "a BPE that is none": (BAD_TOKENIZER, "tokenizers"),
    "a kind that is a list": ({"kind": [1]}, r"kind \[1\].*bytes"),
    "a kind of a megabyte": ({"kind": "X" * 2**20}, r"XXX\.\.\..*bytes"),
    "an end that is a list": ({"kind": "hugging_face", "end": [1], "json": {"model": 1}}, r"\[1\]"),
    "a list": ([1], "list"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(case, tmp_path):
    pytest.importorskip("tokenizers")
    content, words = TOKENIZERS[case]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content))
    assert str(path) in refused(lambda: load_tokenizer(path), words)


def test_the_size_of_a_trained_tokenizer():
    for size in ("9" * 5000, "9" * 25, "0"):
        refused(lambda size=size: source_of(None, tokenizer=f"bpe:{size}"), "bpe:4096")


LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**12}, f"{10**12}.*10000.*fewer"),
    "layers of two kinds": (
        {"model_type": "gemma3_text", "num_hidden_layers": 10**12},
        f"{10**12}.*10000",
    ),
    "layers as text": ({"num_hidden_layers": "x"}, "num_hidden_layers='x'.*number"),
    "half a layer": ({"num_hidden_layers": 1.5}, "1.5.*whole number"),
    "true as a number": ({"num_hidden_layers": True}, "True.*whole number"),
    "a width": ({"hidden_size": 2**31}, "2147483648.*2147483647"),
    "a vocabulary": ({"vocab_size": 10**30}, f"{10**30}.*2147483647"),
    "a head": ({"head_dim": 10**12}, f"{10**12}.*2147483647"),
    "a head as text": ({"head_dim": "x"}, "head_dim='x'"),
    "experts": (
        {"model_type": "mixtral", "num_local_experts": 10**12, "num_experts_per_tok": 2},
        f"{10**12}.*2147483647",
    ),
    "no heads": ({"num_attention_heads": 0}, "0.*at least 1"),
    "a norm": ({"rms_norm_eps": []}, r"rms_norm_eps=\[\].*number"),
    "a flag": ({"tie_word_embeddings": "x"}, "'x'.*true or false"),
    "positions": ({"rope_scaling": [1]}, r"\[1\].*object"),
    "positions inside": ({"rope_scaling": {"rope_type": ["x"]}}, r"\['x'\].*text"),
    "a type": ({"model_type": ["llama"]}, r"\['llama'\].*text"),
    "a long type": ({"model_type": "x" * 2**20}, r"xxx\.\.\..*llama"),
    "a long unknown key": ({"zz": "x" * 2**20}, r"zz='xxx.*\.\.\."),
    "an activation": ({"hidden_act": []}, r"hidden_act=\[\].*text"),
    "types of layers": ({"model_type": "qwen3", "layer_types": 5}, "layer_types=5.*list"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", SIZES)
def test_sizes_of_hugging_face(case, tmp_path):
    changes, words = SIZES[case]
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    assert "config.json" in refused(lambda: config_from_hugging_face(tmp_path), words)


def record_of_file(values: Any, where: str) -> Any:
    record = read_record(values, where)
    check_record(record, where)
    return record


RECORD: dict[str, Any] = {
    "architecture": "gpt2",
    "model_name": "GPT2",
    "sizes": {"vocab_size": 256, "max_seq_len": 8, "num_layers": 1, "num_heads": 2, "embed_dim": 4},
    "adapters": [],
    "loss": "model",
    "precision": {"param_dtype": "float32"},
    "frozen": [],
    "mesh": {},
    "platform": "cpu",
    "num_devices": 1,
    "batch": {"dict": {"tokens": {"shape": [2, 8], "dtype": "int32"}}},
    "data": None,
    "eval_batches": 8,
    "checkpoints": None,
}
ADAPTERS = {"rank": 2, "scale": 1.0, "dropout": 0.0, "names": ["x"]}
RECORDS: dict[str, tuple[Any, str]] = {
    "a list": ([1], "list"),
    "layers": ({"sizes": {**RECORD["sizes"], "num_layers": 10**12}}, f"{10**12}.*10000"),
    "a size as text": ({"sizes": {**RECORD["sizes"], "embed_dim": "x"}}, "embed_dim='x'"),
    "rows of a table": ({"sizes": {**RECORD["sizes"], "vocab_size": 2**40}}, "2147483647"),
    "a layout": ({"sizes": {**RECORD["sizes"], "attention_layout": 5}}, "got 5"),
    "sizes of a megabyte": ({"sizes": "x" * 2**20}, r"xxx\.\.\."),
    "a dtype": ({"precision": {"param_dtype": "x"}}, "param_dtype: 'x'"),
    "a batch": ({"batch": {"dict": 5}}, "batch.*5"),
    "a large batch": ({"batch": {"shape": [10**12], "dtype": "int32"}}, f"batch.*{10**12}"),
    "a mesh": ({"mesh": [1]}, r"got \[1\]"),
    "adapters": ({"adapters": [{**ADAPTERS, "rank": 10**12}]}, f"rank.*{10**12}"),
    "adapters of nothing": ({"adapters": [{**ADAPTERS, "names": []}]}, "projection"),
    "rows": ({"data": {"seq_len": -1}}, "seq_len: -1"),
    "a fraction": ({"data": {"validation_fraction": 7}}, "validation_fraction: 7"),
    "nobody's folder": ({"data": {"path": "~nobody-here/x"}}, r"\./~nobody-here"),
    "nobody's checkpoints": ({"checkpoints": "~nobody-here"}, r"\./~nobody-here"),
    "batches": ({"eval_batches": -5}, "eval_batches: -5"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", RECORDS)
def test_records_of_a_run(case):
    changes, words = RECORDS[case]
    values = {**RECORD, **changes} if isinstance(changes, dict) else changes
    assert "runs/a/run.json" in refused(lambda: record_of_file(values, "runs/a/run.json"), words)


def test_a_record_that_is_good_is_read():
    assert record_of_file(RECORD, "run.json").num_devices == 1


LINES = {
    "a step as text": ({"kind": "train", "step": "x"}, "step='x'"),
    "no step": ({"kind": "train", "step": None}, "step=None"),
    "a step below 0": ({"kind": "train", "step": -5}, "step=-5"),
    "a step beyond 64 bits": ({"kind": "train", "step": 10**30}, f"step={10**30}"),
    "a loss as text": ({"kind": "train", "step": 9, "loss": "x"}, "loss='x'.*number"),
    "a loss as a list": ({"kind": "eval", "step": 9, "loss": [1]}, r"loss=\[1\]"),
    "seconds": ({"kind": "train", "step": 9, "seconds": "x"}, "seconds='x'"),
    "a metric of one's own": ({"kind": "train", "step": 9, "mine": {}}, "mine={}"),
    "a length": ({"kind": "start", "step": 0, "total_steps": "x"}, "total_steps='x'"),
    "a source": ({"kind": "train", "step": 9, "memory_source": [1]}, r"memory_source=\[1\].*text"),
    "an event of no kind": ({"kind": "event", "step": 9, "time": 1}, "event without a name"),
    "an event as a list": ({"kind": "event", "step": 9, "event": ["failed"]}, r"\['failed'\]"),
    "a time": ({"kind": "event", "step": 9, "event": "failed", "time": "x"}, "time='x'"),
    "a long name": ({"kind": "train", "step": 9, "x" * 2**20: "y"}, r"xxx\.\.\..*='y'"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", LINES)
def test_lines_of_metrics(case, tmp_path):
    record, words = LINES[case]
    (tmp_path / "metrics.jsonl").write_text(METRICS + json.dumps(record) + "\n")
    assert "metrics.jsonl:3" in refused(lambda: write_report(tmp_path), words)


def test_metrics_that_are_half_written_or_not_finite_are_shown(tmp_path):
    odd = '{"kind": "train", "step": 2, "loss": 1e999}\n{"kind": "tr'
    (tmp_path / "metrics.jsonl").write_text(METRICS + odd)
    found = read_metrics(tmp_path)
    assert [record["loss"] for record in found.train] == [2.0, None]
    assert found.unreadable_lines == 1
    assert write_report(tmp_path).is_file()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("plan.txt", b"\xff\xfe", "UTF-8 at byte 0"),
        ("plan.json", b"[1]", "list.*object"),
        ("plan.json", b"{", "JSON at line 1"),
        ("plan.json", b'{"pipeline": [1]}', "pipeline"),
        ("plan.json", b'{"pipeline": {"table": 5}}', "pipeline"),
        ("config.json", b'"x"', "str.*object"),
        ("config.json", b'{"a": ' + b"9" * 10_000 + b"}", "10000"),
    ],
)
def test_files_of_a_report(name, content, words, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    (tmp_path / name).write_bytes(content)
    sentence = refused(lambda: write_report(tmp_path), words)
    assert str(tmp_path / name) in sentence
    assert "delete this file" in sentence


# --- numbers and words of a run file --------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("num_layers=1000000000000", 10_000),
        *((f"model.{name}={2**31}", 2**31 - 1) for name in ("vocab_size", "embed_dim", "mlp_dim")),
        ("attention_window=1e30", 2**31 - 1),
        ("seq_len=1e12", 2**31 - 1),
        ("global_batch_size=1e30", 2**31 - 1),
        ("steps=1e24", 2**31 - 1),
        ("warmup_steps=1e24", 2**31 - 1),
        ("lora.rank=1e12", 2**31 - 1),
        ("moe.num_experts=1e12", 2**31 - 1),
        ("mesh.model=1e30", 2**31 - 1),
        ("mesh.data=1e12", 2**31 - 1),
        (f"virtual_shards={2**100}", 2**16),
        ("elasticity.max_global_batch_size=1e15", 2**31 - 1),
    ],
)
def test_sizes_of_a_run_have_a_limit(override, limit):
    key, _, value = override.partition("=")
    sentence = refused(lambda: load(RunConfig, None, [override]), f"above {limit}.*smaller")
    assert key.rpartition(".")[2] in sentence
    assert str(int(float(value))) in sentence


@pytest.mark.parametrize(
    "words",
    [
        ["train", "cpu_devices=1000000"],
        ["eval", "runs/none", "cpu_devices=1000000"],
        ["check", "a.yaml", "--devices", "1000000"],
        ["check", "a.yaml", "--steps", "1000000"],
    ],
)
def test_virtual_devices_have_a_limit(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("steps: 1")
    assert main(words) == 2
    assert re.search(r"1000000 .*10(24|00).*fewer", capsys.readouterr().err)


def test_planned_devices_have_a_limit(capsys):
    assert main(["plan", "--gpu", "h100", "--devices", "2000000000"]) == 2
    assert re.search("2000000000 .*262144.*fewer", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run_dir=a\0b", "zero byte"),
        ("data.path=a\0b", "zero byte"),
        ("run_dir=~nobody-here", r"\./~nobody-here"),
        ("tokenizer=~nobody-here", r"\./~nobody-here"),
        ("offload.folder=~nobody-here", r"\./~nobody-here"),
    ],
)
def test_paths_that_no_file_has(override, words):
    refused(lambda: load(RunConfig, None, [override]), words)


def test_a_long_message_is_shown_with_its_beginning_and_its_end(capsys, monkeypatch):
    def fail(_: Any) -> int:
        raise ConfigError("x" * 10**6)

    def fail_elsewhere(_: Any) -> int:
        raise FileNotFoundError("x" * 10**6 + " remedy")

    for failing in (fail, fail_elsewhere):
        monkeypatch.setattr("zerojax.cli.run_commands.report", failing)
        assert main(["report", "runs/none"]) == 2
        assert len(capsys.readouterr().err) < MAX_MESSAGE + 100
    assert main(["report", "x" * 10**6]) == 2
    assert len(capsys.readouterr().err) < MAX_MESSAGE + 100
    with pytest.raises(SystemExit):
        main(["report", "runs/none", "--" + "y" * 10**6])
    assert len(capsys.readouterr().err) < MAX_MESSAGE + 200


def test_a_name_that_is_too_long_is_bad_input():
    error = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "x" * 10**6)
    sentence, is_bad_input = explain(error)
    assert is_bad_input
    assert sentence is not None
    assert len(sentence) < 500


@pytest.mark.thorough
def test_a_script_that_is_not_python_is_named(tmp_path, capfd):
    (tmp_path / "a.py").write_text("x = 1\nif\n")
    assert main(["check", str(tmp_path / "a.py")]) == 2
    said = capfd.readouterr().err
    assert "SyntaxError" in said
    assert "a.py:2" in said
