"""Generates text and tokens with the weights of a run, sharded on the run's own mesh."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config import SamplesConfig
from zerojax.config.display import quoted
from zerojax.config.generation_limits import check_generation
from zerojax.config.late_dataclasses import dataclass
from zerojax.data import BpeTokenizer, HuggingFaceTokenizer
from zerojax.data.tokenizer import Tokenizer
from zerojax.optim import Weights
from zerojax.placement.state import TrainState
from zerojax.plan.make import Plan
from zerojax.runtime.bounded_json import load
from zerojax.runtime.memory import allocating_for
from zerojax.step.reshard import model_parts
from zerojax.training.metrics.metric_files import SAMPLE
from zerojax.training.metrics.runlog import RunLog
from zerojax.training.process_agreement import check_same_run
from zerojax.training.run_folder import DESCRIPTION_FILE
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.generation import as_prompts, check_decoder, continue_rows
from zerojax.zoo.hugging_face import Pretrained, end_tokens_in
from zerojax.zoo.sampling import Sampling
from zerojax.zoo.text_generation import (
    BATCH_SIZE,
    DEFAULT_NUM_TOKENS,
    Continuation,
    continue_texts,
)
from zerojax.zoo.weight_only import is_divided_by_layers, is_faster_apart, with_layers_apart

_DEVICE = "device"
_BLOCKS = "blocks/"
"""Prefix of the parameters of a decoder's layers."""
MAX_SHOWN = 300
"""Largest number of characters of a sample on the terminal."""


