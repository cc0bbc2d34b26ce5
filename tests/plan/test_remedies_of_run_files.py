"""Refusals of plans of run files: options of the mesh and sections that exclude each other.

No step is compiled; the devices are absent.
"""

import shlex

import pytest

from tests.support.refusals import table
from zerojax.config import RunConfig, load
from zerojax.plan.rung_plans import with_rungs
from zerojax.training.run_file import plan_from_config

TINY = (
    "num_layers=2 num_heads=2 embed_dim=64 max_seq_len=32 seq_len=32 global_batch_size=32"
    " vocab_size=64 optimizer.name=adamw steps=40"
)
GROUP = "{{pattern: {}, dense_ratio: 0.5}}"
DROP = "layer_drop.theta=0.5"
RAMP = "batch_ramp.start=8 batch_ramp.increment=8 batch_ramp.ramp_rows=64"
SHORT = "curriculum.type=seqlen curriculum.total_steps=9"
MIXED = "model.name=llama moe.num_experts=4 moe.expert_dim=16"
FILES = "mesh.offload.params=nvme opt_state=nvme mesh.offload.folder=files zero=3"
CODES = "freeze=[attention] freeze_dtype=nf4"
NARROW = "freeze=[mlp] model.mlp_dim=64 embed_dim=128"
WIDE = "model.mlp_dim=67108864"
NODES = "zero=3 wire.secondary=true node=4"
EARLY = "zero=3 mesh.offload.params=host mesh.offload.update_in_backward=true clip_norm=null"
EARLY += " mesh.offload.min_elements=1"
BLOCKS = "model.attention_layout.mode=fixed model.attention_layout.block=8"
BLOCKS += " model.attention_layout.num_local_blocks=2"

