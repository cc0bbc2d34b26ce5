"""Refusals of variables, private files and the notes of processes that wait."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

from tests.support.refusals import Refusal, refused
from zerojax.runtime import standstill
from zerojax.runtime.launch.handshake import TOKEN, Token
from zerojax.runtime.process_group import number_of
from zerojax.runtime.user_files import check_private


def test_numbers_in_variables():
    read = lambda text: number_of({"RANK": text}, "RANK")  # noqa: E731
    Refusal("one", "RANK='one'", "integer", ["1"]).check(read)


def test_files_that_others_may_write(tmp_path):
    file = tmp_path / "token"
    file.write_text("a secret of 16 or more letters")
    file.chmod(0o666)
    error = PermissionError
    message = refused(lambda: check_private(file), [file, "0666"], "go-w remove", error=error)
    command = re.search(r"chmod go-w", message)[0]
    subprocess.run([*shlex.split(command), file], check=True)
    check_private(file)
    os.mkfifo(tmp_path / "pipe")
    refused(lambda: check_private(tmp_path / "pipe"), ["pipe"], "remove", error=error)
    (tmp_path / "pipe").unlink()
    (tmp_path / "pipe").touch(mode=0o600)
    check_private(tmp_path / "pipe")


def test_a_token_that_others_may_write(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    token, own = Token({}), tmp_path / "own"
    token.make()
    file = tmp_path / "cache" / "launch-token"
    file.chmod(0o666)
    refused(token.read, [file, "go-w"], [TOKEN, "--token-file"], error=PermissionError)
    own.write_text("0123456789abcdef")
    assert Token({}, str(own)).read() == Token({TOKEN: own.read_text()}).read()
    file.chmod(0o600)
    assert token.read()


def test_notes_of_other_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(standstill, "_MAX_BYTES_OF_ALL", 8)
    folder = tmp_path / standstill.FOLDER
    folder.mkdir()
    (folder / "process-9.json").write_text("x" * 9)
    read = lambda: standstill.read_notes(tmp_path)  # noqa: E731
    refused(read, [folder, 8], "remove")
    (folder / "process-9.json").unlink()
    assert read() == []
