"""Refusals of launchers, process groups and GPUs.

No process is started: jobs and groups are made from given environments, and what would start them
is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest

from tests.support.process_groups import free_port, run_group
from tests.support.refusals import Refusal, check_words, refused, table
from zerojax import join_processes
from zerojax.cli import build_parser
from zerojax.config.sections import WatchConfig
from zerojax.runtime import distributed
from zerojax.runtime.distributed import check_joined
from zerojax.runtime.launch import boot, job, launch
from zerojax.runtime.launch.handshake import TOKEN, Token
from zerojax.runtime.launch.hosts import Followers, listen, reach_leader
from zerojax.runtime.launch.job import Job
from zerojax.runtime.process_group import ProcessGroup, local_device_ids
from zerojax.runtime.schedulers import process_group_of
from zerojax.runtime.watchdog import Watchdog

Action = Callable[[], Any]


def variables(text: str) -> dict[str, str]:
    """{"A": "1"} of A=1, as it is typed before a command."""
    return dict(word.split("=", 1) for word in shlex.split(text))


# --- process groups -------------------------------------------------------------------------------

THREE = "ZEROJAX_NUM_PROCESSES=4 ZEROJAX_PROCESS_ID=3"
OWN = f"ZEROJAX_COORDINATOR=127.0.0.1:12355 {THREE}"
RANKS = "RANK=1 WORLD_SIZE=2"
MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2"
POD = "JOB_COMPLETION_INDEX=3 ZEROJAX_NUM_PROCESSES=4 HOSTNAME=train-3"
SET = "JOBSET_NAME=run REPLICATED_JOB_NAME=workers"
GROUPS = table(
    f"""
ZEROJAX_COORDINATOR=h:1 | ZEROJAX_NUM_PROCESSES
  | ZEROJAX_COORDINATOR ZEROJAX_NUM_PROCESSES ZEROJAX_PROCESS_ID
  | ZEROJAX_COORDINATOR=h:1 ZEROJAX_NUM_PROCESSES=2 ZEROJAX_PROCESS_ID=0
{THREE} ZEROJAX_COORDINATOR=10.0.0.1 | ZEROJAX_COORDINATOR='10.0.0.1' port | 127.0.0.1:12355
  | {THREE} ZEROJAX_COORDINATOR=$
{THREE} ZEROJAX_COORDINATOR=h:70000 | ZEROJAX_COORDINATOR='h:70000' | 1 65535
  | {THREE} ZEROJAX_COORDINATOR=h:$
{OWN} ZEROJAX_PROCESS_ID=4 | ZEROJAX_* 4 | 0 | {OWN} ZEROJAX_PROCESS_ID=$
{OWN} ZEROJAX_LOCAL_PROCESS_ID=2 ZEROJAX_NUM_LOCAL_PROCESSES=2 | ZEROJAX_* 2 | 0
  | {OWN} ZEROJAX_LOCAL_PROCESS_ID=$ ZEROJAX_NUM_LOCAL_PROCESSES=2
{RANKS} MASTER_PORT=29500 | RANK=1 WORLD_SIZE=2 | MASTER_ADDR RANK
  | {RANKS} MASTER_PORT=29500 MASTER_ADDR=n1 ; WORLD_SIZE=2 MASTER_PORT=29500
{RANKS} MASTER_ADDR=n1 | RANK=1 WORLD_SIZE=2 | MASTER_PORT | {RANKS} MASTER_ADDR=n1 $=29500
{MPI} | "Open MPI" | "-x ZEROJAX_COORDINATOR=HOST:PORT" | {MPI} ZEROJAX_COORDINATOR=n1:12355
{POD} | JOB_COMPLETION_INDEX
  | ZEROJAX_COORDINATOR=train-0.SERVICE:12355 JOBSET_NAME REPLICATED_JOB_NAME
  | {POD} ZEROJAX_COORDINATOR=train-0.pods:12355 ; {POD} {SET}
{POD} {SET} JOB_INDEX=1 | JOB_INDEX=1 JOB_COMPLETION_INDEX | 4
  | {POD} {SET} JOB_INDEX=0 ZEROJAX_NUM_PROCESSES=$
