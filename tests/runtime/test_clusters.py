"""Groups of processes are read right from the variables of every launcher, and GPUs dealt out."""

from __future__ import annotations

import pytest

from zerojax.runtime.process_group import ProcessGroup, local_device_ids, visible_gpus
from zerojax.runtime.schedulers import expand_counts, expand_hosts, process_group_of

OWN = {
    "ZEROJAX_COORDINATOR": "10.0.0.1:12355",
    "ZEROJAX_NUM_PROCESSES": "4",
    "ZEROJAX_PROCESS_ID": "3",
}


def slurm(process: int, *, per_node: int, nodes: str = "n[01-02]", **more: str) -> dict[str, str]:
    """Variables of one task under `srun --ntasks-per-node=PER_NODE` on two nodes."""
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(2 * per_node),
        "SLURM_STEP_NUM_TASKS": str(2 * per_node),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x2)",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process % per_node),
        "SLURM_NODEID": str(process // per_node),
        **more,
    }


def torchrun(process: int, *, per_node: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(2 * per_node),
        "RANK": str(process),
        "LOCAL_RANK": str(process % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
    }


def open_mpi(process: int, *, per_node: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(2 * per_node),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process % per_node),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
        **more,
    }


MPI_4 = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
# As mpirun 5.0.11 sets them.
MPI_5 = {
    "PMIX_NAMESPACE": "prterun-head-node-2711@1",
    "PMIX_RANK": "3",
    "PMIX_SERVER_URI41": "prterun-head-node-2711@0.0;tcp4://127.0.0.1:41013",
}


def found(environment: dict[str, str]) -> ProcessGroup:
    group = process_group_of(environment)
    assert group is not None
    return group


