"""Pickles models, losses and optimizers for a child process, functions and classes by value.

Importable objects are pickled by name. Functions and classes of a script, of a notebook or inside a
function are pickled by value: their code and the objects that the code uses. Works only between
processes of the same interpreter, because code is written as bytecode.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import linecache
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import IO, Any

import jax
import numpy as np

_SKIPPED = frozenset(["__dict__", "__weakref__", "__module__", "__qualname__", "_abc_impl"])
_SENTINELS = ("MISSING", "KW_ONLY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR")
"""Sentinels of `dataclasses`; the library compares them by identity, so copies would not work."""
_HEAP_TYPE = 1 << 9
"""CPython's type flag `Py_TPFLAGS_HEAPTYPE`, set for types that are defined in Python."""
_EMPTY = "zerojax: an empty cell"

_modules: dict[str, dict[str, Any]] = {}
"""{module name: globals} in the child, for modules whose functions were pickled by value."""


class NotSendableError(TypeError):
    """Raised if an object cannot be pickled for another process."""


def dumps(value: object) -> bytes:
    """Pickles `value` for `loads` in a child process of the same interpreter.

    Raises:
      NotSendableError: it contains an object that cannot be pickled (a lock, an open file).
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise NotSendableError(f"{type(error).__name__}: {error}") from error
    return pickle.dumps((stream.getvalue(), pickler.sources))


def loads(data: bytes) -> Any:
    """Unpickles a value that `dumps` wrote."""
    value, sources = pickle.loads(data)
    for name, text in sources.items():  # source of notebook cells, which have no file
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    return pickle.loads(value)


def is_importable(module: str | None) -> bool:
    """Returns whether another process can import the same module by this name."""
    if module is None or module in ("__main__", "__mp_main__"):
        return False
    if module in sys.builtin_module_names:
        return True
    loaded = sys.modules.get(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin == getattr(
        getattr(loaded, "__spec__", None), "origin", spec.origin
    )


def _found_by_name(thing: Any) -> bool:
    """Returns whether another process can import this function or class by its name."""
    module = getattr(thing, "__module__", None)
    target = sys.modules.get(module or "")
    for part in thing.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is thing and is_importable(module)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: IO[bytes]):
        super().__init__(stream, protocol=5)
        self.sources: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Returns the pickle reduction of an object that has no importable name, else
        NotImplemented."""
        kind = type(obj)
        if kind.__name__ == "PjitFunction":  # its default reduction would hold compiled programs
            return NotImplemented if _found_by_name(obj) else (_same, (obj.__wrapped__,))
        if isinstance(obj, types.FunctionType):
            return NotImplemented if _found_by_name(obj) else self._function(obj)
        if isinstance(obj, type):
            written_in_c = not obj.__flags__ & _HEAP_TYPE  # type(None): pickle supports it
            return NotImplemented if written_in_c or _found_by_name(obj) else _class(obj)
        if isinstance(obj, tuple) and getattr(obj, "__dict__", None):
            # A named tuple with additional attributes, whose __new__ may require keywords.
            return _new_tuple, (kind, tuple(obj)), vars(obj)
        for name in _SENTINELS:
            if obj is getattr(dataclasses, name, self):
                return getattr, (dataclasses, name)
        for known, reduce in _REDUCERS.items():
            if isinstance(obj, known):
                return reduce(obj)
        return NotImplemented

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        self._keep_source(code.co_filename)
        by_value = not is_importable(function.__module__)
        names = sorted(_names_in(code))
        used = {
            name: function.__globals__[name]
            for name in names
            if by_value and name in function.__globals__
        }
        submodules = [
            full
            for value in used.values()
            if isinstance(value, types.ModuleType)
            for name in names
            if (full := f"{value.__name__}.{name}") in sys.modules
        ]
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        state = {
            "globals": used,
            "submodules": submodules,
            "cells": cells,
            "defaults": function.__defaults__,
            "kwdefaults": function.__kwdefaults__,
            "dict": dict(function.__dict__),
            "doc": function.__doc__,
            "qualname": function.__qualname__,
        }
        made = marshal.dumps(code), function.__name__, function.__module__, by_value, len(cells)
        return _new_function, made, state, None, None, _fill_function

    def _keep_source(self, filename: str) -> None:
        lines = linecache.getlines(filename)
        if filename.startswith("<") and lines:
            self.sources[filename] = "".join(lines)


