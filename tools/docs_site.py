"""Pages of the site that are not files of docs/, and links out of docs/; a hook of MkDocs.

- `index.md` is README.md, `pages.md` is docs/README.md, `changelog.md` is CHANGELOG.md.
- `reference/` has a page for each public module. A name is documented once, under its shortest
  public path; other modules that offer it link there. A public name without a docstring is a
  warning, which `mkdocs build --strict` makes an error.
- `commands.md` is the help of every command.
- A link to a file outside docs/ leads to the repository, if pyproject.toml names one under
  `[project.urls]` (Repository or Source); without one the path is shown instead.

MkDocs is imported where it is needed: tests use the rest of this file without it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import logging
import os
import posixpath
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
REFERENCE = "reference/"
"""Entry of `nav` in mkdocs.yml that stands for all pages of the reference."""
COPIES = {"index.md": "README.md", "pages.md": "docs/README.md", "changelog.md": "CHANGELOG.md"}
"""Page of the site -> file of the repository."""
COMMANDS = "commands.md"
INTRODUCTION = """\
Every public name, by the module that offers it. `import zerojax` is enough for all of them: modules
are attributes, and both they and the names below are imported on first use."""

log = logging.getLogger("mkdocs.hooks.docs_site")


# --- public names ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Name:
    """A public name.

    Attributes:
      public: its path for users, `zerojax.optim.adamw`.
      home: the path at which its source defines it, `zerojax.optim.methods.adamw`.
      summary: first paragraph of its docstring; "" without one.
    """

    public: str
    home: str
    summary: str


@functools.cache
def source_of(module: str) -> Path:
    folder = ROOT.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text())


def statements(module: str) -> list[ast.stmt]:
    """Statements of a module, with those under `if TYPE_CHECKING` in their place."""
    found = []
    for node in tree_of(module).body:
        is_for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        found += node.body if is_for_checkers else [node]
    return found


def names_of(module: str) -> list[str]:
    """`__all__`; without it what the module defines, and what it imports as `X as X`."""
    found = []
    for node in statements(module):
        if isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if alias.asname == alias.name]
        for name in defined(node):
            if name == "__all__":
                return ast.literal_eval(node.value)
            found.append(name)
    return sorted(name for name in found if not name.startswith("_"))


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def find(module: str, name: str) -> tuple[str, str]:
    """Returns (path of the definition, docstring) of a name that a module defines or imports."""
    body = statements(module)
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return find(node.module, alias.name)
        elif name in defined(node):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_docstring(node)
            else:
                value = following.value if isinstance(following, ast.Expr) else None
                text = value.value if isinstance(value, ast.Constant) else None
            return f"{module}.{name}", text or ""
    raise ValueError(f"tools/docs_site.py: {source_of(module)} neither defines nor imports {name}")


@functools.cache
def public_modules() -> dict[str, str]:
    """{path for users: the module}, `zerojax.losses` -> `zerojax.models.losses`.

    A name that several modules offer is documented by the first one.
    """
    import zerojax

    found = {"zerojax": "zerojax"}
    for name in ("errors", *sorted(zerojax._PUBLIC_MODULES)):
        found[f"zerojax.{name}"] = f"zerojax.{zerojax._PUBLIC_MODULES[name]}"
    return found


@functools.cache
def public_names() -> dict[str, list[Name]]:
    """{path of a public module: its names}."""
    found = {}
    for public, module in public_modules().items():
        found[public] = []
        for name in names_of(module):
            home, text = find(module, name)
            summary = " ".join(text.strip().partition("\n\n")[0].split())
            found[public].append(Name(f"{public}.{name}", home, summary))
    return found


def page_of(module: str) -> str:
    """Page of a public module, as a path in the site's sources."""
    return f"reference/{module.partition('.')[2] or 'index'}.md"


# --- pages ----------------------------------------------------------------------------------------


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yields (path, Markdown) of the page of each public module."""
    shown: dict[str, tuple[str, str]] = {}  # definition -> (module that documents it, public path)
    for module, names in public_names().items():
        for name in names:
            shown.setdefault(name.home, (module, name.public))
    for module, names in public_names().items():
        lines = [f"# `{module}`", "", *introduction(module), "", "| name | |", "|---|---|"]
        entries = []
        for name in names:
            there, public = shown[name.home]
            short = name.public.removeprefix(f"{module}.")
            link = f"[`{short}`](#{public})"
            if there == module:
                entries += ["", f"[](){{ #{public} }}", "", f"::: {name.home}", "    options:"]
                entries += [f"      heading: {public}", f"      toc_label: {short}"]
            else:
                link = f"[`{short}`]({file_of(there)}#{public}){{ #{name.public} }}"
            lines.append(f"| {link} | {cell(name.summary)} |")
        yield page_of(module), "\n".join([*lines, *entries, ""])


def introduction(module: str) -> list[str]:
    """First paragraph of a module's page; for zerojax also the table of the other modules."""
    if module != "zerojax":
        return [summary_of(module)]
    rows = [
        f"| [`{other}`]({file_of(other)}) | {cell(summary_of(other))} |"
        for other in public_modules()
        if other != module
    ]
    return [INTRODUCTION, "", "| module | contents |", "|---|---|", *rows]


