"""`plan.explain`: sharding, collectives, update, memory and checkpoint names of a parameter."""

import math

import optax
import pytest

import zerojax
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for
from zerojax.checkpoint import Checkpointer
from zerojax.cli import main
from zerojax.plan.explain import checkpoint_names
from zerojax.plan.wire import leaf_transfers, wire_bytes
from zerojax.step.reshard import to_portable_state

KERNEL = "blocks/mlp/up/kernel"
"""float32[2, 32, 64] in the model of these tests: stacked over the layers."""


def plan_of(zero: int, **options):
    model = reference_model("gpt2", num_layers=2, embed_dim=32, mlp_dim=64)
    return plan_for(model, zero=zero, persistence_threshold=0, **options)


def test_stage_3_with_microbatches():
    plan = plan_of(3, num_microbatches=2, optimizer=zerojax.adamw(1e-3))
    size = 2 * 32 * 64 * 4 * 7 / 8  # of one gather of all layers, on 8 devices
    found = [(t.phase, t.kind, t.times, t.num_bytes) for t in transfers(plan, KERNEL)]
    assert found == [
        ("forward", "all-gather", 2, 2 * size),
        ("backward", "all-gather", 2, 2 * size),
        ("backward", "reduce-scatter", 2, 2 * size),
    ]
    text = plan.explain(KERNEL)
    assert text.startswith(f"{KERNEL}: float32[2, 32, 64], mesh data 8, zero=3")
    assert "split as (-, -, data)" in text
    assert "float32[2, 32, 8] on each device, 2.0 KiB" in text
    assert "gather on use, as float32[32, 64], one of 2 layers at a time" in text
    assert "reduce-scatter over data in float32, 2 times: 28.0 KiB sent by each device" in text
    assert "in place on each device's shard" in text
    assert f"params/{KERNEL}, opt_state/" in text


def test_groups_and_the_mask_are_in_the_page():
    groups = {"^blocks/mlp/": {"learning_rate_factor": 0.5, "weight_decay": 0.02}}
    mask = zerojax.optim.decay_mask
    given = zerojax.adamw(1e-3, weight_decay=0.1, mask=mask, groups=groups)
    plan = plan_of(3, optimizer=given)
    assert "learning rate x 0.5, weight decay 0.02" in plan.explain(KERNEL)
    assert "learning rate x 1, weight decay 0.1" in plan.explain("blocks/attention/query/kernel")
    assert "learning rate x 1, weight decay 0\n" in plan.explain("final_norm/scale")
    assert "weight decay" not in plan_of(3, optimizer=optax.adamw(1e-3)).explain(KERNEL)


def transfers(plan, name):
    return leaf_transfers(plan, plan.placement.leaves[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, [("after", "all-reduce")]),
        (1, [("before", "all-gather"), ("after", "reduce-scatter")]),
        (2, [("before", "all-gather"), ("backward", "reduce-scatter")]),
    ],
)
def test_the_lower_stages(zero, expected):
    plan = plan_of(zero)
    assert [(t.phase, t.kind) for t in transfers(plan, KERNEL)] == expected
    for phase, kind in expected:
        assert f"{phase:<11}{kind} over data" in plan.explain(KERNEL)


def test_replicas_add_an_all_reduce():
    plan = plan_of(3, mesh={"replica": 2, "data": 4})
    last = transfers(plan, KERNEL)[-1]
    assert (last.phase, last.kind, last.over) == ("after", "all-reduce", ("replica",))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_parameters_together_are_the_bytes_of_the_step(zero):
    plan = plan_of(zero, num_microbatches=2)
    sent = [t.num_bytes for name in plan.placement.leaves for t in transfers(plan, name)]
    assert round(math.fsum(sent)) == wire_bytes(plan)


def test_a_frozen_parameter_is_read_and_never_updated():
    plan = plan_of(3, freeze=(KERNEL,))
    assert [t.kind for t in transfers(plan, KERNEL)] == ["all-gather", "all-gather"]
    text = plan.explain(KERNEL)
    assert "none: it is frozen" in text
    assert f"frozen/{KERNEL}" in text


def test_slices_on_the_host():
    offload = {"opt_state": "host", "min_elements": 1}
    text = plan_of(2, offload=offload, optimizer=zerojax.adamw(1e-3)).explain(KERNEL)
    assert "optimizer state in 1 slices: 1 on host" in text


@pytest.mark.thorough
@pytest.mark.parametrize("tx", [zerojax.adamw(1e-3), optax.adamw(1e-3), optax.sgd(1e-3)])
def test_names_are_those_of_a_checkpoint(tx, tmp_path):
    plan = plan_of(1, optimizer=tx)
    state = zerojax.init_state(plan, seed=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, to_portable_state(plan, state), data_state={}, config={}, plan={})
    with Checkpointer(tmp_path) as checkpointer:
        saved = set(checkpointer.metadata(1).arrays)
    names = {name for leaf in plan.placement.leaves for name in checkpoint_names(plan, leaf)}
    assert names <= saved
    others = saved - names
    assert not [name for name in others if any(leaf in name for leaf in plan.placement.leaves)]


def test_the_command(capsys):
    words = ["num_layers=1", "num_heads=2", "embed_dim=64", "max_seq_len=32", "seq_len=32"]
    command = ["plan", *words, "zero=3", "--devices", "8", "--parameter", KERNEL]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"{KERNEL}: float32[1, 64, 256], mesh data 8, zero=3")
