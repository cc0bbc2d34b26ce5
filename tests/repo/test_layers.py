"""The sources keep to the line of packages in zerojax/README.md."""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.syntax_trees import nodes_of, tree_of
from zerojax.placement.device_mesh import AXES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("zerojax", "pallas_kernels")
MAX_FUNCTION_LINES = 80
MAX_ENTRIES = 30
LAZY = "cli"
"""The package that may import inside functions: it answers without JAX."""
PUBLIC_NAMES = {"__init__", "errors"}
"""Modules at the top that import what they offer when it is asked for."""
MODULES_AT_THE_TOP = {*PUBLIC_NAMES, "__main__"}
TABLE_OF_AXES = "device_mesh.py"
IMPORTERS = {"import_module", "__import__", "find_spec"}


def read_line(text: str) -> list[str]:
    """The packages, lowest first, from the line `a < b < c` that is a paragraph of its own."""
    [line] = re.findall(r"^    (\w+(?: < \w+)+)$", text, flags=re.MULTILINE)
    return line.split(" < ")


def read_table(text: str) -> dict[str, str]:
    """Package -> its sentence, from the rows `| `plan` | Decisions made ... |` of the table."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, flags=re.MULTILINE))


def package_of(module: str) -> str:
    """`zerojax.data.tokens` is in package `data`; `zerojax` itself is `__init__`."""
    root, _, rest = module.partition(".")
    if root == "pallas_kernels":
        return root
    return rest.split(".")[0] or "__init__"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(
    module: str, is_package: bool, nodes: Iterable[ast.AST]
) -> Iterator[tuple[str, ast.AST]]:
    """Every module that a statement or a call of importlib names, absolute, and the node."""
    for node in nodes:
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
        elif isinstance(node, ast.Call) and (named := module_of_call(node)):
            yield named, node


def module_of_call(node: ast.Call) -> str | None:
    """The module that `import_module("zerojax.x")` names, as far as its text is written."""
    called = getattr(node.func, "attr", getattr(node.func, "id", None))
    if called not in IMPORTERS or not node.args:
        return None
    text: ast.expr | None = node.args[0]
    if isinstance(text, ast.JoinedStr):
        text = text.values[0] if text.values else None
    if isinstance(text, ast.BinOp):
        text = text.left
    value = getattr(text, "value", None)
    return value.rstrip(".") if isinstance(value, str) else None


def known_module(name: str, modules: set[str]) -> str | None:
    """The longest leading part of `name` that is a module of ours; None for other packages."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


class Sources:
    """All modules below `root`, parsed once."""

    def __init__(self, root: Path):
        paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        text = (root / "zerojax" / "README.md").read_text()
        self.root = root
        self.line = read_line(text)
        self.table = read_table(text)
        self.paths = {module_name(path, root): path for path in paths}
        self.modules = set(self.paths)
        self.nodes = {name: nodes_of(path) for name, path in self.paths.items()}
        self.trees = {name: tree_of(path) for name, path in self.paths.items()}
        self.imports = {
            name: list(imports_of(name, path.name == "__init__.py", self.nodes[name]))
            for name, path in self.paths.items()
        }

    def internal_imports(self, module: str) -> Iterator[tuple[str, str, ast.AST]]:
        """(module of ours, full name in the statement, statement)"""
        for name, node in self.imports[module]:
            target = known_module(name, self.modules)
            if target and target != module:
                yield target, name, node

    def height(self, package: str) -> float:
        """The place in the line. The public names stand below the command line, which uses them."""
        if package == "pallas_kernels":
            return -1
        above = dict.fromkeys(PUBLIC_NAMES, len(self.line) - 1.5) | {"__main__": len(self.line)}
        return above[package] if package in above else self.line.index(package)

    def where(self, module: str, node: ast.AST) -> str:
        return f"{self.paths[module].relative_to(self.root)}:{getattr(node, 'lineno', 0)}"


def packages_outside_the_line(sources: Sources) -> list[str]:
    found = {package_of(module) for module in sources.paths} - {"pallas_kernels"}
    found -= MODULES_AT_THE_TOP
    files = [name for name in found if (sources.root / "zerojax" / f"{name}.py").exists()]
    problems = [f"zerojax/{name}.py: belongs into one of the packages" for name in files]
    problems += [
        f"{name}: not in the line of zerojax/README.md"
        for name in sorted(found - set(sources.line) - set(files))
    ]
    return problems + [f"{name}: no such package" for name in sorted(set(sources.line) - found)]


