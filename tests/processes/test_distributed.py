"""Joining a run: where the coordinator listens, what stands in the way, how a process leaves."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process_groups import free_port
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax import make_mesh, make_plan
from zerojax.runtime import distributed
from zerojax.runtime.distributed import check_joined, is_peer_loss
from zerojax.runtime.process_group import ProcessGroup
from zerojax.runtime.shutdown import exit_code_of

ROOT = Path(__file__).resolve().parents[2]

JOIN = """
import os, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
from zerojax import join_processes
group = join_processes()
"""


@contextlib.contextmanager
def processes(program: str, count: int, **variables: str) -> Iterator[list[subprocess.Popen]]:
    """`count` processes that run `program` as one group; ended when the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "PYTHONPATH": str(ROOT),
        "ZEROJAX_COORDINATOR": f"127.0.0.1:{port}",
        "ZEROJAX_NUM_PROCESSES": str(count),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **common, "ZEROJAX_PROCESS_ID": str(index), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def listening(pids: set[int]) -> list[tuple[str, int]]:
    """Addresses and ports on which these processes listen, as the kernel's tables have them."""
    found = []
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:  # LISTEN
                address, _, port = words[1].partition(":")
                found.append((address.removeprefix(MAPPED), int(port, 16)))
    return found


# As /proc/net writes them: 127.0.0.1, and what stands before an IPv4 address in an IPv6 socket.
LOOPBACK, MAPPED = "0100007F", "0000000000000000FFFF0000"


@pytest.mark.thorough
@pytest.mark.multihost
def test_nothing_listens_beyond_the_given_address():
    """JAX's default is [::]; a proxy in the environment, which gRPC would ask, is left aside."""
    program = JOIN + (
        "jax.device_count()\nprint('joined', group.process_id, flush=True)\nsys.stdin.read(1)\n"
    )
    with processes(program, 2, http_proxy="http://127.0.0.1:9", grpc_proxy="") as started:
        lines = [process.stdout.readline() for process in started]
        assert lines == ["joined 0\n", "joined 1\n"], [p.stderr.read() for p in started]
        found = listening({process.pid for process in started})
        for process in started:  # both first: neither ends without the other
            process.stdin.write("x")
            process.stdin.flush()
        outputs = [process.communicate(timeout=150) for process in started]
        assert [process.returncode for process in started] == [0, 0]
    said = [error for _, error in outputs]
    (port,) = re.findall(r"127.0.0.1:(\d+);", said[0])
    assert [address for address, at in found if at == int(port)] == [LOOPBACK], found
    assert not [address for address, _ in found if set(address) == {"0"}], "every interface"
    host = socket.gethostname()
    assert said[1] == f"rank 1/2 on {host}, on CPUs\n"
    assert re.fullmatch(
        rf"2 processes \(ZEROJAX_\*\) at 127.0.0.1:\d+; rank 0/2 on {host}, on CPUs\n", said[0]
    )


FAILURES = {
    "exception": ("raise RuntimeError('lost its mind')", 1, "RuntimeError: lost its mind"),
    "own_code": (
        "class Stopped(KeyboardInterrupt): exit_code = 79\nraise Stopped('it hangs')",
        79,
        "Stopped: it hangs",
    ),
}


@pytest.mark.thorough
@pytest.mark.multihost
@pytest.mark.parametrize("failing", [0, 1])
def test_a_script_that_fails_ends_at_once_with_its_own_code(failing):
    """By itself JAX waits 300 seconds for the others at exit, and the code becomes -6."""
    fault, code, said = FAILURES["exception" if failing else "own_code"]
    program = JOIN + (
        "jax.device_count()\n"
        f"if group.process_id == {failing}:\n"
        + "".join(f"    {line}\n" for line in fault.splitlines())
        + "time.sleep(300)\n"
    )
    with processes(program, 2) as started:
        _, error = started[failing].communicate(timeout=150)
        assert started[failing].returncode == code, error
        assert said in error


