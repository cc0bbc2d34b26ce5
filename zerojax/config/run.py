"""Options of a run: the name, unit and default of each option, and the reason for the default.

The dataclasses are frozen and validated when they are created. They import no JAX and read no
files.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from zerojax.config.attention_layouts import LayoutConfig
from zerojax.config.batch_division import BatchDivision
from zerojax.config.batch_ramp import BatchRampConfig
from zerojax.config.checks import (
    MAX_LAYERS,
    check_at_least,
    check_folder,
    check_fraction,
    check_positive,
    check_regex,
    check_size,
    expand_folders,
    names_keywords,
    refuse,
)
from zerojax.config.compression import BitScheduleConfig, PruningConfig
from zerojax.config.curriculum import CurriculumConfig
from zerojax.config.elasticity import ElasticBatch, ElasticityConfig
from zerojax.config.expect import ExpectConfig
from zerojax.config.expert_settings import MoEConfig
from zerojax.config.features import Features
from zerojax.config.layer_drop import LayerDropConfig
from zerojax.config.loader import ConfigError, coerce_fields, from_dict, load_dataclass, to_dict
from zerojax.config.mesh import MeshConfig, OffloadConfig, WireConfig, as_mesh_config
from zerojax.config.sections import (
    CheckpointConfig,
    LogConfig,
    LoraConfig,
    LossScale,
    MixturePart,
    WatchConfig,
    describe_loss_scale,
)
from zerojax.config.sweep_settings import SweepConfig

__all__ = [
    "BitScheduleConfig",
    "CheckpointConfig",
    "ConfigError",
    "CurriculumConfig",
    "DataConfig",
    "ElasticBatch",
    "ElasticityConfig",
    "LayerDropConfig",
    "LogConfig",
    "LoraConfig",
    "LossScale",
    "MeshConfig",
    "MixturePart",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "PruningConfig",
    "RunConfig",
    "WatchConfig",
    "WireConfig",
    "as_mesh_config",
    "describe_loss_scale",
    "from_dict",
    "load",
    "to_dict",
]

T = TypeVar("T")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of one of the built-in language models. The defaults are a GPT with 3 million
    parameters."""

    name: Literal["gpt2", "llama"] = "gpt2"
    """Architecture of the model."""
    vocab_size: int | None = None
    """Number of rows of the embedding. null: the tokenizer's vocabulary size."""
    max_seq_len: int = 256
    """Number of tokens of the longest sequence that the position embedding (gpt2) or the cache
    (llama) holds."""
    num_layers: int = 4
    """Number of blocks. Blocks are stacked and scanned, so compile time does not grow with their
    number."""
    num_heads: int = 4
    """Number of query heads. The default gives 256 / 4 = 64 features per head, the usual head
    width."""
    num_kv_heads: int | None = None
    """Number of key and value heads (llama only). null: the number of query heads."""
    embed_dim: int = 256
    """Width of the residual stream."""
    mlp_dim: int | None = None
    """Hidden width of the MLP. null: 4 x embed_dim (gpt2), 8/3 x embed_dim rounded up (llama)."""
    dropout: float = 0.0
    """Dropout probability. The default is 0 because most pretraining sees each token about once."""
    remat: Literal["none", "full", "attention", "dots"] = "none"
    """Activation checkpointing of each block: none stores all activations, dots stores matrix
    products, full stores only the block's input, attention stores the input and the result of
    attention (chunked, cudnn or mosaic_gpu)."""
    loss_chunk: int | Literal["auto"] | None = "auto"
    """Number of tokens whose logits the loss computes at once; null: all. auto: at most 3072 with
    products of 16 bits, 1024 with float32. With a vocabulary of 128 thousand, 8192 tokens and width
    2048, the default lets the loss need 1.8 GB instead of 6.3 GB, and 1024 lets it need 1.1 GB
    (compiled for an H200), with the same products. Fewer tokens move more bytes: each chunk reads
    and writes the head's float32 gradient."""
    mlp_chunk: int | None = None
    """Number of tokens of a row whose hidden MLP activations a layer computes at once, for long
    rows; null: all. The products are the same, but the backward pass recomputes those of the
    forward pass, as with remat full."""
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    matmul_dtype: Literal["fp8", "fake_int8", "fake_int4"] | None = None
    """Dtype of the blocks' matrix products. null: the compute dtype of `precision`. fp8: 8-bit
    floats (e4m3, gradients e5m2) with delayed scaling; attention scores, embedding and head keep
    their dtype. With precision fp32 the other operations are float32, which is no faster but shows
    the effect of fp8 alone. fake_int8, fake_int4: quantization-aware training, in which products
    are in the compute dtype but kernels are rounded to the integers that an export with quantize
    stores."""
    bit_schedule: BitScheduleConfig = dataclasses.field(default_factory=BitScheduleConfig)
    attention: Literal["auto", "xla", "chunked", "cudnn", "mosaic_gpu"] = "auto"
    """Implementation of attention. xla stores the scores of all pairs of tokens of a row; chunked
    stores one block of scores at a time, for long rows; cudnn is NVIDIA's fused kernel, which
    stores no scores; mosaic_gpu is zerojax's own kernel for Hopper, which supports packed texts and
    layouts and took 1.03 to 1.70 times as long as cudnn on an H100. auto: cudnn on GPUs if it
    supports the case (16-bit floats, no packed texts, no layout), else chunked with a layout or
    above 4096 tokens, else xla."""
    attention_layout: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    attention_window: int | None = None
    """Number of tokens that each token attends to, including itself: a sliding window in all
    layers. null: each token attends to all earlier tokens."""
    tie_embeddings: bool | None = None
    """Whether the head reuses the embedding. null: true for gpt2, false for llama."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions (llama only)."""
    norm_eps: float = 1e-5
    """Small number that norms add to the variance; the value of GPT-2 and Llama."""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    pretrained: str | None = None
    """Hugging Face folder (config.json, *.safetensors) with the initial weights. The folder sets
    the model's sizes; only dropout, remat, loss_chunk, mlp_chunk, matmul_dtype, bit_schedule,
    attention, attention_layout and lora are set in this section."""
    config: str | None = None
    """config.json of Hugging Face, or its folder, for a model of these sizes whose new weights are
    drawn from the seed. It replaces the same settings as `pretrained`."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "pretrained", "config")
        if self.pretrained is not None and self.config is not None:
            refuse(
                "config",
                self.config,
                "cannot be combined with model.pretrained, which has its own config",
            )
        if self.sizes_file is not None:
            self._check_sizes_are_theirs()
        check_size(self, "vocab_size", "max_seq_len", "num_heads", "embed_dim", "num_kv_heads")
        check_size(self, "mlp_dim", "mlp_chunk", "attention_window")
        if self.loss_chunk != "auto":
            check_size(self, "loss_chunk")
        check_size(self, "num_layers", most=MAX_LAYERS)
        check_fraction(self, "dropout", below_one=True)
        check_positive(self, "rope_theta", "norm_eps")
        if self.embed_dim % self.num_heads:
            # Rotary positions rotate pairs of a head's features.
            unit = self.num_heads * (2 if self.name == "llama" else 1)
            near = self.embed_dim - self.embed_dim % unit or unit
            refuse(
                "embed_dim",
                self.embed_dim,
                f"is not divisible by num_heads ({self.num_heads}); use {near}",
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            refuse(
                "num_kv_heads",
                self.num_kv_heads,
                f"does not divide num_heads ({self.num_heads}); use 1 or {self.num_heads}",
            )

    @property
    def sizes_file(self) -> str | None:
        """File or folder that sets the model's sizes instead of this section's fields; None if the
        fields set them."""
        return self.pretrained or self.config

    def _check_sizes_are_theirs(self) -> None:
        what = "the folder of model.pretrained" if self.pretrained else "the file of model.config"
        free = ("dropout", "remat", "loss_chunk", "mlp_chunk", "matmul_dtype", "attention")
        free = (*free, "bit_schedule", "attention_layout", "lora", "pretrained", "config")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            if field.name not in (*free, "vocab_size") and value != default:
                refuse(field.name, value, f"is set by {what}; leave it out")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the training data: its source, its tokens and its order."""

    path: str | None = None
    """Path of a text file, of a folder of text files, or of an output folder of `zerojax data
    prepare`. null: the Shakespeare text inside the package."""
    mixture: tuple[MixturePart, ...] = ()
    """Several data sets instead of path: [{path: a, weight: 3}, {path: b, at_end: stop}]."""
    tokenizer: str = "bytes"
    """"bytes" (256 tokens), "bpe:2048" (trained on the corpus), or a tokenizer file: a file of
    zerojax, a model's tokenizer.json, or its folder. With model.pretrained or model.config "bytes"
    means the tokenizer.json of that folder, if it has one."""
    seq_len: int = 256
    """Number of tokens of one training example."""
    validation_fraction: float = 0.05
    """Fraction of the corpus, from its end, that is used for validation only."""
    shuffle_seed: int | None = None
    """Seed of the order of examples. null: the run's `seed`."""
    pack: bool = False
    """Whether texts in the same row are separated: tokens attend only to their own text, and no
    loss crosses from one text to the next. Needs a tokenizer with an id for the end of a text,
    which bytes lacks. Chats are always packed whole."""
    long_texts: Literal["refuse", "split", "drop"] = "refuse"
    """Treatment of chats that are longer than a row: refuse raises an error, split makes several
    rows, drop leaves the chat out."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "path", "tokenizer")
        check_size(self, "seq_len")
        if self.mixture and self.path is not None:
            refuse(
                "path",
                self.path,
                "cannot be combined with data.mixture; write all paths in the mixture",
            )
        check_fraction(self, "validation_fraction", below_one=True)


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Optimizer settings of the parameters whose names match a regular expression."""

    learning_rate_factor: float = 1.0
    """Factor that multiplies the optimizer's learning rate for these parameters."""
    weight_decay: float | None = None
    """Weight decay of these parameters, as far as the optimizer's mask allows decay. null: the
    optimizer's weight decay."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "learning_rate_factor", "weight_decay")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule. The defaults are those of GPT-3.

    A run that sets no optimizer uses these defaults.
    """

    name: Literal["adamw", "lion", "sgd", "lamb", "adam8bit"] = "adamw"
    """Optimizer; adam8bit is AdamW with 8-bit moments."""
    learning_rate: float = 3e-4
    """Highest learning rate of the schedule."""
    scaling: Literal["linear", "sqrt"] | None = None
    """Rule by which the learning rate follows the batch size: it is multiplied by the number of
    rows of the step's batch, divided by base_batch, or by the square root of this. null: it does
    not depend on the batch."""
    base_batch: int | None = None
    """Number of rows of the batch for which learning_rate is set, for scaling only."""
    beta1: float = 0.9
    """Decay of the first moment; for sgd the momentum."""
    beta2: float = 0.95
    """Decay of the second moment; 0.95 forgets faster than 0.999, so that spikes of the loss do
    less harm."""
    eps: float = 1e-8
    """Small number that is added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay per unit of learning rate. It applies to matrices only, not to biases, norms and
    scales."""
    nesterov: bool = False
    """Whether sgd uses Nesterov momentum."""
    groups: tuple[tuple[str, ParameterGroup], ...] = ()
    """Settings for parameters by name: {regular expression on the parameter's name:
    {learning_rate_factor: 0.1, weight_decay: 0}}. The first matching expression counts. Settings
    that a group omits are those of the other parameters."""
    impl: Literal["auto", "xla", "mosaic_gpu", "interpret"] = "auto"
    """Implementation of the update. auto: as mesh.kernels chooses; xla or mosaic_gpu: this
    implementation, or an error; interpret: the kernel on the CPU, slowly, for tests."""
    clip_norm: float | None = 1.0
    """Limit of the global gradient norm; null: no clipping."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up: cosine or linear decay to the end, constant, or wsd
    (constant, then a linear decay)."""
    warmup_steps: int | None = None
    """Number of steps in which the learning rate rises linearly from 0. null: 2 % of the run, at
    least 10 (second moments need about 1 / (1 - beta2) = 20 steps), at most half of the run."""
    warmup_tokens: int | None = None
    """Number of tokens, instead of steps, in which the learning rate rises linearly from 0. null:
    the warm-up counts steps."""
    schedule_unit: Literal["steps", "tokens"] = "steps"
    """Whether the decay of the learning rate follows the steps or the tokens seen so far. They
    differ only if the size of steps changes, by a curriculum or a batch ramp."""
    final_lr_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the highest learning rate."""
    decay_fraction: float = 0.2
    """Fraction of the run in which the learning rate decays, for schedule wsd only."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, which needs 4 bytes per parameter in
    addition to the optimizer's state; 0.999 averages over about 1,000 updates. null: no average."""
    ema_warmup: bool = True
    """Whether the decay of the average at update t is at most (1 + t) / (10 + t), so that the
    average soon forgets the initial weights."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_positive(self, "learning_rate", "eps", "clip_norm")
        check_fraction(self, "beta1", "beta2", "ema_decay", below_one=True)
        check_fraction(self, "final_lr_fraction", "decay_fraction")
        check_at_least(self, 0, "weight_decay")
        check_size(self, "warmup_steps", least=0)
        check_size(self, "base_batch")
        if self.scaling is not None and self.base_batch is None:
            refuse("scaling", self.scaling, "needs the batch of learning_rate: set base_batch")
        if self.base_batch is not None and self.scaling is None:
            reason = "has no effect without scaling; leave it out, or set scaling=linear or sqrt"
            refuse("base_batch", self.base_batch, reason)
        check_size(self, "warmup_tokens", most=2**62)
        if self.warmup_tokens is not None and self.warmup_steps is not None:
            both = "sets the warm-up, and so does warmup_steps"
            refuse("warmup_tokens", self.warmup_tokens, f"{both}; leave one of them out")
        if self.schedule_unit != "steps" and self.schedule == "constant":
            refuse(
                "schedule_unit",
                self.schedule_unit,
                "has no effect with schedule=constant; leave it out, or use cosine, linear or wsd",
            )
        if self.ema_decay is None and not self.ema_warmup:
            refuse("ema_warmup", False, "has no effect without an average; set ema_decay as well")
        for pattern, _ in self.groups:
            check_regex("groups", pattern)

    @property
    def depends_on_sizes(self) -> bool:
        """Whether the learning rate depends on the rows or tokens of the steps."""
        counts_tokens = self.warmup_tokens is not None or self.schedule_unit == "tokens"
        return counts_tokens or self.scaling is not None


Dtype = Literal["fp32", "bf16"]
ComputeDtype = Literal["fp32", "bf16", "fp16"]
FrozenDtype = Literal["fp32", "bf16", "fp16", "nf4", "int8"]


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a training run; `zerojax train FILE.yaml key=value ...` reads them from a
    file."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    elasticity: ElasticityConfig = dataclasses.field(default_factory=ElasticityConfig)
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)
    batch_ramp: BatchRampConfig = dataclasses.field(default_factory=BatchRampConfig)
    layer_drop: LayerDropConfig = dataclasses.field(default_factory=LayerDropConfig)
    pruning: PruningConfig = dataclasses.field(default_factory=PruningConfig)
    expect: ExpectConfig = dataclasses.field(default_factory=ExpectConfig)
    sweep: SweepConfig = dataclasses.field(default_factory=SweepConfig)
    precision: ComputeDtype | None = None
    """Dtype of forward and backward; norms and losses are always float32. null: bf16, or fp32 on
    CPU devices."""
    reduce_dtype: ComputeDtype | None = None
    """Dtype in which gradients are reduced over devices. null: the dtype of `precision`."""
    accumulate_dtype: Dtype | None = None
    """Dtype of the sum of gradients over microbatches. null: fp32, because small terms vanish in a
    bf16 sum."""
    param_dtype: Dtype = "fp32"
    """Dtype of stored parameters. bf16: no float32 master weights, so 2 bytes per parameter instead
    of 4, and updates are rounded stochastically."""
    moments_dtype: Dtype = "fp32"
    """Dtype of the optimizer's stored moments; its arithmetic is float32."""
    freeze_dtype: FrozenDtype | None = None
    """Dtype of stored parameters that are not trained (`freeze`, or all but adapters). null: the
    dtype of `precision`, in which they are used, or bf16 if param_dtype is bf16. nf4, int8: kernels
    are stored as codes of 4 or 8 bits (0.53 and 1.03 bytes per weight), all other frozen parameters
    as with null."""
    loss_scale: LossScale = dataclasses.field(default_factory=LossScale)
    """Scaling of the loss in fp16; other precisions do not scale the loss."""
    global_batch_size: int = 32
    """Number of examples per optimizer step, over all devices and microbatches."""
    num_microbatches: int | None = None
    """Number of parts of the batch that are computed one after the other, so that activations fit;
    the result does not change. null: 1, or with pipeline stages as many as the batch allows, up to
    4 per stage."""
    steps: int = 300
    """Number of batches to train on."""
    eval_every: int | None = 100
    """Number of steps between evaluations; null: only after the last step."""
    eval_batches: int = 8
    """Number of validation batches per evaluation."""
    seed: int = 0
    """Seed of the initialisation, of dropout and, unless data.shuffle_seed is set, of shuffling."""
    run_dir: str = "runs/default"
    """Folder for all files of the run. The default for a file tiny.yaml is runs/tiny."""
    freeze: tuple[str, ...] = ()
    """Regular expressions on parameter names; matching parameters have no gradient and no optimizer
    state."""
    cpu_devices: int | None = None
    """Number of virtual CPU devices to create; null: the existing devices are used."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_size(self, "global_batch_size", "num_microbatches", "steps")
        check_at_least(self, 1, "eval_every", "eval_batches", "cpu_devices")
        check_at_least(self, 0, "seed")
        check_folder("run_dir", self.run_dir)
        expand_folders(self, "run_dir")
        self._check_elasticity()
        division = BatchDivision(1, self.num_microbatches or 1)
        why = division.why_not(self.global_batch_size, "global_batch_size")
        if why is not None and not self.elasticity.enabled:
            refuse("global_batch_size", self.global_batch_size, why)
        found = Features.found_in(self)
        found.check_batch(self.global_batch_size, elastic=self.elasticity.enabled)
        scaled = "fp16" in (self.precision, self.reduce_dtype)
        if self.loss_scale != LossScale() and not scaled:
            raise ConfigError(
                f"only fp16 has a loss scale, but precision is {self.precision or 'not set'}; "
                "leave loss_scale out, or set precision=fp16",
                ("loss_scale",),
            )
        if self.data.seq_len > self.model.max_seq_len and self.model.sizes_file is None:
            raise ConfigError(
                f"{self.data.seq_len} is above model.max_seq_len ({self.model.max_seq_len}); "
                "lower it or raise model.max_seq_len",
                ("data", "seq_len"),
            )
        warmup = self.optimizer.warmup_steps
        if warmup is not None and warmup > self.steps:
            raise ConfigError(
                f"{warmup} is above steps ({self.steps}); lower it or train longer",
                ("optimizer", "warmup_steps"),
            )
        for pattern in self.freeze:
            check_regex("freeze", pattern)

    def _check_elasticity(self) -> None:
        if not self.elasticity.enabled:
            return
        chosen, given = self._elastic_batch().global_batch_size, self.global_batch_size
        # The default counts as not given.
        if given not in (RunConfig.global_batch_size, chosen):
            refuse(
                "global_batch_size",
                given,
                f"differs from the value that elasticity chooses; use {chosen}, leave it "
                "out, or change elasticity.max_global_batch_size",
            )

    def _elastic_batch(self) -> ElasticBatch:
        return self.elasticity.choose_batch(self.mesh.devices_per_shard)

    def mesh_on(self, num_devices: int) -> MeshConfig:
        """Returns the mesh of an elastic run on `num_devices` devices.

        Experts are split over as many devices as divide them. If `mesh.node` is set, it and
        `wire.secondary` stay only if the devices are several whole nodes. Returns the same mesh if
        `elasticity` is not enabled or `mesh.data` is set.
        """
        if not self.elasticity.enabled or self.mesh.data != -1:
            return self.mesh
        mesh = dataclasses.replace(self.mesh, expert=self.mesh.expert_on(num_devices))
        if mesh.node is None or (num_devices > mesh.node and num_devices % mesh.node == 0):
            return mesh
        wire = dataclasses.replace(mesh.wire, secondary=False)
        return dataclasses.replace(mesh, node=None, wire=wire)

    def on_devices(self, num_devices: int) -> "RunConfig":
        """Returns these settings with the batch, microbatches and mesh of an elastic run on
        `num_devices` devices; the same object if `elasticity` is not enabled.

        Raises:
          ConfigError: the devices cannot divide the batch, or num_microbatches contradicts it.
        """
        if not self.elasticity.enabled:
            return self
        batch = self._elastic_batch()
        parts = batch.num_microbatches(num_devices)
        if self.num_microbatches not in (None, parts):
            refuse(
                "num_microbatches",
                self.num_microbatches,
                f"differs from the value that elasticity chooses on {num_devices} devices "
                f"({parts}); leave it out",
            )
        return dataclasses.replace(
            self,
            global_batch_size=batch.global_batch_size,
            num_microbatches=parts,
            mesh=self.mesh_on(num_devices),
        )


@names_keywords()
def load(cls: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """Loads a configuration from a YAML file and applies KEY=VALUE overrides.

    Args:
      cls: RunConfig, or another dataclass of this module.
      path: path of the YAML file; None: the defaults.
      overrides: texts such as "mesh.zero=3", or "zero=3" if only one field nearest to the top level
        has that name.

    Raises:
      ConfigError: the message states the key, the value, the nearest known key, and file:line.
    """
    defaults: dict[str, Any] = {}
    if cls is RunConfig and path is not None:
        defaults["run_dir"] = f"runs/{Path(path).stem}"
    return load_dataclass(cls, path, overrides, defaults=defaults)


def run_file_lines(config: RunConfig, reasons: Mapping[str, str] | None = None) -> list[str]:
    """Writes the YAML lines of the settings that differ from the defaults or have a reason.

    Args:
      config: settings to write.
      reasons: {key such as "mesh.zero": comment to write behind its value; "" writes the value
        without a comment}.
    """
    return list(_lines(to_dict(config), to_dict(RunConfig()), reasons or {}, ""))


def _lines(
    values: Mapping[str, Any], defaults: Mapping[str, Any], reasons: Mapping[str, str], at: str
) -> Iterator[str]:
    """Yields the YAML lines of one section, whose keys have the dotted prefix `at`."""
    for name, value in values.items():
        key = f"{at}{name}"
        if isinstance(value, dict):
            inner = [f"  {x}" for x in _lines(value, defaults[name], reasons, f"{key}.")]
            yield from [f"{name}:", *inner] if inner else []
        elif value != defaults[name] or key in reasons:
            text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
            why = reasons.get(key)
            comment = f"  # {why}" if why else ""
            # PyYAML ends the text of a single plain value with a line "...".
            yield f"{name}: {text.removesuffix(chr(10)).removesuffix('...').strip()}{comment}"
