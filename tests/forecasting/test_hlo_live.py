"""The compiler's account of what lies on a device at the peak, read from its own words."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.marks import needs_compiler
from zerojax.forecasting.hlo.live_buffers import LiveAtPeak, read_live
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu

STEM = "module_0001.jit_step.sm_9.0a_gpu_after_optimizations"

PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (w: f32[256], x: f32[64]) -> (f32[256], f32[]) {
  %w = f32[256]{0} parameter(0), metadata={op_name="state[\\'params\\'][\\'w\\']"}
  %x = f32[64]{0} parameter(1), metadata={op_name="batch[\\'x\\']"}
  %cast = bf16[256]{0} convert(%w), metadata={op_name="jit(step)/convert"}
  %dot = (bf16[512]{0}, s8[128]{0}) custom-call(%cast, %x), metadata={op_name="jit(step)/dot"}
  %scaled = bf16[512]{0} negate(%dot#0), metadata={op_name="jit(step)/neg"}
  %loss = f32[] custom-call(%scaled), metadata={op_name="jit(step)/sum"}
  %new = f32[256]{0} negate(%w), metadata={op_name="jit(step)/update"}
  ROOT %out = (f32[256]{0}, f32[]) tuple(%new, %loss)
}
"""

# The result of `dot` and what is made of it in place, `scaled`, share their first 1024 bytes.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 1024, page 0, parameter 0, shape |f32[256]| at ShapeIndex {}, maybe-live-out:
 value: <0 w @0> (size=1024,offset=0): f32[256]{0}
 value: <9 new @0> (size=1024,offset=0): f32[256]{0}
allocation 1: size 256, page 0, parameter 1, shape |f32[64]| at ShapeIndex {}:
 value: <1 x @0> (size=256,offset=0): f32[64]{0}
allocation 2: size 16, page 0, output shape is |(f32[256], f32[])|, maybe-live-out:
 value: <10 out{} @0> (size=16,offset=0): (f32[256]{0}, f32[])
allocation 3: size 4, page 0, maybe-live-out:
 value: <8 loss @0> (size=4,offset=0): f32[]
allocation 4: size 4, page 0, thread-local:
 value: <11 add.1 @0> (size=4,offset=0): f32[]
allocation 5: size 12, page 0, constant:
 value: <12 table @0> (size=12,offset=0): f32[3]{0}
allocation 6: size 2304, preallocated-temp:
 value: <2 cast @0> (size=512,offset=1280): bf16[256]{0}
 value: <3 dot{} @0> (size=16,offset=2048): (bf16[512]{0}, s8[128]{0})
 value: <4 dot{0} @0> (size=1024,offset=0): bf16[512]{0}
 value: <5 dot{1} @0> (size=128,offset=1024): s8[128]{0}
 value: <6 scaled (phi) @0> (size=1024,offset=0): bf16[512]{0}

Total bytes used: 3620 (3.5KiB)

Used values:
 value: this is another list
"""

RANGES = """HloLiveRange (max 8):
  InstructionSequence:
    0:w
    1:x
  BufferLiveRange:
    w{}:0-6
    x{}:1-3
    cast{}:2-3
    dot{}:3-4
    dot{0}:3-4
    dot{1}:3-3
    scaled{}:4-5
    loss{}:5-8
    new{}:6-8
    out{}:7-8
  Live ranges at 6 (peak):
    w{}: 1024 bytes (cumulative: 1024 bytes)