class ModelReader:
    """Converts states of a plan to the sharded model, in the run's compute dtype.

    No device holds more than its shards.

    Args:
      plan: plan of the states.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cast = functools.cache(self._build_cast)

    @property
    def generates_apart(self) -> bool:
        """Whether generation is faster with layers that are not stacked, on the run's devices."""
        model = getattr(self._plan.users_model, "template", None)
        return is_faster_apart(model, self._plan.mesh.devices.flat[0].platform)

    @allocating_for("weights to generate with")
    def read(
        self,
        state: TrainState,
        weights: Weights = "trained",
        quantize: str | None = None,
        *,
        apart: bool = False,
    ) -> Any:
        """Returns the model in the user's form.

        Args:
          state: train state; it stays valid.
          weights: "ema" reads the averaged weights instead of the trained ones.
          quantize: "int8" or "fp8" rounds the kernels of a decoder's layers to codes, which are for
            generation only (see `zoo.weight_only`); None rounds nothing.
          apart: whether each layer of a decoder gets arrays of its own, also for generation only.
            Layers that pipeline stages divide stay stacked. `quantize` implies it, at any stage.

        Raises:
          ValueError: the run keeps no EMA, or `quantize` does not fit the model.
          TypeError: the model is not a decoder, and `quantize` or `apart` is given.
        """
        parts = model_parts(self._plan, state, weights=weights)
        # Offloaded parameters are in host memory, so they are first copied to the device.
        stored = {
            name: x if x.sharding.memory_kind in (None, _DEVICE) else _on_device(x)
            for name, x in {**parts["params"], **parts["frozen"]}.items()
        }
        to_model = self._plan.users_model.to_source
        if quantize is not None or apart:
            model = to_model(stored, parts["extras"])
            check_decoder(model)
            apart = quantize is not None or not is_divided_by_layers(model)
        if not apart:
            return to_model(self._in_compute_dtype(stored), parts["extras"])
        # Layers are cast one by one, so that no stacked copy of them is made.
        placed = self._plan.users_placement.leaves
        of_layers = [name for name in stored if name.startswith(_BLOCKS) and not placed[name].codes]
        others = {name: x for name, x in stored.items() if name not in of_layers}
        model = to_model(stored | self._in_compute_dtype(others), parts["extras"])
        return with_layers_apart(model, quantize, self._plan.precision.compute_dtype)

    def _in_compute_dtype(self, stored: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns copies in the compute dtype; codes are decoded."""
        return self._cast(tuple((name, x.sharding) for name, x in stored.items()))(stored)

    def _build_cast(self, shardings: tuple[tuple[str, Any], ...]) -> Any:
        dtype, leaves = self._plan.precision.compute_dtype, self._plan.users_placement.leaves

        def convert(name: str, x: jax.Array) -> jax.Array:
            codes = leaves[name].codes
            x = x if codes is None else codes.decode(x, dtype)
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        def cast(stored: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: convert(name, x) for name, x in stored.items()}

        return jax.jit(cast, out_shardings=dict(shardings))


def _on_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, x.sharding.with_memory_kind(_DEVICE))


@dataclass(frozen=True, kw_only=True)
class RunGenerator:
    """Generates text or tokens with the model of a run.

    Attributes:
      plan: plan that places the model; prompts are divided over its data axes.
      model: model in the user's form, sharded over `plan.mesh`.
      tokenizer: tokenizer for texts; None if there is none.
      end_tokens: token ids that end a text unless the caller passes others.
      cache_kind: "int8" stores keys and values as int8 codes; None in the compute dtype.
    """

    plan: Plan
    model: Decoder
    tokenizer: Tokenizer | None
    end_tokens: tuple[int, ...] = ()
    cache_kind: str | None = None

    def generate(
        self,
        prompts: str | Sequence[str],
        num_tokens: int | None,
        *,
        end_tokens: Sequence[int] | None,
        batch_size: int = BATCH_SIZE,
        **options: Any,
    ) -> Any:
        """Continues a text, texts, or rows of tokens. `check_request` has accepted the arguments.

        Args:
          prompts: a text, a sequence of texts, or rows of token ids.
          num_tokens: number of new tokens; None: 200, or as many as fit the context.
          end_tokens: token ids that each end their text; None: `self.end_tokens`.
          batch_size: number of prompts that are continued together.
          **options: further fields of `Sampling`.

        Returns:
          A text for a text, a list of texts for texts, and a list of int32 arrays for rows. Each is
          the prompt and the new tokens, up to its end token.
        """
        sampling = self.sampling(end_tokens=end_tokens, **options)
        if isinstance(prompts, str):
            return self.continuations([prompts], num_tokens, sampling)[0].text
        if not hasattr(prompts, "dtype") and all(isinstance(each, str) for each in prompts):
            found = self.continuations(prompts, num_tokens, sampling, batch_size)
            return [each.text for each in found]
        return self._rows(prompts, num_tokens, sampling, batch_size)

    def sampling(self, *, end_tokens: Sequence[int] | None = None, **options: Any) -> Sampling:
        """Returns the options of the sampling; arguments as in `generate`."""
        ends = self.end_tokens if end_tokens is None else tuple(end_tokens)
        return Sampling(**options, end_tokens=ends)

    def continuations(
        self,
        prompts: Sequence[str],
        num_tokens: int | None,
        sampling: Sampling,
        batch_size: int = BATCH_SIZE,
    ) -> list[Continuation]:
        """Continues texts, and returns each continuation with its number of tokens.

        Args:
          prompts: texts to continue.
          num_tokens: maximum number of new tokens; None: 200, or as many as fit the context.
          sampling: options of the sampling.
          batch_size: number of texts that are continued together.
        """
        return continue_texts(
            self.model,
            self.tokenizer,
            prompts,
            num_tokens,
            sampling,
            batch_size=batch_size,
            row_sharding=self.plan.batch_sharding,
            cache_kind=self.cache_kind,
        )

    def _rows(
        self,
        prompts: str | Sequence[str],
        num_tokens: int | None,
        sampling: Sampling,
        batch_size: int,
    ) -> list[np.ndarray]:
        check_decoder(self.model)
        context = self.model.config.max_seq_len
        rows = as_prompts(prompts, max_seq_len=context)
        room = context - max((len(row) for row in rows), default=0)
        count = max(1, min(DEFAULT_NUM_TOKENS, room)) if num_tokens is None else num_tokens
        added = continue_rows(
            self.model,
            rows,
            count,
            sampling,
            row_sharding=self.plan.batch_sharding,
            num_rows=min(batch_size, len(rows)),
            cache_kind=self.cache_kind,
        )
        return [
            np.concatenate([row, new[:length]]).astype(np.int32)
            for row, new, length in zip(rows, *added, strict=True)
        ]


def check_request(
    plan: Plan,
    prompts: str | Sequence[str],
    num_tokens: int | None,
    *,
    weights: Weights = "trained",
    **options: Any,
) -> None:
    """Checks the arguments of a generation before any weight is read or converted.

    Args:
      plan: plan of the run, for the sizes of its model.
      prompts: texts or rows of tokens, as for `RunGenerator.generate`.
      num_tokens: number of new tokens.
      weights: weights that are to be read.
      **options: further arguments of `check_generation`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range, or another process has other arguments; raised on
        every process then.
    """
    # Processes are compared first, so that all of them see an error that only one makes.
    is_text = isinstance(prompts, str) or not hasattr(prompts, "__iter__")
    each = [prompts] if is_text else list(prompts)
    check_same_run(
        {
            "weights": str(weights),
            "the list of prompts": json.dumps(each, default=_as_list),
            "num_tokens": str(num_tokens),
            **{name: repr(value) for name, value in options.items()},
        }
    )
    config = getattr(getattr(plan.users_model, "template", None), "config", None)
    check_generation(
        num_tokens=num_tokens,
        vocab_size=getattr(config, "vocab_size", None),
        context=getattr(config, "max_seq_len", None),
        **options,
    )
    if is_text and not isinstance(prompts, str):
        raise TypeError(
            f"prompts={quoted(prompts)} is a {type(prompts).__name__}; pass a text, a list of "
            "texts, or rows of token ids"
        )
    if not each:
        raise ValueError("there are 0 prompts; pass at least one")


def check_same_weights(weights: Weights, quantize: str | None) -> None:
    """Raises ValueError on every process if two processes are about to read other weights."""
    check_same_run({"weights": str(weights), "quantize": str(quantize)})


def _as_list(x: object) -> Any:
    return x.tolist() if hasattr(x, "tolist") else str(x)


def end_tokens_of(
    plan: Plan, tokenizer: Tokenizer | None, folder: Path | None = None, *, vocab_size: int
) -> tuple[int, ...]:
    """Returns the token ids that end a text of a run's model, as far as its files state them.

    They come from the Hugging Face folder that the run started from; otherwise the only id is the
    tokenizer's end-of-text id.

    Args:
      plan: plan of the run.
      tokenizer: tokenizer of the run, or None.
      folder: folder of the run, or None.
      vocab_size: size of the model's vocabulary; ids from this number on are left out.
    """
    model, ids = plan.users_model, ()
    if isinstance(model, Pretrained):
        ids = end_tokens_in(model.folder.path, model.folder.config)
    elif folder is not None and (folder / DESCRIPTION_FILE).is_file():
        description = load(folder / DESCRIPTION_FILE)
        source = description.get("source") if isinstance(description, Mapping) else None
        if source is not None:
            ids = end_tokens_in(Path(source), description.get("config"))
    ids = ids or _end_of_text(tokenizer)
    return tuple(token for token in ids if 0 <= token < vocab_size)


def _end_of_text(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(tokenizer, BpeTokenizer):
        return tuple(tokenizer.separator.tolist())
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.end is not None:
        return (tokenizer.id_of(tokenizer.end),)
    return ()


def log_samples(trainer: Any, settings: SamplesConfig, log: RunLog | None) -> None:
    """Continues the prompts of `settings` with the weights of `trainer`, and logs the texts.

    All processes generate together; the log of process 0 is written.

    Args:
      trainer: trainer of a run of texts.
      settings: prompts and options of the sampling.
      log: log of the run; None: nothing is generated.

    Raises:
      ValueError: the run has no tokenizer, a prompt has no tokens or fills the context, or
        `settings.num_tokens` exceeds the context.
      TypeError: the model is not a decoder of zerojax.
    """
    if log is None or not settings.prompts:
        return
    texts = trainer.generate(
        list(settings.prompts),
        settings.num_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
    )
    for prompt, text in zip(settings.prompts, texts, strict=True):
        line = f"step {trainer.num_steps}: sample {quoted(text, MAX_SHOWN)}"
        log.event(SAMPLE, trainer.num_steps, line, prompt=prompt, sample=text)
