"""Settings of a decoder: sizes, and architecture switches that distinguish model families."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from zerojax.config.attention_layouts import BlockLayout
from zerojax.config.checks import MAX_LAYERS, MAX_SIZE, check_finite
from zerojax.config.compression import BitScheduleConfig
from zerojax.config.display import quoted
from zerojax.config.expert_settings import MoEConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.attending import Implementation, check_implementation
from zerojax.operators.sparse_layouts import layout_table
from zerojax.tracing.stacking import check_remat
from zerojax.zoo.bit_widths import check_bit_schedule
from zerojax.zoo.fp8 import check_matmul_dtype
from zerojax.zoo.layers import ACTIVATIONS, NormConfig
from zerojax.zoo.rope import Rope
from zerojax.zoo.task_heads import TaskConfig

MLP_MULTIPLE = 128  # the default width of a gated MLP is rounded up to tiles of a matrix unit
NORM_PLACES = ("pre", "post", "pre_post", "parallel")
QUERY_KEY_NORMS = ("none", "head", "all")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Settings that may differ between the layers of one decoder.

    Attributes:
      window: number of tokens that each token attends to, including itself (arXiv:2004.05150); None
        for all earlier tokens.
      rope: rotary positions; None if the layer uses no positions (NoPE, arXiv:2305.19466), except
        learned ones in the embedding.
    """

    window: int | None = None
    rope: Rope | None = dataclasses.field(default_factory=Rope)

    def describe(self) -> str:
        """Describes the kind of layer in a few words."""
        seen = "all tokens before" if self.window is None else f"a window of {self.window}"
        if self.rope is None:
            return f"{seen}, no rotary positions"
        scaling = "" if self.rope.scaling is None else f", {self.rope.scaling.kind}"
        return f"{seen}, rotary base {self.rope.theta:g}{scaling}"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and architecture switches of a decoder; the default switches are Llama's.

    `zoo.hugging_face` has the values of published families; for Llama see arXiv:2302.13971.

    Attributes:
      vocab_size: number of token ids.
      max_seq_len: maximum length of a row in tokens.
      num_layers, num_heads, embed_dim: depth, query heads, width of the residual stream.
      num_kv_heads: number of key/value heads, a divisor of num_heads; None uses num_heads.
      mlp_dim: width of the MLP; None uses 4 * embed_dim; if gated, 8/3 of embed_dim, rounded up to
        a multiple of 128.
      head_dim: number of features of one head; None uses embed_dim / num_heads.
      dropout: probability of dropout on embeddings and on the output of each sub-layer.
      tie_embeddings: whether the output weights are the token table.
      norm: settings of all norms: of the residual stream, and of query and key.
      norm_places: place of the norms. "pre": before attention and MLP. "post": on their outputs,
        before these are added (OLMo 2, arXiv:2501.00656). "pre_post": both (Gemma 2,
        arXiv:2408.00118). "parallel": one norm, whose output is the input of attention and MLP
        (GPT-J, Cohere).
      query_key_norm: norm of query and key. "head": over each head's features (arXiv:2302.05442).
        "all": over the features of all heads together. "none": no norm.
      qkv_bias, output_bias, mlp_bias: whether the query, key and value projections, the attention's
        output, and the MLP have biases. With experts, `mlp_bias` adds biases to each expert and to
        the router's logits.
      kinds: distinct kinds of layers.
      pattern: index into `kinds` for each layer; None if there is one kind.
      attention_scale: factor of the scores; None uses head_dim^-0.5.
      attention_softcap: limit of the scores, which become softcap * tanh(scores / softcap)
        (arXiv:2408.00118); None for no limit.
      attention_sinks: whether each head has a learned score that is part of the softmax's
        denominator and has no value (gpt-oss, arXiv:2508.10925).
      clip_qkv: limit to which magnitudes of query, key and value are clipped (OLMo,
        arXiv:2402.00838); None for no clipping.
      activation: activation of the MLP: "silu", "gelu_tanh", "gelu", "relu" or "quick_gelu", which
        is x * sigmoid(1.702 x).
      gated: whether the MLP is down(activation(gate(x)) * up(x)) (arXiv:2002.05202); False:
        down(activation(up(x))).
      moe: settings of experts that replace the MLP; they are gated. Their default width
        `expert_dim` is `mlp_dim`.
      expert_limit: limit L of an expert's hidden units, whose product is then
        activation(min(gate(x), L)) * (clip(up(x), -L, L) + 1), as in gpt-oss (arXiv:2508.10925);
        None for activation(gate(x)) * up(x).
      learned_positions: whether a table of positions is added to the embeddings, as in GPT-2.
      embed_scale: factor of the embeddings, rounded to their dtype.
      residual_scale: factor of the outputs of attention and MLP before they are added.
      logit_scale: factor of the logits.
      logit_softcap: limit of the logits, which become softcap * tanh(logits / softcap) after
        `logit_scale`; None for no limit.
      family: Hugging Face `model_type` for reading and writing files; "" for none.
      remat: recomputation in the backward pass: "none", "full", "attention" or "dots" (see
        `stacking.scan_blocks`).
      loss_chunk: number of tokens whose logits `loss` computes at a time; None for all, "auto" for
        the choice of `operators.chunked_loss.head_next_token`.
      mlp_chunk: number of tokens of a row whose hidden MLP activations a layer computes at a time;
        None for all.
      matmul_dtype: dtype of products in the layers: "fp8" for 8-bit products (see `fp8`),
        "fake_int8" or "fake_int4" for kernels rounded to integers (see
        `operators.rounded_weights`), None for the compute dtype.
      bit_schedule: width of the rounded kernels by step (see `BitScheduleConfig`).
      attention: implementation of attention: "auto", "xla", "chunked", "cudnn" or "mosaic_gpu" (see
        `zerojax.attention`).
      attention_layout: block-sparse attention pattern for rows of max_seq_len tokens; shorter rows
        use its leading part (see `zerojax.attention`).
      task: classes of texts, whose head replaces the output weights; None for a language model.
    """

    vocab_size: int
    max_seq_len: int = 2048
    num_layers: int = 16
    num_heads: int = 32
    embed_dim: int = 2048
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    head_dim: int | None = None
    dropout: float = 0.0
    tie_embeddings: bool = False
    norm: NormConfig = dataclasses.field(default_factory=NormConfig)
    norm_places: Literal["pre", "post", "pre_post", "parallel"] = "pre"
    query_key_norm: Literal["none", "head", "all"] = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    kinds: tuple[LayerKind, ...] = dataclasses.field(default_factory=lambda: (LayerKind(),))
    pattern: tuple[int, ...] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    clip_qkv: float | None = None
    activation: Literal["silu", "gelu_tanh", "gelu", "relu", "quick_gelu"] = "silu"
    gated: bool = True
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    expert_limit: float | None = None
    learned_positions: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    family: str = ""
    remat: str = "none"
    loss_chunk: int | Literal["auto"] | None = None
    mlp_chunk: int | None = None
    matmul_dtype: str | None = None
    bit_schedule: BitScheduleConfig = dataclasses.field(default_factory=BitScheduleConfig)
    attention: Implementation = "auto"
    attention_layout: BlockLayout | None = None
    task: TaskConfig | None = None

    def __post_init__(self) -> None:
        fill_sizes(self)
        for name in ("kinds", "pattern"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        check_decoder_sizes(self)
        check_experts(self)
        check_decoder_task(self)
        self._check_switches()
        self._check_kinds()

    @property
    def features_per_head(self) -> int:
        """Returns `head_dim`, or its default embed_dim / num_heads."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Returns the index of each layer's kind: `pattern`, or zeros if there is one kind."""
        return (0,) * self.num_layers if self.pattern is None else self.pattern

    @property
    def num_parameters(self) -> int:
        """Returns the number of trainable elements."""
        return self._count(self.moe.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Returns the number of trainable elements used per token; experts that a token does not
        choose are not counted."""
        return self._count(self.moe.experts_per_token if self.moe.num_experts else 0)

    def _count(self, num_experts: int) -> int:
        width, mlp, head_dim = self.embed_dim, self.mlp_dim or 0, self.features_per_head
        heads, kv_heads = self.num_heads * head_dim, (self.num_kv_heads or 0) * head_dim
        norm = self.norm.has_scale + self.norm.has_bias
        layer = 2 * width * (heads + kv_heads)
        if self.moe.num_experts:
            layer += expert_parameters(self.moe, width, num_experts, has_bias=self.mlp_bias)
        else:
            layer += (3 if self.gated else 2) * width * mlp
            layer += self.mlp_bias * ((2 if self.gated else 1) * mlp + width)
        layer += self.qkv_bias * (heads + 2 * kv_heads) + self.output_bias * width
        layer += {"pre_post": 4, "parallel": 1}.get(self.norm_places, 2) * norm * width
        normed = {"head": 2 * head_dim, "all": heads + kv_heads, "none": 0}
        layer += norm * normed[self.query_key_norm] + self.attention_sinks * self.num_heads
        is_single = self.tie_embeddings or self.task is not None
        tables = (1 if is_single else 2) * self.vocab_size * width
        if self.task is not None:
            tables += self.task.num_parameters(width, use_bias=False)
        tables += self.learned_positions * self.max_seq_len * width
        return self.num_layers * layer + tables + norm * width

    def describe_kinds(self) -> list[str]:
        """Describes each kind of layer in one sentence; returns an empty list if there is one
        kind."""
        if self.pattern is None:
            return []
        return [
            f"{self.pattern.count(index)} of {self.num_layers} layers: {kind.describe()}"
            for index, kind in enumerate(self.kinds)
        ]

    def _check_switches(self) -> None:
        for field, known in (
            ("norm_places", NORM_PLACES),
            ("query_key_norm", QUERY_KEY_NORMS),
            ("activation", tuple(ACTIVATIONS)),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} is unknown; use one of {', '.join(known)}"
                )
        for field, remedy in (
            ("attention_scale", "use None for head_dim^-0.5, or 1.0 for scores as they are"),
            ("attention_softcap", "use None for no cap"),
            ("clip_qkv", "use None for no clipping"),
            ("logit_softcap", "use None for no cap"),
            ("expert_limit", "use None for no limit"),
        ):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"{field}={value!r} must be above 0; {remedy}")

    def _check_kinds(self) -> None:
        kinds, pattern = self.kinds, self.pattern
        if not kinds or len(set(kinds)) != len(kinds):
            raise ValueError(f"kinds={kinds!r} must hold at least one kind of layer, each once")
        if pattern is None and len(kinds) > 1:
            raise ValueError(
                f"kinds has {len(kinds)} entries but pattern=None; set pattern to the index of the "
                f"kind of each of the {self.num_layers} layers"
            )
        if pattern is not None and len(pattern) != self.num_layers:
            raise ValueError(
                f"pattern has {len(pattern)} entries, but num_layers={self.num_layers}; use one "
                "entry per layer"
            )
        if pattern is not None and set(pattern) != set(range(len(kinds))):
            raise ValueError(
                f"pattern uses the indices {sorted(set(pattern))}, but kinds has {len(kinds)} "
                f"entries; use each index from 0 to {len(kinds) - 1}"
            )
        ropes = [kind.rope for kind in kinds if kind.rope is not None]
        if len({(rope.fraction, rope.interleaved) for rope in ropes}) > 1:
            raise ValueError(
                "fraction and interleaved of rope differ between kinds of layers; use the same "
                "values in all kinds, since rotary positions pair the same features in every layer"
            )
        for rope in ropes:
            rope.check(self.features_per_head)
        for kind in kinds:
            if kind.window is not None:
                check_at_least_one("window", kind.window)


def fill_sizes(config: Any) -> None:
    """Replaces sizes that are None by their defaults, in a frozen configuration.

    Args:
      config: a `DecoderConfig` or a `LlamaConfig`.
    """
    if config.num_kv_heads is None:
        object.__setattr__(config, "num_kv_heads", config.num_heads)
    if config.mlp_dim is None:
        # Three matrices of 8/3 embed_dim have as many weights as two of 4 embed_dim.
        gated = -(-8 * config.embed_dim // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE
        width = gated if getattr(config, "gated", True) else 4 * config.embed_dim
        object.__setattr__(config, "mlp_dim", width)
    if config.moe.num_experts and config.moe.expert_dim is None:
        moe = dataclasses.replace(config.moe, expert_dim=config.mlp_dim)
        object.__setattr__(config, "moe", moe)


def shared_fields(config: Any) -> dict[str, Any]:
    """Returns {name: value} of the fields that a family's configuration shares with
    `DecoderConfig`."""
    names = {field.name for field in dataclasses.fields(DecoderConfig)}
    own = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(config, name) for name in own if name in names}


def expert_parameters(
    moe: MoEConfig, width: int, num_experts: int, *, has_bias: bool = False
) -> int:
    """Returns the number of elements of a layer's router, `num_experts` experts and shared MLP."""
    hidden = moe.expert_dim or 0
    experts = (3 * width * hidden + has_bias * (2 * hidden + width)) * num_experts
    router = (width + has_bias) * moe.num_experts
    return router + experts + 3 * width * moe.shared_dim


def check_experts(config: Any) -> None:
    """Raises a ValueError for MLP options that experts do not support.

    Args:
      config: a `DecoderConfig` or a `LlamaConfig`.
    """
    has_bias, limit = getattr(config, "mlp_bias", False), getattr(config, "expert_limit", None)
    if not config.moe.num_experts:
        if limit is not None:
            raise ValueError(
                f"expert_limit={limit!r} applies only to experts, but moe.num_experts=0; use None"
            )
        return
    for field, plain in (
        ("gated", True),
        ("mlp_chunk", None),
        ("matmul_dtype", None),
    ):
        value = getattr(config, field, plain)
        if value != plain:
            raise ValueError(
                f"{field}={value!r} with moe.num_experts={config.moe.num_experts}: experts support "
                f"only {field}={plain!r}; use that, or a model without experts"
            )
    if has_bias and config.moe.products != "batched":
        raise ValueError(
            f"moe.products={config.moe.products!r} with mlp_bias=True: experts with biases support "
            "only products='batched'; use that, or mlp_bias=False"
        )


def kinds_and_pattern(
    layers: Sequence[LayerKind],
) -> tuple[tuple[LayerKind, ...], tuple[int, ...] | None]:
    """Returns (`DecoderConfig.kinds`, `DecoderConfig.pattern`) from the kind of each layer."""
    kinds = tuple(dict.fromkeys(layers))
    if len(kinds) == 1:
        return kinds, None
    return kinds, tuple(kinds.index(layer) for layer in layers)


def check_decoder_sizes(config: Any) -> None:
    """Checks the sizes that the configuration of every decoder has.

    Raises:
      ValueError: a size is below 1; embed_dim is not divisible by num_heads, or num_heads by
        num_kv_heads; dropout is outside [0, 1); a remat name, matmul dtype or attention is unknown;
        a layout has more blocks than max_seq_len; a window, loss chunk or MLP chunk is below 1; or
        an MLP chunk is combined with 8-bit products.
    """
    check_finite(config)
    for field in ("vocab_size", "max_seq_len", "num_layers", "num_heads", "num_kv_heads"):
        check_at_least_one(field, getattr(config, field))
    for field in ("embed_dim", "mlp_dim"):
        check_at_least_one(field, getattr(config, field))
    if config.head_dim is not None:
        check_at_least_one("head_dim", config.head_dim)
    elif config.embed_dim % config.num_heads:
        # Rotary positions need an even number of features per head.
        unit = config.num_heads * (2 if hasattr(config, "rope_theta") else 1)
        raise ValueError(
            f"embed_dim={config.embed_dim} is not divisible by num_heads={config.num_heads};"
            f" use embed_dim={-(-config.embed_dim // unit) * unit}"
        )
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} is not divisible by num_kv_heads={config.num_kv_heads}; "
            f"each key/value head must serve equally many query heads; use num_kv_heads=1 or "
            f"{config.num_heads}"
        )
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"dropout={config.dropout} is not in [0, 1); use 0.0 for none")
    check_remat(config.remat)
    check_matmul_dtype(config.matmul_dtype)
    check_bit_schedule(config.matmul_dtype, config.bit_schedule)
    check_implementation("attention", config.attention)
    if config.attention_layout is not None:
        layout_table(
            config.attention_layout, num_heads=config.num_heads, num_tokens=config.max_seq_len
        )
    for field in ("mlp_chunk", "attention_window"):
        if getattr(config, field, None) is not None:
            check_at_least_one(field, getattr(config, field))
    if config.loss_chunk not in (None, "auto"):
        check_at_least_one("loss_chunk", config.loss_chunk)
    if config.mlp_chunk is not None and config.matmul_dtype == "fp8":
        raise ValueError(
            f"mlp_chunk={config.mlp_chunk} with matmul_dtype={config.matmul_dtype!r}: 8-bit "
            "products are scaled with the maximum over all tokens of a step; use mlp_chunk=None or "
            "matmul_dtype=None"
        )


def check_decoder_task(config: Any) -> None:
    """Raises a ValueError for a task that decoders do not have, or options that it does not use.

    Args:
      config: a `DecoderConfig`, a `LlamaConfig` or a `GPT2Config`.
    """
    task = config.task
    if task is None:
        return
    if task.kind != "sequence_classification":
        raise ValueError(
            f"task kind={task.kind!r} is not supported for decoders; use "
            "kind='sequence_classification', or a BERT"
        )
    if config.loss_chunk is not None:
        raise ValueError(
            f"loss_chunk={config.loss_chunk!r} divides the logits of tokens, which a model with a "
            "task does not compute; use loss_chunk=None"
        )


def check_at_least_one(field: str, value: object) -> None:
    """Raises a ValueError unless a size is an integer from 1 to its maximum."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={quoted(value)} must be a whole number of at least 1")
    most = MAX_LAYERS if field in ("num_layers", "num_decoder_layers") else MAX_SIZE
    if value > most:
        raise ValueError(
            f"{field}={quoted(value)} is above the maximum of {most}; use a smaller number"
        )
