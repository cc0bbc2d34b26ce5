"""`zerojax checkpoint` on real checkpoints: what it says, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.offload.test_offload_disk_checkpoints import save as save_with_pieces
from tests.support.offload_disk_runs import close, offload, plan_of, train
from tests.support.refusals import check_words, refused
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint.deletion import STALE_SECONDS, removals
from zerojax.checkpoint.inspection import open_arrays, saved_steps
from zerojax.cli import main

CONFIG = {"model": {"width": 8}, "optimizer": {"lr": 0.1}}
PLAN = {"zero": 3, "mesh": {"data": 8}}


def state(seed: int) -> dict:
    random = np.random.default_rng(seed)
    host = {
        "step": np.int32(seed),
        "params": {
            "embed/kernel": random.normal(size=(64, 256)).astype(np.float32),
            "half/kernel": random.normal(size=(8, 2)).astype(ml_dtypes.bfloat16),
            "scale": np.float32(seed),
        },
        "frozen": {"table": np.arange(6, dtype=np.int32).reshape(2, 3)},
        "opt_state": {"mu": random.normal(size=(16, 8)).astype(np.float32)},
        "extras": {"mean": np.full((3,), 2.0, np.float32)},
    }
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(x):
        split = x.ndim == 2 and x.shape[0] % 8 == 0
        return jax.device_put(x, NamedSharding(mesh, P("data") if split else P()))

    return jax.tree.map(put, host)


def save(folder: Path, steps, **changes) -> Path:
    about = {"config": CONFIG, "plan": PLAN, "data_state": {}} | changes
    with Checkpointer(folder, keep=100) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), **about)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run folder with three steps, a tokenizer, and what stopped saves have left."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    save(run / "checkpoints", (10, 20, 30))
    (run / "tokenizer.json").write_text('{"a": 1}')
    (run / "config.json").write_text(json.dumps(CONFIG | {"checkpoint": {"path": None}}))
    return run


@pytest.fixture
def run(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "mine"))


def call(capsys, *words) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def flip_a_bit(folder: Path, name: str) -> Path:
    """In the values of an array, wherever they lie; small ones lie compressed with others."""
    values = np.asarray(state(int(folder.name))["params"][name]).reshape(-1)
    needle = values[: min(4, values.size)].tobytes()
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if (at := content.find(needle)) >= 0:
            changed = bytearray(content)
            changed[at] ^= 1
            path.write_bytes(changed)
            return path
    raise AssertionError(f"{name} is in no file")


# --- list -----------------------------------------------------------------------------------------


def test_list_shows_steps_sizes_and_what_is_left(run, capsys):
    folder = run / "checkpoints"
    (folder / "40.partial-1").mkdir()
    (folder / "40.partial-1" / "x").write_bytes(b"1234")
    (folder / "5.expired").mkdir()
    shutil.copytree(folder / "20", folder / "20.damaged")
    os.truncate(next((folder / "30" / "arrays").rglob("d/*")), 1)
    code, out, _ = call(capsys, "list", run)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "30"]
    assert lines[1].endswith("ok")
    assert "damaged: arrays/" in lines[3]
    assert "1 bytes instead of" in lines[3]
    assert "40.partial-1 (4 B): a save in progress, or" in out
    assert "5.expired" in out
    assert "20.damaged" in out
    assert "3 steps" in lines[-1]
    assert "1 damaged" in lines[-1]


def test_list_as_json(run, capsys):
    code, out, _ = call(capsys, "list", run / "checkpoints", "--json")
    body = json.loads(out)
    assert code == 0
    assert [one["step"] for one in body["steps"]] == [10, 20, 30]
    sizes = [path.stat().st_size for path in (run / "checkpoints/10").rglob("*") if path.is_file()]
    assert body["steps"][0]["bytes"] == sum(sizes)
    assert body["steps"][0]["num_devices"] == 8
    assert body["steps"][0]["problem"] is None


def test_a_run_may_name_its_folder_of_checkpoints(run, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run / "checkpoints", elsewhere)
    settings = CONFIG | {"checkpoint": {"path": str(elsewhere)}}
    (run / "config.json").write_text(json.dumps(settings))
    assert call(capsys, "list", run)[0] == 0


@pytest.mark.parametrize("words", [("list",), ("verify",), ("prune", "--keep", "1")])
def test_what_is_no_run_is_bad_input(tmp_path, capsys, words):
    code, _, error = call(capsys, words[0], tmp_path / "nothing", *words[1:])
    assert code == 2
    assert "is not a folder; name the folder of a run" in error
    code, _, error = call(capsys, words[0], tmp_path, *words[1:])
    assert code == 2
    assert "holds no checkpoints" in error
    assert len(error.splitlines()) == 1


# --- verify ---------------------------------------------------------------------------------------


def test_verify_names_leaf_and_file(run, capsys):
    code, out, _ = call(capsys, "verify", run)
    assert code == 0
    assert out.startswith("step 30: intact; ")
    assert " and 7 arrays " in out
    path = flip_a_bit(run / "checkpoints" / "20", "embed/kernel")
    code, out, _ = call(capsys, "verify", run, "20")
    assert code == 1
    assert "step 20: damaged" in out
    assert str(path.relative_to(run / "checkpoints" / "20")) in out
    assert "'params/embed/kernel' differs from what was saved" in out
    code, out, _ = call(capsys, "verify", run, "--all")
    assert code == 1
    assert "step 10: intact" in out
    assert "step 30: intact" in out
    assert call(capsys, "verify", run / "checkpoints" / "30")[0] == 0
    code, out, _ = call(capsys, "verify", run, "--all", "--json")
    assert [one["good"] for one in json.loads(out)] == [True, False, True]


def test_verify_names_the_first_of_many_damages(tmp_path, capsys):
    put = jax.device_put(np.zeros(2, np.float32))
    with Checkpointer(tmp_path / "run") as checkpointer:
        tree = {f"array{number:03}": put for number in range(60)}
        checkpointer.save(1, tree, config={}, plan={}, data_state={})
    (tmp_path / "run" / "1" / "packs.json").write_text("{}")
    code, out, _ = call(capsys, "verify", tmp_path / "run")
    assert code == 1
    assert len(out.splitlines()) < 20
    check_words(out, "packs.json", "array004", "55", "--full")
    assert "array059" not in out
    code, out, _ = call(capsys, "verify", tmp_path / "run", "--full")
    assert code == 1
    assert "array059" in out


def test_verify_of_a_step_that_is_not_there(run, capsys):
    code, _, error = call(capsys, "verify", run, "21")
    assert code == 2
    assert "no step 21; the saved steps are: 10, 20, 30" in error


# --- export ---------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """By the description of the format, and by its package too where that is installed."""
    kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "I32": np.int32}
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    table, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    about = table.pop("__metadata__")
    found = {}
    for name, entry in table.items():
        first, end = entry["data_offsets"]
        values = np.frombuffer(data[first:end], kinds[entry["dtype"]])
        found[name] = values.reshape(entry["shape"])
    assert sum(x.nbytes for x in found.values()) == len(data)
    try:
        from safetensors.flax import load_file
    except ImportError:
        return found, about
    by_package = load_file(path)
    assert by_package.keys() == found.keys()
    for name, values in by_package.items():
        assert np.asarray(values).tobytes() == found[name].tobytes(), name
    return found, about


def expected(step: int) -> dict[str, np.ndarray]:
    given = state(step)
    names = {f"{n.replace('/', '.')}": x for n, x in (given["params"] | given["frozen"]).items()}
    names |= {"extras.mean": given["extras"]["mean"]}
    return {name: np.asarray(x) for name, x in names.items()}


def test_export_is_read_back(run, tmp_path, capsys):
    out = tmp_path / "exported"
    code, text, _ = call(capsys, "export", run, "20", out)
    assert code == 0
    assert "step 20: 5 arrays" in text
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json"]
    found, about = read_safetensors(out / "model.safetensors")
    assert about["step"] == "20"
    wanted = expected(20)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        assert found[name].shape == values.shape
        assert found[name].tobytes() == values.tobytes(), name
    config = json.loads((out / "config.json").read_text())
    assert config["model"] == CONFIG["model"]
    assert config["checkpoint"]["step"] == 20
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", ml_dtypes.bfloat16), ("fp32", np.float32)])
def test_export_in_another_dtype_and_several_files(run, tmp_path, capsys, dtype, kind):
    out = tmp_path / "exported"
    assert call(capsys, "export", run, out, "--dtype", dtype, "--shard-gb", "3e-7")[0] == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 1
    found = {}
    for name in files:
        found |= read_safetensors(out / name)[0]
        assert {n for n, file in index["weight_map"].items() if file == name} <= found.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    for name, values in expected(30).items():
        wanted = values if values.dtype == np.int32 else values.astype(kind)
        assert found[name].dtype == wanted.dtype
        assert found[name].tobytes() == wanted.tobytes(), name


def test_export_holds_one_array_at_a_time(run, tmp_path, monkeypatch):
    from zerojax.checkpoint import export as exporting

    held, most = [0], [0]
    real = exporting.read_whole

    class Counted(np.ndarray):
        def __del__(self):
            held[0] -= 1

    def counted(*given):
        held[0] += 1
        most[0] = max(most[0], held[0])
        return np.array(real(*given)).view(Counted)

    monkeypatch.setattr(exporting, "read_whole", counted)
    exporting.export(saved_steps(run / "checkpoints")[-1], tmp_path / "out")
    assert most[0] <= 2  # the next one is read while a loop's name still holds the last
    assert held[0] <= 0


def test_export_refuses_damage_and_leaves_nothing(run, tmp_path, capsys):
    flip_a_bit(run / "checkpoints" / "30", "embed/kernel")
    code, _, error = call(capsys, "export", run, tmp_path / "out")
    assert code == 1
    assert "'params/embed/kernel' differs from what was saved; export an earlier step" in error
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    assert call(capsys, "export", run, "20", tmp_path / "out")[0] == 0
    code, _, error = call(capsys, "export", run, "20", tmp_path / "out")
    assert code == 2
    assert "already exists" in error
    assert call(capsys, "export", run, "x", "20", tmp_path / "y")[0] == 2


def another_steps_copy(run: Path, tmp_path: Path) -> tuple[str, list[object]]:
    shutil.rmtree(run / "checkpoints" / "30")
    shutil.copytree(run / "checkpoints" / "20", run / "checkpoints" / "30")
    return "30", ["20", "remove"]


def another_steps_name(run: Path, tmp_path: Path) -> tuple[str, list[object]]:
    (run / "checkpoints" / "30").rename(run / "checkpoints" / "99")
    return "99", ["30", "rename", "remove"]


def another_runs_step(run: Path, tmp_path: Path) -> tuple[str, list[object]]:
    save(tmp_path / "other", (30,))
    shutil.rmtree(run / "checkpoints" / "30")
    shutil.copytree(tmp_path / "other" / "30", run / "checkpoints" / "30")
    return "30", ["another run", "remove"]


def another_steps_arrays(run: Path, tmp_path: Path) -> tuple[str, list[object]]:
    shutil.rmtree(run / "checkpoints" / "30" / "arrays")
    shutil.copytree(run / "checkpoints" / "20" / "arrays", run / "checkpoints" / "30" / "arrays")
    return "30", []


def another_steps_metadata(run: Path, tmp_path: Path) -> tuple[str, list[object]]:
    shutil.copy(run / "checkpoints" / "20" / "metadata.json", run / "checkpoints" / "30")
    return "30", ["20", "remove"]


@pytest.mark.parametrize(
    "swap",
    [
        another_steps_copy,
        another_steps_name,
        another_runs_step,
        another_steps_arrays,
        another_steps_metadata,
    ],
)
def test_no_command_takes_a_folder_for_another_step(run, tmp_path, capsys, swap):
    step, words = swap(run, tmp_path)
    path = str(run / "checkpoints" / step)
    code, out, _ = call(capsys, "verify", run)
    assert code == 1
    check_words(out, f"step {step}", "damaged", *words)
    code, out, _ = call(capsys, "list", run)
    check_words(next(line for line in out.splitlines() if line.split()[0] == step), "damaged")
    check_words(out, "1 damaged", *words)
    for places in ([run], [run, step], [path]):
        code, _, error = call(capsys, "export", *places, tmp_path / "out")
        assert code == 1
        check_words(error, path, *words)
        assert not (tmp_path / "out").exists()
    _, out, _ = call(capsys, "prune", run, "--keep", "1", "--damaged")
    check_words(out, "kept steps: 20", f"step {step}")


@pytest.mark.parametrize(
    "swap", [another_steps_copy, another_steps_name, another_runs_step, another_steps_metadata]
)
def test_a_run_resumes_before_a_folder_of_another_step(run, tmp_path, swap):
    step, words = swap(run, tmp_path)
    wanted = {"step": state(0)["step"]}
    with Checkpointer(run / "checkpoints") as checkpointer:
        for read in (checkpointer.metadata, checkpointer.check_step):
            refused(lambda read=read: read(int(step)), step, words, error=CheckpointError)
        refused(
            lambda: checkpointer.restore(wanted, int(step), subset=True),
            step,
            words,
            error=CheckpointError,
        )
        with pytest.warns(RuntimeWarning, match=f"{step} is damaged.*step 20 is used"):
            assert checkpointer.restore(wanted, subset=True).step == 20
        checkpointer.save(30, state(30), config=CONFIG, plan=PLAN, data_state={})
        checkpointer.wait()
        assert checkpointer.restore(wanted, 30, subset=True).step == 30
        assert (run / "checkpoints" / f"{step}.damaged").is_dir()


def test_a_save_after_another_runs_newest_step_belongs_to_its_own_run(run, tmp_path):
    """If it took the number of the copied step, the run's own steps would be the fewer."""
    save(tmp_path / "other", (40,))
    shutil.copytree(tmp_path / "other" / "40", run / "checkpoints" / "40")
    wanted = {"step": state(0)["step"]}
    with Checkpointer(run / "checkpoints") as checkpointer:
        checkpointer.save(50, state(50), config=CONFIG, plan=PLAN, data_state={})
        checkpointer.wait()
        for step in (30, 50):
            assert checkpointer.restore(wanted, step, subset=True).step == step
        refused(lambda: checkpointer.metadata(40), "40", "another run", error=CheckpointError)


