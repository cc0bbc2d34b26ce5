"""The section mesh.offload: every form that its values can be given in, and every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from zerojax.cli import keys_command, main
from zerojax.config import (
    ConfigError,
    MeshConfig,
    OffloadConfig,
    RunConfig,
    as_mesh_config,
    from_dict,
    load,
    to_dict,
)


@pytest.mark.parametrize(
    "value",
    [
        {"device": 0.4, "host": 0.6},
        {"host": 0.6, "device": 0.4, "nvme": 0},
        (("host", 0.6), ("device", 0.4)),
        [["device", 0.4], ["host", 0.6]],
        "{device: 0.4, host: 0.6}",
        "[[host, 0.6], [device, 0.4]]",
    ],
)
def test_shares_have_one_form_however_they_are_given(value):
    config = OffloadConfig(opt_state=value)
    assert config.opt_state == (("device", 0.4), ("host", 0.6))
    assert config.shares == {"device": 0.4, "host": 0.6}
    assert hash(config) == hash(OffloadConfig(opt_state=(("device", 0.4), ("host", 0.6))))


@pytest.mark.parametrize("value", [{"host": 1}, "host", "{host: 1.0, device: 0}"])
def test_one_tier_alone_is_its_name(value):
    assert OffloadConfig(opt_state=value).opt_state == "host"


@pytest.mark.parametrize(
    ("settings", "moves", "disk", "host", "off"),
    [
        ({}, False, False, False, True),
        ({"opt_state": "host"}, True, False, True, False),
        ({"opt_state": "nvme", "durable": True}, True, True, False, False),
        ({"opt_state": {"device": 0.5, "nvme": 0.5}}, True, True, False, False),
        ({"params": "host", "update_in_backward": True}, False, False, True, False),
        ({"activations": "host"}, False, False, True, False),
    ],
)
def test_what_leaves_the_device(settings, moves, disk, host, off):
    config = OffloadConfig(**settings)
    assert config.moves_opt_state is moves
    assert config.on_disk is disk
    assert config.on_host is host
    assert config.is_off is off


MISTAKES = [
    ({"opt_state": {"device": 0.5, "host": 0.6}}, "adds up to 1.1; shares must add up to 1"),
    ({"opt_state": {"host": 0.5}}, "adds up to 0.5; shares must add up to 1"),
    (
        {"opt_state": "cpu"},
        "'cpu' is not one of device, host, nvme; did you mean 'host'?",
    ),
    ({"opt_state": {"disk": 1}}, "did you mean 'nvme'?"),
    ({"opt_state": "hosts"}, "did you mean 'host'?"),
    ({"opt_state": "tape"}, "'tape' is not one of device, host, nvme; use device, host or nvme"),
    (
        {"opt_state": {"host": "half", "device": 0.5}},
        "'half' is not a share of host; give a number",
    ),
    ({"opt_state": {"host": 1.5, "device": -0.5}}, "1.5 is not a share of host"),
    ({"opt_state": {"host": True}}, "True is not a share of host"),
    ({"opt_state": [["host", 0.5], ["host", 0.5]]}, "'host' is listed twice"),
    ({"opt_state": ["host", "nvme"]}, "'host' is not a pair of tier and share"),
    ({"opt_state": {}}, "is not a tier; use device, host, nvme"),
    ({"opt_state": 3}, "3 is not a tier; use device, host, nvme, or {device: 0.4, host: 0.6}"),
    ({"durable": True}, "durable: True applies to files on a disk; set opt_state: nvme"),
    ({"durable": True, "opt_state": "host"}, "applies to files on a disk"),
    ({"update_in_backward": True}, "set params: host, or params: nvme and durable: true"),
    ({"params": "disk"}, "params: 'disk' is not one of device, host, nvme"),
    ({"activations": "cpu"}, "activations: 'cpu' is not one of device, host"),
    ({"slice_elements": 0}, "slice_elements: 0 must be >= 1"),
    ({"tile_bytes": 0, "params": "host"}, "tile_bytes: 0 must be >= 1"),
    ({"min_elements": 0}, "min_elements: 0 must be >= 1"),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("settings", "sentence"), MISTAKES)
def test_a_mistake_is_named_wherever_it_is_made(settings, sentence):
    with pytest.raises(ConfigError) as direct:
        OffloadConfig(**settings)
    assert sentence in str(direct.value)
    with pytest.raises(ConfigError) as nested:
        as_mesh_config({"zero": 3, "offload": settings})
    assert sentence in str(nested.value)
    assert str(nested.value).startswith("offload.")


def test_a_mistake_in_a_file_has_its_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mesh:\n  zero: 1\n  offload:\n    params: host\n    opt_stat: host\n")
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, path)
    text = str(caught.value)
    assert "mesh.offload.opt_stat: unknown key; did you mean 'mesh.offload.opt_state'?" in text
    assert f"({path}:5)" in text


@pytest.mark.parametrize("key", ["opt_state", "mesh.offload.opt_state"])
@pytest.mark.parametrize("text", ["nvme", "{device: 0.25, nvme: 0.75}"])
def test_the_command_line_takes_short_and_whole_keys(key, text):
    config = load(RunConfig, None, [f"{key}={text}", "mesh.offload.durable=true"]).mesh.offload
    assert config == OffloadConfig(
        opt_state=text if text == "nvme" else {"device": 0.25, "nvme": 0.75}, durable=True
    )


def test_shares_that_do_not_add_up_on_the_command_line():
    with pytest.raises(ConfigError, match=r"offload.opt_state: .* adds up to 0.9.*command line"):
        load(RunConfig, None, ["opt_state={host: 0.5, nvme: 0.4}"])


@pytest.mark.parametrize("text", ["offload: null", "offload:", "offload: {}"])
def test_an_empty_section_leaves_everything_on_the_device(text, tmp_path):
    path = Path(tmp_path / "run.yaml")
    path.write_text(f"mesh:\n  {text}\n")
    assert load(RunConfig, path).mesh.offload == OffloadConfig()
    assert as_mesh_config({"offload": None}).offload == OffloadConfig()


@pytest.mark.parametrize("through", [json.dumps, yaml.safe_dump])
@pytest.mark.parametrize(
    "config",
    [
        OffloadConfig(),
        OffloadConfig(opt_state={"device": 0.4, "host": 0.35, "nvme": 0.25}, durable=True),
        OffloadConfig(params="host", activations="host", folder="/mnt/x"),
    ],
)
def test_what_is_written_is_read_back(config, through):
    mesh = MeshConfig(zero=3, offload=config)
    written = through(to_dict(mesh))
    assert from_dict(MeshConfig, yaml.safe_load(written)) == mesh


def test_keys_lists_the_section_with_its_whole_name(capsys):
    listed = {key for key, _, _ in keys_command.all_keys()}
    assert {"mesh.offload.opt_state", "mesh.offload.durable", "mesh.zero"} <= listed
    assert main(["keys", "mesh.offload.params"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mesh.offload.params=device\n")
    for line in out.splitlines():
        if not line.startswith(" "):
            load(RunConfig, None, [line])  # every line can be typed
