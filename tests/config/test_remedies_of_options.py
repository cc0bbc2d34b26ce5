"""Options that are refused: settings of a run, options of a plan, sizes and data of a model.

No device computes anything.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import Refusal, code_in, refused, table
from tests.support.small_models import reference_model
from zerojax import zoo
from zerojax.config import ConfigError, ElasticityConfig, MeshConfig, RunConfig, checks, load
from zerojax.config.loader import load_dataclass
from zerojax.config.mesh import OffloadConfig, as_mesh_config
from zerojax.config.sections import LossScale
from zerojax.data import as_source
from zerojax.optim.schedules import build_deepspeed_schedule
from zerojax.placement.state_layout import store_folder

# --- settings of a run ----------------------------------------------------------------------------

SETTINGS = table(
    """
zero=4 | mesh.zero 4 | 0 1 2 3 | zero=$
zerro=3 | zerro | mesh.zero | $=3
name=llama | name | model.name optimizer.name | model.name=llama
zero | zero | mesh.zero=3 | $
mesh=3 | mesh | mesh.data | $=3
mesh.zero.x=3 | mesh.zero.x | mesh.zero | $=3
loss_scale.static=8 precision=bf16 | loss_scale bf16 | precision=fp16
  | loss_scale.static=8 $ ; precision=bf16
seq_len=999 | data.seq_len 999 256 | model.max_seq_len | seq_len=256 ; seq_len=999 $=999
warmup_steps=500 steps=100 | warmup_steps 500 100 | steps
  | warmup_steps=100 $=100 ; warmup_steps=500 $=500
precision=fp61 | fp61 | fp16 | precision=$
mesh.virtual_shards=6 | 6 | 4 8 | virtual_shards=$
model.num_kv_heads=3 | 3 | 1 4 | num_kv_heads=$
num_heads=5 | 256 5 | 255 | num_heads=5 embed_dim=$
elasticity.enabled=true global_batch_size=8 | global_batch_size 8 | 1680
  | elasticity.enabled=true global_batch_size=$ ; elasticity.enabled=true
mesh.partition=even | even | uniform parameters flops "[3, 3, 2, 2]" | 'mesh.partition=$'
'mesh.offload.opt_state={host: 2}' | opt_state 2 host | 0 1 | 'mesh.offload.opt_state={host: 1}'
'mesh.rules={w: [modle]}' | modle w | model null | 'mesh.rules={w: [$]}'
model.pretrained=FOLDER model.num_layers=3 | model.num_layers 3 model.pretrained |
  | model.pretrained=FOLDER
model.lora.rank=4 model.lora.targets=[] | model.lora.targets | attention/(query|value)
  | model.lora.rank=4 model.lora.targets=[$]
precision=fp16 loss_scale.factor=1 | factor 1.0 | 2 | precision=fp16 loss_scale.factor=$
precision=fp16 loss_scale.static=1e30 | static 1e+30 | 1 | precision=fp16 loss_scale.static=$
precision=fp16 loss_scale.window=0 | window 0 | 1000 | precision=fp16 loss_scale.window=$
precision=fp16 loss_scale.hysteresis=0 | hysteresis 0 | 1 | precision=fp16 loss_scale.hysteresis=$
precision=fp16 loss_scale.static=0 | static 0.0 | null | precision=fp16 loss_scale.static=$
precision=fp16 loss_scale.static=8 loss_scale.window=5 | static 8.0 | window
  | precision=fp16 loss_scale.static=8 ; precision=fp16 loss_scale.$=5
precision=fp16 loss_scale.initial=1024 loss_scale.maximum=512 | initial 1024.0 | 1 512
  | precision=fp16 loss_scale.initial=$ loss_scale.maximum=512 ;
    precision=fp16 loss_scale.initial=1024 loss_scale.maximum=1024
steps=0 | steps 0 | 1 | steps=$
data.validation_fraction=2 | validation_fraction 2.0 | 0 | data.validation_fraction=$
mesh.offload.opt_state=cpu | cpu | host | mesh.offload.opt_state=$
mesh.offload.opt_state=xyzzy | xyzzy | device host nvme | mesh.offload.opt_state=$
mesh.offload.opt_state=[] | opt_state [] | nvme "{device: 0.4, host: 0.6}"
  | 'mesh.offload.opt_state=$'
mesh.offload.opt_state=[host] | opt_state host | "{device: 0.4, host: 0.6}"
  | 'mesh.offload.opt_state=$'
'mesh.offload.opt_state=[[host, 0.5], [host, 0.5]]' | opt_state host |
  | 'mesh.offload.opt_state=[[host, 1.0]]'
