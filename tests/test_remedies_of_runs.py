"""What an error about models' files, offloaded state and runs tells to do is done, and helps.

Each remedy is read from the sentence where it can be, so that another sentence is another deed.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import zerojax
from tests import test_host_budget as budget
from tests.hugging_face_folders import CASES, tensors_of, write_folder
from tests.remedies import complained, told
from zerojax.cli import main
from zerojax.models.hugging_face import from_hugging_face
from zerojax.models.hugging_face.architectures import ARCHITECTURES
from zerojax.models.hugging_face.folder import INDEX, SINGLE
from zerojax.plan import host_budget
from zerojax.runtime.memory import PINNED_LIMIT
from zerojax.training.run_record import abstract_of, read_record

# --- models' files --------------------------------------------------------------------------------


def test_folders_of_models(tmp_path):
    good = write_folder(tmp_path / "good", "llama_tied")
    config, tensors = told(
        lambda: from_hugging_face(tmp_path / "none"), r"; give a folder with (\S+) and \*(\S+)$"
    )
    assert {Path(config).suffix, tensors} == {path.suffix for path in good.iterdir()}
    from_hugging_face(good)
    (good / "x").mkdir()
    told(
        lambda: from_hugging_face(good / "x"), r"; give a folder that `save_pretrained` or the Hub"
    )
    from_hugging_face(good)
    shutil.copy(good / config, good / "x")
    told(lambda: from_hugging_face(good / "x"), r"; give a folder that has them$")
    for name in "ab":
        shutil.copy(good / SINGLE, good / "x" / f"{name}.safetensors")
    (name,) = told(lambda: from_hugging_face(good / "x"), r"; name the right one (\S+)$")
    (good / "x" / "a.safetensors").rename(good / "x" / name)
    from_hugging_face(good / "x")


def no_table(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def no_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


def twice(folder: Path) -> None:
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    name, *_ = load_file(first)
    save_file({**load_file(second), name: np.ones(3, np.float32)}, second)


def cut(size: int) -> Any:
    return lambda folder: os.truncate(sorted(folder.glob("*.safetensors"))[0], size)


def changed(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F7"'))


def longer(folder: Path) -> None:
    with sorted(folder.glob("*.safetensors"))[0].open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("harm", [no_table, no_file, twice, cut(4), cut(100), changed, longer])
def test_damaged_files_are_fetched_again(harm, tmp_path):
    theirs = write_folder(tmp_path / "theirs", "llama_tied", shards=3)
    ours = Path(shutil.copytree(theirs, tmp_path / "ours"))
    harm(ours)
    told(lambda: from_hugging_face(ours), r"; fetch (both again|it again|them)$")
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    from_hugging_face(ours)


def test_a_file_that_ends_while_it_is_read(tmp_path):
    folder = write_folder(tmp_path / "ours", "llama_tied")
    whole = (folder / SINGLE).read_bytes()
    pretrained = from_hugging_face(folder)
    os.truncate(folder / SINGLE, len(whole) // 2)
    told(pretrained.to_model, r"; fetch it again$")
    (folder / SINGLE).write_bytes(whole)
    pretrained.to_model()


VALUES = {
    "gpt2": {"activation_function": "relu", "scale_attn_weights": False},
    "llama": {"hidden_act": "relu", "mlp_bias": True},
    "bert": {
        "position_embedding_type": "relative_key",
        "hidden_act": "relu",
        "is_decoder": True,
        "add_cross_attention": True,
        "tie_word_embeddings": False,
    },
}
BERT = {"vocab_size": 20, "max_position_embeddings": 8, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in VALUES for key in VALUES[kind]])
def test_values_in_their_config(kind, key):
    config = CASES[kind]["config"] if kind in CASES else BERT
    read = ARCHITECTURES[kind].read_config
    (listed,) = told(lambda: read({**config, key: VALUES[kind][key]}), r"; only (.*) will do$")
    for text in re.split(" or |, ", listed):
        is_word = text.isidentifier() and text not in ("None", "True", "False")
        read({**config, key: text if is_word else eval(text)})


def test_heads_and_positions_in_their_config():
    key, names = told(
        lambda: ARCHITECTURES["bert"].read_config({**BERT, "architectures": ["BertForX"]}),
        r'write "(\w+)": (\[".*"\]) into a copy of config\.json$',
    )
    ARCHITECTURES["bert"].read_config({**BERT, key: json.loads(names)})
    read, config = ARCHITECTURES["llama"].read_config, CASES["llama"]["config"]
    rope = {"factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds = told(
        lambda: read({**config, "rope_parameters": {**rope, "rope_type": "yarn"}}),
        r"not built; (\w+), (\w+), (\w+) and (\w+) are$",
    )
    for kind in kinds:
        read({**config, "rope_parameters": {**rope, "rope_type": kind}})


def test_parameters_that_the_files_do_not_have(tmp_path):
    tensors = {n: x for n, x in tensors_of("llama").items() if n != "lm_head.weight"}
    folder = write_folder(tmp_path / "headless", "llama", tensors=tensors)
    (new,) = told(
        lambda: from_hugging_face(folder), r"or pass (new=\(.*\)) to begin with new values$"
    )
    assert "1 new" in from_hugging_face(folder, **eval(f"dict({new})")).describe()
    # A setting that does not fit the files is no new parameter.
    told(
        lambda: from_hugging_face(folder, mlp_dim=32), r"the changes to it describe another model$"
    )
    (word,) = told(lambda: from_hugging_face(folder, remt="full"), r"did you mean '(\w+)'")
    from_hugging_face(folder, new=("lm_head",), **{word: "full"})
    codes = write_folder(tmp_path / "codes", "llama", quantization_config={"quant_method": "gptq"})
    told(lambda: from_hugging_face(codes), r"; take the unquantized model$")
    from_hugging_face(write_folder(tmp_path / "codes", "llama"))


# --- memory and disks of offloaded state ----------------------------------------------------------


def test_host_memory_that_is_too_small():
    plan = budget.small_plan("host")
    room = budget.room_for(plan, -4096)
    shares, zero = told(
        lambda: host_budget.check_host_memory(plan, room),
        r"try offload\.opt_state: (\{.*\}), which .*; or zero=(\d), which splits it",
    )
    for other in (budget.small_plan(shares), budget.small_plan("host", zero=int(zero))):
        host_budget.check_host_memory(other, room)


@pytest.mark.parametrize("told_before", [{}, {PINNED_LIMIT: "10"}, {PINNED_LIMIT: "many"}])
def test_pinned_memory_that_is_too_small(told_before, monkeypatch):
    plan = budget.small_plan("host")
    gib = 1 if told_before.get(PINNED_LIMIT) == "many" else 64
    monkeypatch.setattr(host_budget, "_local_devices", lambda plan: [budget.Gpu()])
    tiers = {"optimizer state": {"host": gib * budget.GIB}}
    monkeypatch.setattr(host_budget, "role_tiers", lambda plan: tiers)
    check = lambda environ: host_budget.check_pinned_limit(plan, environ)  # noqa: E731
    if gib == 1:
        told(lambda: check(told_before), r"is no whole number of GiB; set it, or unset it$")
        check({PINNED_LIMIT: "2"})
        check({})
        return
    name, value = told(lambda: check(told_before), r"; set (\w+)=(\d+) before JAX starts")
    check({name: value})


def test_a_disk_that_is_too_small_for_files(tmp_path, monkeypatch):
    large, small = tmp_path / "large", tmp_path / "small"
    made = lambda tier="nvme", **given: budget.small_plan(  # noqa: E731
        tier, **{"durable": True, "folder": str(small), **given}
    )
    needed = host_budget.disk_bytes(made())
    free = {"large": needed, "small": needed // 2}
    monkeypatch.setattr(host_budget, "free_disk", lambda folder: free[Path(folder).parent.name])
    (value,) = told(
        lambda: host_budget.check_disk(made()),
        r"try offload\.durable: (false), .*; or to free some space; or another offload\.folder; or "
        r"a larger share of opt_state in host memory or on the device$",
    )
    host_budget.check_disk(made(durable=json.loads(value)))
    host_budget.check_disk(made(folder=str(large)))
    for tier in ("host", "device"):
        shares = f"{{nvme: 0.25, {tier}: 0.75}}"
        host_budget.check_disk(made(shares, durable=False))
    free["small"] = needed
    host_budget.check_disk(made())


# --- runs -----------------------------------------------------------------------------------------


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


Pair = collections.namedtuple("Pair", "x y")
BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}


def squared(model, batch):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch.x, batch.y)
    return jnp.mean((model(x) - y) ** 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of one step, of a model and a loss of one's own."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    zerojax.train(Line, None, [BATCH], loss=squared, steps=1, checkpoint=folder).close()
    return folder


def test_a_run_is_read_back(run, tmp_path):
    told(
        lambda: zerojax.load_run(tmp_path),
        r"; give the folder that training named as its run folder$",
    )
    names = {"zerojax": zerojax, "MODEL": Line, "LOSS": squared, "BATCH": BATCH}
    (code,) = told(
        lambda: zerojax.load_run(run, model=Line),
        r"; give it too: (zerojax\.load_run\(\.\.\., .*\))$",
    )
    loaded = eval(code.replace("...", "run"), {**names, "run": run})
    (code,) = told(loaded.evaluate, r"give some to the run that was loaded: (evaluate\(batches\))$")
    found = eval(f"loaded.{code}", {"loaded": loaded, "batches": [BATCH]})
    assert np.isfinite(found["loss"])
    told(lambda: loaded.evaluate([]), r"there is no batch$")


def test_batches_of_a_kind_of_ones_own(tmp_path):
    batch = Pair(**BATCH)
    folder = tmp_path / "pairs"
    zerojax.train(Line, None, [batch], loss=squared, steps=1, checkpoint=folder).close()
    (code,) = told(
        lambda: zerojax.load_run(folder, model=Line, loss=squared),
        r"; pass one: zerojax\.load_run\('.*', (example_batch=BATCH)\)$",
    )
    loaded = zerojax.load_run(
        folder, model=Line, loss=squared, **eval(f"dict({code})", {"BATCH": batch})
    )
    assert np.isfinite(loaded.evaluate([batch])["loss"])


def test_a_model_of_ones_own_is_exported_under_its_own_names(run, tmp_path, capsys):
    words = ["checkpoint", "export", str(run), str(tmp_path / "out")]
    (command,) = complained(
        capsys, r"`zerojax (.*)` without --format", *words, "--format", "hugging_face"
    )
    assert main([*command.split(), *words[2:]]) == 0
    assert "out.kernel" in load_file(tmp_path / "out" / SINGLE)


def test_a_changed_record_of_a_run(run):
    record = json.loads((run / "run.json").read_text())
    read = lambda **changes: read_record({**record, **changes}, "run.json")  # noqa: E731
    (known,) = told(lambda: read(sizs={}), r"; known keys: (.*?)(?:$| \()")
    read_record({key: record[key] for key in known.split(", ")}, "run.json")
    names = told(lambda: read(architecture="os"), r"none of (\w+), (\w+), (\w+)")
    for name in names:
        read(architecture=name)
    for key in ("sizes", "precision"):
        given = {"architecture": names[0]} if key == "sizes" else {}
        (known,) = told(lambda: read(**given, **{key: {"x": 1}}), r"known keys: (\w+)")  # noqa: B023
        read(**given, **{key: {known: record[key].get(known, 1)}})
    told(lambda: read(adapters=3), r"expected a list")
    read(adapters=[])
    told(lambda: abstract_of({"shape": "x"}), r"no description of a batch")
    abstract_of(record["batch"])
