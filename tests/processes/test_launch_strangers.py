"""Launchers of several hosts: who has not the run's token is dropped, and the start goes on."""

import json
import queue
import socket
import stat
import threading
from pathlib import Path

import pytest

from tests.processes.test_distributed import free_port
from tests.processes.test_launch import LIMIT, command, launched, wait_until
from zerojax.runtime.launch.handshake import TOKEN, Handshake, Token, UnauthenticatedPeer
from zerojax.runtime.launch.hosts import Followers, reach_leader

SECRET = "0123456789abcdef-of-the-run"
NUMBERS = {"host": 1, "num_hosts": 2, "num_processes": 1}


def own(text: str = SECRET) -> Token:
    return Token({TOKEN: text})


def connect(address: str) -> socket.socket:
    host, _, port = address.partition(":")
    found: list[socket.socket] = []

    def come() -> bool:
        try:
            found.append(socket.create_connection((host, int(port)), timeout=LIMIT))
        except OSError:
            return False
        return True

    assert wait_until(come)
    return found[0]


class TestToken:
    def test_a_file_is_made_for_its_owner_only_and_found_by_the_next(self, tmp_path):
        file = tmp_path / "new" / "token"
        token = Token({}, str(file))
        assert token.read() is None
        token.make()
        made = token.read()
        assert len(made) == 64
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        Token({}, str(file)).make()
        assert Token({}, str(file)).read() == made
        assert [path.name for path in file.parent.iterdir()] == ["token"]

    def test_a_variable_comes_before_the_cache_and_after_a_given_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
        assert own().read() == SECRET.encode()
        file = tmp_path / "mounted"
        file.write_text("another secret of a run\n")
        assert Token({TOKEN: SECRET}, str(file)).read() == b"another secret of a run"
        assert Token({}).place == str(tmp_path / "launch-token")

    def test_one_that_can_be_guessed_is_refused_without_being_shown(self, tmp_path, monkeypatch):
        file = tmp_path / "short"
        file.write_text("gu3ss")
        for token in (lambda: Token({TOKEN: "gu3ss"}), lambda: Token({}, str(file)).read()):
            with pytest.raises(ValueError, match="has 5 characters; use at least 16") as caught:
                token()
            assert "gu3ss" not in str(caught.value)
        monkeypatch.setenv("ZEROJAX_CACHE", "off")
        with pytest.raises(ValueError, match="set ZEROJAX_LAUNCH_TOKEN to the same secret"):
            Token({})
        assert SECRET not in repr(own())


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


class TestGreeting:
    """Both ends in one process; no bound here is reached but the one that is tested."""

    def exchange(self, leader: Handshake, follower: Handshake, refused: str | None = None):
        found: list[object] = []

        def introduce() -> None:
            try:
                found.append(follower.introduce(NUMBERS))
            except UnauthenticatedPeer as error:
                found.append(error)

        thread = threading.Thread(target=introduce)
        thread.start()
        try:
            leader.accept(*leader.hear(), refused)
        finally:
            thread.join(LIMIT)
        return found[0]

    @pytest.mark.parametrize("refused", [None, "give the same"])
    def test_both_prove_that_they_have_the_token(self, refused, pair):
        leader, follower = (Handshake(end, b"a" * 20, seconds=LIMIT) for end in pair)
        assert self.exchange(leader, follower, refused) == refused

    def test_a_follower_with_another_token(self, pair):
        leader, follower = (
            Handshake(pair[0], b"a" * 20, seconds=LIMIT),
            Handshake(pair[1], b"b" * 20, seconds=LIMIT),
        )
        with pytest.raises(UnauthenticatedPeer, match="the token differs"):
            self.exchange(leader, follower)

    def test_a_leader_with_another_token_is_not_obeyed(self, pair):
        left, right = pair
        left.sendall(b'{"zerojax_launch": {"nonce": "1"}}\n{"proof": "00", "refused": "stop"}\n')
        with pytest.raises(UnauthenticatedPeer, match="the token of host 0 differs"):
            Handshake(right, b"a" * 20, seconds=LIMIT).introduce(NUMBERS)

    @pytest.mark.parametrize(
        "said",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"x": 1}\n',
            b"[" * 4000 + b"\n",
            b"\xff\n",
            b"[]\n",
            b'{"hello": {"host": 1}, "nonce": "1", "proof": "1"}\n',
            json.dumps({"hello": {**NUMBERS, "host": True}, "nonce": "", "proof": ""}).encode()
            + b"\n",
            json.dumps({"hello": NUMBERS, "nonce": "1", "proof": "\xe9" * 64}).encode() + b"\n",
            b"x" * 5000,
            b"",
        ],
    )
    def test_whatever_else_is_said_is_a_strangers(self, said, pair):
        left, right = pair
        right.sendall(said)
        right.shutdown(socket.SHUT_WR)
        with pytest.raises(UnauthenticatedPeer):
            Handshake(left, b"a" * 20, seconds=LIMIT).hear()

    @pytest.mark.thorough
    def test_one_byte_at_a_time_ends_with_the_whole_time(self, pair):
        left, right = pair
        over = threading.Event()

        def trickle() -> None:
            while not over.wait(0.05):
                right.sendall(b" ")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises((UnauthenticatedPeer, TimeoutError)):
                Handshake(left, b"a" * 20, seconds=0.3).hear()
        finally:
            over.set()
            thread.join(LIMIT)