mesh.offload.durable=true | durable | opt_state nvme | mesh.offload.durable=true opt_state=nvme
mesh.offload.update_in_backward=true | update_in_backward | params host nvme durable
  | mesh.offload.update_in_backward=true mesh.offload.params=host ;
    mesh.offload.update_in_backward=true mesh.offload.params=nvme mesh.offload.durable=true
mesh.offload.delayed_update=true | delayed_update opt_state device | opt_state host
  | mesh.offload.delayed_update=true mesh.offload.opt_state=host ; zero=1
mesh.offload.delayed_update=true mesh.offload.params=host
  | delayed_update params host | device update_in_backward
  | mesh.offload.delayed_update=true mesh.offload.opt_state=host ;
    mesh.offload.update_in_backward=true mesh.offload.params=host
mesh.offload.update_in_forward=true | update_in_forward opt_state device | opt_state host
  | mesh.offload.update_in_forward=true mesh.offload.opt_state=host ; zero=1
mesh.offload.update_in_forward=true mesh.offload.params=host
  | update_in_forward params host | device update_in_backward
  | mesh.offload.update_in_forward=true mesh.offload.opt_state=host ;
    mesh.offload.update_in_backward=true mesh.offload.params=host
mesh.offload.update_in_forward=true mesh.offload.delayed_update=true mesh.offload.opt_state=host
  | update_in_forward delayed_update | leave
  | mesh.offload.update_in_forward=true mesh.offload.opt_state=host ;
    mesh.offload.delayed_update=true mesh.offload.opt_state=host
mesh.offload.update_in_backward=true mesh.offload.params=nvme | update_in_backward | durable
  | mesh.offload.update_in_backward=true mesh.offload.params=nvme mesh.offload.durable=true
'mesh.partition=[2, 0]' | partition 0 | "[3, 3, 2, 2]" | mesh.stage=4 'mesh.partition=$'
mesh.pipeline_schedule= | pipeline_schedule | 1f1b CSV
  | mesh.pipeline_schedule=1f1b ; mesh.pipeline_schedule=mine.csv
mesh.data=0 | mesh.data 0 | 1 -1 | mesh.data=$
elasticity.micro_batch_sizes=[] | micro_batch_sizes | "[2, 4]" | 'elasticity.micro_batch_sizes=$'
elasticity.enabled=true devices_per_node=3 mesh.model=2 | devices_per_node 3 | 2
  | elasticity.enabled=true devices_per_node=$ mesh.model=2
elasticity.enabled=true max_devices=1 devices_per_node=8 | 1 8 2000 | max_devices
  | elasticity.enabled=true $=8 devices_per_node=8
elasticity.enabled=true max_global_batch_size=8 devices_per_node=8 | 8 | max_global_batch_size
  | elasticity.enabled=true $=2000 devices_per_node=8
elasticity.enabled=true min_devices=997 max_devices=998 | 997 998 | min_devices max_devices
  | elasticity.enabled=true min_devices=1 max_devices=998
global_batch_size=30 num_microbatches=4 | 30 4 | 28 32 | global_batch_size=$ num_microbatches=4
run_dir=gs://bucket/a | run_dir gs://bucket/a | mount | run_dir=/mnt/bucket/a
model.attention_layout.mode=fixed model.attention_layout.num_local_blocks=6
    model.attention_layout.num_global_blocks=4
  | num_global_blocks 4 6 | 1
  | model.attention_layout.mode=fixed model.attention_layout.num_local_blocks=6
    model.attention_layout.num_global_blocks=$
model.attention_layout.num_local_blocks=6 | num_local_blocks | mode fixed
  | model.attention_layout.mode=fixed model.attention_layout.num_local_blocks=6
batch_ramp.start=8 | start 8 | increment ramp_rows
  | batch_ramp.start=8 batch_ramp.increment=8 batch_ramp.ramp_rows=64 global_batch_size=32
batch_ramp.increment=8 | increment 8 | start
  | batch_ramp.start=8 batch_ramp.increment=8 batch_ramp.ramp_rows=64 global_batch_size=32
steps=10000000000 | steps | 2147483647 | steps=2147483647
model.bit_schedule.period=8 | period 8 | start_bits 8
  | model.bit_schedule.period=8 model.bit_schedule.start_bits=8 model.matmul_dtype=fake_int4
model.bit_schedule.start_bits=8 model.matmul_dtype=fake_int4 | start_bits 8 | period
  | model.bit_schedule.start_bits=8 model.bit_schedule.period=4 model.matmul_dtype=fake_int4