def summary_of(module: str) -> str:
    """First line of the docstring of a public module."""
    return (ast.get_docstring(tree_of(public_modules()[module])) or "").partition("\n")[0]


def file_of(module: str) -> str:
    """Its page, from another page of the reference."""
    return posixpath.basename(page_of(module))


def cell(text: str) -> str:
    """A sentence as a cell of a table."""
    return text.replace("|", "\\|")


def commands_page() -> str:
    """The help of every command as Markdown."""
    from zerojax.cli import build_parser

    lines = [
        "# All commands",
        "",
        "The output of `zerojax --help` and of `--help` of each command.",
        "",
    ]

    def add(parser: argparse.ArgumentParser, level: int) -> None:
        lines.extend([f"{'#' * level} `{parser.prog}`", "", "```text"])
        lines.extend([parser.format_help().rstrip(), "```", ""])
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    add(inner, level + 1)

    # Not as wide as the terminal, and without its colours.
    with mock.patch.dict(os.environ, COLUMNS="90", PYTHON_COLORS="0"):
        add(build_parser(), 2)
    return "\n".join(lines)


# --- links ----------------------------------------------------------------------------------------

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def rewrite_links(text: str, folder: str, repository: str, warn: Callable[[str], None]) -> str:
    """Returns a page with its relative links to files of the repository as links of the site.

    Args:
      text: Markdown whose links are relative to `folder`.
      folder: of the page, relative to the repository; "" is its top.
      repository: address of the repository; "" shows the paths of its files instead of links.
      warn: is called with a sentence about each link to a file that does not exist.
    """
    pages = {source: page for page, source in COPIES.items()}

    def rewritten(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, path))
        if file in pages or file.startswith(f"{DOCS}/"):
            return f"[{words}]({pages.get(file, file.removeprefix(f'{DOCS}/'))}{mark}{anchor})"
        if not (ROOT / file).exists():
            warn(f"a link leads to {file}, which is not in the repository")
        if repository:
            return f"[{words}]({repository}/blob/HEAD/{file}{mark}{anchor})"
        return words if file in words else f"{words}: `{file}`"

    parts = FENCED.split(text)
    return "".join(
        part if number % 2 else LINK.sub(rewritten, part) for number, part in enumerate(parts)
    )


# --- what MkDocs calls ----------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Sets what the repository knows: version, address, the list of reference pages."""
    sys.path.insert(0, str(ROOT))
    import zerojax

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    repository = urls.get("Repository", urls.get("Source", "")).rstrip("/")
    config.site_name = f"{config.site_name} {zerojax.__version__}"
    config.site_url = config.site_url or urls.get("Documentation", "")
    config.extra["repository"] = repository
    if repository:
        # Not `repo_url`: with it the theme asks the host for the number of stars, in each browser.
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": repository}]
    config.nav = with_reference(config.nav)
    return config


def with_reference(nav: Any) -> Any:
    """Returns `nav` with REFERENCE replaced by the pages of the reference."""
    if isinstance(nav, list):
        return [with_reference(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: with_reference(entry) for title, entry in nav.items()}
    if nav == REFERENCE:
        return [{module: page_of(module)} for module in public_modules()]
    return nav


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are no files of docs/; docs/README.md becomes one of them."""
    from mkdocs.structure.files import File

    for source in COPIES.values():
        file = files.get_file_from_path(source.removeprefix(f"{DOCS}/"))
        if file is not None:
            files.remove(file)
    pages = {page: (ROOT / source).read_text() for page, source in COPIES.items()}
    pages |= {COMMANDS: commands_page(), **dict(reference_pages())}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for names in public_names().values():
        for name in names:
            if not name.summary:
                log.warning("%s has no docstring", name.public)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links of the pages that are also read in the repository."""
    path = page.file.src_uri
    source = COPIES.get(path, f"{DOCS}/{path}")
    if not (ROOT / source).exists():
        return markdown
    folder = posixpath.dirname(source)
    repository = config.extra["repository"]
    return rewrite_links(
        markdown, folder, repository, lambda text: log.warning("%s: %s", source, text)
    )
