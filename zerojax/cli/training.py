"""`zerojax train` after its settings are read: the run, a text sample, and the next commands."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import jax

from zerojax.cli.devices import run_one_program_at_a_time
from zerojax.cli.invocation import command_name
from zerojax.config import RunConfig
from zerojax.config.display import show
from zerojax.data.tokenizer import load_tokenizer
from zerojax.models.zoo.text_generation import continue_text, prompt_ids
from zerojax.runtime import exit_codes
from zerojax.runtime.distributed import join_processes
from zerojax.runtime.preemption import sigterm_raised
from zerojax.training.run_file import run_from_config

# An empty line: the start of a paragraph in any text.
SAMPLE_PROMPT = "\n\n"
SAMPLE_TOKENS = 160


def train(config: RunConfig, command: str) -> int:
    """Runs `config` to its end.

    Args:
      command: the words that started it, which also resume it.

    Returns:
      0; 75 when a signal stopped the run and everything is saved; 128 + its number when not.
    """
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
        return getattr(error, "exit_code", exit_codes.INTERRUPTED)
    sample = draw_sample(trainer, config)
    if jax.process_index() != 0:
        return 0
    if sample is not None:
        show(f"\nWhat the model writes after {trainer.num_steps} steps:\n")
        show("\n".join(f"    {line}" for line in sample.splitlines()))
    show(next_commands(config))
    return 0


def draw_sample(trainer: Any, config: RunConfig) -> str | None:
    """Text written by the trained model; None when its tokens have no text."""
    file = Path(config.run_dir) / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = load_tokenizer(file)
    if not prompt_ids(tokenizer, SAMPLE_PROMPT).size:  # one that leaves out line ends
        return None
    text = continue_text(
        trainer.to_model(),
        tokenizer,
        SAMPLE_PROMPT,
        num_tokens=min(SAMPLE_TOKENS, config.model.max_seq_len - 8),
        temperature=0.7,
        top_k=None,
        seed=config.seed,
    )
    return text.strip("\n")


def next_commands(config: RunConfig) -> str:
    """Where the run lies and what can be done with it."""
    run, zerojax = shlex.quote(config.run_dir), command_name()
    lines = [
        ("generate", f'{zerojax} generate {run} "To be, or"'),
        ("evaluate", f"{zerojax} eval {run}"),
        ("look at it", f"{zerojax} report {run}"),
    ]
    if config.log.tensorboard and importlib.util.find_spec("tensorboard"):
        lines.append(("watch it", f"tensorboard --logdir {run}"))
    rows = "\n".join(f"  {what:<11} {command}" for what, command in lines)
    return f"\nThe run is in {config.run_dir}. Next:\n{rows}"
