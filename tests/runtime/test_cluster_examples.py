"""What lies in examples/cluster works as far as a machine without a cluster can tell."""

from __future__ import annotations

import os
import py_compile
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.processes.test_processes import CONFIG, LIMIT, losses_of, train
from tests.support.trajectories import TOLERANCE
from zerojax.cli import build_parser
from zerojax.cli.arguments import split_words
from zerojax.config import RunConfig, load
from zerojax.runtime.process_group import local_device_ids
from zerojax.runtime.schedulers import process_group_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "cluster"
SBATCH = sorted(FOLDER.glob("*.sbatch"))
MANIFESTS = sorted(FOLDER.glob("*.yaml"))

SRUN = f"""#!{sys.executable}
'''Starts as many local processes as the batch script asks for tasks, with Slurm's variables.'''
import os, re, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
hosts = os.environ["FAKE_HOSTS"].split(",")
per_host = int(os.environ["FAKE_TASKS_PER_HOST"])
total = per_host * len(hosts)
step = {{
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": ",".join(hosts), "SLURM_NTASKS": str(total),
    "SLURM_STEP_NUM_TASKS": str(total),
    "SLURM_STEP_TASKS_PER_NODE": f"{{per_host}}(x{{len(hosts)}})",
}}
tasks = []
for task in range(total):
    numbers = {{
        "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % per_host),
        "SLURM_NODEID": str(task // per_host),
    }}
    tasks.append(subprocess.Popen(words, env={{**os.environ, **step, **numbers}}))
# What slurmstepd does before the time is up.
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
open("srun.pid", "w").write(str(os.getpid()))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder with stand-ins for srun, scontrol and zerojax, and how a batch script runs there."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def program(name: str, text: str) -> None:
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(stat.S_IRWXU)

    program("srun", SRUN)
    program("scontrol", '#!/bin/bash\necho "$@" >> requeued\n')
    program("zerojax", f'#!/bin/bash\nexec {sys.executable} -m zerojax "$@"\n')

    def run(script: Path, *words: str, task: str | None = None, **variables: str):
        if task is not None:
            program("zerojax", f"#!/bin/bash\n{task}\n")
        environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "4242",
            "FAKE_HOSTS": "localhost",
            "FAKE_TASKS_PER_HOST": "2",
            **variables,
        }
        return subprocess.run(
            ["bash", str(script), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    return run


def directives(script: Path) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE)
    return dict(found)


def check_training(words: list[str]) -> RunConfig:
    """What zerojax itself says about these words."""
    args = build_parser().parse_args(words)
    path, overrides = split_words(args.config, args.overrides)
    return load(RunConfig, ROOT / path if path else None, overrides)


def test_every_file_is_in_the_list():
    text = (FOLDER / "README.md").read_text()
    names = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"README.md"}
    assert set(re.findall(r"\]\((\S+)\)", text)) == names


@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.stem)
class TestSlurm:
    def test_bash_can_read_it(self, script):
        subprocess.run(["bash", "-n", str(script)], check=True)

    def test_what_it_asks_for(self, script):
        asked = directives(script)
        per_node = {"slurm_task_per_gpu": "8", "slurm_task_per_node": "1"}[script.stem]
        assert (asked["nodes"], asked["ntasks-per-node"], asked["gres"]) == ("2", per_node, "gpu:8")
        assert "gpus-per-task" not in asked, "ranks would have to know that they see one GPU"
        # SIGTERM to the tasks, not to the batch shell (B:), with time to save.
        assert re.fullmatch(r"TERM@\d+", asked["signal"])
        assert "requeue" in asked

    def test_the_gpus_of_its_tasks(self, script):
        per_node = int(directives(script)["ntasks-per-node"])
        taken = []
        for task in range(2 * per_node):
            group = process_group_of(
                {
                    "SLURM_JOB_ID": "1",
                    "SLURM_STEP_NODELIST": "n[1-2]",
                    "SLURM_STEP_NUM_TASKS": str(2 * per_node),
                    "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x2)",
                    "SLURM_PROCID": str(task),
                    "SLURM_LOCALID": str(task % per_node),
                    "SLURM_NODEID": str(task // per_node),
                }
            )
            taken += local_device_ids(group, 8)
        assert sorted(taken) == sorted([*range(8), *range(8)])

    def test_its_example_is_a_training(self, script):
        example = re.search(r"^#   sbatch (\S+) (.*)$", script.read_text(), re.MULTILINE)
        assert ROOT / example[1] == script
        check_training(["train", *example[2].split()])

    @pytest.mark.parametrize(
        ("code", "restarts", "requeued"),
        [(0, 0, False), (75, 0, True), (2, 0, False), (1, 0, True), (137, 0, True), (1, 50, False)],
    )
    def test_what_goes_back_into_the_queue(
        self, script, code, restarts, requeued, cluster, tmp_path
    ):
        task = f"echo task $SLURM_PROCID of $SLURM_NTASKS: $@; exit {code}"
        count = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        result = cluster(script, "my.yaml", "zero=3", task=task, **count)
        assert result.returncode == code, result.stderr
        for number in range(2):
            assert f"task {number} of 2: train my.yaml zero=3\n" in result.stdout
        file = tmp_path / "requeued"
        assert (file.read_text() == "requeue 4242\n") if requeued else not file.exists()
        assert ("are used up" in result.stderr) == (restarts > 0)


WORDS = ("tiny.yaml", "run_dir=run", "cpu_devices=2", "steps=3")


@pytest.mark.multihost
@pytest.mark.slow
@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.stem)
def test_a_batch_script_trains(script, cluster, tmp_path):
    """Two real processes, found by Slurm's variables alone."""
    (tmp_path / "tiny.yaml").write_text(CONFIG, encoding="utf-8")
    variables = {}
    if script.stem == "slurm_task_per_node":
        # Two names of this machine for two hosts; that nobody else reaches them is no mistake here.
        address = f"127.0.0.1:{61440 + 4242 % 4096}"
        variables = {
            "FAKE_HOSTS": "localhost,127.0.0.1",
            "FAKE_TASKS_PER_HOST": "1",
            "JAX_COORDINATOR_BIND_ADDRESS": address,
        }
    result = cluster(script, *WORDS, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 processes (Slurm) at " in result.stderr
    assert "rank 1/2 on " in result.stderr
    losses, expected = losses_of(tmp_path / "run"), train(tmp_path, "one", "steps=3")
    assert len(losses) == 3
    np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.multihost
@pytest.mark.slow
def test_a_job_whose_time_is_up_goes_on_in_the_queue(cluster, tmp_path):
    """SIGTERM to both tasks, as before the time limit: saved, 75, requeued, resumed."""
    (tmp_path / "tiny.yaml").write_text(CONFIG, encoding="utf-8")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def end_of_time() -> None:
        until = time.monotonic() + LIMIT
        while not metrics.exists() or metrics.read_text().count('"train"') < 3:
            if time.monotonic() > until:
                return
            time.sleep(0.1)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)

    scheduler = threading.Thread(target=end_of_time, daemon=True)
    scheduler.start()
    result = cluster(SBATCH[0], *WORDS[:3], "steps=100000")
    scheduler.join()
    assert result.returncode == 75, result.stdout + result.stderr
    assert (tmp_path / "requeued").read_text() == "requeue 4242\n"
    steps = len(losses_of(tmp_path / "run"))
    assert steps >= 3
    result = cluster(SBATCH[0], *WORDS[:3], f"steps={steps + 2}", SLURM_RESTART_COUNT="1")
    assert result.returncode == 0, result.stdout + result.stderr
    losses, expected = losses_of(tmp_path / "run"), train(tmp_path, "one", f"steps={steps + 2}")
    np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE)


