"""The site of `make docs`: its navigation, its reference, its links."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import zerojax
from tools import docs_site

ROOT = Path(__file__).resolve().parents[2]
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("griffe") is None,
    reason="MkDocs comes with zerojax[docs]",
)
SITE_FILES = ("docs", "tools", "zerojax", "README.md", "CHANGELOG.md", "mkdocs.yml")
SITE_FILES += ("benchmarks/results", "pyproject.toml")


def entries(nav) -> list[str]:
    """The pages of a `nav` of mkdocs.yml."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in entries(part)]


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    found = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    files = {path.relative_to(ROOT) for path in (ROOT / "docs").glob("**/*.md")}
    files -= {Path(source) for source in docs_site.COPIES.values()}
    pages = {str(path.relative_to("docs")) for path in files}
    assert sorted(found) == sorted(
        [*pages, *docs_site.COPIES, docs_site.COMMANDS, docs_site.REFERENCE]
    )


def test_the_reference_has_the_public_names():
    names = docs_site.public_names()
    assert names.keys() == {"zerojax", *(f"zerojax.{name}" for name in zerojax._PUBLIC_MODULES)}
    for public, found in names.items():
        module = importlib.import_module(docs_site.public_modules()[public])
        short = [name.public.rpartition(".")[2] for name in found]
        if hasattr(module, "__all__"):
            assert short == list(module.__all__)
        else:
            made_here = [
                name
                for name, value in vars(module).items()
                if not name.startswith("_")
                and (inspect.isfunction(value) or inspect.isclass(value))
                and value.__module__ == module.__name__
            ]
            assert made_here
            assert set(made_here) <= set(short)


def test_the_reference_shows_what_users_get():
    for public, found in docs_site.public_names().items():
        module = importlib.import_module(docs_site.public_modules()[public])
        for name in found:
            home, _, word = name.home.rpartition(".")
            shown = getattr(importlib.import_module(home), word)
            assert getattr(module, name.public.rpartition(".")[2]) is shown, name


def test_every_public_name_has_a_docstring():
    found = [name for names in docs_site.public_names().values() for name in names]
    assert len(found) > 250
    assert not [name.public for name in found if not name.summary]


@pytest.mark.parametrize(
    ("folder", "link", "shown"),
    [
        ("docs", "[a](plan.md#b)", "[a](plan.md#b)"),
        ("docs", "[a](#b)", "[a](#b)"),
        ("docs", "[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        ("docs", "[a](../README.md)", "[a](index.md)"),
        ("docs", "[a](../Makefile)", "[a](https://some.host/us/blob/HEAD/Makefile)"),
        ("", "[a `b`](docs/plan.md#c)", "[a `b`](plan.md#c)"),
        ("", "[a](docs/README.md)", "[a](pages.md)"),
        ("", "```text\n[a](docs/plan.md)\n```\n", "```text\n[a](docs/plan.md)\n```\n"),
    ],
)
def test_a_link_of_a_page_leads_to_the_same_place_on_the_site(folder, link, shown):
    assert docs_site.rewrite_links(link, folder, "https://some.host/us", pytest.fail) == shown


def test_without_an_address_of_the_repository_the_path_is_shown():
    assert docs_site.rewrite_links("[a](../Makefile)", "docs", "", pytest.fail) == "a: `Makefile`"


def test_a_link_to_no_file_is_a_warning():
    said: list[str] = []
    docs_site.rewrite_links("[a](../none.txt)", "docs", "", said.append)
    assert said == ["a link leads to none.txt, which is not in the repository"]


@needs_mkdocs
def test_entries_of_several_names_are_repeated_and_examples_are_code():
    module = importlib.import_module("tools.docs_docstrings")
    text = "A.\n\nArgs:\n  b1, b2: decay,\n    of moments.\n  c: other.\n\nOf d, e: no entry."
    assert module.split_entries(text) == (
        "A.\n\nArgs:\n  b1: decay,\n    of moments.\n  b2: decay,\n    of moments.\n  c: other.\n\n"
        "Of d, e: no entry."
    )
    assert module.fence_examples("A.\n\n>>> f()\n1") == "A.\n\n```pycon\n>>> f()\n1\n```"


# --- built sites ----------------------------------------------------------------------------------


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(
        [sys.executable, *words], cwd=tree, capture_output=True, text=True, timeout=280
    )


@needs_mkdocs
@pytest.mark.thorough
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path):
    result = build(ROOT, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for module, names in docs_site.public_names().items():
        page = docs_site.page_of(module).removesuffix(".md").removesuffix("index")
        html = (tmp_path / page / "index.html").read_text()
        identifiers = set(re.findall(r'id="?([\w.]+)', html))
        assert {name.public for name in names} <= identifiers
    assert "zerojax.train" in (tmp_path / "search" / "search_index.json").read_text()
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 45
    loading = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*>")
    outside = re.compile(r"(?:href|src|srcset)=[\"']?(?:https?:)?//")
    for page in pages:
        tags = loading.findall(page.read_text())
        assert tags
        assert not [tag for tag in tags if outside.search(tag)], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


@needs_mkdocs
@pytest.mark.thorough
def test_a_broken_link_or_anchor_or_a_missing_docstring_fails(tmp_path):
    tree = tmp_path / "tree"
    for name in SITE_FILES:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    with (tree / "docs" / "plan.md").open("a") as page:
        page.write("\n[a](nowhere.md), [b](data.md#nowhere), [c](../nowhere.txt)\n")
    (tree / "docs" / "new.md").write_text("# New\n")
    losses = tree / "zerojax" / "models" / "losses.py"
    losses.write_text(losses.read_text() + "\n\ndef bare(x: int) -> int:\n    return x\n")
    result = build(tree, tmp_path / "site")
    assert result.returncode != 0
    for words in (
        "'nowhere.md'",
        "'#nowhere'",
        "nowhere.txt, which is not in the repository",
        "new.md",
        "zerojax.losses.bare has no docstring",
    ):
        assert words in result.stderr, words
