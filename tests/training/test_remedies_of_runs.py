"""Refusals of models' files, offloaded state and runs."""

from __future__ import annotations

import collections
import dataclasses
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
from tests.plan import test_host_budget as budget
from tests.support.hugging_face_folders import CASES, tensors_of, write_folder
from tests.support.pipeline_runs import small
from tests.support.refusals import Refusal, check_words, code_in, complaint, refused
from tests.support.small_models import Line
from tests.support.trajectories import plan_for, text_batch
from zerojax.checkpoint.store import BucketStore
from zerojax.checkpoint.store.direct_io import StoreError
from zerojax.cli import main
from zerojax.config import ConfigError, RunConfig, load
from zerojax.models.losses import next_token
from zerojax.runtime.memory import PINNED_LIMIT, Room
from zerojax.step import host_budget
from zerojax.step.build import build_evaluation
from zerojax.step.initialization import init_state
from zerojax.training import run_file
from zerojax.training.run_file import spec_from_config
from zerojax.training.run_record import abstract_of, read_record
from zerojax.zoo.hugging_face import from_hugging_face
from zerojax.zoo.hugging_face.architectures import ARCHITECTURES
from zerojax.zoo.hugging_face.folder import INDEX, SINGLE

SMALL = (
    "model.num_layers=1 model.embed_dim=16 model.num_heads=2 data.seq_len=16 model.max_seq_len=16"
    " global_batch_size=8"
)

# --- models' files --------------------------------------------------------------------------------


def test_folders_of_models(tmp_path):
    good, bad = write_folder(tmp_path / "good", "llama_tied"), tmp_path / "bad"

    def absent(remedy: str) -> None:
        refused(lambda: from_hugging_face(bad), [bad], remedy, error=FileNotFoundError)

    absent("config.json *.safetensors")
    from_hugging_face(good)
    bad.mkdir()
    absent("config.json save_pretrained")
    shutil.copy(good / "config.json", bad)
    absent(f"{SINGLE} {INDEX}")
    for name in "ab":
        shutil.copy(good / SINGLE, bad / f"{name}.safetensors")
    absent(f"a.safetensors b.safetensors {SINGLE}")
    (bad / "a.safetensors").rename(bad / SINGLE)
    from_hugging_face(bad)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def no_table(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def no_file(folder: Path) -> None:
    parts(folder)[0].unlink()


def twice(folder: Path) -> None:
    first, second, *_ = parts(folder)
    name, *_ = load_file(first)
    save_file({**load_file(second), name: np.ones(3, np.float32)}, second)


def cut(size: int) -> Any:
    return lambda folder: os.truncate(parts(folder)[0], size)


def changed(folder: Path) -> None:
    file = parts(folder)[0]
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F7"'))


def listed_elsewhere(folder: Path) -> None:
    first, *_ = parts(folder)
    tensors = load_file(first)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, first)


def longer(folder: Path) -> None:
    with parts(folder)[0].open("ab") as file:
        file.write(b"more")


PART = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    ("harm", "value"),
    [
        (no_table, f"{INDEX} weight_map"),
        (no_file, f"1 3 {PART}"),
        (twice, f"model.embed_tokens.weight {PART} {PART.replace('1', '2', 1)}"),
        (listed_elsewhere, f"model.embed_tokens.weight {PART} {INDEX}"),
        (cut(4), f"{PART} 4"),
        (cut(100), f"{PART} 712 100"),
        (changed, f"{PART} 705"),
        (longer, f"{PART} 4 7120"),
    ],
)
def test_damaged_files_are_fetched_again(harm, value, tmp_path):
    theirs = write_folder(tmp_path / "theirs", "llama_tied", shards=3)
    ours = Path(shutil.copytree(theirs, tmp_path / "ours"))
    harm(ours)
    error = FileNotFoundError if harm is no_file else ValueError
    refused(lambda: from_hugging_face(ours), value, "fetch", error=error)
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    from_hugging_face(ours)


