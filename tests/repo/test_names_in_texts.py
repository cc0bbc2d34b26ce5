"""Names in pages, docstrings and messages are what one can type.

Names such as `zerojax.optim.adamw`: in pages and messages after `import zerojax` alone; in
docstrings also as a path of modules. In messages and pages also commands, their options, settings
of a run file, keywords, attributes of a plan, a trainer or an engine, names of JAX and its
relatives, environment variables and extras of the package.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import flax
import flax.nnx
import jax
import numpy
import optax
import pytest

import zerojax
from tests.support.syntax_trees import nodes_of
from zerojax.cli import build_parser
from zerojax.config import OffloadConfig

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"(?<![\w./-])zerojax(?:\.[A-Za-z_]\w*)+(?![\w/])")
PUBLIC = {*zerojax.__all__, *zerojax._PUBLIC_MODULES}
COMMANDS = re.compile(r"""-m zerojax\.[\w.]+|"-m", "zerojax\.[\w.]+""")
"""Modules that are run as programs."""


def pages() -> Iterator[tuple[Path, str]]:
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md"):
        yield path, path.read_text()
    for folder, pattern in (("docs", "*.md"), ("examples", "**/*.md"), ("examples", "**/*.py")):
        for path in sorted((ROOT / folder).glob(pattern)):
            yield (
                path,
                "\n".join(line for line in path.read_text().splitlines() if "import" not in line),
            )


def texts_of_code() -> Iterator[tuple[Path, str, bool]]:
    """(file, text, whether it is a docstring) of every text with a space in it."""
    for path, there in code().items():
        statements = {
            id(node.value) for node in there if isinstance(node, ast.Expr)
        }  # docstrings of modules, functions, classes and fields
        for node in there:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and " " in text:
                yield path, text, id(node) in statements


@functools.cache
def code() -> dict[Path, tuple[ast.AST, ...]]:
    """{file: all that is in it}."""
    paths = [*(ROOT / "zerojax").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]
    return {path.relative_to(ROOT): nodes_of(path) for path in sorted(paths)}


def names(text: str) -> list[str]:
    return NAME.findall(COMMANDS.sub("", text))


def check_public(name: str, where: object) -> None:
    first, *rest = name.split(".")[1:]
    assert first in PUBLIC, f"{name} in {where} is no attribute after `import zerojax`"
    value = getattr(zerojax, first)
    for part in rest:
        value = getattr(value, part)


def test_names_in_pages_and_messages_are_attributes():
    seen = set()
    messages = [(path, text) for path, text, is_docstring in texts_of_code() if not is_docstring]
    for where, text in [*pages(), *messages]:
        for name in names(text):
            check_public(name, where)
            seen.add(name)
    assert len(seen) > 40


def test_names_in_docstrings_are_modules_or_in_them():
    for where, text, is_docstring in texts_of_code():
        for name in names(text) if is_docstring else ():
            parts, value = name.split("."), zerojax
            for number, part in enumerate(parts[1:], 2):
                if not hasattr(value, part):
                    importlib.import_module(".".join(parts[:number]))
                value = getattr(value, part)
            assert value is not None, f"{name} in {where}"


