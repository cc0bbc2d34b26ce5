"""One writer for a folder: refused, taken over, watched and lost, with real processes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerojax.runtime import folder_lock
from zerojax.runtime.folder_lock import NAME, FolderTakenError, hold

HOLDER = """
import sys, time
from zerojax.runtime import folder_lock
folder_lock.BEAT = 0.2
try:
    held = folder_lock.hold(sys.argv[1])
except folder_lock.FolderTakenError as error:
    print("refused:", error, flush=True)
    sys.exit(3)
print("held", held.note, flush=True)
time.sleep(float(sys.argv[2]))
"""
FOREIGN = "process: 4242\nhost: far\nsince: 2026-11-22 08:00:00 UTC\nkernel: another\ntoken: t\n"


@contextlib.contextmanager
def holder(folder: Path, seconds: float = 600) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("held")
            yield process
        finally:
            process.kill()


def tokens(folder: Path) -> list[str]:
    return re.findall("token: (.*)", (folder / NAME).read_text())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT", 0.1)
    monkeypatch.setattr(folder_lock, "EXPIRES", 1.0)


def test_a_second_process_is_refused_with_a_sentence_that_names_the_first(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        before = (tmp_path / NAME).read_text()
        with pytest.raises(FolderTakenError) as refused:
            hold(tmp_path)
        text = str(refused.value)
        assert f"{tmp_path} is being written by process {first.pid} on " in text
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC;", text)
        assert text.endswith("end it, or use another folder")
        assert os.listdir(tmp_path) == [NAME]
        assert (tmp_path / NAME).read_text() == before


@pytest.mark.thorough
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_hold_of_a_process_that_died_is_taken_over_at_once(
    tmp_path: Path, end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock.Hold, "_watch", None)  # nothing may be waited for
    with holder(tmp_path) as first:
        first.send_signal(end)
        first.wait()
        held = hold(tmp_path)
        assert held.note is not None
        assert held.note.startswith(f"{tmp_path} was locked by process {first.pid} on ")
        held.keep()
        held.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.thorough
def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.kill()
        while folder_lock._fields_of(str(first.pid))[0] != "Z":
            time.sleep(0.01)
        hold(tmp_path).release()


@pytest.mark.thorough
def test_a_stopped_process_keeps_its_folder(tmp_path: Path, quick: None) -> None:
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGSTOP)
        time.sleep(1.2)  # beyond EXPIRES
        with pytest.raises(FolderTakenError, match=f"process {first.pid}"):
            hold(tmp_path)
        first.send_signal(signal.SIGCONT)


def test_a_released_folder_is_free_and_nothing_is_said(tmp_path: Path) -> None:
    with holder(tmp_path, 0) as first:
        assert first.wait() == 0  # its exit releases the folder
    held = hold(tmp_path)
    assert held.note is None
    held.release()
    held.release()
    with pytest.raises(FolderTakenError, match="no longer open for writing"):
        held.keep()


@pytest.mark.thorough
def test_of_many_that_ask_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.kill()
        first.wait()
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "4"]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    said = [process.communicate()[0] for process in asking]
    assert sorted(text.split()[0] for text in said) == ["held"] + ["refused:"] * 4
    assert sum("takes the lock over" in text for text in said) == 1
    assert os.listdir(tmp_path) == []


# --- holders on other machines --------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("skew", [-7200.0, 0.0, 7200.0])
def test_another_machine_that_renews_its_hold_is_alive(
    tmp_path: Path, quick: None, skew: float
) -> None:
    path, is_over = tmp_path / NAME, threading.Event()
    path.write_text(FOREIGN)

    def renew() -> None:
        while not is_over.wait(0.1):
            os.utime(path, (time.time() + skew,) * 2)

    os.utime(path, (time.time() + skew,) * 2)
    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with (
            pytest.warns(RuntimeWarning, match="if that process does not renew its lock within"),
            pytest.raises(FolderTakenError, match="process 4242 on far, since 2026.*expires after"),
        ):
            hold(tmp_path)
    finally:
        is_over.set()
        renewing.join()
    assert path.read_text() == FOREIGN
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.thorough
@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
def test_the_hold_of_a_machine_that_is_gone_ends(tmp_path: Path, quick: None, skew: float) -> None:
    path = tmp_path / NAME
    path.write_text(FOREIGN)
    os.utime(path, (time.time() + skew,) * 2)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="process 4242 on far"):
        held = hold(tmp_path)
    # Its own clock decides; old times only shorten the wait, to a few renewals.
    assert time.monotonic() - began >= (0.3 if skew < 0 else 1.0)
    assert held.note is not None
    assert "process 4242 on far" in held.note
    held.keep()
    held.release()


def test_what_is_in_the_file_is_shown_without_control_characters(
    tmp_path: Path, quick: None
) -> None:
    (tmp_path / NAME).write_bytes(b"process: \x1b[2J\nhost: " + b"h" * 9000 + b"\xff")
    with pytest.warns(RuntimeWarning, match="since unknown") as said:
        hold(tmp_path).release()
    assert "\x1b" not in str(said[0].message)
    assert len(str(said[0].message)) < 500


def test_a_holder_that_was_cut_off_finds_out_and_leaves_the_other_alone(
    tmp_path: Path, quick: None
) -> None:
    held = hold(tmp_path)
    held.keep()
    other = tmp_path / "other"
    other.write_text(FOREIGN)
    os.rename(other, tmp_path / NAME)
    with pytest.raises(FolderTakenError, match="by process 4242 on far.*end one of"):
        held.keep()
    held.release()
    assert (tmp_path / NAME).read_text() == FOREIGN


def test_a_hold_whose_file_was_deleted_is_taken_again(tmp_path: Path) -> None:
    held = hold(tmp_path / "run")
    (tmp_path / "run" / NAME).unlink()
    (tmp_path / "run").rmdir()
    held.keep()
    with holder_is_refused(tmp_path / "run"):
        held.keep()
    held.release()


@contextlib.contextmanager
def holder_is_refused(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-c", HOLDER, str(folder), "0"]
    yield
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr


def test_renewals_change_the_time_of_the_file(tmp_path: Path, quick: None) -> None:
    held = hold(tmp_path)
    before = os.stat(tmp_path / NAME).st_mtime_ns
    for _ in range(2400):  # two minutes: it ends when the thread has had a turn
        time.sleep(0.05)
        if os.stat(tmp_path / NAME).st_mtime_ns != before:
            break
    else:
        pytest.fail("the hold was not renewed")
    held.release()


# --- one process ----------------------------------------------------------------------------------


def test_within_a_process_the_last_to_ask_has_the_folder(tmp_path: Path) -> None:
    first = hold(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    second = hold(tmp_path / "link")
    with pytest.raises(FolderTakenError, match="a later run of this process"):
        first.keep()
    first.release()
    second.keep()
    assert second.note is None
    second.release()


@pytest.mark.thorough
def test_a_forked_process_neither_keeps_nor_releases_what_its_parent_holds(tmp_path: Path) -> None:
    script = """
