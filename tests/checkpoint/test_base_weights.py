"""Frozen weights that checkpoints leave in their folder: bytes, bits, refusals, exports."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.checkpoint.test_frozen_dtype import BF16, large_plan, same_bits
from tests.support.hugging_face_folders import CASES, FAMILIES, tensors_of, write_folder
from tests.support.marks import slow, thorough
from tests.support.process_groups import free_port, run_group
from tests.support.trajectories import plan_for
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedError
from zerojax.checkpoint.base_weights import BaseWeights
from zerojax.checkpoint.errors import BaseWeightsError
from zerojax.checkpoint.metadata import FORMAT, problem_with, read_metadata
from zerojax.cli import main
from zerojax.config import CheckpointConfig, LoraConfig
from zerojax.optim.precision import as_precision
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state
from zerojax.tracing.trees import format_bytes, num_bytes
from zerojax.training.checkpointing import as_begun, base_of, restore_state, save_state
from zerojax.zoo.hugging_face import UnsupportedError, arrays_in

ABOUT: dict[str, Any] = {"data_state": {}, "config": {}, "plan": {}}
LORA = LoraConfig(rank=2, alpha=4.0)
FILE = "model.safetensors"
TOKENS = np.random.default_rng(0).integers(0, 20, (8, 8), np.int32)
BATCH = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A Llama of 3 layers in float32; 4,000 ids, so that its two tables are most of it."""
    tensors = tensors_of("llama")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (4000, 16))
    folder = tmp_path_factory.mktemp("theirs") / "llama"
    return write_folder(folder, "llama", tensors=tensors, vocab_size=4000)


def lora_plan(folder: Path, precision: str = "bf16", **options: Any) -> Any:
    options = {"freeze": LORA.freeze, "persistence_threshold": 0, **options}
    options.setdefault("optimizer", zerojax.adamw(1e-2))
    model = options.pop("model", None) or zerojax.from_hugging_face(folder).with_lora(LORA)
    batch = lambda _: BATCH  # noqa: E731
    return plan_for(model, batch=batch, precision=as_precision(precision), **options)


def save(path: Path, plan: Any, state: Any, frozen: Any = "auto", step: int = 2) -> Path:
    """The folder of the step."""
    base, _ = base_of(plan, frozen)
    base = None if base is None else as_begun(base, plan, state)
    with Checkpointer(path) as checkpointer:
        save_state(checkpointer, plan, state, step=step, about=ABOUT, base=base)
    return path / str(step)


def restore(path: Path, plan: Any) -> Any:
    with Checkpointer(path) as checkpointer:
        return restore_state(checkpointer, plan)


@pytest.fixture(scope="module")
def saved(theirs, tmp_path_factory) -> Path:
    """A run's checkpoints, step 2, without frozen weights; other tests read them."""
    path = tmp_path_factory.mktemp("saved")
    plan = lora_plan(theirs, devices=1)
    save(path, plan, init_state(plan, 0))
    return path


def moved(theirs: Path, folder: Path, change: Any = None) -> Path:
    """A copy of the folder; `change` gets the bytes of its file."""
    shutil.copytree(theirs, folder)
    if change is not None:
        content = bytearray((folder / FILE).read_bytes())
        change(content)
        (folder / FILE).write_bytes(content)
    return folder


def flip(content: bytearray) -> None:
    content[-1] ^= 0x40  # of the last float32 the exponent


@pytest.mark.thorough
def test_a_step_has_the_bytes_of_what_trains_and_no_others(theirs, saved, tmp_path):
    plan = lora_plan(theirs, devices=1)
    state = plan.abstract_portable
    frozen = num_bytes(state["frozen"])
    whole = save(tmp_path, plan, init_state(plan, 0), "saved")
    sizes = [
        sum(x.stat().st_size for x in each.rglob("*") if x.is_file())
        for each in (saved / "2", whole)
    ]
    metadata, of_whole = (read_metadata(each) for each in (saved / "2", whole))
    assert metadata.arrays == of_whole.arrays
    assert metadata.fingerprints == of_whole.fingerprints
    assert metadata.base["arrays"] == sorted(f"frozen/{name}" for name in state["frozen"])
    assert (metadata.format, of_whole.format, of_whole.base) == (FORMAT, 2, {})
    # Beside arrays there are tables, a few kilobytes, and more of them in the whole one.
    trained = num_bytes(state) - frozen
    assert sizes[0] - trained <= sizes[1] - num_bytes(state)
    assert sizes[0] < frozen / 3
    assert trained < frozen / 10


