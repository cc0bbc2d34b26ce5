"""The fatal messages of JAX's runtime: what is hidden, what is shown, who is named."""

from __future__ import annotations

import pytest

from zerojax.runtime.fatal_messages import Copier, lost_processes, sentence

BEGINNING = (
    "F1128 23:58:38.224353   22854 client.h:86] Terminating process because the JAX distributed "
    "service detected fatal errors. absl::Status: "
)
LEADER = (
    f"{BEGINNING}UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task "
    "was preempted/died/restarted unexpectedly\nAdditional GRPC error information\n"
)
UNHEALTHY = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
BARRIER = f"{BEGINNING}INTERNAL: Shutdown barrier has failed: Task 1 heartbeat timeout.\n\nRPC: x\n"
STACK = "*** Check failure stack trace: ***\n    @     0x7ff61a6d8174  absl::Flush()\n"
POLLED = "E1128 23:58:38.224268   22854 coordination_service_agent.cc:288] Polled an error\nmore\n"


def copied(text: bytes, size: int) -> tuple[bytes, Copier]:
    copier = Copier()
    shown = b"".join(copier.feed(text[at : at + size]) for at in range(0, len(text), size))
    return shown + copier.close(), copier


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (LEADER, [0]),
        (f"{BEGINNING}{UNHEALTHY}3, 11\nThe tasks have crashed.", [3, 11]),
        (f"{BEGINNING}{UNHEALTHY}/job:jax_worker/replica:0/task:3\nThe tasks", [3]),
        (BARRIER, [1]),
        (f"{BEGINNING}INTERNAL: of another kind", []),
    ],
)
def test_the_lost_processes_are_named(message, expected):
    assert lost_processes(message) == expected
    said = sentence(message, 5, 16)
    assert all(str(number) in said for number in expected)
    assert ("another process" in said) == (not expected)
    assert "process 0" in sentence(BEGINNING, 1, 2), "there is only one other"


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("message", [LEADER, BARRIER])
def test_only_the_message_and_its_stack_are_hidden(size, message):
    before = "W1128 10:00:00.0 7 gpu.cc:5] low memory\n  of a device\nnot a message\n"
    shown, copier = copied(f"{before}{POLLED}{message}{STACK}".encode(), size)
    assert shown.decode() == before
    assert copier.is_complete
    assert lost_processes(b"".join(copier.fatal).decode()) == lost_processes(message)


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_everything_else_passes_unchanged(size):
    text = f"F is a letter\n\n{STACK}E1128 10:00:00.0 7 other.cc:1] x\nWhere".encode()
    shown, copier = copied(text, size)
    assert (shown, copier.is_complete) == (text, False)
    shown, _ = copied(f"{POLLED}I1128 10:00:00.0 7 other.cc:1] x\n\xff".encode("latin-1"), size)
    assert shown == b"I1128 10:00:00.0 7 other.cc:1] x\n\xff"


def test_a_line_without_an_end_is_shown_at_once():
    copier = Copier()
    assert copier.feed(b"Password: ") == b"Password: "
    assert copier.feed(b"F1 x\nF") == b"F1 x\n"
    assert copier.close() == b"F"
