"""`zerojax launch` without JAX: which process failed, what became of the others, who was told."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.test_distributed import LOOPBACK, free_port, listening
from zerojax.runtime.launch.children import RUNTIME_SUMMARY, without_noise
from zerojax.runtime.launch.job import (
    End,
    Job,
    command_line,
    describe,
    exit_code,
    first_failure,
    may_restart,
)

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
"""Seconds after which a launcher of these tests, which need one or two, is ended."""

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
me, restart = int(os.environ["ZEROJAX_PROCESS_ID"]), int(os.environ["ZEROJAX_RESTART"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as JAX's runtime does
def wait():
    print("waiting", flush=True)
    time.sleep(100)
def meet(processes):
    # Returns when so many processes of this start have come here, so have printed their lines.
    sys.stdout.flush()
    folder = Path(__file__).parents[1]
    (folder / f"{restart}-{me}").touch()
    while len(list(folder.glob(f"{restart}-*"))) < processes:
        time.sleep(0.02)
"""


def command(*options: str, script: Path | None = None, words: tuple[str, ...] = ()) -> list[str]:
    run = words or ("python", str(script))
    return [sys.executable, "-m", "zerojax", "launch", "--grace", "0.3", *options, "--", *run]


def environment(**variables: str) -> dict[str, str]:
    secret = {"ZEROJAX_LAUNCH_TOKEN": "a secret of these tests"}  # in place of a file at home
    return {**os.environ, "PYTHONPATH": str(ROOT), **secret, **variables}


def launch(tmp_path: Path, script: str, *options: str, processes: int = 2):
    """What `zerojax launch` says and returns for a script that begins with SCRIPT."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + script, encoding="utf-8")
    return subprocess.run(
        command("--nprocs", str(processes), *options, script=file),
        cwd=tmp_path.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@contextlib.contextmanager
def launched(*commands: list[str], **variables: str) -> Iterator[list[subprocess.Popen]]:
    """Launchers that run beside the test; killed, with their processes, when the block is left."""
    started = [
        subprocess.Popen(
            words,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def is_running(pid: int) -> bool:
    """Whether a process is there and more than a name in the table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class TestFirstFailure:
    def test_the_earliest(self):
        ends = [End(0, 1, 12.0), End(2, 3, 11.0), End(1, 0, 10.0)]
        assert first_failure(ends) == ends[1]

    def test_nobody(self):
        assert first_failure([End(0, 0, 1.0), End(1, 75, 2.0)]) is None

    def test_a_kill_that_is_seen_a_moment_after_what_followed_from_it(self):
        assert first_failure([End(0, 1, 10.0), End(1, -9, 10.1)]).process_id == 1

    def test_aborts_follow_the_end_of_process_0(self):
        assert first_failure([End(1, -6, 10.0), End(0, 1, 10.1)]).process_id == 0
        assert first_failure([End(1, -6, 10.0), End(0, 1, 20.0)]).process_id == 1

    def test_those_that_were_killed_for_it_did_not_fail(self):
        assert first_failure([End(1, -9, 10.0, was_killed=True), End(0, 4, 10.3)]).process_id == 0

    @pytest.mark.parametrize(
        ("code", "shell", "again", "words"),
        [
            (1, 1, True, "exit code 1"),
            (2, 2, False, "exit code 2: invalid input"),
            (75, 75, False, "exit code 75"),
            (79, 79, True, "exit code 79: it made no progress"),
            (130, 130, False, "exit code 130: it was interrupted"),
            (-9, 137, True, "SIGKILL"),
            (-11, 139, True, "SIGSEGV"),
            (-64, 192, True, "SIGRTMAX"),
            (-100, 228, True, "signal 100"),
        ],
    )
    def test_codes(self, code, shell, again, words):
        assert describe(code).startswith(words)
        assert (exit_code(code), may_restart(code)) == (shell, again)


class TestOutput:
    def test_gloo_is_left_out_and_the_runtime_is_one_line(self):
        lines = [
            b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks",
            b"[Gloo] Rank [Gloo] Rank 2 is connected to 3 peer ranks. "
            b"Expected number of connected peer ranks is : 3",
            b"3 is connected to 3 peer ranks. Expected number of connected peer ranks is : 33",
            b"",
            b"step 1",
            b"",
            b"W1121 22:47:31.457010   24839 preemption_notifier.cc:90] SIGTERM caught at 2026-11",
            b"W1121 21:59:11.224708   16617 preemption_sync_manager.cc:147] Failed to retrieve",
            b"Additional GRPC error information from remote target coordination_service while",
            b":UNKNOWN:Error received from peer  {grpc_status:14}",
            b"F1121 21:59:11.225034   16617 client.h:80] Terminating process because",
            b"",
            b"RPC: /xla.coordination.CoordinationService/RegisterTask",
            b"*** Check failure stack trace: ***",
            b"    @     0x7f2b3d840634  absl::log_internal::LogMessage::SendToLog()",
            b"the process's own last words",
            b"    @ its own",
        ]
        kept = list(without_noise(iter(lines)))
        assert kept == [b"step 1", b"", RUNTIME_SUMMARY, *lines[-2:]]

    def test_other_warnings_stay(self):
        lines = [
            b"E1121 21:59:11.2   1 gpu_device.cc:80] CUDA_ERROR_INVALID_DEVICE",
            b"[Gloo] x",
            b"[Gloo] Rank 0 is connected to 1 peer ranks. Connection refused",
        ]
        assert list(without_noise(iter(lines))) == lines


