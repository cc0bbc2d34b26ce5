"""Refusals of keys of a DeepSpeed file and of calls of its engine."""

from __future__ import annotations

import base64
import copy
import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import Refusal, check_words, refused, stands_in, table
from zerojax import deepspeed_config as deepspeed
from zerojax import zoo
from zerojax.config import ConfigError, LogConfig, OptimizerConfig
from zerojax.config.recognition import is_deepspeed
from zerojax.deepspeed_config import CallerValues
from zerojax.deepspeed_config.attention_keys import with_layout
from zerojax.deepspeed_config.compression_keys import check_rounding
from zerojax.deepspeed_config.ds_config import MAX_DIGITS, MAX_NODES
from zerojax.deepspeed_config.expert_keys import check_router
from zerojax.deepspeed_config.key_schema import AbsentFeature, Key, paths
from zerojax.deepspeed_config.keys_table import TABLE
from zerojax.deepspeed_config.optimizer_keys import OPTIMIZERS
from zerojax.deepspeed_engine.engine_absent import ABSENT
from zerojax.models.adapt import as_loss, as_model
from zerojax.tracing.trees import match_names


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def rows(count: int = 16) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def put(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The file with a.b.c set, or taken out where the value is None."""
    result = copy.deepcopy(dict(values))
    *parents, name = path.split(".")
    node = result
    for parent in parents:
        node = node.setdefault(parent, {})
    if value is None:
        node.pop(name, None)
    else:
        node[name] = value
    return result


def as_written(text: str) -> Any:
    """true, 2 or cpu, as it would stand in the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def file(words: str) -> dict[str, Any]:
    """The file of a.b=VALUE, with a norm for clipping."""
    values: dict[str, Any] = {"gradient_clipping": 1.0}
    for word in shlex.split(words):
        path, _, text = word.partition("=")
        values = put(values, path, as_written(text))
    return values


def translated(values: Any, *, num_devices: int | None = None, **given: Any) -> Any:
    return deepspeed.translate(values, num_devices=num_devices, given=CallerValues(**given))


# --- the table of keys ----------------------------------------------------------------------------


def entry_of(path: str) -> Any:
    return functools.reduce(lambda entry, name: entry[name], path.split("."), TABLE)


def wrong_value(entry: Key) -> Any:
    kinds = {"bool": True not in (entry.only or ()), "int": 7, "float": 7.0, "text": "disk"}
    return kinds[entry.kind]


ENTRIES = {path: entry_of(path) for path in paths(TABLE)}
LIMITED = [path for path, entry in ENTRIES.items() if isinstance(entry, Key) and entry.otherwise]
ABSENT_SECTIONS = [path for path, entry in ENTRIES.items() if isinstance(entry, AbsentFeature)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("path", LIMITED)
def test_a_value_that_a_key_does_not_take(path):
    """The message names one that it takes, or several."""
    entry = entry_of(path)
    given = put(file("train_batch_size=8"), path, wrong_value(entry))
    message = refused(lambda: translated(given), [path, wrong_value(entry)], error=ConfigError)
    named = [value for value in entry.only if stands_in(json.dumps(value).strip('"'), message)]
    assert named, message
    for value in named:
        translated(put(given, path, value))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("path", ABSENT_SECTIONS)
def test_a_section_that_is_not_built(path):
    """It is refused where it is on; without it the file is taken."""
    entry, values = (
        entry_of(path),
        ({"enabled": True}, {"mode": "fixed"}, {"part": {"enabled": True}}),
    )
    value = next(value for value in (*values, True) if entry.is_on(value))
    given = put(file("train_batch_size=8"), path, value)
    refused(lambda: translated(given), [path], error=ConfigError)
    translated(put(given, path, None))


Z, ELASTIC, ADAM = "zero_optimization", "elasticity.enabled=true", "optimizer.type=Adam"
MASTERS = "bf16.enabled=true bf16.bf16_master_weights_and_grads=true"
AUTOCAST = "torch_autocast.enabled=true torch_autocast.dtype="
OFFLOAD = f"{Z}.offload_optimizer.device=cpu"
CYCLE = (
    "scheduler.type=OneCycle scheduler.params.cycle_min_lr=1e-3 scheduler.params.cycle_max_lr=1e-2"
)
SPECS = "tensor_parallel.partition_config.layer_specs"

FILES = table(
    f"""
amp.enabled=true | amp | bf16 fp16 | $.enabled=true
comet.enabled=true | comet | tensorboard wandb | $.enabled=true
fp16.enabled=true fp16.fp16_master_weights_and_grads=true | fp16_master_weights_and_grads True
  | false bf16 bf16_master_weights_and_grads
  | fp16.enabled=true fp16.fp16_master_weights_and_grads=false ; {MASTERS} {Z}.stage=1
{Z}.stage=3 {Z}.offload_param.device=disk | offload_param.device disk | none cpu nvme
  | {Z}.stage=3 {Z}.offload_param.device=nvme {Z}.offload_param.nvme_path=files
{ELASTIC} elasticity.version=0.1 elasticity.num_gpus_per_node=2 | elasticity.version 0.1 | 0.2
  | {ELASTIC} elasticity.version=$ elasticity.num_gpus_per_node=2
{ELASTIC} train_batch_size=8 | train_batch_size 8 | elasticity.ignore_non_elastic_batch_info
  | {ELASTIC} ; {ELASTIC} $=true train_batch_size=8
train_batch_sizes=8 | train_batch_sizes 8 | train_batch_size | $=8
{Z}.stag=2 | {Z}.stag | stage | {Z}.$=2
optimizer.type=adamx | adamx | adam | optimizer.type=$
gradient_clipping=null {ADAM} optimizer.params.max_grad_norm=0.5 | max_grad_norm 0.5
  | gradient_clipping | $=0.5 {ADAM}
{ADAM} 'optimizer.params.betas=[0.9, 1.5]' | betas 1.5 | "[0.9, 0.999]"
  | {ADAM} 'optimizer.params.betas=$'
{ADAM} optimizer.params.eps=0 | eps 0.0 | 1e-8 | {ADAM} optimizer.params.eps=$
{ADAM} optimizer.params.fp32_optimizer_states=false | fp32_optimizer_states False
  | bf16.bf16_optimizer_states | {ADAM} {Z}.stage=1 {MASTERS} $=true
bf16.enabled=true bf16.bf16_optimizer_states=true {Z}.stage=1 | bf16_optimizer_states
  | bf16_master_weights_and_grads | {MASTERS} bf16.bf16_optimizer_states=true {Z}.stage=1
{MASTERS} | bf16_master_weights_and_grads | 1 2 3 | {MASTERS} {Z}.stage=$
optimizer.type=SGD optimizer.params.dampening=0.1 | dampening 0.1 | 0
  | optimizer.type=SGD optimizer.params.dampening=$
fp16.enabled=true bf16.enabled=true | bf16.enabled fp16 | | fp16.enabled=true ; bf16.enabled=true
bf16.enabled=true {AUTOCAST}float16 | torch_autocast.dtype float16 fp16 | bf16
  | bf16.enabled=true {AUTOCAST}bfloat16 ; bf16.enabled=true
{AUTOCAST}float64 | torch_autocast.dtype float64 | bfloat16 float16 | {AUTOCAST}$
{Z}.stage=2 {Z}.reduce_scatter=false | reduce_scatter False | true
  | {Z}.stage=2 {Z}.reduce_scatter=$
{Z}.stage=3 {Z}.stage3_model_persistence_threshold=1000 | stage3_model_persistence_threshold 1000
  | stage3_param_persistence_threshold | {Z}.stage=3 {Z}.$=10
pipeline.partition=type:Block | pipeline.partition type:Block | uniform parameters best
  | pipeline.partition=$
{Z}.stage=2 {Z}.mics_shard_size=4 | mics_shard_size 4 2 | 3 | {Z}.stage=$ {Z}.mics_shard_size=4
'{SPECS}=[{{"partition_type": "both"}}]' | partition_type both | row column skip
  | '{SPECS}=[{{"patterns": ["x"], "partition_type": "$"}}]'
{Z}.stage=2 {OFFLOAD} {Z}.cpu_offload=true | cpu_offload offload_optimizer | old
  | {Z}.stage=2 {OFFLOAD}
{Z}.stage=2 {OFFLOAD} {Z}.offload_optimizer.ratio=0.5 | ratio 0.5 2 | 3
  | {Z}.stage=$ {OFFLOAD} {Z}.offload_optimizer.ratio=0.5
{Z}.stage=3 {OFFLOAD} {Z}.offload_optimizer.ratio=2 | ratio 2.0 | 0 1
  | {Z}.stage=3 {OFFLOAD} {Z}.offload_optimizer.ratio=$
checkpoint.tag_validation=maybe | tag_validation maybe | WARN IGNORE FAIL
  | checkpoint.tag_validation=$
log_level=loud | log_level loud | debug info warning error critical | log_level=$
steps_per_print=0 | steps_per_print 0 | 1 | steps_per_print=$
wandb.enabled=true wandb.group=mine | wandb.group mine | WANDB_RUN_GROUP | wandb.enabled=true
train_batch_size=0 | train_batch_size 0 | 1 | train_batch_size=$
train_batch_size=12345678901234567890x | train_batch_size 12345678901234567890x | integer
  | 'train_batch_size="8"'
{Z}.stage=1 {Z}.reduce_bucket_size=-5 | reduce_bucket_size -5 | 0
  | {Z}.stage=1 {Z}.reduce_bucket_size=$
hybrid_engine.enabled=false hybrid_engine.max_out_token=3 | max_out_token | max_out_tokens
  | hybrid_engine.enabled=false hybrid_engine.$=3
optimizer.type=Muon optimizer.params.lr=0.01 {CYCLE} | betas | cycle_momentum false
  | optimizer.type=Muon optimizer.params.lr=0.01 {CYCLE} scheduler.params.cycle_momentum=false
optimizer.params.lr=1e-3 scheduler.type=WarmupLR optimizer.type=Adam
    'scheduler.params.warmup_max_lr=[1, 2]'
  | "[1, 2]" | one groups | optimizer.params.lr=1e-3 optimizer.type=Adam scheduler.type=WarmupLR
    scheduler.params.warmup_max_lr=0.1
scheduler.params.warmup_num_steps=3 | scheduler.params | scheduler.type
  | $=WarmupLR scheduler.params.warmup_num_steps=3
""",
    ConfigError,
)
FILES["a number of too many digits"] = Refusal(
    f"'train_batch_size=\"{'8' * 400}\"'", "train_batch_size", "integer", ["train_batch_size=8"]
)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("row", FILES)
def test_keys(row):
    FILES[row].check(lambda words: translated(file(words)))


ADAM += " optimizer.params.lr=1e-3"
SCHEDULE = "scheduler.type=WarmupLR scheduler.params.warmup_type=linear"
DECAY = f"{ADAM} scheduler.type=WarmupDecayLR scheduler.params.warmup_type=linear"
DECAY += " scheduler.params.total_num_steps="
SIZES = "train_micro_batch_size_per_gpu=2 gradient_accumulation_steps=2"
ELASTIC += " elasticity.max_train_batch_size=100"
SGD = optax.sgd(1e-3)
CLIPPED = zerojax.adamw(1e-3, clip_norm=1.0)
LOG, SLOW = LogConfig(every=2), OptimizerConfig(learning_rate=1e-4)

LION, OF_ADAMW = OptimizerConfig(name="lion"), OptimizerConfig(name="adamw")
SCALED = OptimizerConfig(scaling="linear", base_batch=8)

CALLS = table(
    f"""
train_batch_size=30 {SIZES} & num_devices=8 | train_batch_size 30 8 | 32
  | train_batch_size=$ {SIZES} & num_devices=8 ; {SIZES} & num_devices=8
train_batch_size=30 & num_devices=8 | train_batch_size 30 8 | 24 32
  | train_batch_size=$ & num_devices=8
train_batch_size=32 & global_batch_size=16 | train_batch_size 32 16 | 32 auto
  | train_batch_size=32 & global_batch_size=32 ; train_batch_size=auto & global_batch_size=16
gradient_accumulation_steps=2 & num_microbatches=4
  | gradient_accumulation_steps 2 num_microbatches 4 | auto
  | gradient_accumulation_steps=$ & num_microbatches=4
{ELASTIC} & global_batch_size=16 | max_train_batch_size 100 16 | 96
  | {ELASTIC} & global_batch_size=$
{ELASTIC} & num_devices=11 | elasticity 11 96 | 12 1 | {ELASTIC} & num_devices=$
{DECAY}auto | total_num_steps auto | steps | {DECAY}auto & $=100 ; {DECAY}9
{Z}.stage=1 {Z}.reduce_bucket_size=auto | reduce_bucket_size auto hidden_size | number
  | {Z}.stage=1 {Z}.reduce_bucket_size=1000
bf16.enabled=true & precision="fp16" | bf16.enabled True fp16 | auto
  | bf16.enabled=true ; bf16.enabled=$ & precision="fp16"
{ADAM} & optimizer=SLOW | optimizer.params.lr 0.001 0.0001 | auto
  | {ADAM} optimizer.params.lr=$ & optimizer=SLOW
communication_data_type=bf16 bf16.enabled=true & reduce_dtype="fp32"
  | communication_data_type bf16 reduce_dtype fp32 |
  | bf16.enabled=true & reduce_dtype="fp32" ; communication_data_type=bf16 bf16.enabled=true
{ADAM} & optimizer=SGD | optimizer.type Adam | | {ADAM} ; & optimizer=SGD
gradient_clipping=0.5 & optimizer=CLIPPED | gradient_clipping 0.5 1.0 | clip_norm=0.5
  | gradient_clipping=0.5 & optimizer=zerojax.adamw(1e-3, $)
gradient_clipping=0.0 & optimizer=CLIPPED | gradient_clipping 0.0 1.0 | clip_norm=None
  | gradient_clipping=0.0 & optimizer=zerojax.adamw(1e-3, $)
{SCHEDULE} & optimizer=SGD | scheduler WarmupLR | optimizer | {SCHEDULE} {ADAM} ; & optimizer=SGD
{SCHEDULE} & optimizer=LION | scheduler WarmupLR | optimizer adamw
  | {SCHEDULE} {ADAM} ; {SCHEDULE} & optimizer=OF_ADAMW
{SCHEDULE} & optimizer=SCALED | scheduler WarmupLR linear | scaling
  | {SCHEDULE} & optimizer=OF_ADAMW ; & optimizer=SCALED
steps_per_print=5 & log=LOG | steps_per_print 5 log.every | 2
  | steps_per_print=$ & log=LOG ; & log=LOG
data_parallel_size=4 & num_devices=8 | data_parallel_size 4 | 8
  | data_parallel_size=$ & num_devices=8 ; & num_devices=8
""",
    ConfigError,
)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", CALLS)
def test_calls(row):
    """Behind `&` stand keywords of the call."""

    def take(text: str) -> None:
        words, _, options = text.partition("&")
        translated(file(words), **eval(f"dict({options})"))

    CALLS[row].check(take)


ONE_BIT, LAMB = (
    f"optimizer.type={name} optimizer.params.lr=1e-3" for name in ("OneBitAdam", "Lamb")
)
DROP = "progressive_layer_drop.enabled=true progressive_layer_drop.theta=0.5"
CURRICULUM = (
    "curriculum_learning.enabled=true curriculum_learning.schedule_type=fixed_discrete "
    "'curriculum_learning.schedule_config.difficulty=[8, 16]' "
    "'curriculum_learning.schedule_config.max_step=[5]'"
)
PRUNED = (
    "compression_training.row_pruning.shared_parameters.enabled=true "
    """'compression_training.row_pruning.different_groups.g={"params": {"dense_ratio": 0.5}, """
    """"modules": ["."]}'"""
)
ON_HOST, LAYERS_ON_HOST = (
    f"{Z}.stage=3 {Z}.offload_{name}.device=cpu" for name in ("optimizer", "param")
)
MASKED = "sparse_attention.mode=fixed sparse_attention.block=4"

STAGES = "gradient_accumulation_steps=2 pipeline.stages="

TOGETHER = table(
    f"""
{ONE_BIT} {DROP} {MASKED} | layer_drop 1-bit | adamw | {ADAM} {DROP} {MASKED} ; {ONE_BIT} {MASKED}
{ONE_BIT} {CURRICULUM} | curriculum 1-bit | adamw | {ADAM} {CURRICULUM}
{ONE_BIT} {PRUNED} | pruning 1-bit | adamw | {ADAM} {PRUNED}
{ONE_BIT} {Z}.stage=2 | "1-bit Adam" zero=2 | 0 1 | {ONE_BIT} {Z}.stage=$
{ONE_BIT} {STAGES}2 | "1-bit Adam" stage=2 | leave | {ADAM} {STAGES}2
{DROP} {ON_HOST} | layer_drop offload | leave | {DROP} ; {ON_HOST}
{DROP} sequence_parallel_size=2 | layer_drop context=2 | 1 | {DROP} sequence_parallel_size=$
{CURRICULUM} {LAYERS_ON_HOST} | curriculum offload | leave | {CURRICULUM} ; {LAYERS_ON_HOST}
{PRUNED} {ON_HOST} | pruning offload | leave | {PRUNED} ; {ON_HOST}
{LAMB} {ON_HOST} | offload opt_state slices | adamw | {ADAM} {ON_HOST}
{LAMB} {MASTERS} {Z}.stage=1 | param_dtype | adamw | {ADAM} {MASTERS} {Z}.stage=1
{LAYERS_ON_HOST} {STAGES}2 | offload.params=host stage=2 | stage=1 | {LAYERS_ON_HOST}
activation_checkpointing.cpu_checkpointing=true {STAGES}2 | activations=host stage=2 | stage=1
  | activation_checkpointing.cpu_checkpointing=true {STAGES}1
sparse_gradients=true {Z}.stage=1 {Z}.offload_optimizer.device=cpu | lookup=owners offload
  | lookup=gather | {Z}.stage=1 {Z}.offload_optimizer.device=cpu ; sparse_gradients=true {Z}.stage=1
sequence_parallel_size=2 {STAGES}2 | context=2 stage=2 | stage=1
  | sequence_parallel_size=2 {STAGES}1
sequence_parallel_size=2 {MASKED} | context layout | context=1 | sequence_parallel_size=1 {MASKED}
"""
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("num_devices", [8, None])
@pytest.mark.parametrize("row", TOGETHER)
def test_settings_that_exclude_each_other(row, num_devices):
    """The explanation has the words with which a plan of any model begins."""

    def take(words: str) -> None:
        says = deepspeed.explain(file(words), num_devices=num_devices)
        if not says.conflicts:
            return
        assert "refused together on" in deepspeed.explanation(says)
        if says.attention_layout is None and num_devices == jax.device_count():
            planned = lambda: initialize(file(words), example_batch=rows())  # noqa: E731
            assert refused(planned) == says.conflicts[0]
        raise ValueError(says.conflicts[0])

    TOGETHER[row].check(take)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("Adagrad", "optax.adagrad(lr)"),
        ("OneBitLamb", "Lamb"),
        ("OneBitLamb", "OneBitAdam"),
        ("ZeroOneAdam", "OneBitAdam"),
        ("MuAdam", "Adam"),
        ("MuSGD", "SGD"),
    ],
)
def test_an_optimizer_that_is_not_here(kind, remedy):
    typed = lambda kind: translated(  # noqa: E731
        file(f"optimizer.type={kind} optimizer.params.lr=1e-3")
    )
    refused(lambda: typed(kind), ["optimizer.type", kind], remedy, error=ConfigError)
    if remedy.lower() in OPTIMIZERS:
        typed(remedy)
    else:
        tx = eval(remedy, {"optax": optax, "lr": 1e-3})
        assert isinstance(tx, optax.GradientTransformation)
        translated(file(""), optimizer=tx)


def test_patterns_on_names_of_torch():
    """Those on names of torch match nothing here; those on the names of the message do."""
    with initialize() as engine:
        names = [*engine.prepare(rows()).placement.leaves]
    rules = lambda name: match_names(names, [name], option="rules")  # noqa: E731
    wrong, known = r"layers/\\d+/kernel", ["out/bias", "out/kernel"]
    refused(lambda: rules(r"layers/\d+/kernel"), [wrong, 2], known[1:])
    for name in known:
        assert rules(name) == {name}


# --- files ----------------------------------------------------------------------------------------


def test_what_is_no_file(tmp_path):
    remedy = "ds_config.json MeshConfig"
    refused(lambda: translated("no_such_file"), "no_such_file", remedy, error=ConfigError)
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    translated(path)
    translated(base64.urlsafe_b64encode(path.read_bytes()).decode())


@pytest.mark.parametrize(
    ("text", "value", "remedy", "good"),
    [
        ("[1]", "list", ['{"train_batch_size": 32}'], '{"train_batch_size": 32}'),
        ('{"steps_per_print": NaN}', "steps_per_print NaN", "finite", '{"steps_per_print": 3}'),
        (
            '{"train_batch_size": 8, "train_batch_size": 9}',
            "train_batch_size 8 9",
            "",
            '{"train_batch_size": 8}',
        ),
        ('{"a": ' * 500 + "1" + "}" * 500, "64", "fewer", '{"train_batch_size": 8}'),
        (
            f'{{"train_batch_size": {"8" * 5000}}}',
            "5,000",
            str(MAX_DIGITS),
            '{"train_batch_size": 8}',
        ),
        (
            f'{{"a": [{", ".join("1" * MAX_NODES)}]}}',
            f"{MAX_NODES:,}",
            "remove",
            '{"train_batch_size": 8}',
        ),
    ],
    ids=["list", "nan", "twice", "deep", "digits", "many"],
)
def test_text_of_a_file(text, value, remedy, good, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    refused(lambda: translated(path), [*value.split(), path], remedy, error=ConfigError)
    path.write_text(good)
    translated(path)


def test_a_file_of_hjson(tmp_path, monkeypatch):
    path = tmp_path / "ds_config.json"
    path.write_text("{\n  # rows of a step\n  train_batch_size: 8\n}")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hjson", None)
        remedy = ["pip install 'zerojax[hjson]'"]
        refused(lambda: translated(path), [f"{path}:2"], remedy, error=ConfigError)
    pytest.importorskip("hjson", reason="the extra has the name of its package")
    translated(path)


def test_keys_of_a_mesh_and_of_a_file():
    given = {"zero": 2, "train_batch_size": 8}
    remedy = ["zero_optimization: {stage: N}"]
    refused(lambda: is_deepspeed(given), "zero train_batch_size", remedy, error=ConfigError)
    del given["zero"]
    assert is_deepspeed(given)
    translated({**given, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}})


# --- sections that describe the model -------------------------------------------------------------

SIZES_OF_A_MODEL = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "embed_dim": 16}


