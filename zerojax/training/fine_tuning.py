"""Writes the run file for fine-tuning a pretrained model on chats; trains nothing.

Chooses settings that the user did not set (adapters, rows, batch, steps), and writes the reason
beside each. Checks weights, chats and sizes before any array is on a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config import RunConfig, load, run_file_lines, to_dict
from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.data import as_source
from zerojax.data.chats import PreparedChats, prepare_chats
from zerojax.data.chats.chat_preparation import Answers, OnBad
from zerojax.data.corpus import existing_path
from zerojax.data.opening import open_texts
from zerojax.data.text_set import TextSet, check_targets, is_text_set
from zerojax.data.tokens import is_token_path
from zerojax.runtime.user_files import replace_text
from zerojax.training.run_file import plan_from_config, tokenizer_spec
from zerojax.training.run_folder import CONFIG_FILE
from zerojax.training.run_spec import CHECKPOINT_FOLDER
from zerojax.zoo import DecoderConfig, GPT2Config, LlamaConfig
from zerojax.zoo.hugging_face import Pretrained, from_hugging_face

RUN_FILE, CHATS_FOLDER = "run.yaml", "chats"
RANK, ALPHA = 16, 32.0
ADAPTER_RATE, WHOLE_RATE = 2e-4, 2e-5
BATCH_ROWS = 16
LONG_ROW = 2048
"""Maximum row length in tokens that is chosen. Longer rows leave less unused space at their end."""
EPOCH_ROWS = 20 * BATCH_ROWS
"""Minimum rows per epoch for which longer rows are chosen, so that an epoch has enough steps."""
_UNIT = 64
_MANY_STEPS = 10**9


@dataclass(frozen=True, kw_only=True)
class ChosenSetting:
    """Default for a setting: its key (such as "model.lora.rank"), value, and reason."""

    key: str
    value: Any
    why: str = ""


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Options of a fine-tuning run: model, data and overrides.

    Attributes:
      folder: Hugging Face folder with config.json, safetensors and tokenizer.json.
      data: file or folder of chats as for `prepare_chats`, or a folder that `prepare_chats` wrote.
      run_dir: folder of the run; the run file and the prepared chats are written into it.
      overrides: settings KEY=VALUE of the run, which replace chosen settings.
      epochs: number of passes over the chats, unless `overrides` sets `steps`.
      template: chat template, as in `prepare_chats`; None: that of the tokenizer.
      bad: what to do with invalid chats, as in `prepare_chats`.
      answers: which answers are trained on, as in `prepare_chats`.
    """

    folder: str
    data: str
    run_dir: str
    overrides: Sequence[str] = ()
    epochs: float = 3.0
    template: str | None = None
    bad: OnBad = "refuse"
    answers: Answers = "all"

    @property
    def run_file(self) -> Path:
        """Path of the run file that is written."""
        return user_path(self.run_dir).absolute() / RUN_FILE

    def is_given(self, name: str) -> bool:
        """Returns True if the last part of an override's key is `name`, or if the word `name` is in
        an override's value that is a section, {...}."""
        for word in self.overrides:
            key, _, value = word.partition("=")
            is_section = value.lstrip().startswith("{")
            if key.strip().removeprefix("--").split(".")[-1] == name:
                return True
            if is_section and re.search(rf"\b{name}\b", value):
                return True
        return False


@dataclass(frozen=True, kw_only=True)
class WrittenRun:
    """A written run file, ready to train.

    Attributes:
      file: path of the run file.
      config: settings in the run file.
      prepared: the prepared chats; None if the chats were prepared before.
      notes: sentences about the chats for the user.
    """

    file: Path
    config: RunConfig
    prepared: PreparedChats | None
    notes: tuple[str, ...]