MESHES = {
    "3": thorough({"zero": 3}),
    "tensor": thorough({"zero": 1, "mesh": {"data": 4, "model": 2}}),
    "pipeline": thorough({"zero": 1, "mesh": {"data": 2, "stage": 3}, "devices": 6}),
    "layers on the host": slow(
        {
            "zero": 3,
            "devices": 2,
            "offload": {"opt_state": "host", "params": "host", "min_elements": 1},
        }
    ),
    "host": slow({"zero": 2, "devices": 2, "offload": {"opt_state": "host", "min_elements": 1}}),
}


@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("precision", ["bf16", thorough("fp32")])
def test_any_mesh_restores_every_bit(options, precision, theirs, tmp_path):
    first = lora_plan(theirs, precision, zero=3, devices=2)
    state = init_state(first, 0)
    second = lora_plan(theirs, precision, **options)
    save(tmp_path / "left", first, state)
    save(tmp_path / "whole", first, state, "saved")
    restored, left = restore(tmp_path / "left", second)
    assert len(restored.base) == 12
    same_bits(left, reshard_state(first, second, state))
    same_bits(left, restore(tmp_path / "whole", second)[1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            None,
            r"reads 12 frozen arrays from \S+/gone, which does not exist; put the original files",
        ),
        (flip, r"where 'frozen/\S+' \(in model.safetensors\) differs from the run's values; put"),
        (lambda content: content.pop(), r"/there, which cannot be read: .*is truncated"),
    ],
    ids=["gone", "one bit", "cut"],
)
def test_other_files_are_refused_with_the_way_out(change, what, theirs, saved, tmp_path):
    place = tmp_path / "gone"
    if change is not None:
        place = moved(theirs, tmp_path / "there", change)
    with Checkpointer(saved) as checkpointer:
        plan = lora_plan(theirs, devices=1)
        with pytest.raises(BaseWeightsError, match=what) as told:
            checkpointer.restore(plan.abstract_portable, pretrained=place)
        for way in ("--pretrained FOLDER", "model.pretrained=FOLDER", "checkpoint.frozen=saved"):
            assert way in str(told.value)
        found = checkpointer.verify(pretrained=place)
        assert checkpointer.usable_step() == 2  # the step itself is whole
    assert not found.is_good
    if change is flip:
        assert [x.leaf for x in found.damages] == [str(told.value).split("'")[1]]
        assert found.damages[0].what == f"differs from what was saved ({place} has other values)"
    else:
        (damage,) = found.damages
        assert (damage.file, damage.leaf) == (str(place), None)
    assert main(["checkpoint", "verify", str(saved), "--pretrained", str(place)]) == 1


@pytest.mark.thorough
def test_a_folder_that_has_moved_is_named(theirs, saved, tmp_path):
    place = moved(theirs, tmp_path / "there")
    (place / "model.safetensors").rename(place / "weights.safetensors")  # another name will do
    plan = lora_plan(place, devices=1)
    restored, state = restore(saved, plan)
    assert restored.base.keys() == {f"frozen/{name}" for name in state["frozen"]}
    same_bits(state, init_state(plan, 0))
    assert main(["checkpoint", "verify", str(saved), "--pretrained", str(place)]) == 0


@pytest.mark.thorough
def test_a_change_that_rounding_takes_away_is_none(theirs, saved, tmp_path):
    """The lowest byte of a float32 is below bfloat16's eight bits."""

    def lowest(content: bytearray) -> None:
        content[-4] ^= 0x01

    place = moved(theirs, tmp_path / "there", lowest)
    _, state = restore(saved, lora_plan(place, devices=1))
    same_bits(state, init_state(lora_plan(theirs, devices=1), 0))