class TestJob:
    @pytest.mark.parametrize(
        ("words", "started"),
        [
            (("zerojax", "train", "a.yaml"), ["-m", "zerojax", "train", "a.yaml"]),
            (("/some/bin/zerojax", "eval", "runs/a"), ["-m", "zerojax", "eval", "runs/a"]),
            (("a/train.py", "--x"), ["a/train.py", "--x"]),
            (("python", "train.py", "--x"), ["train.py", "--x"]),
            (("bash", "run.sh"), ["--exec", "bash", "run.sh"]),
        ],
    )
    def test_what_is_started(self, words, started):
        line = command_line(Job(command=words, num_processes=2), launcher=7)
        boot = [sys.executable, "-m", "zerojax.runtime.launch.boot", "--launcher=7"]
        assert line == [*boot, *started]

    @pytest.mark.parametrize("script", [("train.py", "-m"), ("-m", "package.train", "-u")])
    def test_the_python_that_the_command_names_with_its_options(self, script):
        words = ("python3.12", "-u", "-X", "dev", *script)
        line = command_line(Job(command=words, num_processes=2), launcher=7)
        boot = ["-m", "zerojax.runtime.launch.boot", "--launcher=7"]
        assert line == ["python3.12", "-u", "-X", "dev", *boot, *script]

    def test_cpu_devices_are_those_of_a_training(self):
        job = Job(command=("zerojax", "train", "a.yaml"), num_processes=2, cpu_devices=3)
        assert command_line(job)[-3:] == ["train", "a.yaml", "cpu_devices=3"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("raise ValueError('bad luck')", 1, "with exit code 1."),
        ("sys.exit(3)", 3, "with exit code 3."),
        ("sys.exit('a sentence')", 1, "with exit code 1."),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "with SIGKILL"),
    ],
    ids=["exception", "sys_exit", "sentence", "kill_9"],
)
def test_the_first_that_fails_is_named_and_the_others_are_ended(fault, code, words, tmp_path):
    began = time.monotonic()
    result = launch(tmp_path, f"if me == 1:\n    {fault}\nwait()", processes=3)
    assert time.monotonic() - began < LIMIT / 2, "the others sleep for 100 seconds"
    assert result.returncode == code
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("zerojax launch")]
    assert sentence.startswith(f"zerojax launch: rank 1 failed first, {words}")
    assert sentence.endswith("The other 2 processes were ended.")
    if "ValueError" in fault:
        assert "[1] ValueError: bad luck" in result.stderr
        assert "script.py" in result.stderr
        assert "runpy" not in result.stderr
    if "sentence" in fault:
        assert "[1] a sentence" in result.stderr


@pytest.mark.thorough
def test_every_line_stands_behind_its_process(tmp_path):
    script = "print('one'); print('two', file=sys.stderr); sys.stdout.write('no newline')"
    result = launch(tmp_path, script, processes=11)
    assert result.returncode == 0, result.stderr
    lines = [f"[{i:2}] {text}" for i in range(11) for text in ("no newline", "one")]
    assert sorted(result.stdout.splitlines()) == lines
    assert sorted(result.stderr.splitlines()) == [f"[{i:2}] two" for i in range(11)]


@pytest.mark.thorough
def test_what_processes_are_told(tmp_path, monkeypatch):
    script = (
        "names = ['NUM_PROCESSES', 'LOCAL_PROCESS_ID', 'NUM_LOCAL_PROCESSES', 'COORDINATOR']\n"
        "print(*(os.environ['ZEROJAX_' + name] for name in names), os.environ['JAX_PLATFORMS'],\n"
        "      os.environ['JAX_NUM_CPU_DEVICES'], sys.argv[1:], os.getcwd() in sys.path,\n"
        "      os.path.dirname(__file__) == sys.path[0], __name__,\n"
        "      'JAX_LOCAL_DEVICE_IDS' in os.environ)"
    )
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")  # of all alike it cannot be true
    result = launch(tmp_path, script, "--cpu-devices", "3")
    for process, line in enumerate(sorted(result.stdout.splitlines())):
        words = line.split()
        assert words[:4] == [f"[{process}]", "2", str(process), "2"], result.stderr
        assert words[4].startswith("127.0.0.1:")
        assert words[5:] == ["cpu", "3", "[]", "False", "True", "__main__", "False"]


