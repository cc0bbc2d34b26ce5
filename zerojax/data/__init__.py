"""Batches from text or token files as global arrays; one integer is the position to resume from."""

from zerojax.data.batch_sharding import (
    abstract_global,
    local_rows,
    local_rows_of_mesh,
    missing_rows,
    shard_batch,
    shard_own_batch,
)
from zerojax.data.chats import PreparedChats, prepare_chats
from zerojax.data.corpus import read_text
from zerojax.data.dataset_source import DatasetSource, as_dataset_source, is_dataset
from zerojax.data.feed import Feed, as_feed, has_no_end, one_pass
from zerojax.data.masking import MaskedSource, as_masked_source
from zerojax.data.mixture import MixtureSource
from zerojax.data.opening import array_names, as_source, mixture_parts
from zerojax.data.packed_source import PackedSource
from zerojax.data.packing import Boundary
from zerojax.data.prefetching import Prefetch, prefetch
from zerojax.data.source import RowSource, TokenSource
from zerojax.data.subwords import BpeTokenizer, HuggingFaceTokenizer
from zerojax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    as_tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from zerojax.data.tokens import Tokens, open_tokens, tokens_of_array, verify_tokens

__all__ = [
    "Boundary",
    "BpeTokenizer",
    "ByteTokenizer",
    "DatasetSource",
    "Feed",
    "HuggingFaceTokenizer",
    "MaskedSource",
    "MixtureSource",
    "PackedSource",
    "Prefetch",
    "PreparedChats",
    "RowSource",
    "TokenSource",
    "Tokenizer",
    "Tokens",
    "abstract_global",
    "array_names",
    "as_dataset_source",
    "as_feed",
    "as_masked_source",
    "as_source",
    "as_tokenizer",
    "has_no_end",
    "is_dataset",
    "load_tokenizer",
    "local_rows",
    "local_rows_of_mesh",
    "missing_rows",
    "mixture_parts",
    "one_pass",
    "open_tokens",
    "prefetch",
    "prepare_chats",
    "read_text",
    "save_tokenizer",
    "shard_batch",
    "shard_own_batch",
    "tokens_of_array",
    "verify_tokens",
]
