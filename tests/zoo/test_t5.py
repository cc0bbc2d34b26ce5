"""T5: the numbers of transformers', in and out of its files, on any mesh, and token by token."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import zerojax
from tests.support.hugging_face_weights import weights_of_t5
from tests.support.trajectories import TOLERANCE, advance
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.training.trainer import Trainer
from zerojax.zoo import T5, T5Config, generate, generate_from_source
from zerojax.zoo.hugging_face import UnsupportedError, from_hugging_face
from zerojax.zoo.t5 import relative_bucket

CASES = json.loads((Path(__file__).parents[1] / "data" / "t5.json").read_text())["cases"]
SIZES = {"vocab_size": 24, "embed_dim": 16, "head_dim": 6, "mlp_dim": 32, "num_heads": 2}
SIZES |= {"num_layers": 2, "num_decoder_layers": 3, "relative_buckets": 8}
SIZES |= {"relative_max_distance": 12, "max_seq_len": 32}


def t5(rngs: nnx.Rngs | None = None, **changes) -> T5:
    return T5(T5Config(**SIZES | changes), rngs=rngs or nnx.Rngs(0))


def batch(number: int, rows: int = 16) -> dict[str, np.ndarray]:
    """Sources of several lengths, and targets of others."""
    random = np.random.default_rng(number % 4)
    lengths, ends = random.integers(4, 11, (rows, 1)), random.integers(2, 8, (rows, 1))
    return {
        "tokens": random.integers(2, 24, (rows, 10), np.int32),
        "attention_mask": (np.arange(10) < lengths).astype(np.int32),
        "targets": random.integers(2, 24, (rows, 7), np.int32),
        "weights": (np.arange(7) < ends).astype(np.float32),
    }


# --- Hugging Face ---------------------------------------------------------------------------------


def tensors_of(case: str) -> dict[str, np.ndarray]:
    return {name: weights_of_t5(name, shape) for name, shape in CASES[case]["tensors"].items()}


def write_folder(folder: Path, case: str, **changes) -> Path:
    """As transformers leaves it, but where a head of its own is: then so says config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    has_head = {"tie_word_embeddings": False} if "lm_head.weight" in CASES[case]["tensors"] else {}
    config = {**CASES[case]["config"], **has_head, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def arguments_of(case: str) -> tuple[jax.Array, ...]:
    names = ("tokens", "targets", "attention_mask")
    return tuple(jnp.asarray(CASES[case][name], jnp.int32) for name in names)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(case, tmp_path):
    """Theirs in float64, ours in float32: relative to each array's largest 1e-5."""
    wanted = CASES[case]
    pretrained = from_hugging_face(write_folder(tmp_path, case))
    assert all(part in pretrained.notes[0] for part in ("dropout_rate=0.1", "dropout=0.0"))
    model = pretrained.to_model()
    tokens, targets, mask = arguments_of(case)
    logits = jax.jit(lambda *rows: model(*rows))(tokens, targets, mask)
    expected = np.asarray(wanted["last_logits"])
    np.testing.assert_allclose(logits[:, -3:], expected, atol=1e-5 * np.abs(expected).max())
    rows = {"tokens": tokens, "targets": targets, "attention_mask": mask}
    graphdef, state = nnx.split(model)

    def mean_loss(state: nnx.State) -> jax.Array:
        total, weight = nnx.merge(graphdef, state).loss(rows)
        return total / weight

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(state)
    assert float(loss) == pytest.approx(wanted["loss"], rel=1e-6)
    by_name = {"/".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(gradients)}
    leaves = {}
    for leaf in pretrained.row.leaves(pretrained.config):
        for layer in range(3 if leaf.is_stacked else 1):
            leaves[leaf.tensor_of(layer)] = (leaf, layer)
    for name, values in wanted["gradients"].items():
        leaf, layer = leaves[name]
        ours = np.asarray(by_name[leaf.name])
        ours = leaf.layout.as_theirs(ours[layer] if leaf.is_stacked else ours)
        expected = np.asarray(values).reshape(ours.shape)
        limit = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(ours, expected, atol=limit, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_targets_are_drawn_as_by_transformers(case, tmp_path):
    model = from_hugging_face(write_folder(tmp_path, case)).to_model()
    tokens, _, mask = arguments_of(case)
    drawn = generate_from_source(model, tokens, 12, attention_mask=mask)
    np.testing.assert_array_equal(drawn, CASES[case]["drawn"])


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_files_come_out_as_they_went_in(case, tmp_path):
    folder = write_folder(tmp_path / "in", case)
    rows = {name: values % 21 for name, values in batch(0).items() if name != "weights"}
    plan = make_plan(from_hugging_face(folder), make_mesh({"data": 8}), example_batch=rows, zero=3)
    trainer = Trainer(plan)
    zerojax.to_hugging_face(trainer, tmp_path / "out")
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), tensors_of(case)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].tobytes() == values.tobytes(), name
    again = from_hugging_face(tmp_path / "out")
    assert again.config == from_hugging_face(folder).config


