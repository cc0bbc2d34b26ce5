"""The parts of an equation of a traced program that zerojax reads.

JAX types the operands of an equation so that neither shape nor dtype is known of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jax.extend.core import Primitive


class Operand(Protocol):
    """An operand or result of an equation: a variable or a constant."""

    @property
    def aval(self) -> Any: ...


class Equation(Protocol):
    """An equation of a traced program (`jax.extend.core.JaxprEqn`)."""

    @property
    def primitive(self) -> Primitive: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def invars(self) -> list[Any]: ...

    @property
    def outvars(self) -> list[Any]: ...

    @property
    def source_info(self) -> Any: ...

    @property
    def effects(self) -> Any: ...

    @property
    def ctx(self) -> Any: ...

    @property
    def replace(self) -> Callable[..., Any]:
        """Function that returns the equation with other parts, by their names."""
        ...