@pytest.mark.thorough
def test_modules_are_there_after_import_zerojax_alone():
    names = ["optim.adamw", "data.as_masked_source", "pipeline_schedules.Schedule"]
    code = "import zerojax; " + "; ".join(f"zerojax.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- what else a message tells to write -----------------------------------------------------------


@functools.cache
def nodes() -> list[ast.AST]:
    return [node for found in code().values() for node in found]


def whole(node: ast.AST) -> str | None:
    """A text; "{}" for what an f-string puts into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@functools.cache
def messages() -> list[tuple[str, str]]:
    """(file and line, text) of every text of more than one word that is no docstring."""
    found = []
    for path, there in code().items():
        left_out = {id(node.value) for node in there if isinstance(node, ast.Expr)}
        left_out |= {
            id(x) for node in there if isinstance(node, ast.JoinedStr) for x in node.values
        }
        for node in there:
            text = None if id(node) in left_out else whole(node)
            # Markup of pages and pictures is for browsers.
            if text is not None and " " in text and "</" not in text and "/>" not in text:
                found.append((f"{path}:{node.lineno}", text))
    return found


def written(pattern: str) -> dict[str, list[str]]:
    """What a pattern finds in messages: {text: the places}."""
    found: dict[str, list[str]] = {}
    for where, text in messages():
        for match in re.findall(pattern, text):
            found.setdefault(match, []).append(where)
    return found


@functools.cache
def commands() -> dict[tuple[str, ...], set[str]]:
    """{words of a command: its options}."""

    def walk(parser, words):
        found = {words: {name for action in parser._actions for name in action.option_strings}}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    found |= walk(inner, (*words, name))
        return found

    return walk(build_parser(), ())


OPTIONS_OF_OTHERS = {
    "--local-dir": "hf download",
    "--logdir": "tensorboard",
    "--my-option": "an example of a script's own",
    "--safe_serialization": "DeepSpeed's zero_to_fp32.py",
    "--shm-size": "docker run",
    "--upgrade": "pip install",
}


def test_options_in_messages_exist():
    ours = set().union(*commands().values())
    found = written(r"(?<![\w-])--[a-z][\w-]*")
    assert found.keys() - ours <= OPTIONS_OF_OTHERS.keys(), found
    assert len(found.keys() & ours) > 30


def test_commands_in_messages_and_pages_exist():
    """`zerojax checkpoint export RUN --format peft`: the command, and each option as its own."""
    found = [
        (where, command)
        for where, text in messages()
        for command in re.findall(r"`(zerojax [^`]+)`", text)
        + re.findall(r"^  (zerojax .*)", text, re.M)
    ]
    for where, text in pages():
        fenced = "".join(text.split("```")[1::2])
        inside = re.findall(r"`(zerojax [^`\n]+)`", text)
        found += [(str(where), x) for x in inside + re.findall(r"^(zerojax .*)", fenced, re.M)]
    seen = set()
    for where, command in found:
        words = re.split(r"\s+", command.partition(" -- ")[0])[1:]
        name: tuple[str, ...] = ()
        while words and (*name, words[0]) in commands():
            name, words = (*name, words[0]), words[1:]
        if words[:1] in (["..."], ["COMMAND"]):
            continue  # any command
        if not name and words and set(words) <= commands()[()]:
            continue  # `zerojax --help`
        assert name, f"{command} in {where} is no command"
        has_more = any(other[: len(name)] == name for other in commands() if other != name)
        shown = words and re.fullmatch(r"[a-z]+", words[0])
        assert not (has_more and shown), f"{command} in {where}: {name} has no {words[0]}"
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= commands()[name], f"{command} in {where}"
        seen.add(name)
    assert len(seen) > 12


def fields_of(cls: type) -> dict[str, type | None]:
    """Field -> the dataclass that it holds, or None."""
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        kinds = [hints[field.name], *typing.get_args(hints[field.name])]
        found[field.name] = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
    return found


def is_setting(name: str) -> bool:
    first, *rest = name.split(".")
    roots = {**fields_of(zerojax.RunConfig), "offload": OffloadConfig}
    if first not in roots:
        return False
    kind = roots[first]
    for part in rest:
        known = fields_of(kind) if kind is not None else {}
        if part not in known:
            return False
        kind = known[part]
    return True


NOT_OF_ZEROJAX = {
    "config.embed_dim",
    "config.hidden_size",  # of a model
    "config.json",
    "model.hidden",  # of zerojax.zoo.Bert
    "model.embed_texts",
    "optimizer.gradient_transformation",
    "optimizer.params",  # of DeepSpeed, as those below
    "optimizer.params.betas",
    "optimizer.tx",
}


def test_settings_in_messages_exist():
    """`mesh.offload.opt_state=host`, `data.path`: keys of a run file, or of DeepSpeed's."""
    page = (ROOT / "docs" / "ds_config_keys.md").read_text()
    of_deepspeed = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    sections = "|".join([*fields_of(zerojax.RunConfig), "offload"])
    found = written(rf"(?<![\w./-])((?:{sections})(?:\.[a-z]\w*+)++)(?!\()")
    known = {name for name in found if is_setting(name)}
    assert len(known) > 25
    unknown = found.keys() - known - NOT_OF_ZEROJAX - of_deepspeed
    assert not unknown, {name: found[name] for name in unknown}


KEYWORDS_OF_OTHERS = {
    "axis_name",  # flax.linen.BatchNorm
    "device_ids",  # XLA's text, as those below
    "is_scheduled",
    "replica_groups",
    "feed_forward_proj",  # Hugging Face, as hidden_act
    "has_aux",  # jax.value_and_grad
    "hidden_act",
    "id2label",
    "init_lora_weights",  # PEFT, as lora_dropout and peft_type
    "lora_dropout",
    "lr",  # a line as DeepSpeed prints it
    "muon_weight_dimension_numbers",  # optax.contrib.muon
    "pad_token_id",  # Hugging Face, as id2label and problem_type
    "peft_type",
    "problem_type",
    "reverse",  # jax.lax.scan
    "vocabulary_size",
    "zero_optimization",
}


def test_keywords_in_messages_are_those_of_a_function_or_a_field():
    known = set()
    for node in nodes():
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            arguments = node.args
            known |= {x.arg for x in (*arguments.posonlyargs, *arguments.args)}
            known |= {x.arg for x in arguments.kwonlyargs}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known.add(node.target.id)
    found = written(r"(?<![\w.$\"-])([a-z_]\w*)=(?!\")")
    unknown = found.keys() - known - KEYWORDS_OF_OTHERS
    assert not unknown, {name: found[name] for name in unknown}
    assert len(found) > 100


def test_attributes_in_messages_exist():
    """`plan.table()`, `trainer.to_model()`, `engine.prepare(batch)`."""
    objects = {"plan": zerojax.Plan, "trainer": zerojax.Trainer, "engine": zerojax.Engine}
    found = written(r"(?<![\w./-])((?:plan|trainer|engine)\.[a-z]\w*)")
    in_code = {
        node.attr
        for node in nodes()
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    seen = set()
    for name, places in found.items():
        root, attribute = name.split(".")
        if attribute in ("txt", "json") or name in ("engine.backward", "engine.step"):
            continue  # files of a run; what DeepSpeed's engine has
        cls = objects[root]
        fields = {name for each in cls.__mro__ for name in getattr(each, "__annotations__", ())}
        assert hasattr(cls, attribute) or attribute in fields | in_code, (name, places)
        seen.add(name)
    assert len(seen) > 12


def test_names_of_jax_and_its_relatives_in_messages_exist():
    roots = {
        "flax": flax,
        "jax": jax,
        "jnp": jax.numpy,
        "nnx": flax.nnx,
        "numpy": numpy,
        "optax": optax,
    }
    found = written(rf"(?<![\w./-])((?:{'|'.join(roots)})(?:\.[A-Za-z_]\w*)+)")
    for name, places in found.items():
        first, *rest = name.split(".")
        value = roots[first]
        for part in rest:
            assert hasattr(value, part), (name, places)
            value = getattr(value, part)
    assert len(found) > 25


def test_environment_variables_in_messages_are_read():
    read = {
        node.value
        for node in nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    found = written(r"\bZEROJAX_[A-Z_]+")
    assert found.keys() <= read, found.keys() - read
    assert len(found) > 5


def test_extras_that_messages_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = written(r"zerojax\[(\w+)\]")
    assert found.keys() <= extras["optional-dependencies"].keys()
    assert len(found) >= 3