@names_keywords()
def write_run(
    asked: FineTuning, *, count_devices: Callable[[], int], is_planned: bool = True
) -> WrittenRun:
    """Checks weights and chats, prepares the chats, chooses sizes, and writes the run file.

    Args:
      asked: options of the fine-tuning run.
      count_devices: function that returns the number of devices, over which a batch is divided
        evenly. It is called after weights and chats were checked.
      is_planned: True: check with a plan, without arrays, that the run fits the devices.

    Raises:
      FileNotFoundError: the folder or the data do not exist, or weights or tokenizer are missing.
      ValueError: the run exists already, the model is not a decoder, the chats cannot be trained
        on, or sizes do not fit.
      ConfigError: an override is invalid.
    """
    if not asked.epochs > 0 or not math.isfinite(asked.epochs):
        raise ValueError(f"epochs={asked.epochs:g} is not above 0; use a number such as 1 or 3")
    file = asked.run_file
    _check_new(file)
    pretrained = _open_decoder(asked.folder)
    given = _is_prepared(asked)
    chats = existing_path(asked.data).absolute() if given else file.parent / CHATS_FOLDER
    choices = _first_choices(asked, pretrained, chats)
    config = _settings(choices, asked)
    _check_their_keys(config, choices)
    with contextlib.ExitStack() as undo:
        prepared = None
        if not given:
            undo.enter_context(_removed_after_an_error(file.parent, chats))
            prepared = prepare_chats(
                asked.data,
                chats,
                tokenizer=str(pretrained.folder.path),
                template=asked.template,
                bad=asked.bad,
                answers=asked.answers,
            )
        note = check_targets(*open_texts(chats))
        notes = () if note is None else (note,)
        sizes = _choose_sizes(asked, config, pretrained, chats, count_devices)
        choices = [*choices, *sizes]
        config = _settings(choices, asked)
        if is_planned:
            plan_from_config(config, count_devices(), is_here=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, run_file_text(config, choices, asked))
        assert load(RunConfig, file) == config, "the file says what was chosen"
    return WrittenRun(file=file, config=config, prepared=prepared, notes=notes)


def _check_new(file: Path) -> None:
    """Raises if the folder of the run file already has a run.

    Raises:
      ValueError: the message says how to continue that run.
    """
    if file.exists():
        raise ValueError(
            f"{file} exists already: continue with `zerojax train {shlex.quote(str(file))}`, or "
            "choose another folder with --out"
        )
    if (file.parent / CONFIG_FILE).exists() or (file.parent / CHECKPOINT_FOLDER).exists():
        raise ValueError(f"{file.parent} holds another run; choose another folder with --out")


def _open_decoder(folder: str) -> Pretrained:
    """Opens the folder of a pretrained decoder without reading its weights.

    Raises:
      ValueError: the model is not a decoder, or has a head for a task.
    """
    pretrained = from_hugging_face(folder)
    if not isinstance(pretrained.config, DecoderConfig | LlamaConfig | GPT2Config):
        heads = ""
        if pretrained.row.tasks:
            heads = (
                ". To classify texts, train it in Python with a head: "
                "zerojax.from_hugging_face(FOLDER, task=zerojax.zoo.TaskConfig(labels=...))"
            )
        raise ValueError(
            f"{folder} has a model of type {pretrained.row.model_type}, which is not a decoder; "
            f"use the folder of a decoder, such as llama or qwen3, to fine-tune on chats{heads}"
        )
    if pretrained.config.task is not None:
        raise ValueError(
            f"{folder} has a head for {pretrained.config.task.kind}, which continues no text; "
            f"use the folder of a {pretrained.row.class_name} to fine-tune on chats"
        )
    return pretrained


def _is_prepared(asked: FineTuning) -> bool:
    """Returns True if `asked.data` is a folder of chats that `zerojax data prepare` wrote.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: the data are tokens without an answer mask, or the chats are already prepared and
        options for preparing them were passed.
    """
    path = existing_path(asked.data)
    if is_text_set(path):
        for name in ("template", "bad", "answers"):
            if getattr(asked, name) != getattr(FineTuning, name):
                raise ValueError(
                    f"--{name} {getattr(asked, name)} is an option for preparing chats, but "
                    f"{asked.data} is already prepared; omit the option, or pass the "
                    "original chats"
                )
        return True
    if is_token_path(path):
        raise ValueError(
            f"{asked.data} holds tokens of plain text, without marked answers; "
            "pass chats (.jsonl, .parquet, or what `zerojax data prepare --format chat` wrote), or "
            f"train on all tokens with `zerojax train model.pretrained={asked.folder} "
            f"data.path={asked.data}`"
        )
    return False