@pytest.mark.thorough
def test_all_are_started_again_on_another_port(tmp_path):
    script = (
        "print(restart, os.environ['ZEROJAX_COORDINATOR'])\n"
        "if me == 1 and restart < 2: sys.exit(79)\n"
        "if restart < 2: wait()"
    )
    result = launch(tmp_path, script, "--max-restarts", "2")
    assert result.returncode == 0, result.stderr
    assert "exit code 79: it made no progress, and its watchdog ended it." in result.stderr
    assert "Restart 2 of 2, from the last good checkpoint." in result.stderr
    seen = {tuple(line.split()[1:]) for line in result.stdout.splitlines() if ":" in line}
    assert [restart for restart, _ in sorted(seen)] == ["0", "1", "2"]
    assert len({port for _, port in seen}) == 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "reason"), [(2, "No restart: "), (1, "All 1 restarts are used up.")]
)
def test_failures_that_stay(code, reason, tmp_path):
    result = launch(tmp_path, f"if me == 0: sys.exit({code})\nwait()", "--max-restarts", "1")
    assert result.returncode == code
    assert reason in result.stderr.splitlines()[-1]


def test_saved_and_stopped_is_no_failure(tmp_path):
    result = launch(tmp_path, "sys.exit(75)", "--max-restarts", "1")
    assert (result.returncode, result.stderr) == (75, "")


FORWARDED = """
def save(number, frame):
    print("saves for", signal.Signals(number).name, flush=True)
    time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
wait()
"""


def start_waiting(process: subprocess.Popen, number: int) -> None:
    seen = 0
    while seen < number:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        seen += "waiting" in line


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_reaches_every_process_once(number, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + FORWARDED, encoding="utf-8")
    with launched(command("--nprocs", "2", "--max-restarts", "3", script=file)) as (process,):
        start_waiting(process, 2)
        process.send_signal(number)
        output, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, error
    assert sorted(output.splitlines()) == [f"[{i}] saves for {number.name}" for i in range(2)]


@pytest.mark.thorough
def test_a_third_signal_kills(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + "signal.signal(2, signal.SIG_IGN)\nwait()", encoding="utf-8")
    with launched(command("--nprocs", "2", script=file)) as (process,):
        start_waiting(process, 2)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 137
    assert "SIGINT received again" in error
    assert error.endswith("the processes were killed before they saved.\n")


def test_a_log_that_takes_nothing_more_stops_no_process(tmp_path):
    """More than a pipe holds is printed: a process that nobody reads would stand still."""
    file = tmp_path / "script.py"
    file.write_text("for _ in range(3000): print('x' * 59)", encoding="utf-8")
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command("--nprocs", "1", script=file),
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    assert (result.returncode, result.stderr) == (
        0,
        "zerojax launch: standard output cannot be written (No space left on device); the run "
        "continues without it\n",
    )


@pytest.mark.thorough
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + "print('pid', os.getpid(), flush=True)\nwait()", encoding="utf-8")
    with launched(command("--nprocs", "2", script=file)) as (process,):
        pids = []
        while len(pids) < 2:
            words = process.stdout.readline().split()
            if words[1] == "pid":
                pids.append(int(words[2]))
        process.kill()
        process.wait()
        assert wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.thorough