def pods(path: Path) -> tuple[dict, dict]:
    """The Job of a manifest and its pod template."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    last = documents[-1]
    if last["kind"] == "JobSet":
        (only,) = last["spec"]["replicatedJobs"]
        assert only["replicas"] == 1
        return only["template"]["spec"], only["template"]["spec"]["template"]
    return last["spec"], last["spec"]["template"]


def environment_of(path: Path, index: int) -> dict[str, str]:
    """What a container of pod `index` finds in its environment."""
    name = "zerojax"
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": "workers",
    }
    (container,) = pods(path)[1]["spec"]["containers"]
    environment = {"JOB_COMPLETION_INDEX": str(index)}
    for entry in container["env"]:
        if "value" in entry:
            assert isinstance(entry["value"], str), "Kubernetes takes nothing else"
            environment[entry["name"]] = entry["value"]
        else:
            field = entry["valueFrom"]["fieldRef"]["fieldPath"]
            environment[entry["name"]] = labels[
                re.fullmatch(r"metadata.labels\['(.*)'\]", field)[1]
            ]
    return environment


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
class TestKubernetes:
    def test_the_pods_find_each_other(self, manifest):
        job, _ = pods(manifest)
        assert job["completionMode"] == "Indexed"
        assert job["completions"] == job["parallelism"] == 2
        for index in range(2):
            group = process_group_of(environment_of(manifest, index))
            assert (group.process_id, group.num_processes) == (index, job["completions"])
            assert local_device_ids(group, 8) == list(range(8))
            expected = {
                "jobset": "zerojax-workers-0-0.zerojax:12355",
                "job": "zerojax-0.zerojax:12355",
            }
            assert group.coordinator == expected[manifest.stem]
            port = int(group.coordinator.partition(":")[2])
            (container,) = pods(manifest)[1]["spec"]["containers"]
            assert container["ports"] == [{"containerPort": port}]

    def test_what_starts_it_again_and_what_does_not(self, manifest):
        job, pod = pods(manifest)
        (rule,) = job["podFailurePolicy"]["rules"]
        (container,) = pod["spec"]["containers"]
        assert rule["action"] == "FailJob"
        assert rule["onExitCodes"] == {
            "containerName": container["name"],
            "operator": "In",
            "values": [2],
        }
        assert pod["spec"]["restartPolicy"] == "Never", "podFailurePolicy allows nothing else"
        assert pod["spec"]["terminationGracePeriodSeconds"] >= 300, "30 seconds are the default"

    def test_its_command_is_a_training(self, manifest):
        (container,) = pods(manifest)[1]["spec"]["containers"]
        assert container["command"][0] == "zerojax"
        config = check_training(container["command"][1:])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert config.run_dir.startswith("/runs/")
        volumes = {volume["name"] for volume in pods(manifest)[1]["spec"]["volumes"]}
        assert {"/runs", "/dev/shm"} == set(mounts)
        assert volumes == set(mounts.values())

    def test_names_agree(self, manifest):
        text = manifest.read_text()
        first, *rest = [document for document in yaml.safe_load_all(text) if document]
        if first["kind"] == "JobSet":
            assert first["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
            assert first["spec"]["network"]["enableDNSHostnames"] is True
            (rule,) = first["spec"]["failurePolicy"]["rules"]
            assert rule["action"] == "FailJobSet"
            assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
            return
        (job,) = rest
        pod = job["spec"]["template"]
        assert (first["kind"], first["spec"]["clusterIP"]) == ("Service", "None")
        assert pod["spec"]["subdomain"] == first["metadata"]["name"]
        assert first["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert first["spec"]["publishNotReadyAddresses"] is True


def test_the_ray_script_compiles_and_its_example_is_a_training(tmp_path):
    script = FOLDER / "ray_train.py"
    py_compile.compile(str(script), cfile=str(tmp_path / "ray.pyc"), doraise=True)
    example = re.search(r"python (\S+) .* -- (.*)$", script.read_text(), re.MULTILINE)
    assert ROOT / example[1] == script
    check_training(["train", *example[2].split()])