@pytest.mark.thorough
def test_a_folder_that_changes_under_way_makes_checkpoints_whole(theirs, tmp_path):
    place = moved(theirs, tmp_path / "there")
    plan = lora_plan(place, devices=1)
    state, (opened, _) = init_state(plan, 0), base_of(plan)
    assert opened is not None
    base = as_begun(opened, plan, state)
    with Checkpointer(tmp_path / "run") as checkpointer:
        save_state(checkpointer, plan, state, step=1, about=ABOUT, base=base)
        content = bytearray((place / FILE).read_bytes())
        flip(content)
        (place / FILE).write_bytes(content)
        with pytest.warns(RuntimeWarning, match=r"model.safetensors was changed"):
            save_state(checkpointer, plan, state, step=2, about=ABOUT, base=base)
        (place / FILE).unlink()
        with pytest.warns(RuntimeWarning, match=r"model.safetensors cannot be read \(no such"):
            save_state(checkpointer, plan, state, step=3, about=ABOUT, base=base)
        checkpointer.wait()
        assert [bool(checkpointer.metadata(step).base) for step in (1, 2, 3)] == [
            True,
            False,
            False,
        ]
        restored, again = restore_state(checkpointer, plan)
        assert restored.step == 3
        same_bits(again, state)
        with pytest.raises(CheckpointError, match=r"where model.safetensors is missing; put "):
            checkpointer.check_step(1)


def test_what_is_left_and_what_is_said(theirs, tmp_path):
    plan = lora_plan(theirs, devices=1)
    base, said = base_of(plan)
    size = format_bytes(num_bytes(plan.abstract_portable["frozen"]))
    assert base is not None
    assert base.folder == theirs
    assert set(base.files) == {FILE}
    assert said == (
        f"checkpoints do not store {size} of frozen weights, which are in {theirs}; do "
        "not change that folder (checkpoint.frozen=saved: checkpoints hold all weights)"
    )
    kept = base_of(plan, "saved")
    assert kept == (None, f"checkpoints hold frozen weights ({size}): checkpoint.frozen=saved")
    in_memory = lora_plan(
        theirs, devices=1, model=zerojax.from_hugging_face(theirs).to_model(), freeze=("mlp/",)
    )
    none, said = base_of(in_memory)
    assert none is None
    assert said is not None
    assert said.endswith("they do not come from a Hugging Face folder")
    with pytest.raises(
        ValueError, match=r"frozen=source: they do not come from a.*folder.*frozen=saved"
    ):
        base_of(in_memory, "source")
    assert base_of(lora_plan(theirs, devices=1, freeze=())) == (None, None)
    tensors = {name: x for name, x in tensors_of("llama").items() if name != "lm_head.weight"}
    headless = write_folder(tmp_path / "headless", "llama", tensors=tensors)
    new = zerojax.from_hugging_face(headless, new=("lm_head",)).with_lora(LORA)
    begun, _ = base_of(lora_plan(headless, devices=1, model=new))
    assert begun is not None
    assert set(base.arrays) - set(begun.arrays) == {"frozen/lm_head/kernel"}
    durable = {"opt_state": "nvme", "folder": str(tmp_path), "durable": True, "min_elements": 1}
    files, said = base_of(lora_plan(theirs, devices=1, offload=durable))
    assert files is None
    assert said is not None
    assert said.endswith("a run with offload.durable may resume from its own files")


def test_only_what_a_state_has_from_the_folder_stays_there():
    base = BaseWeights(folder=Path("/a"), files={FILE: (1, 2)}, arrays=("frozen/a", "frozen/b"))
    some = base.as_read({"frozen/b": "1", "frozen/c": "2"})
    assert some is not None
    assert (some.arrays, some.fingerprints) == (("frozen/b",), {"frozen/b": "1"})
    assert (some.folder, some.files) == (base.folder, base.files)
    assert base.as_read({}) is None


