"""`zerojax train`: trains, then prints a sample of text and the next commands."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zerojax.cli.arguments import (
    add_command,
    add_settings,
    command_name,
    is_python,
    split_words,
)
from zerojax.cli.jax_environment import (
    allow_pinned_memory,
    run_one_program_at_a_time,
    use_cpu_devices,
)
from zerojax.config import RunConfig, load, to_dict
from zerojax.config.display import show
from zerojax.config.loader import user_path
from zerojax.runtime import shutdown

if TYPE_CHECKING:
    from zerojax.training.trainer import Trainer

# An empty line starts a paragraph in any text.
SAMPLE_PROMPT = "\n\n"
_OF_SHAKESPEARE = (
    "\nBefore training the loss is 5.55 and the text is noise. Below 2 most words are English.\n"
)

_HELP = """\
CONFIG is a YAML file; without one the defaults train a small GPT on Shakespeare.
KEY=VALUE changes one setting: mesh.zero=3, or its last part zero=3 if that is unambiguous.

examples:
  zerojax train configs/tiny_shakespeare.yaml
  zerojax train configs/tiny_shakespeare.yaml zero=3 steps=100 run_dir=runs/mine
  zerojax train data.path=my_text.txt tokenizer=bpe:2048

A script (train.py) runs as with `python train.py`. KEY=VALUE changes the mesh options of its call
of zerojax.train, and cpu_devices=8 makes virtual devices:
  zerojax train train.py zero=3 cpu_devices=8

The same command continues a run that was stopped: it looks for checkpoints in the run folder.

exit codes: 0 success, 1 failure, 2 invalid input, 75 stopped by a signal with everything saved (the
same command resumes), 79 a step hung and the watchdog ended it (watch.step_timeout), 130 Ctrl-C and
143 SIGTERM with nothing saved.
`zerojax keys` lists every setting."""


def add(commands) -> None:
    """Adds the command `zerojax train` to the parser."""
    parser = add_command(commands, "train", run, "train a model, or continue a run", _HELP)
    add_settings(parser)
    parser.switch("--print-config", "print the resolved settings and stop")


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax train`: reads the settings, then trains, or prints them (--print-config)."""
    path, overrides = split_words(args.config, args.overrides)
    if is_python(path):
        if args.print_config:
            raise ValueError(f"--print-config prints a run file's settings, and {path} is a script")
        return run_script(str(path), overrides)
    config = load(RunConfig, path, overrides)
    if args.print_config:
        show(yaml.safe_dump(to_dict(config), sort_keys=False), end="")
        return 0
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    allow_pinned_memory(config.mesh.offload)
    words = shlex.join(["train", *([path] if path else []), *overrides])
    command = f"{command_name()} {words}"
    return train(config, command)


def run_script(path: str, overrides: Sequence[str]) -> int:
    """Runs a script as `python SCRIPT` does, with this command's exit codes.

    Args:
      path: path of the script.
      overrides: KEY=VALUE words that change the mesh options of the script's `zerojax.train` call,
        and cpu_devices=N.

    Returns:
      Exit code: 0; 1 if the script raised an error; 75 if a signal stopped the run with everything
      saved; 128 + the signal's number if it stopped the run with nothing saved.
    """
    if not user_path(path).is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    devices = [word.partition("=")[2] for word in overrides if word.startswith("cpu_devices=")]
    if devices:
        use_cpu_devices(load(RunConfig, None, [f"cpu_devices={devices[-1]}"]).cpu_devices)
        run_one_program_at_a_time()
    from zerojax.cli import script_runs
    from zerojax.runtime.preemption import sigterm_raised

    mesh = [word for word in overrides if not word.startswith("cpu_devices=")]
    try:
        with sigterm_raised():
            script_runs.run_script(path, mesh)
    except KeyboardInterrupt as error:
        show(f"\nzerojax: {error or 'stopped'}", file=sys.stderr)
        return getattr(error, "exit_code", shutdown.INTERRUPTED)
    except Exception:  # prints the traceback, as python SCRIPT does
        traceback.print_exc()
        return 1
    return 0


