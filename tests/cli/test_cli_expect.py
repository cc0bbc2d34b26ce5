"""`zerojax plan` with rules and a golden file: exit codes, what is checked and refused."""

import json
import types

import pytest

from tests.cli.test_cli_plan import TINY, WORDS
from tests.support.forecast_samples import sample_forecast
from zerojax.cli import main
from zerojax.forecasting import program_rules
from zerojax.forecasting.program_rules import CheckedRule, CheckedStep, Violation
from zerojax.hardware import compile_client

BROKEN = Violation(
    rule="max_peak_gib", found="the step needs 3 GiB", limit="allowed are 2 GiB", remedy="remat"
)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")


@pytest.fixture
def checks(monkeypatch):
    """Replaces compiling and checking; the list holds the rules that were asked for."""
    asked = []

    def check_step(plan, expected, gpu, *, fast, progress):
        asked.append(expected)
        broken = expected.max_peak_gib is not None and expected.max_peak_gib < 3
        rule = CheckedRule(
            rule="max_peak_gib", value="3 GiB", limit=BROKEN.limit, violations=(BROKEN,) * broken
        )
        contents = types.SimpleNamespace()
        forecast = sample_forecast(plan, gpu)
        return CheckedStep(rules=(rule,), contents=contents, plan=plan, forecast=forecast)

    monkeypatch.setattr(program_rules, "check_step", check_step)
    monkeypatch.setattr(program_rules, "plan_record", lambda step: {})
    monkeypatch.setattr(compile_client, "missing", lambda: None)
    return asked


@pytest.mark.parametrize(("limit", "code", "word"), [("2", 4, "VIOLATED"), ("4", 0, "kept")])
def test_rules_of_a_run_file_decide_the_exit_code(limit, code, word, checks, capsys):
    assert main([*WORDS, f"expect.max_peak_gib={limit}"]) == code
    out = capsys.readouterr().out
    assert f"{word} max_peak_gib: " in out
    assert "MEMORY" in out
    assert main([*WORDS, f"expect.max_peak_gib={limit}", "--json"]) == code
    (rule,) = json.loads(capsys.readouterr().out)["expect"]
    assert (rule["rule"], len(rule["violations"])) == ("max_peak_gib", code // 4)


def test_a_file_of_rules_replaces_those_of_the_run_file(checks, tmp_path, capsys):
    path = tmp_path / "rules.yaml"
    path.write_text("max_peak_gib: 4\nno_gather: [embed]\n")
    assert main([*WORDS, "expect.max_peak_gib=2", "--expect", str(path)]) == 0
    assert checks[0].names == ("no_gather", "max_peak_gib")
    path.write_text("max_peak_gb: 4\n")
    assert main([*WORDS, "--expect", str(path)]) == 2
    assert "max_peak_gib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("differences", "code", "word"),
    [(None, 0, "was written"), ([], 0, "is that of"), (["zero: 3, was 2"], 4, "zero: 3, was 2")],
)
def test_a_golden_file_decides_the_exit_code(differences, code, word, checks, monkeypatch, capsys):
    monkeypatch.setattr(program_rules, "check_golden", lambda record, path: differences)
    assert main([*WORDS, "--golden", "plan.json"]) == code
    out = capsys.readouterr().out
    assert "plan.json" in out
    assert word in out
    assert "EXPECT" not in out


def test_without_a_compiler_nothing_is_checked_and_the_exit_code_says_so(capsys):
    assert main([*WORDS, "expect.max_peak_gib=80", "--no-compile"]) == 3
    assert "not checked" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--no-compile", "--search"])
def test_options_that_do_not_go_together(other, capsys):
    assert main([*WORDS, "--golden", "plan.json", other]) == 2
    error = capsys.readouterr().err
    assert "--golden" in error
    assert other in error


@pytest.mark.thorough
@pytest.mark.gpu_programs
def test_a_run_file_of_which_a_rule_is_violated(tmp_path, capsys):
    path, golden = tmp_path / "run.yaml", tmp_path / "plan.json"
    path.write_text("expect:\n  gradients_in: fp32\n  layer_loops: 1\n  max_peak_gib: 1\n")
    where = ["--gpu", "h100", "--devices", "8", "--golden", str(golden), "--fast"]
    looped = "unroll=false"  # on GPUs the layers would run outside of a loop
    assert main(["plan", str(path), *TINY, looped, *where, "--collectives"]) == 4
    out, _, collectives = capsys.readouterr().out.partition("COLLECTIVES")
    assert "over data, bf16" in collectives
    assert "of gradients" in collectives
    out += collectives
    assert "VIOLATED gradients_in" in out
    assert "kept layer_loops" in out
    assert f"{golden} was written" in out
    assert main(["plan", str(path), *TINY, looped, *where, "reduce_dtype=fp32", "zero=3"]) == 4
    out = capsys.readouterr().out
    assert "VIOLATED" not in out
    assert "zero: 3, was " in out
    assert "bfloat16" in out
    assert "float32" in out
