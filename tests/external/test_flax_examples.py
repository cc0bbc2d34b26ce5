"""Flax's own example models train as they are: nothing of them is changed, copied or wrapped.

    FLAX_CHECKOUT=/path/to/flax python -m pytest -m slow tests/external/test_flax_examples.py

A checkout is read from that folder, so these are skipped where there is none. Last run with
google/flax at 18f8f311c275. What the examples import to read data (tensorflow and the like) is
replaced by stand-ins; the models and the training step that is compared with do not use it.

Not among them: `imagenet/`, whose batch norm names an axis of `jax.pmap`, which zerojax does not
have (a test shows what is said), `ogbg_molpcba/`, which needs jraph, and programs that are
scripts from the first line on.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import checkpoints  # noqa: F401  asks how tensorflow is installed
from flax.training.train_state import TrainState

from tests.support.trajectories import TOLERANCE, advance, plan_for, train_for
from zerojax.data.corpus import read_text
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state
from zerojax.training.entry import train

CHECKOUT = os.environ.get("FLAX_CHECKOUT")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FLAX_CHECKOUT names no checkout of google/flax"),
]

STAND_INS = (
    "clu",
    "flax.metrics.tensorboard",
    "jaxtyping",  # annotations
    "ml_collections",
    "sentencepiece",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_text",
)
STEPS = 8
ROWS = 16


@pytest.fixture(autouse=True)
def _promoting_ranks():
    """Gemma multiplies arrays of different rank, as users may; our own code never does."""
    with jax.numpy_rank_promotion("allow"):
        yield


def load(path: str) -> ModuleType:
    """A module of the checkout, executed as it lies there, beside its own neighbours."""
    file = Path(CHECKOUT or "", "examples", path)
    stand_ins = {name: mock.MagicMock(name=name) for name in STAND_INS}
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(sys, "path", list(sys.path)):
        sys.path.insert(0, str(file.parent))
        importlib.invalidate_caches()
        spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look there for the names of annotations
        spec.loader.exec_module(module)
        return module


def tokens(step: int, vocab: int = 50) -> np.ndarray:
    return np.random.default_rng(step % 4).integers(1, vocab, (ROWS, 24)).astype(np.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@dataclasses.dataclass(frozen=True)
class Example:
    """A model of the checkout, a loss as its script has it, and batches of its shapes.

    `devices` is 1 where one device computes the same; 8 where each device has batch statistics or
    noise of its own, so that stage 0 on the same devices is what can be compared with.
    """

    model: Any
    batch: Callable[[int], dict[str, np.ndarray]]
    loss: Callable[[Any, Any], Any]
    devices: int = 1


SMALL = {"emb_dim": 32, "num_heads": 4, "num_layers": 2, "qkv_dim": 32, "mlp_dim": 64}
NO_DROPOUT = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}


def translation() -> Example:
    """`wmt/`: an encoder and a decoder that share their embedding."""
    models = load("wmt/models.py")
    config = models.TransformerConfig(
        vocab_size=50,
        output_vocab_size=50,
        share_embeddings=True,
        logits_via_embedding=True,
        max_len=32,
        **SMALL,
        **NO_DROPOUT,
    )
    return Example(
        models.Transformer(config),
        lambda step: {"inputs": tokens(step), "targets": tokens(step + 1)},
        lambda model, batch: cross_entropy(
            model(batch["inputs"], batch["targets"]), batch["targets"]
        ),
    )


def tagging() -> Example:
    """`nlp_seq/`: a tag for each word."""
    models = load("nlp_seq/models.py")
    config = models.TransformerConfig(
        vocab_size=50, output_vocab_size=12, max_len=32, **SMALL, **NO_DROPOUT
    )
    return Example(
        models.Transformer(config),
        lambda step: {"words": tokens(step), "tags": tokens(step) % 12},
        lambda model, batch: cross_entropy(
            model(inputs=batch["words"], train=model.training), batch["tags"]
        ),
    )


def sentiment() -> Example:
    """`sst2/`: an LSTM in both directions, and attention over what it gives."""
    models = load("sst2/models.py")

    def batch(step: int) -> dict[str, np.ndarray]:
        lengths = np.random.default_rng(step).integers(5, 20, ROWS).astype(np.int32)
        return {"words": tokens(step), "lengths": lengths}

    def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model(batch["words"], batch["lengths"], deterministic=not model.training)
        labels = (batch["words"][:, :1] % 2).astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    return Example(models.TextClassifier(16, 32, 50, 1, 0.0, 0.0), batch, loss)


def addition() -> Example:
    """`seq2seq/`: LSTM cells in `nn.RNN`, with a random stream of a name of their own."""
    models = load("seq2seq/models.py")

    def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        one_hot = jax.nn.one_hot(batch["digits"], 12)
        logits, _ = model(one_hot, one_hot)
        return cross_entropy(logits, batch["digits"][:, 1:])

    model = models.Seq2seq(teacher_force=True, hidden_size=32, vocab_size=12)
    return Example(model, lambda step: {"digits": tokens(step, vocab=12)}, loss)


def actor_critic() -> Example:
    """`ppo/`: convolutions over frames of a game, and two heads."""
    models = load("ppo/models.py")

    def batch(step: int) -> dict[str, np.ndarray]:
        frames = np.random.default_rng(step % 4).integers(0, 255, (ROWS, 84, 84, 4))
        return {"frames": frames.astype(np.uint8)}

    def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        log_probabilities, value = model(batch["frames"])
        return -log_probabilities[:, 0].mean() + ((value - 1) ** 2).mean()

    return Example(models.ActorCritic(num_outputs=4), batch, loss)


def autoencoder() -> Example:
    """`vae/`: its noise has the batch's shape, so it is another one on another mesh."""
    models = load("vae/models.py")

    def batch(step: int) -> dict[str, np.ndarray]:
        images = np.random.default_rng(step % 4).uniform(size=(ROWS, 784))
        return {"images": images.astype(np.float32)}

    def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        rebuilt, mean, logvar = model(batch["images"], jax.random.key(0))
        divergence = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(axis=-1)
        error = optax.sigmoid_binary_cross_entropy(rebuilt, batch["images"]).sum(axis=-1)
        return (error + divergence).mean() / 784

    return Example(models.model(8), batch, loss, devices=8)


