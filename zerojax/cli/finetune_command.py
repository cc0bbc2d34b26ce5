"""`zerojax finetune`: trains from a folder of weights and a file of chats."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import TYPE_CHECKING

from zerojax.cli.arguments import add_chats, add_command, command_name, finite
from zerojax.cli.data_command import lines_of_chats
from zerojax.cli.jax_environment import prepare_devices
from zerojax.cli.train_command import next_commands, train
from zerojax.config import RunConfig, load
from zerojax.config.display import show
from zerojax.config.loader import user_path
from zerojax.runtime.schedulers import process_group_of

if TYPE_CHECKING:
    from zerojax.training.trainer import Trainer

_HELP = """\
FOLDER is a decoder of Hugging Face: config.json, *.safetensors, tokenizer.json. DATA is a .jsonl,
.parquet or .arrow file of chats, a folder of these, or what `zerojax data prepare --format chat`
wrote. Chats are rendered by the folder's template and packed whole into rows; the loss is on the
assistant's tokens alone. Adapters (LoRA) are trained; lora.rank=0 trains all weights instead.

The settings are written to RUN/run.yaml, each choice with its reason; then the run begins. To
change some first: --write-only, edit the file, `zerojax train RUN/run.yaml`. That command also
resumes the run, and `zerojax launch` starts it on several processes.

examples:
  zerojax finetune models/smollm2 chats.jsonl
  zerojax finetune models/qwen3 chats.parquet --out runs/mine --epochs 1 lora.rank=32
  zerojax finetune models/qwen3 chats.jsonl lora.rank=0 learning_rate=1e-5 seq_len=4096

exit codes: the same as those of `zerojax train`."""


def add(commands) -> None:
    """Adds the command `zerojax finetune` to the parser."""
    parser = add_command(
        commands, "finetune", run, "fine-tune a Hugging Face model on chats", _HELP
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder of Hugging Face weights")
    parser.add_argument("data", metavar="DATA", help="chats")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings of the run")
    parser.option("--out RUN", "folder of the run, a new one (runs/FOLDER-DATA)")
    parser.option(
        "--epochs N",
        "passes over the chats, unless steps=... is given (%(default)g)",
        type=finite,
        default=3.0,
    )
    add_chats(parser)
    parser.switch("--write-only", "prepare the chats, write the run file, and stop")


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax finetune`: writes the run file, then trains."""
    # Checks the settings before JAX is imported; weights and number of steps are checked later.
    config = load(RunConfig, None, ["model.pretrained=FOLDER", "steps=1000000000", *args.overrides])
    _check_one_process()
    prepare_devices(config)
    import jax

    from zerojax.training.fine_tuning import FineTuning, write_run

    asked = FineTuning(
        folder=args.folder,
        data=args.data,
        run_dir=args.out or default_run_dir(args.folder, args.data),
        overrides=tuple(args.overrides),
        epochs=args.epochs,
        template=args.template,
        bad=args.bad,
        answers=args.answers,
    )
    written = write_run(asked, count_devices=jax.device_count, is_planned=not args.write_only)
    lines = [] if written.prepared is None else lines_of_chats(written.prepared)
    show("\n".join([*lines, *written.notes, f"settings, with their reasons: {written.file}"]))
    command = f"{command_name()} train {shlex.quote(str(written.file))}"
    if args.write_only:
        show(f"next: {command}")
        return 0
    return train(written.config, command, closing=closing)


def _check_one_process() -> None:
    """Checks that this is the only process, because several would each prepare the same chats.

    Raises:
      ValueError: this is one of several processes.
    """
    group = process_group_of(os.environ)
    if group is not None and group.num_processes > 1:
        raise ValueError(
            f"this is one of {group.num_processes} processes ({group.source}), and each would "
            "prepare the chats: run `zerojax finetune FOLDER DATA --out RUN --write-only` once, "
            "then `zerojax train RUN/run.yaml` on all of them"
        )


def default_run_dir(folder: str, data: str) -> str:
    """Returns runs/FOLDER-DATA, built from the last path components of `folder` and `data`."""
    names = (user_path(folder).absolute().name, user_path(data).absolute().stem)
    return f"runs/{'-'.join(name for name in names if name) or 'finetuned'}"


def closing(trainer: Trainer, config: RunConfig) -> str:
    """Returns the commands that use the fine-tuned weights, printed at the end of the run."""
    del trainer
    run, zerojax = shlex.quote(config.run_dir), command_name()
    export, merged = f"{zerojax} checkpoint export {run}", shlex.quote(f"{config.run_dir}/merged")
    whole = f"{export} {merged} --format hugging_face"
    more = [("export", whole)]
    if config.model.lora.rank:
        adapters = shlex.quote(f"{config.run_dir}/adapters")
        more = [("merge", whole), ("adapters", f"{export} {adapters} --format peft")]
    return next_commands(config, more, prompt="PROMPT")
