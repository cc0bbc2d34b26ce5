"""Masters and moments outside device memory change no bit of a run.

Each row trains twenty steps with everything on the device and again with the optimizer's state on
the host, whole or in shares; losses, gradient norms and the whole portable state are compared by
their bits. Both runs read the same weights and gradients, and a slice is updated by the same rule
as a whole shard, so that nothing is allowed to differ. The quick rows span every choice.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.recipe import CLIPPED, DECAYED, RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import STEPS, Trajectory, regression_batch, train_for
from zerojax.config import LossScale
from zerojax.config.mesh import DEVICE, HOST
from zerojax.optim.precision import Precision
from zerojax.step.reshard import to_portable_state

OPTIMIZERS = {
    "adamw": functools.partial(zerojax.adamw, 1e-3, eps=1e-5, **RECIPE),
    "lion": functools.partial(zerojax.lion, 1e-3, **DECAYED),
    "sgd": functools.partial(zerojax.sgd, 0.1, momentum=0.9, **CLIPPED),
}
SHARES = {DEVICE: 0.4, HOST: 0.6}
WHOLE = "host"
SLICES = {"slice_elements": 400, "min_elements": 100}
"""Several slices of every matrix, none of which divides a power of two; small leaves are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train."""

    zero: int
    model: int = 1
    microbatches: int = 1
    optimizer: str = "adamw"
    precision: str = "fp32"
    clip_norm: float | None = 1.0
    shared: bool = False
    more: tuple[tuple[str, Any], ...] = ()
    is_slow: bool = True

    def __str__(self) -> str:
        tier = "shares" if self.shared else "host"
        name = f"zero{self.zero}-model{self.model}-m{self.microbatches}-{self.optimizer}"
        return f"{name}-{self.precision}-clip{self.clip_norm}-{tier}"


ROWS = [
    Row(zero=3, model=2, microbatches=4, precision="bf16", is_slow=False),
    Row(zero=1, optimizer="lion", shared=True, clip_norm=None, is_slow=False),
    Row(zero=2, microbatches=4, optimizer="sgd", shared=True, is_slow=False),
    Row(zero=0, precision="bf16", is_slow=False),
    Row(zero=0, model=2, microbatches=4, optimizer="lion", shared=True),
    Row(zero=0, optimizer="sgd", clip_norm=None),
    Row(zero=1, model=2, microbatches=4, optimizer="sgd", precision="bf16"),
    Row(zero=1, microbatches=4, shared=True),
    Row(zero=2, model=2, optimizer="adamw", precision="bf16", shared=True),
    Row(zero=2, optimizer="lion", precision="bf16", microbatches=4),
    Row(zero=3, optimizer="lion", model=2, clip_norm=None),
    Row(zero=3, optimizer="adamw", shared=True),
    Row(zero=3, optimizer="sgd", precision="bf16", shared=True, microbatches=4),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] if row.is_slow else [], id=str(row))
        for row in ROWS
    ],
)
def test_on_the_host_as_on_the_device(row):
    mesh = {"model": row.model, "data": 8 // row.model}
    assert_same_bits(
        reference_model("llama" if row.model == 2 else "gpt2"),
        SHARES if row.shared else WHOLE,
        mesh=mesh,
        zero=row.zero,
        num_microbatches=row.microbatches,
        precision=row.precision,
        optimizer=OPTIMIZERS[row.optimizer](clip_norm=row.clip_norm),
        persistence_threshold=200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [WHOLE, SHARES], ids=["host", "shares"])
def test_overflows_are_skipped_alike(tiers):
    """The first scale is far too large: steps are skipped until it has fallen."""
    scale = LossScale(initial=2.0**28, hysteresis=1)
    precision = Precision(compute_dtype=jnp.float16, reduce_dtype=jnp.float16, loss_scale=scale)
    _, run = assert_same_bits(
        reference_model("gpt2"), tiers, zero=2, precision=precision, optimizer=OPTIMIZERS["adamw"]()
    )
    assert 1 <= np.sum(~np.isfinite(run.norms)) < STEPS, "some steps are skipped, and some are not"


@pytest.mark.slow
def test_frozen_parameters_have_no_state_anywhere():
    run, _ = assert_same_bits(
        reference_model("gpt2"), WHOLE, zero=2, freeze=("embed.*",), optimizer=OPTIMIZERS["adamw"]()
    )
    frozen = run.state["frozen"].keys()
    assert frozen
    assert not frozen & run.plan.offload.leaves.keys()


STAGES = {"mesh": {"stage": 2, "data": 2, "model": 2}, "precision": "bf16", "num_microbatches": 4}
REPLICAS = {"mesh": {"replica": 2, "data": 2, "model": 2}, "zero": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [REPLICAS]
    + [
        {"zero": zero, "pipeline_schedule": schedule, **STAGES}
        for zero in (1, 3)
        for schedule in ("1f1b", "interleaved(2)")
    ],
)
def test_replicas_and_stages_update_alike(options):
    model = reference_model("llama", num_layers=4 if "stage" in options["mesh"] else 2)
    assert_same_bits(model, SHARES, optimizer=OPTIMIZERS["adamw"](), **options)


@pytest.mark.thorough
def test_a_model_whose_parameters_are_all_sliced_updates_alike():
    """Nothing is left for the update of what stays on the device."""

    def init(key):
        return {"w": jax.random.normal(key, (64, 5))}

    def apply(params, x):
        return x[:, :5] @ params["w"].T

    def squares(model, batch):
        return jnp.sum(jnp.square(model(batch["x"]) - 1)), jnp.float32(len(batch["x"]))

    options = {"loss": squares, "batch": regression_batch, "devices": 2, "steps": 3}
    options["optimizer"] = OPTIMIZERS["adamw"]()
    offload = {"opt_state": "host", "slice_elements": 40, "min_elements": 1}
    run = train_for((init, apply), offload=offload, **options)
    expected = train_for((init, apply), **options)
    assert run.plan.offload.leaves.keys() == run.state["params"].keys()
    assert run.losses.tobytes() == expected.losses.tobytes()


def assert_same_bits(model: Any, tiers: Any, **options: Any) -> tuple[Trajectory, Trajectory]:
    """Trains with this optimizer state outside the device, and with all on it; returns both."""
    run = train_for(model, offload={"opt_state": tiers, **SLICES}, **options)
    expected = train_for(model, **options)
    assert_is_offloaded(run, tiers)
    assert run.losses.tobytes() == expected.losses.tobytes()
    assert run.norms.tobytes() == expected.norms.tobytes()
    mine = jax.tree.leaves_with_path(to_portable_state(run.plan, run.state))
    other = jax.tree.leaves_with_path(to_portable_state(expected.plan, expected.state))
    assert [path for path, _ in mine] == [path for path, _ in other]
    for (path, value), (_, exact) in zip(mine, other, strict=True):
        name = jax.tree_util.keystr(path)
        assert value.dtype == exact.dtype, name
        assert np.asarray(value).tobytes() == np.asarray(exact).tobytes(), name
    return run, expected


def assert_is_offloaded(run: Trajectory, tiers: Any) -> None:
    """Slices lie where they should, and something was learned."""
    layout = run.plan.offload
    assert layout is not None
    assert max(leaf.num_slices for leaf in layout.leaves.values()) > 2
    kinds = set()
    for tier in (DEVICE, HOST):
        for masters in run.state["masters"].values():
            if tier in masters:
                kinds.add((tier, masters[tier].sharding.memory_kind))
    expected = {(HOST, "pinned_host")}
    if tiers is SHARES:
        expected.add((DEVICE, "device"))
    assert kinds == expected
    fell = run.losses[0] - run.losses[-1]
    assert fell > 0.02, f"the loss fell by {fell}: equality is cheap when nothing is learned"
