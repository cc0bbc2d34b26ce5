"""tools/setup.sh: the Python it chooses, the pins it installs, and what it says when it cannot.

The Pythons here are scripts that answer as Python, venv and pip would; nothing is downloaded.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!{sh}
case "$*" in
  *sys.version_info*) [ "$3" = "{version}" ] ;;
  *sys.executable*) echo "$0" ;;
  *--version*) echo "Python {version}.0" ;;
  *"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
  *"import pip"*) ;;
  *"-m pip"*) echo "$@" >>"{log}"; {pip} ;;
esac
"""
TOOLS = "cat cksum cp dirname flock grep head mkdir mktemp mv rm sed sh sort tail touch tr"
NO_PACKAGE = "echo 'ERROR: No matching distribution found for hatchling==9'; exit 1"


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tools").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    for name in TOOLS.split():
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    shutil.copy(ROOT / "tools" / "setup.sh", folder / "tools")
    (folder / "pyproject.toml").write_text("")
    (folder / "constraints.txt").write_text("a==1\n")
    return folder


def add_python(project, version, pip="true", name=None):
    path = project.parent / "bin" / (name or f"python{version}")
    path.write_text(
        PYTHON.format(
            sh=shutil.which("sh"), version=version, log=project.parent / "pip.log", pip=pip
        )
    )
    path.chmod(0o755)
    return path


def run(project, *words, **variables):
    variables = {
        "PATH": str(project.parent / "bin"),
        "HOME": str(project.parent / "home"),
        **variables,
    }
    return subprocess.run(
        [str(project.parent / "bin" / "sh"), "tools/setup.sh", *words],
        cwd=project,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def pip_calls(project):
    log = project.parent / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [(["3.11", "3.12", "3.13"], "3.13"), (["3.14", "3.11", "3.12"], "3.12"), (["3.14"], "3.14")],
)
def test_the_preferred_version_is_taken_whatever_python3_is(versions, chosen, project):
    for version in versions:
        add_python(project, version)
    add_python(project, "3.11", name="python3")
    if "3.11" not in versions:
        add_python(project, versions[0], name="python3")
    result = run(project)
    assert result.returncode == 0, result.stderr
    assert f"with Python {chosen}.0" in result.stderr


def test_every_installation_is_pinned_and_done_once(project):
    add_python(project, "3.13")
    assert run(project, ".venv", "test").returncode == 0
    calls = pip_calls(project)
    assert ["-c constraints.txt" in call for call in calls] == [True, True]
    assert "--no-build-isolation -e .[test]" in calls[1]
    again = run(project, ".venv", "test")
    assert (again.returncode, again.stderr, pip_calls(project)) == (0, "", calls)
    assert run(project, ".venv", "test,plan").returncode == 0
    assert run(project, ".venv", "plan").returncode == 0
    assert len(pip_calls(project)) == 2 * len(calls)


def test_an_environment_of_other_pins_is_made_anew(project):
    add_python(project, "3.13")
    run(project)
    left_over = project / ".venv" / "left_over"
    left_over.touch()
    (project / "constraints.txt").write_text("a==2\n")
    result = run(project)
    assert result.returncode == 0
    assert "made anew" in result.stderr
    assert "making .venv" in result.stderr


@pytest.mark.parametrize("name", [".venv", ".venv/"])
def test_the_environment_behind_a_link_is_left_alone(name, project):
    add_python(project, "3.13")
    of_another = project.parent / "of_another"
    of_another.mkdir()
    (project / ".venv").symlink_to(of_another)
    result = run(project, name)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "symbolic link" in line
    assert list(of_another.iterdir()) == []


def test_a_package_that_cannot_be_had_is_named(project):
    add_python(project, "3.13", pip=NO_PACKAGE)
    result = run(project)
    assert result.returncode == 1
    assert "could not get hatchling==9" in result.stderr
    add_python(project, "3.13")  # the network is back: the installation goes on
    shutil.copy(project.parent / "bin" / "python3.13", project / ".venv" / "bin" / "python")
    assert run(project).returncode == 0


def test_without_a_python_of_a_good_version_one_sentence_says_so(project):
    add_python(project, "3.10", name="python3")
    result = run(project)
    assert result.returncode == 3
    [line] = result.stderr.splitlines()
    assert "3.13, 3.12, 3.11" in line
    old = add_python(project, "3.10")
    result = run(project, PYTHON=str(old))
    assert result.returncode == 3
    assert str(old) in result.stderr


def test_a_home_that_cannot_be_written_is_no_matter(project):
    add_python(project, "3.13")
    assert run(project, HOME="/proc/none").returncode == 0