@pytest.mark.thorough
@pytest.mark.multihost
def test_all_wait_for_each_other_when_all_is_saved():
    program = JOIN + (
        "class Interrupted(KeyboardInterrupt): exit_code = 75\n"
        "time.sleep(0.5 * group.process_id)\n"
        "raise Interrupted('saved')\n"
    )
    with processes(program, 2) as started:
        errors = [process.communicate(timeout=150)[1] for process in started]
        assert [process.returncode for process in started] == [75, 75], errors
    for error in errors:
        assert error.endswith("\nzerojax: saved\n"), "a sentence, no traceback"


def run_alone(program: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def own(address: str, process: int, **more: str) -> dict[str, str]:
    return {
        "ZEROJAX_COORDINATOR": address,
        "ZEROJAX_NUM_PROCESSES": "2",
        "ZEROJAX_PROCESS_ID": str(process),
        "ZEROJAX_JOIN_SECONDS": "1",
        **more,
    }


@pytest.mark.thorough
def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        result = run_alone(JOIN, **own(address, 0))
    assert result.returncode == 1
    assert f"the coordinator's address {address} is in use by another program" in result.stderr


def test_the_name_of_process_0_may_become_known_later(monkeypatch):
    """As that of a pod of Kubernetes, which its service publishes once it has started."""
    asked, slept = [], []

    def look_up(host, port, *args, **options):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found("127.0.0.1", port, *args, **options)

    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(distributed.time, "sleep", slept.append)
    group = ProcessGroup(coordinator=f"job-0.service:{free_port()}", num_processes=2, process_id=0)
    distributed._check_free(group.coordinator, group, 60)
    assert asked == ["job-0.service"] * 3
    assert slept == [1.0, 1.0]
    asked.clear()
    with pytest.raises(ConnectionError, match="'job-0.service' could not be resolved"):
        distributed._check_free(group.coordinator, group, 0.5)


@pytest.mark.thorough
def test_a_coordinator_that_is_not_there():
    address = f"127.0.0.1:{free_port()}"
    result = run_alone(JOIN, **own(address, 1))
    assert result.returncode == 1
    assert f"did not reach the coordinator {address} within 1 seconds" in result.stderr
    assert "Connection refused" in result.stderr


@pytest.mark.thorough
def test_a_process_that_does_not_come():
    address = f"127.0.0.1:{free_port()}"
    result = run_alone(JOIN, **own(address, 0, ZEROJAX_JOIN_SECONDS="2"))
    assert result.returncode == 1
    assert f"not all 2 processes of the run have reached the coordinator {address}" in result.stderr
    assert "Check failure stack trace" not in result.stderr


@pytest.mark.thorough
def test_joining_after_jax_has_started_is_refused_at_once():
    program = "import jax, zerojax\njax.devices()\n"
    result = run_alone(
        program + "zerojax.join_processes()", **own("127.0.0.1:1", 1, ZEROJAX_JOIN_SECONDS="100")
    )
    assert "call zerojax.join_processes() before" in result.stderr
    with_train = program + "zerojax.train(lambda rngs: None, None, [])"
    result = run_alone(with_train, **own("127.0.0.1:1", 1, ZEROJAX_JOIN_SECONDS="100"))
    assert "this is process 1 of 2 (ZEROJAX_*), but it has not joined the others" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("why"), 1),
    ],
)
def test_exit_codes_of_errors(error, code):
    assert exit_code_of(error) == code


@pytest.mark.parametrize("alone", [False, True])
def test_planning_alone_where_others_wait_is_refused(alone, monkeypatch):
    """A script under `srun` that forgets to join would be 16 runs that overwrite each other."""
    for name, value in own("127.0.0.1:1", 1).items():
        monkeypatch.setenv(name, value)
    if alone:
        monkeypatch.setenv("ZEROJAX_NUM_PROCESSES", "1")
        check_joined()
        return
    with pytest.raises(RuntimeError, match="each would train by itself.*ZEROJAX_NUM_PROCESSES=1"):
        make_plan(reference_model("gpt2"), make_mesh(), example_batch=text_batch(0))


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
