"""Arguments of `zerojax checkpoint`."""

from __future__ import annotations

from zerojax.cli.parser_parts import Parser, add_command, add_run

_HELP = """\
RUN is the folder of a run, its folder of checkpoints, or that of one step. No model and no
accelerator is needed, and a run that is training is not disturbed.

examples:
  zerojax checkpoint list runs/mine
  zerojax checkpoint verify runs/mine --all
  zerojax checkpoint diff runs/mine 100 200
  zerojax checkpoint export runs/mine exported --dtype bf16
  zerojax checkpoint export runs/mine for_transformers --format hugging_face
  zerojax checkpoint export runs/mine adapters --format peft
  zerojax checkpoint prune runs/mine --keep 2 --every 1000 --dry-run

exit codes: 0 it worked, 1 it failed (verify: damage was found; diff: something differs), 2 the
input was wrong."""


def add(commands) -> None:
    """Declares the command and those below it."""
    parser = add_command(
        commands, "checkpoint", "checkpoint", "look at, check, compare, export, delete", _HELP
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    _add_list(actions)
    _add_verify(actions)
    _add_diff(actions)
    _add_export(actions)
    _add_prune(actions)


def _add(actions, name: str, help_line: str) -> Parser:
    parser = actions.add_parser(
        name,
        help=help_line,
        description=help_line[0].upper() + help_line[1:] + ".",
        allow_abbrev=False,
    )
    add_run(parser)
    return parser


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _add_list(actions) -> None:
    parser = _add(actions, "list", "the saved steps, and what stopped saves have left")
    _add_json(parser)


def _add_verify(actions) -> None:
    parser = _add(actions, "verify", "read a step whole and compare it with what was saved")
    parser.add_argument("step", metavar="STEP", nargs="?", type=int, help="default: the newest")
    parser.add_argument("--all", action="store_true", help="every saved step")
    _add_json(parser)


def _add_diff(actions) -> None:
    parser = _add(actions, "diff", "what tells two steps apart: settings, plan, versions, values")
    parser.add_argument(
        "others",
        metavar="STEP",
        nargs="+",
        help="two steps of RUN, or another RUN, whose newest step is compared with RUN's",
    )
    parser.add_argument("--limit", type=int, metavar="N", default=20, help="lines per part (20)")
    _add_json(parser)


def _add_export(actions) -> None:
    parser = _add(actions, "export", "write a step's parameters as safetensors")
    parser.add_argument(
        "places", metavar="[STEP] OUT", nargs="+", help="a step or a kept name (best), a new folder"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="default: as it was saved")
    parser.add_argument(
        "--format",
        choices=("zerojax", "hugging_face", "peft"),
        default="zerojax",
        help="zerojax: arrays under their own names; hugging_face: what transformers loads, of "
        "GPT-2, Llama and BERT, adapters merged; peft: the adapters alone",
    )
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="size of one file at most (5)"
    )


def _add_prune(actions) -> None:
    parser = _add(actions, "prune", "delete steps; never the newest whole one")
    parser.add_argument("--keep", type=int, metavar="N", help="the newest N whole steps stay")
    parser.add_argument("--every", type=int, metavar="K", help="steps divisible by K stay")
    parser.add_argument(
        "--damaged",
        action="store_true",
        help="also damaged steps and what stopped saves left, while a whole step stays",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