def entries_at_the_top(sources: Sources) -> list[str]:
    folder = sources.root / "zerojax"
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    entries = sorted({path.relative_to(folder).parts[0] for path in files})
    if len(entries) <= MAX_ENTRIES:
        return []
    return [f"zerojax/ has {len(entries)} entries; {MAX_ENTRIES} is the limit: {entries}"]


def upward_imports(sources: Sources) -> list[str]:
    problems = []
    known = {*sources.line, *MODULES_AT_THE_TOP, "pallas_kernels"}
    for module in sources.paths:
        mine = package_of(module)
        for target, _, node in sources.internal_imports(module):
            theirs = package_of(target)
            if theirs == mine or not {mine, theirs} <= known:
                continue
            if sources.height(theirs) > sources.height(mine):
                problems.append(
                    f"{sources.where(module, node)}: {mine} imports {theirs}, which is to the "
                    "right of it in the line of zerojax/README.md"
                )
    return problems


def circles(sources: Sources) -> list[str]:
    graph = {
        module: {target for target, _, _ in sources.internal_imports(module)}
        for module in sources.paths
    }
    # A package's __init__ and its own submodules: importing the submodule runs __init__ anyway.
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["a circle of imports: " + " -> ".join(error.args[1])]
    return []


def hidden_imports(sources: Sources) -> list[str]:
    """Imports of our own modules inside a function: a circle in disguise.

    The command line may write such a statement, but not call importlib, which no tool follows.
    """
    problems = []
    for module in sources.paths:
        if package_of(module) in PUBLIC_NAMES:
            continue
        hidden = ast.Call if package_of(module) == LAZY else ast.AST
        inside = {
            id(inner)
            for function in sources.nodes[module]
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for inner in ast.walk(function)
        }
        problems += [
            f"{sources.where(module, node)}: {target} is imported inside a function"
            for target, _, node in sources.internal_imports(module)
            if id(node) in inside and isinstance(node, hidden)
        ]
    return problems


def private_names(sources: Sources) -> list[str]:
    """Names with a leading underscore that another package imports, or reads off a module."""
    problems = []
    for module in sources.paths:
        mine, modules = package_of(module), {}
        for target, name, node in sources.internal_imports(module):
            if package_of(target) == mine:
                continue
            if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
                problems.append(f"{sources.where(module, node)}: {name} is private to its package")
            if target == name:
                modules |= {
                    alias.asname or alias.name: name
                    for alias in getattr(node, "names", ())
                    if name.endswith("." + alias.name)
                }
        for node in sources.nodes[module]:
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in modules
                and re.match(r"_(?!_)", node.attr)
            ):
                name = f"{modules[node.value.id]}.{node.attr}"
                problems.append(f"{sources.where(module, node)}: {name} is private to its package")
    return problems


def deep_packages(sources: Sources) -> list[str]:
    return [
        f"{path.parent.relative_to(sources.root)}: packages have one level of sub-packages"
        for module, path in sources.paths.items()
        if path.name == "__init__.py" and module.count(".") > 2
    ]


def packages_named_like_functions(sources: Sources) -> list[str]:
    """Importing such a package would put it in the place of the function."""
    functions = {
        node.value
        for statement in sources.trees["zerojax"].body
        if isinstance(statement, ast.Assign)
        and [getattr(target, "id", None) for target in statement.targets] == ["__all__"]
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Constant) and node.value == node.value.lower()
    }
    return [
        f"{path.parent.relative_to(sources.root)}: zerojax.{path.parent.name} is a public name"
        for path in sources.paths.values()
        if path.name == "__init__.py" and path.parent.name in functions
    ]


def doors_hidden_by_modules(sources: Sources) -> list[str]:
    """A name that a door imports on request is the module of that name once that is imported."""
    problems = []
    for package in sources.line:
        homes = [
            node.value
            for node in sources.trees[f"zerojax.{package}"].body
            if isinstance(node, ast.Assign) and "_HOME" in ast.unparse(node.targets[0])
        ]
        names = {key.value for home in homes for key in home.keys if isinstance(key, ast.Constant)}
        problems += [
            f"zerojax/{package}/__init__.py: {name} is a module beside it as well"
            for name in sorted(names)
            if f"zerojax.{package}.{name}" in sources.paths
        ]
    return problems


