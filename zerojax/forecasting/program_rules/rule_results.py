"""Results of checked rules: what a step has of each rule, and the violations."""

from __future__ import annotations

from collections.abc import Iterable

from zerojax.config.late_dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A rule that a step does not keep.

    Attributes:
      rule: field of `ExpectConfig`.
      found: what the step does, with its value.
      limit: what the rule allows.
      collective: the collective in words; None if there is none.
      line: line of the user's code, as "file:line: source"; None if unknown.
      remedy: what to change.
    """

    rule: str
    found: str
    limit: str
    remedy: str
    collective: str | None = None
    line: str | None = None

    def describe(self) -> str:
        """Returns the violation in one sentence."""
        by = f" by {self.collective}" if self.collective else ""
        at = f"; at {self.line}" if self.line else ""
        return f"{self.rule}: {self.found}{by}; {self.limit}{at}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class CheckedRule:
    """A rule and what the step has of it.

    Attributes:
      rule: field of `ExpectConfig`.
      value: what was found, such as "3.20 GiB".
      limit: as in `Violation`.
      violations: () if the rule is kept.
    """

    rule: str
    value: str
    limit: str
    violations: tuple[Violation, ...]


class ExpectationError(AssertionError):
    """A compiled step violates program rules; the message lists every violation.

    Attributes:
      violations: in the order of the rules.
    """

    def __init__(self, violations: tuple[Violation, ...]):
        self.violations = violations
        lines = "\n".join(f"  - {violation.describe()}" for violation in violations)
        plural = "s" * (len(violations) > 1)
        super().__init__(f"the step violates {len(violations)} expectation{plural}:\n{lines}")


def checked_rule(rule: str, value: str, limit: str, found: Iterable[Violation]) -> CheckedRule:
    """Returns the result of a rule."""
    return CheckedRule(rule=rule, value=value, limit=limit, violations=tuple(found))