def test_output_weights_that_are_no_copy_are_refused_with_what_to_write(tmp_path):
    """Transformers 5 writes that they are tied, and uses those of the file."""
    folder = write_folder(tmp_path / "head", "version_1_1", tie_word_embeddings=True)
    with pytest.raises(UnsupportedError, match=r'write "tie_word_embeddings": false'):
        from_hugging_face(folder)
    tensors = tensors_of("first")
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    save_file(
        tensors | dict.fromkeys(copies, tensors["shared.weight"]), folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CASES["first"]["config"]))
    assert set(from_hugging_face(folder).left_out) == copies


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj='gated-silu'"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False"),
        ({"d_kv": None}, "no 'd_kv'"),
    ],
)
def test_another_model_is_refused_by_its_key(changes, words, tmp_path):
    with pytest.raises(UnsupportedError, match=words):
        from_hugging_face(write_folder(tmp_path, "first", **changes))


# --- training -------------------------------------------------------------------------------------


def losses_on(mesh: dict[str, int], *, devices: int = 8, **options) -> np.ndarray:
    model = {name: options.pop(name) for name in ("remat", "gated_gelu") if name in options}
    plan = make_plan(
        functools.partial(t5, **model),
        make_mesh(mesh, devices=jax.devices()[:devices]),
        example_batch=batch(0),
        precision="fp32",
        persistence_threshold=0,
        **options,
    )
    return advance(plan, init_state(plan, seed=1), range(6), batch=batch).losses


@functools.cache
def losses_on_one_device() -> np.ndarray:
    return losses_on({"data": 1}, devices=1, zero=0)


