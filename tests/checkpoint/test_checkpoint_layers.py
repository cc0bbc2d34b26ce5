"""A layer of a stack is read from a checkpoint without the others, whatever mesh has saved it."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.errors import DamagedError
from zerojax.checkpoint.export import Layers
from zerojax.checkpoint.inspection import open_arrays, saved_steps

LAYERS, ROWS, COLUMNS = 6, 1024, 1024
LAYER = ROWS * COLUMNS * 4
SPECS = {
    "whole": P(),
    "rows": P(None, "data"),
    "layers": P("data"),
    "columns": P(None, None, "data"),
}


def bytes_read() -> int:
    """By system calls of this process, page cache or not."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.fixture(scope="module")
def stacks():
    random = np.random.default_rng(0)
    return {name: random.standard_normal((LAYERS, ROWS, COLUMNS), np.float32) for name in SPECS}


@pytest.fixture(scope="module")
def saved(stacks, tmp_path_factory):
    folder, mesh = tmp_path_factory.mktemp("stacks"), Mesh(jax.devices()[:2], ("data",))
    params = {
        name: jax.device_put(stacks[name], NamedSharding(mesh, spec))
        for name, spec in SPECS.items()
    }
    params["small"] = jax.device_put(stacks["whole"][:, :8, :8], NamedSharding(mesh, P()))
    params["table"] = jax.device_put(stacks["whole"][0], NamedSharding(mesh, P()))
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"params": params}, data_state={}, config={}, plan={})
    return saved_steps(folder)[0]


def unread(saved, name):
    return open_arrays(saved.folder, saved.whole_metadata())[f"params/{name}"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPECS)
def test_a_layer_costs_a_layer(name, saved, stacks):
    layers = Layers(saved, f"params/{name}", unread(saved, name), stacks[name].shape)
    before = bytes_read()
    np.testing.assert_array_equal(layers.layer(2), stacks[name][2])
    assert LAYER <= bytes_read() - before < 1.2 * LAYER
    for index in range(LAYERS):
        np.testing.assert_array_equal(layers.layer(index), stacks[name][index])


@pytest.mark.parametrize("name", ["small", "table"])
def test_what_is_small_or_no_stack_is_read_whole(name, saved, stacks):
    expected = stacks["whole"][:, :8, :8] if name == "small" else stacks["whole"][0]
    assert unread(saved, name).open_layers() is None
    layers = Layers(saved, f"params/{name}", unread(saved, name), expected.shape)
    np.testing.assert_array_equal(layers.layer(3), expected[3])


def test_a_stack_that_is_another_is_refused_with_its_last_layer(saved, stacks, monkeypatch):
    layers = Layers(saved, "params/rows", unread(saved, "rows"), stacks["rows"].shape)
    plain = layers._read

    def changed(index):
        values = np.array(plain(index))
        values[0, 0] += float(index == 1)
        return values

    monkeypatch.setattr(layers, "_read", changed)
    for index in range(LAYERS - 1):
        layers.layer(index)
    with pytest.raises(DamagedError, match="'params/rows' differs from what was saved; export"):
        layers.layer(LAYERS - 1)


def test_a_stack_that_is_the_first_layers_of_another_is_not_mistaken_for_it(saved, stacks):
    """The sums of layers are those of their places in the stack."""
    layers = Layers(saved, "params/rows", unread(saved, "rows"), stacks["rows"].shape)
    plain = layers._read
    layers._read = lambda index: plain({0: 1, 1: 0}.get(index, index))
    for index in range(LAYERS - 1):
        layers.layer(index)
    with pytest.raises(DamagedError):
        layers.layer(LAYERS - 1)