@pytest.mark.thorough
def test_frozen_weights_that_somebody_puts_into_a_state_are_saved(theirs, tmp_path):
    """Zeros in the place of a table: nothing could read them again."""
    plan = lora_plan(theirs, devices=1)
    state, (opened, _) = init_state(plan, 0), base_of(plan)
    assert opened is not None
    base = as_begun(opened, plan, state)
    state["frozen"]["lm_head/kernel"] = jnp.zeros_like(state["frozen"]["lm_head/kernel"])
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(
            RuntimeWarning, match=r"'frozen/lm_head/kernel' differs from what was read from there"
        ):
            save_state(checkpointer, plan, state, step=1, about=ABOUT, base=base)
        restored, again = restore_state(checkpointer, plan)
    assert restored.base == {}
    same_bits(again, state)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("base", "what"),
    [
        ([1], r"'base' is \[1\] instead of an object with folder, files and arrays"),
        ({"folder": "a"}, r"instead of an object with folder, files and arrays"),
        ({"folder": "a", "files": {FILE: 1}, "arrays": ["a"]}, r"which is not an absolute path"),
        ({"folder": "/a", "files": {}, "arrays": ["a"]}, r"has the files .* instead of an object"),
        ({"folder": "/a", "files": {"../x": 1}, "arrays": ["a"]}, r"for the file '../x'"),
        ({"folder": "/a", "files": {FILE: -1}, "arrays": ["a"]}, r"has -1 for the file"),
        ({"folder": "/a", "files": {FILE: 1}, "arrays": []}, r"has the array \[\]"),
        ({"folder": "/a", "files": {FILE: 1}, "arrays": ["b"]}, r"which 'arrays' does not have"),
        ({"folder": "/a", "files": {FILE: 1}, "arrays": ["c"]}, r"which has no fingerprint"),
    ],
)
def test_metadata_that_somebody_wrote_is_looked_at(base, what):
    body = {
        "arrays": {"a": "float32[2]", "c": "float32[2]"},
        "fingerprints": {"a": "0" * 16},
        "base": base,
    }
    with pytest.raises(AssertionError, match=what):
        assert problem_with(body) is None, problem_with(body)


@pytest.mark.thorough
def test_an_average_of_adapters_goes_with_them(theirs, tmp_path):
    plan = lora_plan(
        theirs, devices=2, zero=1, optimizer=zerojax.with_ema(zerojax.adamw(1e-2), 0.9)
    )
    state = init_state(plan, 0)
    step = save(tmp_path / "left", plan, state)
    save(tmp_path / "whole", plan, state, "saved")
    assert any(name.startswith("opt_state/ema/") for name in read_metadata(step).arrays)
    assert all(name.startswith("frozen/") for name in read_metadata(step).base["arrays"])
    other = lora_plan(theirs, zero=3, optimizer=zerojax.with_ema(zerojax.adamw(1e-2), 0.9))
    same_bits(restore(tmp_path / "left", other)[1], reshard_state(plan, other, state))
    for weights in ("trained", "ema"):
        out = [tmp_path / f"{weights}_{name}" for name in ("left", "whole")]
        for folder, name in zip(out, ("left", "whole"), strict=True):
            words = ["checkpoint", "export", str(tmp_path / name), str(folder)]
            assert main([*words, "--weights", weights]) == 0
        assert (out[0] / FILE).read_bytes() == (out[1] / FILE).read_bytes()


def train(folder: Path, run: Path, steps: int, mesh: Any, frozen: Any = "auto") -> Any:
    with zerojax.train(
        zerojax.from_hugging_face(folder).with_lora(LORA),
        mesh,
        [BATCH] * steps,
        optimizer=zerojax.adamw(0.1),
        precision="bf16",
        steps=steps,
        checkpoint=CheckpointConfig(path=str(run / "checkpoints"), frozen=frozen),
        run_dir=run,
        freeze=LORA.freeze,
    ) as trainer:
        return trainer