def test_a_file_that_ends_while_it_is_read(tmp_path):
    folder = write_folder(tmp_path / "ours", "llama_tied")
    whole = (folder / SINGLE).read_bytes()
    pretrained = from_hugging_face(folder)
    os.truncate(folder / SINGLE, len(whole) // 2)
    value = [folder / SINGLE, "model.layers.1.input_layernorm.weight"]
    refused(pretrained.to_model, value, "fetch")
    (folder / SINGLE).write_bytes(whole)
    pretrained.to_model()


BERT = {"vocab_size": 20, "max_position_embeddings": 8, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "key", "bad", "good"),
    [
        ("gpt2", "activation_function", "relu", ["gelu_new", "gelu_pytorch_tanh"]),
        ("gpt2", "scale_attn_weights", False, [True]),
        ("llama", "hidden_act", "relu", ["silu", "swish"]),
        ("llama", "mlp_bias", True, [False, None]),
        ("bert", "position_embedding_type", "relative_key", ["absolute", None]),
        ("bert", "hidden_act", "relu", ["gelu", "gelu_new", "gelu_pytorch_tanh"]),
        ("bert", "is_decoder", True, [False, None]),
        ("bert", "add_cross_attention", True, [False, None]),
        ("bert", "tie_word_embeddings", False, [True, None]),
        ("bert", "architectures", ["BertForX"], [["BertModel"]]),
    ],
)
def test_values_in_their_config(kind, key, bad, good):
    config = CASES[kind]["config"] if kind in CASES else BERT
    read = lambda value: ARCHITECTURES[kind].read_config({**config, key: value})  # noqa: E731
    remedy = ['"architectures": ["BertModel"]'] if key == "architectures" else good
    Refusal(bad, [f"{key}={bad!r}"], remedy, good).check(read)


def test_positions_in_their_config():
    read, config = ARCHITECTURES["llama"].read_config, CASES["llama"]["config"]
    rope = {"factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    kinds = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    typed = lambda kind: read(  # noqa: E731
        {**config, "rope_parameters": {**rope, "rope_type": kind}}
    )
    Refusal("bent", "rope_parameters 'bent'", kinds, kinds).check(typed)


def test_parameters_that_the_files_do_not_have(tmp_path):
    tensors = {n: x for n, x in tensors_of("llama").items() if n != "lm_head.weight"}
    folder = write_folder(tmp_path / "headless", "llama", tensors=tensors)
    read = lambda options: from_hugging_face(folder, **options)  # noqa: E731
    new = {"new": ("lm_head/kernel",)}
    value = [folder, "lm_head.weight", "lm_head/kernel"]
    Refusal({}, value, ["new=('lm_head/kernel',)"], [new]).check(read)
    assert "1 new" in read(new).describe()
    # A setting that does not fit the files is no new parameter.
    value = [folder, "model.layers.0.mlp.gate_proj.weight", "[24, 16]", "[32, 16]"]
    message = refused(lambda: read({"mlp_dim": 32}), value, "config.json")
    assert "new=" not in message
    refused(lambda: read({"remt": "full"}), "LlamaConfig remt", "remat")
    read(new | {"remat": "full"})
    mixture = write_folder(tmp_path / "mixture", "mixtral")
    moe = dataclasses.replace(from_hugging_face(mixture).config.moe, shared_dim=8)
    options = {"moe": moe, "new": ()}
    for each in ("down", "gate", "up"):
        name = f"blocks/mlp/shared/{each}/kernel"
        message = refused(lambda: from_hugging_face(mixture, **options), f"{name} mixtral", "new")
        options["new"] += eval(code_in(message, "("))
    assert "3 new" in from_hugging_face(mixture, **options).describe()
    codes = write_folder(tmp_path / "codes", "llama", quantization_config={"quant_method": "gptq"})
    refused(lambda: from_hugging_face(codes), "quantization_config gptq", "unquantized")
    from_hugging_face(write_folder(tmp_path / "codes", "llama"))


# --- memory and disks of offloaded state ----------------------------------------------------------


def test_host_memory_that_is_too_small():
    plan = budget.small_plan("host")
    room = budget.room_for(plan, -4096)
    shares = "{host: 0.95, nvme: 0.05}"
    check = lambda plan: host_budget.check_host_memory(plan, room)  # noqa: E731
    good = [budget.small_plan(shares), budget.small_plan("host", zero=1)]
    remedy = ["offload.opt_state", shares, "zero=1"]
    Refusal(plan, '"14.0 MiB" 95', remedy, good).check(check)


