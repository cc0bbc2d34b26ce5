"""Checkpoints of a run with slices in files: in constant memory, and good for any mesh and tier."""

import functools
import shutil

import jax
import numpy as np
import pytest

from tests.support.offload_disk_runs import (
    SHARES,
    close,
    differing,
    offload,
    plan_of,
    portable,
    train,
)
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedError
from zerojax.checkpoint.fingerprint_math import as_text, of_array
from zerojax.offload import sliced_state as offload_state
from zerojax.offload.disk_saving import saved_names, write_pieces
from zerojax.step.reshard import from_portable_state, to_portable_state


def save(folder, plan, state, step=1):
    """As the trainer saves."""
    apart = plan.offload is not None and plan.offload.off_device
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(
            step,
            to_portable_state(plan, state, joined=False),
            data_state={},
            config={},
            plan={},
            write_pieces=functools.partial(write_pieces, plan, state) if apart else None,
        )


def restore(folder, plan):
    names = saved_names(plan) if plan.offload is not None else {}
    unread = [n for arrays in names.values() for each in arrays.values() for n in each]
    with Checkpointer(folder) as checkpointer:
        restored = checkpointer.restore(plan.abstract_portable, unread=unread)
    return from_portable_state(plan, restored.state)


WAYS = [
    pytest.param("nvme", id="nvme", marks=pytest.mark.thorough),
    pytest.param(SHARES, id="shares"),
    pytest.param("host", id="host", marks=pytest.mark.thorough),
]


@pytest.fixture(scope="module", params=WAYS)
def saved(request, tmp_path_factory):
    """(folder of checkpoints, portable state, losses of two more steps, plan)."""
    folder = tmp_path_factory.mktemp("saved")
    plan = plan_of(offload(folder / "store", request.param), zero=3, data=4)
    state, _ = train(plan, 2)
    save(folder / "checkpoints", plan, state)
    expected = portable(plan, state)
    state, losses = train(plan, 2, state, first=2)
    close(state)
    return folder / "checkpoints", expected, losses, plan


@pytest.mark.thorough
def test_such_a_checkpoint_holds_every_array_once(saved):
    folder, expected, _, plan = saved
    with Checkpointer(folder) as checkpointer:
        described = checkpointer.metadata().arrays
        files = checkpointer.metadata().files
    assert described.keys() == expected.keys()
    names = [n for arrays in saved_names(plan).values() for each in arrays.values() for n in each]
    padded = [plan.abstract_stored["params"][leaf.name].size for leaf in plan.offload.off_device]
    assert len(names) == 3 * len(padded)
    assert files["pieces/process_0.bin"] == 3 * 4 * sum(padded)


