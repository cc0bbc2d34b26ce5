"""Two processes whose layers are in files of their own are one run, also when one of them fails.

Sums of two processes go through gloo, whose order differs from that of one process: losses are
equal up to rounding, `TOLERANCE`. Runs of the same two processes are equal to the bit.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.process_groups import end_group
from tests.support.trajectories import TOLERANCE

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

FILES = {"params": "nvme", "min_elements": 30, "slice_elements": 60}
DURABLE = {**FILES, "durable": True}
IN_BACKWARD = {**DURABLE, "update_in_backward": True}
LIMIT = 900.0
"""Seconds after which a run, which needs about 20, is ended."""


def run(
    folder: Path, steps: int, *, processes: int = 2, **options: Any
) -> tuple[list[int], list[str]]:
    """(exit codes, outputs) of the processes of a run on four devices."""
    folder.mkdir(exist_ok=True)
    words = ["-m", "tests.support.paged_group_process", str(folder), str(4 // processes)]
    words += [str(steps), json.dumps(options)]
    ended = end_group([words] * processes, join=processes > 1, seconds=LIMIT)
    return [code for code, _ in ended], [text for _, text in ended]


def noted(folder: Path, process: int = 0) -> list[tuple[int, float]]:
    """(step, loss) in the order in which they were taken."""
    path = folder / f"losses-{process}"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [line.split() for line in lines if not line.endswith("evaluation")]
    return [(int(step), float.fromhex(loss)) for step, loss in rows]


def evaluated(folder: Path) -> float:
    """The loss of the evaluation at the end."""
    *_, line = (folder / "losses-0").read_text(encoding="utf-8").splitlines()
    return float.fromhex(line.split()[1])


def trained(folder: Path, steps: int, **options: Any) -> list[float]:
    """Losses of a run that ends well, without those of an earlier run in the folder."""
    before = len(noted(folder))
    codes, outputs = run(folder, steps, **options)
    assert not any(codes), "\n".join(outputs)
    return [loss for _, loss in noted(folder)[before:]]


@pytest.mark.parametrize(
    ("zero", "microbatches", "activations"), [(3, 2, "nvme"), (1, 1, "device")]
)
def test_two_processes_train_as_one_without_files(tmp_path, zero, microbatches, activations):
    options = {"zero": zero, "microbatches": microbatches}
    one = trained(tmp_path / "one", 5, processes=1, **options)
    offload = {**FILES, "activations": activations}
    two = trained(tmp_path / "two", 5, offload=offload, **options)
    np.testing.assert_allclose(two, one, rtol=0, atol=TOLERANCE)
    assert one[0] - one[-1] > 0.01
    value, expected = evaluated(tmp_path / "two"), evaluated(tmp_path / "one")
    np.testing.assert_allclose(value, expected, rtol=0, atol=TOLERANCE)
    folders = [path.name for path in sorted((tmp_path / "two" / "store").iterdir())]
    assert folders == ["process_0", "process_1"]
    for name in folders:
        assert (tmp_path / "two" / "store" / name / "weights" / "buckets0.bin").exists()


def test_checkpoints_go_between_processes_and_tiers(tmp_path):
    """Two processes with files, one on the device, one with files, two with weights on the host."""
    whole = trained(tmp_path / "one", 8, processes=1)
    folder = tmp_path / "moved"
    host = {**FILES, "params": "host", "opt_state": "nvme"}
    found = trained(folder, 2, offload=FILES, every=2)
    found += trained(folder, 4, processes=1, every=2)
    found += trained(folder, 6, processes=1, offload=FILES, every=2)
    found += trained(folder, 8, offload=host, every=2)
    np.testing.assert_allclose(found, whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("call", "place", "count", "offload"),
    [
        ("preadv", "process_1/weights/", 3, FILES),
        ("pwritev", "process_1/buckets", 5, FILES),
        ("preadv", "process_1/buckets", 5, IN_BACKWARD),
    ],
    ids=["pass", "sweep", "update in backward"],
)
def test_a_failure_in_one_process_ends_all_with_one_sentence(tmp_path, call, place, count, offload):
    folder = tmp_path / "run"
    fault = {"process": 1, "call": call, "folder": place, "after": 1, "count": count}
    codes, outputs = run(folder, 6, offload=offload, fault=fault)
    assert all(code > 0 for code in codes), outputs
    texts = [(folder / f"error-{process}").read_text(encoding="utf-8") for process in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("process 1: ")
    assert "Input/output error" in texts[0]
    assert "\n" not in texts[0]
    assert noted(folder, 0) == noted(folder, 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[float], list[float]]:
    """Clipping -> losses of two processes that nobody disturbs."""

    @functools.cache
    def losses(clip_norm: float) -> list[float]:
        folder = tmp_path_factory.mktemp("whole")
        return trained(folder, 6, offload=DURABLE, clip_norm=clip_norm)

    return losses


@pytest.mark.parametrize("clip_norm", [0.1, 10.0])
def test_an_update_in_the_backward_pass_has_the_bits_of_one_after_it(tmp_path, clip_norm):
    """If every step is clipped, and if none is."""
    options = {"clip_norm": clip_norm, "zero": 2}
    after = trained(tmp_path / "after", 4, offload=DURABLE, **options)
    assert trained(tmp_path / "within", 4, offload=IN_BACKWARD, **options) == after


@pytest.mark.parametrize(
    ("call", "place", "count", "more"),
    [
        ("preadv", "process_1/weights/", 3, {"offload": DURABLE}),
        ("pwritev", "process_1/buckets", 5, {"offload": DURABLE}),
        ("commit", "process_1", 1, {"offload": DURABLE}),
        ("pwritev", "process_1/buckets", 5, {"offload": IN_BACKWARD}),
        ("commit", "process_1", 1, {"offload": IN_BACKWARD, "clip_norm": 10.0}),
    ],
    ids=["pass", "sweep", "commit", "update in backward", "its commit"],
)
def test_a_killed_process_loses_no_step(tmp_path, undisturbed, call, place, count, more):
    """Both go on from the last step that both have in files, with the bits they would have had."""
    folder = tmp_path / "run"
    fault = {"process": 1, "call": call, "folder": place, "after": 2, "count": count}
    codes, outputs = run(folder, 6, fault={**fault, "kills": True}, **more)
    assert codes[1] == -9, outputs
    assert codes[0] != 0
    before = noted(folder, 1)
    assert 0 < len(before) < 6
    after, expected = trained(folder, 6, **more), undisturbed(more.get("clip_norm", 0.1))
    steps = [step for step, _ in noted(folder, 1)[len(before) :]]
    # A step that was whole is not taken again; the last one may not have been noted.
    assert before[-1][0] + 1 <= steps[0] <= before[-1][0] + 3
    assert [loss for _, loss in before] == expected[: len(before)]
    assert after == expected[steps[0] - 1 :]


def test_files_of_another_number_of_processes_are_refused(tmp_path):
    folder = tmp_path / "run"
    trained(folder, 2, offload=DURABLE)
    codes, outputs = run(folder, 4, processes=1, offload=DURABLE)
    assert codes == [1], outputs
    assert "number of processes" in (folder / "error-0").read_text(encoding="utf-8")