def streamable(params: str, *, opt_state: str = "device", **options: Any) -> zerojax.Plan:
    offload = {"params": params, "opt_state": opt_state, "min_elements": 30}
    optimizer = zerojax.adamw(1e-3)
    return plan_for(small(), devices=2, zero=3, optimizer=optimizer, offload=offload, **options)


def test_host_memory_that_is_too_small_for_parameters():
    made = lambda params: streamable(params, opt_state="host", precision="bf16")  # noqa: E731
    plan, good = made("host"), made("device")
    room = budget.room_for(plan, -512)
    check = lambda plan: host_budget.check_host_memory(plan, room)  # noqa: E731
    assert host_budget.host_bytes(good) < host_budget.host_bytes(plan)
    Refusal(plan, '"30.7 KiB" "30.2 KiB"', "offload.params device devices", [good]).check(check)


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

    def evaluated(given: tuple[Any, str]) -> None:
        loss, params = given
        plan = streamable(params)
        placed = jax.device_put(batch, plan.batch_sharding)
        assert np.isfinite(build_evaluation(plan, loss)(init_state(plan, 0), placed)["loss"])

    for loss in no_layers, other_loop:
        good = [(loss, "device")]
        value = "blocks/linear/kernel loss"
        Refusal((loss, "host"), value, "offload.params device", good).check(evaluated)
    evaluated((same_layers, "host"))


@pytest.mark.parametrize(
    ("limit", "gib", "value", "good"),
    [(None, 64, 64, "68"), ("10", 64, 10, "68"), ("many", 1, "'many'", "2")],
)
def test_pinned_memory_that_is_too_small(limit, gib, value, good, monkeypatch):
    plan = budget.small_plan("host")
    monkeypatch.setattr(host_budget, "_local_devices", lambda plan: [budget.Gpu()])
    tiers = {"optimizer state": {"host": gib * budget.GIB}}
    monkeypatch.setattr(host_budget, "role_tiers", lambda plan: tiers)
    check = lambda environ: host_budget.check_pinned_limit(plan, environ)  # noqa: E731
    remedy = ["unset"] if limit == "many" else [f"{PINNED_LIMIT}={good}"]
    ways = [{PINNED_LIMIT: good}, *([{}] if limit == "many" else [])]
    bad = {} if limit is None else {PINNED_LIMIT: limit}
    Refusal(bad, [PINNED_LIMIT, value], remedy, ways).check(check)


def test_a_disk_that_is_too_small_for_files(tmp_path, monkeypatch):
    large, small = tmp_path / "large", tmp_path / "small"
    made = lambda tier="nvme", **given: budget.small_plan(  # noqa: E731
        tier, **{"durable": True, "folder": str(small), **given}
    )
    needed = host_budget.disk_bytes(made())
    free = {"large": needed, "small": needed // 2}
    monkeypatch.setattr(host_budget, "free_disk", lambda folder: free[Path(folder).parent.name])
    shares = [f"{{nvme: 0.25, {tier}: 0.75}}" for tier in ("host", "device")]
    good = [made(durable=False), made(folder=str(large))]
    good += [made(share, durable=False) for share in shares]
    value = ["3.0 MiB", "1.5 MiB", small / "process_0"]
    remedy = "offload.durable false offload.folder opt_state"
    Refusal(made(), value, remedy, good).check(host_budget.check_disk)
    free["small"] = needed
    host_budget.check_disk(made())


# --- runs -----------------------------------------------------------------------------------------


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


def test_an_export_is_not_a_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {}}')
    save_file({"w": np.ones(3, np.float32)}, tmp_path / SINGLE)
    remedy = "safetensors.numpy.load_file"
    refused(lambda: zerojax.load_run(tmp_path), [tmp_path, "exported"], remedy)


@pytest.mark.thorough
def test_a_run_is_read_back(run, tmp_path):
    refused(lambda: zerojax.load_run(tmp_path), [tmp_path], "run.json", error=FileNotFoundError)
    load = "zerojax.load_run("
    names = {"zerojax": zerojax, "MODEL": Line, "LOSS": squared, "run": run}
    message = refused(lambda: zerojax.load_run(run, model=Line), "loss", "loss=LOSS")
    loaded = eval(code_in(message, load).replace("...", "run"), names)
    refused(loaded.evaluate, [run, "batches"], "evaluate(batches)")
    assert np.isfinite(loaded.evaluate([BATCH])["loss"])
    refused(lambda: loaded.evaluate([]), "batch", "")