@pytest.mark.thorough
def test_its_fingerprints_are_those_of_whole_arrays(saved):
    folder, expected, _, _ = saved
    with Checkpointer(folder) as checkpointer:
        found = checkpointer.metadata().fingerprints
        assert checkpointer.verify().is_good
    assert found == {name: as_text(of_array(np.asarray(x))) for name, x in expected.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("tier", [None, "nvme"])
def test_a_flipped_bit_in_its_pieces_is_noticed(saved, tmp_path, tier):
    folder, expected, _, plan = saved
    copy = shutil.copytree(folder, tmp_path / "copy")
    [name] = sorted(next(iter(saved_names(plan).values())).values())[0]
    path = copy / "1" / "pieces" / "process_0.bin"
    content = bytearray(path.read_bytes())
    place = content.index(np.asarray(expected[name]).reshape(-1)[:8].tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    other = plan_of(None if tier is None else offload(tmp_path, tier), zero=1, data=2)
    with pytest.raises(DamagedError, match=r"1 is damaged: .*pieces/process_0\.bin does not match"):
        restore(copy, other)
    with Checkpointer(copy) as checkpointer:
        damages = checkpointer.verify().damages
    assert [(damage.file, damage.leaf) for damage in damages] == [
        ("pieces/process_0.bin", None),
        (None, name),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tier", "data", "zero"),
    [(None, 2, 1), ("nvme", 4, 3), ("nvme", 2, 1), (SHARES, 2, 3), ("host", 4, 3)],
)
def test_it_comes_back_on_any_mesh_and_tier(saved, tmp_path, tier, data, zero):
    folder, expected, losses, _ = saved
    plan = plan_of(None if tier is None else offload(tmp_path, tier), zero=zero, data=data)
    state = restore(folder, plan)
    try:
        assert differing(portable(plan, state), expected) == []
        if data == 4:
            again = train(plan, 2, state, first=2)[1]
            assert again == losses
    finally:
        close(state)


@pytest.mark.thorough
def test_state_on_the_host_is_neither_joined_to_be_saved_nor_restored_whole(tmp_path, monkeypatch):
    """It may fill most of the machine's memory."""
    plan = plan_of(offload(tmp_path, "host"), zero=1, data=2)
    state, _ = train(plan, 2)
    expected = portable(plan, state)

    def refuse(*_, **__):
        raise AssertionError("a whole parameter was put together")

    monkeypatch.setattr(offload_state, "join_leaf", refuse)
    monkeypatch.setattr(offload_state, "cut_leaf", refuse)
    save(tmp_path / "checkpoints", plan, state)
    restored = restore(tmp_path / "checkpoints", plan)
    monkeypatch.undo()
    assert jax.tree.map(lambda x: x.sharding, restored) == plan.state_shardings
    assert differing(portable(plan, restored), expected) == []
    for name, weights in restored["params"].items():
        np.testing.assert_array_equal(np.asarray(weights), np.asarray(state["params"][name]))


@pytest.mark.thorough
@pytest.mark.parametrize("tier", ["nvme", SHARES, "host"], ids=["nvme", "shares", "host"])
def test_an_ordinary_checkpoint_goes_into_files(tmp_path, tier):
    plain = plan_of(None, zero=2, data=2)
    state, _ = train(plain, 2)
    expected = portable(plain, state)
    save(tmp_path / "checkpoints", plain, state)
    plan = plan_of(offload(tmp_path / "store", tier), zero=1, data=4)
    restored = restore(tmp_path / "checkpoints", plan)
    try:
        assert differing(portable(plan, restored), expected) == []
        for name, weights in restored["params"].items():
            master = expected[f"params/{name}"]
            true_part = np.asarray(weights)[tuple(slice(size) for size in master.shape)]
            assert np.array_equal(true_part, master), name
        assert train(plan, 2, restored, first=2)[1]
    finally:
        close(restored)


def test_what_only_reads_weights_reads_them_from_pieces(saved):
    folder, expected, _, _ = saved
    plan = plan_of(None, data=1)
    abstract = {"params": plan.abstract_portable["params"]}
    with Checkpointer(folder) as checkpointer:
        params = checkpointer.restore(abstract, subset=True).state["params"]
    assert params
    assert all(np.array_equal(np.asarray(x), expected[f"params/{n}"]) for n, x in params.items())


@pytest.mark.thorough
def test_a_piece_that_was_cut_off_is_damage(tmp_path):
    plan = plan_of(offload(tmp_path / "store"), data=2)
    state, _ = train(plan, 1)
    save(tmp_path / "checkpoints", plan, state)
    close(state)
    path = tmp_path / "checkpoints" / "1" / "pieces" / "process_0.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged: pieces/process_0.bin has"):
        restore(tmp_path / "checkpoints", plan_of(None, data=2))


@pytest.mark.thorough
def test_no_space_for_the_pieces_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    plan = plan_of(offload(tmp_path / "store"), data=2)
    state, _ = train(plan, 1)
    expected = portable(plan, state)
    save(tmp_path / "checkpoints", plan, state)
    state, _ = train(plan, 1, state, first=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zerojax.checkpoint.store.pieces.PieceWriter.write", full)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved .*no space left.*intact: 1"):
        save(tmp_path / "checkpoints", plan, state, step=2)
    monkeypatch.undo()
    close(state)
    plain = plan_of(None, data=2)
    assert differing(portable(plain, restore(tmp_path / "checkpoints", plain)), expected) == []
