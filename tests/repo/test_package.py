"""What is built from this tree holds what it must, and works where this tree is not."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist."""
    pytest.importorskip("hatchling", reason="the build backend comes with zerojax[test]")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "--directory", str(folder), cwd=ROOT)
    return folder


def test_the_wheel_holds_both_packages_their_data_and_nothing_else(built):
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "zerojax/data/shakespeare.txt",
        "zerojax/py.typed",
        "pallas_kernels/py.typed",
        "pallas_kernels/__init__.py",
        "zerojax/cli/__init__.py",
    } <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"zerojax", "pallas_kernels"}
    [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
    assert "zerojax = zerojax.cli:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_the_sdist_holds_what_a_packager_needs(built):
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ["pyproject.toml", "LICENSE", "README.md", "Makefile", "tools/setup.sh"]
    wanted += ["constraints.txt"]
    wanted += ["configs/tiny_shakespeare.yaml", "tests/conftest.py", "zerojax/data/shakespeare.txt"]
    assert set(wanted) <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "dist/"))]


@pytest.mark.thorough
def test_the_wheel_works_where_the_source_is_not(built, tmp_path):
    [wheel] = built.glob("*.whl")
    site = tmp_path / "site"
    words = ["--no-deps", "--no-index", "--no-compile", "--target", str(site), str(wheel)]
    run("-m", "pip", "install", "--disable-pip-version-check", *words, cwd=tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import zerojax, zerojax.cli\n"
        f"assert zerojax.__file__.startswith({str(site)!r})\n"
        "from zerojax.data.corpus import read_text\n"
        "assert len(read_text(None)) > 900_000\n"
        "zerojax.cli.main(['keys', 'zero'])"
    )
    assert "mesh.zero" in run("-c", program, cwd=tmp_path)
