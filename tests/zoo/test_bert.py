"""BERT is what transformers computes, and trains alike on every mesh."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support import bert_weights as tiny
from tests.support.marks import slow
from tests.support.trajectories import ROWS, TOLERANCE, train_for
from zerojax.zoo import Bert, BertConfig, generate
from zerojax.zoo.hugging_face import Leaf
from zerojax.zoo.hugging_face.bert_weights import BERT_ROW

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "bert_reference.json").read_text())
CONFIG = BertConfig(
    vocab_size=tiny.SIZES["vocab_size"],
    max_seq_len=tiny.SIZES["max_position_embeddings"],
    num_layers=tiny.SIZES["num_hidden_layers"],
    num_heads=tiny.SIZES["num_attention_heads"],
    embed_dim=tiny.SIZES["hidden_size"],
    mlp_dim=tiny.SIZES["intermediate_size"],
    has_pooler=True,
)
BATCH = {
    "tokens": tiny.TOKENS,
    "targets": tiny.TARGETS,
    "weights": tiny.WEIGHTS,
    "attention_mask": tiny.ATTENTION_MASK,
    "token_types": tiny.TOKEN_TYPES,
}


LEAVES = {leaf.name: leaf for leaf in BERT_ROW.leaves(CONFIG)}


def value_of(leaf: Leaf, shape: tuple[int, ...], layer: int = 0) -> np.ndarray:
    """A parameter of ours, of one layer, of what transformers has under its name."""
    theirs = tiny.weight(leaf.tensor_of(layer), leaf.layout.their_shape(shape))
    return leaf.layout.to_ours(theirs, [(0, size) for size in shape])


def per_layer(name: str, value: Any) -> list[tuple[str, Any]]:
    """(transformers' name, array) of each layer of a stack, or of a single parameter."""
    leaf = LEAVES[name]
    if not leaf.is_stacked:
        return [(leaf.tensor, value)]
    return [(leaf.tensor_of(layer), value[layer]) for layer in range(value.shape[0])]


def flat(state: Any) -> dict[str, Any]:
    return {
        "/".join(map(str, path)): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(state)
    }


@functools.cache
def initial(config: BertConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The model with the weights of `bert_weights`."""
    model = nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def fill(path: tuple[Any, ...], variable: Any) -> Any:
        leaf, shape = LEAVES["/".join(map(str, path))], variable.get_raw_value().shape
        if not leaf.is_stacked:
            return variable.replace(jnp.asarray(value_of(leaf, shape)))
        rows = [value_of(leaf, shape[1:], layer) for layer in range(shape[0])]
        return variable.replace(jnp.asarray(np.stack(rows)))

    filled = [(path, fill(path, variable)) for path, variable in nnx.to_flat_state(state)]
    return graphdef, nnx.from_flat_state(filled)


def build(config: BertConfig = CONFIG) -> Bert:
    return nnx.merge(*initial(config), copy=True)


@functools.cache
def loss_and_gradients(remat: str, positions: bool = False) -> tuple[float, dict[str, Any]]:
    graphdef, state = initial(
        CONFIG if remat == "none" else dataclasses.replace(CONFIG, remat=remat)
    )
    batch = dict(BATCH)
    if positions:
        batch["positions"] = tiny.POSITIONS
        for name in ("targets", "weights"):
            batch[name] = np.take_along_axis(batch[name], tiny.POSITIONS, axis=1)

    def loss(state: nnx.State) -> jax.Array:
        return nnx.merge(graphdef, state).loss(batch)[0]

    value, grads = jax.jit(jax.value_and_grad(loss))(state)
    return float(value), flat(grads)


# Beside transformers


@pytest.mark.thorough
def test_hidden_states_logits_and_pooled_output_are_those_of_transformers() -> None:
    expected, model = REFERENCE["gelu"], build()
    inputs = tiny.TOKENS, tiny.ATTENTION_MASK, tiny.TOKEN_TYPES
    hidden, logits = jax.jit(lambda *x: (model.hidden(*x), model(*x)))(*inputs)
    real = tiny.ATTENTION_MASK.astype(bool)  # what lies at padding has no meaning
    close(np.asarray(hidden)[real], np.array(expected["hidden"])[real])
    close(model.pool(hidden), expected["pooled"])
    close(np.asarray(logits)[real], np.array(expected["logits"])[real])


@pytest.mark.thorough
def test_the_other_gelu_is_the_other_gelu() -> None:
    model = build(dataclasses.replace(CONFIG, exact_gelu=False))
    batch_loss, weight = jax.jit(model.loss)(BATCH)
    np.testing.assert_allclose(batch_loss, REFERENCE["gelu_new"]["loss"], rtol=1e-6)
    assert abs(REFERENCE["gelu_new"]["loss"] - REFERENCE["gelu"]["loss"]) > 1e-4
    assert weight == tiny.WEIGHTS.sum()


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", slow("full"), slow("dots")])
def test_loss_and_gradients_are_those_of_transformers(remat: str) -> None:
    """Attention's key biases are left out: their gradient is zero but for rounding."""
    loss, grads = loss_and_gradients(remat)
    np.testing.assert_allclose(loss, REFERENCE["gelu"]["loss"], rtol=1e-6)
    expected = dict(REFERENCE["gelu"]["gradient_norms"])
    norms = {
        name: float(np.linalg.norm(np.asarray(value, np.float64)))
        for ours, stacked in grads.items()
        for name, value in per_layer(ours, stacked)
    }
    assert {name for name in norms if norms[name]} >= set(expected)
    for name, norm in expected.items():
        if not name.endswith("key.bias"):
            np.testing.assert_allclose(norms[name], norm, rtol=2e-5, err_msg=name)


@pytest.mark.thorough
def test_logits_at_positions_alone_give_the_same_loss_and_gradients() -> None:
    loss, grads = loss_and_gradients("none")
    other, other_grads = loss_and_gradients("none", positions=True)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(other_grads[name], grad, rtol=1e-5, atol=2e-5, err_msg=name)


def close(ours: Any, theirs: Any) -> None:
    """Two layers in float32, the sums in another order: 2e-6 of values of about 1."""
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-5)


# What the model promises


@pytest.mark.thorough
def test_padding_changes_nothing() -> None:
    embed_texts, rows = jax.jit(build().embed_texts), tiny.TOKENS[1:, :5]
    alone = embed_texts(rows)
    garbage = np.concatenate([rows, [[11, 3, 19]]], axis=1)
    close(embed_texts(garbage, tiny.ATTENTION_MASK[1:]), alone)
    assert np.abs(np.asarray(embed_texts(garbage)) - np.asarray(alone)).max() > 1e-2
    np.testing.assert_allclose(np.linalg.norm(alone, axis=-1), 1.0, rtol=1e-6)


def test_every_token_sees_both_sides() -> None:
    hidden, tokens = jax.jit(build().hidden), tiny.TOKENS[:1]
    changed = tokens.copy()
    changed[0, 4] = 11
    difference = np.abs(np.asarray(hidden(changed) - hidden(tokens))).max(axis=-1)
    assert (difference > 1e-4).all()


@pytest.mark.parametrize("has_head", [True, False])
def test_the_number_of_parameters_is_said_beforehand(has_head: bool) -> None:
    config = BertConfig(has_mlm_head=has_head, has_pooler=not has_head)
    model = nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0)))
    counted = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert config.num_parameters == counted
    # transformers 5.23: 109,514,298 of BertForMaskedLM, 109,482,240 of BertModel.
    assert counted == (109_514_298 if has_head else 109_482_240)