curriculum.type=seqlen | total_steps | 40 | curriculum.type=seqlen curriculum.total_steps=40
curriculum.type=seqlen curriculum.total_steps=9 curriculum.min_length=4 curriculum.length_step=8
  | min_length 4 8 | length_step
  | curriculum.type=seqlen curriculum.total_steps=9 curriculum.min_length=8
    curriculum.length_step=8 ;
    curriculum.type=seqlen curriculum.total_steps=9 curriculum.min_length=4 curriculum.length_step=4
curriculum.type=seqlen curriculum.total_steps=9 curriculum.min_length=16 curriculum.max_length=8
  | max_length 8 16 | max_length
  | curriculum.type=seqlen curriculum.total_steps=9 curriculum.min_length=16
    curriculum.max_length=16
curriculum.total_steps=9 | total_steps 9 | type=seqlen | curriculum.total_steps=9 curriculum.$
elasticity.enabled=true min_devices=8 max_devices=4 | max_devices 4 8 | raise
  | elasticity.enabled=true min_devices=8 max_devices=8
elasticity.enabled=true 'elasticity.micro_batch_sizes=[2, 4000]' | micro_batch_sizes 4000 2000
  | smaller | elasticity.enabled=true 'elasticity.micro_batch_sizes=[2, 4]'
model.moe.num_experts=4 model.moe.experts_per_token=8 | experts_per_token 8 | 4
  | model.moe.num_experts=4 model.moe.experts_per_token=$
model.moe.num_experts=8 model.moe.num_groups=3 | num_groups 3 8 | 1
  | model.moe.num_experts=8 model.moe.num_groups=$
model.moe.num_experts=8 model.moe.num_groups=2 model.moe.groups_per_token=4 | groups_per_token 4
  | 2 | model.moe.num_experts=8 model.moe.num_groups=2 model.moe.groups_per_token=$
model.moe.num_experts=8 model.moe.num_groups=8 model.moe.groups_per_token=1 | experts_per_token 2
  | groups_per_token
  | model.moe.num_experts=8 model.moe.num_groups=8 model.moe.groups_per_token=2
layer_drop.gamma=0.1 | gamma 0.1 | theta 0.5 | layer_drop.gamma=0.1 layer_drop.theta=0.5
learning_rate=190:20:30 | learning_rate 190:20:30 | number | learning_rate=190.5
steps=017 | steps 017 | 17 | steps=$
mesh.offload.activations=nvme | activations | params nvme host
  | mesh.offload.activations=nvme mesh.offload.params=nvme ;
    mesh.offload.activations=host mesh.offload.params=host
mesh.offload.params=nvme mesh.offload.opt_state=host | opt_state | nvme
  | mesh.offload.params=nvme mesh.offload.opt_state=nvme ; mesh.offload.params=nvme
mesh.offload.auto=true mesh.offload.opt_state=host | opt_state auto | leave
  | mesh.offload.auto=true ; mesh.offload.opt_state=host
elasticity.enabled=true batch_ramp.start=8 batch_ramp.increment=8 batch_ramp.ramp_rows=64
  | start 8 elasticity | leave
  | elasticity.enabled=true ;
    batch_ramp.start=8 batch_ramp.increment=8 batch_ramp.ramp_rows=64 global_batch_size=32
optimizer.scaling=linear | scaling | base_batch | optimizer.scaling=linear optimizer.base_batch=8
optimizer.warmup_tokens=64 optimizer.warmup_steps=2 | warmup_tokens warmup_steps | leave
  | optimizer.warmup_tokens=64 ; optimizer.warmup_steps=2
optimizer.schedule_unit=tokens optimizer.schedule=constant | schedule_unit constant
  | cosine linear wsd
  | optimizer.schedule_unit=tokens optimizer.schedule=$ ; optimizer.schedule=constant
optimizer.ema_warmup=false | ema_warmup | ema_decay
  | optimizer.ema_warmup=false optimizer.ema_decay=0.99
optimizer.learning_rate=inf | learning_rate inf | finite | optimizer.learning_rate=1
data.path=a 'data.mixture=[{path: b}]' | path mixture | mixture
  | 'data.mixture=[{path: a}, {path: b}]'
