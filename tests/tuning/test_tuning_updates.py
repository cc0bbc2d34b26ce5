"""Updates that a start asks for: each optimizer's on some parameters, timed or only checked."""

import dataclasses
import importlib
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zerojax
from pallas_kernels.choice import Choice
from tests.support.marks import needs_kernels
from tests.support.tuning_doubles import Clock, Runs, asked, plan_for
from zerojax.optim.adam8bit_state import SMALLEST_CODED
from zerojax.plan.open_choices import open_kernels, planned_kernels
from zerojax.training.tuning import Answer, KeptChoices, tuned_plan

COUNTED = Answer(choice="mosaic_gpu", reason="fewer bytes")
RATE = 1e-2
SLOWER = {"embed": {"learning_rate_factor": 0.5}}


def _no_biases(params: Any) -> Any:
    return {name: "bias" not in name for name in params}


BY_NAME = {
    "adamw": zerojax.adamw(RATE, mask=_no_biases, clip_norm=None),
    "lamb": zerojax.lamb(RATE, mask=_no_biases, clip_norm=None),
    "lamb of whole arrays": zerojax.lamb(RATE, per_layer=False, clip_norm=None),
    "lamb in groups": zerojax.lamb(RATE, clip_norm=None, groups=SLOWER),
    "lamb with ema": zerojax.with_ema(zerojax.lamb(RATE)),
    "adam8bit": zerojax.adam8bit(RATE, mask=_no_biases),
    "adam8bit with ema": zerojax.with_ema(zerojax.adam8bit(RATE)),
}


