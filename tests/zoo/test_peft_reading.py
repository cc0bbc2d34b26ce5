"""Adapters of PEFT are read, trained on and written.

Expected values: tests/oracles/peft_reading.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zerojax
from tests.support.peft_cases import CASES, tensor_of, tokens_of
from tests.support.refusals import code_in, refused
from zerojax.cli import main
from zerojax.config import ModelConfig
from zerojax.zoo import TaskConfig, merge_lora
from zerojax.zoo.hugging_face.peft import ADAPTER_CONFIG, ADAPTER_FILE
from zerojax.zoo.lora import trained_only

DATA = Path(__file__).parents[1] / "data" / "peft_reading.json"
ORACLE = json.loads(DATA.read_text())["cases"]


def write(folder: Path, case: str, **changes: Any) -> Path:
    """Base model and adapters as transformers and peft save them; the folder of the adapters."""
    found, base = ORACLE[case], folder / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(found["config"]))
    _save(base / "model.safetensors", found["base_tensors"])
    adapters = folder / "adapters"
    adapters.mkdir()
    settings = {**found["adapter_config"], "base_model_name_or_path": str(base), **changes}
    (adapters / ADAPTER_CONFIG).write_text(json.dumps(settings))
    _save(adapters / ADAPTER_FILE, found["adapter_tensors"])
    return adapters


def _save(file: Path, shapes: dict[str, list[int]]) -> None:
    tensors = {name: tensor_of(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def rewrite(folder: Path, **changes: Any) -> Path:
    """The same adapters with other settings."""
    values = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**values, **changes}))
    return folder


def logits_of(model: Any, case: str) -> np.ndarray:
    model.eval()  # without the adapters' dropout
    return np.asarray(jax.jit(lambda tokens: model(tokens))(jnp.asarray(tokens_of(case))))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    pretrained = zerojax.from_hugging_face(write(tmp_path, case))
    theirs, model = np.array(ORACLE[case]["logits"]), pretrained.to_model()
    assert np.abs(theirs).max() > 0.5
    # float32 rounding of two programs, logits up to 6; measured: 6e-6.
    for each in (model, merge_lora(model)):
        np.testing.assert_allclose(logits_of(each, case), theirs, rtol=0, atol=5e-5)
    assert str(tmp_path / "adapters") in pretrained.describe()
    assert not [note for note in pretrained.notes if "new parameters" in note]


def batch_of(case: str, rows: int = 16) -> dict[str, np.ndarray]:
    tokens = np.resize(tokens_of(case), (rows, 7))
    if case.startswith("classes"):
        return {"tokens": tokens, "labels": np.arange(rows, dtype=np.int32) % 2}
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(model: Any, case: str, **options: Any) -> Any:
    return zerojax.train(
        model,
        {"zero": 3, "persistence_threshold": 0},
        [batch_of(case)],
        optimizer=zerojax.adamw(1e-2, weight_decay=0.0),
        log=zerojax.LogConfig(every=1),
        **{"freeze": model.freeze, **options},
    )


def arrays_in(pretrained: Any) -> dict[str, np.ndarray]:
    """All arrays that a model begins with."""
    arrays, _ = pretrained.initial_arrays()
    return {name: x.read([(0, size) for size in x.shape]) for name, x in arrays.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case", ["classes_of_bert", "biases_of_adapters", "whole_modules", "joined", "patterns"]
)
def test_training_goes_on_and_is_written_again(case: str, tmp_path: Path) -> None:
    """The base is frozen, the rest is trained; files written at once equal those that were read."""
    pretrained = zerojax.from_hugging_face(write(tmp_path, case))
    before = arrays_in(pretrained)
    with train(pretrained, case, steps=0) as trainer:
        zerojax.to_peft(trainer, tmp_path / "again")
    again = zerojax.from_hugging_face(tmp_path / "again")
    theirs = np.array(ORACLE[case]["logits"])
    np.testing.assert_allclose(logits_of(again.to_model(), case), theirs, rtol=0, atol=5e-5)
    if case in ("classes_of_bert", "whole_modules"):  # others have more zeros, or more of an A
        ours = load_file(tmp_path / "again" / ADAPTER_FILE)
        for name, values in load_file(tmp_path / "adapters" / ADAPTER_FILE).items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)
    with train(again, case, steps=4, checkpoint=tmp_path / "run") as trainer:
        losses = [x["loss"] for x in trainer.history]
        assert losses[-1] < losses[0]
        trained = trainer.to_model()
        frozen = zerojax.to_portable_state(trainer.plan, trainer.state)["frozen"]
        assert set(again.stored) >= set(frozen)
        for name, array in frozen.items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        assert {*again.tuned} == {*trainer.state["params"]}
        zerojax.to_peft(trainer, tmp_path / "after")
    zerojax.to_peft(tmp_path / "run", tmp_path / "from_run")
    for folder in ("after", "from_run"):
        read = zerojax.from_hugging_face(tmp_path / folder).to_model()
        np.testing.assert_allclose(logits_of(read, case), logits_of(trained, case), atol=1e-5)
    loaded = zerojax.load_run(tmp_path / "run").to_model()
    np.testing.assert_array_equal(logits_of(loaded, case), logits_of(trained, case))


@pytest.mark.thorough
def test_layers_without_adapters_stay_without(tmp_path: Path) -> None:
    pretrained = zerojax.from_hugging_face(write(tmp_path, "rslora_some_layers"))
    with train(pretrained, "rslora_some_layers", steps=3) as trainer:
        for name, array in trainer.state["params"].items():
            values = np.asarray(array)
            assert not values[1].any(), name
            assert values[0].any(), name
        kernel = trainer.to_model().blocks.attention.query.lora
        assert kernel.scale == pytest.approx(3 / 2)
        assert kernel.dropout.rate == 0.1


def test_a_new_adapter_and_a_head_are_trained_and_read_again(tmp_path: Path) -> None:
    """A base without a task, a new head and adapters of zerojax, files for peft, and back."""
    folder = write(tmp_path, "patterns").parent / "base"
    task = TaskConfig(labels=("no", "yes"), pad_token=18)
    lora = zerojax.LoraConfig(rank=2, targets=("attention/",))
    model = zerojax.add_lora(zerojax.from_hugging_face(folder, task=task), lora)
    assert model.freeze == lora.freeze
    with train(model, "classes", steps=2) as trainer:
        assert "task_head/kernel" in trainer.state["params"]
        zerojax.to_peft(trainer, tmp_path / "out")
        trained = trainer.to_model()
        assert not [x for x in trainer.plan.reasons if x.startswith("adapters: ")]
    settings = json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())
    assert settings["task_type"] == "SEQ_CLS"
    assert settings["modules_to_save"] == ["score"]
    again = zerojax.from_hugging_face(tmp_path / "out")
    assert again.config.task == TaskConfig(pad_token=18)
    np.testing.assert_array_equal(logits_of(again.to_model(), "x"), logits_of(trained, "x"))
    named = zerojax.from_hugging_face(tmp_path / "out", task=task)
    assert named.config.task == task
    np.testing.assert_array_equal(logits_of(named.to_model(), "x"), logits_of(trained, "x"))


def test_adapters_of_a_run_that_trained_the_base_too_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, "patterns").parent / "base"
    lora = zerojax.LoraConfig(rank=2, targets=("attention/",))
    model = zerojax.add_lora(zerojax.from_hugging_face(folder), lora)
    run, out = tmp_path / "run", tmp_path / "out"
    for freeze, told in (((), 1), (trained_only(["final_norm/scale"]), 0)):
        shutil.rmtree(run, ignore_errors=True)
        with train(model, "tokens", steps=1, freeze=freeze, checkpoint=run) as trainer:
            assert sum(x.startswith("adapters: ") for x in trainer.plan.reasons) == told
            with pytest.raises(ValueError, match="would lose what .*freeze=lora.freeze"):
                zerojax.to_peft(trainer, out)
        assert main(["checkpoint", "export", str(run), str(out), "--format", "peft"]) != 0
        assert "freeze=lora.freeze" in capsys.readouterr().err
    assert not out.exists()


MERGE = ["merge_and_unload", "OTHER"]
REFUSED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "use_dora": ({"use_dora": True}, ["use_dora=True", *MERGE]),
    "another kind": ({"peft_type": "IA3"}, ["peft_type='IA3'", "LORA", *MERGE]),
    "pissa": ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'", *MERGE]),
    "biases of B": ({"lora_bias": True}, ["lora_bias=True", *MERGE]),
    "layers": ({"layer_replication": [[0, 2]]}, ["layer_replication", *MERGE]),
    "a new key": ({"new_way": {"x": 1}}, ["new_way", *MERGE]),
    "no rank": ({"r": 0}, ["r: 0", "at least 1"]),
    "another rank": ({"r": 4}, ["rank 3", "4", "rank_pattern"]),
    "no scale": ({"lora_alpha": -1}, ["-1", "above 0"]),
    "biases": ({"bias": "some"}, ["bias='some'", "none", "all", "lora_only"]),
}


def merged(tmp_path: Path, case: str) -> Path:
    """What merge_and_unload and save_pretrained write, by zerojax."""
    pretrained = zerojax.from_hugging_face(tmp_path / "adapters")
    with train(pretrained, case, steps=0) as trainer:
        zerojax.to_hugging_face(trainer, tmp_path / "merged")
    return tmp_path / "merged"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    changes, words = REFUSED[name]
    adapters = write(tmp_path, "patterns")
    settings = (adapters / ADAPTER_CONFIG).read_text()
    rewrite(adapters, **changes)
    message = refused(lambda: zerojax.from_hugging_face(adapters), words)
    assert str(adapters) in message
    (adapters / ADAPTER_CONFIG).write_text(settings)
    zerojax.from_hugging_face(adapters)


def test_what_peft_merges_is_read(tmp_path: Path) -> None:
    """The remedy of most refusals."""
    write(tmp_path, "joined")
    model = zerojax.from_hugging_face(merged(tmp_path, "joined")).to_model()
    theirs = np.array(ORACLE["joined"]["logits"])
    np.testing.assert_allclose(logits_of(model, "joined"), theirs, rtol=0, atol=5e-5)


def test_the_base_model_is_named_or_given(tmp_path: Path) -> None:
    adapters = write(tmp_path, "patterns", base_model_name_or_path="an/absent")
    base = adapters.parent / "base"
    read = lambda **options: zerojax.from_hugging_face(adapters, **options)  # noqa: E731
    words = ["'an/absent'", "base=FOLDER", "base_model_name_or_path", "hf download an/absent"]
    refused(read, words, error=FileNotFoundError)
    assert read(base=base).folder.path == base
    rewrite(adapters, base_model_name_or_path=str(base))
    assert read().folder.path == base
    refused(
        lambda: zerojax.from_hugging_face(base, base=base), [f"base='{base}'", "leave base out"]
    )
    zerojax.from_hugging_face(base)
    refused(
        lambda: zerojax.zoo.hugging_face.config_from_hugging_face(adapters),
        [adapters, "base model"],
    )
    (adapters / ADAPTER_FILE).rename(adapters / "adapter_model.bin")
    refused(read, [ADAPTER_FILE, "pickled", "save_pretrained"], error=FileNotFoundError)
    (adapters / "adapter_model.bin").rename(adapters / ADAPTER_FILE)
    read()


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    adapters = write(tmp_path, "patterns")
    tensors = load_file(adapters / ADAPTER_FILE)
    start = "base_model.model.model.layers.0.self_attn.q_proj."

    def with_changes(**changes: Any) -> Any:
        changed = {**tensors, **{start + name: x for name, x in changes.items()}}
        found = {name: x for name, x in changed.items() if x is not None}
        save_file(found, adapters / ADAPTER_FILE)
        return zerojax.from_hugging_face(adapters)

    ones = np.ones((2, 2), np.float32)
    magnitude = {"lora_magnitude_vector": np.ones(16, np.float32)}
    refused(lambda: with_changes(**magnitude), ["lora_magnitude_vector", *MERGE])
    one = {"lora_A.weight": None}
    refused(lambda: with_changes(**one), ["q_proj", "no lora_A", "fetch"])
    wide = {"lora_B.weight": np.ones((20, 4), np.float32)}
    refused(lambda: with_changes(**wide), ["[20, 4]", "16 outputs", "base=FOLDER"])
    other = {"../../mlp.other.lora_A.weight": ones, "../../mlp.other.lora_B.weight": ones}
    refused(lambda: with_changes(**other), ["no module of the base model", *MERGE])
    norm = {"../../../norm.weight": ones}
    refused(lambda: with_changes(**norm), ["saved whole", *MERGE])
    patterns = ORACLE["patterns"]["adapter_config"]["alpha_pattern"]
    rewrite(adapters, alpha_pattern={**patterns, "layers.1.mlp.down_proj": 1})
    refused(with_changes, ["blocks/mlp/down/kernel", "scales", *MERGE])
    rewrite(adapters, alpha_pattern=patterns)
    with_changes()


def test_adapters_are_not_added_twice(tmp_path: Path) -> None:
    pretrained = zerojax.from_hugging_face(write(tmp_path, "biases"))
    lora = zerojax.LoraConfig(rank=1)
    message = refused(lambda: zerojax.add_lora(pretrained, lora), [tmp_path, "merge"])
    scope = {"zerojax": zerojax, "pretrained": pretrained}
    module = eval(code_in(message, "zerojax.merge_lora("), scope)
    assert zerojax.add_lora(module, lora).blocks.mlp.up.lora.a.shape == (3, 16, 1)
    assert train(pretrained, "biases", steps=1).history


@pytest.mark.slow
def test_a_run_file_trains_adapters_on(tmp_path: Path) -> None:
    """The base frozen, without a key of the run file but the folder of the adapters."""
    adapters, base = write(tmp_path, "whole_modules"), tmp_path / "base"
    config = {**ORACLE["whole_modules"]["config"], "vocab_size": 300}
    (base / "config.json").write_text(json.dumps(config))
    for folder, name in ((base, "model.safetensors"), (adapters, ADAPTER_FILE)):
        tensors = load_file(folder / name)
        for key, values in tensors.items():
            if "embed_tokens" in key or "lm_head" in key:
                tensors[key] = np.resize(values, (300, 16))
        save_file(tensors, folder / name, metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 200)
    trainer = zerojax.run_from_config(
        zerojax.RunConfig(
            model=ModelConfig(pretrained=str(adapters), loss_chunk=None),
            data={"path": str(tmp_path / "text.txt"), "seq_len": 8},
            global_batch_size=8,
            steps=2,
            eval_every=None,
            precision="fp32",
            run_dir=str(tmp_path / "run"),
        )
    )
    pretrained = zerojax.from_hugging_face(adapters)
    assert {*trainer.state["params"]} == {*pretrained.tuned}
    assert {*trainer.state["frozen"]} == {*pretrained.stored}
    trainer.close()
