"""Dataclasses that are made on first use are those of `dataclasses`, whatever is done first."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import re
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

import zerojax
from zerojax.config import late_dataclasses

KINDS = ({}, {"kw_only": True}, {"eq": False}, {"repr": False})


def make(decorator: Any, **options: bool) -> type:
    @decorator(frozen=True, **options)
    class Point:
        """A class with every sort of field."""

        x: int
        many: list[int] = dataclasses.field(default_factory=list, compare=False)
        z: int = dataclasses.field(default=3, repr=False)
        kind: ClassVar[str] = "point"

        def __post_init__(self) -> None:
            object.__setattr__(self, "x", self.x + 1)

    return Point


def stored(cls: type) -> Any:
    """An instance that no call of the class has made, as pickle and copy make them."""
    found = object.__new__(cls)
    found.__dict__.update(x=2, many=[], z=3)
    return found


def refusal(action: Any) -> str:
    with pytest.raises(dataclasses.FrozenInstanceError) as caught:
        action()
    return str(caught.value)


FIRST_USES = {
    "signature": lambda cls: str(inspect.signature(cls)),
    "fields": lambda cls: [(f.name, f.type, f.kw_only) for f in dataclasses.fields(cls)],
    "call": lambda cls: vars(cls(x=1)),
    "default": lambda cls: (cls(x=1) and cls.z, hasattr(cls, "many")),
    "repr": lambda cls: repr(stored(cls)).partition(" object at ")[0],
    "equal": lambda cls: stored(cls) == stored(cls),
    "hash": lambda cls: hash(stored(cls)) == hash(stored(cls)),
    "replace": lambda cls: dataclasses.replace(stored(cls), z=5).z,
    "as dict": lambda cls: dataclasses.asdict(stored(cls)),
    "match": lambda cls: cls.__match_args__,
    "assign": lambda cls: refusal(lambda: setattr(stored(cls), "x", 1)),
    "assign another": lambda cls: refusal(lambda: setattr(stored(cls), "w", 1)),
    "delete": lambda cls: refusal(lambda: delattr(stored(cls), "x")),
    "copy": lambda cls: vars(copy.copy(stored(cls))),
    "subclass": lambda cls: vars(dataclasses.dataclass(frozen=True)(type("Sub", (cls,), {}))(x=1)),
    "plain subclass": lambda cls: vars(type("Sub", (cls,), {})(x=1)),
    "names": lambda cls: (cls(x=1), set(vars(cls)))[1],
}


@pytest.mark.parametrize("first", FIRST_USES.values(), ids=FIRST_USES)
def test_whatever_is_done_first_gives_what_dataclasses_give(first):
    for options in KINDS:
        expected, late = (
            first(make(decorator, **options))
            for decorator in (dataclasses.dataclass, late_dataclasses.dataclass)
        )
        assert late == expected, options


@late_dataclasses.dataclass(frozen=True)
class Stored:
    """A class that pickle finds by its name."""

    x: int


def test_a_pickled_instance_returns():
    text = pickle.dumps(Stored(1))
    assert pickle.loads(text) == Stored(1)


def test_threads_that_use_a_class_first_wait_for_one_another():
    classes = [make(late_dataclasses.dataclass) for _ in range(4)]
    made: list[Any] = []
    start = threading.Barrier(8)

    def use() -> None:
        start.wait()
        made.extend(cls(x=1) for cls in classes)

    threads = [threading.Thread(target=use) for _ in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert [one.x for one in made] == [2] * 32


def classes(decorator: str) -> list[str]:
    """Frozen classes of zerojax, MODULE:CLASS, that this decorator alone makes, without bases."""
    root = Path(zerojax.__file__).parent
    pattern = rf"^(?!@).*\n@{decorator}\(frozen=True(?!.*slots).*\)\nclass (\w+):$"
    return [
        f"{'.'.join(path.relative_to(root.parent).with_suffix('').parts)}:{name}"
        for path in sorted(root.rglob("*.py"))
        for name in re.findall(pattern, path.read_text(), flags=re.MULTILINE)
    ]


def test_importing_a_module_makes_no_frozen_dataclass():
    """Each costs about 1 ms; those with a second decorator are changed by it at once."""
    assert not classes(r"dataclasses\.dataclass"), "use zerojax.config.late_dataclasses.dataclass"
    assert len(classes("dataclass")) > 300  # the pattern finds classes


@pytest.mark.thorough
def test_every_late_dataclass_can_be_made():
    """A mistake in its fields shows only then."""
    for found in classes("dataclass"):
        module, name = found.split(":")
        cls = getattr(importlib.import_module(module.removesuffix(".__init__")), name)
        assert dataclasses.is_dataclass(cls), found
