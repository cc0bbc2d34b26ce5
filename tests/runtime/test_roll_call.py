"""Processes of a group that come, do not come, come twice or end: threads stand in for them."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.process_groups import free_port
from tests.support.refusals import check_words
from zerojax.runtime import roll_call
from zerojax.runtime.process_group import ProcessGroup
from zerojax.runtime.roll_call import AbsentError, RollCall, hosts_without

SHORT, LONG = 0.4, 20.0


def group(process: int, of: int, port: int) -> ProcessGroup:
    return ProcessGroup(coordinator=f"127.0.0.1:{port}", num_processes=of, process_id=process)


def everybody(
    act: Callable[[RollCall], object], members: list[tuple[int, int]], seconds: float
) -> list[object]:
    """What `act` returns or raises for each (index, number of processes)."""
    port = free_port()

    def take_part(index: int, of: int) -> object:
        try:
            with RollCall(group(index, of, port), seconds) as roll:
                return act(roll)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda one: take_part(*one), members))


@contextlib.contextmanager
def process_0(of: int, seconds: float) -> Iterator[tuple[int, concurrent.futures.Future]]:
    """Process 0 alone in a thread: (its port, its hosts or its error later)."""
    port = free_port()

    def take_part() -> list[str]:
        with RollCall(group(0, of, port), seconds) as roll:
            return roll.hosts

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(take_part)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.01)
        yield port, result


def test_values_go_to_process_0_and_from_it():
    def act(roll: RollCall) -> tuple[object, object]:
        gathered = roll.gather({"mine": [roll.process] * 9}, "its number")
        return gathered, roll.share({"sum": 6} if roll.process == 0 else None)

    first, *others = everybody(act, [(0, 4), (3, 4), (1, 4), (2, 4)], LONG)
    assert first == ([{"mine": [index] * 9} for index in range(4)], {"sum": 6})
    assert others == [(None, {"sum": 6})] * 3


def test_one_process_needs_no_connection():
    with RollCall(None, SHORT) as roll:
        assert roll.hosts == [socket.gethostname()]
        assert roll.gather(5, "it") == [5]
        assert roll.share(6) == 6


def test_who_does_not_come_is_named_by_all_that_come():
    began = time.monotonic()
    errors = everybody(lambda roll: None, [(0, 5), (1, 5), (3, 5)], SHORT)
    assert time.monotonic() - began < 10
    for error in errors:
        assert isinstance(error, AbsentError)
        text = check_words(
            str(error), ["2 of 5", "process 2", "process 4", socket.gethostname()], "--timeout"
        )
        assert "process 3" not in text


def test_a_process_that_reaches_nobody_says_so():
    (error,) = everybody(lambda roll: None, [(1, 2)], SHORT)
    assert isinstance(error, AbsentError)
    check_words(str(error), ["process 1 of 2", "process 0", f"{SHORT:g} s"], "firewall --timeout")


def test_a_process_that_came_and_ended_is_named_with_its_host():
    with process_0(3, SHORT) as (port, result):
        with socket.create_connection(("127.0.0.1", port)) as link:
            hello = {"zerojax_roll_call": 1, "process": 1, "num_processes": 3, "host": "node-b"}
            link.sendall(json.dumps(hello).encode() + b"\n")
            time.sleep(0.1)
        with pytest.raises(AbsentError, match=r"process 1 \(came on node-b, but ended\)"):
            result.result()


STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"{" * 600 + b"\n",
    b'{"zerojax_roll_call": 1, "process": "1", "num_processes": 2, "host": "x"}\n',
    b'{"zerojax_roll_call": 1, "process": true, "num_processes": 2, "host": "x"}\n',
    b'{"zerojax_roll_call": 1, "process": 1, "num_processes": 2, "host": 7}\n',
    b'{"zerojax_roll_call": 2, "process": 1, "num_processes": 2, "host": "x"}\n',
    b"[1]\n",
    b"\xff" * 5000,
]


def test_strangers_neither_count_nor_delay():
    with process_0(2, LONG) as (port, result):
        silent = socket.create_connection(("127.0.0.1", port))
        for words in STRANGERS:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as link,
            ):
                link.sendall(words)
        began = time.monotonic()
        with RollCall(group(1, 2, port), LONG):
            assert result.result() == [socket.gethostname()] * 2
        assert time.monotonic() - began < 5
        silent.close()


def test_another_program_at_the_address_is_not_taken_for_process_0():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = server.accept()
                    with link:
                        link.recv(1000)
                        link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(AbsentError, match="another program has its address"):
            RollCall(group(1, 2, port), SHORT)
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("members", "value"),
    [([(0, 3), (2, 3), (2, 3)], "index 2"), ([(0, 3), (1, 2)], "process 1 2 3")],
    ids=["two of one index", "another number"],
)
def test_wrong_numbers_are_refused_on_all(members, value):
    for error in everybody(lambda roll: None, members, 5.0):
        assert isinstance(error, ValueError)
        check_words(str(error), value, "give")


def test_who_ends_before_it_reports_is_named_on_all():
    def act(roll: RollCall) -> object:
        if roll.process == 1:
            return None
        roll.gather(roll.process, "its devices")
        return roll.share(None)

    first, lost, other = everybody(act, [(0, 3), (1, 3), (2, 3)], 5.0)
    assert lost is None
    for error in (first, other):
        assert isinstance(error, AbsentError)
        check_words(str(error), ["process 1", "its devices"], "output")


def test_who_is_silent_is_named():
    done = threading.Event()

    def act(roll: RollCall) -> object:
        if roll.process == 1:
            return done.wait(10)
        try:
            return roll.gather(None, "its devices")
        finally:
            done.set()

    error, _ = everybody(act, [(0, 2), (1, 2)], SHORT)
    assert isinstance(error, AbsentError)
    check_words(str(error), ["process 1", "its devices", f"{SHORT:g} s"], "--timeout")


@pytest.mark.parametrize(("kind", "raised"), [(ValueError, ValueError), (OSError, AbsentError)])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_reaches_the_others(kind, raised, failing):
    def act(roll: RollCall) -> object:
        if roll.process == failing:
            raise kind("no such thing")
        roll.gather(None, "it")
        return roll.share(None)

    errors = everybody(act, [(0, 3), (1, 3), (2, 3)], 5.0)
    assert type(errors[failing]) is kind
    for process in {0, 1, 2} - {failing}:
        assert type(errors[process]) is raised
        check_words(str(errors[process]), f'"process {failing}" "no such thing"')


def test_messages_have_a_limit(monkeypatch):
    monkeypatch.setattr(roll_call, "MAX_MESSAGE_BYTES", 1000)
    error, _ = everybody(lambda roll: roll.gather("x" * 200_000, "it"), [(0, 2), (1, 2)], 5.0)
    assert isinstance(error, AbsentError)


@pytest.mark.parametrize(
    ("present", "nodes", "silent"),
    [
        (["n1", "n2.cluster"], "n[1-3]", ["n3"]),
        (["n1", "n2"], "n[1-2]", []),
        (["vm"], "", []),
        (["vm"], "n[x]", []),
    ],
)
def test_hosts_of_slurm_from_which_nobody_came(present, nodes, silent):
    assert hosts_without(present, {"SLURM_STEP_NODELIST": nodes}) == silent