def built(given: tuple[str, dict[str, Any]]) -> None:
    """A file with these words, and a reference model with these settings."""
    words, options = given
    says = translated(file(f"train_batch_size=16 {words}"))
    config = zoo.LlamaConfig(**SIZES_OF_A_MODEL, max_seq_len=16, **options)
    model = as_model(lambda rngs: zoo.Llama(config, rngs=rngs))
    tokens = np.zeros((16, 8), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    check_router(model, says.router)
    init_of = functools.partial(model.init, jax.random.key(0), batch)
    jax.eval_shape(lambda: jax.tree.leaves(init_of(as_loss(None, model))))
    check_rounding(model, says.rounding)
    with_layout(model, None, says.attention_layout)


ROUTED = "expert_parallel.enabled=true expert_parallel.autoep_size=1 expert_parallel.top_k="
MOE = zerojax.config.MoEConfig(num_experts=4, experts_per_token=2, expert_dim=8)
SPARSE = "sparse_attention.mode=fixed sparse_attention.block=16"
FIXED = zerojax.config.FixedLayout(block=16)
GROUPS = "compression_training.weight_quantization"
ROUNDED = (
    f"{GROUPS}.shared_parameters.enabled=true {GROUPS}.different_groups.g.params.start_bits=10"
    f" {GROUPS}.different_groups.g.params.target_bits=8"
    f" {GROUPS}.different_groups.g.params.quantization_period=2"
    f" {GROUPS}.different_groups.g.modules="
)
LAYERS = f"""{ROUNDED}'["blocks/"]'"""
INT8 = {
    "matmul_dtype": "fake_int8",
    "bit_schedule": zerojax.config.BitScheduleConfig(start_bits=10, period=2),
}
DESCRIBED = {
    "a router of another model": Refusal(
        (f"{ROUTED}4", {"moe": MOE}),
        "4 moe.experts_per_token=2",
        "remove build",
        [("", {"moe": MOE}), (f"{ROUTED}2", {"moe": MOE})],
    ),
    "rounding of another model": Refusal(
        (LAYERS, {}),
        "matmul_dtype=fake_int8 matmul_dtype=None",
        "zerojax.zoo remove",
        [(LAYERS, INT8), ("", {})],
    ),
    "rounding of other kernels": Refusal(
        (f"""{ROUNDED}'["mlp"]'""", INT8), "mlp", "['blocks/']", [(LAYERS, INT8)]
    ),
    "another layout": Refusal(
        (SPARSE, {}),
        "fixed attention_layout=None",
        "zerojax.config.FixedLayout remove",
        [(SPARSE, {"attention_layout": FIXED}), ("", {})],
    ),
}


@pytest.mark.parametrize("row", DESCRIBED)
def test_sections_that_describe_the_model(row):
    DESCRIBED[row].check(built)


def test_a_router_of_a_model_without_one():
    check = lambda says: check_router(as_model(Line), says)  # noqa: E731
    Refusal({"top_k": 2}, "2 zerojax.config.MoEConfig", "remove", [{}], ConfigError).check(check)


def test_a_layout_of_attention_that_nothing_calls():
    layout = translated(file(f"train_batch_size=16 {SPARSE}")).attention_layout

    def plan(given: tuple[bool, Any]) -> None:
        calls, layout = given

        def loss(model: Any, batch: Any) -> jax.Array:
            x = model(batch["x"])
            heads = x[:, :, None, None] * jnp.ones((1, 1, 2, 4))
            return jnp.mean(zerojax.attention(heads, heads, heads) if calls else x)

        own = with_layout(as_model(Line), loss, layout)
        batch = {"x": np.ones((16, 8), np.float32)}
        zerojax.make_plan(Line, {}, example_batch=batch, loss=own)

    good = [(True, layout), (False, None)]
    Refusal((False, layout), "fixed", "zerojax.attention remove", good).check(plan)


# --- the engine -----------------------------------------------------------------------------------

CONFIG = file(f"train_batch_size=16 fp16.enabled=true {ADAM}")


def initialize(config: Any = None, **options: Any) -> Any:
    return zerojax.initialize(Line, config or CONFIG, **{"loss": squared, **options})


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with initialize() as engine:
        engine.train_batch(rows())
        yield engine


def test_how_an_engine_is_given_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    start = functools.partial(zerojax.initialize, loss=squared)
    remedy = "\"zerojax.initialize(model, config='ds_config.json')\""
    refused(lambda: start(Line), "configuration", remedy, error=TypeError)
    refused(lambda: initialize(config_params=CONFIG), "config_params", remedy, error=TypeError)
    start(Line, config="ds_config.json").close()
    args = type("Args", (), {"deepspeed_config": "ds_config.json"})()
    refused(lambda: start(args, Line), "first model", "args=args", error=TypeError)
    start(Line, args=args).close()


@pytest.mark.thorough
def test_an_engine_without_a_batch(tmp_path):
    with initialize(put(CONFIG, "train_batch_size", None)) as engine:
        refused(engine.train_batch_size, "batch", "train_batch_size")
        engine.prepare(rows())
        assert engine.train_batch_size() == 16  # later
    with initialize() as engine:
        assert engine.train_batch_size() == 16
        refused(lambda: engine.save_checkpoint(tmp_path), "batch", "example_batch")
        refused(lambda: engine.reshard({"zero": 3}), "batch", "configuration")
    with initialize(example_batch=rows()) as engine:
        assert engine.save_checkpoint(tmp_path)
    with initialize(put(CONFIG, "zero_optimization.stage", 3)) as engine:
        assert engine.zero_optimization_stage() == 3


def test_a_rate_that_only_the_schedule_knows():
    schedule = optax.constant_schedule(1e-3)
    config = put(CONFIG, "optimizer", None)
    with initialize(config, optimizer=optax.sgd(schedule)) as engine:
        engine.prepare(rows())
        assert engine.get_lr() == pytest.approx([1e-3])
    with initialize(config, optimizer=optax.adafactor(schedule)) as engine:
        engine.prepare(rows())
        refused(engine.get_lr, '"learning rate" optax', "schedule")
        assert schedule(engine.global_steps) == pytest.approx(1e-3)


def test_what_stands_in_place_of_one_batch(engine):
    loader = [rows()]
    refused(lambda: engine.train_batch(rows(8)), "8 train_batch_size", "16")
    engine.train_batch(rows(16))
    refused(engine.train_batch, "", "batch data_iter=", error=TypeError)
    remedy = '"it = iter(loader)" data_iter=it'
    for value, wrong in (
        ("list_iterator", lambda: engine.train_batch(iter(loader))),
        ("list", lambda: engine.train_batch(data_iter=loader)),
    ):
        refused(wrong, value, remedy, error=TypeError)
    it = iter(loader)
    assert np.isfinite(float(engine.train_batch(data_iter=it)))


def test_a_loop_of_deepspeed(engine):
    remedy = '"loss = engine.train_batch(batch)"'
    for value, given, error in (
        ("engine(batch)", lambda: engine(rows()), TypeError),
        ("backward", lambda: engine.backward, AttributeError),
        ("step", lambda: engine.step, AttributeError),
    ):
        refused(given, value, remedy, error=error)
    assert np.isfinite(float(engine.train_batch(rows())))
    for given in (lambda: [*engine], lambda: engine[0]):
        refused(given, "engine", '"engine = zerojax.initialize(...)"', error=TypeError)


def test_what_the_engine_has_in_place_of_a_name(engine):
    """Each expression in the messages about names of DeepSpeed that are not here."""
    written: set[str] = set()
    for name in (*ABSENT, "get_data_parallel_rank", "zero_allow_untested_optimizer"):
        ask = functools.partial(getattr, engine, name)
        message = refused(ask, [name], error=AttributeError)
        written |= {*re.findall(r"\b(?:engine|jax)(?:\.\w+)+(?:\(\)|\['\w+'\])?", message)}
    absent = ("engine.backward", "engine.step", "engine.train_batch")
    written = {text for text in written if not text.startswith(absent)}
    assert len(written) > 12
    for text in sorted(written):
        assert eval(text, {"engine": engine, "jax": jax}) is not None, text


def test_tags_of_checkpoints(engine, tmp_path):
    refused(lambda: engine.save_checkpoint(tmp_path, "a/b"), "a/b latest", "global_step100")
    engine.save_checkpoint(tmp_path, "global_step100", save_latest=False)
    load, error = (
        lambda *tag: engine.load_checkpoint(tmp_path, *tag),
        zerojax.errors.CheckpointError,
    )
    refused(lambda: load("other"), ["other", tmp_path], "global_step100", error=error)
    assert load("global_step100")[0] is not None
    with pytest.warns(RuntimeWarning, match="latest") as caught:
        assert load() == (None, {})
    check_words(str(caught[0].message), "load_checkpoint tag")


def test_folders_of_tags_that_hold_other_files(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "mine")
    file = next(path for path in tmp_path.iterdir() if path.is_dir()) / "notes.txt"
    file.touch()
    save = lambda tag: engine.save_checkpoint(tmp_path, tag)  # noqa: E731
    error = zerojax.errors.CheckpointError
    Refusal("mine", [file.parent, "notes.txt"], "another move", ["other"], error).check(save)
    file.rename(tmp_path / "notes.txt")
    save("mine")


@pytest.mark.thorough
def test_the_state_in_durable_files_stays_on_its_mesh(tmp_path):
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "files")}
    given = put(file(f"train_batch_size=16 {ADAM}"), Z, {"stage": 2, "offload_optimizer": offload})
    durable = {"opt_state": "nvme", "durable": True, "folder": str(tmp_path / "durable")}
    with initialize(given, example_batch=rows()) as engine:
        engine.reshard({"zero": 2, "offload": durable | {"min_elements": 1}})
        refused(
            lambda: engine.reshard({"zero": 3}),
            "durable mesh",
            "save_checkpoint initialize load_checkpoint",
        )
        engine.save_checkpoint(tmp_path / "kept")
    with initialize(put(given, Z, {"stage": 3})) as engine:
        assert engine.load_checkpoint(tmp_path / "kept")[0] is not None
        engine.prepare(rows())
        assert engine.state is not None