""",
    ConfigError,
)


def read(words: str) -> RunConfig:
    return load_dataclass(RunConfig, None, shlex.split(words))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("row", SETTINGS)
def test_settings_of_a_run(row):
    SETTINGS[row].check(read)


def test_numbers_of_devices_of_an_elastic_run():
    batch = ElasticityConfig(max_global_batch_size=100).choose_batch()
    Refusal(11, "11 96", "12 1 2 48", [12, 1, 2, 48], ConfigError).check(batch.micro_batch_size)
    run = read("elasticity.enabled=true num_microbatches=7")
    refused(lambda: run.on_devices(8), "num_microbatches 7 35", error=ConfigError)
    read("elasticity.enabled=true").on_devices(8)


def test_settings_in_python():
    refused(lambda: LossScale(static=0), "static 0.0", "None", error=ConfigError)
    LossScale(static=None)
    refused(lambda: MeshConfig(zerro=2), "zerro", "zero", error=TypeError)
    MeshConfig(zero=2)
    refused(lambda: as_mesh_config(3), "int", "MeshConfig dict None", error=TypeError)
    same = [as_mesh_config(given) for given in ({}, None, MeshConfig())]
    assert same == [MeshConfig()] * 3
    refused(lambda: checks.check_whole_number("steps", 0, 1), "steps=0", "1")
    checks.check_whole_number("steps", 1, 1)


FILES = {
    'steps: "3"\n': ("steps 3", "3", "steps: 3\n"),
    "mesh: 3\n": ("mesh 3", "data", "mesh:\n  data: 1\n"),
    "steps: 3\nsteps: 4\n": ("steps 1 run.yaml:2", "", "steps: 3\n"),
    "stpes: 3\n": ("stpes", "steps", "steps: 3\n"),
    "run_dir: 5\n": ("run_dir 5", "quotes", 'run_dir: "5"\n'),
    "freeze: &a [embed, *a]\n": ("*a", "", "freeze: [embed]\n"),
    "freeze: " + "[" * 200 + "]" * 200: ("64", "fewer", "freeze: []\n"),
}


@pytest.mark.parametrize("bad", FILES, ids=lambda text: text[:12])
def test_files_of_settings(bad, tmp_path):
    path = tmp_path / "run.yaml"

    def load_text(text: str) -> object:
        path.write_text(text)
        return load(RunConfig, path, [])

    value, remedy, good = FILES[bad]
    Refusal(bad, [*value.split(), "run.yaml"], remedy, [good], ConfigError).check(load_text)
    absent = path.with_name("no.yaml")
    refused(lambda: load(RunConfig, absent), "no.yaml", "YAML", error=ConfigError)


# --- plans ----------------------------------------------------------------------------------------


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 8) -> None:
        self.out = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


def mean(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def line(mesh=None, **options: Any) -> zerojax.Plan:
    batch = {"x": np.zeros((48, 8), np.float32)}
    return zerojax.make_plan(Line, mesh or {}, example_batch=batch, loss=mean, **options)


@functools.cache
def gpt2(num_layers: int = 4) -> Any:
    sizes = {"vocab_size": 64, "num_heads": 2, "embed_dim": 16, "max_seq_len": 16}
    return zoo.GPT2(zoo.GPT2Config(num_layers=num_layers, **sizes), rngs=nnx.Rngs(0))


def text(mesh, num_layers: int = 4, **options: Any) -> zerojax.Plan:
    tokens = np.zeros((16, 8), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return zerojax.make_plan(gpt2(num_layers), mesh, example_batch=batch, **options)


def stages() -> zerojax.Plan:
    rngs, layer = nnx.Rngs(0), lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    model = zerojax.Stages(layer(rngs), layer, layer(rngs), num_layers=2, rngs=rngs)
    batch = {"x": np.zeros((16, 8), np.float32)}
    return zerojax.make_plan(model, {"stage": 2}, example_batch=batch, loss=mean)


def ours(name: str) -> Any:
    return getattr(zerojax, name)(1e-3)


def groups(*patterns: str, mask: Any = zerojax.optim.decay_mask, **values: float) -> Any:
    values = values or {"learning_rate_factor": 0.1}
    return zerojax.adamw(1e-3, groups=dict.fromkeys(patterns, values), mask=mask)


def masked(mask: Any) -> Any:
    return zerojax.adamw(1e-3, mask=mask)


def llama_in_codes(zero: int, weights: str) -> zerojax.Plan:
    """A plan of a Llama with 8-bit products."""
    tokens = np.zeros((16, 8), np.int32)
    return zerojax.make_plan(
        reference_model("llama", matmul_dtype="fp8"),
        {"zero": zero, "wire": {"weights": weights}},
        example_batch={"tokens": tokens, "targets": tokens},
    )


def piped(schedule: str, stage: int = 2, **options: Any) -> zerojax.Plan:
    return text({"stage": stage, "pipeline_schedule": schedule}, **options)


def parted(partition: Any, num_layers: int = 4) -> zerojax.Plan:
    return text({"stage": 2, "partition": partition}, num_layers)


def offloaded(
    precision: Any = "fp32", optimizer: Any = None, microbatches: int = 1, **offload: Any
):
    options = {"precision": precision, "optimizer": optimizer, "num_microbatches": microbatches}
    return text({"offload": offload}, **options)


PLAIN, UNCLIPPED = optax.adamw(1e-3), zerojax.adamw(1e-3, clip_norm=None)
SPLIT = [["kernel", [None, "model"]]]
FIXED = {"deterministic": "mesh"}
HOST = {"opt_state": "host", "params": "host"}
STATE = {"offload": {"opt_state": "host"}}
BACKWARD = {**HOST, "update_in_backward": True}
FORWARD = {"opt_state": "host", "update_in_forward": True, "min_elements": 16}
LATE = {"opt_state": "host", "delayed_update": True, "min_elements": 16}
IN_FILES = {**BACKWARD, "opt_state": "nvme", "params": "nvme", "durable": True, "folder": "files"}
BF16 = zerojax.Precision(param_dtype=jnp.bfloat16)
DURABLE = {"durable": True, "folder": "files"}

ONE_BIT = zerojax.optim.one_bit_adam(1e-3, freeze_step=3)

PLANS = table(
    """