PLANS = table(
    f"""
context=2 mesh.model=2 sequence_sharding=true | context=2 | sequence_sharding=False
  | context=2 mesh.model=2 sequence_sharding=false
context=2 {BLOCKS} model.attention=chunked | context layout | leave context=1
  | context=2 ; {BLOCKS} context=1
context=2 context_parallel=ring model.attention=xla | 'xla' 'ring' | 'chunked' 'auto' 'ulysses'
  | context=2 context_parallel=ring model.attention=chunked ;
    context=2 context_parallel=ring model.attention=auto ;
    context=2 context_parallel=ulysses model.attention=xla
expert=2 {MIXED} {CODES} | expert=2 freeze_codes='nf4' | leave expert=1
  | expert=2 {MIXED} freeze=[attention] ; {MIXED} {CODES} expert=1
{CODES} stage=2 | freeze_dtype=nf4 stage=2 | stage=1 bf16
  | {CODES} stage=1 ; freeze=[attention] freeze_dtype=bf16 stage=2
{CODES} mesh.offload.params=host opt_state=host zero=3 | freeze_dtype=nf4 offload.params=host
  | leave bf16 | {CODES} opt_state=host zero=3 ;
    freeze=[attention] freeze_dtype=bf16 mesh.offload.params=host opt_state=host zero=3
{CODES} deterministic=mesh | freeze_dtype=nf4 deterministic='mesh' | leave bf16
  | {CODES} ; freeze=[attention] freeze_dtype=bf16 deterministic=mesh
freeze=[bias] freeze_dtype=nf4 | freeze_dtype=nf4 kernel 64 | leave freeze
  | freeze=[bias] ; {CODES}
{DROP} opt_state=host | layer_drop.theta offload | leave | {DROP} ; opt_state=host
{DROP} mesh.offload.tile_bytes=1000000 | layer_drop.theta tile_bytes=1000000 | leave | {DROP}
{DROP} deterministic=mesh | deterministic=mesh | leave | {DROP} ; deterministic=mesh
{DROP} unroll=true | unroll=True | unroll=False | {DROP} unroll=false
{DROP} context=2 | context=2 | context=1 | {DROP} context=1
{DROP} expert=2 {MIXED} | expert=2 | expert=1 | {DROP} expert=1 ; expert=2 {MIXED}
{DROP} model.matmul_dtype=fp8 | matmul_dtype=fp8 | leave
  | {DROP} model.matmul_dtype=fake_int8 ; model.matmul_dtype=fp8
{DROP} model.matmul_dtype=fp8 wire.weights=fp8 zero=3 | wire.weights=fp8 | compute
  | {DROP} wire.weights=compute zero=3
'pruning.groups=[{GROUP.format("upper")}]' | 'upper' | correct remove
  | 'pruning.groups=[{GROUP.format("up/kernel")}]' ; pruning.groups=[]
'pruning.groups=[{GROUP.format("up/kernel")}, {GROUP.format("kernel")}]' | 'up/kernel' | change
  | 'pruning.groups=[{GROUP.format("up/kernel")}, {GROUP.format("down/kernel")}]'
'pruning.groups=[{GROUP.format("up/kernel, unit: channel")}]' | 'up/kernel' | unit=row
  | 'pruning.groups=[{GROUP.format("up/kernel, unit: row")}]'
'pruning.groups=[{GROUP.format("attention/out, unit: head, num_heads: 4")}]' | num_heads=4 | 2
  | 'pruning.groups=[{GROUP.format("attention/out, unit: head, num_heads: 2")}]'
'pruning.groups=[{GROUP.format("up/kernel, unit: head")}]' | 'up/kernel' heads | attention
  | 'pruning.groups=[{GROUP.format("attention/out, unit: head")}]'
'pruning.groups=[{GROUP.format("position_embedding, unit: row")}]'
  | position_embedding | unit=weight
  | 'pruning.groups=[{GROUP.format("position_embedding, unit: weight")}]'
'pruning.groups=[{GROUP.format("up/kernel")}]' opt_state=host | offload | leave
  | 'pruning.groups=[{GROUP.format("up/kernel")}]' ; opt_state=host
'pruning.groups=[{GROUP.format("up/kernel")}]' zero=2 wire.weights=delta_int8
  | wire.weights=delta_int8 | wire.weights=compute
  | 'pruning.groups=[{GROUP.format("up/kernel")}]' zero=2 wire.weights=compute
{RAMP} {SHORT} | start=8 | leave | {RAMP} ; {SHORT}
{RAMP.replace("8", "4")} | 4 8 | multiples | {RAMP}
{RAMP} mesh.data=4 mesh.model=2 num_microbatches=2 global_batch_size=24
  | num_microbatches=2 | num_microbatches=3 leave
  | {RAMP} mesh.data=4 mesh.model=2 num_microbatches=3 global_batch_size=24 ;
    {RAMP} mesh.data=4 mesh.model=2 global_batch_size=24
{RAMP} opt_state=host | offload | leave | {RAMP} ; opt_state=host
{SHORT} curriculum.max_length=64 | max_length 64 32 | lower | {SHORT} curriculum.max_length=32
{SHORT} curriculum.min_length=40 curriculum.max_length=40 | 40 32 | lower
  | {SHORT} curriculum.min_length=32 curriculum.max_length=32
{SHORT} curriculum.length_step=64 | length_step 64 32 | lower | {SHORT} curriculum.length_step=32
{SHORT} curriculum.keys=[token] | 'token' | tokens | {SHORT} curriculum.keys=[tokens,targets]
{SHORT} curriculum.length_step=1 curriculum.keys=[tokens,targets] | 9 | length_step fixed_discrete
  | {SHORT} curriculum.length_step=8 curriculum.keys=[tokens,targets]
{SHORT} curriculum.length_step=1 {MIXED} moe.balance_weight=0.1 | experts | length_step
  | {SHORT} curriculum.length_step=8 {MIXED} moe.balance_weight=0.1
zero=0 wire.weights=delta_int8 | zero=0 wire.weights=delta_int8 | zero=1 2 wire.weights=compute
  | zero=1 wire.weights=delta_int8 ; zero=2 wire.weights=delta_int8 ; zero=0 wire.weights=compute
zero=3 wire.weights=delta_int8 | zero=3 wire.weights=delta_int8 | zero=1 2 wire.weights=int8
  | zero=1 wire.weights=delta_int8 ; zero=3 wire.weights=int8
zero=2 wire.weights=delta_int8 stage=2 | stage=2 | leave | zero=2 wire.weights=delta_int8 ; stage=2
'roll_remat={{blocks: full}}' | blocks | leave | roll_remat=auto
num_microbatches=8 | global_batch_size=32 num_microbatches=8
  | num_microbatches=4 global_batch_size=64 | num_microbatches=4 ;
    num_microbatches=8 global_batch_size=64
global_batch_size=36 | global_batch_size=36 8 | global_batch_size=40 | global_batch_size=40
zero=3 wire.secondary=true node=8 | wire.secondary | wire.secondary=false mesh.node
  | zero=3 wire.secondary=false node=8 ; zero=3 wire.secondary=true node=4
{FILES} mesh.model=2 | model=2 | model=1 host | {FILES} mesh.model=1 ;
    {FILES.replace("nvme", "host")} mesh.model=2
{FILES} optimizer.ema_decay=0.9 | nvme | host | {FILES} ; {FILES.replace("nvme", "host")}
    optimizer.ema_decay=0.9
zero=3 mesh.offload.tile_bytes=1000 stage=2 | tile_bytes=1000 stage=2 | stage=1 leave
  | zero=3 mesh.offload.tile_bytes=1000 stage=1 ; zero=3 stage=2
zero=1 mesh.offload.tile_bytes=1000 | tile_bytes=1000 zero=1 | zero=3 leave
  | zero=3 mesh.offload.tile_bytes=1000 ; zero=1
optimizer.warmup_tokens=1000000 | warmup_tokens 1000000 | lower longer
  | optimizer.warmup_tokens=1000 ; optimizer.warmup_tokens=1000000 steps=1000
{MIXED} expert=2 'mesh.rules=[[experts/up, [model, null, null]]]' mesh.model=2
  | experts/up expert | null expert=1
  | {MIXED} expert=2 'mesh.rules=[[experts/up, [null, null, model]]]' mesh.model=2
context=2 {MIXED} moe.capacity_factor=2 | context=2 moe.capacity_factor=2 | leave context=1
  | context=2 {MIXED} ; {MIXED} moe.capacity_factor=2 context=1
expert=8 {MIXED} | expert=8 experts/down | 4 | expert=4 {MIXED} ; expert=2 {MIXED}
{NARROW} freeze_dtype=nf4 mesh.model=2 | down/kernel 64 model=2 | smaller model bf16
  | {NARROW} freeze_dtype=nf4 mesh.model=1 ; {NARROW} freeze_dtype=bf16 mesh.model=2
{EARLY} 'mesh.offload.opt_state={{host: 0.5, device: 0.5}}' | update_in_backward | host device
  | {EARLY} opt_state=host ; {EARLY} opt_state=device
{WIDE} 'pruning.groups=[{GROUP.format("up/kernel")}]' | up/kernel 2,147,483,647 | unit=row leaves
  | {WIDE} 'pruning.groups=[{GROUP.format("up/kernel, unit: row")}]' ;
    {WIDE} 'pruning.groups=[{GROUP.format("attention/out")}]'
{NODES} deterministic=mesh | wire.secondary=true deterministic=mesh | leave
  | {NODES} ; zero=3 deterministic=mesh
{NODES} stage=2 | wire.secondary=true stage=2 | leave | {NODES} ; zero=3 stage=2
zero=3 wire.secondary=true node=1 | 8 data | wire.secondary=false mesh.node
  | zero=3 wire.secondary=false node=1 ; {NODES}
roll_remat=full | roll_remat=full | model.remat roll_remat=auto | model.remat=full roll_remat=auto
mesh.offload.activations=host stage=2 | activations=host stage=2 | stage=1 device
  | mesh.offload.activations=host stage=1 ; mesh.offload.activations=device stage=2
model.matmul_dtype=fp8 mesh.offload.params=host opt_state=host zero=3 | 8-bit | matmul_dtype=None
  | mesh.offload.params=host opt_state=host zero=3 ; model.matmul_dtype=fp8 zero=3
""",
    ValueError,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", PLANS)
def test_plans(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def plan(words: str) -> None:
        config = load(RunConfig, None, [*shlex.split(TINY), *shlex.split(words)])
        with_rungs(plan_from_config(config, 8))

    PLANS[row].check(plan)
