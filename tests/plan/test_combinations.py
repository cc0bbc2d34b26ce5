"""Settings that exclude each other: the page, and the one list of checks behind it."""

import jax
import numpy as np
import pytest

from tests.support.refusals import refused
from tests.support.small_models import reference_model
from tools import combinations_page
from tools.combinations_page import DEVICES, SETTINGS, combination, is_refused, share_key
from zerojax.config import MoEConfig
from zerojax.config.feature_settings import FeatureSettings
from zerojax.features.known import KNOWN, works_with
from zerojax.features.other_settings import OTHERS, check_others
from zerojax.placement.device_mesh import DATA
from zerojax.plan.combinations import check_combination
from zerojax.plan.inputs import PlanInputs
from zerojax.plan.make import plan_of
from zerojax.plan.rung_plans import with_rungs


def test_the_page_is_computed():
    assert combinations_page.PAGE.read_text() == combinations_page.page()


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_of_the_page_is_possible_alone(name):
    check_combination(combination(SETTINGS[name]))


CHANGE_NO_STEP = {*(f"zero={n}" for n in range(4)), "precision: fp16", "lion", "log.per_layer"} | {
    "lamb",
    "muon",
    "adam8bit",
}
"""Settings that a feature works with without having said so: stages, dtypes, update rules, and
reports."""


@pytest.mark.parametrize("name", sorted({*SETTINGS} - CHANGE_NO_STEP))
def test_a_feature_is_refused_with_what_it_does_not_say_that_it_works_with(name):
    class NewConfig(FeatureSettings):
        keyword, switch = "new", "on"

    refused(lambda: check_others(combination(SETTINGS[name]), NewConfig, ()), "new", ";")


@pytest.mark.parametrize("feature", KNOWN, ids=lambda feature: feature.kind.keyword)
def test_what_a_feature_works_with_is_in_the_list_of_settings(feature):
    assert works_with(feature) - {DATA} <= {other.name for other in OTHERS}


OF_TABLES = ("lamb", "muon", "adam8bit")
"""Optimizers that are refused only if the model has a table whose rows are looked up."""


def plan_together(*names):
    """Plans a small Llama with settings of the page; experts where the mesh splits them."""
    found = combination(*(SETTINGS[name] for name in names))
    tokens = jax.ShapeDtypeStruct((2 * DEVICES, 16), np.int32)
    more = {"moe": MoEConfig(num_experts=4, experts_per_token=2)} if "expert=2" in names else {}
    inputs = PlanInputs(
        model=reference_model("llama", num_layers=4, **more),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=found.tx,
        precision=found.precision,
        features=found.features,
        steps=20,
        layer_norms=found.layer_norms,
    )
    return with_rungs(plan_of(inputs, found.settings))


@pytest.mark.thorough
@pytest.mark.parametrize("one", SETTINGS)
def test_what_the_page_allows_can_be_planned(one):
    others = list(SETTINGS)[list(SETTINGS).index(one) + 1 :]
    given = OF_TABLES if one == "lookup=owners" else ()
    others = [x for x in others if x not in given and not share_key(one, x)]
    allowed = [x for x in others if not is_refused(one, x)]
    wrong = {}
    for other in allowed:
        try:
            plan_together(one, other)
        except ValueError as error:
            wrong[other] = str(error)[:200]
    assert not wrong