@pytest.mark.thorough
def test_what_it_cannot_do_is_said() -> None:
    bare = build(dataclasses.replace(CONFIG, has_mlm_head=False, has_pooler=False))
    with pytest.raises(ValueError, match="has_mlm_head=False"):
        bare(tiny.TOKENS)
    with pytest.raises(ValueError, match="'positions' or 'weights'.*as_masked_source"):
        zerojax.train(factory(max_seq_len=32, vocab_size=256), {"data": 8}, run_dir=None)
    with pytest.raises(TypeError, match="Bert cannot continue texts"):
        generate(bare, np.zeros((1, 2), np.int32), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has_pooler=True"):
        bare.pool(jnp.zeros((1, 2, 16)))
    with pytest.raises(ValueError, match="num_types=0"):
        BertConfig(num_types=0)
    with pytest.raises(ValueError, match="at most max_seq_len=12"):
        bare.hidden(np.zeros((1, 13), np.int32))


def test_rules_split_every_matrix_of_a_layer_and_the_vocabulary() -> None:
    names = flat(nnx.state(build(), nnx.Param))
    split = {n for n in names if any(re.search(r, n) for r, _ in Bert.tensor_parallel_rules)}
    assert split == {
        *(f"blocks/attention/{part}/kernel" for part in ("query", "key", "value", "output")),
        *(f"blocks/attention/{part}/bias" for part in ("query", "key", "value")),
        *(f"blocks/mlp/{name}" for name in ("up/kernel", "up/bias", "down/kernel")),
        "token_embedding/embedding",
        "mlm_head/bias",
    }


# Training


def masked_batch(index: int) -> dict[str, np.ndarray]:
    """Random tokens with padding of several lengths; four places of a row are asked for."""
    random = np.random.default_rng(index % 4)
    targets = random.integers(3, 23, (ROWS, 12), np.int32)
    positions = np.tile(np.array([0, 2, 5, 7], np.int32), (ROWS, 1))
    tokens = targets.copy()
    np.put_along_axis(tokens, positions, 1, axis=1)
    lengths = random.integers(6, 13, (ROWS, 1))
    attention_mask = (np.arange(12) < lengths).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": np.take_along_axis(targets, positions, axis=1),
        "positions": positions,
        "weights": np.take_along_axis(attention_mask, positions, axis=1).astype(np.float32),
        "attention_mask": attention_mask,
        "token_types": (np.arange(12) * np.ones((ROWS, 1), np.int32) > 4).astype(np.int32),
    }


