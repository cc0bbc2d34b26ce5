"""Inputs of planning whose features are keywords, as those of `train` are."""

from typing import Any

from zerojax.config.features import FEATURES, Features
from zerojax.plan.inputs import PlanInputs


def plan_inputs(**options: Any) -> PlanInputs:
    keywords = {kind.keyword for kind in FEATURES}
    features = Features.of(**{name: options.pop(name) for name in keywords & options.keys()})
    return PlanInputs(**options, features=features)