@pytest.mark.slow
def test_runs_go_on_and_are_exported_as_from_whole_checkpoints(theirs, tmp_path, capsys):
    place = moved(theirs, tmp_path / "place")
    trainers = {}
    for frozen in ("auto", "saved"):
        run = tmp_path / frozen
        train(place, run, 2, {"data": 8, "zero": 3, "persistence_threshold": 0}, frozen)
        trainers[frozen] = train(place, run, 4, {"data": 4, "model": 2, "zero": 1}, frozen)
    same_bits(trainers["auto"].state, trainers["saved"].state)
    runs = tmp_path / "auto", tmp_path / "saved"
    for words in (["--format", "hugging_face"], ["--format", "peft"], ["--dtype", "bf16"], []):
        out = [tmp_path / f"{'_'.join(words)}{name}" for name in ("left", "whole")]
        for run, folder in zip(runs, out, strict=True):
            assert main(["checkpoint", "export", str(run), str(folder), *words]) == 0
        (file,) = (x.name for x in out[0].glob("*.safetensors"))
        assert (out[0] / file).read_bytes() == (out[1] / file).read_bytes()
    loaded = [zerojax.load_run(run) for run in runs]
    same_bits(loaded[0].state, loaded[1].state)
    assert loaded[0].evaluate([BATCH]) == loaded[1].evaluate([BATCH])
    # From here on the folder is elsewhere.
    there = place.rename(tmp_path / "there")
    for read in (zerojax.load_run, lambda run: zerojax.to_hugging_face(run, tmp_path / "none")):
        with pytest.raises(BaseWeightsError, match=r"/place, which does not exist; put .*back"):
            read(runs[0])
    zerojax.to_peft(runs[0], tmp_path / "adapters")  # needs no frozen weight
    same_bits(zerojax.load_run(runs[0], pretrained=there).state, loaded[0].state)
    zerojax.to_hugging_face(runs[0], tmp_path / "merged", pretrained=there)
    merged = tmp_path / "--format_hugging_faceleft"
    assert (tmp_path / "merged" / FILE).read_bytes() == (merged / FILE).read_bytes()
    longer = train(there, runs[0], 6, {"data": 8, "zero": 3})
    assert longer.num_steps == 6
    metadata = read_metadata(runs[0] / "checkpoints" / "6")
    assert metadata.base["folder"] == str(there)
    # A run whose frozen weights came from a checkpoint goes on to save them.
    train(there, runs[1], 6, {"data": 8, "zero": 3}, "auto")
    assert read_metadata(runs[1] / "checkpoints" / "6").base == {}
    said = " ".join(capsys.readouterr().out.split())
    assert "step 4 holds frozen weights, and later steps will, too" in said
    assert f"of frozen weights, which are in {there}; do not change" in said
    assert "checkpoints hold frozen weights (261.5 KiB): checkpoint.frozen=saved" in said
    assert not list((tmp_path / "auto" / "checkpoints").glob("*.damaged"))


