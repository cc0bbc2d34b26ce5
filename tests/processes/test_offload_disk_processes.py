"""Two processes with a store each are one run, whose checkpoints any other run goes on from."""

import numpy as np
import pytest

from tests.processes.test_processes import train
from tests.support.trajectories import TOLERANCE

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

IN_FILES = (
    "mesh.offload.opt_state=nvme",
    "mesh.offload.slice_elements=500",
    "mesh.offload.min_elements=100",
)


def test_two_processes_with_files_hand_over_to_one_without(tmp_path):
    one = train(tmp_path, "one", "steps=6")
    two = train(tmp_path, "two", "steps=4", *IN_FILES, processes=2)
    np.testing.assert_allclose(two, one[:4], rtol=0, atol=TOLERANCE)
    folders = sorted(path.name for path in (tmp_path / "two" / "offload").iterdir())
    assert folders == ["process_0", "process_1"]
    pieces = tmp_path / "two" / "checkpoints" / "4" / "pieces"
    assert sorted(path.name for path in pieces.glob("*.bin")) == ["process_0.bin", "process_1.bin"]
    resumed = train(tmp_path, "two", "steps=6", "zero=3")
    assert resumed[:4] == two
    np.testing.assert_allclose(resumed[4:], one[4:], rtol=0, atol=TOLERANCE)


def test_what_both_processes_have_is_written_by_the_first(tmp_path):
    """Without ZeRO each has the whole state."""
    one = train(tmp_path, "one", "steps=4", "zero=0")
    two = train(tmp_path, "two", "steps=2", "zero=0", *IN_FILES, processes=2)
    pieces = tmp_path / "two" / "checkpoints" / "2" / "pieces"
    sizes = {path.name: path.stat().st_size for path in pieces.glob("*.bin")}
    assert sizes["process_0.bin"] > 0
    assert sizes["process_1.bin"] == 0
    resumed = train(tmp_path, "two", "steps=4", "zero=3")
    np.testing.assert_allclose([*two, *resumed[2:]], one, rtol=0, atol=TOLERANCE)
