"""The sources keep to the floors of zerojax/README.md."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zerojax", "pallas_kernels")
MAX_LINES = 700


def read_floors(text: str) -> dict[str, int]:
    """Room -> floor, from the rows `| 2 | `mesh` `models/` | ... |` of the table."""
    floors = {}
    for number, rooms in re.findall(r"^\| (-?\d+) \| ([^|]*) \|", text, flags=re.MULTILINE):
        for room in re.findall(r"`([\w/]+)`", rooms):
            floors[room.rstrip("/")] = int(number)
    return floors


def room_of(module: str) -> str:
    """`zerojax.data.tokens` is in room `data`; `zerojax` itself is the room `__init__`."""
    package, _, rest = module.partition(".")
    if package == "pallas_kernels":
        return package
    return rest.split(".")[0] or "__init__"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(module: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every module that an import statement names, as an absolute name, and the statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base]) if base else ".".join(above)
            # `from zerojax.data import tokens` may name a module or a name inside one.
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def known_module(name: str, modules: set[str]) -> str | None:
    """The longest leading part of `name` that is a module of ours; None for other packages."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


class Sources:
    """All modules below `root`, parsed once."""

    def __init__(self, root: Path):
        paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        self.root = root
        self.floors = read_floors((root / "zerojax" / "README.md").read_text())
        self.paths = {module_name(path, root): path for path in paths}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.paths.items()}

    def internal_imports(self, module: str) -> Iterator[tuple[str, ast.AST]]:
        is_package = self.paths[module].name == "__init__.py"
        for name, node in imports_of(module, is_package, self.trees[module]):
            target = known_module(name, set(self.paths))
            if target and target != module:
                yield target, node

    def where(self, module: str, node: ast.AST) -> str:
        return f"{self.paths[module].relative_to(self.root)}:{getattr(node, 'lineno', 0)}"


def rooms_without_floor(sources: Sources) -> list[str]:
    rooms = {room_of(module) for module in sources.paths}
    return [
        f"{room}: not in the table of zerojax/README.md" for room in rooms - set(sources.floors)
    ]


def upward_imports(sources: Sources) -> list[str]:
    problems = []
    for module in sources.paths:
        room = room_of(module)
        for target, node in sources.internal_imports(module):
            other = room_of(target)
            if other == room or room not in sources.floors or other not in sources.floors:
                continue
            mine, theirs = sources.floors[room], sources.floors[other]
            if theirs >= mine:
                problems.append(
                    f"{sources.where(module, node)}: {room} (floor {mine}) imports "
                    f"{other} (floor {theirs}); only lower floors may be imported"
                )
    return problems


def circles(sources: Sources) -> list[str]:
    graph = {
        module: {target for target, _ in sources.internal_imports(module)}
        for module in sources.paths
    }
    # A package's __init__ and its own submodules: importing the submodule runs __init__ anyway.
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["a circle of imports: " + " -> ".join(error.args[1])]
    return []


def hidden_imports(sources: Sources) -> list[str]:
    """Imports of our own modules inside a function: a circle in disguise."""
    problems = []
    for module, tree in sources.trees.items():
        inside = {
            id(inner)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for inner in ast.walk(function)
        }
        problems += [
            f"{sources.where(module, node)}: {target} is imported inside a function"
            for target, node in sources.internal_imports(module)
            if id(node) in inside
        ]
    return problems


def private_jax(sources: Sources) -> list[str]:
    problems = []
    for module, tree in sources.trees.items():
        is_package = sources.paths[module].name == "__init__.py"
        for name, node in imports_of(module, is_package, tree):
            if name.startswith("jax._src"):
                problems.append(f"{sources.where(module, node)}: {name} is private to JAX")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "_src":
                problems.append(f"{sources.where(module, node)}: _src is private to JAX")
    return problems


def long_files(sources: Sources) -> list[str]:
    return [
        f"{path.relative_to(sources.root)}: {lines} lines; {MAX_LINES} is the limit, split it"
        for path in sources.paths.values()
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    ]


RULES = [rooms_without_floor, upward_imports, circles, hidden_imports, private_jax, long_files]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(rule, sources):
    problems = rule(sources)
    assert not problems, "\n" + "\n".join(problems)


def test_the_table_names_only_rooms_that_exist(sources):
    rooms = {room_of(module) for module in sources.paths}
    assert set(sources.floors) - rooms == set()


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (rooms_without_floor, "zerojax/attic.py", ""),
        (upward_imports, "zerojax/low.py", "import zerojax.high"),
        (upward_imports, "zerojax/low.py", "from zerojax import high"),
        (upward_imports, "zerojax/low.py", "from . import high"),
        (upward_imports, "zerojax/low.py", "from zerojax.high import x"),
        (upward_imports, "zerojax/low.py", "import zerojax.level"),
        (upward_imports, "zerojax/low.py", "import zerojax"),
        (upward_imports, "zerojax/box/inner.py", "from ..high import x"),
        (upward_imports, "pallas_kernels/adam.py", "import zerojax.low"),
        (circles, "zerojax/box/inner.py", "from zerojax.box import other"),
        (hidden_imports, "zerojax/high.py", "def f():\n    from zerojax import low\n"),
        (private_jax, "zerojax/low.py", "from jax._src import core"),
        (private_jax, "zerojax/low.py", "import jax\nx = jax._src.core"),
        (long_files, "zerojax/low.py", "x = 1\n" * (MAX_LINES + 1)),
    ],
)
def test_each_rule_can_fail(rule, file, text, tmp_path):
    table = "| 0 | `pallas_kernels/` | |\n| 1 | `low` `level` `box/` | |\n"
    tree = {
        "zerojax/README.md": table + "| 2 | `high` | |\n| 3 | `__init__` | |\n",
        "zerojax/__init__.py": "",
        "zerojax/low.py": "",
        "zerojax/level.py": "",
        "zerojax/high.py": "from zerojax import low\n",
        "zerojax/box/__init__.py": "",
        "zerojax/box/inner.py": "",
        "zerojax/box/other.py": "import zerojax.box.inner\n",
        "pallas_kernels/__init__.py": "",
    }

    def problems_with(contents: dict[str, str], root: Path) -> list[str]:
        for name, content in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        return rule(Sources(root))

    assert problems_with(tree, tmp_path / "good") == []
    assert len(problems_with({**tree, file: text}, tmp_path / "bad")) == 1
