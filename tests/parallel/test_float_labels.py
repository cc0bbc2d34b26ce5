"""Labels and ids that a loader gives as floats train as integers do, in every precision and way."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import check_words, refused
from zerojax.zoo import Llama, LlamaConfig

VOCAB, ROWS = 700, 32
PRECISIONS = ("fp32", "bf16", "fp16")


class Classifier(nnx.Module):
    """Its loss makes integers of ids and labels, and measures the accuracy of a comparison."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.head = nnx.Linear(8, VOCAB, rngs=rngs)

    def loss(self, batch):
        scores = self.head(self.table(batch["ids"].astype(jnp.int32))).astype(jnp.float32)
        scores = scores * batch["scale"][:, None].astype(jnp.float32)
        labels = (batch["labels"] - 1).astype(jnp.int32)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        right = batch["far"] > 500
        return jnp.mean(losses), {
            "right": jnp.mean(jnp.argmax(scores, -1) + 1 == batch["labels"]),
            "far": jnp.mean(right),
        }


def batch_of(dtype: Any, rows: int = ROWS) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    labels = rng.integers(1, VOCAB, rows)
    return {
        "ids": rng.integers(0, VOCAB, rows).astype(dtype),
        "labels": labels.astype(dtype),
        "far": np.where(np.arange(rows) % 2, 501, 500).astype(dtype),
        "scale": np.linspace(1, 2, rows).astype(np.float32),
    }


def trained(dtype: Any, mesh: Any, precision: str, **settings: Any) -> tuple[Any, ...]:
    batch = batch_of(dtype)
    trainer = zerojax.train(
        nnx.clone(Classifier(nnx.Rngs(0))),
        mesh,
        [batch],
        optimizer=zerojax.sgd(1.0),
        steps=3,
        precision=precision,
        run_dir=None,
        log=zerojax.LogConfig(console="quiet", every=1),
        **settings,
    )
    names = ("loss", "right", "far")
    steps = [[step[name] for name in names] for step in trainer.history]
    found = trainer.evaluate([batch_of(dtype), batch_of(dtype, ROWS - 5)])
    return steps, [found[name] for name in names], trainer.plan


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero 0": ({"zero": 0}, {}),
    "zero 1": ({"zero": 1}, {}),
    "zero 2": ({"zero": 2}, {}),
    "zero 3": ({"zero": 3}, {}),
    "microbatches": ({"zero": 1}, {"num_microbatches": 2}),
    "model axis": ({"zero": 3, "model": 2}, {}),
    "ramp": (
        {"zero": 1},
        {
            "batch_ramp": zerojax.BatchRampConfig(start=16, increment=16, ramp_rows=32),
            "global_batch_size": ROWS,
        },
    ),
    "deterministic": ({"zero": 2}, {"deterministic": "mesh"}),
    "offload": ({"zero": 3, "offload": {"opt_state": "host"}}, {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("way", "precision"), list(itertools.product(WAYS, PRECISIONS)))
def test_floats_train_as_integers(way, precision):
    mesh, settings = WAYS[way]
    wanted, floats = (
        trained(dtype, mesh, precision, **settings) for dtype in (np.int32, np.float32)
    )
    assert floats[:2] == wanted[:2]
    assert set(floats[2].traced.exact_leaves) == {"ids", "labels", "far"}


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("mesh", [{"zero": 1}, {"zero": 3}, {"stage": 2}])
def test_float_targets_of_a_decoder(mesh, precision):
    config = LlamaConfig(
        vocab_size=VOCAB, num_layers=2, num_heads=2, embed_dim=16, mlp_dim=16, max_seq_len=8
    )
    tokens = np.random.default_rng(0).integers(0, VOCAB, (16, 9)).astype(np.int32)

    def loss(dtype):
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].astype(dtype)}
        trainer = zerojax.train(
            Llama(config, rngs=nnx.Rngs(0)),
            mesh,
            [batch],
            optimizer=zerojax.sgd(1e-2),
            steps=2,
            precision=precision,
            run_dir=None,
            log=zerojax.LogConfig(console="quiet", every=1),
        )
        return [step["loss"] for step in trainer.history]

    assert loss(np.float32) == loss(np.int32)


def test_other_16_bit_floats_are_kept_too():
    """float16 has all integers up to 2048, and bfloat16 does not."""
    wanted = trained(np.int32, {"zero": 1}, "bf16")
    assert trained(np.float16, {"zero": 1}, "bf16")[:2] == wanted[:2]


def ids_of(dtype: Any, value: float) -> dict[str, Any]:
    return {"x": np.ones((8, 4), np.float32), "y": np.full(8, value, dtype)}


def ids_model() -> Any:
    return (lambda key: {"w": jnp.ones(4)}, lambda params, x: x @ params["w"])


def loss_of_ids(model, batch):
    return jnp.mean(model(batch["x"]) * (batch["y"] % 3 == 0))


def plan_of_ids() -> Any:
    example = ids_of(np.float64, 0)
    return zerojax.make_plan(ids_model(), {"zero": 1}, example_batch=example, loss=loss_of_ids)


def test_float64_ids_that_float32_lacks_are_refused():
    plan, last = plan_of_ids(), 2**24
    place = lambda batch: zerojax.shard_batch(plan, batch)  # noqa: E731
    assert int(place(ids_of(np.float64, last))["y"][0]) == last
    place(ids_of(np.float64, 0.1))  # no id, and compared as float32
    place({**ids_of(np.float64, 1), "x": np.full((8, 4), 2.0**24 + 1)})  # an input of a layer
    refused(lambda: place(ids_of(np.float64, last + 1)), ["'y'", last + 1], "integers int64")


@pytest.mark.thorough
def test_a_check_says_that_float64_ids_are_lost():
    ids = ids_of(np.float64, 2**24 + 1)
    found = zerojax.check(ids_model(), ids, loss=loss_of_ids, devices=2, steps=1)
    assert not found.agrees
    check_words(found.reasons[0].sentence, ["'y'", 2**24 + 1], "integers int64")


@pytest.mark.slow
def test_a_check_agrees_on_float_labels():
    """It compares with plain JAX on the user's own dtypes."""
    batch = {name: leaf.astype(np.float32) for name, leaf in batch_of(np.int32).items()}
    assert zerojax.check(Classifier, batch, devices=2).agrees