line({"data": 3}) | data=3 8 | data=-1 zerojax.make_mesh({"data": 3}, devices=jax.devices()[:3])
  | line({"data": -1}) ; line(zerojax.make_mesh({"data": 3}, devices=jax.devices()[:3]))
line({"data": 16}) | data=16 8 | data=-1 | line({"data": -1})
line(dict(FIXED, virtual_shards=4)) | virtual_shards=4 data=8 | virtual_shards=8
  | line(dict(FIXED, $))
line(FIXED, num_microbatches=2) | num_microbatches=2 deterministic='mesh' | virtual_shards=16
  | line(FIXED) ; line(dict(FIXED, $), num_microbatches=2)
line(FIXED, optimizer=PLAIN) | deterministic='mesh' optax | adamw lion sgd
  | line(FIXED, optimizer=ours("$"))
line(FIXED, precision="bf16", accumulate_dtype="bf16")
  | deterministic='mesh' accumulate_dtype bfloat16 | fp32
  | line(FIXED, precision="bf16", accumulate_dtype="$")
line({**FIXED, **STATE}) | deterministic offload | | line(FIXED) ; line(STATE)
line({"model": 8, "rules": SPLIT}) | out/kernel model=8 | 4 | line({"model": $, "rules": SPLIT})
line(precision=BF16, optimizer=PLAIN) | param_dtype=bfloat16 optax | adamw lion lamb sgd
  | line(precision=BF16, optimizer=ours("$"))
line(STATE, optimizer=PLAIN) | opt_state host optax | adamw lion sgd
  | line(STATE, optimizer=ours("$"))
line(optimizer=groups("biass")) | biass | out/bias | line(optimizer=groups("$"))
line(optimizer=groups("out", "bias")) | bias out/bias | first
  | line(optimizer=groups("bias", "out"))
line(optimizer=groups("bias", weight_decay=0.1)) | weight_decay=0.1 out/bias | mask=None
  | line(optimizer=groups("bias", weight_decay=0.1, $))
line(optimizer=masked({"x": True})) | x out/bias | zerojax.optim.decay_mask None
  | line(optimizer=masked($))
line(optimizer=optax.lbfgs(1e-3)) | value_fn | zerojax.adamw | line(optimizer=$(1e-3))
line(freeze=".") | freeze 2 | fewer | line(freeze="bias")
line({"stage": 2}) | loop unrolled | zerojax.Stages jax.lax.scan | stages()
parted("uniform", 3) | 3 2 uniform | flops "[2, 1]" | parted("flops", 3) ; parted([2, 1], 3)
parted([1, 2]) | "[1, 2]" 3 4 | "[2, 2]" | parted($)
piped("1f2b") | 1f2b | 1f1b | piped("$")
piped("interleaved(1)") | interleaved 1 | interleaved(2) 1f1b | piped("$")
piped("interleaved(1)", 4, num_microbatches=2) | interleaved 1 | 1f1b
  | piped("$", 4, num_microbatches=2)
text({"stage": 2, "offload": HOST}) | offload.params=host stage=2 | stage=1 offload.params device
  | text({"offload": HOST}) ; text({"stage": 2, **STATE})
text({"stage": 2, "offload": LATE}) | delayed_update stage=2 | stage=1 leave
  | text({"offload": LATE}) ; text({"stage": 2, **STATE})
text({"context": 2, "offload": LATE}) | context=2 delayed_update | context=1 leave
  | text({"offload": LATE}) ; text({"context": 2, **STATE})
line({"offload": LATE}) | delayed_update | leave | line(STATE)
offloaded(**{**LATE, "min_elements": 10**6}) | delayed_update min_elements=1,000,000 | lower leave
  | offloaded(**LATE) ; offloaded(opt_state="host")
offloaded(microbatches=2, **LATE) | delayed_update num_microbatches=2 | num_microbatches=1 leave
  | offloaded(**LATE) ; offloaded(microbatches=2, opt_state="host")
