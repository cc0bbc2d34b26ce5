"""Promises about programs: registered one by one, checked together for each compiled program."""

from collections.abc import Callable, Iterator
from typing import Any

from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import COLLECTIVES


class Claims:
    """Promises, each with the cases that it holds for."""

    def __init__(self) -> None:
        self._claims: list[tuple[Callable[[Any], bool], Callable[[Any], None]]] = []

    def __call__(self, holds_for: Callable[[Any], bool] = lambda case: True) -> Any:
        """A promise about the program of every case that `holds_for` picks, as a decorator."""

        def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
            self._claims.append((holds_for, check))
            return check

        return register

    def check(self, case: Any, built: Any) -> None:
        """Raises an ExceptionGroup of every promise that a program breaks."""
        broken = []
        for holds_for, check in self._claims:
            if holds_for(case):
                try:
                    check(built)
                except AssertionError as error:
                    broken.append(AssertionError(f"{check.__name__}: {error}"))
        if broken:
            raise ExceptionGroup(f"{case.name} breaks {len(broken)} promises", broken)


def collectives_in_branches(program: Any) -> list[str]:
    """Names of the collectives of which a `cond` or `switch` decides whether they run.

    Sees those that are written over manual axes; what the partitioner adds for automatic ones is in
    the compiled program alone (`zerojax.forecasting.hlo.find_in_branches`).

    Args:
      program: traced, as in `jitted.trace(...).jaxpr`.
    """
    return list(_in_branches(getattr(program, "jaxpr", program), inside=False))


def _in_branches(program: Any, *, inside: bool) -> Iterator[str]:
    for equation in program.eqns:
        name = equation.primitive.name
        if inside and name.startswith(COLLECTIVES):
            yield name
        for inner in inner_programs(equation.params):
            yield from _in_branches(inner, inside=inside or name == "cond")
