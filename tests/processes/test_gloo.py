"""Sums by permutes in place of reduce-scatters, and 1-bit Adam, through gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.process_groups import run_group
from tests.support.trajectories import TOLERANCE
from zerojax import make_abstract_mesh, make_mesh
from zerojax.placement.device_mesh import DATA, DATA_AXES, communicates_through_gloo
from zerojax.transport import sums
from zerojax.transport.collectives import LeafCollectives, scatter_buckets

ROOT = Path(__file__).resolve().parents[2]

SHAPES = {"first": (16, 3), "last": (3, 16), "padded": (4, 13, 5), "vector": (24,)}
DIMS = {"first": -2, "last": -1, "padded": -2, "vector": -1}


def leaf(name: str, by_permutes: bool) -> LeafCollectives:
    shape, dim = SHAPES[name], DIMS[name]
    return LeafCollectives(
        zero_dim=dim,
        size=shape[dim],
        padded_size=-(-shape[dim] // 8) * 8,
        axes=(None,) * len(shape),
        num_shards=8,
        over=(DATA,),
        compute_dtype="float32",
        reduce_dtype="float32",
        by_permutes=by_permutes,
    )


def run_on_shards(function, values: dict[str, np.ndarray]) -> tuple[dict, str]:
    """Results of `function(this shard's values)`, all shards stacked, and the lowered program."""

    def local(values):
        one = {name: value[0] for name, value in values.items()}
        return {name: result[None] for name, result in function(one).items()}

    mapped = jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(),
            in_specs=P(DATA_AXES),
            out_specs=P(DATA_AXES),
            axis_names=set(DATA_AXES),
            check_vma=False,
        )
    )
    return jax.device_get(mapped(values)), mapped.lower(values).as_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bucket_size", [1, 10**9], ids=["leaf by leaf", "one bucket"])
@pytest.mark.parametrize(("limit", "way"), [(7, "collective_permute"), (6, "all_to_all")])
def test_sums_by_permutes_give_what_a_reduce_scatter_gives(limit, way, bucket_size, monkeypatch):
    monkeypatch.setattr(sums, "MAX_PERMUTES", limit)
    values = {
        name: np.random.default_rng(0).integers(-99, 99, (8, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()  # whole numbers: every order of sums is exact
    }
    results = {}
    for exchanged in (False, True):
        leaves = {name: leaf(name, exchanged) for name in SHAPES}
        results[exchanged], program = run_on_shards(
            lambda wholes, leaves=leaves: scatter_buckets(wholes, leaves, bucket_size), values
        )
        assert (way in program) == exchanged
        assert ("reduce_scatter" in program) != exchanged
    for name in SHAPES:
        assert results[True][name].dtype == jnp.float32
        np.testing.assert_array_equal(results[True][name], results[False][name])
        assert results[True][name].any()


def test_one_process_does_not_need_it():
    assert not communicates_through_gloo(make_mesh())
    assert not communicates_through_gloo(make_abstract_mesh(None, 8))


WORKER = """
import json, sys
import jax, numpy as np, optax
import zerojax
from benchmarks import small_gpt
from zerojax.runtime.distributed import ProcessGroup, join_processes

port, index, zero = map(int, sys.argv[1:])
group = ProcessGroup(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=index)
join_processes(group)
source = small_gpt.make_source(small_gpt.SMOKE)
plan = zerojax.make_plan(
    small_gpt.make_factory(small_gpt.SMOKE), zerojax.make_mesh(), example_batch=source.batch(0),
    optimizer=optax.sgd(0.1), zero=zero, precision="fp32", persistence_threshold=1,
)
step = zerojax.build_step(plan)
program = step.lower(plan.abstract_state, plan.abstract_batch).as_text()
print("found", json.dumps([name in program for name in ("reduce_scatter", "collective_permute")]))
"""


@pytest.mark.thorough
@pytest.mark.multihost
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_reduce_scatter_goes_through_gloo(zero):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(port), str(index), str(zero)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("found")] or [output]
        assert json.loads(line.removeprefix("found ")) == [False, True], output


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("zero", [0, 1])
def test_one_bit_adam_through_gloo_is_that_of_one_process(zero, tmp_path):
    """Four devices of one process, or of two: warm-up and steps whose momentum is sent as signs."""
    words = ["-m", "tests.features.one_bit.one_bit_process"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    run_group([[*words, str(alone), "4", str(zero)]], folder=ROOT)
    run_group([[*words, str(together), "2", str(zero)]] * 2, folder=ROOT, join=True)
    one = json.loads((alone / "process_0.json").read_text())
    assert one["losses"][4] - one["losses"][-4] > 0.1
    for process in range(2):
        found = json.loads((together / f"process_{process}.json").read_text())
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=0, atol=TOLERANCE)
        for name, values in one["params"].items():
            np.testing.assert_allclose(found["params"][name], values, atol=TOLERANCE, err_msg=name)
