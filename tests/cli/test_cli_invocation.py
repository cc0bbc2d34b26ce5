"""The commands that a run suggests can be typed as they stand."""

import sys

import pytest

from zerojax.cli.arguments import command_name


@pytest.fixture
def environment(tmp_path, monkeypatch):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "zerojax"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_bare_name_where_the_shell_finds_this_installation(environment, monkeypatch):
    monkeypatch.setenv("PATH", str(environment))
    assert command_name() == "zerojax"


def test_the_path_where_it_is_not_on_path_or_another_one_is(environment, tmp_path, monkeypatch):
    assert command_name() == ".venv/bin/zerojax"
    other = tmp_path / "other"
    other.mkdir()
    (other / "zerojax").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other))
    assert command_name() == ".venv/bin/zerojax"


def test_the_module_where_nothing_is_installed(environment):
    (environment / "zerojax").unlink()
    assert command_name() == ".venv/bin/python -m zerojax"