text({"stage": 2, "offload": FORWARD}) | update_in_forward stage=2 | stage=1 leave
  | text({"offload": FORWARD}) ; text({"stage": 2, **STATE})
text({"context": 2, "offload": FORWARD}) | context=2 update_in_forward | context=1 leave
  | text({"offload": FORWARD}) ; text({"context": 2, **STATE})
line({"offload": FORWARD}) | update_in_forward | leave | line(STATE)
offloaded(**{**FORWARD, "min_elements": 10**6}) | update_in_forward min_elements=1,000,000
  | lower leave | offloaded(**FORWARD) ; offloaded(opt_state="host")
offloaded(microbatches=2, **FORWARD) | update_in_forward num_microbatches=2
  | num_microbatches=1 leave | offloaded(**FORWARD) ; offloaded(microbatches=2, opt_state="host")
offloaded(microbatches=2, **BACKWARD) | update_in_backward num_microbatches=2
  | num_microbatches=1 | offloaded(optimizer=UNCLIPPED, **BACKWARD)
offloaded(optimizer=zerojax.adamw(1e-3, clip_norm=1.0), **BACKWARD)
  | update_in_backward clip_norm=1 | clip_norm=None nvme durable
  | offloaded(optimizer=zerojax.adamw(1e-3, clip_norm=None), **BACKWARD) ;
    offloaded(optimizer=zerojax.adamw(1e-3, clip_norm=1.0), **IN_FILES)
offloaded("fp16", UNCLIPPED, **BACKWARD) | update_in_backward float16 | bf16 fp32
  | offloaded("$", UNCLIPPED, **BACKWARD)
offloaded(opt_state={"host": 0.5}) | opt_state 0.5 | 1
  | offloaded(opt_state={"host": 0.5, "device": 0.5})
offloaded(opt_state={"nvme": 0.5, "host": 0.5}, **DURABLE) | durable host 0.5 | opt_state nvme
  | offloaded(opt_state="nvme", **DURABLE)
offloaded(BF16, opt_state="nvme", **DURABLE) | durable param_dtype=bfloat16 | float32
  | offloaded("bf16", opt_state="nvme", **DURABLE) ;
    offloaded(BF16, opt_state="nvme", folder="files")
line({"wire": {"secondary": True}, "zero": 3}) | secondary node | wire.secondary=false node
  | line({"wire": {"secondary": False}, "zero": 3}) ;
    line({"wire": {"secondary": True}, "zero": 3, "node": 4})
line({"wire": {"weights": "fp8"}, "zero": 0}) | wire.weights=fp8
  | zero=3 matmul_dtype='fp8' wire.weights=compute
  | line({"wire": {"weights": "compute"}, "zero": 0}) ; llama_in_codes(3, "fp8")
llama_in_codes(2, "fp8") | wire.weights=fp8 zero=2 | zero=3 wire.weights=compute
  | llama_in_codes(3, "fp8") ; llama_in_codes(2, "compute")
line({"zero": 1}, precision=BF16, optimizer=ONE_BIT) | 1-bit bfloat16 | param_dtype float32
  | line({"zero": 1}, precision="bf16", optimizer=ONE_BIT)
line({"zero": 1, **STATE}, optimizer=ONE_BIT) | 1-bit offload | leave
  | line({"zero": 1}, optimizer=ONE_BIT) ; line({"zero": 1, **STATE})
text({"lookup": "owners", "stage": 2}) | lookup=owners stage=2 | leave lookup=gather
  | text({"lookup": "owners"}) ; text({"lookup": "gather", "stage": 2})
zerojax.with_ema(zerojax.with_ema(ours("adamw"), 0.9), 0.9) | ema | once
  | zerojax.with_ema(ours("adamw"), 0.9)
zerojax.with_ema(ours("adamw"), 1.0) | 1.0 1 | 0.999 | zerojax.with_ema(ours("adamw"), $)
zerojax.optim.one_bit_adam(1e-3, freeze_step=0) | freeze_step=0 | 1
  | zerojax.optim.one_bit_adam(1e-3, freeze_step=$)
zerojax.Precision(freeze_codes="int3") | int3 | nf4 int8 None
  | zerojax.Precision(freeze_codes="nf4") ; zerojax.Precision(freeze_codes=None)
zerojax.Precision(freeze_dtype=jnp.float16) | freeze_dtype=float16 | float32 bfloat16 None
  | zerojax.Precision(freeze_dtype=jnp.float32) ; zerojax.Precision(freeze_dtype=jnp.bfloat16) ;
    zerojax.Precision(freeze_dtype=None)
text({"context": 2, **FIXED}) | context=2 deterministic | context=1 leave
  | text({"context": 2}) ; text(FIXED)