def doors_that_say_something_else(sources: Sources) -> list[str]:
    problems = []
    for package, sentence in sources.table.items():
        text = ast.get_docstring(sources.trees[f"zerojax.{package}"]) or ""
        if text.splitlines()[:1] != [sentence]:
            problems.append(f"zerojax/{package}/__init__.py: its first line has to be: {sentence}")
    missing = set(sources.line) ^ set(sources.table)
    return problems + [f"{name}: in the line or in the table alone" for name in sorted(missing)]


def private_jax(sources: Sources) -> list[str]:
    problems = []
    for module in sources.paths:
        for name, node in sources.imports[module]:
            if name.startswith("jax._src"):
                problems.append(f"{sources.where(module, node)}: {name} is private to JAX")
        for node in sources.nodes[module]:
            if isinstance(node, ast.Attribute) and node.attr == "_src":
                problems.append(f"{sources.where(module, node)}: _src is private to JAX")
    return problems


def repeated_file_names(sources: Sources) -> list[str]:
    found: dict[str, list[str]] = {}
    for module, path in files_of(sources):
        if path.name not in ("__init__.py", "__main__.py") and module.count(".") > 1:
            found.setdefault(path.name, []).append(module)
    return [
        f"{name}: {', '.join(modules)}; a name says what a file is without its folder"
        for name, modules in repeated(found)
    ]


