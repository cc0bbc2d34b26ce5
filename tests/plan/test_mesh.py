"""Meshes: which sizes fit which devices, in which order, and what a user's own mesh becomes."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AxisType, Mesh

from zerojax.config import MeshConfig
from zerojax.hardware.gpus import find_gpu
from zerojax.placement import device_mesh as meshes
from zerojax.placement.device_mesh import (
    AXES,
    describe_mesh,
    has_nvidia_gpus,
    make_abstract_mesh,
    make_mesh,
    normalise_mesh,
    num_data_shards,
    resolve_axis_sizes,
)


def test_minus_one_takes_what_the_other_axes_leave():
    sizes = resolve_axis_sizes(MeshConfig(model=2, replica=2), 16)
    assert sizes == {"replica": 2, "data": 4, "expert": 1, "context": 1, "stage": 1, "model": 2}


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError) as caught:
        resolve_axis_sizes(MeshConfig(model=3), 8)
    assert str(caught.value) == (
        "mesh replica=1 x expert=1 x context=1 x stage=1 x model=3 = 3 does not divide the 8 "
        "devices; choose sizes whose product divides 8"
    )
    with pytest.raises(ValueError) as caught:
        resolve_axis_sizes(MeshConfig(data=2, model=2), 8)
    assert str(caught.value) == (
        "mesh replica=1 x data=2 x expert=1 x context=1 x stage=1 x model=2 needs 4 devices, "
        "but found 8; use data=-1 to use all of them, or give the mesh of some of them: "
        'zerojax.make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4])'
    )


def test_a_mesh_has_all_axes_all_auto_and_model_innermost():
    mesh = make_mesh({"model": 2})
    assert mesh.axis_names == AXES == ("replica", "data", "expert", "context", "stage", "model")
    assert mesh.axis_types == (AxisType.Auto,) * 6
    neighbours = [[device.id for device in pair] for pair in mesh.devices.reshape(4, 2)]
    assert neighbours == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert make_mesh(None).shape["data"] == 8
    assert make_mesh(devices=jax.devices()[:2]).shape["data"] == 2


def test_replicas_are_data_shards_too():
    mesh = make_mesh({"replica": 2, "data": 2, "model": 2})
    assert num_data_shards(mesh) == 4
    assert describe_mesh(mesh) == "replica 2 x data 2 x model 2"
    assert describe_mesh(make_mesh(devices=jax.devices()[:1])) == "1 device"


def test_a_users_mesh_keeps_its_devices_on_their_axes():
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = normalise_mesh(Mesh(devices, ("model", "data")))
    sizes = {"replica": 1, "data": 4, "expert": 1, "context": 1, "stage": 1, "model": 2}
    assert dict(mesh.shape) == sizes
    np.testing.assert_array_equal(mesh.devices[0, :, 0, 0, 0, :], devices.T)
    assert mesh.axis_types == (AxisType.Auto,) * 6


def test_an_abstract_mesh_needs_no_devices():
    mesh = make_abstract_mesh({"model": 8}, 4096)
    assert mesh.shape["data"] == 512
    assert mesh.axis_names == AXES


def test_sizes_tell_the_number_of_devices_and_a_name_the_gpu():
    mesh = make_abstract_mesh({"data": 4, "model": 2}, gpu="h100")
    assert mesh == make_abstract_mesh({"data": -1, "model": 2}, 8, gpu=find_gpu("h100"))
    with pytest.raises(ValueError, match=r"make_abstract_mesh\(config, 8\)"):
        make_abstract_mesh({"model": 2})


@pytest.mark.parametrize(
    ("device", "is_nvidia"),
    [
        (None, False),
        (("NVIDIA H200", "gpu"), True),
        (("h100", "gpu"), True),
        (("AMD Instinct MI300X", "gpu"), False),
        (("cpu", "cpu"), False),
    ],
)
def test_only_gpus_of_nvidia_are_nvidias(device, is_nvidia):
    mesh = make_abstract_mesh({}, 8)
    if device is not None:
        kind, platform = device
        made = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
        mesh = mesh.update(abstract_device=made)
    assert has_nvidia_gpus(mesh) == is_nvidia


def test_every_list_of_axes_is_read_from_the_table():
    """A row is all that a further axis needs to be in these lists."""
    assert (*meshes.PASS_AXES, meshes.STAGE, *meshes.COMPILER_AXES) == meshes.AXES
    assert (*meshes.DATA_AXES, meshes.CONTEXT) == meshes.PASS_AXES
    assert (*meshes.MANUAL_AXES, *meshes.COMPILER_AXES) == meshes.AXES
    assert set(meshes.STATE_AXES) <= set(meshes.PASS_AXES)
    row = meshes.Axis(name="group", splits="batch", shards_state=True, manual=True)
    table = (row, *meshes.AXIS_TABLE)
    assert meshes.names_of(table) == ("group", *meshes.AXES)
    assert meshes.names_of(table, splits="batch", manual=True) == ("group", *meshes.DATA_AXES)
    assert meshes.names_of(table, shards_state=True) == ("group", *meshes.STATE_AXES)


def test_every_axis_has_its_size_in_the_mesh_config():
    fields = {field.name for field in dataclasses.fields(MeshConfig)}
    assert set(meshes.AXES) <= fields