def scanned() -> Example:
    """`nnx_toy_examples/06`: `nnx.scan` over layers with batch norm and dropout."""
    models = load("nnx_toy_examples/06_scan_over_layers.py")

    def batch(step: int) -> dict[str, np.ndarray]:
        x = np.random.default_rng(step % 4).normal(size=(ROWS, 16))
        return {"x": x.astype(np.float32)}

    def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return ((model(batch["x"]) - jnp.sin(batch["x"])) ** 2).mean()

    return Example(lambda rngs: models.ScanMLP(16, n_layers=4, rngs=rngs), batch, loss, devices=8)


class Drawing(nnx.Module):
    """Beside the MNIST network, which is given its random streams from outside: those streams."""

    def __init__(self, network: nnx.Module, rngs: nnx.Rngs):
        self.network = network
        self.rngs = rngs


def handwriting() -> Example:
    """`mnist/`: convolutions with batch norm and dropout, and the script's own loss."""
    theirs = load("mnist/train.py")
    images, labels = digits()

    def batch(step: int) -> dict[str, np.ndarray]:
        chosen = np.random.default_rng(step).integers(0, NUM_TRAINED, 64)
        return {"image": images[chosen], "label": labels[chosen]}

    def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return theirs.loss_fn(model.network, batch, model.rngs)[0]

    return Example(lambda rngs: Drawing(theirs.CNN(rngs), rngs), batch, loss, devices=8)


NUM_TRAINED = 1500


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's 1,797 scanned digits in the size of MNIST, [n, 28, 28, 1] in 0..1."""
    datasets = pytest.importorskip("sklearn.datasets")
    scanned = datasets.load_digits()
    enlarged = np.repeat(np.repeat(scanned.images / 16, 3, axis=1), 3, axis=2)
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))[..., None]
    return images.astype(np.float32), scanned.target.astype(np.int32)


