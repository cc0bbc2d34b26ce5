"""The names of `zerojax` exist, have docstrings, and are the same for type checkers."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zerojax
from tests.support.syntax_trees import nodes_of
from zerojax import errors

MOST_BY_POSITION = {"experts": 5}
"""One row, its gates and its choices are three arrays; weights and what applies them are two."""
NAMES = [name for name in zerojax.__all__ if name != "__version__"]


def names_for_type_checkers(source: str) -> dict[str, str]:
    """Name -> module, from the imports under `if TYPE_CHECKING`."""
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    return {
        alias.name: statement.module.removeprefix("zerojax.")
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }


@pytest.mark.parametrize("module", [zerojax, errors], ids=lambda module: module.__name__)
def test_the_lazy_table_is_what_type_checkers_see(module):
    source = Path(module.__file__).read_text()
    assert names_for_type_checkers(source) == module._HOME_OF_NAME
    assert sorted(module._HOME_OF_NAME) == sorted({*module.__all__} - {"__version__"})


def test_every_exception_exists_and_is_documented():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), BaseException), name
        assert inspect.getdoc(getattr(errors, name)), name


def test_every_public_name_exists_and_is_documented():
    for name in NAMES:
        value = getattr(zerojax, name)
        assert inspect.getdoc(value), f"zerojax.{name} has no docstring"
        home = importlib.import_module(f"zerojax.{zerojax._HOME_OF_NAME[name]}")
        assert value is getattr(home, name), name


def test_public_functions_take_at_most_three_things_by_position():
    """What, where, data; the rest by keyword, so that a call reads aloud."""
    for name in NAMES:
        if inspect.isfunction(function := getattr(zerojax, name)):
            parameters = inspect.signature(function).parameters.values()
            by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert len(by_position) <= MOST_BY_POSITION.get(name, 3), name
            assert not any(p.kind is p.VAR_POSITIONAL for p in parameters), name


def test_no_module_has_the_name_of_a_public_function():
    """Importing it would put the module into the function's place."""
    modules = {path.stem for path in Path(zerojax.__file__).parent.iterdir()}
    assert not modules & {name for name in NAMES if inspect.isfunction(getattr(zerojax, name))}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'zerojax' has no attribute 'trian'"):
        zerojax.trian  # noqa: B018
    assert set(NAMES) <= set(dir(zerojax))


def test_importing_zerojax_does_not_import_jax():
    program = "import sys, zerojax; sys.exit('jax' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=Path(zerojax.__file__).parents[1]
    )


@pytest.mark.thorough
def test_no_part_of_the_package_starts_devices_when_imported():
    """Work at import would fix the number of devices before a user can say it."""
    program = (
        "import importlib, pkgutil, zerojax\n"
        "for module in pkgutil.walk_packages(zerojax.__path__, 'zerojax.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=Path(zerojax.__file__).parents[1]
    )


def exceptions_of_zerojax() -> set[str]:
    """Classes whose name says that they are raised, in any module."""
    found = set()
    for path in Path(zerojax.__file__).parent.rglob("*.py"):
        for node in nodes_of(path):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [ast.unparse(base) for base in node.bases]
            if any(re.search(r"(Error|Exception|Interrupt)$", base) for base in bases):
                found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def documented() -> str:
    """What people read: the pages, and the docstrings of public functions, classes and methods."""
    root = Path(zerojax.__file__).parent.parent
    texts = [path.read_text() for path in [root / "README.md", *(root / "docs").glob("*.md")]]
    for name in NAMES:
        value = getattr(zerojax, name)
        members = vars(value).values() if inspect.isclass(value) else ()
        public = [m for m in members if not getattr(m, "__name__", "_").startswith("_")]
        texts += [inspect.getdoc(each) or "" for each in (value, *public)]
    return "\n".join(texts)


def test_every_exception_that_is_documented_is_public():
    named = set(re.findall(r"\b[A-Z]\w+\b", documented()))
    missing = sorted((exceptions_of_zerojax() & named) - set(errors.__all__))
    assert not missing, f"documented, and not in zerojax.errors: {missing}"


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(Path(zerojax.__file__).parent.glob("*/__init__.py"))
        if "_HOME_OF_NAME" in path.read_text()
    ],
    ids=lambda path: path.parent.name,
)
def test_a_package_offers_the_same_names_to_type_checkers_and_on_request(path):
    package = importlib.import_module(f"zerojax.{path.parent.name}")
    block = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
    seen = {
        alias.name: statement.module.removeprefix(f"{package.__name__}.")
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }
    assert seen == package._HOME_OF_NAME
    assert sorted(seen) == sorted(package.__all__)
    for name in seen:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        package.trian  # noqa: B018