def _first_choices(asked: FineTuning, pretrained: Pretrained, chats: Path) -> list[ChosenSetting]:
    """Returns the chosen settings that do not depend on the chats."""
    choices = [
        ChosenSetting(key="run_dir", value=str(asked.run_file.parent)),
        ChosenSetting(key="model.pretrained", value=str(pretrained.folder.path)),
        ChosenSetting(key="data.path", value=str(chats)),
        ChosenSetting(
            key="model.remat",
            value="full",
            why="stores activations of one layer at a time; none is faster if memory allows",
        ),
        ChosenSetting(
            key="mesh.zero",
            value=3,
            why="weights, frozen ones too, are sharded over the devices and gathered by layer",
        ),
        ChosenSetting(
            key="model.lora.rank",
            value=RANK,
            why="adapters beside every projection, the rest is frozen; 0: all weights are trained",
        ),
    ]
    rank = _settings(choices, asked).model.lora.rank
    if rank:
        choices.append(
            ChosenSetting(
                key="model.lora.alpha", value=ALPHA, why="factor alpha / rank of adapters"
            )
        )
    return [
        *choices,
        ChosenSetting(
            key="optimizer.learning_rate",
            value=ADAPTER_RATE if rank else WHOLE_RATE,
            why="usual for adapters; ten times less for all weights"
            if rank
            else "usual for all weights; ten times more for adapters",
        ),
        ChosenSetting(
            key="optimizer.beta2", value=0.999, why="usual with published learning rates"
        ),
        ChosenSetting(
            key="optimizer.weight_decay",
            value=0.0,
            why="it would pull towards 0, not towards the weights in the folder",
        ),
    ]


def _settings(choices: Sequence[ChosenSetting], asked: FineTuning) -> RunConfig:
    """Returns the settings of a run: the chosen values, replaced by the user's overrides."""
    chosen = {choice.key: choice.value for choice in choices}
    # Before steps are chosen, a warm-up that the user sets must not be above their number.
    words = [f"{key}={value}" for key, value in {"steps": _MANY_STEPS, **chosen}.items()]
    return load(RunConfig, None, [*words, *asked.overrides])


def _check_their_keys(config: RunConfig, choices: Sequence[ChosenSetting]) -> None:
    """Raises if an override KEY=VALUE contradicts an option of `zerojax finetune`.

    Raises:
      ValueError: the message names the key.
    """
    said = {choice.key: choice.value for choice in choices}
    for key, found, by in (
        ("model.pretrained", config.model.pretrained, "FOLDER"),
        ("data.path", config.data.path, "DATA"),
        ("run_dir", config.run_dir, "--out"),
    ):
        if found != said[key]:
            raise ValueError(
                f"{key}={found} conflicts with {by}, which sets {key}={said[key]}; omit the "
                f"override {key}"
            )


@contextlib.contextmanager
def _removed_after_an_error(run_dir: Path, chats: Path) -> Iterator[None]:
    """After an error in a `with` block, deletes the run folder, or only the prepared chats if the
    run folder existed before, so that the command can be repeated.
    """
    had_run, had_chats = run_dir.exists(), chats.exists()
    try:
        yield
    except BaseException:
        if not had_run:
            shutil.rmtree(run_dir, ignore_errors=True)
        elif not had_chats:
            shutil.rmtree(chats, ignore_errors=True)
        raise


