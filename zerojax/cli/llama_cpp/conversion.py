"""Conversion of a GGUF file, one tensor in memory at a time.

The package `gguf` dequantises blocks to float32.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.drafts import new_folder
from zerojax.cli.llama_cpp.settings import gguf_name, read_sizes
from zerojax.cli.llama_cpp.tokenizer import tokenizer_config, tokenizer_json
from zerojax.cli.llama_cpp.walking import Damage, check_table
from zerojax.config.display import printable
from zerojax.models import LlamaConfig
from zerojax.models.hugging_face import ARCHITECTURES, Architecture, UnsupportedError
from zerojax.models.hugging_face.safetensors import Tensor, write_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written.

    Attributes:
      folder: where.
      num_tensors, num_bytes: of weights.
      kinds: number of tensors of each kind in the GGUF file, such as {"Q4_1": 210, "F32": 61}.
      no_tokenizer: why there is no tokenizer.json; None: there is one.
    """

    folder: Path
    num_tensors: int
    num_bytes: int
    kinds: dict[str, int]
    no_tokenizer: str | None


def convert_gguf(path: str | Path, out: str | Path, *, dtype: str = "float32") -> Converted:
    """Writes config.json, safetensors and, where it is known, the tokenizer into a new folder.

    Weights are those of the file: what quantisation has rounded away does not come back. float32
    holds every value exactly.

    Args:
      path: a GGUF file of a Llama model.
      out: must not be there, or be empty.
      dtype: of the weights, "float32" or "bfloat16".

    Raises:
      FileNotFoundError: no such file.
      UnsupportedError: another architecture, or a setting that ours does not compute.
      ValueError: no GGUF file, or one that is cut short.
      ImportError: the package `gguf` is not installed.
      FileExistsError: something is at `out`.
    """
    reader = _open(Path(path))
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is a damaged GGUF file ({error}); fetch it again") from None
    found = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in found.items()}
    config = read_sizes(fields, shapes)
    row = ARCHITECTURES["llama"]
    tensors = _tensors(row, config, shapes, jnp.dtype(dtype))
    tokenizer = tokenizer_json(fields)
    total = sum(tensor.num_bytes for tensor in tensors)

    def values(tensor: Tensor) -> np.ndarray:
        return _values(found[gguf_name(tensor.name)], tensor, config)

    with new_folder(
        Path(out), total, remedy="or convert to fewer bytes with --dtype bf16"
    ) as draft:
        write_files(draft, tensors, values, metadata={"format": "pt"})
        _write_json(draft / "config.json", _config_json(row, config, fields, dtype))
        if isinstance(tokenizer, dict):
            _write_json(draft / "tokenizer.json", tokenizer)
            _write_json(draft / "tokenizer_config.json", tokenizer_config(fields))
    kinds = [tensor.tensor_type.name for tensor in reader.tensors]
    return Converted(
        folder=Path(out),
        num_tensors=len(tensors),
        num_bytes=total,
        kinds={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        no_tokenizer=tokenizer if isinstance(tokenizer, str) else None,
    )


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; give a .gguf file")
    try:
        import gguf  # heavy, and only needed here
    except ImportError as error:
        raise ImportError(
            f"reading {path.name} needs the package gguf: pip install 'zerojax[gguf]'"
        ) from error
    try:
        check_table(path)
        return gguf.GGUFReader(path)
    # Of the package: kinds that it does not know, and arrays behind the end of the file.
    except (Damage, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{path} is no GGUF file, or is cut short ({printable(error)}); fetch it again"
        ) from None


def _tensors(
    row: Architecture, config: LlamaConfig, shapes: dict[str, tuple[int, ...]], dtype: np.dtype
) -> list[Tensor]:
    """What is written, in order; refuses a file with tensors that are missing, other or more."""
    named = []
    for leaf in row.leaves(config):
        for layer in range(config.num_layers if leaf.is_stacked else 1):
            name = leaf.tensor_of(layer)
            if gguf_name(name) not in shapes:
                raise UnsupportedError(f"tensor {gguf_name(name)!r} is missing in the file")
            named.append(Tensor(name=name, shape=shapes[gguf_name(name)], dtype=dtype))
    more = sorted(set(shapes) - {gguf_name(tensor.name) for tensor in named})
    if more:
        raise UnsupportedError(
            f"{len(more)} tensors have no place in a Llama, such as {more[0]!r}; it would not "
            "compute what theirs does"
        )
    return named


def _values(stored: Any, tensor: Tensor, config: LlamaConfig) -> np.ndarray:
    import gguf  # as in `_open`

    values = gguf.dequantize(stored.data, stored.tensor_type).reshape(tensor.shape)
    if tensor.name.endswith("q_proj.weight"):
        values = _in_halves(values, config.num_heads)
    elif tensor.name.endswith("k_proj.weight"):
        values = _in_halves(values, config.num_kv_heads or config.num_heads)
    return values.astype(tensor.dtype, copy=False)


def _in_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head as Hugging Face has them.

    Rotary positions turn pairs of features: llama.cpp stores the two of a pair side by side,
    Hugging Face stores all first ones, then all second ones.

    Args:
      values: [heads * head_dim, embed].
    """
    pairs = values.reshape(num_heads, -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _config_json(
    row: Architecture, config: LlamaConfig, fields: dict[str, Any], dtype: str
) -> dict[str, Any]:
    written = {
        "architectures": [row.class_name],
        "model_type": row.model_type,
        **row.write_config(config),
        "torch_dtype": dtype,
    }
    for name in ("bos", "eos"):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            written[f"{name}_token_id"] = index
    return written


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