@pytest.mark.parametrize(
    ("launcher", "coordinator"),
    [
        (slurm, f"n01:{61440 + 4242 % 4096}"),
        (torchrun, "n1:29500"),
        (lambda p, per_node: open_mpi(p, per_node=per_node, **MPI_4), "10.96.0.1:62624"),
        (lambda p, per_node: open_mpi(p, per_node=per_node, **MPI_5), "head-node:64151"),
    ],
    ids=["slurm", "torchrun", "open_mpi_4", "open_mpi_5"],
)
class TestTwoHostsOfEightGpus:
    def test_one_process_per_gpu(self, launcher, coordinator):
        for process in range(16):
            group = found(launcher(process, per_node=8))
            assert group.coordinator == coordinator
            assert (group.process_id, group.num_processes) == (process, 16)
            assert (group.local_process_id, group.num_local_processes) == (process % 8, 8)
            assert local_device_ids(group, 8) == [process % 8]

    def test_one_process_per_host(self, launcher, coordinator):
        for process in range(2):
            group = found(launcher(process, per_node=1))
            assert (group.process_id, group.num_processes) == (process, 2)
            assert group.coordinator == coordinator
            assert local_device_ids(group, 8) == list(range(8))

    def test_tasks_that_see_one_gpu_each_take_it(self, launcher, coordinator):
        """With [LOCALID], JAX's default, all but the first fail: CUDA_ERROR_INVALID_DEVICE."""
        for process in range(16):
            assert local_device_ids(found(launcher(process, per_node=8)), 1) == [0]

    def test_two_processes_share_the_gpus_of_a_host(self, launcher, coordinator):
        ids = [local_device_ids(found(launcher(process, per_node=2)), 8) for process in range(4)]
        assert ids == 2 * [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_without_gpus_jax_decides(self, launcher, coordinator):
        assert local_device_ids(found(launcher(1, per_node=8)), 0) is None

    def test_gpus_that_cannot_be_shared_evenly_are_refused(self, launcher, coordinator):
        with pytest.raises(ValueError, match="8 processes .* 6 visible GPUs evenly; start 1, 2, 3"):
            local_device_ids(found(launcher(1, per_node=8)), 6)

    def test_another_coordinator_can_be_named(self, launcher, coordinator):
        environment = {**launcher(3, per_node=8), "ZEROJAX_COORDINATOR": "10.1.1.1:77"}
        assert found(environment).coordinator == "10.1.1.1:77"
        assert found(environment).process_id == 3

    def test_another_port_can_be_named(self, launcher, coordinator):
        environment = {**launcher(3, per_node=8), "ZEROJAX_COORDINATOR_PORT": "77"}
        assert found(environment).coordinator == coordinator.partition(":")[0] + ":77"


class TestOwnVariables:
    def test_they_say_all(self):
        assert found(OWN) == ProcessGroup(
            coordinator="10.0.0.1:12355", num_processes=4, process_id=3
        )

    def test_they_come_first(self):
        environment = {**slurm(1, per_node=8), **torchrun(1, per_node=4), **OWN}
        assert found(environment).num_processes == 4

    @pytest.mark.parametrize("left_out", [*OWN])
    def test_a_part_of_them_is_refused(self, left_out):
        environment = {name: value for name, value in OWN.items() if name != left_out}
        with pytest.raises(ValueError, match=f"{left_out} is not set"):
            process_group_of(environment)

    def test_one_process_is_no_group_whatever_else_is_set(self):
        assert process_group_of({**slurm(1, per_node=8), "ZEROJAX_NUM_PROCESSES": "1"}) is None
        assert process_group_of({**OWN, "ZEROJAX_NUM_PROCESSES": "1"}) is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"ZEROJAX_COORDINATOR": "h:port"}, "'port' is not a port"),
            ({"ZEROJAX_NUM_PROCESSES": "four"}, "ZEROJAX_NUM_PROCESSES='four'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            process_group_of({**OWN, **change})

    def test_without_local_numbers_jax_decides_about_gpus(self):
        assert local_device_ids(found(OWN), 8) is None

    def test_local_numbers_decide_about_gpus(self):
        local = {"ZEROJAX_LOCAL_PROCESS_ID": "1", "ZEROJAX_NUM_LOCAL_PROCESSES": "2"}
        assert local_device_ids(found({**OWN, **local}), 4) == [2, 3]

    def test_nothing_set_is_one_process(self):
        assert process_group_of({}) is None


class TestSlurm:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("n1", ["n1"]),
            ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
            ("gpu-a,gpu-b", ["gpu-a", "gpu-b"]),
            ("rack1-n[8-11],login", ["rack1-n8", "rack1-n9", "rack1-n10", "rack1-n11", "login"]),
            ("r[1-2]n[1-2].example", [f"r{r}n{n}.example" for r in (1, 2) for n in (1, 2)]),
            ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ],
    )
    def test_lists_of_hosts(self, text, hosts):
        assert list(expand_hosts(text)) == hosts

    @pytest.mark.parametrize("text", ["n[1-x]", "n[]"])
    def test_what_is_no_list_of_hosts_is_refused(self, text):
        with pytest.raises(ValueError, match="is not a list of hosts"):
            list(expand_hosts(text))

    def test_lists_of_counts(self):
        assert expand_counts("8(x2),4", "X") == [8, 8, 4]
        with pytest.raises(ValueError, match="X='8x2'"):
            expand_counts("8x2", "X")

    def test_nodes_with_unequal_numbers_of_tasks(self):
        environment = slurm(4, per_node=3) | {
            "SLURM_STEP_TASKS_PER_NODE": "4,2",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
        }
        group = found(environment)
        assert group.num_local_processes == 2
        assert local_device_ids(group, 2) == [0]

    def test_counts_of_the_allocation_are_not_those_of_the_step(self):
        """`srun -n 2 -N 2` inside `salloc -N 2 --ntasks-per-node=8`."""
        environment = slurm(1, per_node=1) | {"SLURM_TASKS_PER_NODE": "8(x2)"}
        del environment["SLURM_STEP_TASKS_PER_NODE"]
        assert local_device_ids(found(environment), 8) == list(range(8))

    def test_one_host_needs_no_address_that_others_reach(self):
        environment = slurm(1, per_node=1, nodes="n7") | {"SLURM_STEP_TASKS_PER_NODE": "2"}
        group = found(environment)
        assert group.coordinator.startswith("127.0.0.1:")
        assert group.is_on_one_host

    def test_gpus_per_task_gives_each_task_its_own(self):
        environment = slurm(1, per_node=2, SLURM_GPUS_PER_TASK="gpu:h200:4")
        assert local_device_ids(found(environment), 4) == [0, 1, 2, 3]
        # Not bound to the tasks: each of the two sees all eight.
        assert local_device_ids(found(environment), 8) == [4, 5, 6, 7]

    def test_two_steps_of_a_job_use_two_ports(self):
        ports = {found(slurm(0, per_node=8, SLURM_STEP_ID=step)).coordinator for step in "01"}
        assert len(ports) == 2

    @pytest.mark.parametrize(
        "change",
        [
            {"SLURM_STEP_NODELIST": ""},  # the batch script, or a shell of `salloc`
            {"SLURM_PROCID": ""},
            {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # the interactive step of `salloc`
            {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # the batch step
            {"SLURM_STEP_NUM_TASKS": "1"},  # `srun --pty bash` in an allocation of 16 tasks
            {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "1"},
            {"SLURM_JOB_ID": ""},
        ],
    )
    def test_outside_a_step_of_several_tasks_a_process_is_alone(self, change):
        assert process_group_of(slurm(0, per_node=8, **change)) is None

    def test_the_older_names_suffice(self):
        environment = slurm(9, per_node=8)
        for name in [*environment]:
            if name.startswith("SLURM_STEP_") and name != "SLURM_STEP_NODELIST":
                del environment[name]
        group = found({**environment, "SLURM_NTASKS_PER_NODE": "8"})
        assert (group.process_id, group.num_processes) == (9, 16)
        assert local_device_ids(group, 8) == [1]


class TestTorchrun:
    def test_its_agent_has_taken_the_port_itself(self):
        environment = torchrun(1, per_node=2) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert found(environment).coordinator == "n1:29501"

    def test_an_address_alone_says_nothing(self):
        assert process_group_of({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}) is None

    def test_a_group_of_one(self):
        assert process_group_of({"RANK": "0", "WORLD_SIZE": "1"}) is None

    def test_inside_a_step_of_slurm_it_is_the_inner_one(self):
        environment = {**slurm(0, per_node=1), **torchrun(3, per_node=8)}
        assert found(environment).num_processes == 16

    def test_without_local_world_size_one_gpu_each(self):
        environment = torchrun(9, per_node=8)
        del environment["LOCAL_WORLD_SIZE"]
        assert local_device_ids(found(environment), 8) == [1]


class TestOpenMpi:
    def test_an_address_of_version_six_of_the_protocol(self):
        uri = "1314521088.0;tcp6://[2620:10d:c083:150e::3000:2,fe80::1]:43370"
        group = found(open_mpi(1, per_node=2, OMPI_MCA_orte_hnp_uri=uri))
        assert group.coordinator.startswith("[2620:10d:c083:150e::3000:2]:")

    def test_addresses_of_both_versions_as_mpirun_4_1_8_writes_them(self):
        uri = "753926144.0;tcp://192.0.2.2:46841;tcp6://[fd00::2]:36891"
        group = found(open_mpi(1, per_node=2, OMPI_MCA_orte_hnp_uri=uri))
        assert group.coordinator == f"192.0.2.2:{61440 + 753926144 // 4096 % 4096}"

    def test_one_host_needs_nothing_else(self):
        environment = open_mpi(1, per_node=2) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
        assert found(environment).coordinator == "127.0.0.1:61440"

    def test_one_process(self):
        assert process_group_of({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None


POD = {"JOB_COMPLETION_INDEX": "3", "ZEROJAX_NUM_PROCESSES": "4", "HOSTNAME": "train-3"}


class TestKubernetes:
    def test_an_indexed_job_with_a_headless_service(self):
        group = found({**POD, "ZEROJAX_COORDINATOR": "train-0.pods:4000"})
        assert (group.coordinator, group.process_id) == ("train-0.pods:4000", 3)
        assert local_device_ids(group, 8) == list(range(8))

    def test_a_coordinator_without_a_port_as_a_jobset_writes_it(self):
        name = "run-workers-0-0.run"
        assert found({**POD, "ZEROJAX_COORDINATOR": name}).coordinator == f"{name}:12355"

    def test_a_jobset_names_its_pods_itself(self):
        names = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "workers", "JOB_INDEX": "0"}
        assert found({**POD, **names}).coordinator == "run-workers-0-0.run:12355"

    def test_an_array_of_jobs_is_no_group(self):
        assert process_group_of({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "sweep-3"}) is None


class TestVisibleGpus:
    @pytest.fixture
    def devices(self, tmp_path):
        for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "null"):
            (tmp_path / name).touch()
        return tmp_path

    @pytest.mark.parametrize(
        ("environment", "count"),
        [
            ({}, 4),
            ({"CUDA_VISIBLE_DEVICES": "1,3"}, 2),
            ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-46abccde"}, 2),
            ({"CUDA_VISIBLE_DEVICES": ""}, 0),
            ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
            ({"CUDA_VISIBLE_DEVICES": "0,1,9,2"}, 2),
            ({"JAX_PLATFORMS": "cpu"}, 0),
            ({"JAX_PLATFORMS": "cuda,cpu"}, 4),
        ],
    )
    def test_as_cuda_counts_them(self, environment, count, devices):
        assert visible_gpus(environment, devices) == count

    def test_one_that_may_not_be_opened_does_not_count(self, devices):
        (devices / "nvidia3").unlink()
        (devices / "nvidia3").mkdir()  # opening it for writing fails, for root too
        assert visible_gpus({}, devices) == 3

    def test_no_devices(self, tmp_path):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0