def on_one_device(tx: Any, **options: Any) -> zerojax.Plan:
    mesh = zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1])
    return plan_for(mesh=mesh, optimizer=tx, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lamb", "adamw", "lamb of whole arrays", "lamb in groups"])
def test_the_reference_is_the_update_of_the_optimizer(name: str) -> None:
    """On all parameters, as they are: the sample is not cut."""
    plan = on_one_device(BY_NAME[name])
    shapes = tuned_plan.sample_shapes(plan)
    assert shapes == {name: x.shape for name, x in plan.abstract_state["params"].items()}
    found, _ = tuned_plan.update_question(plan, "xla").reference.run()
    params = tuned_plan._gradients(shapes, 1.0)
    grads = jax.tree.map(lambda x: 0.5 * x, tuned_plan._gradients(shapes))  # the scale is one half
    layers = frozenset(tuned_plan.stacks_of(plan))
    updates, _ = plan.tx.update(grads, plan.tx.init(params), params, layers=layers)
    wanted = optax.apply_updates(params, updates)
    for leaf, x in found.items():
        np.testing.assert_allclose(x, wanted[leaf], rtol=1e-5, atol=1e-6, err_msg=leaf)


@pytest.mark.thorough
@pytest.mark.parametrize("offload", [{"params": "nvme"}, {"opt_state": "nvme"}])
def test_an_update_can_be_asked_for_where_state_is_in_files(offload, tmp_path):
    """The state on the device then lacks parameters that the optimizer knows."""
    place = {**offload, "folder": str(tmp_path), "min_elements": 100}
    plan = on_one_device(zerojax.adamw(RATE, clip_norm=None), offload=place)
    found, _ = tuned_plan.update_question(plan, "xla").reference.run()
    assert found.keys() == tuned_plan.sample_shapes(plan).keys()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lamb", "adam8bit"])
def test_a_part_of_a_large_model_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAMB's arrays keep their layers; masks by name are still told of every parameter."""
    monkeypatch.setattr(tuned_plan, "MAX_ELEMENTS", 2**12)
    monkeypatch.setattr(tuned_plan, "MAX_ARRAYS", 5)
    plan = on_one_device(BY_NAME[name])
    shapes = tuned_plan.sample_shapes(plan)
    assert len(shapes) == 5
    whole = plan.abstract_state["params"]
    assert any(shape != whole[leaf].shape for leaf, shape in shapes.items())
    found, _ = tuned_plan.update_question(plan, "xla").reference.run()
    assert {leaf: x.shape for leaf, x in found.items()} == shapes
    if name == "lamb":
        layers = {leaf: shapes[leaf][0] for leaf in tuned_plan.stacks_of(plan) if leaf in shapes}
        assert set(layers.values()) == {2}


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("name", BY_NAME)
def test_kernels_agree_with_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted; the second call of a program in place goes on from the first."""
    monkeypatch.setattr(tuned_plan, "MAX_ELEMENTS", 2**15)
    monkeypatch.setattr(tuned_plan, "MAX_ARRAYS", 6)
    question = tuned_plan.update_question(on_one_device(BY_NAME[name]), "interpret")
    assert question.difference(question.other.run(), question.reference.run()) is None
    assert question.title.endswith("with ema") == name.endswith("with ema")
    for way in (question.reference, question.other):
        assert way.repeat is not None
        first, second = way.repeat(), way.repeat()
        assert jax.tree.structure(first) == jax.tree.structure(second)


def test_codes_of_moments_may_be_neighbours_and_rarely() -> None:
    codes = np.arange(-100, 100, dtype=np.int8).repeat(20)
    assert tuned_plan.difference({"mu": codes}, {"mu": codes}) is None
    one, far, many = codes.copy(), codes.copy(), codes.copy()
    one[7] += 1
    far[7] += 2
    many[:100] += 1
    assert tuned_plan.difference({"mu": one}, {"mu": codes}) is None
    assert "differs by 2" in str(tuned_plan.difference({"mu": far}, {"mu": codes}))
    assert "2.50% of its codes differ" in str(tuned_plan.difference({"mu": many}, {"mu": codes}))


def test_which_updates_are_open() -> None:
    """8-bit AdamW's kernel moves fewer bytes, and Muon's kernels hold more than a plan counts."""
    timed = {"adamw": "adamw", "lamb": "lamb", "adam8bit": None}
    for name, kernel in timed.items():
        assert open_kernels(plan_for(optimizer=BY_NAME[name])).get("update") == kernel
    assert "update" not in open_kernels(plan_for(optimizer=zerojax.optim.muon(RATE), zero=0))
    asked_for = plan_for(optimizer=zerojax.lamb(RATE, impl="xla"))
    assert "update" not in open_kernels(asked_for)
    assert not planned_kernels(asked_for)


def test_what_is_planned_is_checked_and_not_timed(kept: KeptChoices) -> None:
    clock = Clock()
    other, reference = Runs(clock, 0.1), Runs(clock, 0.1)
    more = {"planned": COUNTED, "reference": reference}
    assert asked(clock, kept, other, **more) == COUNTED
    assert (reference.times, other.times) == (1, 2)
    assert asked(clock, kept, other, deadline=0.0, **more) == COUNTED
    assert other.times == 4, "whatever time is left"


def test_what_is_planned_and_wrong_is_left_out_with_its_reason(kept: KeptChoices) -> None:
    clock = Clock()
    wrong = Runs(clock, 0.1, result=np.zeros(4, np.float32))
    for _ in range(2):
        answer = asked(clock, kept, wrong, planned=COUNTED)
        assert answer.choice == "xla"
        assert answer.reason.startswith("mosaic_gpu was not chosen: ")


def test_what_is_planned_stays_where_the_question_cannot_be_asked(kept: KeptChoices) -> None:
    def ask() -> Any:
        raise ValueError("no room")

    answer = tuned_plan.decide(ask, kept, planned=COUNTED)
    assert answer.choice == "mosaic_gpu"
    assert answer.reason == "fewer bytes; not checked: no room"


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_start_checks_the_kernel_of_8_bit_adamw(is_wrong, kept, monkeypatch):
    """The kernel that `auto` takes by count: interpreted, on devices that are taken for GPUs."""
    monkeypatch.setattr(tuned_plan, "is_on_gpus", lambda plan: True)
    monkeypatch.setattr(tuned_plan, "open_kernels", lambda plan: {})
    monkeypatch.setattr(tuned_plan, "open_calls", lambda plan: {})
    monkeypatch.setattr(tuned_plan, "MAX_ARRAYS", 3)
    if is_wrong:
        module = importlib.import_module("zerojax.optim.adam8bit")  # a function has its name
        right = module.update_adam8bit

        def wrong(*arguments: Any, **options: Any) -> Any:
            found = right(*arguments, **options)
            is_kernel = options["impl"].implementation != "xla"
            return found._replace(param=found.param + 1e-2) if is_kernel else found

        monkeypatch.setattr(module, "update_adam8bit", wrong)
    plan = on_one_device(zerojax.adam8bit(RATE))
    assert max(map(math.prod, tuned_plan.sample_shapes(plan).values())) >= SMALLEST_CODED
    counted = Choice("interpret", "fewer bytes by count")
    kernels = {**plan.program.kernels, "update": counted}
    plan = dataclasses.replace(plan, program=dataclasses.replace(plan.program, kernels=kernels))
    chosen = zerojax.tune(plan, kept=kept).program.kernels["update"]
    if is_wrong:
        assert chosen.implementation == "xla"
        assert "interpret was not chosen: its results are wrong" in chosen.reason
    else:
        assert chosen == counted