def factory(**changes: Any) -> Any:
    options: dict[str, Any] = {"vocab_size": 24, "num_layers": 4, "has_pooler": False, **changes}
    config = dataclasses.replace(CONFIG, **options)
    return lambda rngs: Bert(config, rngs=rngs)


@functools.cache
def alone(dropout: float = 0.0) -> Any:
    return train_for(
        factory(dropout=dropout), devices=1, batch=masked_batch, num_microbatches=4, steps=6
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "zero", "dropout", "remat"),
    [
        slow({"data": 1, "stage": 2}, 1, 0.0, "none"),
        slow({"data": 2, "stage": 2, "model": 2}, 3, 0.0, "none"),
        slow({"data": 4, "model": 2}, 3, 0.0, "full"),
        slow({"data": 8}, 0, 0.0, "dots"),
        ({"data": 8}, 2, 0.0, "full"),
        slow({"data": 2, "stage": 4}, 3, 0.0, "full"),
        slow({"data": 1, "stage": 2}, 2, 0.1, "full"),
    ],
)
def test_every_mesh_trains_as_one_device(
    mesh: dict[str, int], zero: int, dropout: float, remat: str
) -> None:
    """Padding masks travel over the pipeline's stages beside the activations.

    With dropout the batch is not cut over `data`: each shard draws its own.
    """
    expected = alone(dropout)
    assert expected.losses[4] < expected.losses[0] - 0.01  # the same batch
    run = train_for(
        factory(dropout=dropout, remat=remat),
        devices=math.prod(mesh.values()),
        mesh=mesh,
        zero=zero,
        batch=masked_batch,
        num_microbatches=4,
        persistence_threshold=50,
        steps=6,
    )
    np.testing.assert_allclose(run.losses, expected.losses, atol=TOLERANCE)