WAYS = {
    "zero 0": {"mesh": {"data": 8}, "zero": 0},
    "zero 1": {"mesh": {"data": 8}, "zero": 1},
    "zero 2, two microbatches": {"mesh": {"data": 8}, "zero": 2, "num_microbatches": 2},
    "zero 3": {"mesh": {"data": 8}, "zero": 3},
    "zero 3, remat": {"mesh": {"data": 8}, "zero": 3, "remat": "full"},
    "zero 3, tensor parallel": {"mesh": {"data": 4, "model": 2}, "zero": 3},
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_one_device(way):
    found = losses_on(**WAYS[way])
    np.testing.assert_allclose(found, losses_on_one_device(), atol=TOLERANCE, rtol=0)
    assert found[4] < found[0] - 0.01


def test_each_layer_is_gathered_by_itself_at_stage_3():
    mesh = make_mesh({"data": 8})
    plan = make_plan(t5, mesh, example_batch=batch(0), zero=3, persistence_threshold=0)
    whole = (
        "26 of 26 parameters are gathered on use in the forward pass and again in the backward pass"
    )
    assert any(reason.startswith(whole) for reason in plan.reasons), plan.reasons


def test_pipeline_stages_are_refused_with_both_loops():
    with pytest.raises(ValueError, match=r"has 2 loops .*encoder/blocks.*decoder/blocks"):
        make_plan(t5, make_mesh({"data": 4, "stage": 2}), example_batch=batch(0))


@pytest.mark.thorough
def test_an_encoded_source_is_held_once_and_not_by_layer():
    """With `remat` a layer keeps its input alone: no array of layers x source is in the step."""
    plan = make_plan(
        functools.partial(t5, remat="full", num_decoder_layers=5),
        make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch=batch(0),
        precision="fp32",
    )
    program = build_step(plan).trace(plan.abstract_state, plan.abstract_batch).lower().as_text()
    assert "tensor<5x16x7x16xf32>" in program, "inputs of the decoder's layers"
    assert "tensor<5x16x10x16xf32>" not in program, "the encoded source"
    assert "tensor<5x2x7x7xf32>" not in program, "position biases"


@pytest.mark.thorough
def test_padding_changes_nothing():
    model, rows = t5(), batch(3)
    other = dict(rows)
    other["tokens"] = np.where(rows["attention_mask"] == 0, 5, rows["tokens"])
    other["targets"] = np.where(rows["weights"] == 0, 5, rows["targets"])
    loss = jax.jit(lambda rows: model.loss(rows)[0])
    assert float(loss(rows)) == float(loss(other))


@pytest.mark.thorough
def test_a_loss_in_chunks_is_the_loss():
    rows = batch(2)
    for changes in ({}, {"tie_embeddings": False, "gated_gelu": True}):
        wanted = jax.jit(t5(**changes).loss)(rows)
        found = jax.jit(t5(**changes, loss_chunk=4).loss)(rows)
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


# --- positions and targets ------------------------------------------------------------------------


def test_buckets_are_those_of_the_paper():
    offsets = np.array([-200, -128, -127, -16, -15, -8, -7, -1, 0, 1, 7, 8, 15, 16, 127, 128])
    both = relative_bucket(jnp.asarray(offsets), num_buckets=32, max_distance=128, is_causal=False)
    assert both.tolist() == [15, 15, 15, 10, 9, 8, 7, 1, 0, 17, 23, 24, 25, 26, 31, 31]
    before = relative_bucket(jnp.asarray(offsets), num_buckets=32, max_distance=128, is_causal=True)
    assert before.tolist() == [31, 31, 31, 16, 15, 8, 7, 1, *[0] * 8]


@pytest.mark.thorough
@pytest.mark.parametrize("gated", [False, True])
def test_the_cache_gives_the_logits_of_the_whole_pass(gated):
    model, rows = t5(gated_gelu=gated), batch(1, rows=3)
    tokens, mask = jnp.asarray(rows["tokens"]), jnp.asarray(rows["attention_mask"])
    targets = jnp.asarray(rows["targets"])
    wanted = jax.jit(lambda *rows: model(*rows))(tokens, targets, mask)
    cache, given = jax.jit(lambda: model.init_cache(tokens, 9, mask))(), model.shifted(targets)
    extend, found = jax.jit(lambda *new: model.extend(*new)), []
    for first, last in ((0, 3), (3, 4), (4, 7)):
        hidden, cache = extend(given[:, first:last], cache, jnp.int32(first))
        found.append(model.head(hidden))
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), wanted, atol=2e-6)


@pytest.mark.thorough
def test_nothing_follows_an_end_token():
    model, rows = t5(), batch(1, rows=4)
    free = np.asarray(generate_from_source(model, rows["tokens"], 8, temperature=1.0, seed=3))
    end = int(free[0, 2])
    ended = np.asarray(
        generate_from_source(model, rows["tokens"], 8, temperature=1.0, seed=3, end_token=end)
    )
    for row, whole in zip(ended, free, strict=True):
        at = np.flatnonzero(whole == end)
        stop = at[0] if at.size else len(whole)
        np.testing.assert_array_equal(row[:stop], whole[:stop])
        assert (row[stop:] == end).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: generate(t5(), np.ones((1, 2), int), 2), TypeError, "use generate_from_source"),
        (
            lambda: generate_from_source(object(), np.ones((1, 2), int), 2),  # type: ignore[arg-type]
            TypeError,
            "use generate",
        ),
        (
            lambda: generate_from_source(t5(), np.full((1, 2), 24), 2),
            ValueError,
            "table has 24 rows",
        ),
        (
            lambda: generate_from_source(t5(), np.ones((1, 2), int), 2, end_token=24),
            ValueError,
            "end_token=24 .* 24 token ids",
        ),
        (lambda: t5(relative_buckets=6), ValueError, "not a multiple of 4"),
        (lambda: t5(relative_max_distance=4), ValueError, "must be above half"),
        (lambda: t5(start_token=24), ValueError, "start_token=24 .* 24 token ids"),
        (lambda: t5(num_decoder_layers=0), ValueError, "num_decoder_layers=0"),
    ],
)
def test_what_cannot_be_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.thorough
def test_the_number_of_parameters_is_known():
    for changes in ({}, {"tie_embeddings": False, "gated_gelu": True}):
        state = nnx.state(t5(**changes), nnx.Param)
        number = sum(x.size for x in jax.tree.leaves(state))
        assert T5Config(**SIZES | changes).num_parameters == number
