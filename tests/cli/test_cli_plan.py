"""`zerojax plan`: the plan is the run's own, what is printed, exit codes, and every mistake."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import pytest

from tests.support.forecast_samples import sample_forecast, sample_memory, sample_plan
from tests.support.marks import needs_compiler
from zerojax import forecasting
from zerojax.cli import build_parser, main, plan_command
from zerojax.cli.complaints import explain
from zerojax.cli.progress import Progress
from zerojax.config import RunConfig, load
from zerojax.forecasting.forecast_numbers import FORMULA
from zerojax.forecasting.settings_search import Candidate, SearchResult, Trial, rounds
from zerojax.hardware import compile_client
from zerojax.hardware.compile_client import CompileError
from zerojax.optim.precision import as_precision
from zerojax.plan.make import make_plan
from zerojax.training import run_file
from zerojax.training.run_file import plan_from_config, vocab_size_of

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "num_layers=2",
    "num_heads=2",
    "embed_dim=64",
    "max_seq_len=64",
    "seq_len=64",
    "global_batch_size=32",
    "vocab_size=256",
)
FEW = ("plan", *TINY, "global_batch_size=4", "--gpu", "h100", "--devices", "4")
WORDS = ("plan", *TINY, "--gpu", "h100", "--devices", "8")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")


@pytest.fixture
def forecasts(monkeypatch):
    """Replaces the compiler; the list holds (plan, options) of what was asked for."""
    asked = []

    def compile_(planned, *, gpu, progress, **options):
        asked.append((planned, options))
        return sample_forecast(planned, gpu, memory=asked_memory[0])

    asked_memory = [sample_memory()]
    monkeypatch.setattr(forecasting, "forecast", compile_)
    asked.append(asked_memory)
    return asked


def settings(*words: str) -> RunConfig:
    return load(RunConfig, None, [*TINY, *words])


# The very plan of the run


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "words",
    [
        ("zero=3", "num_microbatches=2", "remat=full"),
        ("zero=2", "mesh.model=2", "precision=fp32", "freeze=[embed]"),
        ("zero=1", "reduce_bucket_size=1000", "accumulate_dtype=bf16", "optimizer.name=lion"),
        ("zero=3", "persistence_threshold=10", "replica=2", "model.name=llama", "vocab_size=null"),
    ],
)
def test_it_plans_what_train_would_run(words, monkeypatch):
    config = settings("precision=bf16", *words)  # here are CPUs, whose default is another one
    seen = []
    monkeypatch.setattr(run_file, "open_run", lambda spec, plan: seen.append(plan))
    monkeypatch.setattr(run_file, "fit", lambda run: None)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    run_file.run_from_config(config)
    planned = plan_from_config(config, 8)
    assert planned.as_dict() == seen[0].as_dict()
    assert planned.settings == seen[0].settings
    assert jax.tree.map(lambda x: (x.shape, x.dtype), planned.abstract_batch) == jax.tree.map(
        lambda x: (x.shape, x.dtype), seen[0].abstract_batch
    )


def test_a_run_file_without_precision_has_that_of_its_devices_and_says_so(monkeypatch):
    seen = []
    monkeypatch.setattr(run_file, "open_run", lambda spec, plan: seen.append(plan))
    monkeypatch.setattr(run_file, "fit", lambda run: None)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    run_file.run_from_config(settings())
    for plan, dtype in ((seen[0], "fp32"), (plan_from_config(settings(), 8), "bf16")):
        assert plan.precision == as_precision(dtype)
        assert any(f"precision='{dtype}'" in reason for reason in plan.reasons)
        assert f"precision='{dtype}'" in plan.table()


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (("vocab_size=300", "data.path=not/here"), 300),
        (("vocab_size=null",), 256),
        (("vocab_size=null", "data.tokenizer=bpe:1000", "data.path=not/here"), 1000),
        (("vocab_size=null", "data.path=TEXT"), 256),
        (("vocab_size=null", "data.path=TOKENS"), 300),
        (("vocab_size=null", "data.path=TOKENS", "data.tokenizer=bpe:4000"), 300),
        (("vocab_size=null", "data.path=not/here", "data.tokenizer=TOKENIZER"), 256),
    ],
)
def test_the_vocabulary_without_reading_data(words, size, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.bin").write_bytes(bytes(10))
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "vocab_size": 300}')
    (tmp_path / "tokenizer.json").write_text('{"kind": "bytes"}')
    places = {"TEXT": "a.txt", "TOKENS": "a.bin", "TOKENIZER": "tokenizer.json"}
    for name, file in places.items():
        words = tuple(word.replace(f"={name}", f"={tmp_path / file}") for word in words)
    assert vocab_size_of(settings(*words)) == size


@pytest.mark.parametrize("known", ["does not exist, so it does not say", "does not say"])
def test_a_vocabulary_that_only_the_data_could_tell(known, tmp_path):
    path = tmp_path / "a.bin"
    if known == "does not say":
        path.write_bytes(bytes(10))
        (tmp_path / "a.json").write_text('{"dtype": "uint16"}')
    with pytest.raises(ValueError, match=rf"a.bin {known} .* set model.vocab_size"):
        vocab_size_of(settings("vocab_size=null", f"data.path={path}"))


def test_the_settings_of_a_candidate():
    candidate = Candidate(zero=3, model=2, num_microbatches=4, remat="dots")
    config = plan_command.with_candidate(settings("mesh.data=8"), candidate)
    assert config == settings(*candidate.words())


# What is printed


@pytest.mark.parametrize(
    ("memory", "code", "word"),
    [
        (sample_memory(), 0, "FITS"),
        (sample_memory(scale=9), 1, "DOES NOT FIT"),
        (sample_memory(compiled=False), 3, "NOT DECIDED"),
        (sample_memory(compiled=False, scale=9), 1, "DOES NOT FIT"),
    ],
)
def test_the_exit_code_is_the_verdict(memory, code, word, forecasts, capsys):
    forecasts[0][0] = memory
    assert main([*WORDS]) == code
    captured = capsys.readouterr()
    assert f"\n{word}: " in captured.out
    assert captured.err == "planning for 8 x NVIDIA H100 SXM 80 GB ...\n"


def test_words_reach_the_plan_also_behind_options(forecasts, capsys):
    assert main([*WORDS, "zero=3", "num_microbatches=2", "--fast"]) == 0
    planned, options = forecasts[1]
    assert (planned.zero, planned.num_microbatches, planned.mesh.size) == (3, 2, 8)
    assert options == {"fast": True, "why_formula": None}
    capsys.readouterr()


def test_json_is_all_there_is_with_json(forecasts, capsys):
    assert main([*WORDS, "--json"]) == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    assert values["memory"]["peak"] == sample_memory().peak
    assert values["gpu"]["name"] == "h100"
    assert captured.err == ""


def test_no_compile_prints_formulas(capsys):
    assert main([*WORDS, "--no-compile", "--json"]) == 3
    values = json.loads(capsys.readouterr().out)
    assert values["source"] == FORMULA
    assert values["why_formula"] == "--no-compile was given"
    assert values["memory"]["formula_peak"] > values["memory"]["state"] > 0
    assert values["num_devices"] == 8


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(
        compile_client, "missing", lambda: "not installed: pip install 'zerojax[plan]'"
    )
    assert main([*WORDS]) == 3
    assert "formulas only: not installed: pip install 'zerojax[plan]'" in capsys.readouterr().out
    assert main([*WORDS, "--search"]) == 1
    assert "--search compares compiled plans, but not inst" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [1, 1000])
def test_search_prints_the_table_and_the_commands(scale, forecasts, monkeypatch, capsys):
    forecasts[0][0] = sample_memory(scale=scale)
    monkeypatch.setattr(compile_client, "missing", lambda: None)
    # One layer, so that no pipelines are looked at.
    # Where nothing fits and nothing is offloaded it would look once more.
    more = [] if scale == 1 else ["opt_state={device: 0.5, host: 0.5}"]
    assert main([*FEW, "num_layers=1", *more, "--search"]) == (0 if scale == 1 else 1)
    out = capsys.readouterr().out
    assert out.startswith("SEARCH: ")
    if scale == 1:
        assert "its run:  " in out
        chosen = next(line for line in out.splitlines() if line.startswith("its plan page: "))
        again = chosen.partition(" plan ")[2].split()
        assert {"--gpu", "h100", "--devices", "4", "mesh.data=-1"} <= set(again)
        assert build_parser().parse_args(["plan", *again]).devices == 4
    else:
        assert "None of the candidates fits" in out


@pytest.mark.thorough
def test_search_as_json(forecasts, monkeypatch, capsys):
    monkeypatch.setattr(compile_client, "missing", lambda: None)
    assert main([*FEW, "--search", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["chosen"]["status"] == "chosen"
    assert values["chosen"]["candidate"]["stage"] == 1
    assert {trial["candidate"]["stage"] for trial in values["trials"]} == {1, 2}, "two layers"
    assert values["forecast"]["verdict"]["fits"] is True


@pytest.mark.thorough
def test_a_plan_with_a_pipeline_says_so(capsys):
    words = ["stage=2", "num_microbatches=4", "mesh.pipeline_schedule=gpipe"]
    assert main([*WORDS, *words, "--no-compile"]) == 3
    out = capsys.readouterr().out
    assert "mesh data 4 x stage 2" in out
    assert "pipeline gpipe, bubble 20.0% (11.1% with 8 microbatches)" in out
    assert "messages by formula" in out


@pytest.mark.thorough
def test_a_plan_with_a_curriculum_shows_its_lengths(capsys):
    words = ["curriculum.type=seqlen", "total_steps=40", "length_step=16"]
    assert main([*WORDS, *words, "--no-compile"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "rows of 16 to 64 of 64 tokens" in out
    assert "16, 32, 48, 64" in out


@pytest.mark.thorough
def test_a_plan_with_a_batch_ramp_shows_its_sizes(capsys):
    sizes = ["batch_ramp.start=16", "batch_ramp.increment=8", "batch_ramp.ramp_rows=100"]
    assert main([*WORDS, *sizes, "global_batch_size=32", "--no-compile"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "16 from step 1, 24 from step 5, 32 from step 7" in out
    assert "16 in 2, 24 in 3, 32 in 4" in out


@pytest.mark.thorough
def test_a_plan_with_offload_shows_its_tiers(capsys):
    words = ["opt_state={device: 0.5, host: 0.5}", "min_elements=100", "mesh.offload.params=host"]
    assert main([*WORDS, *words, "--gpu", "h200", "--no-compile"]) == 3
    out = capsys.readouterr().out
    section = out.partition("OFFLOAD, by formula\n")[2].partition("\n\nTIME")[0]
    assert "bytes per device" in section
    assert "host" in section.splitlines()[0]
    assert "update of the state" in section
    assert "as published for NVIDIA H200" in section
    assert "tokens per step" in section


def test_a_search_that_finds_nothing_goes_on_with_offload(monkeypatch, capsys):
    monkeypatch.setattr(compile_client, "missing", lambda: None)
    chosen = Trial(
        candidate=Candidate(zero=3, model=1, num_microbatches=1, remat="full"),
        status="chosen",
        reason="",
    )
    nothing = SearchResult(
        trials=(), chosen=None, forecast=None, certain=True, sentence="None fits.", elapsed=1.0
    )
    found = dataclasses.replace(nothing, chosen=chosen, sentence="zero=3: the cheapest.")
    seen = []

    def search(make_plan_for, candidates, gpu, **_):
        offload = make_plan_for(candidates[0]).settings.offload
        seen.append((offload.opt_state, offload.activations, offload.params))
        return found if offload.activations == "host" else nothing

    monkeypatch.setattr(rounds, "search", search)
    words = [*FEW, "num_layers=2", "model.remat=full", "--search", "--budget", "200"]
    assert main(words) == 0
    assert seen == [
        ("device", "device", "device"),
        ("host", "device", "device"),
        ("host", "host", "device"),
    ]
    out = capsys.readouterr().out
    assert "None fits. With mesh.offload.opt_state=host: None fits. With" in out
    commands = [line for line in out.splitlines() if line.startswith("its ")]
    assert len(commands) == 2
    for setting in ("opt_state=host", "activations=host"):
        assert all(f"mesh.offload.{setting}" in line for line in commands)
    seen.clear()
    monkeypatch.setattr(rounds, "search", lambda *_, **__: seen.append(1) or nothing)
    assert main([*words, "opt_state=host"]) == 1
    assert len(seen) == 1, "it was on the host already"


def test_a_machine_and_a_share_of_memory_can_be_stated(monkeypatch, capsys):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    words = ["--card", "node_devices=2", "--card", "network_gb_per_s=25", "--memory-fraction=0.9"]
    assert main([*WORDS, *words, "--no-compile", "--json"]) == 3
    values = json.loads(capsys.readouterr().out)
    assert (values["gpu"]["node_devices"], values["gpu"]["network_bandwidth"]) == (2, 25e9)
    assert values["verdict"]["limit"] == int(0.9 * values["gpu"]["memory_bytes"])
    assert any("as given" in text for text in values["gpu"]["assumptions"])


@pytest.mark.parametrize("words", [["--memory-fraction=1e-12"], ["--card", "memory_bytes=1"]])
def test_a_card_with_no_room_at_all_is_a_verdict(words, monkeypatch, capsys):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert main([*WORDS, *words, "--no-compile"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


# Mistakes


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--gpu", "h300"], "did you mean"),
        (["--devices", "many"], "invalid int value: 'many'"),
        (["--devices", "6", "mesh.model=4"], "--devices 6: mesh replica=1"),
        (["--devices", "6", "mesh.data=4"], "needs 4 devices, but found 6; use data=-1"),
        (["--devices", "5"], "not divisible by 5 data shards"),
        (["num_microbatches=8"], "use global_batch_size=64, or num_microbatches=4"),
        (["zero=7"], "is not valid; use 0, 1, 2 or 3"),
        (["--gpus", "h100"], "unrecognized arguments: --gpus"),
        (["vocab_size=null", "data.path=no/such/tokens.bin"], "set model.vocab_size"),
        (["stage=2", "mesh.pipeline_schedule=1f2b"], "did you mean '1f1b'"),
        (
            ["stage=2", "mesh.pipeline_schedule=none.csv"],
            "none.csv: No such file or directory; pass",
        ),
        (["stage=3"], "does not divide the 8 devices"),
        (["--card", "node_devices=-1"], "node_devices: -1 is not a number above 0"),
        (["--card", "node_devices=2.5"], "node_devices: expected a whole number, got 2.5"),
        (["--card", "memory_gb_per_s=.nan"], "memory_gb_per_s: nan is not a number above 0"),
        (["--card", "memory_gb_per_s=3.35e12"], "give at most 1000000"),
        (["--card", "measured={product_tflops: 990}"], "give at most 989.5"),
        (["--card", "node_devices=2", "--card", "node_devices=4"], "node_devices is there twice"),
        (["--card", "node_device=2"], "node_device: unknown key; did you mean 'node_devices'?"),
        (["--card", "node_devices"], "expected KEY=VALUE"),
        (["--memory-fraction", "1.2"], "--memory-fraction 1.2 is not above 0 and at most 1"),
        (["--memory-fraction", "nan"], "--memory-fraction nan is not above 0 and at most 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, part, capsys):
    try:
        code = main(
            [*WORDS, *words, "--no-compile"] if "--search" not in words else [*WORDS, *words]
        )
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    complaint = captured.err.splitlines()[-1]
    assert complaint.startswith("zerojax: error: ")
    assert part in complaint


@pytest.mark.parametrize("missing", ["--gpu", "--devices"])
def test_card_and_number_are_needed(missing, capsys):
    place = WORDS.index(missing)
    assert main([*WORDS[:place], *WORDS[place + 2 :]]) == 2
    assert f"required: {missing}" in capsys.readouterr().err


def test_a_failure_of_the_compiler_is_its_first_cause_and_exit_code_1(monkeypatch, capsys):
    def fail(*_, **__):
        raise CompileError("INTERNAL: no PTX compiler (install it)")

    monkeypatch.setattr(forecasting, "forecast", fail)
    assert main([*WORDS]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "zerojax: error: INTERNAL: no PTX compiler (install it)"
    )


def test_a_model_that_needs_values_is_told_which_call():
    def loss(model, batch):
        total = model(batch["tokens"]).sum()
        if total > 0:  # the call
            return total
        return -total

    plan = sample_plan()
    with pytest.raises(TypeError, match="cannot be planned without values") as caught:
        make_plan(
            plan.model.source, plan.mesh, loss=loss, example_batch=plan.abstract_batch, zero=1
        )
    sentence, is_bad_input = explain(caught.value)
    assert is_bad_input
    assert f"{__file__}:" in sentence
    assert "`if total > 0:  # the call`" in sentence
    assert "TracerBoolConversionError" in sentence


def test_mistakes_do_not_wait_for_jax():
    program = (
        "import sys; from zerojax.cli import main\n"
        "main(['plan', '--gpu', 'h300', '--devices', '8'])\n"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


@pytest.mark.thorough
def test_it_needs_no_accelerator_that_works():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cuda"}
    words = [sys.executable, "-m", "zerojax", *WORDS, "--no-compile"]
    result = subprocess.run(
        words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 3, result.stderr
    assert "NOT DECIDED" in result.stdout


@pytest.mark.slow
@needs_compiler
def test_a_compiled_page(capsys):
    assert main([*WORDS, "--fast", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["source"] == "compiled"
    assert values["compiler"].endswith(", fast options")
    memory = values["memory"]
    assert sum(role["bytes"] for role in memory["roles"]) == memory["peak"]
    assert values["traffic"]["data_wire_bytes"] == pytest.approx(
        values["traffic"]["formula_bytes"], rel=0.03
    )


# Progress


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.is_one_second_there = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if "   1 s  " in text:
            self.is_one_second_there.set()
        return written


def test_a_terminal_is_told_the_seconds(monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("zerojax.cli.progress.time", clock)
    monkeypatch.setattr("zerojax.cli.progress.INTERVAL", 0.01)
    stream = Terminal()
    with Progress(quiet=False, stream=stream) as progress:
        progress("compiling " + "x" * 200)
        now[0] = 1.0
        assert stream.is_one_second_there.wait(120)
    drawn = stream.getvalue().split("\r\x1b[K")
    assert len(drawn) >= 4
    assert drawn[-1] == "", "the line is wiped"
    assert drawn[1].startswith("   0 s  compiling")
    assert "   1 s  compiling" in stream.getvalue()
    assert max(map(len, drawn)) <= 100


def test_a_file_gets_one_line_and_quiet_none():
    for quiet, expected in ((False, "planning ...\n"), (True, "")):
        stream = io.StringIO()
        with Progress(quiet=quiet, stream=stream) as progress:
            progress("planning")
            progress("compiling")
        assert stream.getvalue() == expected