@pytest.mark.thorough
def test_batches_of_a_kind_of_ones_own(tmp_path):
    batch, folder = Pair(**BATCH), tmp_path / "pairs"
    zerojax.train(Line, None, [batch], loss=squared, steps=1, checkpoint=folder).close()
    read = lambda options: zerojax.load_run(folder, model=Line, loss=squared, **options)  # noqa: E731
    refused(lambda: read({}), [folder, "batches"], "example_batch=BATCH")
    assert np.isfinite(read({"example_batch": batch}).evaluate([batch])["loss"])


@pytest.mark.thorough
def test_a_model_of_ones_own_is_exported_under_its_own_names(run, tmp_path, capsys):
    words = ["checkpoint", "export", str(run), str(tmp_path / "out")]
    value, remedy = [run, "hugging_face.json"], ["zerojax checkpoint export", "--format"]
    complaint(capsys, [*words, "--format", "hugging_face"], value, remedy)
    assert main(words) == 0
    assert "out.kernel" in load_file(tmp_path / "out" / SINGLE)


def test_a_changed_record_of_a_run(run):
    record = json.loads((run / "run.json").read_text())
    read = lambda changes: read_record({**record, **changes}, "run.json")  # noqa: E731
    models = ["gpt2", "llama", "bert"]
    gpt2 = {"architecture": "gpt2"}
    rows = [
        ({"sizs": {}}, "sizs run.json", [*record], [{}]),
        (
            {"architecture": "os"},
            "architecture run.json",
            models,
            [{"architecture": name} for name in models],
        ),
        (
            gpt2 | {"sizes": {"x": 1}},
            "sizes x",
            "vocab_size",
            [gpt2 | {"sizes": {"vocab_size": 1}}],
        ),
        (
            {"precision": {"x": 1}},
            "precision x",
            "param_dtype",
            [{"precision": {"param_dtype": record["precision"]["param_dtype"]}}],
        ),
        ({"adapters": 3}, "adapters 3", "list", [{"adapters": []}]),
    ]
    for bad, value, remedy, good in rows:
        Refusal(bad, value, remedy, good, ConfigError).check(read)
    row = Refusal({"shape": "x"}, "batch shape", "", [record["batch"]], ConfigError)
    row.check(abstract_of)


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
        checkpoint=zerojax.CheckpointConfig(path=str(folder / "run"), every=1),
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
    store = tmp_path / "store" / "process_0"
    value = [store / "state-3.npz", "damaged" if harm is damaged_state else "step"]
    refused(lambda: durable_run(tmp_path), value, "delete checkpoint", error=StoreError)
    shutil.rmtree(store)
    assert durable_run(tmp_path) == 2


