"""Layers of a Python list that became one loop, in files, against the same model in memory.

The loop is that of weights on the host, so tolerances are those of
`tests.offload.test_offload_pages`.
"""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.offload.test_offload_pages import paged
from tests.support.offload_disk_runs import close, differing, portable
from tests.support.trajectories import TOLERANCE
from tests.tracing.test_rolled_training import ADAMW, NUM_LAYERS, Listed, batch
from zerojax.checkpoint import Checkpointer
from zerojax.offload.disk_saving import saved_names
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state
from zerojax.training.checkpointing import restore_state, save_state

pytestmark = pytest.mark.slow

ABOUT = {"data_state": {}, "config": {}, "plan": {}}


def plan_of(folder: Any = None, *, zero: int = 3, data: int = 4, **options: Any) -> zerojax.Plan:
    """A plan of `Listed`, drawn from a seed; with a folder its layers are in files."""
    files = {} if folder is None else {"offload": paged(folder, **options.pop("files", {}))}
    mesh = zerojax.make_mesh(zerojax.MeshConfig(data=data), jax.devices()[:data])
    options = {"model": Listed, "optimizer": ADAMW, **options}
    return zerojax.make_plan(
        options.pop("model"),
        mesh,
        example_batch=batch(),
        precision="fp32",
        zero=zero,
        persistence_threshold=0,
        **options,
        **files,
    )


def train(plan: zerojax.Plan, steps: int, state: Any = None) -> tuple[Any, list[float]]:
    state, step, losses = state or init_state(plan), build_step(plan), []
    for _ in range(steps):
        state, metrics = step(state, zerojax.shard_batch(plan, batch()))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(("zero", "microbatches", "inputs"), [(3, 2, "nvme"), (1, 1, "device")])
def test_a_list_from_files_trains_as_in_memory(tmp_path, zero, microbatches, inputs):
    options = {"zero": zero, "num_microbatches": microbatches}
    plan = plan_of(tmp_path, files={"activations": inputs}, **options)
    kernels = {name for name in plan.stacks if name.endswith("kernel")}
    assert len(kernels) == 2
    assert kernels <= plan.offload.paged
    plain = plan_of(roll="off", **options)
    state, losses = train(plan, 4)
    found, value = portable(plan, state), build_evaluation(plan)(state, on(plan))
    close(state)
    expected_state, expected = train(plain, 4)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    assert expected[0] - expected[-1] > 0.001
    whole = portable(plain, expected_state)
    assert found.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=100 * TOLERANCE, err_msg=name)
    other = build_evaluation(plain)(expected_state, on(plain))
    np.testing.assert_allclose(float(value["loss"]), float(other["loss"]), rtol=1e-5)


def on(plan: zerojax.Plan) -> Any:
    return zerojax.shard_batch(plan, batch())


@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
def test_a_new_state_has_the_bits_of_one_in_memory(tmp_path, given):
    model = Listed(nnx.Rngs(0)) if given else Listed
    plan, plain = plan_of(tmp_path, model=model), plan_of(model=model, roll="off")
    state = init_state(plan)
    found = portable(plan, state)
    close(state)
    assert differing(found, portable(plain, init_state(plain))) == []


def test_checkpoints_have_every_layer_under_its_own_name(tmp_path):
    """They are written and read slice by slice, and go to a run in memory and back."""
    plan, plain = plan_of(tmp_path / "a"), plan_of(zero=1, data=2, roll="off")
    state, _ = train(plan, 2)
    expected = portable(plan, state)
    names = [n for arrays in saved_names(plan).values() for each in arrays.values() for n in each]
    stacks = saved_names(plan).keys() & plan.stacks.keys()
    assert len(names) == 3 * (len(stacks) * NUM_LAYERS + len(saved_names(plan)) - len(stacks))
    assert len(stacks) >= 2
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        save_state(checkpointer, plan, state, step=2, about=ABOUT)
        close(state)
        checkpointer.wait()
        assert checkpointer.metadata().arrays.keys() == expected.keys()
        assert checkpointer.verify().is_good
        size = checkpointer.metadata().files["pieces/process_0.bin"]
        assert size >= 4 * sum(expected[name].size for name in names)
        moved = restore_state(checkpointer, plain)[1]
        assert differing(portable(plain, moved), expected) == []
        back = plan_of(tmp_path / "b", zero=2, data=2, files={"slice_elements": 32})
        restored = restore_state(checkpointer, back)[1]
        assert differing(portable(back, restored), expected) == []
        save_state(checkpointer, plain, moved, step=3, about=ABOUT)
        checkpointer.wait()
        close(restored)
        again = restore_state(checkpointer, back, 3)[1]
        assert differing(portable(back, again), expected) == []
        resharded = reshard_state(back, plain, again)
        assert differing(portable(plain, resharded), expected) == []