def test_steps_of_two_runs_alone_are_both_refused(tmp_path, capsys):
    """Two folders cannot tell which of them was copied; without the other, each is read."""
    save(tmp_path / "run", (10,))
    save(tmp_path / "other", (20,))
    shutil.copytree(tmp_path / "other" / "20", tmp_path / "run" / "20")
    for step, other in (("10", "20"), ("20", "10")):
        code, out, _ = call(capsys, "verify", tmp_path / "run", step)
        assert code == 1
        check_words(out, "another run", other, "folder of its own")
    assert call(capsys, "verify", tmp_path / "other")[0] == 0
    shutil.rmtree(tmp_path / "run" / "20")
    assert call(capsys, "verify", tmp_path / "run")[0] == 0


def test_a_name_with_zeros_is_no_step(run, tmp_path, capsys):
    (run / "checkpoints" / "20").rename(run / "checkpoints" / "020")
    _, out, _ = call(capsys, "list", run)
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["10", "30"]
    code, _, error = call(capsys, "export", run / "checkpoints" / "020", tmp_path / "out")
    assert code == 2
    check_words(error, "020", "checkpoints")


@pytest.mark.thorough
def test_export_of_pieces_and_of_a_live_plan(tmp_path, capsys):
    """Parameters whose state was in files, from a mesh of 4."""
    plan = plan_of(offload(tmp_path / "store"), zero=3, data=4)
    trained, _ = train(plan, 1)
    save_with_pieces(tmp_path / "checkpoints", plan, trained)
    close(trained)
    assert call(capsys, "export", tmp_path, tmp_path / "out")[0] == 0
    found, _ = read_safetensors(tmp_path / "out" / "model.safetensors")
    one = saved_steps(tmp_path / "checkpoints")[0]
    arrays = open_arrays(one.folder, one.metadata)
    for name, values in found.items():
        array = arrays["params/" + name.replace(".", "/")]
        whole = array.open()(((0,) * len(array.shape), array.shape))
        assert np.array_equal(whole, values), name
    assert len(found) == 6