def _choose_sizes(
    asked: FineTuning,
    config: RunConfig,
    pretrained: Pretrained,
    chats: Path,
    count_devices: Callable[[], int],
) -> list[ChosenSetting]:
    """Chooses row length, batch size and number of steps from the lengths of the chats."""
    parts = [part for part in open_texts(chats) if part is not None]
    context = pretrained.config.max_seq_len
    longest = _longest_row(parts, config, asked, context)
    num_tokens = sum(part.num_tokens for part in parts)
    choices, seq_len = [], config.data.seq_len
    if not asked.is_given("seq_len"):
        seq_len = choose_row_length(longest, num_tokens, context)
        why = f"the longest chat has {longest}, the model's context {context}"
        choices.append(ChosenSetting(key="data.seq_len", value=seq_len, why=why))
    # Batches of one row, since their size is chosen below, by the number of rows.
    train, validation, _ = as_source(
        str(chats),
        tokenizer=tokenizer_spec(config),
        seq_len=seq_len,
        global_batch_size=1,
        validation_fraction=config.data.validation_fraction,
        vocab_size=pretrained.config.vocab_size,
        long_texts=config.data.long_texts,
    )
    num_devices, batch = count_devices(), config.global_batch_size
    if config.elasticity.enabled:
        batch = config.on_devices(num_devices).global_batch_size
    elif not asked.is_given("global_batch_size"):
        batch = choose_batch(train.num_rows, num_devices * (config.num_microbatches or 1))
        why = f"rows, of {train.num_rows} in an epoch"
        choices.append(ChosenSetting(key="global_batch_size", value=batch, why=why))
    dataclasses.replace(train, global_batch_size=batch)  # raises if the chats fill no batch
    epoch = train.num_rows / batch
    if not asked.is_given("steps"):
        steps = math.ceil(asked.epochs * epoch)
        choices.append(ChosenSetting(key="steps", value=steps, why=f"{asked.epochs:g} epochs"))
    if validation is not None and not asked.is_given("eval_every"):
        value = max(round(epoch), 1)
        choices.append(ChosenSetting(key="eval_every", value=value, why="after each epoch"))
    return choices


def _longest_row(
    parts: Sequence[TextSet], config: RunConfig, asked: FineTuning, context: int
) -> int:
    """Returns the number of tokens of the longest chat, at most the model's context.

    Raises:
      ValueError: `seq_len` is longer than the model's context, or a chat is and `long_texts` is
        "refuse".
    """
    if asked.is_given("seq_len") and config.data.seq_len > context:
        raise ValueError(
            f"seq_len={config.data.seq_len} is above the context of {asked.folder}, {context} "
            f"tokens (its config.json); lower it to at most {context}"
        )
    longest, number = max(
        (int(part.lengths.max()), part.first + int(np.argmax(part.lengths))) for part in parts
    )
    if longest > context and config.data.long_texts == "refuse":
        raise ValueError(
            f"text {number + 1} of {asked.data} has {longest} tokens, but the context of "
            f"{asked.folder} is {context} (its config.json); set data.long_texts=split to train "
            "on parts of such texts, or data.long_texts=drop to leave them out"
        )
    return min(longest, context)


@names_keywords()
def choose_row_length(longest: int, num_tokens: int, context: int) -> int:
    """Returns a row length in tokens that is enough for the longest text.

    The length is doubled, up to `LONG_ROW`, as long as an epoch still has `EPOCH_ROWS` rows.

    Args:
      longest: number of tokens of the longest text, at most `context`.
      num_tokens: number of tokens of all texts.
      context: maximum number of tokens of the model.
    """
    size = min(-(-longest // _UNIT) * _UNIT, context)
    while 2 * size <= min(context, LONG_ROW) and num_tokens >= 2 * size * EPOCH_ROWS:
        size *= 2
    return size


@names_keywords()
def choose_batch(num_rows: int, unit: int) -> int:
    """Returns the rows of a batch: the smallest multiple of `unit` that is at least 16.

    If an epoch has fewer rows than that, returns the largest multiple of `unit` that an epoch
    fills, but at least `unit`.

    Args:
      num_rows: number of rows in one epoch.
      unit: number of rows that all devices process at once.
    """
    wanted = -(-BATCH_ROWS // unit) * unit
    return min(wanted, max(num_rows // unit * unit, unit))


@names_keywords()
def run_file_text(config: RunConfig, choices: Sequence[ChosenSetting], asked: FineTuning) -> str:
    """Returns YAML with the settings that were chosen or differ from defaults, and reasons."""
    reasons = {}
    values = to_dict(config)
    for choice in choices:
        kept = _at(values, choice.key) == choice.value
        reasons[choice.key] = choice.why if kept else "given"
    file = shlex.quote(str(asked.run_file))
    lines = [
        f"# Fine-tunes {asked.folder} on {asked.data}; written by `zerojax finetune`.",
        f"# Change what you like, then: zerojax train {file}",
        *run_file_lines(config, reasons),
    ]
    return "\n".join(lines) + "\n"


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for name in key.split("."):
        found = found[name]
    return found
