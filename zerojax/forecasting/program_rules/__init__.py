"""Rules that the compiled step of a plan must keep, and golden files of plans."""

from zerojax.forecasting.program_rules.expecting import (
    CheckedStep,
    check_step,
    expect,
)
from zerojax.forecasting.program_rules.golden import (
    check_golden,
    compare_records,
    plan_record,
)
from zerojax.forecasting.program_rules.rule_checks import check_rules
from zerojax.forecasting.program_rules.rule_results import (
    CheckedRule,
    ExpectationError,
    Violation,
)

__all__ = [
    "CheckedRule",
    "CheckedStep",
    "ExpectationError",
    "Violation",
    "check_golden",
    "check_rules",
    "check_step",
    "compare_records",
    "expect",
    "plan_record",
]
