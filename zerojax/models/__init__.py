"""Any Flax module or function as one traced model; reference models; weights of Hugging Face.

Knows Flax and traced programs; never a mesh, a sharding or an optimizer. Sub-packages: `zoo`
(reference models), `loops` (the loop over layers), `context` (attention over a split sequence),
`hugging_face`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.models.adapt import as_loss, as_model, bound_attribute, default_loss, width_of
    from zerojax.models.attending import attention
    from zerojax.models.hugging_face import Pretrained, from_hugging_face
    from zerojax.models.index_limits import IndexLimit
    from zerojax.models.protocol import Arrays, LazyArray, Loss, Model, ModelLike, OnRead
    from zerojax.models.routed_experts import experts
    from zerojax.models.sparse_layouts import BlockTable, layout_table
    from zerojax.models.step_count import StepCount
    from zerojax.models.trace import ModelTrace, trace_model
    from zerojax.models.whole_batch import batch_mean, batch_sum
    from zerojax.models.zoo import as_decoder_config, build_model, tensor_parallel_rules
    from zerojax.models.zoo.bert import Bert, BertConfig
    from zerojax.models.zoo.decoder import Block, Decoder, KVCache
    from zerojax.models.zoo.decoder_config import DecoderConfig, LayerKind
    from zerojax.models.zoo.generation import generate, generate_from_source
    from zerojax.models.zoo.gpt2 import GPT2, GPT2Config
    from zerojax.models.zoo.layers import NormConfig
    from zerojax.models.zoo.llama import Llama, LlamaConfig
    from zerojax.models.zoo.lora import add_lora, merge_lora
    from zerojax.models.zoo.moe import MoE, Routing, balance_losses
    from zerojax.models.zoo.rope import Rope, RopeScaling
    from zerojax.models.zoo.stages import Stages
    from zerojax.models.zoo.t5 import T5, T5Config

__all__ = [
    "GPT2",
    "T5",
    "Arrays",
    "Bert",
    "BertConfig",
    "Block",
    "BlockTable",
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
    "IndexLimit",
    "KVCache",
    "LayerKind",
    "LazyArray",
    "Llama",
    "LlamaConfig",
    "Loss",
    "MoE",
    "Model",
    "ModelLike",
    "ModelTrace",
    "NormConfig",
    "OnRead",
    "Pretrained",
    "Rope",
    "RopeScaling",
    "Routing",
    "Stages",
    "StepCount",
    "T5Config",
    "add_lora",
    "as_decoder_config",
    "as_loss",
    "as_model",
    "attention",
    "balance_losses",
    "batch_mean",
    "batch_sum",
    "bound_attribute",
    "build_model",
    "default_loss",
    "experts",
    "from_hugging_face",
    "generate",
    "generate_from_source",
    "layout_table",
    "merge_lora",
    "tensor_parallel_rules",
    "trace_model",
    "width_of",
]

_HOME_OF_NAME = {
    "Arrays": "protocol",
    "Bert": "zoo.bert",
    "BertConfig": "zoo.bert",
    "Block": "zoo.decoder",
    "BlockTable": "sparse_layouts",
    "Decoder": "zoo.decoder",
    "DecoderConfig": "zoo.decoder_config",
    "GPT2": "zoo.gpt2",
    "GPT2Config": "zoo.gpt2",
    "IndexLimit": "index_limits",
    "KVCache": "zoo.decoder",
    "LayerKind": "zoo.decoder_config",
    "LazyArray": "protocol",
    "Llama": "zoo.llama",
    "LlamaConfig": "zoo.llama",
    "Loss": "protocol",
    "MoE": "zoo.moe",
    "Model": "protocol",
    "ModelLike": "protocol",
    "ModelTrace": "trace",
    "NormConfig": "zoo.layers",
    "OnRead": "protocol",
    "Pretrained": "hugging_face",
    "Rope": "zoo.rope",
    "RopeScaling": "zoo.rope",
    "Routing": "zoo.moe",
    "Stages": "zoo.stages",
    "StepCount": "step_count",
    "T5": "zoo.t5",
    "T5Config": "zoo.t5",
    "add_lora": "zoo.lora",
    "as_decoder_config": "zoo",
    "as_loss": "adapt",
    "as_model": "adapt",
    "attention": "attending",
    "balance_losses": "zoo.moe",
    "batch_mean": "whole_batch",
    "batch_sum": "whole_batch",
    "bound_attribute": "adapt",
    "build_model": "zoo",
    "default_loss": "adapt",
    "experts": "routed_experts",
    "from_hugging_face": "hugging_face",
    "generate": "zoo.generation",
    "generate_from_source": "zoo.generation",
    "layout_table": "sparse_layouts",
    "merge_lora": "zoo.lora",
    "tensor_parallel_rules": "zoo",
    "trace_model": "trace",
    "width_of": "adapt",
}


def __getattr__(name: str) -> Any:
    """Imports what a name needs when it is first asked for (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