def test_what_a_process_has_started_ends_with_it(tmp_path):
    script = (
        "import subprocess\n"
        "helper = subprocess.Popen(['sleep', '100'])\n"
        "print('pid', helper.pid, flush=True)\n"
        "meet(2)\n"
        "if me == 0: sys.exit(4)\nwait()"
    )
    result = launch(tmp_path, script)
    assert result.returncode == 4
    pids = [int(line.split()[2]) for line in result.stdout.splitlines() if "pid" in line]
    assert len(pids) == 2
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.thorough
def test_another_program_than_python():
    words = ("bash", "-c", "echo $ZEROJAX_PROCESS_ID; exit 4")
    result = subprocess.run(
        command("--nprocs", "1", words=words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (result.returncode, result.stdout) == (4, "[0] 0\n")
    assert result.stderr == "zerojax launch: rank 0 failed first, with exit code 4.\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no_such_program_at_all",), "no_such_program_at_all: No such file"),
        (("python", "no_such.py"), "the script 'no_such.py' does not exist"),
    ],
)
def test_wrong_input_is_one_sentence(words, message):
    """Both start processes, of which the first that fails ends the other."""
    result = subprocess.run(
        command("--nprocs", "2", words=words),
        env=environment(JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.thorough
class TestTwoHosts:
    """Two launchers that meet on the loopback interface, as those of two hosts would."""

    @pytest.fixture
    def start(self, tmp_path):
        def commands(script: str, *options: str, counts: tuple[str, str] = ("2", "2")):
            file = tmp_path / "script.py"
            file.write_text(SCRIPT + script, encoding="utf-8")
            address = f"127.0.0.1:{free_port()}"
            return launched(
                *(
                    command(
                        *("--nprocs", counts[host], "--nnodes", "2", "--node-rank", str(host)),
                        *("--coordinator", address, *options),
                        script=file,
                    )
                    for host in range(2)
                ),
                ZEROJAX_JOIN_SECONDS="30",
            )

        return commands

    def test_the_first_failure_ends_both_and_both_start_again(self, start):
        script = (
            "print('process', me, restart, os.environ['ZEROJAX_COORDINATOR'])\n"
            "meet(4)\n"
            "if me == 3 and restart == 0: sys.exit(5)\n"
            "if restart == 0: wait()"
        )
        with start(script, "--max-restarts", "1") as launchers:
            results = [launcher.communicate(timeout=LIMIT) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], results
        assert "rank 3 on host 1 failed first, with exit code 5." in results[0][1]
        assert "Restart 1 of 1" in results[0][1]
        assert results[1][1] == "", "host 0 says it"
        for host, (output, _) in enumerate(results):
            for restart in "01":
                ids = [w[2] for w in map(str.split, output.splitlines()) if w[3:4] == [restart]]
                assert sorted(ids) == [str(2 * host), str(2 * host + 1)]

    def test_a_launcher_that_is_lost_ends_the_run(self, start):
        with start("wait()", "--max-restarts", "1") as launchers:
            for launcher in launchers:
                start_waiting(launcher, 2)
            launchers[1].kill()
            _, error = launchers[0].communicate(timeout=LIMIT)
        assert launchers[0].returncode == 1
        assert "the launcher of host 1 was lost first; all processes ended. No restart" in error

    def test_host_0_is_lost(self, start):
        with start("wait()") as launchers:
            for launcher in launchers:
                start_waiting(launcher, 2)
            launchers[0].kill()
            _, error = launchers[1].communicate(timeout=LIMIT)
        assert launchers[1].returncode == 1
        assert "the launcher of host 0 is lost; the processes here are ended" in error

    def test_a_stop_on_one_host_is_told_to_the_processes_there(self, start):
        with start(FORWARDED) as launchers:
            for launcher in launchers:
                start_waiting(launcher, 2)
            launchers[0].send_signal(signal.SIGTERM)
            launchers[1].send_signal(signal.SIGTERM)
            results = [launcher.communicate(timeout=LIMIT) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [75, 75], results

    def test_launchers_that_were_told_different_things(self, start):
        with start("wait()", counts=("2", "3")) as launchers:
            errors = [launcher.communicate(timeout=LIMIT)[1] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [2, 2]
        for error in errors:
            assert re.search("host 1 .* --nprocs 3.* host 0 .* --nprocs 2", error)

    def test_host_0_listens_on_the_given_address_only(self, tmp_path):
        address = f"127.0.0.1:{free_port()}"
        options = ["--nprocs", "1", "--nnodes", "2", "--coordinator", address]
        with launched(command(*options, words=("zerojax", "keys"))) as (launcher,):
            assert wait_until(lambda: listening({launcher.pid}))
            (found,) = listening({launcher.pid})
            assert found == (LOOPBACK, int(address.partition(":")[2]))

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
    def test_a_signal_ends_one_that_waits_for_the_other(self, number, code):
        options = ["--nprocs", "1", "--nnodes", "2", "--coordinator", f"127.0.0.1:{free_port()}"]
        with launched(command(*options, words=("zerojax", "keys"))) as (launcher,):
            assert wait_until(lambda: listening({launcher.pid}))
            launcher.send_signal(number)
            launcher.communicate(timeout=LIMIT)
        assert launcher.returncode == code

    def test_a_host_that_does_not_come(self):
        address = f"127.0.0.1:{free_port()}"
        for host, words in (("0", "no launcher of host 1"), ("1", "was not reached at")):
            options = ["--nprocs", "1", "--nnodes", "2", "--node-rank", host]
            result = subprocess.run(
                command(*options, "--coordinator", address, words=("zerojax", "keys")),
                env=environment(ZEROJAX_JOIN_SECONDS="1"),
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            assert result.returncode == 1
            assert words in result.stderr


def test_the_launcher_does_without_jax():
    """A process of the launcher holds no device and starts in a tenth of a second."""
    modules = "zerojax.cli.launch_command, zerojax.runtime.launch, zerojax.runtime.launch.boot, "
    modules += "zerojax.runtime.shutdown, zerojax.runtime.schedulers"
    program = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment(), timeout=LIMIT)