"""
)


@pytest.mark.parametrize("row", GROUPS)
def test_groups(row):
    def take(words: str) -> None:
        """All are groups, but for what unsets RANK: that runs alone."""
        alone = words.startswith("WORLD_SIZE")
        assert (process_group_of(variables(words)) is None) == alone

    GROUPS[row].check(take)


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
            "leave_when_one_is_lost": lambda *_: None,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(distributed, name, function)

    def start(self, environment: Mapping[str, str], num_gpus: int = 0) -> ProcessGroup | None:
        """Starts with these variables, on a host with so many GPUs."""
        with self._monkeypatch.context() as patch:
            patch.setattr(distributed, "visible_gpus", lambda _: num_gpus)
            for name, value in environment.items():
                patch.setenv(name, value)
            return join_processes()

    def check(self, bad: Any, value: Any, remedy: Any, *good: Any, error: Any = OSError) -> None:
        Refusal(bad, value, remedy, good, error).check(self.start)


@pytest.fixture
def joining(monkeypatch):
    return Joining(monkeypatch)


def first(port: int | None = None, **more: str) -> dict[str, str]:
    """Variables of process 0 of two, which listens."""
    address = f"127.0.0.1:{free_port() if port is None else port}"
    numbers = {"ZEROJAX_NUM_PROCESSES": "2", "ZEROJAX_PROCESS_ID": "0"}
    return {"ZEROJAX_COORDINATOR": address, **numbers, **more}


def here(*names: str) -> dict[str, str]:
    """Free addresses of this host."""
    return dict.fromkeys(names, f"127.0.0.1:{free_port()}")


@contextlib.contextmanager
def taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_gpus_that_nobody_deals_out(joining):
    # torchrun's variables of a process whose host has fewer GPUs than its number.
    given = variables("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
    given |= {"MASTER_PORT": str(free_port())}
    refused(lambda: joining.start(given, 3), "2 3", "1 3 JAX_LOCAL_DEVICE_IDS")
    for count in (1, 3):
        assert local_device_ids(a_process(0, local_process_id=0, num_local_processes=count), 3)
    joining.start(given | {"JAX_LOCAL_DEVICE_IDS": "0,2"}, 3)
    assert joining.options["local_device_ids"] is None, "JAX reads the variable"
    unknown = a_process(5, local_process_id=5)
    refused(lambda: local_device_ids(unknown, 4), "4 5", "JAX_LOCAL_DEVICE_IDS 0 0,1")
    for value in ("0", "0,1"):
        joining.start(given | {"JAX_LOCAL_DEVICE_IDS": value}, 3)


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
    remedy = "zerojax.join_processes() ZEROJAX_NUM_PROCESSES=1"
    refused(check_joined, '"process 0 of 2"', remedy, error=RuntimeError)
    assert join_processes().num_processes == 2
    monkeypatch.setenv("ZEROJAX_NUM_PROCESSES", "1")
    check_joined()


@pytest.mark.parametrize(
    ("name", "default"), [("ZEROJAX_JOIN_SECONDS", "300"), ("ZEROJAX_HEARTBEAT_SECONDS", "60")]
)
def test_times_below_a_second(name, default, joining):
    bad, good = first(**{name: "0"}), first(**{name: default})
    joining.check(bad, [f"{name}=0"], default, good, error=ValueError)


def test_a_port_that_is_taken(joining):
    """The variable that is named is one that moves the port, whatever else is set."""
    own, its_port, bind = (
        "ZEROJAX_COORDINATOR",
        "ZEROJAX_COORDINATOR_PORT",
        "JAX_COORDINATOR_BIND_ADDRESS",
    )
    with taken_port() as port:
        address = f"127.0.0.1:{port}"
        given = first(port)
        joining.check(given, address, own, given | here(own))
        ranks = variables(f"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")
        good = [ranks | {its_port: str(free_port())}, ranks | here(own)]
        joining.check(ranks, address, [its_port, own], *good)
        bound = first(**{bind: address})
        joining.check(bound, address, [bind, own], bound | here(bind, own))


def test_addresses_that_cannot_be_reached(joining, monkeypatch):
    own, bind = "ZEROJAX_COORDINATOR", "JAX_COORDINATOR_BIND_ADDRESS"
    given = first(**{own: "192.0.2.1:12355"})
    joining.check(given, "192.0.2.1:12355", [own, bind], given | here(own), given | here(bind))
    found = socket.getaddrinfo

    def look_up(host, *args, **options):
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    given = first(**{"ZEROJAX_JOIN_SECONDS": "1", own: "nowhere:1"})
    joining.check(given, "'nowhere' 1", own, given | here(own), error=ConnectionError)


def test_an_address_that_other_hosts_cannot_reach(joining):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        address = f"{probe.getsockname()[0]}:{free_port()}"
    given = first(ZEROJAX_LOCAL_PROCESS_ID="0", ZEROJAX_NUM_LOCAL_PROCESSES="1")
    name = "ZEROJAX_COORDINATOR"
    joining.check(given, [given[name]], [name, "network"], given | {name: address})


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
    given = first(port, ZEROJAX_PROCESS_ID="1")
    value, late = f"127.0.0.1:{port} 300", lambda: joining.start(given)
    refused(late, value, "0 ZEROJAX_JOIN_SECONDS", error=ConnectionError)
    clock.now = 0.0
    joining.start(given | {"ZEROJAX_JOIN_SECONDS": "500"})
    assert clock.listener is not None
    joining.start(given)  # now process 0 "has started there"
    clock.listener.close()


class Ending:
    """Stands in for the end of a process: its codes, and the wait for it."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._has_ended = threading.Event()

    def end(self, code: int) -> None:
        self.codes.append(code)
        self._has_ended.set()

    def wait(self, *_: Any, **__: Any) -> None:
        self._has_ended.wait(60)