import os, sys, time
from zerojax.runtime.folder_lock import hold
held = hold(sys.argv[1])
if os.fork() == 0:
    held.release()
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        try:
            parent.stdout.readline()
            time.sleep(0.2)
            with pytest.raises(FolderTakenError, match=f"process {parent.pid}"):
                hold(tmp_path)
            parent.kill()
            parent.wait()
            hold(tmp_path).release()  # the child lives
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


# --- file systems that lack something -------------------------------------------------------------


@pytest.mark.thorough
def test_without_locks_of_the_file_system_processes_of_this_machine_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with holder(tmp_path) as first:
        with pytest.raises(FolderTakenError, match=f"process {first.pid}"):
            hold(tmp_path)
        first.kill()
        first.wait()
        hold(tmp_path).release()


def test_without_hard_links_a_folder_is_held_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr("os.link", refuse)
    held = hold(tmp_path)
    with holder_is_refused(tmp_path):
        held.keep()
    held.release()
    with holder(tmp_path), pytest.raises(FolderTakenError, match="is being written"):
        hold(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_not_opened(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / NAME)
    with pytest.raises(FolderTakenError, match=f"{NAME} is not a regular file.*move"):
        hold(tmp_path)


def test_rests_of_killed_processes_are_removed_when_they_are_old(tmp_path: Path) -> None:
    old, new = "0" * 16, "f" * 16
    for name, age in ((old, 100 * folder_lock.EXPIRES), (new, 0), ("mine", 10**9)):
        path = tmp_path / f"{NAME}.{name}"
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    held = hold(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.{new}", f"{NAME}.mine"]
    held.release()
