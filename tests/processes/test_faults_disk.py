"""A disk that fills up, becomes read-only or refuses one process: real mounts, real error codes.

The mounts lie in a mount namespace of their own, which needs no rights; where a machine forbids
that, these tests are skipped and say so.
"""

import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fault_runs import Run
from zerojax.runtime import shutdown

pytestmark = [pytest.mark.multihost, pytest.mark.slow]


class Disk:
    """A small file system in memory, which only processes that `enter` it see."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder = folder
        folder.mkdir()
        mount = f"mount -t tmpfs -o size={size} none {folder} && echo mounted && exec sleep 1000"
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "mounted\n":
            pytest.skip(f"no mount namespaces here: {self._holder.communicate()[1].strip()}")
        # The same folder as seen from outside.
        self.seen = Path(f"/proc/{self._holder.pid}/root{folder}")

    def enter(self, workplace: Path) -> list[str]:
        """Words before a command that is to see the disk."""
        target = ["nsenter", f"--target={self._holder.pid}", "--user", "--mount"]
        return [*target, "--preserve-credentials", f"--wd={workplace}"]

    def set_mode(self, mode: str) -> None:
        """Makes it read-only ("ro"), or not ("rw").

        A read-only mount of the folder over itself does so while files are open, as an error of a
        real disk does; `mount` refuses to change a file system that has open files.
        """
        folder = str(self.folder)
        over = [["mount", "--bind", folder, folder], ["mount", "-o", "remount,bind,ro", folder]]
        for command in over if mode == "ro" else [["umount", folder]]:
            subprocess.run([*self.enter(Path("/")), *command], check=True, timeout=60)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk", "2m")
    yield disk
    disk.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[int], dict[int, float]]:
    """Losses of a run of so many processes on a disk with space."""

    @functools.cache
    def losses(processes: int) -> dict[int, float]:
        run = make_run(tmp_path_factory.mktemp(f"run-{processes}"), processes)
        assert run.run().codes == [shutdown.OK] * processes
        return dict(run.losses())

    return losses


def make_run(folder: Path, processes: int, *settings: str) -> Run:
    devices = ["cpu_devices=2"] * (processes == 1)
    return Run(folder, *devices, *settings, processes=processes)


def saved(disk: Disk) -> list[int]:
    return sorted(int(path.name) for path in disk.seen.glob("checkpoints/*") if path.name.isdigit())


def free(disk: Disk) -> int:
    return shutil.disk_usage(disk.seen).free


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fills_up_during_a_save(tmp_path, disk, undisturbed, processes):
    run = make_run(tmp_path, processes, f"checkpoint.path={disk.folder}/checkpoints")
    options = {"before": disk.enter(tmp_path), "environment": {"DISK": str(disk.folder)}}
    fault = {"process": 0, "at": "space", "count": 2, "what": "fill"}
    ended = run.run(fault=fault, **options)
    assert ended.codes == [shutdown.FAILED] * processes, ended.outputs
    for process in range(processes):
        sentence = ended.sentence(process)
        assert "step 8 was not saved" in sentence
        assert "no space left on device" in sentence
        assert "free some space" in sentence
    assert saved(disk) == [4], "what was committed is whole, and half of the other is gone"
    assert free(disk) >= 16 * 4096, "what the failed save has written is gone"
    (disk.seen / "filler").unlink()
    ended = run.run(**options)
    assert ended.codes == [shutdown.OK] * processes, ended.outputs
    run.check_losses(undisturbed(processes))
    assert saved(disk)[-1] == 16
    assert not list(disk.seen.glob("checkpoints/*.partial-*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_that_is_read_only(tmp_path, disk, undisturbed, processes):
    run = make_run(tmp_path, processes, f"checkpoint.path={disk.folder}/checkpoints")
    options = {"before": disk.enter(tmp_path)}
    disk.set_mode("ro")
    ended = run.run(**options)
    assert ended.codes == [shutdown.BAD_INPUT] * processes, ended.outputs
    assert "checkpoints cannot be written" in ended.sentence(0)
    assert "read-only file system" in ended.sentence(0).lower()
    assert run.steps() == [], "it says so before it trains"

    disk.set_mode("rw")
    run.start(**options, pace=0.3)
    run.wait_for_step(6)
    disk.set_mode("ro")
    ended = run.end()
    assert ended.codes == [shutdown.FAILED] * processes, "the same command may do later"
    for process in range(processes):
        assert "step 8 was not saved" in ended.sentence(process)
        assert "read-only file system" in ended.sentence(process).lower()
    assert saved(disk) == [4]

    disk.set_mode("rw")
    ended = run.run(**options)
    assert ended.codes == [shutdown.OK] * processes, ended.outputs
    run.check_losses(undisturbed(processes))


def test_a_write_that_is_refused_in_one_process(tmp_path, undisturbed):
    run = make_run(tmp_path, 2)
    ended = run.run(fault={"process": 1, "at": "save", "count": 2, "what": "limit"})
    assert ended.codes == [shutdown.FAILED] * 2, ended.outputs
    for process in range(2):
        sentence = ended.sentence(process)
        assert "step 8 was not saved" in sentence
        assert "process 1: " in sentence
        assert "file too large" in sentence
    assert run.saved() == [4]
    ended = run.run()
    assert ended.codes == [shutdown.OK] * 2, ended.outputs
    run.check_losses(undisturbed(2))


def test_a_disk_of_everything_that_fills_up(tmp_path, disk, undisturbed):
    """Metrics, too, have no space then; the run ends with one sentence and goes on later."""
    run = make_run(tmp_path, 1, f"run_dir={disk.folder}/run")
    options = {"before": disk.enter(tmp_path), "environment": {"DISK": str(disk.folder)}}
    ended = run.run(fault={"process": 0, "at": "step", "count": 7, "what": "fill"}, **options)
    assert ended.codes == [shutdown.FAILED], ended.outputs
    assert "space" in ended.sentence(0)
    (disk.seen / "filler").unlink()
    ended = run.run(**options)
    assert ended.codes == [shutdown.OK], ended.outputs
    whole = Run(tmp_path)
    whole.folder = disk.seen
    whole.check_losses(undisturbed(1))
