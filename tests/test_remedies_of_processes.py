"""What errors of launchers, process groups, GPUs and commands tell to type is typed, and works.

No process is started: jobs and groups are made from given environments, and what would start them
is replaced. Each row: what is refused, what of its sentence is read, and what is done then.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import pytest

import zerojax
from tests.process_groups import free_port, run_group
from zerojax.cli import build_parser
from zerojax.config.sections import WatchConfig
from zerojax.runtime import distributed
from zerojax.runtime.distributed import check_joined, join_processes
from zerojax.runtime.launch import boot, job, launch
from zerojax.runtime.launch.handshake import TOKEN, Token
from zerojax.runtime.launch.hosts import Followers, listen, reach_leader
from zerojax.runtime.launch.job import Job
from zerojax.runtime.process_group import ProcessGroup, local_device_ids
from zerojax.runtime.schedulers import process_group_of
from zerojax.runtime.watchdog import Watchdog

Action = Callable[[], Any]
REFUSALS = (ValueError, TypeError, OSError, RuntimeError)


def sentence_of(action: Action) -> str:
    with pytest.raises(REFUSALS) as caught:
        action()
    return str(caught.value)


def remedies_of(action: Action, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern in the sentence with which something is refused."""
    sentence = sentence_of(action)
    found = re.search(pattern, sentence)
    assert found, sentence
    return found.groups()


def variables(text: str) -> dict[str, str]:
    """{"A": "1"} of A=1, as it is typed before a command."""
    return dict(word.split("=", 1) for word in shlex.split(text))


# --- process groups -------------------------------------------------------------------------------

OWN = {
    "ZEROJAX_COORDINATOR": "127.0.0.1:12355",
    "ZEROJAX_NUM_PROCESSES": "4",
    "ZEROJAX_PROCESS_ID": "3",
}
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
POD = {"JOB_COMPLETION_INDEX": "3", "ZEROJAX_NUM_PROCESSES": "4", "HOSTNAME": "train-3"}
LOCAL = {"ZEROJAX_LOCAL_PROCESS_ID": "2", "ZEROJAX_NUM_LOCAL_PROCESSES": "2"}


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


GROUPS = {
    # what is given; what is read of the sentence; (environment, whether it is a group) that follow
    "a part of the variables": (
        {"ZEROJAX_COORDINATOR": "127.0.0.1:12355"},
        r"needs \('(\w+)', '(\w+)', '(\w+)'\)",
        lambda *names: [(dict(zip(names, ("h:1", "2", "0"), strict=True)), True)],
    ),
    "no port": (
        OWN | {"ZEROJAX_COORDINATOR": "10.0.0.1"},
        r"such as (\S+)$",
        lambda address: [(OWN | {"ZEROJAX_COORDINATOR": address}, True)],
    ),
    "a port that is none": (
        OWN | {"ZEROJAX_COORDINATOR": "h:70000"},
        r"from (\d+) to (\d+)",
        lambda *ports: [(OWN | {"ZEROJAX_COORDINATOR": f"h:{port}"}, True) for port in ports],
    ),
    "a number above the last": (
        OWN | {"ZEROJAX_PROCESS_ID": "4"},
        r"number them from (0)",
        lambda first: [(OWN | {"ZEROJAX_PROCESS_ID": first}, True)],
    ),
    "a local number above the last": (
        OWN | LOCAL,
        r"of each host from (0)",
        lambda first: [(OWN | LOCAL | {"ZEROJAX_LOCAL_PROCESS_ID": first}, True)],
    ),
    "no address of torchrun's": (
        without(RANKS, "MASTER_ADDR"),
        r"but (\w+) is not; set it .* or unset (\w+) to run alone",
        lambda missing, rank: [
            (without(RANKS, "MASTER_ADDR") | {missing: "n1"}, True),
            (without(RANKS, "MASTER_ADDR", rank), False),
        ],
    ),
    "no port of torchrun's": (
        without(RANKS, "MASTER_PORT"),
        r"but (\w+) is not; set it",
        lambda missing: [(without(RANKS, "MASTER_PORT") | {missing: "29500"}, True)],
    ),
    "several hosts of Open MPI": (
        MPI,
        r"-x (\w+)=HOST:PORT",
        lambda name: [(MPI | {name: "n1:12355"}, True)],
    ),
    "no name of the first pod": (
        POD,
        r"set (\S+)\.SERVICE(:\d+) in .* \(in a JobSet, (\w+) and (\w+) will do\)",
        lambda start, port, jobset, replicated: [
            (POD | variables(f"{start}.pods{port}"), True),
            (POD | {jobset: "run", replicated: "workers"}, True),
        ],
    ),
    "several Jobs of a JobSet": (
        POD | {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "workers", "JOB_INDEX": "1"},
        r"use one Job of (\d+) completions \(replicas: 1\)",
        lambda number: [
            (
                POD
                | {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "workers", "JOB_INDEX": "0"}
                | {"ZEROJAX_NUM_PROCESSES": number},
                True,
            )
        ],
    ),
}


