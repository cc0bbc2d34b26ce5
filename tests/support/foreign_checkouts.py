"""Models that nobody here wrote, read from checkouts: unchanged, in tiny sizes, each with a loss.

    BONSAI_CHECKOUT=... TUNIX_CHECKOUT=... TRANSFORMERS_CHECKOUT=... FLAX_CHECKOUT=...

A folder each, of jax-ml/bonsai, google/tunix, huggingface/transformers at a release 4.x that still
has Flax (its own requirements must be installed) and google/flax. Nothing of them is changed or
copied; `tests/support/foreign_modules.py` says what stands in for packages that are not installed.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx

from tests.support.foreign_modules import kept_settings, load
from tests.support.foreign_shapes import (
    LENGTH,
    VOCAB,
    ForeignModel,
    causal_mask,
    cross_entropy,
    next_word,
    pictures,
    places,
    tokens,
    words,
)


def filled(module: nnx.Module, rngs: nnx.Rngs) -> nnx.Module:
    """The same module with noise on its parameters.

    Models that are meant to be filled from files begin with weights of zero: then others have a
    gradient of zero, or the derivative of a norm of zeros grows beyond float32 in a few layers.
    """

    def add_noise(value: jax.Array) -> jax.Array:
        return value + 0.1 * jax.random.normal(rngs.params(), value.shape, value.dtype)

    nnx.update(module, jax.tree.map(add_noise, nnx.state(module, nnx.Param)))
    return module


def bonsai(name: str) -> ModuleType:
    return load("BONSAI_CHECKOUT", f"bonsai.models.{name}.modeling")


def bonsai_qwen3() -> ForeignModel:
    """Its caches are made inside of the loss, one for each layer."""
    theirs = bonsai("qwen3")
    config = theirs.ModelConfig(
        num_layers=6,
        vocab_size=VOCAB,
        emb_dim=16,
        mlp_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        rope_scaling_factor=8.0,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=False,
    )

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        cache = theirs.init_cache(config, given.shape[0], LENGTH, 0, jnp.float32)
        logits = model(given, cache=cache, segment_ids=1 * (given != 0))
        return next_word(logits, given)

    return ForeignModel(
        model=lambda rngs: theirs.Qwen3(config, rngs=rngs),
        batch=words,
        loss=loss,
        rolled={"layers/0..5": 1},
    )


def _bonsai_gemma3_config(theirs: ModuleType) -> Any:
    vision = theirs.VisionConfig(
        attention_dropout=0.0,
        hidden_size=16,
        image_size=16,
        intermediate_size=32,
        layer_norm_eps=1e-6,
        num_attention_heads=2,
        num_channels=3,
        num_hidden_layers=4,
        patch_size=4,
        vision_use_head=False,
    )
    text = theirs.TextConfig(
        attention_bias=False,
        attention_dropout=0.0,
        head_dim=8,
        hidden_size=16,
        intermediate_size=32,
        layer_types=theirs._set_attention_modes(3, 12),
        max_position_embeddings=LENGTH,
        num_attention_heads=4,
        num_hidden_layers=12,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_full_factor=8.0,
        rope_full_theta=1e6,
        rope_slide_factor=1.0,
        rope_slide_theta=1e4,
        sliding_window=4,
        vocab_size=VOCAB,
        norm_dtype=jnp.float32,
    )
    return theirs.ModelConfig(
        vision_config=vision,
        text_config=text,
        mm_tokens_per_image=4,
        dtype="float32",
        final_logit_softcapping=None,
    )


def bonsai_gemma3() -> ForeignModel:
    """Pictures and text, two lists of layers; every third layer of the text sees everything."""
    theirs = bonsai("gemma3")
    config = _bonsai_gemma3_config(theirs)

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        of_pictures = jnp.broadcast_to((jnp.arange(LENGTH) < 4).astype(jnp.int32), given.shape)
        logits = model(
            given,
            batch["images"],
            cache=theirs.init_cache(config, given.shape[0], LENGTH, 0, jnp.result_type(float)),
            segment_ids=jnp.ones_like(given),
            token_type_ids=of_pictures,
        )
        return next_word(logits, given)

    return ForeignModel(
        model=lambda rngs: filled(theirs.Gemma3Model(config, rngs=rngs), rngs),
        batch=lambda step: {"words": tokens(step), "images": pictures(step)["images"]},
        loss=loss,
        rolled={"vision_tower/encoder/layers/0..3": 1, "language_model/layers/0..11": 1},
    )


def bonsai_vit() -> ForeignModel:
    theirs = bonsai("vit")
    config = theirs.ModelConfig(
        image_size=(16, 16),
        patch_size=(4, 4),
        num_channels=3,
        hidden_dim=16,
        attn_dropout_prob=0.0,
        dropout_prob=0.0,
        num_heads=2,
        mlp_dim=32,
        eps=1e-6,
        num_layers=6,
        num_labels=10,
    )
    return ForeignModel(
        model=lambda rngs: theirs.ViTClassificationModel(config, rngs=rngs),
        batch=pictures,
        loss=lambda model, batch: cross_entropy(model(batch["images"], rngs=None), batch["labels"]),
        rolled={"layers/0..5": 1},
    )


def bonsai_resnet() -> ForeignModel:
    """Four stages that differ, with a first block of its own in each; widths are the real ones."""
    theirs = bonsai("resnet")
    config = theirs.ModelConfig([5, 6, 2, 1], num_classes=10)
    return ForeignModel(
        model=lambda rngs: theirs.ResNet(config, rngs=rngs),
        batch=lambda step: pictures(step, 32),
        loss=lambda model, batch: cross_entropy(model(batch["images"]), batch["labels"]),
        rolled={"layer0/blocks/1..4": 1, "layer1/blocks/1..5": 1},
    )


def bonsai_convnext() -> ForeignModel:
    """Stages that differ, each with a list of blocks, in a list of stages."""
    theirs = bonsai("convnext")
    config = theirs.ModelConfig(
        stage_depths=(2, 6), stage_dims=(8, 16), drop_path_rate=0.0, num_classes=10
    )
    return ForeignModel(
        model=lambda rngs: theirs.ConvNeXt(config, rngs=rngs),
        batch=pictures,
        loss=lambda model, batch: cross_entropy(
            model(batch["images"], rngs=None, train=True), batch["labels"]
        ),
        rolled={"stages/0/layers/0..1": 1, "stages/1/layers/0..5": 1},
    )


def _tunix(theirs: ModuleType, kind: str, config: Any, rolled: dict[str, int]) -> ForeignModel:
    def build(rngs: nnx.Rngs) -> Any:
        with kept_settings():
            flax.config.update("flax_always_shard_variable", False)
            return filled(getattr(theirs, kind)(config, rngs=rngs), rngs)

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        logits, _ = model(given, places(given), None, causal_mask(given))
        return next_word(logits, given)

    return ForeignModel(model=build, batch=words, loss=loss, rolled=rolled)


def tunix_llama3() -> ForeignModel:
    """With its own remat of a whole layer."""
    theirs = load("TUNIX_CHECKOUT", "tunix.models.llama3.model")
    config = theirs.ModelConfig(
        num_layers=6,
        vocab_size=VOCAB,
        embed_dim=16,
        hidden_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
        remat_config=theirs.RematConfig.DECODER,
    )
    return _tunix(theirs, "Llama3", config, {"layers/0..5": 1})


def tunix_gemma3() -> ForeignModel:
    """With its own remat of a whole layer; every sixth layer sees everything."""
    theirs = load("TUNIX_CHECKOUT", "tunix.models.gemma3.model")
    config = theirs.ModelConfig(
        num_layers=24,
        num_embed=VOCAB,
        embed_dim=16,
        hidden_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        sliding_window_size=4,
        global_base_frequency=1_000_000,
        remat_config=theirs.RematConfig.DECODER,
        param_dtype=jnp.float32,
    )
    return _tunix(theirs, "Gemma3", config, {"layers/0..23": 6})


def tunix_qwen3() -> ForeignModel:
    """With its own remat of attention and of the feed-forward part, one each."""
    theirs = load("TUNIX_CHECKOUT", "tunix.models.qwen3.model")
    config = theirs.ModelConfig(
        num_layers=6,
        vocab_size=VOCAB,
        embed_dim=16,
        hidden_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        remat_config=theirs.RematConfig.BLOCK,
    )
    return _tunix(theirs, "Qwen3", config, {"layers/0..5": 1})


def transformers(module: str) -> ModuleType:
    return load("TRANSFORMERS_CHECKOUT", f"transformers.models.{module}", "src")


def flax_bert() -> ForeignModel:
    """Layers named 0, 1, ..., their remat, dropout, and an output that reads the embedding."""
    config = transformers("bert.configuration_bert").BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    theirs = transformers("bert.modeling_flax_bert")

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        outputs = model(
            given,
            jnp.ones_like(given),
            jnp.zeros_like(given),
            places(given),
            None,
            deterministic=not model.training,
        )
        return cross_entropy(outputs.logits, given)

    return ForeignModel(
        model=theirs.FlaxBertForMaskedLMModule(config, gradient_checkpointing=True),
        batch=words,
        loss=loss,
        rolled={"bert/encoder/layer/0..5": 1},
    )


def flax_gpt2() -> ForeignModel:
    """Layers named 0, 1, ..., dropout, and an output that reads the embedding."""
    config = transformers("gpt2.configuration_gpt2").GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=6, n_head=2
    )
    theirs = transformers("gpt2.modeling_flax_gpt2")

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        outputs = model(
            given, jnp.ones_like(given), places(given), deterministic=not model.training
        )
        return next_word(outputs.logits, given)

    return ForeignModel(
        model=theirs.FlaxGPT2LMHeadModule(config),
        batch=words,
        loss=loss,
        rolled={"transformer/h/0..5": 1},
    )


SMALL = {"emb_dim": 16, "num_heads": 2, "num_layers": 6, "qkv_dim": 16, "mlp_dim": 32}


def examples(folder: str, module: str) -> ModuleType:
    return load("FLAX_CHECKOUT", module, f"examples/{folder}")


def flax_lm1b() -> ForeignModel:
    """Layers named `encoderdecoderblock_0`, ..., with dropout."""
    theirs = examples("lm1b", "models")
    config = theirs.TransformerConfig(
        vocab_size=VOCAB, output_vocab_size=VOCAB, max_len=LENGTH, **SMALL
    )
    return ForeignModel(
        model=theirs.TransformerLM(config),
        batch=words,
        loss=lambda model, batch: cross_entropy(model(batch["words"]), batch["words"]),
        rolled={"decoder/encoderdecoderblock_0..5": 1},
    )


def flax_wmt() -> ForeignModel:
    """An encoder and a decoder that share their embedding, with dropout."""
    theirs = examples("wmt", "models")
    config = theirs.TransformerConfig(
        vocab_size=VOCAB,
        output_vocab_size=VOCAB,
        share_embeddings=True,
        logits_via_embedding=True,
        max_len=LENGTH,
        **SMALL,
    )
    return ForeignModel(
        model=theirs.Transformer(config),
        batch=lambda step: {"words": tokens(step), "targets": tokens(step + 1)},
        loss=lambda model, batch: cross_entropy(
            model(batch["words"], batch["targets"]), batch["targets"]
        ),
        rolled={"encoder/encoderblock_0..5": 1, "decoder/encoderdecoderblock_0..5": 1},
    )


def flax_gemma() -> ForeignModel:
    """Local and global attention in turns."""
    theirs = examples("gemma", "transformer")
    kinds = theirs.modules.AttentionType
    config = theirs.TransformerConfig.from_dict(
        num_layers=8,
        num_embed=VOCAB,
        embed_dim=16,
        hidden_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL) * 4,
        sliding_window_size=4,
    )

    def loss(model: Any, batch: Any) -> jax.Array:
        given = batch["words"]
        logits, _ = model(given, places(given), None, causal_mask(given), rngs=None)
        return next_word(logits, given)

    return ForeignModel(
        model=lambda rngs: theirs.Transformer(config, rngs=rngs),
        batch=words,
        loss=loss,
        rolled={"layers/0..7": 1},
    )


MODELS: Mapping[str, tuple[str, Callable[[], ForeignModel]]] = {
    "bonsai Qwen3": ("BONSAI_CHECKOUT", bonsai_qwen3),
    "bonsai Gemma3": ("BONSAI_CHECKOUT", bonsai_gemma3),
    "bonsai ViT": ("BONSAI_CHECKOUT", bonsai_vit),
    "bonsai ResNet": ("BONSAI_CHECKOUT", bonsai_resnet),
    "bonsai ConvNeXt": ("BONSAI_CHECKOUT", bonsai_convnext),
    "tunix Llama3": ("TUNIX_CHECKOUT", tunix_llama3),
    "tunix Gemma3": ("TUNIX_CHECKOUT", tunix_gemma3),
    "tunix Qwen3": ("TUNIX_CHECKOUT", tunix_qwen3),
    "Hugging Face FlaxBert": ("TRANSFORMERS_CHECKOUT", flax_bert),
    "Hugging Face FlaxGPT2": ("TRANSFORMERS_CHECKOUT", flax_gpt2),
    "flax LM1B": ("FLAX_CHECKOUT", flax_lm1b),
    "flax WMT": ("FLAX_CHECKOUT", flax_wmt),
    "flax Gemma": ("FLAX_CHECKOUT", flax_gemma),
}
"""{name: (variable of its checkout, the function that reads it)}."""