@pytest.mark.thorough
def test_a_run_that_cannot_read_them_again_says_so_before_it_begins(theirs, tmp_path):
    with pytest.raises(
        ValueError, match=r"checkpoint.frozen=source: they do not come from a Hugging Face folder"
    ):
        zerojax.train(
            zerojax.from_hugging_face(theirs).to_model(),
            {"data": 8},
            [BATCH],
            freeze=("mlp/",),
            checkpoint=CheckpointConfig(path=str(tmp_path / "run"), frozen="source"),
            run_dir=None,
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_fingerprints_of_frozen_weights_are_kept_where_others_are_not(theirs, tmp_path):
    plan = lora_plan(theirs, devices=1)
    state, (opened, _) = init_state(plan, 0), base_of(plan)
    assert opened is not None
    base = as_begun(opened, plan, state)
    assert base is not None
    with Checkpointer(tmp_path, fingerprints=False) as checkpointer:
        save_state(checkpointer, plan, state, step=1, about=ABOUT, base=base)
        checkpointer.wait()
        assert checkpointer.metadata(1).fingerprints == base.fingerprints
        same_bits(restore_state(checkpointer, plan)[1], state)
        assert checkpointer.verify(1).is_good


@pytest.mark.thorough
def test_a_damaged_step_is_still_passed_over(theirs, tmp_path):
    plan = lora_plan(theirs, devices=1)
    state = init_state(plan, 0)
    for step in (2, 4):
        save(tmp_path, plan, state, step=step)
    found = [x for x in (tmp_path / "4" / "arrays").rglob("*") if x.is_file()]
    largest = max(found, key=lambda x: x.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 2 is used in its place"):
            restored, again = restore_state(checkpointer, plan)
        with pytest.raises(DamagedError):
            restore_state(checkpointer, plan, 4)
    assert restored.step == 2
    same_bits(again, state)
    assert json.loads((tmp_path / "2" / "metadata.json").read_text())["base"]["folder"] == str(
        theirs
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", sorted({**CASES, **FAMILIES}))
def test_every_family_finds_its_arrays_by_name(case, tmp_path):
    folder = write_folder(tmp_path / case, case)
    stored = zerojax.from_hugging_face(folder).stored
    found = arrays_in(folder, {name: array.shape for name, array in stored.items()})
    for name, array in stored.items():
        assert (found[name].tensors, found[name].files) == (array.tensors, [FILE])
        box = [(0, size) for size in array.shape]
        np.testing.assert_array_equal(found[name].read(box), array.read(box))
    with pytest.raises(UnsupportedError, match="has no 'other/kernel'"):
        arrays_in(folder, {"other/kernel": (2,)})


@pytest.mark.thorough
def test_values_are_rounded_as_those_of_a_new_state(theirs, saved):
    plan = lora_plan(theirs, devices=1)
    frozen = restore(saved, lora_plan(theirs, devices=2, zero=0))[1]["frozen"]
    for array in frozen.values():  # a step that is donated one copy writes over no other
        one, other = (x.data.unsafe_buffer_pointer() for x in array.addressable_shards)
        assert one != other
    stored = restore(saved, plan)[1]["frozen"]["lm_head/kernel"]
    assert stored.dtype == jnp.bfloat16
    values = np.resize(tensors_of("llama")["lm_head.weight"], (4000, 16))
    np.testing.assert_array_equal(np.asarray(stored), values.T.astype(jnp.bfloat16))


def test_a_7b_with_adapters_is_saved_in_half_a_gigabyte():
    """Bytes by the plan: rank 16 beside all projections of Llama 2 7B, AdamW, bf16."""
    state = large_plan("7B", BF16).abstract_portable
    whole, frozen = num_bytes(state), num_bytes(state["frozen"])
    assert whole == pytest.approx(13.96e9, rel=1e-3)
    assert whole - frozen == pytest.approx(0.480e9, rel=1e-2)


WORKER = """
    import json, sys, jax
    from pathlib import Path
    address, process = sys.argv[1], int(sys.argv[2])
    folder, path = Path(sys.argv[3]), Path(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, 2, process)
    import numpy as np
    from tests.checkpoint.test_base_weights import lora_plan, restore, save, flip_file, local_bits
    from zerojax.checkpoint import CheckpointError
    from zerojax.zoo.hugging_face import folder as opened
    from zerojax.step.initialization import init_state

    read = [0]
    read_block = opened.read_block

    def counting(*args):
        block, count = read_block(*args)
        read[0] += count
        return block, count

    opened.read_block = counting
    plan = lora_plan(folder, zero=3, devices=4)
    state = init_state(plan, 0)
    out = {"begun": read[0]}
    save(path, plan, state)
    read[0] = 0
    restored, again = restore(path, plan)
    out["restored"], out["same"] = read[0], local_bits(state) == local_bits(again)
    if process == 0:
        flip_file(folder)
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("flipped")
    try:
        restore(path, plan)
    except CheckpointError as error:
        out["told"] = [type(error).__name__, str(error)]
    with open(f"{path}.{process}.json", "w") as file:
        json.dump(out, file)
"""


def flip_file(folder: Any) -> None:
    content = bytearray((Path(folder) / FILE).read_bytes())
    flip(content)
    (Path(folder) / FILE).write_bytes(content)


def local_bits(state: Any) -> list[list[bytes]]:
    shards = [leaf.addressable_shards for leaf in jax.tree.leaves(state)]
    return [[np.asarray(shard.data).tobytes() for shard in each] for each in shards]


@pytest.mark.slow
@pytest.mark.multihost
def test_each_of_two_processes_reads_its_own_parts_and_is_told(theirs, tmp_path):
    place, path = moved(theirs, tmp_path / "place"), tmp_path / "run"
    words = ["-c", textwrap.dedent(WORKER), f"127.0.0.1:{free_port()}"]
    run_group(
        [[*words, str(n), str(place), str(path)] for n in range(2)],
        folder=Path.cwd(),
        variables={"JAX_PLATFORMS": "cpu"},
    )
    found = [json.loads(Path(f"{path}.{n}.json").read_text()) for n in range(2)]
    frozen = sum(x.nbytes for x in tensors_of("llama").values()) + 2 * (4000 - 20) * 16 * 4
    for one in found:
        assert one["same"]
        assert one["restored"] == one["begun"]
        assert one["restored"] < 0.51 * frozen  # norms alone are on both
        kind, text = one["told"]
        assert kind == "BaseWeightsError"
        assert (
            "(in model.safetensors) differs from the run's values; put the original files back"
            in text
        )