"""


def write(folder: Path, **changed: str) -> Path:
    texts = {"assignment": ASSIGNMENT, "ranges": RANGES, "program": PROGRAM, **changed}
    ends = {"assignment": "-buffer-assignment", "ranges": "-live-range", "program": ""}
    for name, text in texts.items():
        (folder / f"{STEM}{ends[name]}.txt").write_text(text)
    (folder / f"{STEM}-buffer-assignment-values.txt").write_text("not read")
    return folder


def read(folder: Path) -> LiveAtPeak:
    live = read_live(folder)
    assert live is not None
    return live


def test_the_parts_of_the_peak_are_read(tmp_path):
    live = read(write(tmp_path))
    assert [(a.op_name.replace("\\", ""), a.bytes) for a in live.arguments] == [
        ("state['params']['w']", 1024),
        ("batch['x']", 256),
    ]
    # `new` lies in the donated `w`; the loss and the table of pointers have memory of their own.
    assert live.outputs == 16 + 4
    assert live.temporary == 2304
    assert live.constants == 12
    assert live.peak == 1024 + 256 + 20 + 2304
    assert live.program.entry.root.name == "out"


def test_the_moment_is_when_the_block_of_temporaries_is_fullest(tmp_path):
    """Not moment 6, which the compiler calls the peak since both `w` and `new` count there."""
    live = read(write(tmp_path))
    assert live.moment == 3
    found = [(value.name, value.index, value.bytes) for value in live.values]
    assert found == [("dot", (0,), 1024), ("cast", (), 512), ("dot", (1,), 128), ("dot", (), 16)]
    assert live.fragmentation == 2304 - 1680
    assert [value.opcode for value in live.values] == ["custom-call", "convert"] + 2 * [
        "custom-call"
    ]
    assert live.values[1].op_name == "jit(step)/convert"
    assert live.values[0].shape == "bf16[512]{0}"


def test_shared_bytes_count_once_and_for_the_younger_value(tmp_path):
    """When `scaled` is made in place of `dot`, 1024 bytes are in use and not 2048."""
    longer = RANGES.replace("dot{1}:3-3", "dot{1}:3-4").replace("cast{}:2-3", "cast{}:4-5")
    live = read(write(tmp_path, ranges=longer))
    assert live.moment == 4
    own = {(value.name, value.index): value.bytes for value in live.values}
    assert own == {("scaled", ()): 1024, ("cast", ()): 512, ("dot", (1,)): 128, ("dot", ()): 16}


def test_a_value_keeps_what_a_younger_one_leaves_of_it(tmp_path):
    smaller = ASSIGNMENT.replace(
        "scaled (phi) @0> (size=1024,offset=0)", "scaled (phi) @0> (size=96,offset=32)"
    )
    later = RANGES.replace("cast{}:2-3", "cast{}:4-5")
    live = read(write(tmp_path, assignment=smaller, ranges=later))
    own = {(value.name, value.index): value.bytes for value in live.values}
    assert own["scaled", ()] == 96
    assert own["dot", (0,)] == 1024 - 96


def test_host_memory_is_not_of_the_device(tmp_path):
    host = ASSIGNMENT.replace("size 256, page 0, parameter 1", "size 256, color 5, parameter 1")
    assert host != ASSIGNMENT
    live = read(write(tmp_path, assignment=host))
    assert [argument.bytes for argument in live.arguments] == [1024]


def test_a_folder_without_accounts_is_none(tmp_path):
    """XLA's CPU compiler dumps under other names."""
    (tmp_path / "module_0000.jit_step.cpu_after_optimizations.txt").write_text(PROGRAM)
    assert read_live(tmp_path) is None
    assert read_live(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"assignment": ASSIGNMENT.replace("thread-local", "collective-scratch")},
            "allocation 4 of XLA's buffer assignment is of an unknown kind",
        ),
        ({"assignment": ASSIGNMENT.replace("page 0, constant", "page 0")}, "allocation 5 of XLA's"),
        (
            {"assignment": ASSIGNMENT.replace("(size=512,", "(bytes=512,")},
            "of another JAX version: ' value: <2",
        ),
        ({"assignment": "BufferAssignment:\n"}, "no preallocated-temp"),
        ({"ranges": RANGES.replace("    cast{}:2-3\n", "")}, "live ranges do not contain cast"),
        (
            {"ranges": RANGES.replace("cast{}:2-3", "cast{}: 2 to 3")},
            "live ranges have a line in an unknown format: 'cast{}: 2 to 3'",
        ),
        ({"ranges": "HloLiveRange (max 8):\n"}, "no part called BufferLiveRange"),
        ({"program": PROGRAM.replace("%cast", "%renamed")}, "is not in the program"),
        ({"program": "nothing"}, "no HLO module"),
    ],
)
def test_an_account_of_another_kind_is_said_and_not_guessed(tmp_path, changed, message):
    with pytest.warns(UserWarning, match="by role") as warned:
        assert read_live(write(tmp_path, **changed)) is None
    assert message in str(warned[0].message)


def test_accounts_of_two_programs_are_said_and_not_guessed(tmp_path):
    write(tmp_path)
    other = f"{STEM}-live-range.txt".replace("0001", "0002")
    (tmp_path / other).write_text(RANGES)
    with pytest.warns(UserWarning, match="of 2 programs"):
        assert read_live(tmp_path) is None


def compile_small(folder: Path, devices: int) -> tuple[LiveAtPeak, Any]:
    found = compile_client.gpu_devices(find_gpu("h100"), devices)
    mesh = Mesh(np.array(found), ("data",))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def step(w, x):
        hidden = jnp.tanh(x @ w)
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return w - gradient, hidden.sum()

    compiled = compile_client.compile_for_gpus(
        jax.jit(step, donate_argnums=0, out_shardings=(whole, whole)),
        jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((256 * devices, 512), jnp.float32, sharding=split),
        dump=folder,
        sketch=True,
    )
    return read(folder), compiled.memory


@needs_compiler
@pytest.mark.parametrize("devices", [1, 8])
def test_what_the_compiler_dumps_is_what_it_counts(tmp_path, devices):
    live, memory = compile_small(tmp_path, devices)
    assert live.peak == memory.peak
    assert live.temporary == memory.temporary
    assert sum(argument.bytes for argument in live.arguments) == memory.arguments
    assert live.outputs == memory.outputs - memory.aliased
    assert 0 <= live.fragmentation < 0.5 * live.temporary
    assert [argument.op_name for argument in live.arguments] == ["w", "x"]


CACHED = """
import sys, warnings
warnings.simplefilter("error")
import jax
from pathlib import Path
from tests.forecasting.test_hlo_live import compile_small
folder = Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x + 1)(1.0)
for number in range(2):
    jax.clear_caches()
    compile_small(folder / str(number), 1)
print(len(list((folder / "cache").iterdir())))
"""


@needs_compiler
@pytest.mark.thorough
def test_a_compilation_cache_of_the_user_is_left_alone(tmp_path):
    """A client without devices cannot read an entry: JAX would warn, and compile again."""
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", CACHED, str(tmp_path)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 1
    assert not list((tmp_path / "cache").glob("jit_step*"))