# --- prune ----------------------------------------------------------------------------------------


def test_prune_says_what_it_deletes(run, capsys):
    folder = run / "checkpoints"
    size = sum(path.stat().st_size for path in (folder / "10").rglob("*") if path.is_file())
    before = sorted(os.listdir(folder))
    code, out, _ = call(capsys, "prune", run, "--keep", "2", "--dry-run")
    assert code == 0
    assert "would delete step 10" in out
    assert sorted(os.listdir(folder)) == before
    code, out, _ = call(capsys, "prune", run, "--keep", "2")
    assert code == 0
    assert out.startswith(f"deleted step 10 ({size / 1024:.1f} KiB)")
    assert "kept steps: 20, 30" in out
    assert sorted(os.listdir(folder)) == ["20", "30"]


def test_prune_keeps_every_nth_and_the_newest_whole_one(run, capsys):
    folder = run / "checkpoints"
    os.truncate(folder / "30" / "metadata.json", 10)
    code, out, _ = call(capsys, "prune", run, "--every", "7")
    assert code == 0
    assert sorted(os.listdir(folder)) == ["20", "30"], "the newest whole one, and the damaged one"
    code, out, _ = call(capsys, "prune", run, "--keep", "1", "--damaged")
    assert "deleted step 30" in out
    assert os.listdir(folder) == ["20"]


def test_prune_damaged_leaves_a_save_in_progress(run):
    folder = run / "checkpoints"
    for name in ("40.partial-1", "5.expired", "20.damaged"):
        (folder / name).mkdir()
    kinds = {one.folder.name for one in removals(folder, damaged=True)}
    assert kinds == {"5.expired", "20.damaged"}
    later = time.time() + STALE_SECONDS + 1
    kinds = {one.folder.name for one in removals(folder, damaged=True, now=later)}
    assert kinds == {"40.partial-1", "5.expired", "20.damaged"}


@pytest.mark.parametrize(("words", "text"), [((), "nothing to do"), (("--keep", "0"), "below 1")])
def test_prune_without_sense_is_bad_input(run, capsys, words, text):
    code, _, error = call(capsys, "prune", run, *words)
    assert code == 2
    assert text in error
    assert len(saved_steps(run / "checkpoints")) == 3