@pytest.mark.parametrize("row", GROUPS)
def test_groups(row):
    given, pattern, then = GROUPS[row]
    found = remedies_of(lambda: process_group_of(given), pattern)
    for environment, is_group in then(*found):
        assert (process_group_of(environment) is not None) == is_group


def a_process(process: int, **more: Any) -> ProcessGroup:
    return ProcessGroup(coordinator="h:1", num_processes=8, process_id=process, **more)


class Joining:
    """`join_processes` where nothing is started and no process is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.options: dict[str, Any] = {}
        for name in list(os.environ):
            if name.startswith(("ZEROJAX_", "SLURM_", "OMPI_", "JAX_COORDINATOR")):
                monkeypatch.delenv(name)
        replaced = {
            "_devices_have_started": lambda: False,
            "_reach_directly": lambda group: None,
            "_initialize": lambda group, **options: self.options.update(options),
            "leave_on_uncaught_errors": lambda **_: None,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(distributed, name, function)

    def given(self, environment: Mapping[str, str], num_gpus: int = 0) -> Action:
        """A start with these variables, on a host with so many GPUs."""

        def join() -> ProcessGroup | None:
            with self._monkeypatch.context() as patch:
                patch.setattr(distributed, "visible_gpus", lambda _: num_gpus)
                for name, value in environment.items():
                    patch.setenv(name, value)
                return join_processes()

        return join


@pytest.fixture
def joining(monkeypatch):
    return Joining(monkeypatch)


def first(port: int | None = None, **more: str) -> dict[str, str]:
    """Variables of process 0 of two, which listens."""
    address = f"127.0.0.1:{free_port() if port is None else port}"
    numbers = {"ZEROJAX_NUM_PROCESSES": "2", "ZEROJAX_PROCESS_ID": "0"}
    return {"ZEROJAX_COORDINATOR": address, **numbers, **more}


@contextlib.contextmanager
def taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_gpus_that_nobody_deals_out(joining):
    # torchrun's variables of a process whose host has fewer GPUs than its number.
    ranks = RANKS | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0"}
    given = ranks | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    uneven = joining.given(given, num_gpus=3)
    counts, last, name = remedies_of(uneven, r"start (.*) or (\d) processes, or set (\w+) for each")
    for count in [*map(int, counts.split(", ")), int(last)]:
        assert local_device_ids(a_process(0, local_process_id=0, num_local_processes=count), 3)
    joining.given(given | {name: "0,2"}, num_gpus=3)()
    assert joining.options["local_device_ids"] is None, "JAX reads the variable"
    unknown = a_process(5, local_process_id=5)
    found = remedies_of(lambda: local_device_ids(unknown, 4), r"set (\w+), such as (\S+) or (\S+)$")
    for value in found[1:]:
        joining.given(given | {found[0]: value}, num_gpus=3)()


@pytest.mark.thorough
@pytest.mark.multihost
def test_jax_reads_the_variable_of_local_devices():
    program = (
        "import jax, zerojax\nzerojax.join_processes()\n"
        "print(jax.config.values['jax_cuda_visible_devices'])"
    )
    given = {"JAX_LOCAL_DEVICE_IDS": "0,1", "JAX_PLATFORMS": "cpu"}
    printed = run_group([["-c", program]] * 2, variables=given, join=True)
    assert all("\n0,1\n" in f"\n{text}" for text in printed), printed


def test_a_process_that_has_not_joined(joining, monkeypatch):
    for name, value in first().items():
        monkeypatch.setenv(name, value)
    call, alone = remedies_of(
        check_joined, r"call (zerojax\.join_processes\(\)) .* or set (\S+) if"
    )
    assert eval(call, {"zerojax": zerojax}).num_processes == 2
    for name, value in variables(alone).items():
        monkeypatch.setenv(name, value)
    check_joined()


@pytest.mark.parametrize("name", ["ZEROJAX_JOIN_SECONDS", "ZEROJAX_HEARTBEAT_SECONDS"])
def test_times_below_a_second(name, joining):
    (default,) = remedies_of(joining.given(first(**{name: "0"})), r"the default is (\d+)")
    joining.given(first(**{name: default}))()


def test_a_port_that_is_taken(joining):
    """The variable that is named is one that moves the port, whatever else is set."""
    with taken_port() as port:
        given = first(port)
        (name,) = remedies_of(joining.given(given), r"give another port with (\w+) to all")
        joining.given(given | {name: f"127.0.0.1:{free_port()}"})()
        ranks = RANKS | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        names = remedies_of(joining.given(ranks), r"port with (\w+) or (\w+) to all")
        joining.given(ranks | {names[0]: str(free_port())})()
        joining.given(ranks | {names[1]: f"127.0.0.1:{free_port()}"})()
        bound = first(JAX_COORDINATOR_BIND_ADDRESS=f"127.0.0.1:{port}")
        names = remedies_of(joining.given(bound), r"port with (\w+) and (\w+) to all")
        joining.given(bound | dict.fromkeys(names, f"127.0.0.1:{free_port()}"))()


def test_an_address_of_another_host(joining):
    given = first() | {"ZEROJAX_COORDINATOR": "192.0.2.1:12355"}
    moved, bound = remedies_of(joining.given(given), r"Set (\w+) to an .*, or (\w+) if")
    for name in (moved, bound):
        joining.given(given | {name: f"127.0.0.1:{free_port()}"})()


def test_an_address_that_other_hosts_cannot_reach(joining):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        own = probe.getsockname()[0]
    local = {"ZEROJAX_LOCAL_PROCESS_ID": "0", "ZEROJAX_NUM_LOCAL_PROCESSES": "1"}
    given = first(**local)
    (name,) = remedies_of(joining.given(given), r"set (\w+) to an address of the network")
    joining.given(given | {name: f"{own}:{free_port()}"})()


def test_a_name_that_is_not_known(joining, monkeypatch):
    found = socket.getaddrinfo

    def look_up(host, *args, **options):
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    given = first(ZEROJAX_JOIN_SECONDS="1") | {"ZEROJAX_COORDINATOR": "nowhere:1"}
    (name,) = remedies_of(joining.given(given), r"set (\w+) to a name or address")
    joining.given(given | {name: f"127.0.0.1:{free_port()}"})()


class Clock:
    """Time that passes where something sleeps; from a moment on somebody listens on a port."""

    def __init__(self, opens_at: float, port: int) -> None:
        self.now, self._opens_at, self._port = 0.0, opens_at, port
        self.listener: socket.socket | None = None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self._opens_at and self.listener is None:
            self.listener = socket.create_server(("127.0.0.1", self._port))


def test_a_coordinator_that_comes_late(joining, monkeypatch):
    port = free_port()
    clock = Clock(400.0, port)
    monkeypatch.setattr(distributed, "time", clock)
    given = first(port) | {"ZEROJAX_PROCESS_ID": "1"}
    (name,) = remedies_of(joining.given(given), r"(\w+) allows more time$")
    clock.now = 0.0
    joining.given(given | {name: "500"})()
    assert clock.listener is not None
    joining.given(given)()  # now process 0 "has started there"
    clock.listener.close()


def test_a_process_that_does_not_come(monkeypatch, capsys):
    ended, has_ended = [], threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        has_ended.set()

    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: has_ended.wait(60))
    monkeypatch.setattr(distributed.os, "_exit", end)
    distributed._initialize(a_process(0), seconds=0.05)
    assert re.search(r"(\w+) allows more$", capsys.readouterr().err.strip())[1] == (
        distributed.JOIN_SECONDS
    )
    assert ended == [1]
    distributed._initialize(a_process(0), seconds=60.0)  # now nothing is waited for
    assert ended == [1]


# --- the launcher ---------------------------------------------------------------------------------


@pytest.fixture
def start(monkeypatch):
    """`zerojax launch WORDS`, up to the job that would be started."""
    monkeypatch.setattr("zerojax.runtime.launch.launch", lambda job: job)

    def start(*words: str) -> Job:
        args = build_parser().parse_args(["launch", *words])
        return args.command(args)

    return start


RUN = ("--", "zerojax", "train", "a.yaml")
TWO_HOSTS = ("--nprocs", "2", "--nnodes", "2", "--coordinator", "10.0.0.1:12355")
JOBS: dict[str, tuple[Iterable[str], str, Callable[..., Iterable[Iterable[str]]]]] = {
    "no command": (
        ["--nprocs", "2"],
        r"such as: zerojax launch (.*)$",
        lambda words: [shlex.split(words)],
    ),
    "no number of processes": (
        RUN,
        r"such as (--nprocs .*)$",
        lambda words: [[*shlex.split(words), *RUN]],
    ),
    "no process": (
        ["--nprocs", "0", *RUN],
        r"(--nprocs) 0 is less than (\d)",
        lambda *words: [[*words, *RUN]],
    ),
    "no host": (
        ["--nprocs", "2", "--nnodes", "0", *RUN],
        r"(--nnodes) 0 is less than (\d)",
        lambda *words: [["--nprocs", "2", *words, *RUN]],
    ),
    "restarts below none": (
        ["--nprocs", "2", "--max-restarts", "-1", *RUN],
        r"(--max-restarts) -1 is less than (\d)",
        lambda *words: [["--nprocs", "2", *words, *RUN]],
    ),
    "no device": (
        ["--nprocs", "2", "--cpu-devices", "0", *RUN],
        r"(--cpu-devices) 0 is less than (\d)",
        lambda *words: [["--nprocs", "2", *words, *RUN]],
    ),
    "too much grace": (
        ["--nprocs", "2", "--grace", "9", *RUN],
        r"not in \[(\d), (\d)\]",
        lambda *ends: [["--nprocs", "2", "--grace", end, *RUN] for end in ends],
    ),
    "a host above the last": (
        [*TWO_HOSTS, "--node-rank", "2", *RUN],
        r"number the hosts from (0)",
        lambda number: [[*TWO_HOSTS, "--node-rank", number, *RUN]],
    ),
    "no coordinator": (
        [*TWO_HOSTS[:4], *RUN],
        r"needs (--coordinator) HOST:PORT",
        lambda option: [[*TWO_HOSTS[:4], option, "10.0.0.1:12355", *RUN]],
    ),
    "a coordinator without a port": (
        [*TWO_HOSTS[:4], "--coordinator", "10.0.0.1", *RUN],
        r"(--coordinator)='10.0.0.1' has no port; .* such as (\S+)$",
        lambda *words: [[*TWO_HOSTS[:4], *words, *RUN]],
    ),
    "python alone": (
        ["--nprocs", "2", "--", "python"],
        r"neither a script nor a module \((-m)\)",
        lambda option: [
            ["--nprocs", "2", "--", "python", "train.py"],
            ["--nprocs", "2", "--", "python", option, "package.train"],
        ],
    ),
}


@pytest.mark.parametrize("row", JOBS)
def test_jobs(row, start):
    given, pattern, then = JOBS[row]
    for words in then(*remedies_of(lambda: start(*given), pattern)):
        assert isinstance(start(*words), Job)


def test_gpus_that_processes_cannot_share(start, monkeypatch):
    monkeypatch.setattr(job, "visible_gpus", lambda _: 1)
    given = ["--nprocs", "2", *RUN]
    (cpus,) = remedies_of(lambda: start(*given), r"start one, or try it on CPUs with (.*)$")
    start("--nprocs", "1", *RUN)
    start(*shlex.split(cpus), *given)
    monkeypatch.setattr(job, "visible_gpus", lambda _: 6)
    found = remedies_of(
        lambda: start("--nprocs", "4", *RUN), r"use (--nprocs) (.*) or (\d), .* with (.*)$"
    )
    option, some, last, cpus = found
    for number in [*some.split(", "), last]:
        start(option, number, *RUN)
    start("--nprocs", "4", *shlex.split(cpus), *RUN)


def test_nothing_to_boot(tmp_path, monkeypatch, capsys):
    def booted(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["boot", *words])
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path[1:]])
        return boot.main()

    (tmp_path / "spoken.py").write_text("print('it speaks')")
    monkeypatch.chdir(tmp_path)
    assert booted() == 2
    words = re.search(r"launch\.boot script\.py \.\.\. \| (-m) module", capsys.readouterr().err)
    assert booted("spoken.py") == 0
    assert booted(words[1], "spoken") == 0
    assert capsys.readouterr().out == "it speaks\n" * 2


# --- launchers of several hosts -------------------------------------------------------------------

SECRET = "0123456789abcdef-of-the-run"
LIMIT = 120.0
"""Seconds for what takes some milliseconds."""


def own_token(text: str = SECRET) -> Token:
    return Token({TOKEN: text})


class Leader(threading.Thread):
    """Host 0, which waits for the launchers of `num_hosts`."""

    def __init__(self, address: str, *, token: Token | None = None, after: float = 0.0, **numbers):
        super().__init__(daemon=True)
        self._options = {"num_hosts": 2, "num_processes": 2, "seconds": LIMIT, **numbers}
        self._address, self._token, self._after = address, token or own_token(), after
        self.followers: Followers | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        time.sleep(self._after)
        try:
            self.followers = Followers.gather(
                self._address,
                events=queue.SimpleQueue(),
                token=self._token,
                say=lambda _: None,
                **self._options,
            )
            self.followers.send(finish=0)
            self.followers.close()
        except Exception as error:
            self.error = error


def meet(**changes: int) -> None:
    """A launcher comes to host 0 of two hosts with two processes each."""
    address = f"127.0.0.1:{free_port()}"
    leader = Leader(address)
    leader.start()
    hello = {"host": 1, "num_hosts": 2, "num_processes": 2, **changes}
    options = {"events": queue.SimpleQueue(), "seconds": LIMIT, "say": lambda _: None}
    try:
        reach_leader(address, hello=hello, token=own_token(), **options).close()
    finally:
        leader.join(LIMIT)
    assert leader.error is None


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"num_processes": 3}, r"host 0 with --nprocs (?P<num_processes>\d); give the same to all"),
        ({"num_hosts": 3}, r"host 0 with --nnodes (?P<num_hosts>\d); give the same to all"),
    ],
)
def test_launchers_that_were_told_different_things(given, pattern):
    found = re.search(pattern, sentence_of(lambda: meet(**given)))
    assert found
    meet(**{name: int(value) for name, value in found.groupdict().items()})


def test_two_launchers_of_one_host():
    remedies_of(lambda: meet(host=0), r"(give each host its own)")
    meet(host=1)


def follow(address: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> int:
    """The launcher of host 1, as `zerojax launch` runs it."""
    for name, value in {TOKEN: SECRET, **environment}.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:  # the process of a launcher ends with its connection

        def reach(*args: Any, **options: Any) -> Any:
            return stack.enter_context(contextlib.closing(reach_leader(*args, **options)))

        monkeypatch.setattr("zerojax.runtime.launch.reach_leader", reach)
        return launch(
            Job(command=("x",), num_processes=2, num_hosts=2, host=1, coordinator=address)
        )


@pytest.mark.thorough
def test_a_host_0_that_comes_late(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    once = {"ZEROJAX_JOIN_SECONDS": "1"}
    rank, name = remedies_of(
        lambda: follow(address, monkeypatch, **once), r"with --node-rank (\d), or set (\w+) to wait"
    )
    assert rank == "0"
    leader = Leader(address, after=1.3)
    leader.start()
    assert follow(address, monkeypatch, **{name: "20"}) == 0
    leader.join(LIMIT)


def test_a_host_that_does_not_come(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    leader = Leader(address, seconds=0.0)
    leader.run()
    rank, name = re.search(
        r"with --node-rank (\d), or set (\w+) to wait", str(leader.error)
    ).groups()
    assert (rank, name) == ("1", "ZEROJAX_JOIN_SECONDS")
    leader = Leader(address)  # with time, the launcher of that host comes
    leader.start()
    assert follow(address, monkeypatch) == 0
    leader.join(LIMIT)
    assert leader.error is None


def test_an_address_that_host_0_cannot_listen_on():
    with taken_port() as port:
        remedies_of(lambda: listen(f"127.0.0.1:{port}"), r"(an address and a free port of this)")
    listen(f"127.0.0.1:{free_port()}").close()


def test_a_token_that_can_be_guessed():
    least, command = remedies_of(
        lambda: own_token("gu3ss"), r"give at least (\d+) .* those of `(.*)`$"
    )
    if shutil.which("openssl"):
        text = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
        assert own_token(text.stdout).read() == text.stdout.strip().encode()
    own_token(secrets.token_hex(16)[: int(least)])


@pytest.mark.parametrize("case", ["no cache", "a place that cannot be written"])
def test_a_token_without_a_place(case, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cache = "off" if case == "no cache" else str(tmp_path / "file")
    monkeypatch.setenv("ZEROJAX_CACHE", cache)
    name, option = remedies_of(
        lambda: Token({}).make(), r"set (\w+) to the same secret .*, or give each launcher (\S+)"
    )
    words = [*TWO_HOSTS, option, str(tmp_path / "token"), *RUN]
    args = build_parser().parse_args(["launch", *words])
    for token in (Token({name: SECRET}), Token({}, args.token_file)):
        token.make()
        assert token.read()


@pytest.mark.thorough
def test_launchers_with_different_tokens():
    """What the other host says while it waits; then it is given the same secret."""
    address, said = f"127.0.0.1:{free_port()}", []
    leader = Leader(address)
    leader.start()
    hello = {"host": 1, "num_hosts": 2, "num_processes": 2}
    options = {"hello": hello, "events": queue.SimpleQueue(), "say": said.append}
    other = own_token("another-secret-of-a-run")
    sentence_of(lambda: reach_leader(address, token=other, seconds=0.5, **options))
    name = re.search(r"set (\w+) to the same secret", said[-1])[1]
    token = Token({name: SECRET})
    reach_leader(address, token=token, seconds=LIMIT, **options).close()
    leader.join(LIMIT)
    assert leader.error is None


def test_a_run_that_only_needs_longer(capsys):
    ended, has_ended = [], threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        has_ended.set()

    def work(**times: float) -> None:
        with Watchdog(WatchConfig(**times), end=end) as dog, dog.during("working"):
            has_ended.wait(60)

    work(step_timeout=0.05)
    name = re.search(r"with watch\.(\w+) raised", capsys.readouterr().err)[1]
    assert set(ended) == {79}
    ended.clear()
    work(**{name: 60.0})  # now nothing is waited for
    assert not ended