def test_a_process_that_does_not_come(monkeypatch, capsys):
    ending = Ending()
    monkeypatch.setattr(jax.distributed, "initialize", ending.wait)
    monkeypatch.setattr(distributed.os, "_exit", ending.end)
    distributed._initialize(a_process(0), seconds=0.05)
    check_words(capsys.readouterr().err, "0 8 h:1", distributed.JOIN_SECONDS)
    assert ending.codes == [1]
    distributed._initialize(a_process(0), seconds=60.0)  # now nothing is waited for
    assert ending.codes == [1]


def test_a_run_that_only_needs_longer(capsys):
    ending = Ending()

    def work(**times: float) -> None:
        with Watchdog(WatchConfig(**times), end=ending.end) as dog, dog.during("working"):
            ending.wait()

    work(step_timeout=0.05)
    check_words(capsys.readouterr().err, "working", "watch.step_timeout")
    assert set(ending.codes) == {79}
    ending.codes.clear()
    work(step_timeout=60.0)  # now nothing is waited for
    assert not ending.codes


# --- the launcher ---------------------------------------------------------------------------------


@pytest.fixture
def start(monkeypatch):
    """`zerojax launch WORDS`, up to the job that would be started."""
    monkeypatch.setattr("zerojax.runtime.launch.launch", lambda job: job)

    def start(words: str) -> None:
        args = build_parser().parse_args(["launch", *shlex.split(words)])
        assert isinstance(args.command(args), Job)

    return start


