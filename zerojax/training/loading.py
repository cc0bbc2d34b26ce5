"""Defines `zerojax.load_run`, which reads a run's model for evaluation, generation and export."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax import models, optim, tracing
from zerojax.checkpoint import Checkpointer, CheckpointError, named_step
from zerojax.config import MeshConfig, OffloadConfig, RunConfig, as_mesh_config, from_dict
from zerojax.config.checks import names_keywords, warn_user
from zerojax.config.loader import ConfigError, user_path
from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Batch, Tree
from zerojax.data import PackedSource, RowSource, abstract_global, as_source, load_tokenizer
from zerojax.data.corpus import existing_path
from zerojax.data.text_set import is_text_set
from zerojax.data.tokens import is_token_path
from zerojax.models.losses import next_token_of_call
from zerojax.optim.precision import Precision
from zerojax.placement import device_mesh as meshes
from zerojax.plan.inputs import plan_options
from zerojax.plan.make import Plan, make_plan
from zerojax.plan.refusals import check_rows
from zerojax.plan.weight_wire import DELTA_BITS
from zerojax.runtime import bounded_json
from zerojax.step.build import build_evaluation
from zerojax.step.reshard import from_model_parts, model_parts
from zerojax.step.trained_model import model_of
from zerojax.tracing import trees
from zerojax.training.checkpointing import folder_of, read_parts
from zerojax.training.evaluation import mean_loss
from zerojax.training.run_folder import CONFIG_FILE, TOKENIZER_FILE
from zerojax.training.run_generation import (
    ModelReader,
    RunGenerator,
    check_request,
    check_same_weights,
    end_tokens_of,
)
from zerojax.training.run_record import (
    RECORD_FILE,
    RunRecord,
    TextData,
    abstract_of,
    check_record,
    read_record,
)
from zerojax.training.run_spec import CHECKPOINT_FOLDER
from zerojax.training.validation import each_batch, in_batches
from zerojax.zoo.decoder import Decoder
from zerojax.zoo.hugging_face.folder import NOT_A_RUN, is_model_folder
from zerojax.zoo.text_generation import BATCH_SIZE, Continuation

_EXAMPLE_TOKENS = 8
"""Tokens per row of the example batch for a model that is loaded only to generate text."""


class LoadedRun:
    """A finished or interrupted run, loaded from its folder. Created by `zerojax.load_run`.

    Attributes:
      plan: plan that places the run's arrays on this machine's devices, in the run's precision.
      state: parameters and non-parameter state of the model, without optimizer state.
      weights: "trained", or "ema" if the parameters are the averaged weights, in float32.
      step: step of the checkpoint; `num_steps` is the same, as in a `Trainer`.
      tokenizer: tokenizer of the run; None if the run was not trained on text.
      config: `RunConfig` of a run of `zerojax train`; None for a run of `zerojax.train` in Python.
      record: content of the run's run.json.
      plan_dict: plan with which the step was saved.
    """

    def __init__(
        self,
        plan: Plan,
        state: Tree,
        *,
        replan: Callable[[Any], Plan],
        record: RunRecord,
        folder: Path,
        step: int,
        config: RunConfig | None,
        plan_dict: dict[str, Any],
        has_loss: bool,
        weights: optim.Weights,
    ) -> None:
        self.weights: optim.Weights = weights
        self.plan, self.state, self.step, self.config = plan, state, step, config
        self.record, self.plan_dict = record, plan_dict
        tokenizer_path = folder / TOKENIZER_FILE
        self.tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path.exists() else None
        self._folder, self._replan, self._has_loss = folder, replan, has_loss
        self._evaluations: dict[Any, tuple[Plan, Any]] = {}
        self._apart: dict[str | None, Any] = {}

    @property
    def num_steps(self) -> int:
        """Number of batches on which the model was trained."""
        return self.step

    def __repr__(self) -> str:
        step = f"step {self.step}" + " (ema)" * (self.weights == "ema")
        return (
            f"LoadedRun({str(self._folder)!r}, {step}, {self.record.model_name} on "
            f"{meshes.describe_mesh(self.plan.mesh)}, zero={self.plan.zero})"
        )

    def validation(self) -> RowSource:
        """Returns the part of the run's text that was held out for validation.

        Raises:
          ValueError: no part was held out, or the run's batches came from Python.
        """
        data = self._text_data()
        _, validation, _ = as_source(
            data.data,
            tokenizer=self.tokenizer or "bytes",
            seq_len=data.seq_len,
            global_batch_size=self._rows(),
            validation_fraction=data.validation_fraction,
            pack=data.pack,
            long_texts=data.long_texts,
        )
        if validation is None:
            raise ValueError(
                f"data.validation_fraction={data.validation_fraction} left no validation data; "
                "pass batches: evaluate(batches), or train with a larger fraction"
            )
        return validation

    def source_of(self, path: str | Path) -> RowSource:
        """Opens data for `evaluate` with the run's tokenizer and length of rows, not shuffled.

        The batches have at most as many rows as in training, and hold nearly all rows of the data.

        Args:
          path: a text file, a folder of text files, token files or chats; of a folder that has
            validation data, only these.

        Raises:
          FileNotFoundError: the path does not exist.
          ValueError: the data have too few tokens, the run's tokenizer is not known, or the run's
            batches came from Python.
        """
        data, found = self._text_data(), existing_path(path)
        if self.tokenizer is None and not is_token_path(found) and not is_text_set(found):
            raise ValueError(
                f"{path} is text, but {self._folder} does not hold the tokenizer of its run; pass "
                "token files that were made like those of the run"
            )
        train, validation, _ = as_source(
            path,
            tokenizer=self.tokenizer,
            seq_len=data.seq_len,
            global_batch_size=1,
            validation_fraction=0,
            pack=data.pack,
            long_texts=data.long_texts,
        )
        source, unit = validation or train, self.plan.division.unit
        count = math.ceil(source.num_rows / self._rows())
        rows = max(unit, source.num_rows // count // unit * unit)
        in_order: dict[str, Any] = {"shuffle": False, "global_batch_size": rows}
        if isinstance(source, PackedSource):
            in_order["fill"] = True
        return dataclasses.replace(source, **in_order)

    def _text_data(self) -> TextData:
        if self.record.data is None:
            raise ValueError(
                f"{self._folder} was trained on batches that came from Python, which its folder "
                "does not hold; pass batches to the loaded run: evaluate(batches)"
            )
        return self.record.data

    def _rows(self) -> int:
        """Returns the number of rows of a global batch in training."""
        return jax.tree.leaves(abstract_of(self.record.batch))[0].shape[0]

    def evaluate(self, batches: Any = None, num_batches: int | None = None) -> dict[str, float]:
        """Returns the mean loss and metrics in evaluation mode, as `Trainer.evaluate` does.

        Args:
          batches: validation data in any form that `zerojax.train` takes, but the first batch must
            be full; or a path, whose data are all read, see `source_of`; None: the validation part
            of the run's text.
          num_batches: maximum number of batches; None: the run's `eval_batches` for a source or a
            function (8 if not set), all batches otherwise. "weight" in the result tells how many
            tokens were evaluated.

        Raises:
          ValueError: there is nothing to evaluate on, or the run had a loss function of its own
            that was not passed to `load_run`.
        """
        if not self._has_loss:
            raise ValueError(
                f"{self._folder} was trained with a loss function of your own, which its folder "
                f"does not hold; pass it: zerojax.load_run({str(self._folder)!r}, loss=LOSS)"
            )
        if isinstance(batches, str | Path):
            batches = self.source_of(batches)
            num_batches = num_batches or int(batches.steps_per_epoch)
        batches = self.validation() if batches is None else batches
        batches = in_batches(batches, self.plan.global_batch_size)
        if isinstance(batches, RowSource):
            first = batches.batch(0)
        else:
            iterator = iter(
                each_batch(batches, num_batches, self.record.eval_batches, lambda: (0, 0))
            )
            first = next(iterator, None)
            if first is None:
                raise ValueError("nothing to evaluate: batches is empty; pass at least one batch")
            # The first batch was read for its shapes, and is evaluated like the others.
            batches = itertools.chain([first], iterator)
        plan, evaluate = self._evaluation(first)
        default = self.record.eval_batches
        state = self.state
        if plan.stacks != self.plan.stacks:  # which layers are rolled may depend on the batch
            parts = {**model_parts(self.plan, state), "rng": state["rng"]}
            state = from_model_parts(plan, parts)
        return mean_loss(evaluate, plan, state, batches, num_batches, default)

    def _evaluation(self, batch: Batch) -> tuple[Plan, Any]:
        """Returns the plan and the evaluation function for batches of this shape; cached."""
        example = abstract_global(batch, self.plan.mesh)
        leaves, structure = jax.tree.flatten(example)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._evaluations:
            plan = self._replan(example)
            self._evaluations[key] = plan, build_evaluation(plan)
        return self._evaluations[key]

    @functools.cached_property
    def model(self) -> Any:
        """Model in the user's form, with sharded arrays in the run's compute dtype.

        No device holds more than its shards, and XLA partitions computations under `jax.jit`.
        `to_model` returns unsharded arrays in their stored dtype instead.
        """
        return ModelReader(self.plan).read(self.state)

    def to_model(self) -> Any:
        """Returns the model with unsharded arrays on one device, like `Trainer.to_model`."""
        return model_of(self.plan, self.state)

    def generator(self, quantize: str | None = None, cache: str | None = None) -> RunGenerator:
        """Returns a generator with the sharded model, its tokenizer and its end tokens.

        Arguments as in `generate`. Weights whose layers are not stacked are kept for later calls.
        """
        check_same_weights("trained", quantize)
        reader = ModelReader(self.plan)
        if quantize is None and not reader.generates_apart:
            model = self.model
        elif quantize in self._apart:
            model = self._apart[quantize]
        else:
            model = reader.read(self.state, quantize=quantize, apart=True)
            self._apart[quantize] = model
        vocab_size = getattr(getattr(model, "config", None), "vocab_size", 0)
        ends = end_tokens_of(self.plan, self.tokenizer, self._folder, vocab_size=vocab_size)
        return RunGenerator(
            plan=self.plan,
            model=model,
            tokenizer=self.tokenizer,
            end_tokens=ends,
            cache_kind=cache,
        )

    def continuations(
        self,
        prompts: Sequence[str],
        num_tokens: int | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        quantize: str | None = None,
        cache: str | None = None,
        **options: Any,
    ) -> list[Continuation]:
        """Returns the continuations of texts, with their numbers of tokens.

        Args:
          prompts: the texts to continue.
          num_tokens: maximum number of new tokens; None: 200, or as many as fit the context.
          batch_size: number of texts that are continued together.
          quantize, cache: formats of weights and cache, as in `generate`.
          **options: further options of `generate`.

        Raises:
          ValueError, TypeError: an argument is invalid, as in `generate`.
        """
        formats = {"quantize": quantize, "cache": cache, "batch_size": batch_size}
        check_request(self.plan, prompts, num_tokens, **formats, **options)
        generator = self.generator(quantize, cache)
        sampling = generator.sampling(**options)
        return generator.continuations(prompts, num_tokens, sampling, batch_size)

    def generate(
        self,
        prompts: str | Sequence[str],
        num_tokens: int | None = None,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        end_tokens: Sequence[int] | None = None,
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
        quantize: str | None = None,
        cache: str | None = None,
    ) -> Any:
        """Returns prompts and their continuations, sampled token by token.

        The model stays in shards, and prompts are divided over the data axes of the mesh. Tokens
        depend on the seed, the number of the prompt and their positions, not on other prompts or
        the mesh.

        Args:
          prompts: a text, a sequence of texts, or rows of token ids; each of at least one token.
          num_tokens: number of tokens to add; None: 200, or as many as fit the model's context.
          temperature: 0 takes the most likely token, 1 samples from the model's distribution.
          top_k: number of most likely tokens to sample from; None: all tokens.
          top_p: sample from the most likely tokens whose probabilities sum to `top_p`; None: all
            tokens.
          repetition_penalty: a value above 1 makes tokens that the text already has less likely.
          end_tokens: token ids that each end their text. None: the ids in the Hugging Face folder
            that the run started from, or the tokenizer's end-of-text id. (): no token ends a text.
          seed: seed of the sampling.
          batch_size: number of prompts that are continued together.
          quantize: "int8" or "fp8" rounds the kernels of the layers to 8-bit codes; None: no codes.
          cache: "int8" stores keys and values as int8 codes; None: in the compute dtype.

        Returns:
          A text for a text, a list of texts for texts, and a list of int32 arrays for rows. Each is
          the prompt and the new tokens, up to its end token.

        Raises:
          ValueError: the run has no tokenizer, a prompt is empty or fills the context, or an option
            is out of range.
          TypeError: the model is not a decoder of zerojax.
        """
        options = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "end_tokens": end_tokens,
            "seed": seed,
            "batch_size": batch_size,
        }
        formats = {"quantize": quantize, "cache": cache}
        check_request(self.plan, prompts, num_tokens, **formats, **options)
        return self.generator(quantize, cache).generate(prompts, num_tokens, **options)


@names_keywords()
def load_run(
    run_dir: str | Path,
    step: int | str | None = None,
    *,
    model: tracing.ModelLike | None = None,
    loss: tracing.Loss | None = None,
    mesh: MeshConfig | Mapping[str, Any] | Mesh | None = None,
    example_batch: Batch = None,
    weights: optim.Weights = "trained",
    pretrained: str | Path | None = None,
) -> LoadedRun:
    """Loads a run's model from its folder, sharded over this machine's devices.

    Works for every run with checkpoints, made by `zerojax train` or `zerojax.train`. The run's
    folder describes GPT-2, Llama and BERT models of zerojax, also with Hugging Face weights or
    adapters. Any other model must be passed as `model`.

    Nothing is offloaded. Master weights and optimizer moments on the host or on disk are not read.
    Parameters that the run kept in host memory are read onto the devices, because only a training
    step streams layers from the host; a warning says how many bytes each device holds.

    Args:
      run_dir: folder of the run.
      step: number of a saved step, or the name of a protected step, such as "best"; None: the
        newest.
      model: model as for `zerojax.train`; the checkpoint replaces its values. None: the model that
        the folder describes.
      loss: loss function as for `zerojax.train`; needed to evaluate a run that had a loss function
        of its own.
      mesh: a `MeshConfig`, its fields as a dict, or a `Mesh`; a mesh of fewer devices uses the
        first ones. None: the mesh of the run. If this machine has another number of devices, `data`
        is then the largest size that divides the batch, and `expert` the largest divisor of the
        run's degree that divides the devices.
      example_batch: arrays or `ShapeDtypeStruct`s of a batch; needed if the run's batch was not a
        dict, list or tuple.
      weights: "ema" loads the averaged weights that the run kept (`zerojax.with_ema`).
      pretrained: Hugging Face folder that the run started from; needed if its checkpoints do not
        hold the frozen weights and the folder has moved. None: its recorded path, or the folder of
        `model`.

    Raises:
      FileNotFoundError: the folder has no run.
      ValueError: `model`, `loss` or `example_batch` must be passed, or the folder holds a model and
        no run, or an older version wrote it.
      CheckpointError: the checkpoint does not exist, belongs to another model or has no EMA, or
        the frozen weights are not in the pretrained folder.
    """
    optim.check_weights(weights)
    folder = user_path(run_dir)
    record = _read_record(folder)
    if model is None and not record.architecture:
        function = "" if record.loss != "own" else ", loss=LOSS"
        raise ValueError(
            f"{folder} was trained on a model of your own ({record.model_name}), which its folder "
            f"cannot describe; pass the model: zerojax.load_run({str(folder)!r}, "
            f"model=MODEL{function}) with the same values as in `zerojax.train`"
        )
    checkpoints = record.checkpoints or str(folder / CHECKPOINT_FOLDER)
    if not user_path(checkpoints).is_dir():
        raise CheckpointError(
            f"{folder} has no saved weights; train with checkpoint={str(folder)!r} to save some"
        )
    internal = models.as_model(record.factory() if model is None else model)
    example = example_batch if example_batch is not None else abstract_of(record.batch)
    chosen, has_loss = _loss(internal, record, loss, given_model=model is not None)
    if not has_loss:
        if not isinstance(getattr(internal, "template", None), Decoder):
            raise ValueError(
                f"{folder} was trained with a loss function of your own; pass it: "
                f"zerojax.load_run({str(folder)!r}, loss=LOSS)"
            )
        example = None  # loss and batch are unknown; the model itself takes tokens
    elif example is None:
        raise ValueError(
            f"the batches of {folder} are a tree that its folder cannot describe; pass one batch: "
            f"zerojax.load_run({str(folder)!r}, example_batch=BATCH)"
        )
    settings, devices = _mesh(record, mesh, example)
    if example is None:
        tokens = jax.ShapeDtypeStruct((devices.size, _EXAMPLE_TOKENS), jnp.int32)
        example = {"tokens": tokens, "targets": tokens}

    def replan(batch: Batch) -> Plan:
        return make_plan(
            internal,
            devices,
            example_batch=batch,
            loss=chosen,
            optimizer=optim.sgd(1.0),  # its state is not read
            zero=settings.zero,
            precision=_precision(record, weights),
            # Patterns, which here match exactly the names that the run froze.
            freeze=tuple(f"^{name}$" for name in map(_escaped, record.frozen)),
            **plan_options(settings),
        )

    plan = replan(example)
    if record.mesh.offload.params != DEVICE:
        _warn_of_parameters(folder, plan, record.mesh.offload.params)
    with Checkpointer(checkpoints) as checkpointer:
        if isinstance(step, str):
            step = named_step(checkpointer.kept_steps(), step)
        place = folder_of(plan) if pretrained is None else pretrained
        restored, parts = read_parts(checkpointer, plan, step, weights, place)
    return LoadedRun(
        plan,
        from_model_parts(plan, parts),
        replan=replan,
        record=record,
        folder=folder,
        step=restored.step,
        config=_run_config(folder),
        plan_dict=restored.plan,
        has_loss=has_loss,
        weights=weights,
    )


def _precision(record: RunRecord, weights: optim.Weights) -> Precision:
    """Returns the dtypes of the run; parameters are float32 if averaged weights are loaded."""
    precision = record.as_precision()
    if weights == "ema":
        return dataclasses.replace(precision, param_dtype=jnp.float32)
    return precision


def _warn_of_parameters(folder: Path, plan: Plan, tier: str) -> None:
    leaves = jax.tree.leaves([plan.abstract_stored[part] for part in ("params", "frozen")])
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    warn_user(
        f"{folder} trained with its parameters off the device (offload.params: {tier}); they are "
        f"read onto the devices, {trees.format_bytes(held)} of each, since only a training step "
        "streams layers. If that is too much, "
        + (
            "use more devices"
            if plan.zero == 3
            else "split them over all devices: mesh={'zero': 3}"
        )
    )


def _read_record(folder: Path) -> RunRecord:
    path = folder / RECORD_FILE
    if path.exists():
        record = read_record(bounded_json.load(path), str(path))
        check_record(record, str(path))
        return record
    if is_model_folder(folder):
        raise ValueError(f"{folder} {NOT_A_RUN}")
    if any(True for _ in folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has exported weights, not a run; pass the folder of the run, or read the "
            "arrays with safetensors.numpy.load_file"
        )
    if (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} has no {RECORD_FILE}: an older version wrote the run; continue training "
            "in it, with the same command or call, to write the file"
        )
    raise FileNotFoundError(
        f"{folder} holds no run: there is no {RECORD_FILE} in it; pass the run folder that "
        "training printed"
    )


def _run_config(folder: Path) -> RunConfig | None:
    """Returns the settings of a run made by the command `zerojax train`; None for a run made by the
    Python function `zerojax.train`."""
    path = folder / CONFIG_FILE
    values = bounded_json.load(path) if path.exists() else None
    if not isinstance(values, dict) or "run_dir" not in values:
        return None
    try:
        return from_dict(RunConfig, values)
    except ConfigError as error:
        raise ConfigError(error.message, error.key, str(path)) from error


def _loss(
    model: tracing.Model, record: RunRecord, loss: tracing.Loss | None, *, given_model: bool
) -> tuple[tracing.Loss, bool]:
    """Returns (a loss with which the model is traced, True if it is the run's own loss)."""
    if loss is not None:
        return loss, True
    if record.loss == "own" and given_model:
        raise ValueError(
            "the run was trained with a loss function of your own; pass it too: "
            "zerojax.load_run(..., model=MODEL, loss=LOSS)"
        )
    if record.loss == "model":
        return models.default_loss(model), True
    return next_token_of_call, record.loss == "next_token"


def _escaped(name: str) -> str:
    return "".join(f"\\{c}" if c in r".^$*+?{}[]\|()" else c for c in name)


def _mesh(record: RunRecord, mesh: Any, example: Batch) -> tuple[MeshConfig, Mesh]:
    """Returns (mesh options, mesh) on which a run is loaded, from the argument of `load_run`."""
    # Secondary shards do not change the values read, and these devices may not form nodes. Weights
    # of which the run keeps copies are read exactly. Nothing is recomputed without a backward pass.
    wire = dataclasses.replace(record.mesh.wire, secondary=False)
    if wire.weights in DELTA_BITS:
        wire = dataclasses.replace(wire, weights="compute")
    own = dataclasses.replace(
        record.mesh, offload=OffloadConfig(), node=None, wire=wire, roll_remat="auto"
    )
    if isinstance(mesh, Mesh):
        return own, meshes.normalise_mesh(mesh)
    there = jax.devices()
    if mesh is None:
        settings = own
        if record.num_devices != len(there):
            axes = own.devices_per_shard
            settings = dataclasses.replace(own, data=-1, expert=1, replica=1)
            # If the run's axes do not divide these devices, all devices become data shards.
            if len(there) % axes:
                settings = dataclasses.replace(settings, context=1, stage=1, model=1)
            axes = settings.devices_per_shard
            there = there[: _usable(len(there), axes, example, own.fixed_pieces)]
            degree = dataclasses.replace(settings, expert=own.expert).expert_on(len(there))
            settings = dataclasses.replace(settings, expert=degree)
    else:
        settings = as_mesh_config(mesh)
        if not isinstance(mesh, MeshConfig):  # options that the dict omits are those of the run
            ones = dataclasses.replace(own, expert=1, context=1, model=1, stage=1, replica=1)
            base = dataclasses.replace(ones, data=-1)
            settings = dataclasses.replace(base, **{name: getattr(settings, name) for name in mesh})
        asked = settings.data * settings.expert * settings.devices_per_shard * settings.replica
        # With data=-1 the product is negative, and all devices are used.
        if 0 < asked < len(there) and jax.process_count() == 1:
            there = there[:asked]
    settings = dataclasses.replace(settings, offload=OffloadConfig())
    return settings, meshes.make_mesh(settings, there)


def _usable(count: int, axes: int, example: Batch, pieces: int | None) -> int:
    """Returns the largest number of devices whose data shards divide the batch's rows evenly.

    Several processes must use all of their devices.

    Args:
      count: number of devices that exist.
      axes: number of devices of one data shard.
      example: the global batch; None if there is none.
      pieces: as `MeshConfig.fixed_pieces`.
    """
    if example is None or jax.process_count() > 1:
        return count
    rows = check_rows(example)
    fits = lambda shards: rows % shards == 0 and (pieces or 0) % shards == 0  # noqa: E731
    return max((n for n in range(axes, count + 1, axes) if fits(n // axes)), default=count)
