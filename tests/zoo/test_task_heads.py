"""Heads for tasks: classes of texts and tokens, answers; as transformers has them.

Expected values: tests/oracles/task_heads.py.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zerojax
from tests.support.hugging_face_weights import probes
from tests.support.refusals import Refusal, refused
from tests.support.task_cases import ANSWER, CASES, PAD, SEQUENCE, TOKENS, batch_of, tensor_of
from zerojax.config import ModelConfig
from zerojax.training.fine_tuning import FineTuning, write_run
from zerojax.training.run_file import plan_from_config
from zerojax.zoo import TaskConfig
from zerojax.zoo.hugging_face import Pretrained, config_from_hugging_face
from zerojax.zoo.task_heads import task_loss

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "task_heads.json").read_text())["cases"]


def tensors_of(case: str) -> dict[str, np.ndarray]:
    shapes = ORACLE[case]["tensors"]
    return {name: tensor_of(CASES[case][0], name, tuple(x)) for name, x in shapes.items()}


def write(folder: Path, case: str, **changes: Any) -> Path:
    """The model as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**ORACLE[case]["config"], **changes}))
    save_file(tensors_of(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def outputs(model: Any, batch: dict[str, Any]) -> jax.Array:
    names = ("tokens", "attention_mask", "token_types")
    return model.classify(*(batch[name] for name in names if name in batch))


def loss_and_gradients(pretrained: Pretrained, batch: Any) -> tuple[float, dict[str, Any]]:
    """(mean loss, {parameter: gradient})."""
    abstract, extras = pretrained.initial_arrays()
    params = {
        name: jnp.asarray(x.read([(0, size) for size in x.shape])) for name, x in abstract.items()
    }

    def mean(params: Any) -> jax.Array:
        result, _ = pretrained.run(
            params, extras, jax.random.key(0), lambda model: model.loss(batch), train=False
        )
        return result[0] / result[1]

    loss, gradients = jax.jit(jax.value_and_grad(mean))(params)
    return float(loss), gradients


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    pretrained, theirs = zerojax.from_hugging_face(write(tmp_path, case)), ORACLE[case]
    batch = {name: jnp.asarray(x) for name, x in batch_of(case).items()}
    logits = np.asarray(jax.jit(outputs)(pretrained.to_model(), batch))
    # float32 rounding of two programs; measured: 2e-6 of logits up to 4.
    seen = np.ones(logits.shape[:-1], bool)
    if logits.ndim == 3:  # what lies at padding has no meaning
        seen = np.asarray(batch["attention_mask"], bool)
    np.testing.assert_allclose(logits[seen], np.array(theirs["logits"])[seen], rtol=0, atol=2e-5)
    loss, gradients = loss_and_gradients(pretrained, batch)
    assert loss == pytest.approx(theirs["loss"], rel=1e-5)
    compared = 0
    for leaf in pretrained.row.leaves(pretrained.config):
        if not leaf.layout.is_whole or "token_embedding" in leaf.name:
            continue  # torch has no gradient for the vector of padding
        gradient = np.asarray(gradients[leaf.name])
        for layer in range(gradient.shape[0] if leaf.is_stacked else 1):
            own = leaf.layout.as_theirs(gradient[layer] if leaf.is_stacked else gradient)
            name = leaf.tensor_of(layer)
            if name not in theirs["gradients"]:
                continue
            expected = theirs["gradients"][name]
            # Relative to its length; keys of BERT have biases whose gradient is 0 up to rounding.
            np.testing.assert_allclose(probes(name, own), expected, atol=5e-5 * expected[0] + 1e-6)
            compared += 1
    assert compared >= 10


def train(model: Any, mesh: dict[str, Any], batch: Any, **options: Any) -> Any:
    return zerojax.train(
        model,
        {"persistence_threshold": 0, **mesh},
        [batch],
        optimizer=zerojax.adamw(1e-2),
        log=zerojax.LogConfig(every=1),
        **{"steps": 3, **options},
    )


def wide(case: str, rows: int = 16) -> dict[str, np.ndarray]:
    """The batch of a case, repeated to a number of rows that devices divide."""
    return {name: np.resize(x, (rows, *x.shape[1:])) for name, x in batch_of(case).items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["llama", "bert_tokens", "bert_classes", "gpt2", "bert_answer"])
def test_it_is_trained_and_written_back(case: str, tmp_path: Path) -> None:
    """Names and shapes of the tensors, config.json and bytes are those that were read."""
    folder = write(tmp_path / "in", case)
    pretrained = zerojax.from_hugging_face(folder)
    trainer = train(pretrained, {"zero": 3}, wide(case), steps=0)
    zerojax.to_hugging_face(trainer, tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), tensors_of(case)
    assert sorted(ours) == sorted(theirs)
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ORACLE[case]["config"]["architectures"]
    again = zerojax.from_hugging_face(tmp_path / "out")
    assert again.config == pretrained.config
    labels = ORACLE[case]["config"].get("id2label")
    assert labels is None or list(again.config.task.labels) == list(labels.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "bert_classes", "bert_tokens", "bert_answer"])
def test_every_mesh_trains_alike(case: str, tmp_path: Path) -> None:
    folder, batch = write(tmp_path, case), wide(case)
    meshes = [{"data": 8}, {"data": 8, "zero": 3}, {"data": 4, "model": 2, "zero": 1}]
    meshes.append({"data": 4, "stage": 2, "zero": 1, "num_microbatches": 2})
    losses, metrics = [], []
    for mesh in meshes:
        options = {"num_microbatches": mesh.pop("num_microbatches", 1)}
        trainer = train(zerojax.from_hugging_face(folder), mesh, batch, **options)
        losses.append([x["loss"] for x in trainer.history])
        metrics.append([x.get("accuracy") for x in trainer.history])
        trainer.close()
    assert losses[0][-1] < losses[0][0] - 0.05
    for other, accuracy in zip(losses[1:], metrics[1:], strict=True):
        # float32 sums in other orders, three updates of Adam; measured: 2e-6.
        np.testing.assert_allclose(other, losses[0], rtol=1e-4)
        assert accuracy == pytest.approx(metrics[0], abs=1e-6) or case == "bert_answer"


@pytest.mark.parametrize("base", ["llama", "bert_tokens"])
def test_a_base_gets_a_new_head(base: str, tmp_path: Path) -> None:
    """What fine-tuning begins with: files with another head, or with none."""
    theirs = {"llama": "LlamaForCausalLM", "bert_tokens": "BertModel"}[base]
    folder = write(tmp_path / "base", base, architectures=[theirs])
    tensors = {k: x for k, x in tensors_of(base).items() if "score" not in k and "classif" not in k}
    if base == "llama":
        tensors["lm_head.weight"] = np.ones((20, 16), np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    task = TaskConfig(labels=("no", "yes", "maybe", "later"))
    pretrained = zerojax.from_hugging_face(folder, task=task)
    new = {"llama": ["task_head/kernel"], "bert_tokens": ["pooler/", "task_head/"]}[base]
    (note,) = [note for note in pretrained.notes if "new parameters" in note]
    assert all(name in note for name in new)
    assert str(folder) in note
    assert pretrained.config.task.pad_token == {"llama": PAD, "bert_tokens": 0}[base]
    if base == "llama":
        assert pretrained.left_out == ["lm_head.weight"]
    batch = wide(base)
    batch["labels"] = np.arange(16, dtype=np.int32) % 3
    trainer = train(pretrained, {"zero": 3}, batch, steps=12)
    assert note in trainer.plan.reasons
    assert trainer.history[0]["loss"] == pytest.approx(np.log(4), abs=0.5)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"] - 0.2
    zerojax.to_hugging_face(trainer, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config["id2label"].values()) == list(task.labels)
    assert config["label2id"]["maybe"] == 2
    again = zerojax.from_hugging_face(tmp_path / "out")
    assert again.left_out == []
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    np.testing.assert_allclose(
        outputs(again.to_model(), batch), outputs(trainer.to_model(), batch), atol=1e-5
    )
    trainer.close()


def test_a_classifier_is_loaded_and_evaluated_from_its_run(tmp_path: Path) -> None:
    pretrained = zerojax.from_hugging_face(write(tmp_path / "in", "llama"))
    batch = wide("llama")
    trainer = train(pretrained, {"zero": 3}, batch, steps=2, checkpoint=tmp_path / "run")
    evaluated = trainer.evaluate([batch])
    assert 0 <= evaluated["accuracy"] <= 1
    trainer.close()
    loaded = zerojax.load_run(tmp_path / "run")
    assert loaded.to_model().config.task == pretrained.config.task
    assert loaded.evaluate([batch])["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)
    zerojax.to_hugging_face(tmp_path / "run", tmp_path / "out")
    again = zerojax.from_hugging_face(tmp_path / "out").config
    assert again == pretrained.config


def test_adapters_leave_the_head_to_be_trained(tmp_path: Path) -> None:
    lora = zerojax.LoraConfig(rank=2)
    model = zerojax.add_lora(zerojax.from_hugging_face(write(tmp_path, "bert_tokens")), lora)
    trainer = train(model, {"zero": 1}, wide("bert_tokens"), freeze=lora.freeze, steps=1)
    heads = {name for name in trainer.state["params"] if "/lora/" not in name}
    assert heads == {"task_head/kernel", "task_head/bias"}
    trainer.close()


TASKS: dict[str, Refusal] = {
    "kind": Refusal(
        {"kind": "pairs"},
        "'pairs'",
        "sequence_classification token_classification question_answering",
        [{"kind": kind} for kind in (SEQUENCE, TOKENS, ANSWER)],
    ),
    "problem": Refusal(
        {"problem": "ranking"},
        "'ranking'",
        "single_label_classification multi_label_classification regression",
        [{"problem": x} for x in ("multi_label_classification", "regression")],
    ),
    "labels": Refusal({"labels": ("a", "a")}, "'a'", "each once", [{"labels": ("a", "b")}]),
    "one class": Refusal(
        {"labels": ("a",)},
        "'a'",
        "2 problem='regression'",
        [{"labels": ("a", "b")}, {"labels": ("a",), "problem": "regression"}],
    ),
    "an answer": Refusal(
        {"kind": ANSWER, "labels": ("a", "b", "c")}, "'c'", "2", [{"kind": ANSWER}]
    ),
    "problem of tokens": Refusal(
        {"kind": TOKENS, "problem": "regression"},
        "'regression'",
        "problem='single_label_classification'",
        [{"kind": TOKENS}],
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task(name: str) -> None:
    TASKS[name].check(lambda fields: TaskConfig(**fields))


KEYS: dict[str, Refusal] = {
    "problem_type": Refusal(
        {"problem_type": "ranking"},
        "problem_type='ranking'",
        "regression",
        [{"problem_type": "regression"}, {"problem_type": None}],
    ),
    "id2label": Refusal(
        {"id2label": {"1": "a", "2": "b"}}, "id2label", "0", [{"id2label": {"0": "a", "1": "b"}}]
    ),
    "num_labels": Refusal(
        {"id2label": None, "num_labels": 0}, "num_labels=0", "1", [{"id2label": None}]
    ),
    "pad_token_id": Refusal(
        {"pad_token_id": -1}, "pad_token_id=-1", "0 null", [{"pad_token_id": None}]
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key(name: str, tmp_path: Path) -> None:
    def take(changes: dict[str, Any]) -> None:
        values = {**ORACLE["llama"]["config"], **changes}
        (tmp_path / "config.json").write_text(json.dumps(values))
        config_from_hugging_face(tmp_path)

    KEYS[name].check(take)


def test_batches_that_do_not_fit_the_task(tmp_path: Path) -> None:
    pretrained = zerojax.from_hugging_face(write(tmp_path, "llama"))
    batch = {name: jnp.asarray(x) for name, x in batch_of("llama").items()}

    def loss(problem: str | None = None, **changes: Any) -> None:
        merged = {name: x for name, x in {**batch, **changes}.items() if x is not None}
        task = pretrained.config.task
        if problem:
            task = TaskConfig(labels=task.labels, problem=problem)
        jax.eval_shape(lambda: task_loss(jnp.ones((3, 3)), merged, task))

    missing = refused(lambda: loss(labels=None), ["'labels'", "['tokens']"], "add task=None")
    assert "task=None" in missing
    floats = functools.partial(loss, labels=jnp.ones(3))
    message = refused(floats, "float32", "astype", error=TypeError)
    loss(labels=jnp.ones(3).astype("int32"))
    for problem in re.findall(r"'(\w+_label_classification|regression)'", message):
        loss(problem, labels=jnp.ones((3, 3)))
    refused(lambda: loss(labels=jnp.ones((3, 2), jnp.int32)), ["[3, 2]", "[batch] = [3]"])


@pytest.mark.parametrize("case", ["llama", "bert_tokens"])
def test_labels_that_are_no_classes_are_refused_where_they_count(case: str, tmp_path: Path) -> None:
    """A step would be skipped, because its loss is NaN."""
    model = zerojax.from_hugging_face(write(tmp_path, case))
    number, one = len(model.config.task.labels), batch_of(case)
    batch = {name: np.resize(x, (8, *x.shape[1:])) for name, x in one.items() if name != "weights"}

    def place(label: int, **more: Any) -> None:
        labels = np.zeros_like(batch["labels"])
        labels[(3, *[0] * (labels.ndim - 1))] = label
        given = {**batch, "labels": labels, **more}
        plan = zerojax.make_plan(
            model, {"zero": 1}, example_batch=given, optimizer=zerojax.adamw(1e-3)
        )
        zerojax.shard_batch(plan, given)

    for label in (number, -1):
        refused(lambda label=label: place(label), ["'labels'", label, number], [-100])
    place(number - 1)
    place(-100)
    counted = np.ones(batch["labels"].shape, np.float32)
    counted[3] = 0
    place(number, weights=counted)


@pytest.mark.parametrize("case", ["llama", "bert_classes"])
def test_transformers_names_of_arrays_are_answered_with_zerojaxs(case: str, tmp_path: Path) -> None:
    model = zerojax.from_hugging_face(write(tmp_path, case)).to_model()
    batch = {name: jnp.asarray(x) for name, x in batch_of(case).items()}
    theirs = {"input_ids" if name == "tokens" else name: x for name, x in batch.items()}
    refused(lambda: model.loss(theirs), ["'tokens'", "'input_ids'"], ["'tokens'", "encode_texts"])
    model.loss(batch)


def test_what_a_task_does_not_have_is_refused_with_what_does(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "llama")
    model = zerojax.from_hugging_face(folder).to_model()
    tokens = jnp.asarray(batch_of("llama")["tokens"])
    refused(lambda: model.head(jnp.ones((1, 2, 16))), SEQUENCE, "model.classify task=None")
    generates = lambda model: zerojax.zoo.generate(model, tokens[:1], 2)  # noqa: E731
    refused(lambda: generates(model), SEQUENCE, "classify task=None", error=TypeError)
    assert model.classify(tokens).shape == (3, 3)
    tensors = tensors_of("llama") | {"lm_head.weight": np.ones((20, 16), np.float32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = zerojax.from_hugging_face(folder, task=None)
    assert plain.left_out == ["score.weight"]
    assert generates(plain.to_model()).shape == (1, 10)
    message = refused(lambda: plain.to_model().classify(tokens), "no head", "TaskConfig")
    assert "task=" in message
    task = TaskConfig(labels=("a", "b"))
    wrong = lambda **options: zerojax.from_hugging_face(folder, task=task, **options)  # noqa: E731
    found = refused(wrong, ["score.weight", "[3, 16]", "[2, 16]"], "new=")
    (name,) = re.findall(r"new=\('(.*?)',\)", found)
    assert wrong(new=(name,)).to_model().classify(tokens).shape == (3, 2)
    refused(
        lambda: zerojax.from_hugging_face(folder, task="classes"),
        "'classes'",
        "zerojax.zoo.TaskConfig",
        error=TypeError,
    )
    answer = TaskConfig(kind=ANSWER)
    refused(lambda: zerojax.from_hugging_face(folder, task=answer), ANSWER, SEQUENCE)
    chunked = functools.partial(zerojax.from_hugging_face, folder)
    refused(lambda: chunked(loss_chunk=4), "loss_chunk=4", "loss_chunk=None")
    chunked(loss_chunk=None)
    split = lambda context: train(  # noqa: E731
        zerojax.from_hugging_face(folder), {"context": context}, wide("llama"), steps=0
    )
    refused(lambda: split(2), "context=2", "context=1 task")
    split(1).close()


def test_a_run_file_and_finetune_name_python(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "llama")
    config = zerojax.RunConfig(model=ModelConfig(pretrained=str(folder)), steps=1)
    refused(lambda: plan_from_config(config, 1), [folder, SEQUENCE], "Python zerojax.train")
    chats = FineTuning(folder=str(folder), data=str(tmp_path), run_dir=str(tmp_path / "run"))
    refused(
        lambda: write_run(chats, count_devices=lambda: 1), [folder, SEQUENCE], "LlamaForCausalLM"
    )


@pytest.mark.parametrize("data", ["reviews.csv", None])
def test_text_without_labels_is_refused(data: str | None, tmp_path: Path) -> None:
    """Whether there is such a file does not matter."""
    model = zerojax.from_hugging_face(write(tmp_path, "llama"))
    value = [SEQUENCE, "no batches" if data is None else data]
    given = {"data": data, "steps": 1, "run_dir": None}
    refused(lambda: zerojax.train(model, {"zero": 1}, **given), value, "batches labels")
