"""A process that is killed is spoken for, one that ends by itself is not; how a lost peer shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerojax.runtime.peers import is_peer_loss

ROOT = Path(__file__).resolve().parent.parent


def end(statement: str) -> subprocess.CompletedProcess[str]:
    code = "import os\nfrom zerojax.runtime import last_words\nlast_words.prepare(1, 4)\n"
    code += statement
    command = [sys.executable, "-c", code]
    # `run` returns when standard error is closed, and so after the last words.
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("statement", ["os.kill(os.getpid(), 9)", "os.abort()", "os._exit(3)"])
def test_a_process_without_a_word_is_spoken_for(statement):
    ended = end(statement)
    assert ended.returncode != 0
    lines = ended.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("zerojax: process 1 of 4 exited without an error message")
    assert "SIGKILL" in lines[0]
    assert "the same command resumes" in lines[0]


@pytest.mark.parametrize(
    "statement", ["pass", "last_words.silence()", "last_words.silence(); os._exit(3)"]
)
def test_one_that_ends_by_itself_is_not(statement):
    assert end(statement).stderr == ""


def test_a_lost_peer_is_known_by_what_gloo_and_the_coordinator_say():
    gloo = ValueError(
        "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error "
        "[127.0.0.1]:12465: Connection reset by peer"
    )
    assert is_peer_loss(gloo)
    outer = RuntimeError("step 8 was not saved")
    outer.__cause__ = gloo
    assert is_peer_loss(outer)
    assert not is_peer_loss(OSError("No space left on device"))
    assert not is_peer_loss(ValueError("global_batch_size=5 is not divisible by 2"))