def gemma() -> Example:
    """`gemma/`: Gemma 3's block in nnx, with grouped heads, local and global attention."""
    models = load("gemma/transformer.py")
    kinds = models.modules.AttentionType
    config = models.TransformerConfig.from_dict(
        num_layers=2,
        num_embed=50,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=8,
    )

    def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        words = batch["words"]
        mask = models.make_causal_attn_mask(words > 0)
        places = models.build_positions_from_mask(words > 0)
        logits, _ = model(words, places, None, mask, rngs=None)
        return cross_entropy(logits[:, :-1], words[:, 1:])

    return Example(
        lambda rngs: models.Transformer(config, rngs=rngs),
        lambda step: {"words": tokens(step)},
        loss,
    )


MODELS = [
    translation,
    tagging,
    sentiment,
    addition,
    actor_critic,
    autoencoder,
    scanned,
    handwriting,
    gemma,
]


@pytest.mark.parametrize("make", MODELS)
def test_a_model_of_the_examples_at_stage_3_follows_stage_0(make):
    example = make()
    options = {"batch": example.batch, "loss": example.loss, "steps": STEPS}
    expected = train_for(example.model, devices=example.devices, **options)
    run = train_for(example.model, zero=3, persistence_threshold=0, **options)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)
    params = jax.tree.leaves(run.state["params"])
    assert not any(leaf.is_fully_replicated for leaf in params if leaf.size >= 8)


def test_the_mnist_network_learns_to_read_digits():
    example = handwriting()
    images, labels = digits()
    trainer = train(
        example.model,
        {"zero": 3, "persistence_threshold": 0},
        example.batch,
        loss=example.loss,
        optimizer=optax.sgd(0.1, 0.9),  # the values of the example's configuration
        steps=120,
        run_dir=None,
    )
    network = trainer.to_model().network
    network.eval()
    guesses = network(images[NUM_TRAINED:], None).argmax(axis=1)
    accuracy = (guesses == labels[NUM_TRAINED:]).mean()
    assert accuracy > 0.9


def test_batch_norm_over_an_axis_of_pmap_is_not_for_zerojax():
    """`imagenet/`: the one model that was tried and does not train."""
    models = load("imagenet/models.py")

    def batch(step: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(step)
        return {"images": random.normal(size=(ROWS, 32, 32, 3)).astype(np.float32)}

    model = models._ResNet1(num_classes=10, num_filters=8)
    with pytest.raises(ValueError, match="an axis named 'batch', as under jax.pmap"):
        plan_for(model, batch=batch, loss=lambda model, batch: model(batch["images"]).mean())


def test_the_language_model_follows_its_own_training_step():
    """`lm1b/`: its `TransformerLM` and its loss under ZeRO-3, beside its own `train_step`."""
    theirs = load("lm1b/train.py")
    config = theirs.models.TransformerConfig(
        vocab_size=257, output_vocab_size=257, max_len=64, **SMALL, **NO_DROPOUT
    )
    model = theirs.models.TransformerLM(config)
    text = np.frombuffer(read_text().encode(), np.uint8).astype(np.int32) + 1  # 0 is padding

    def batch(step: int) -> dict[str, np.ndarray]:
        starts = np.random.default_rng(step).integers(0, len(text) - 48, ROWS)
        return {"inputs": np.stack([text[start : start + 48] for start in starts])}

    def loss(model: Any, batch: dict[str, jax.Array]) -> Any:
        weights = (batch["inputs"] > 0).astype(jnp.float32)
        return theirs.compute_weighted_cross_entropy(
            model(batch["inputs"]), batch["inputs"], weights
        )

    optimizer = optax.adamw(3e-3, eps=1e-5)
    plan = plan_for(model, batch=batch, loss=loss, optimizer=optimizer, zero=3)
    state = init_state(plan, seed=0)
    start = jax.tree.map(np.asarray, to_portable_state(plan, state)["params"])
    run = advance(plan, state, range(STEPS), batch=batch)

    own = TrainState.create(apply_fn=model.apply, params=nested(start), tx=optimizer)
    key, losses = jax.random.key(0), []
    for step in range(STEPS):
        own, metrics = theirs.train_step(own, batch(step), config, lambda count: 3e-3, 0.0, key)
        losses.append(float(metrics["loss"] / metrics["denominator"]))
    np.testing.assert_allclose(run.losses, losses, rtol=0, atol=TOLERANCE)
    assert run.losses[-1] < run.losses[0] - 1


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}."""
    made: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return made