text({"context": 2, "stage": 2}) | context=2 stage=2 | stage=1 context=1
  | text({"context": 2}) ; text({"stage": 2})
line({"context": 2}) | context=2 before_cut | context=1 zerojax.zoo.Llama GPT2
  | line({"context": 1}) ; text({"context": 2})
text({"context": 2}, loss=mean) | context=2 | loss=None context=1
  | text({"context": 2}, loss=None)
text({"context": 2, "offload": BACKWARD}) | context=2 update_in_backward | context=1
  | text({"context": 2, "offload": HOST})
line({"expert": 2}) | expert=2 zerojax.experts | expert=1 | line({"expert": 1})
line({"expert": 2, "stage": 2}) | expert=2 stage=2 | stage=1 expert=1
  | text({"stage": 2, "expert": 1})
line({"zero": 0, "wire": {"gradients": "int8"}}) | zero=0 wire.gradients
  | zero=1 2 3 wire.gradients=reduce
  | line({"zero": 1, "wire": {"gradients": "int8"}}) ;
    line({"zero": 0, "wire": {"gradients": "reduce"}})
line({"node": 3}) | node=3 8 | node leave | line({"node": 4}) ; line({})
line({"offload": {"auto": True}}) | offload.auto | offload.opt_state params activations
  | line(STATE) ; text({"offload": {"params": "host", "opt_state": "host"}})
line({"data": 4, "model": 3}) | model=3 8 | divides data=-1 | line({"data": -1, "model": 2})
line({"model": 3}) | model=3 8 | divides | line({"model": 4})
text({"unroll": True, "stage": 2}) | unroll stage | unroll | text({"stage": 2})
text({"offload": HOST}, optimizer=PLAIN) | host optax | adamw lion sgd
  | text({"offload": HOST}, optimizer=ours("$"))
line({"wire": {"weights": "int8"}, "zero": 0}) | wire.weights zero | zero
  | line({"wire": {"weights": "int8"}, "zero": 3})
line({"wire": {"secondary": True}, "zero": 1}) | secondary zero=1 | zero=3
  | line({"wire": {"secondary": True}, "zero": 3, "node": 4})
line({"zero": 2}, optimizer=zerojax.optim.one_bit_adam(1e-3, freeze_step=3)) | zero=2 1-bit
  | zero=0 1 | line({"zero": 1}, optimizer=zerojax.optim.one_bit_adam(1e-3, freeze_step=3))
text({"lookup": "owners", "model": 2}) | lookup=owners model=2 | leave lookup=gather
  | text({"lookup": "owners", "zero": 3}) ; text({"lookup": "gather", "model": 2})
