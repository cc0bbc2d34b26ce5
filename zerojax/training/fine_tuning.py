"""Writes the run file for fine-tuning a pretrained model on chats.

Chooses settings that the user did not set (adapters, rows, batch, steps) and writes a reason beside
each. Checks weights, chats and sizes before any array is on a device; trains nothing.
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
"""Maximum chosen row length in tokens. Longer rows leave less space unused at the row end."""
EPOCH_ROWS = 20 * BATCH_ROWS
"""Minimum rows per epoch for choosing longer rows: with fewer, an epoch has too few steps."""
_UNIT = 64
_MANY_STEPS = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenSetting:
    """A default for a setting: key such as "model.lora.rank", value, and reason."""

    key: str
    value: Any
    why: str = ""


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Options of a fine-tuning run: model, data and overrides.

    Attributes:
      folder: a Hugging Face folder with config.json, safetensors and tokenizer.json.
      data: chats as in `prepare_chats`, or a folder that it has written.
      run_dir: of the run; the run file and the prepared chats are written there, too.
      overrides: KEY=VALUE settings of a run; they take precedence over chosen settings.
      epochs: passes over the chats, unless `steps` is among the overrides.
      template, bad, answers: as in `prepare_chats`.
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
        """Returns whether an override sets the key `name`, either directly or inside its
        section.
        """
        for word in self.overrides:
            key, _, value = word.partition("=")
            is_section = value.lstrip().startswith("{")
            if key.strip().removeprefix("--").split(".")[-1] == name:
                return True
            if is_section and re.search(rf"\b{name}\b", value):
                return True
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenRun:
    """A written run file, ready to train.

    Attributes:
      file: the run file.
      config: the settings in it.
      prepared: the prepared chats; None if they were prepared already.
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
      asked: the options.
      count_devices: returns the number of devices; called after the checks of weights and chats. A
        batch is divided evenly over the devices.
      is_planned: whether to check, by a plan without arrays, that the run fits these devices.

    Raises:
      FileNotFoundError: the folder or data do not exist, or weights or tokenizer are missing.
      ValueError: the run exists already, the model is not a decoder, the chats cannot be trained
        on, sizes do not fit, or as in `plan_from_config`.
      ConfigError: an invalid override.
    """
    if not asked.epochs > 0 or not math.isfinite(asked.epochs):
        raise ValueError(f"epochs={asked.epochs:g}: it must be above 0, such as 1 or 3")
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
    """Raises if the folder already has a run.

    Raises:
      ValueError: says how to continue that run.
    """
    if file.exists():
        raise ValueError(
            f"{file} exists already: continue with `zerojax train {shlex.quote(str(file))}`, or "
            "choose another folder with --out"
        )
    if (file.parent / CONFIG_FILE).exists() or (file.parent / CHECKPOINT_FOLDER).exists():
        raise ValueError(f"{file.parent} holds another run; choose another folder with --out")


def _open_decoder(folder: str) -> Pretrained:
    """Opens the pretrained folder without reading the weights.

    Raises:
      ValueError: the model is not a decoder.
    """
    pretrained = from_hugging_face(folder)
    if not isinstance(pretrained.config, DecoderConfig | LlamaConfig | GPT2Config):
        raise ValueError(
            f"{folder} is a {pretrained.row.model_type}, which is not a decoder; fine-tuning on "
            "chats needs one: give the folder of a decoder, such as a llama or a qwen3"
        )
    return pretrained


def _is_prepared(asked: FineTuning) -> bool:
    """Returns whether `asked.data` is a folder written by `zerojax data prepare`.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: tokens without an answer mask, or preparation options for prepared chats.
    """
    path = existing_path(asked.data)
    if is_text_set(path):
        for name in ("template", "bad", "answers"):
            if getattr(asked, name) != getattr(FineTuning, name):
                raise ValueError(
                    f"--{name} {getattr(asked, name)} is an option for preparing chats, but "
                    f"{asked.data} is already prepared; leave the option out, or pass the "
                    "original chats"
                )
        return True
    if is_token_path(path):
        raise ValueError(
            f"{asked.data} holds tokens of plain text, without marked answers; "
            "give chats (.jsonl, .parquet, or what `zerojax data prepare --format chat` wrote), or "
            f"train on all tokens with `zerojax train model.pretrained={asked.folder} "
            f"data.path={asked.data}`"
        )
    return False


def _first_choices(asked: FineTuning, pretrained: Pretrained, chats: Path) -> list[ChosenSetting]:
    """Returns the choices that do not depend on the chats."""
    choices = [
        ChosenSetting(key="run_dir", value=str(asked.run_file.parent)),
        ChosenSetting(key="model.pretrained", value=str(pretrained.folder.path)),
        ChosenSetting(key="data.path", value=str(chats)),
        ChosenSetting(
            key="model.remat",
            value="full",
            why="activations of one layer at a time; none is faster where they fit",
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
    words = [f"{key}={value}" for key, value in {"steps": _MANY_STEPS, **chosen}.items()]
    return load(RunConfig, None, [*words, *asked.overrides])


def _check_their_keys(config: RunConfig, choices: Sequence[ChosenSetting]) -> None:
    """Raises if a KEY=VALUE override contradicts an option of `zerojax finetune`.

    Raises:
      ValueError: names the key.
    """
    said = {choice.key: choice.value for choice in choices}
    for key, found, by in (
        ("model.pretrained", config.model.pretrained, "FOLDER"),
        ("data.path", config.data.path, "DATA"),
        ("run_dir", config.run_dir, "--out"),
    ):
        if found != said[key]:
            raise ValueError(
                f"{key}={found} conflicts with {by}, which sets {key}={said[key]}; leave the "
                f"override {key} out"
            )


@contextlib.contextmanager
def _removed_after_an_error(run_dir: Path, chats: Path) -> Iterator[None]:
    """Deletes the prepared chats after an error in the block, so the command can be repeated.

    Folders that existed before stay.
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
    """Chooses row length, rows of a batch, and steps."""
    parts = [part for part in open_texts(chats) if part is not None]
    context = pretrained.config.max_seq_len
    longest = _longest_row(parts, config, asked, context)
    num_tokens = sum(part.num_tokens for part in parts)
    choices, seq_len = [], config.data.seq_len
    if not asked.is_given("seq_len"):
        seq_len = choose_row_length(longest, num_tokens, context)
        why = f"the longest chat has {longest}, the model's context {context}"
        choices.append(ChosenSetting(key="data.seq_len", value=seq_len, why=why))
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
    dataclasses.replace(train, global_batch_size=batch)  # refuses chats that fill no batch
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
    """Returns the tokens of the longest chat, at most the model's context.

    Raises:
      ValueError: a row or a chat is longer than the model's context.
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
    """Returns the tokens of a row: enough for the longest text, doubled while an epoch is long.

    Args:
      longest: tokens of the longest text, at most `context`.
      num_tokens: of all texts.
      context: maximum tokens of the model.
    """
    size = min(-(-longest // _UNIT) * _UNIT, context)
    while 2 * size <= min(context, LONG_ROW) and num_tokens >= 2 * size * EPOCH_ROWS:
        size *= 2
    return size


@names_keywords()
def choose_batch(num_rows: int, unit: int) -> int:
    """Returns the rows of a batch: the smallest multiple of `unit` of at least 16.

    If an epoch has fewer rows, the largest multiple of `unit` that it fills, at least one.

    Args:
      num_rows: in one epoch.
      unit: rows that all devices process at once.
    """
    wanted = -(-BATCH_ROWS // unit) * unit
    return min(wanted, max(num_rows // unit * unit, unit))


@names_keywords()
def run_file_text(config: RunConfig, choices: Sequence[ChosenSetting], asked: FineTuning) -> str:
    """Returns YAML of settings that were chosen or differ from the defaults, with reasons."""
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