@pytest.mark.thorough
def test_a_store_of_another_plan(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    durable_run(first)
    newest = max(first.rglob("metadata.json"), key=lambda path: int(path.parent.name)).parent
    shutil.rmtree(newest)  # so that the store is ahead of the checkpoints
    shutil.copytree(first, second)

    def refused_in(folder: Path) -> Path:
        store, other = folder / "store" / "process_0", lambda: durable_run(folder, zero=0)
        refused(other, [store, "mesh"], "checkpoint delete", error=StoreError)
        return store

    refused_in(first)
    assert durable_run(first) == 2
    assert durable_run(first, zero=0, steps=3) == 3
    shutil.rmtree(refused_in(second))
    assert durable_run(second, zero=0) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(("durable", "whole"), [(False, "checkpoint"), (True, "step")])
def test_a_sweep_that_stopped_half_way(durable, whole, tmp_path, monkeypatch):
    given = lambda: durable_run(tmp_path, durable=durable)  # noqa: E731
    with monkeypatch.context() as broken:
        error = OSError(errno.EIO, "the disk is gone")
        broken.setattr(BucketStore, "_commit", lambda *_: (_ for _ in ()).throw(error))
        value = [tmp_path / "store" / "process_0", "the disk is gone"]
        refused(given, value, ["again", whole], error=StoreError)
    assert given() == 2


# --- runs of text ---------------------------------------------------------------------------------


def decoder(rngs: nnx.Rngs) -> Any:
    """Its table of tokens is large enough to be split."""
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_seq_len": 16}
    return zerojax.zoo.GPT2(zerojax.zoo.GPT2Config(vocab_size=20_000, **sizes), rngs=rngs)


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
    message = refused(lambda: loaded.evaluate(num_batches=1), [folder, "loss"])
    names = {"zerojax": zerojax, "LOSS": own_loss}
    loaded = eval(code_in(message, "zerojax.load_run("), names)
    assert np.isfinite(loaded.evaluate(num_batches=1)["loss"])


@pytest.mark.thorough
def test_a_loss_of_ones_own_for_a_model_that_generates_nothing(tmp_path):
    sizes = zerojax.zoo.BertConfig(
        vocab_size=32, num_layers=1, num_heads=2, embed_dim=8, mlp_dim=16, max_seq_len=8
    )
    tokens = np.arange(64, dtype=np.int32).reshape(8, 8) % 32
    batch, folder = {"tokens": tokens, "targets": tokens}, tmp_path / "run"
    given = {"loss": own_loss_of_logits, "checkpoint": folder, "validation": [batch]}
    model = lambda rngs: zerojax.zoo.Bert(sizes, rngs=rngs)  # noqa: E731
    trainer = zerojax.train(model, None, [batch], steps=1, **given)
    expected = trainer.evaluate()["loss"]
    trainer.close()
    message = refused(lambda: zerojax.load_run(folder), [folder, "loss"])
    names = {"zerojax": zerojax, "LOSS": own_loss_of_logits}
    loaded = eval(code_in(message, "zerojax.load_run("), names)
    assert loaded.evaluate([batch])["loss"] == expected


@pytest.mark.thorough
def test_other_settings_of_a_run(tmp_path):
    """As if the run had had other settings, which its record is read for."""
    folder = text_run(tmp_path / "run")
    good = json.loads((folder / "run.json").read_text())
    write = lambda record: (folder / "run.json").write_text(json.dumps(record))  # noqa: E731
    write({**good, "data": {**good["data"], "validation_fraction": 0.0}})
    loaded = zerojax.load_run(folder)
    refused(loaded.evaluate, "data.validation_fraction=0.0", "evaluate(batches)")
    write(good)
    assert np.isfinite(zerojax.load_run(folder).evaluate(num_batches=1)["loss"])
    offload = {**good["mesh"]["offload"], "params": "host", "opt_state": "host"}
    write({**good, "mesh": {**good["mesh"], "zero": 0, "offload": offload}})
    with pytest.warns(UserWarning, match="mesh=") as caught:
        zerojax.load_run(folder)
    message = check_words(str(caught[0].message), "offload.params KiB")
    whole = float(re.search(r"([\d.]+) KiB", message)[1])
    write(good)
    loaded = zerojax.load_run(folder, mesh=eval(code_in(message, "{")))
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(loaded.state["params"]))
    assert held < 1024 * whole / 7


# --- run files on this machine --------------------------------------------------------------------


def test_tokens_of_an_unknown_vocabulary(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16))

    def spec(words: str) -> None:
        data = f"data.path={tmp_path / 'tokens.npy'} run_dir={tmp_path / 'run'}"
        spec_from_config(load(RunConfig, None, [*data.split(), *SMALL.split(), *words.split()]))

    value, remedy = "tokens.npy tokens", "model.vocab_size"
    Refusal("", value, remedy, ["model.vocab_size=4000"]).check(spec)


def test_memory_of_devices_that_are_too_small(tmp_path, monkeypatch):
    def check(free: int) -> None:
        monkeypatch.setattr(run_file, "least_room", lambda: Room(free, free, "a test"))
        words = [*SMALL.split(), "model.vocab_size=64", f"run_dir={tmp_path}"]
        run_file.check_devices(load(RunConfig, None, words))

    remedy = 'GPUs "zerojax plan FILE --gpu h100 --devices N"'  # tests/cli/test_cli_plan.py
    Refusal(1000, '"950 B" 8', remedy, [1 << 30]).check(check)