"""
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", PLANS)
def test_plans(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PLANS[row].check(lambda call: eval(call, globals()))


# --- models and data ------------------------------------------------------------------------------


def llama(changes: dict[str, Any]) -> Any:
    sizes = {"vocab_size": 64, "num_layers": 1, "embed_dim": 16, "max_seq_len": 16}
    config = zoo.LlamaConfig(**{"num_heads": 4, "num_kv_heads": 2, **sizes, **changes})
    return nnx.eval_shape(lambda: zoo.Llama(config, rngs=nnx.Rngs(0)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("bad", "value", "key", "remedies"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3 4", "num_kv_heads", [1, 4]),
        ({"head_dim": 5}, "head_dim=5", "head_dim", [6]),
        ({"embed_dim": 18}, "embed_dim=18 4", "embed_dim", [24]),
        ({"embed_dim": 20}, "embed_dim=20 4 5", "head_dim", [6]),
        ({"remat": "ful"}, "ful", "remat", ["none", "full", "attention", "dots"]),
        ({"rope_theta": 0.5}, "rope_theta=0.5", "rope_theta", [10000.0]),
    ],
    ids=str,
)
def test_sizes_of_a_model(bad, value, key, remedies):
    good = [{**bad, key: remedy} for remedy in remedies]
    Refusal(bad, [*value.split(), key], remedies, good).check(llama)


@pytest.mark.thorough
def test_adapters():
    add = lambda model, rank: zerojax.add_lora(model, zerojax.LoraConfig(rank=rank))  # noqa: E731
    refused(lambda: add(gpt2(), 0), "rank=0", "rank=8")
    adapted = add(gpt2(), 8)
    refused(lambda: add(adapted, 8), "blocks/attention/key", "zerojax.merge_lora(model)")
    add(zerojax.merge_lora(adapted), 8)
    # A model of one's own, built with Flax's projection.
    own = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    message = refused(lambda: add(own, 2), "Linear", "flax.nnx.LoRALinear freeze")

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.out(x)

    batch, freeze = {"x": np.zeros((16, 8), np.float32)}, eval(code_in(message, "('^"))
    plan = zerojax.make_plan(Adapted, {}, example_batch=batch, loss=mean, freeze=freeze)
    trained = [name for name, leaf in plan.placement.leaves.items() if not leaf.frozen]
    assert [name.rpartition("/")[2] for name in trained] == ["lora_a", "lora_b"]


def test_layers_of_a_pipeline():
    rngs, layer = nnx.Rngs(0), lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    ends = layer(rngs), layer(rngs)
    build = lambda block, **options: zerojax.Stages(ends[0], block, ends[1], **options)  # noqa: E731
    message = refused(lambda: build(layer(rngs)), "block Linear", "function list", error=TypeError)
    written = code_in(message, "lambda").replace("...", "8, 8")
    block = eval(written, {"Linear": nnx.Linear})
    refused(lambda: build(block), "block", "num_layers rngs", error=TypeError)
    build(block, num_layers=2, rngs=rngs)
    layers = [layer(rngs), layer(rngs)]
    refused(lambda: build(layers, num_layers=1), "num_layers rngs list 2", error=TypeError)
    build(layers)


def source(data: Any, **options: Any) -> Any:
    return as_source(data, **{"seq_len": 8, "global_batch_size": 2, **options})


def test_token_data():
    ids, matrix = np.arange(100), np.zeros((4, 300), int)
    split = lambda fraction: source(ids, validation_fraction=fraction)  # noqa: E731
    Refusal(0.01, "validation_fraction=0.01 100 17", "0.171 0", [0.171, 0]).check(split)
    count = lambda number: source(np.arange(number), validation_fraction=0)  # noqa: E731
    Refusal(10, "10 seq_len=8 global_batch_size=2", "17", [17]).check(count)
    Refusal(matrix, '"(4, 300)"', "array.reshape(-1)", [matrix.reshape(-1)]).check(source)


def test_token_files(tmp_path):
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    sidecar, text = tmp_path / "ids.json", '{"dtype": "uint16"}'
    refused(lambda: source(tmp_path), ["ids.bin", "ids.json"], [text, sidecar])
    sidecar.write_text(text)
    source(tmp_path)


def test_text_data(tmp_path):
    (tmp_path / "story.doc").write_text("once upon a time " * 40)
    refused(lambda: source(tmp_path), ".doc", ".txt .md .jsonl .parquet")
    (tmp_path / "story.doc").rename(tmp_path / "story.txt")
    source(tmp_path)
    lines, line = tmp_path / "lines.jsonl", '{"text": "..."}'
    lines.write_text('{"txt": "once"}\n')
    refused(lambda: source(lines), "lines.jsonl:1 text txt", [line, "--format", "chat"])
    lines.write_text(f"{line}\n" * 400)
    source(lines)
    refused(lambda: source(None, tokenizer="bpe"), "bpe", "bpe:4096")


def test_masked_tokens():
    ids, mask = np.arange(1000) % 50, zerojax.data.as_masked_source
    refused(lambda: mask(source(ids)[0], mask_token=3), "token", "vocab_size as_source")
    mask(source(ids, vocab_size=50)[0], mask_token=3)


def test_numbers_and_keys_of_a_file(tmp_path):
    path = tmp_path / "run.yaml"

    def read(text: str) -> RunConfig:
        path.write_text(text)
        return load(RunConfig, path, [])

    refused(lambda: read("steps: '012'"), "steps 012", "12", error=ConfigError)
    refused(lambda: read("steps: '12'"), "steps 12", "use 12", error=ConfigError)
    refused(lambda: read("steps: 1\nsteps: 12"), "steps 1 2", "keep one", error=ConfigError)
    assert read("steps: 12").steps == 12


def test_a_schedule_that_deepspeed_does_not_have():
    kinds, rate = "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest", 1e-3
    build = functools.partial(build_deepspeed_schedule, learning_rate=rate)
    remedy = f'{kinds} "optimizer=optax.adamw(schedule)"'
    refused(lambda: build("CosineLR", {}), "CosineLR type", remedy, error=ConfigError)
    params = {"WarmupDecayLR": {"total_num_steps": 9}, "WarmupCosineLR": {"total_num_steps": 9}}
    params["OneCycle"] = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    assert all(build(kind, params.get(kind, {})).learning_rate(1) >= 0 for kind in kinds.split())
    line(optimizer=optax.adamw(lambda updates: rate / (1 + updates)))


def test_a_folder_for_files_of_state(tmp_path):
    config = OffloadConfig(opt_state="nvme")
    refused(lambda: store_folder(config), "nvme", "offload.folder")
    store_folder(dataclasses.replace(config, folder=tmp_path))
