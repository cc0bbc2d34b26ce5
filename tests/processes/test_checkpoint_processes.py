"""Two processes agree on what is damaged, what is used instead, and why a save failed."""

import json
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.process_groups import free_port, run_group
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint.contributions import Contribution, collect, report_written
from zerojax.checkpoint.fingerprint_math import as_text, of_array

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (8, 2**17)  # files above the size that is always summed up

WORKER = """
    import errno, json, os, resource, sys, time, warnings
    import jax, numpy as np
    address, process, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, 2, process)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from zerojax.checkpoint import Checkpointer, CheckpointError, files, folders, saving

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    shape = tuple(json.loads(sys.argv[4]))
    make = jax.jit(
        lambda step: {
            "w": jax.numpy.arange(shape[0] * shape[1], dtype="float32").reshape(shape) + step,
            "step": step,
        },
        out_shardings={"w": split, "step": whole},
    )
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(np.int32(0))
    )
    about = {"data_state": {}, "config": {}, "plan": {}}

    def told(call):
        try:
            call()
        except CheckpointError as error:
            return [type(error).__name__, str(error)]
        return None

    def flip(step):
        # The part of process 1, seen and damaged by process 0.
        if process == 0:
            at = os.path.join(path, str(step))
            found = [os.path.join(a, n) for a, _, names in os.walk(at) for n in names]
            found = [name for name in found if "process_1" in name]
            name = max(found, key=os.path.getsize)
            with open(name, "r+b") as file:
                file.seek(os.path.getsize(name) // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 16]))
            out["flipped"] = os.path.relpath(name, at)

    def restore(step=None):
        with warnings.catch_warnings(record=True) as texts:
            warnings.simplefilter("always")
            restored = checkpointer.restore(abstract, step)
        for shard in restored.state["w"].addressable_shards:
            expected = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
            np.testing.assert_array_equal(
                np.asarray(shard.data), expected[shard.index] + restored.step
            )
        return [restored.step, [str(one.message) for one in texts]]

    def save_and_wait(step):
        checkpointer.save(step, make(np.int32(step)), **about)
        checkpointer.wait()

    out = {}
    with Checkpointer(path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make(np.int32(step)), **about)
        checkpointer.wait()
        out["good"] = restore()
        flip(3)
        out["fallback"] = restore()
        out["explicit"] = told(lambda: restore(3))
        out["usable"] = checkpointer.usable_step()
        checkpointer.save(3, make(np.int32(3)), **about)
        checkpointer.wait()
        out["again"] = restore()
        out["names"] = sorted(set(os.listdir(path)) - {"writer.lock"})
        other = {**about, "data_state": {"position": process}}
        out["differs"] = told(lambda: checkpointer.save(4, make(np.int32(4)), **other))
        commit = folders.commit
        if process == 0:
            folders.commit = None  # calling it fails on process 0 only
        out["uncommitted"] = told(lambda: save_and_wait(4))
        folders.commit = commit
        if process == 1:
            real, errors = files.settle, [OSError(errno.ENOSPC, "full"), ValueError("broken")]

            def refuse(*_):
                raise errors.pop(0)

            files.settle = refuse
        for name in ("full", "broken"):
            checkpointer.save(4, make(np.int32(4)), **about)
            out[name] = told(checkpointer.wait)
        if process == 1:
            files.settle = real
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        for name, limit in (("limited", 2**20), ("speechless", 0), ("mute", 0)):
            if name == "mute":
                saving.report_failure = lambda *_: None
            if process == 1:  # the system refuses what is larger, here and not in process 0
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
            out[name] = told(lambda: save_and_wait(4))
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        out["names_after_failures"] = sorted(set(os.listdir(path)) - {"writer.lock"})
        out["after_failures"] = [told(lambda: save_and_wait(4)), restore()]
        for step in (2, 3, 4):
            flip(step)
        out["none"] = told(restore)
        out["left"] = sorted(set(os.listdir(path)) - {"writer.lock"})
    with open(f"{path}.{process}.json", "w") as file:
        json.dump(out, file)
    print("the last line was reached at", time.monotonic())  # and an ordinary end follows
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """(folder of the checkpoints, what each process has told)."""
    path, address = tmp_path_factory.mktemp("two") / "run", f"127.0.0.1:{free_port()}"
    program = textwrap.dedent(WORKER)
    outputs = run_group(
        [["-c", program, address, str(n), str(path), json.dumps(SHAPE)] for n in range(2)],
        variables={"JAX_PLATFORMS": "cpu"},
    )
    last = [float(text.split("the last line was reached at ")[1].split()[0]) for text in outputs]
    assert time.monotonic() - max(last) < 30, "threads of failed saves keep nobody"
    return path, [json.loads(Path(f"{path}.{process}.json").read_text()) for process in range(2)]


@pytest.mark.thorough
@pytest.mark.multihost
def test_damage_in_one_processs_file_is_noticed_by_all(two: tuple[Path, list[dict]]) -> None:
    _, (first, second) = two
    name = first["flipped"]
    assert first["good"] == second["good"] == [3, []]
    assert first["fallback"][0] == second["fallback"][0] == 2
    assert second["fallback"][1] == [], "one process warns for all"
    (text,) = first["fallback"][1]
    assert "/3 is damaged: 'w' differs from what was saved; " in text
    assert "process_1" in text
    assert f"{name.split('/')[0]}/" in text
    assert "step 2 is used in its place; the next save renames its folder 3.damaged" in text
    for told in (first["explicit"], second["explicit"]):
        assert told[0] == "DamagedError"
        assert told[1].endswith("; restore step 2")
    assert first["usable"] == second["usable"] == 2
    assert first["again"] == second["again"] == [3, []]
    assert first["names"] == second["names"] == ["1", "2", "3", "3.damaged"]
    for told in (first["none"], second["none"]):
        assert told[0] == "DamagedError"
        assert "so are the earlier steps (2, 3); nothing was changed" in told[1]
    assert first["left"] == second["left"] == ["2", "3", "3.damaged", "4"]


@pytest.mark.thorough
@pytest.mark.multihost
def test_processes_that_save_different_things_or_fail_at_the_end_save_nothing(two) -> None:
    for told in two[1]:
        assert "differs between process 0 and process 1" in told["differs"][1]
        assert told["uncommitted"][1].startswith("process 0: step 4 was not saved")


@pytest.mark.thorough
@pytest.mark.multihost
def test_why_one_process_could_not_write_is_told_by_all(two: tuple[Path, list[dict]]) -> None:
    for told in (one["full"] for one in two[1]):
        assert told[0] == "DiskFullError"
        assert "step 4 was not saved" in told[1]
        assert "no space left on device" in told[1]
    for told in (one["broken"] for one in two[1]):
        assert told[0] == "MachineError"
        assert "step 4 was not saved" in told[1]
        assert "broken" in told[1]


@pytest.mark.thorough
@pytest.mark.multihost
@pytest.mark.parametrize("name", ["limited", "speechless", "mute"])
def test_a_write_that_fails_in_one_process_ends_the_save_of_all(two, name):
    """Orbax's barrier waits for that process for ever.

    Of the second no note fits on the disk, and of the third not even a name.
    """
    for one in two[1]:
        kind, text = one[name]
        assert kind == "MachineError"
        if name == "mute":
            assert text.startswith("process 1: step 4 was not saved in ")
            assert ": file too large; earlier" in text
        else:
            assert "step 4 was not saved" in text
            assert "process 1: file too large" in text
        assert "earlier checkpoints are intact: 1, 2, 3" in text
        assert one["after_failures"] == [None, [4, []]], "the next save is like any other"


@pytest.mark.thorough
@pytest.mark.multihost
def test_fingerprints_are_those_of_the_whole_arrays(two: tuple[Path, list[dict]]) -> None:
    about = Checkpointer(two[0]).metadata(3)
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + 3
    assert about.fingerprints == {
        "step": as_text(of_array(np.int32(3))),
        "w": as_text(of_array(values)),
    }
    assert about.num_processes == 2


def test_the_first_process_waits_for_the_others_and_takes_their_notes(tmp_path: Path) -> None:
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            report_written(
                tmp_path, 1, Contribution(checksums={"a": "00000000"}, sums={"x": {5: (1, 2)}})
            )

    (part,) = collect(tmp_path, range(1, 2), sleep=sleep)
    assert part == Contribution(checksums={"a": "00000000"}, sums={"x": {5: (1, 2)}})
    assert waited == sorted(waited)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        CheckpointError, match="process 1 has not written its part of the checkpoint within 0 s"
    ):
        collect(tmp_path, range(1, 2), limit=0, sleep=lambda _: None)
    with pytest.raises(
        CheckpointError, match=("process 1 has not written its part of the checkpoint$")
    ):
        collect(tmp_path, range(1, 2), sleep=lambda _: True)
    report_written(tmp_path, 1, Contribution(error="it broke"))
    with pytest.raises(CheckpointError, match="process 1: it broke"):
        collect(tmp_path, range(1, 2))