def lists_of_axes(sources: Sources) -> list[str]:
    """A new mesh axis is a row of one table, from which every list of axes is read."""
    constants = set(map(str.upper, AXES))

    def is_axis(node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return node.value in AXES
        return getattr(node, "attr", getattr(node, "id", None)) in constants

    return [
        f"{path.relative_to(sources.root)}:{node.lineno}: {ast.unparse(node)}; read a list of axes "
        f"from the table in {TABLE_OF_AXES}"
        for module, path in files_of(sources)
        if path.name != TABLE_OF_AXES
        for node in sources.nodes[module]
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and len(node.elts) > 1
        and all(map(is_axis, node.elts))
    ]


def repeated_classes(sources: Sources) -> list[str]:
    found: dict[str, list[str]] = {}
    for module, _ in files_of(sources):
        for node in sources.trees[module].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return [
        f"class {name}: {', '.join(modules)}; a name says what a class is without its module"
        for name, modules in repeated(found)
    ]


def files_of(sources: Sources) -> list[tuple[str, Path]]:
    """Modules of zerojax itself with their paths."""
    return [
        (module, path)
        for module, path in sources.paths.items()
        if package_of(module) != "pallas_kernels"
    ]


def repeated(found: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    for name, modules in found.items():
        if len(modules) > 1:
            yield name, modules


def long_functions(sources: Sources) -> list[str]:
    """Functions that are long, from `def` to the last line without the docstring, and do not say
    why in a comment `# Long: ...` above their first line."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return [
        f"{sources.where(module, node)}: {node.name} has {lines} lines of code; name its steps, or "
        f"say in a comment '# Long: ...' above it why more than {MAX_FUNCTION_LINES} are one idea"
        for module, path in sources.paths.items()
        for node in sources.nodes[module]
        if isinstance(node, functions) and (lines := lines_of_code(node)) > MAX_FUNCTION_LINES
        if not says_why_long(path, node)
    ]


def says_why_long(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
    above = itertools.takewhile(
        lambda line: line.lstrip().startswith("#"),
        reversed(path.read_text().splitlines()[: first - 1]),
    )
    return any(line.lstrip().startswith("# Long: ") for line in above)


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first, lines = function.body[0], (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    return lines - ((first.end_lineno or 0) - first.lineno + 1)


RULES = [
    packages_outside_the_line,
    entries_at_the_top,
    upward_imports,
    circles,
    hidden_imports,
    private_names,
    deep_packages,
    packages_named_like_functions,
    doors_hidden_by_modules,
    doors_that_say_something_else,
    private_jax,
    repeated_file_names,
    repeated_classes,
    lists_of_axes,
    long_functions,
]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(rule, sources):
    problems = rule(sources)
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (packages_outside_the_line, "zerojax/attic.py", ""),
        (packages_outside_the_line, "zerojax/attic/__init__.py", ""),
        (entries_at_the_top, "zerojax/notes.txt", ""),
        (upward_imports, "zerojax/low/a.py", "import zerojax.high"),
        (upward_imports, "zerojax/low/a.py", "from zerojax import high"),
        (upward_imports, "zerojax/low/a.py", "from .. import high"),
        (upward_imports, "zerojax/low/a.py", "from zerojax.high import x"),
        (upward_imports, "zerojax/low/a.py", "from zerojax.high.box import inner"),
        (upward_imports, "zerojax/low/a.py", "import zerojax"),
        (upward_imports, "zerojax/low/a.py", "importlib.import_module('zerojax.high')"),
        (upward_imports, "zerojax/low/a.py", "importlib.import_module(f'zerojax.high.{1}')"),
        (upward_imports, "zerojax/low/a.py", "__import__('zerojax.high.' + 'box')"),
        (upward_imports, "zerojax/high/box/inner.py", "from ... import cli"),
        (upward_imports, "pallas_kernels/adam.py", "import zerojax.low"),
        (circles, "zerojax/high/box/inner.py", "from zerojax.high.box import other"),
        (hidden_imports, "zerojax/high/d.py", "def f():\n    from zerojax import low\n"),
        (hidden_imports, "zerojax/high/d.py", "def f():\n    import_module('zerojax.low')\n"),
        (hidden_imports, "zerojax/cli/a.py", "def f():\n    import_module('zerojax.low')\n"),
        (private_names, "zerojax/high/d.py", "from zerojax.low.a import _x"),
        (private_names, "zerojax/high/d.py", "from zerojax.low import _hidden"),
        (private_names, "zerojax/high/d.py", "from zerojax.low import a as lows\nlows._x"),
        (deep_packages, "zerojax/high/box/deep/__init__.py", ""),
        (packages_named_like_functions, "zerojax/high/train/__init__.py", ""),
        (doors_hidden_by_modules, "zerojax/low/__init__.py", '_HOME_OF_NAME = {"a": "b"}'),
        (doors_that_say_something_else, "zerojax/low/__init__.py", '"""Something else."""'),
        (private_jax, "zerojax/low/a.py", "from jax._src import core"),
        (private_jax, "zerojax/low/a.py", "import jax\nx = jax._src.core"),
        (repeated_file_names, "zerojax/high/b.py", ""),
        (repeated_classes, "zerojax/high/d.py", "class Low:\n    pass\n"),
        (lists_of_axes, "zerojax/low/a.py", "axes = ('data', 'replica')"),
        (lists_of_axes, "zerojax/low/a.py", "axes = [meshes.DATA, STAGE]"),
        (long_functions, "zerojax/low/a.py", "def f():\n" + " x = 1\n" * MAX_FUNCTION_LINES),
    ],
)
def test_each_rule_can_fail(rule, file, text, tmp_path):
    line = "    low < high < cli\n\n"
    table = "| `low` | Low things. |\n| `high` | High things. |\n| `cli` | Words. |\n"
    tree = {
        "zerojax/README.md": line + table,
        "zerojax/__init__.py": '__all__ = ["Plan", "train"]\n',
        "zerojax/__main__.py": "from zerojax.cli import main\n",
        "zerojax/low/__init__.py": '"""Low things."""\n',
        "zerojax/low/a.py": "_x = 1\n",
        "zerojax/low/_hidden.py": "",
        "zerojax/low/b.py": "from zerojax.low.a import _x\n\n\nclass Low:\n    pass\n",
        "zerojax/high/__init__.py": '"""High things."""\n',
        "zerojax/high/d.py": "from zerojax.low import a as lows\nlows.__name__\n",
        "zerojax/high/box/__init__.py": "",
        "zerojax/high/box/inner.py": "",
        "zerojax/high/box/other.py": "import zerojax.high.box.inner\n",
        "zerojax/cli/__init__.py": '"""Words."""\n\n\ndef main():\n    import zerojax.high\n',
        "pallas_kernels/__init__.py": "",
    }
    tree |= {f"zerojax/extra{number}": "" for number in range(MAX_ENTRIES - 6)}
    tree["zerojax/old/__pycache__/a.pyc"] = ""  # what a checkout leaves behind

    def problems_with(contents: dict[str, str], root: Path) -> list[str]:
        for name, content in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        return rule(Sources(root))

    assert problems_with(tree, tmp_path / "good") == []
    assert len(problems_with({**tree, file: text}, tmp_path / "bad")) == 1