def train(
    config: RunConfig, command: str, *, closing: Callable[[Any, RunConfig], str] | None = None
) -> int:
    """Trains the run of `config` to its end, and prints a closing text.

    Args:
      config: settings of the run.
      command: the typed command, which also resumes the run.
      closing: function (trainer, config), called on every process, that returns the closing text;
        None prints a sample of text and the next commands.

    Returns:
      Exit code: 0; 75 if a signal stopped the run with everything saved; 128 + the signal's number
      if it stopped the run with nothing saved.
    """
    import jax

    from zerojax.runtime.distributed import join_processes
    from zerojax.runtime.preemption import sigterm_raised
    from zerojax.training.run_file import run_from_config

    if config.cpu_devices is not None:
        run_one_program_at_a_time()
    join_processes()
    to_go_on = f"to go on: {command}"
    try:
        with sigterm_raised():
            trainer = run_from_config(config, resume_hint=to_go_on)
    except KeyboardInterrupt as error:
        sentence = str(error) or "stopped"
        show(f"\nzerojax: {sentence}", file=sys.stderr)
        if jax.process_index() == 0 and to_go_on not in sentence:
            show(to_go_on, file=sys.stderr)
        return getattr(error, "exit_code", shutdown.INTERRUPTED)
    with trainer:  # closes the trainer, because another run of this process may use its files
        text = (closing or sample_and_next)(trainer, config)
    if jax.process_index() == 0:
        show(text)
    return 0


def sample_and_next(trainer: Trainer, config: RunConfig) -> str:
    """Returns the closing text: a sample generated by the trained model, and the next commands."""
    sample, result = draw_sample(trainer, config), _result(trainer)
    if sample is None:
        return f"{result}{next_commands(config)}"
    lines = "\n".join(f"    {line}" for line in sample.splitlines())
    heading = f"What the model writes after {trainer.num_steps} steps:"
    is_shakespeare = not config.data.path and not config.data.mixture
    hint = _OF_SHAKESPEARE if is_shakespeare and config.data.tokenizer == "bytes" else ""
    return f"{result}\n{heading}\n\n{lines}\n{hint}{next_commands(config)}"


def _result(trainer: Trainer) -> str:
    """Describes how the loss changed, from the first to the last log entry of this process."""
    from zerojax.training.metrics.console import format_loss

    reports = [report for report in trainer.history if math.isfinite(report["loss"])]
    if len(reports) < 2:
        return ""
    first, last = reports[0], reports[-1]
    fell = "fell" if last["loss"] < first["loss"] else "did not fall: it changed"
    steps = f"(step {int(first['step'])}) to {format_loss(last['loss'])} (step {int(last['step'])})"
    text = f"\nThe loss {fell} from {format_loss(first['loss'])} {steps}"
    if trainer.evaluations:
        text += f"; on validation data it is {format_loss(trainer.evaluations[-1]['loss'])}"
    return f"{text}.\n"


def draw_sample(trainer: Trainer, config: RunConfig) -> str | None:
    """Generates a text with the trained model; returns None if its tokens are not text."""
    from zerojax.data.tokenizer import load_tokenizer
    from zerojax.zoo.text_generation import prompt_ids

    file = Path(config.run_dir) / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = load_tokenizer(file)
    if not prompt_ids(tokenizer, SAMPLE_PROMPT).size:  # the tokenizer has no line breaks
        return None
    text = trainer.generate(SAMPLE_PROMPT, temperature=0.7, seed=config.seed, end_tokens=())
    return text.strip("\n")


def next_commands(
    config: RunConfig, more: Sequence[tuple[str, str]] = (), prompt: str = "To be, or"
) -> str:
    """Returns a text with the location of a run and the commands that use the run.

    Args:
      config: settings of the run.
      more: (purpose, command) of further lines.
      prompt: prompt in the shown `generate` command.
    """
    run, zerojax = shlex.quote(config.run_dir), command_name()
    lines = [
        ("generate", f'{zerojax} generate {run} "{prompt}"'),
        ("evaluate", f"{zerojax} eval {run}"),
        ("report", f"{zerojax} report {run}"),
        *more,
    ]
    if config.log.tensorboard and importlib.util.find_spec("tensorboard"):
        lines.append(("monitor", f"tensorboard --logdir {run}"))
    rows = "\n".join(f"  {what:<11} {command}" for what, command in lines)
    return f"\nThe run is in {config.run_dir}. Next:\n{rows}"
