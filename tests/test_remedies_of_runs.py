"""What an error about models' files, offloaded state and runs tells to do is done, and helps.

Each remedy is read from the sentence where it can be, so that another sentence is another deed.
"""

from __future__ import annotations

import collections
import errno
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
from tests.pipeline_runs import small
from tests.remedies import complained, told
from tests.trajectories import plan_for, text_batch
from zerojax.checkpoint.store import BucketStore
from zerojax.cli import main
from zerojax.models.hugging_face import from_hugging_face
from zerojax.models.hugging_face.architectures import ARCHITECTURES
from zerojax.models.hugging_face.folder import INDEX, SINGLE
from zerojax.models.losses import next_token
from zerojax.parallel.initialization import init_state
from zerojax.parallel.step import build_evaluation
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
    rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    kinds = told(
        lambda: read({**config, "rope_parameters": {**rope, "rope_type": "bent"}}),
        r"not built; (\w+), (\w+), (\w+), (\w+), (\w+) and (\w+) are$",
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


def streamable(params: str, *, opt_state: str = "device", **options: Any) -> zerojax.Plan:
    offload = {"params": params, "opt_state": opt_state, "min_elements": 30}
    optimizer = zerojax.adamw(1e-3)
    return plan_for(small(), devices=2, zero=3, optimizer=optimizer, offload=offload, **options)


def test_host_memory_that_is_too_small_for_parameters():
    made = lambda params: streamable(params, opt_state="host", precision="bf16")  # noqa: E731
    plan = made("host")
    room = budget.room_for(plan, -512)
    (tier,) = told(
        lambda: host_budget.check_host_memory(plan, room),
        r"; try offload\.params: (\w+), if they fit there; or more devices on other machines$",
    )
    assert host_budget.host_bytes(made(tier)) < host_budget.host_bytes(plan)
    host_budget.check_host_memory(made(tier), room)


@pytest.mark.thorough
def test_a_loss_that_does_not_run_the_layers_that_wait_on_the_host():
    batch = text_batch(0)
    no_layers = lambda model, batch: next_token(  # noqa: E731
        model.head(model.norm(model.embed(batch["tokens"]))), batch["targets"]
    )
    same_layers = lambda model, batch: next_token(model(batch["tokens"]), batch["targets"])  # noqa: E731

    def other_loop(model, batch):
        """A loop over rows of one parameter; the others of a layer are used outside it."""
        rows = model.blocks.linear.bias[...]
        carry = jnp.mean(model.embed(batch["tokens"]))
        return jax.lax.scan(lambda carry, row: (carry + jnp.sum(row), None), carry, rows)[0]

    def evaluated(loss, params="host"):
        plan = streamable(params)
        given = jax.device_put(batch, plan.batch_sharding)
        return build_evaluation(plan, loss)(init_state(plan, 0), given)["loss"]

    for loss in no_layers, other_loop:
        (tier,) = told(
            lambda loss=loss: evaluated(loss),
            r"; evaluate a function that runs the same layers, or set offload\.params: (\w+)$",
        )
        assert np.isfinite(evaluated(loss, tier))
    assert np.isfinite(evaluated(same_layers))


@pytest.mark.parametrize("told_before", [{}, {PINNED_LIMIT: "10"}, {PINNED_LIMIT: "many"}])
def test_pinned_memory_that_is_too_small(told_before, monkeypatch):
    plan = budget.small_plan("host")
    gib = 1 if told_before.get(PINNED_LIMIT) == "many" else 64
    monkeypatch.setattr(host_budget, "_local_devices", lambda plan: [budget.Gpu()])
    tiers = {"optimizer state": {"host": gib * budget.GIB}}
    monkeypatch.setattr(host_budget, "role_tiers", lambda plan: tiers)
    check = lambda environ: host_budget.check_pinned_limit(plan, environ)  # noqa: E731
    if gib == 1:
        told(lambda: check(told_before), r"is not a whole number of GiB; set it, or unset it$")
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


# --- runs with state in files ---------------------------------------------------------------------


def durable_run(folder: Path, zero: int = 1, steps: int = 2, **options: Any) -> int:
    """Steps after a run, of a durable store with checkpoints after each."""
    settings = {"opt_state": "nvme", "durable": True, "min_elements": 1, "slice_elements": 8}
    settings |= {"folder": str(folder / "store"), **options}
    trainer = zerojax.train(
        Line,
        {"zero": zero, "offload": settings},
        [BATCH],
        loss=squared,
        optimizer=zerojax.adamw(1e-2),
        steps=steps,
        checkpoint=zerojax.config.CheckpointConfig(path=str(folder / "run"), every=1),
    )
    trainer.close()
    return trainer.num_steps


def damaged_state(folder: Path) -> None:
    path = max(folder.glob("store/process_0/state-*.npz"))
    os.truncate(path, 20)


def stateless(folder: Path) -> None:
    path = max(folder.glob("store/process_0/state-*.npz"))
    arrays = dict(np.load(path))
    arrays.pop("step")
    about = {
        key: json.loads(value.tobytes())
        for key, value in arrays.items()
        if "kinds" in str(value.tobytes())
    }
    ((name, found),) = about.items()
    found["kinds"].pop("step")
    arrays[name] = np.frombuffer(json.dumps(found).encode(), np.uint8)
    np.savez(path, **arrays)


@pytest.mark.thorough
@pytest.mark.parametrize("harm", [damaged_state, stateless])
def test_a_damaged_store_of_a_run(harm, tmp_path):
    durable_run(tmp_path)
    harm(tmp_path)
    (path,) = told(
        lambda: durable_run(tmp_path),
        r"^(\S+): .*delete its folder to go on from the last checkpoint$",
    )
    assert Path(path).parent == tmp_path / "store" / "process_0"
    shutil.rmtree(Path(path).parent)
    assert durable_run(tmp_path) == 2


@pytest.mark.thorough
def test_a_store_of_another_plan(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    durable_run(first)
    newest = max(first.rglob("metadata.json"), key=lambda path: int(path.parent.name)).parent
    shutil.rmtree(newest)  # so that the store is ahead of the checkpoints
    shutil.copytree(first, second)
    pattern = (
        r"^(\S+): .*; go on with what it was made with and save a checkpoint, .*, or delete the"
    )
    told(lambda: durable_run(first, zero=0), pattern)
    assert durable_run(first) == 2
    assert durable_run(first, zero=0, steps=3) == 3
    (store,) = told(lambda: durable_run(second, zero=0), pattern)
    shutil.rmtree(store)
    assert durable_run(second, zero=0) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("durable", [False, True])
def test_a_sweep_that_stopped_half_way(durable, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        error = OSError(errno.EIO, "the disk is gone")
        broken.setattr(BucketStore, "_commit", lambda *_: (_ for _ in ()).throw(error))
        told(
            lambda: durable_run(tmp_path, durable=durable),
            r"; start the run again: it goes on from the last (whole step|checkpoint)$",
        )
    assert durable_run(tmp_path, durable=durable) == 2


# --- runs of text ---------------------------------------------------------------------------------


def decoder(rngs: nnx.Rngs) -> Any:
    """Its table of tokens is large enough to be split."""
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_seq_len": 16}
    return zerojax.models.GPT2(zerojax.models.GPT2Config(vocab_size=20_000, **sizes), rngs=rngs)


def own_loss(model, batch):
    total, weight = model.loss(batch)
    return 2 * total, weight


def own_loss_of_logits(model, batch):
    return 2 * jnp.mean(jax.nn.logsumexp(model(batch["tokens"]), -1))


def text_run(folder: Path, **options: Any) -> Path:
    sizes = {"global_batch_size": 8, "seq_len": 8, "steps": 1, "eval_batches": 1}
    zerojax.train(decoder, None, checkpoint=folder, **sizes | options).close()
    return folder


@pytest.mark.thorough
def test_a_loss_of_ones_own_for_a_decoder(tmp_path):
    folder = text_run(tmp_path / "own", loss=own_loss)
    loaded = zerojax.load_run(folder)  # to generate
    (code,) = told(
        lambda: loaded.evaluate(num_batches=1),
        r"; give it: (zerojax\.load_run\('.*', loss=LOSS\))$",
    )
    found = eval(code, {"zerojax": zerojax, "LOSS": own_loss}).evaluate(num_batches=1)
    assert np.isfinite(found["loss"])


@pytest.mark.thorough
def test_a_loss_of_ones_own_for_a_model_that_generates_nothing(tmp_path):
    sizes = zerojax.models.BertConfig(
        vocab_size=32, num_layers=1, num_heads=2, embed_dim=8, mlp_dim=16, max_seq_len=8
    )
    tokens = np.arange(64, dtype=np.int32).reshape(8, 8) % 32
    batch = {"tokens": tokens, "targets": tokens}
    given = {"loss": own_loss_of_logits, "checkpoint": tmp_path / "run", "validation": [batch]}
    model = lambda rngs: zerojax.models.Bert(sizes, rngs=rngs)  # noqa: E731
    trainer = zerojax.train(model, None, [batch], steps=1, **given)
    expected = trainer.evaluate()["loss"]
    trainer.close()
    (code,) = told(
        lambda: zerojax.load_run(tmp_path / "run"),
        r"; give it: (zerojax\.load_run\('.*', loss=LOSS\))$",
    )
    loaded = eval(code, {"zerojax": zerojax, "LOSS": own_loss_of_logits})
    assert loaded.evaluate([batch])["loss"] == expected


@pytest.mark.thorough
def test_other_settings_of_a_run(tmp_path):
    """As if the run had had other settings, which its record is read for."""
    folder = text_run(tmp_path / "run")
    good = json.loads((folder / "run.json").read_text())
    write = lambda record: (folder / "run.json").write_text(json.dumps(record))  # noqa: E731
    write({**good, "data": {**good["data"], "validation_fraction": 0.0}})
    (least,) = told(
        zerojax.load_run(folder).evaluate,
        r"left nothing to evaluate on; train with a fraction above (0)$",
    )
    assert good["data"]["validation_fraction"] > float(least)
    write(good)
    assert np.isfinite(zerojax.load_run(folder).evaluate(num_batches=1)["loss"])
    offload = {**good["mesh"]["offload"], "params": "host", "opt_state": "host"}
    write({**good, "mesh": {**good["mesh"], "zero": 0, "offload": offload}})
    with pytest.warns(UserWarning, match="split them over all devices") as caught:
        zerojax.load_run(folder)
    pattern = r"devices, ([\d.]+) KiB of each.*: mesh=(\{.*\})$"
    whole, mesh = re.search(pattern, str(caught[0].message)).groups()
    write(good)
    loaded = zerojax.load_run(folder, mesh=eval(mesh))
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(loaded.state["params"]))
    assert held < 1024 * float(whole) / 7
