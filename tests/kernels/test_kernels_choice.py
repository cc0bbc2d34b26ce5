"""Which implementation is taken, what is said about it, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import zerojax
from pallas_kernels import choice, optimizers
from pallas_kernels.update import update
from zerojax.optim import choose_update
from zerojax.placement.device_mesh import make_abstract_mesh


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"


H200, V100 = (Device(),), (Device(device_kind="Tesla V100", compute_capability="7.0"),)
MI300, CPU = (Device(device_kind="MI300X", compute_capability="gfx942"),), (Device("cpu"),)


def test_auto_says_why(monkeypatch):
    monkeypatch.setattr(choice, "missing", lambda: None)
    plain = choice.choose("auto", kernel="adamw", devices=H200)
    assert plain.implementation == "xla"
    assert "moves as many bytes as the kernel" in plain.reason
    for kernel, counted in (("lamb", "5 to 8 % less"), ("muon", "within 3 %")):
        left = choice.choose("auto", kernel=kernel, devices=H200)
        assert left.implementation == "xla"
        assert counted in left.reason
        assert left.reason.endswith("no measurement on a GPU puts the kernel ahead")
    taken = choice.choose("auto", kernel="adam8bit", devices=H200)
    assert taken.implementation == "mosaic_gpu"
    assert "16 bytes" in taken.reason
    here = choice.choose("auto", kernel="adam8bit", devices=CPU)
    assert here.implementation == "xla"
    assert "platform 'cpu'" in here.reason


@pytest.mark.parametrize(
    ("gpu", "implementation", "why"),
    [
        ("h200", "mosaic_gpu", "16 bytes"),
        ("gh200", "xla", "the compute capability of gh200 is not known"),
        (None, "xla", "the kind of the devices is not known"),
    ],
)
def test_auto_on_a_mesh_without_devices_is_decided_for_its_gpu(
    monkeypatch, gpu, implementation, why
):
    monkeypatch.setattr(choice, "missing", lambda: None)
    mesh = make_abstract_mesh({}, 8, gpu=gpu)
    found = choose_update(zerojax.adam8bit(1e-3), mesh)["update"]
    assert found.implementation == implementation
    assert why in found.reason


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (CPU, "platform 'cpu'"),
        (V100, "compute capability 8.0 or newer and Tesla V100 has 7.0"),
        (MI300, "this is a MI300X"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(monkeypatch, devices, why):
    monkeypatch.setattr(choice, "missing", lambda: None)
    with pytest.raises(choice.KernelUnavailable, match=rf"{why}; use impl='xla'"):
        choice.choose("mosaic_gpu", kernel="lion", devices=devices)
    assert choice.choose("mosaic_gpu", kernel="lion", devices=H200).implementation == "mosaic_gpu"


def test_an_old_jax_is_refused_with_its_version(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    with pytest.raises(choice.KernelUnavailable, match=r"jax >= 0.11 .* this is jax 0.10.2; use"):
        choice.choose("interpret", kernel="lion")
    with pytest.raises(choice.KernelUnavailable, match=r"jax >= 0.11"):
        choice.choose("mosaic_gpu", kernel="lion", devices=H200)
    assert "jax >= 0.11" in choice.choose("auto", kernel="adam8bit", devices=H200).reason
    monkeypatch.setattr(jax, "__version__", "0.11.0.dev1")
    assert choice.missing() is None


def test_a_misspelt_choice_names_the_nearest():
    with pytest.raises(ValueError, match="impl='mosaic' is not one of .*did you mean 'mosaic_gpu'"):
        choice.choose("mosaic", kernel="lion")


def test_asking_for_the_kernel_on_a_cpu_never_falls_back():
    x = jnp.zeros((512,))
    with pytest.raises(choice.KernelUnavailable, match="lion"):
        update(
            optimizers.LION, (x, x), (x,), scalars=optimizers.lion_scalars(1e-3), impl="mosaic_gpu"
        )