RUN = "-- zerojax train a.yaml"
TWO = "--nprocs 2"
HOSTS = f"{TWO} --nnodes 2"
TINY = "-- zerojax train configs/tiny_shakespeare.yaml"
JOBS = table(
    f"""
{TWO} | command | "zerojax launch {TWO} {TINY}" | {TWO} {TINY}
{RUN} | GPU --nprocs | "{TWO} --cpu-devices 2" | $ {RUN}
--nprocs 0 {RUN} | --nprocs 0 | 1 | --nprocs $ {RUN}
{TWO} --nnodes 0 {RUN} | --nnodes 0 | 1 | {TWO} --nnodes $ {RUN}
{TWO} --max-restarts -1 {RUN} | --max-restarts -1 | 0 | {TWO} --max-restarts $ {RUN}
{TWO} --cpu-devices 0 {RUN} | --cpu-devices 0 | 1 | {TWO} --cpu-devices $ {RUN}
{TWO} --grace 9 {RUN} | --grace 9 | 0 4 | {TWO} --grace $ {RUN}
{HOSTS} --coordinator a:1 --node-rank 2 {RUN} | --node-rank 2 | 0
  | {HOSTS} --coordinator a:1 --node-rank $ {RUN}
{HOSTS} {RUN} | "--nnodes 2" | "--coordinator HOST:PORT" | {HOSTS} --coordinator a:1 {RUN}
{HOSTS} --coordinator 10.0.0.1 {RUN} | --coordinator '10.0.0.1' | 127.0.0.1:12355
  | {HOSTS} --coordinator $ {RUN}
{TWO} -- python | 'python' | script -m
  | {TWO} -- python train.py ; {TWO} -- python -m package.train
"""
)


@pytest.mark.parametrize("row", JOBS)
def test_jobs(row, start):
    JOBS[row].check(start)


@pytest.mark.parametrize(
    ("gpus", "bad", "remedy", "good"),
    [(1, "2", "--cpu-devices 1", "1"), (6, "4", "--nprocs 1 2 3 6 --cpu-devices", "1 2 3 6")],
)
def test_gpus_that_processes_cannot_share(gpus, bad, remedy, good, start, monkeypatch):
    monkeypatch.setattr(job, "visible_gpus", lambda _: gpus)
    launches = [f"--nprocs {number} {RUN}" for number in good.split()]
    launches.append(f"--cpu-devices 1 --nprocs {bad} {RUN}")
    value = [bad, "one" if gpus == 1 else gpus]
    Refusal(f"--nprocs {bad} {RUN}", value, remedy, launches).check(start)


def test_nothing_to_boot(tmp_path, monkeypatch, capsys):
    def booted(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["boot", *words])
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path[1:]])
        return boot.main()

    (tmp_path / "spoken.py").write_text("print('it speaks')")
    monkeypatch.chdir(tmp_path)
    assert booted() == 2
    check_words(capsys.readouterr().err, "launch.boot", "script.py -m")
    assert booted("spoken.py") == 0
    assert booted("-m", "spoken") == 0
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
        self.error: Exception | None = None

    def run(self) -> None:
        time.sleep(self._after)
        try:
            followers = Followers.gather(
                self._address,
                events=queue.SimpleQueue(),
                token=self._token,
                say=lambda _: None,
                **self._options,
            )
            followers.send(finish=0)
            followers.close()
        except Exception as error:
            self.error = error


@contextlib.contextmanager
def leader(**options: Any):
    """The address of a host 0, which has come to its end without an error at the end of this."""
    address = f"127.0.0.1:{free_port()}"
    thread = Leader(address, **options)
    thread.start()
    try:
        yield address
    finally:
        thread.join(LIMIT)
    assert thread.error is None


def come(address: str, *, token: Token | None = None, seconds: float = LIMIT, **changes: Any):
    """The launcher of another host comes to host 0 of two hosts with two processes each."""
    say = changes.pop("say", lambda _: None)
    hello = {"host": 1, "num_hosts": 2, "num_processes": 2, **changes}
    options = {"events": queue.SimpleQueue(), "seconds": seconds, "say": say}
    reach_leader(address, hello=hello, token=token or own_token(), **options).close()


