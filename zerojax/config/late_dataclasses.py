"""Makes dataclasses when they are first used, because a run uses few of the dataclasses it imports.

`dataclasses.dataclass` compiles up to six methods per class, about 1 ms; 400 classes were half of
the time that importing all public names takes.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

_MAKING = threading.RLock()
_NAMES = (
    "__dataclass_params__",
    "__dataclass_fields__",
    "__match_args__",
    "__replace__",
    "__repr__",
    "__eq__",
    "__hash__",
    "__init__",
)
"""What a dataclass has besides `__setattr__` and `__delattr__`; instances are made by the last."""


class _Late:
    """An attribute of a class that makes the class a dataclass when it is looked up."""

    def __init__(self, cls: type, name: str, options: dict[str, Any]) -> None:
        self.cls, self.name, self.options = cls, name, options

    def __get__(self, instance: object, owner: type) -> Any:
        with _MAKING:
            if vars(self.cls).get(self.name) is self:  # no other thread has made it meanwhile
                _make(self.cls, self.options)
        found = getattr(self.cls, self.name)
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _make(cls: type, options: dict[str, Any]) -> None:
    """Replaces every late attribute of `cls`.

    A twin of the class becomes the dataclass and hands its attributes over, one by one: until then
    other threads find the late attributes, and wait for the lock. No attribute that is handed over
    refers to the twin.
    """
    own = {name: value for name, value in vars(cls).items() if not isinstance(value, _Late)}
    # `dataclass(frozen=True)` refuses a class that has a `__setattr__` or `__delattr__` of its own.
    # The other two are descriptors of instances of `cls` alone.
    for name in ("__dict__", "__weakref__", "__setattr__", "__delattr__"):
        own.pop(name, None)
    own["__qualname__"] = cls.__qualname__
    twin = dataclasses.dataclass(**options)(type(cls.__name__, (), own))
    fields = [name for name, value in own.items() if isinstance(value, dataclasses.Field)]
    late = [name for name in _NAMES if isinstance(vars(cls).get(name), _Late)]
    for name in (*fields, *late):  # of a field the class keeps the default, or nothing
        if name in vars(twin):
            setattr(cls, name, vars(twin)[name])
        else:
            delattr(cls, name)


def _freeze(cls: type) -> None:
    """Makes instances of `cls` refuse changes, as `dataclasses.dataclass(frozen=True)` does."""

    def refuse(self: object, name: str, what: str) -> None:
        if type(self) is cls or name in {field.name for field in dataclasses.fields(cls)}:
            raise dataclasses.FrozenInstanceError(f"cannot {what} field {name!r}")

    def __setattr__(self: object, name: str, value: object) -> None:
        refuse(self, name, "assign to")
        object.__setattr__(self, name, value)

    def __delattr__(self: object, name: str) -> None:
        refuse(self, name, "delete")
        object.__delattr__(self, name)

    for function in (__setattr__, __delattr__):
        function.__qualname__ = f"{cls.__qualname__}.{function.__name__}"
        setattr(cls, function.__name__, function)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, **options: bool):
        """Decorates a class as `dataclasses.dataclass` does, and makes its methods on first use.

        Mistakes that `dataclasses.dataclass` finds, for example a field without default after one
        with a default, are raised on first use too. For a class that is not frozen, or has base
        classes or slots, use `dataclasses.dataclass` itself.

        Args:
          frozen: True.
          **options: `eq`, `kw_only` and `repr`, as of `dataclasses.dataclass`.
        """
        assert frozen
        assert options.keys() <= {"eq", "kw_only", "repr"}, options

        def decorate(cls: type) -> type:
            assert cls.__bases__ == (object,), f"{cls.__name__} has base classes"
            for name in _NAMES:
                if name not in vars(cls):
                    setattr(cls, name, _Late(cls, name, {"frozen": True, **options}))
            _freeze(cls)
            return cls

        return decorate
