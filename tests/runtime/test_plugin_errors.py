"""What JAX says about a CUDA plugin is hidden where there is no GPU, and only there."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from zerojax.cli import main
from zerojax.runtime import plugin_errors

JAX = logging.getLogger("jax._src.xla_bridge")
"""JAX logs there when it discovers its plugins."""


def fail_as_jax_does() -> None:
    try:
        raise RuntimeError("cuDNN not found.\nsecond line")
    except RuntimeError:
        JAX.exception("Jax plugin configuration error: Exception when calling %s()", "a.plugin")


@pytest.fixture
def hidden(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(plugin_errors, "_hidden", lines)
    plugin_errors.hide_plugin_errors()
    return lines


def test_without_a_gpu_the_error_is_hidden_and_env_says_so(hidden, caplog, monkeypatch, capsys):
    monkeypatch.setattr(plugin_errors, "visible_gpus", lambda environment: 0)
    fail_as_jax_does()
    JAX.warning("another message")
    assert [record.message for record in caplog.records] == ["another message"]
    assert len(hidden) == 1
    assert "a.plugin" in hidden[0]
    assert "cuDNN not found." in hidden[0]
    assert main(["env"]) == 0
    assert hidden[0] in capsys.readouterr().out


def test_with_a_gpu_the_error_is_shown(hidden, caplog, monkeypatch):
    monkeypatch.setattr(plugin_errors, "visible_gpus", lambda environment: 1)
    fail_as_jax_does()
    assert "cuDNN not found." in caplog.text
    assert hidden == []


def test_jax_platforms_cpu_does_not_make_a_gpu_invisible(hidden, caplog, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    seen = []
    monkeypatch.setattr(plugin_errors, "visible_gpus", lambda found: seen.append(found) or 1)
    fail_as_jax_does()
    assert "JAX_PLATFORMS" not in seen[0]
    assert "cuDNN not found." in caplog.text


def test_a_script_that_uses_jax_first_has_imported_zerojax():
    code = f"import zerojax, logging; print(len(logging.getLogger({JAX.name!r}).filters))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1"]
