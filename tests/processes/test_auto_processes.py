"""Two processes agree on the settings of `offload.auto` and of `zerojax.train(model, "auto")`."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.process_groups import run_group
from tests.support.trajectories import TOLERANCE

pytestmark = [pytest.mark.multihost, pytest.mark.slow]
LIMIT = 900.0
"""Seconds after which a run, which needs about 60, is ended."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process notes; see `tests.support.auto_group_process`."""
    folder = tmp_path_factory.mktemp("auto")
    words = ["-m", "tests.support.auto_group_process", str(folder)]
    run_group([words, words], join=True, seconds=LIMIT)
    return [json.loads((folder / f"found-{index}").read_text()) for index in range(2)]


def test_the_process_with_the_least_host_memory_decides_about_offload(found):
    """Only the second has too little for the state, and both store layers in files."""
    runs = [one["offload"]["chosen"] for one in found]
    for run in runs:
        assert run["settings"]["offload"]["params"] == "nvme"
        assert any("process 1: " in reason and "host memory" in reason for reason in run["reasons"])
    assert runs[0] == runs[1]
    plain = found[0]["offload"]["plain"]
    assert plain["settings"]["offload"]["params"] != "nvme"
    np.testing.assert_allclose(runs[0]["losses"], plain["losses"], rtol=0, atol=TOLERANCE)


def test_both_refuse_what_fits_one_of_them_only(found):
    refusals = [one["offload"]["alone"] for one in found]
    assert refusals[0] == refusals[1]
    assert "process 1: " in refusals[0]
    assert "offload.folder" in refusals[0]


def test_the_second_process_takes_the_settings_of_the_first_ones_search(found):
    runs = [one["settings"]["found"] for one in found]
    assert runs[0] == runs[1]
    settings, given = runs[0]["settings"], found[0]["settings"]["given"]
    assert (settings["zero"], settings["reduce_bucket_size"]) == (2, 5000)
    assert runs[0]["microbatches"] == 2
    for one in found:
        assert any("the best of a test" in reason for reason in one["settings"]["reasons"])
    assert runs[0]["losses"] == given["losses"]


def test_settings_that_divide_batches_otherwise_are_refused_in_both(found):
    refusals = [one["settings"]["rows"] for one in found]
    assert refusals[0] == refusals[1]
    assert "stage=4" in refusals[0]
    assert "mesh_config" in refusals[0]
