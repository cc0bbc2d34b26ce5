"""A float16 run on real text overflows now and then, and goes on as DeepSpeed's rules say."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.loss_scale_reference import PlainScaler
from tests.support.small_models import reference_model
from zerojax.config import LossScale
from zerojax.optim.precision import Precision

TEXT = Path(zerojax.__file__).parent / "data" / "shakespeare.txt"
ROWS, LENGTH, STEPS = 16, 16, 32
ALL = slice(None)
SCALING = LossScale(initial=2.0**18, window=6)
SPIKES = (15, 16, 25)
"""Steps whose gradients are forced beyond float16: two in a row lower the scale, one is forgiven
only if the scale rose since."""


def text_batch(index: int, weight: float = 1.0, heavy: slice = ALL) -> dict[str, np.ndarray]:
    """Rows of Shakespeare, of weight 1 but for some. The model has 64 ids: case is lost."""
    text = np.frombuffer(TEXT.read_bytes()[:200_000], np.uint8) % 64
    starts = np.random.default_rng(index).integers(0, len(text) - LENGTH - 1, ROWS)
    rows = np.stack([text[start : start + LENGTH + 1] for start in starts]).astype(np.int32)
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[heavy] = weight
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


def run(precision, *, zero, weight_of, heavy, **options):
    """The metrics of each step, and parameters and moments before and after it.

    The batch of step i has the weight `weight_of(i)` in `heavy`. The mean loss does not depend on
    the weight of all rows, but a large one takes float16 gradients out of range, and NaN has the
    step skipped.
    """
    plan = zerojax.make_plan(
        reference_model("gpt2"),
        zerojax.make_mesh({"data": 8}),
        example_batch=text_batch(0),
        precision=precision,
        zero=zero,
        **options,
    )
    step, state = zerojax.build_step(plan), zerojax.init_state(plan)
    seen, kept = [], []
    for index in range(STEPS):
        before = jax.device_get((state["params"], state["opt_state"]))
        batch = text_batch(index, weight_of(index), heavy)
        placed = zerojax.shard_batch(plan, batch, check_values=False)
        state, metrics = step(state, placed)
        kept.append((before, jax.device_get((state["params"], state["opt_state"]))))
        seen.append({name: float(value) for name, value in metrics.items()})
    return seen, kept


PLAIN = {"zero": 1, "heavy": ALL, "optimizer": optax.adamw(1e-3, eps=1e-5)}
ONE_ROW = {
    "zero": 3,
    "heavy": slice(5, 6),
    "num_microbatches": 2,
    "optimizer": zerojax.adamw(1e-3, b2=0.999, eps=1e-5, weight_decay=1e-4, clip_norm=1.0),
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", [PLAIN, ONE_ROW], ids=["all", "one microbatch of one device"])
def test_forced_overflows_are_skipped_and_the_scale_follows_the_rules(options):
    """A row of 16 is what one of eight devices has in one of two microbatches."""
    float16 = Precision(compute_dtype=jnp.float16, reduce_dtype=jnp.float16, loss_scale=SCALING)
    seen, kept = run(float16, weight_of=lambda i: 3e4 if i in SPIKES else 1.0, **options)
    skipped = [bool(values["skipped"]) for values in seen]
    assert all(skipped[index] for index in SPIKES)
    assert sum(skipped) < 12, "most steps must train"

    plain = PlainScaler(SCALING)
    for index, values in enumerate(seen):
        assert values["loss_scale"] == plain.scale, f"step {index}"
        plain.observe(not skipped[index])
        assert (values["bad_leaf"] >= 0) == skipped[index]
    scales = [values["loss_scale"] for values in seen]
    assert any(a < b for a, b in itertools.pairwise(scales)), "the scale must have risen"
    assert any(a > b for a, b in itertools.pairwise(scales)), "and fallen"

    for was_skipped, (before, after) in zip(skipped, kept, strict=True):
        same = jax.tree.map(np.array_equal, before, after)
        assert all(jax.tree.leaves(same)) == was_skipped, "a skipped step changes nothing"

    exact, _ = run("fp32", weight_of=lambda i: np.nan if skipped[i] else 1.0, **options)
    assert [bool(values["skipped"]) for values in exact] == skipped
    pairs = [pair for pair in zip(seen, exact, strict=True) if not pair[0]["skipped"]]
    losses, norms = (
        np.array([(half[name], full[name]) for half, full in pairs]).T
        for name in ("loss", "grad_norm")
    )
    # float16 rounds by up to 5e-4, here and there; 5e-5 and 1.5e-4 are what comes of it (measured).
    # Gradients divided by another scale than their own would be off by a factor of 2.
    # After 20 updates the two runs may be where gradients change fast: with other initial values
    # norms differed by 2 %, and float32 gradients at the parameters of either run as much.
    np.testing.assert_allclose(*losses, atol=5e-4)
    np.testing.assert_allclose(*norms[:, :20], rtol=2e-3)
    assert losses[0, -1] < losses[0, 0] - 0.3, "it must have learnt"