def _names_in(code: types.CodeType) -> set[str]:
    """Returns global names and attribute names in a function's code, including inner functions."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _new_function(
    code: bytes, name: str, module: str | None, by_value: bool, num_cells: int
) -> types.FunctionType:
    if by_value or module is None:
        start = {"__name__": module, "__builtins__": __builtins__}
        variables = _modules.setdefault(module or "__main__", start)
    else:
        variables = vars(importlib.import_module(module))
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(marshal.loads(code), variables, name, None, cells)


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for name in state["submodules"]:
        importlib.import_module(name)
    function.__globals__.update(state["globals"])
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        if not (isinstance(value, str) and value == _EMPTY):
            cell.cell_contents = value
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["kwdefaults"]
    function.__dict__.update(state["dict"])
    function.__doc__, function.__qualname__ = state["doc"], state["qualname"]


def _class(cls: type) -> Any:
    members = {name: value for name, value in vars(cls).items() if name not in _SKIPPED}
    slots = members.get("__slots__")
    if slots is not None:
        for name in (slots,) if isinstance(slots, str) else slots:
            members.pop(name, None)
    made = type(cls), cls.__name__, cls.__bases__, cls.__module__, cls.__qualname__, slots
    return _new_class, made, members, None, None, _fill_class


def _new_class(
    meta: type,
    name: str,
    bases: tuple,
    module: str,
    qualname: str,
    slots: Any,
) -> type:
    members = {"__module__": module, "__qualname__": qualname}
    if slots is not None:
        members["__slots__"] = slots
    return types.new_class(name, bases, {"metaclass": meta}, lambda own: own.update(members))


def _fill_class(cls: type, members: dict[str, Any]) -> None:
    for name, value in members.items():
        if name != "__slots__":
            setattr(cls, name, value)


def _new_custom_vjp(
    fun: Callable[..., Any],
    nondiff_argnums: Sequence[int],
    fwd: Any,
    bwd: Any,
) -> Any:
    made = jax.custom_vjp(fun, nondiff_argnums=nondiff_argnums)
    if fwd is not None:
        made.defvjp(fwd, bwd)
    return made


def _array(array: jax.Array) -> Any:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(array))
        return _new_key, (data, str(jax.random.key_impl(array)))
    return jax.numpy.asarray, (np.asarray(array),)


def _new_key(data: np.ndarray, impl: str) -> jax.Array:
    return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl)


def _member(cls: type, name: str) -> Any:
    return vars(cls)[name]


def _read_only(items: dict[Any, Any]) -> Any:
    return types.MappingProxyType(items)


def _same(value: object) -> Any:
    return value


def _new_tuple(cls: type, items: tuple) -> tuple:
    return tuple.__new__(cls, items)


def _of_tracer(tracer: object) -> Any:
    raise NotSendableError("the model contains a traced array; create it outside of jit and grad")


def _of_module(module: types.ModuleType) -> Any:
    if not is_importable(module.__name__):
        raise NotSendableError(
            f"another process cannot import the module {module.__name__}; make it importable"
        )
    return importlib.import_module, (module.__name__,)


_REDUCERS: dict[Any, Callable[[Any], Any]] = {
    jax.core.Tracer: _of_tracer,
    jax.Array: _array,
    types.ModuleType: _of_module,
    property: lambda x: (property, (x.fget, x.fset, x.fdel, x.__doc__)),
    staticmethod: lambda x: (staticmethod, (x.__func__,)),
    classmethod: lambda x: (classmethod, (x.__func__,)),
    types.MappingProxyType: lambda x: (_read_only, (dict(x),)),
    types.ClassMethodDescriptorType: lambda x: (_member, (x.__objclass__, x.__name__)),
    jax.custom_vjp: lambda x: (_new_custom_vjp, (x.fun, x.nondiff_argnums, x.fwd, x.bwd)),
}
"""{type: function that returns the pickle reduction of its instances}; the first match is used."""