@pytest.mark.parametrize(
    ("bad", "value", "remedy", "good"),
    [
        ({"num_processes": 3}, "--nprocs 3", '"--nprocs 2"', {"num_processes": 2}),
        ({"num_hosts": 3}, "--nnodes 3", '"--nnodes 2"', {"num_hosts": 2}),
        ({"host": 0}, "--node-rank 0", "own", {"host": 1}),
    ],
)
def test_launchers_that_were_told_different_things(bad, value, remedy, good):
    def meet(changes: dict[str, int]) -> None:
        with leader() as address:
            come(address, **changes)

    Refusal(bad, value, remedy, [good]).check(meet)


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
    remedy = '"--node-rank 0" ZEROJAX_JOIN_SECONDS'
    early = functools.partial(follow, monkeypatch=monkeypatch, ZEROJAX_JOIN_SECONDS="1")
    address = f"127.0.0.1:{free_port()}"
    refused(lambda: early(address), [address, 1], remedy, error=TimeoutError)
    with leader(after=1.3) as address:
        assert follow(address, monkeypatch, ZEROJAX_JOIN_SECONDS="20") == 0


def test_a_host_that_does_not_come(monkeypatch):
    alone = Leader(f"127.0.0.1:{free_port()}", seconds=0.0)
    alone.run()
    assert isinstance(alone.error, TimeoutError)
    check_words(str(alone.error), '"--node-rank 1" ZEROJAX_JOIN_SECONDS')
    with leader() as address:  # with time, the launcher of that host comes
        assert follow(address, monkeypatch) == 0


def test_an_address_that_host_0_cannot_listen_on():
    with taken_port() as port:
        value = ["--coordinator", f"127.0.0.1:{port}"]
        refused(lambda: listen(value[1]), value, "free", error=OSError)
    listen(f"127.0.0.1:{free_port()}").close()


def test_a_token_that_can_be_guessed():
    command = "openssl rand -hex 32"
    good = [secrets.token_hex(16)[:16]]
    if shutil.which("openssl"):
        ran = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
        assert own_token(ran.stdout).read() == ran.stdout.strip().encode()
    Refusal("gu3ss", [TOKEN, 5], ["16", command], good).check(own_token)


@pytest.mark.parametrize(("cache", "error"), [("off", ValueError), ("file", OSError)])
def test_a_token_without_a_place(cache, error, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cache = cache if cache == "off" else str(tmp_path / cache)
    monkeypatch.setenv("ZEROJAX_CACHE", cache)
    value = ["ZEROJAX_CACHE=off"] if cache == "off" else [f"{cache}/launch-token"]
    refused(lambda: Token({}).make(), value, [TOKEN, "--token-file"], error=error)
    words = f"{HOSTS} --coordinator a:1 --token-file {tmp_path}/token {RUN}"
    args = build_parser().parse_args(["launch", *shlex.split(words)])
    for token in (own_token(), Token({}, args.token_file)):
        token.make()
        assert token.read()


@pytest.mark.thorough
def test_launchers_with_different_tokens():
    """What the other host says while it waits; then it is given the same secret."""
    other, said = own_token("another-secret-of-a-run"), []
    with leader() as address:
        wait = lambda: come(address, token=other, seconds=0.5, say=said.append)  # noqa: E731
        refused(wait, [address, 0.5], TOKEN, error=TimeoutError)
        check_words(said[-1], "token", [TOKEN, "--token-file"])
        come(address)


@pytest.mark.parametrize(("num_devices", "gpus"), [(8, 0), (1, 0), (8, 1)])
def test_virtual_cpu_devices_of_a_script_run_one_program_at_a_time(num_devices, gpus, monkeypatch):
    """Two programs with collectives on them can deadlock; a process alone is no exception."""
    option = "jax_cpu_enable_async_dispatch"
    monkeypatch.setattr(distributed, "process_group_of", lambda environment: None)
    monkeypatch.setattr(distributed, "visible_gpus", lambda environment: gpus)
    monkeypatch.setattr(distributed, "_NUM_CPU_DEVICES", "num_devices")
    monkeypatch.setattr(jax.config, "num_devices", num_devices, raising=False)
    before = jax.config.read(option)
    try:
        jax.config.update(option, True)
        assert join_processes() is None
        assert jax.config.read(option) == (num_devices == 1 or gpus > 0)
    finally:
        jax.config.update(option, before)