@pytest.mark.thorough
def test_strangers_hold_nobody_up_and_are_named():
    """One that says nothing, and forty others, before the one who is waited for."""
    address, said, found = f"127.0.0.1:{free_port()}", [], []

    def gather() -> None:
        found.append(
            Followers.gather(
                address,
                num_hosts=2,
                num_processes=1,
                events=queue.SimpleQueue(),
                seconds=LIMIT,
                token=own(),
                say=said.append,
            )
        )

    thread = threading.Thread(target=gather)
    thread.start()
    silent = connect(address)
    for number in range(40):
        with connect(address) as stranger:
            stranger.sendall(b"x" * number + b"\n")
    link = reach_leader(
        address,
        hello=NUMBERS,
        events=queue.SimpleQueue(),
        seconds=LIMIT,
        token=own(),
        say=said.append,
    )
    thread.join(LIMIT)
    assert found
    link.close()
    found[0].close()
    silent.close()
    dropped = [line for line in said if "a connection from 127.0.0.1 was dropped" in line]
    assert len(dropped) == 10
    assert dropped[-1].endswith("further dropped connections are not reported")


@pytest.mark.thorough
class TestRealLaunchers:
    def commands(self, tmp_path: Path, address: str, *hosts: int) -> list[list[str]]:
        script = tmp_path / "script.py"
        script.write_text(
            f"import os\nprint('secret of the run' if {TOKEN!r} in os.environ else 'no secret')\n"
        )
        options = ("--nprocs", "1", "--nnodes", "2", "--coordinator", address)
        return [command(*options, "--node-rank", str(host), script=script) for host in hosts]

    def test_strangers_come_and_the_run_goes_on_and_nobody_sees_the_token(self, tmp_path):
        address = f"127.0.0.1:{free_port()}"
        leader, follower = self.commands(tmp_path, address, 0, 1)
        with launched(leader, ZEROJAX_JOIN_SECONDS="50", **{TOKEN: SECRET}) as (first,):
            hello = json.dumps({"zerojax_launch": {**NUMBERS, "num_hosts": 7}}).encode() + b"\n"
            for said in (hello, b"GET / HTTP/1.1\r\n\r\n", b"[" * 4000 + b"\n"):
                with connect(address) as stranger:
                    stranger.sendall(said)
            with launched(follower, ZEROJAX_JOIN_SECONDS="50", **{TOKEN: SECRET}) as (second,):
                results = [each.communicate(timeout=LIMIT) for each in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), results
        texts = "".join(text for result in results for text in result)
        assert SECRET not in texts
        assert "secret of the run" not in texts
        assert texts.count("no secret") == 2
        assert results[0][1].count("a connection from 127.0.0.1 was dropped") == 3

    def test_another_token_is_said_on_both_hosts(self, tmp_path):
        commands = self.commands(tmp_path, f"127.0.0.1:{free_port()}", 0, 1)
        started = []
        for words, secret in zip(commands, (SECRET, SECRET[::-1]), strict=True):
            started.append(launched(words, ZEROJAX_JOIN_SECONDS="3", **{TOKEN: secret}))
        with started[0] as (first,), started[1] as (second,):
            errors = [each.communicate(timeout=LIMIT)[1] for each in (first, second)]
        assert (first.returncode, second.returncode) == (1, 1), errors
        assert "was dropped: the token differs" in errors[0]
        assert "no launcher of host 1" in errors[0]
        assert (
            "the token of host 0 differs from that of this host; set ZEROJAX_LAUNCH_TOKEN"
            in errors[1]
        )
        assert not [error for error in errors if SECRET in error or SECRET[::-1] in error]

    @pytest.mark.parametrize(
        "said", [b'{"x": 1}\n', b"[" * 60_000 + b"\n", b"x" * 70_000, b'{"ended": 0}\n']
    )
    def test_a_follower_that_says_nonsense_counts_as_lost(self, said, tmp_path):
        address = f"127.0.0.1:{free_port()}"
        (leader,) = self.commands(tmp_path, address, 0)
        with launched(leader, **{TOKEN: SECRET}) as (first,), connect(address) as connection:
            assert Handshake(connection, SECRET.encode()).introduce(NUMBERS) is None
            connection.settimeout(LIMIT)
            connection.sendall(said)
            _, error = first.communicate(timeout=LIMIT)
        assert first.returncode == 1
        assert "a message of the launcher of host 1" in error
        assert "the launcher of host 1 was lost first" in error
        assert "Traceback" not in error
