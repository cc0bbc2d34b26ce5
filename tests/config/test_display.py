"""Names of parameters, files and settings cannot move a terminal's cursor or forge a line."""

from __future__ import annotations

import ast
import html
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.cli import main
from zerojax.config import LogConfig
from zerojax.config.display import as_html, show
from zerojax.training.metrics import RunLog
from zerojax.training.metrics.console import LineDisplay

ROOT = Path(__file__).resolve().parents[2]
NAME = "</script>\x1b[2J\x9b31m\u202eRED\nstep 9 of 9"
HARMLESS = r"</script>\x1b[2J\x9b31m\u202eRED"
FORBIDDEN = set("\x1b\x9b\u202e\r\x07")


def bare_prints(source: str) -> list[int]:
    """Lines that print something else than a text written there."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "print"
        and not all(isinstance(value, ast.Constant) for value in call.args)
    ]


@pytest.mark.parametrize("folder", ["cli", "metrics"])
def test_commands_and_logs_print_through_one_function(folder):
    for path in sorted((ROOT / "zerojax" / folder).glob("*.py")):
        assert bare_prints(path.read_text(encoding="utf-8")) == [], path.name
    assert bare_prints("print('a', file=f)\nprint(f'{a}')\nprint(a)") == [2, 3]


def test_the_page_of_a_plan_has_one_line_for_each_name():
    def init(key):
        return {NAME: {"w": jax.random.normal(key, (13, 3))}, "b": jnp.zeros(3)}

    plan = zerojax.make_plan(
        (init, lambda params, x: x @ params[NAME]["w"] + params["b"][None]),
        {"zero": 1},
        example_batch={"x": np.ones((8, 13), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optax.sgd(1e-3),
        precision="fp32",
    )
    page = plan.table()
    assert not FORBIDDEN & set(page)
    assert [line for line in page.splitlines() if line.startswith(HARMLESS)]
    assert not [line for line in page.splitlines() if line.startswith("step 9")]
    names = [leaf["name"] for leaf in plan.as_dict()["parameters"]]
    assert f"{NAME}/w" in json.loads(json.dumps(names)), "JSON holds names as they are"


def test_a_run_log_writes_no_control_characters(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path, LogConfig(tensorboard=False), total_steps=1, stream=stream)
    log.start(f"plan of {NAME}", [f"since {NAME}"], f"a table\n  {NAME}", {}, {"path": NAME})
    log.message(f"a word on {NAME}")
    log.end(1, {})
    log.close()
    for text in ((tmp_path / "plan.txt").read_text(), stream.getvalue()):
        assert HARMLESS in text
        assert not FORBIDDEN & set(text)
    assert json.loads((tmp_path / "config.json").read_text()) == {"path": NAME}


def test_lines_commands_and_pages_of_html(capsys):
    stream = io.StringIO()
    LineDisplay(stream, total_steps=1).message(NAME)
    show("about", NAME, 1, end="|", file=stream)
    assert stream.getvalue().startswith(HARMLESS)
    assert stream.getvalue().endswith(f"about {HARMLESS}\nstep 9 of 9 1|")
    assert as_html(NAME) == html.escape(HARMLESS) + "\nstep 9 of 9"
    assert main(["train", f"{NAME}.yaml"]) == 2
    error = capsys.readouterr().err
    assert HARMLESS in error
    assert not FORBIDDEN & set(error)
