"""Arguments of `zerojax deepspeed`."""

from __future__ import annotations

from zerojax.cli.parser_parts import add_command

_EXPLAIN = """\
A line for every key of the file: honoured (means here what it means in DeepSpeed), mapped (the same
end by other means), compiler (XLA decides), or refused, each with why. Nothing is run.

examples:
  zerojax deepspeed explain ds_config.json
  zerojax deepspeed explain ds_config.json --devices 8 --steps 1000 --hidden-size 4096
  zerojax deepspeed explain ds_config.json --json

then, in Python: zerojax.train(model, "ds_config.json", batches)

exit codes: 0 a run can take the file, 2 something in it is refused."""


def add(commands) -> None:
    """Declares the command."""
    deepspeed = commands.add_parser(
        "deepspeed",
        help="tell what a ds_config.json means here",
        description="Tell what a ds_config.json means here.",
    )
    inner = deepspeed.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(
        inner, "explain", "deepspeed", "say what becomes of every key of a ds_config.json", _EXPLAIN
    )
    parser.add_argument(
        "file", metavar="FILE", help="JSON, hjson, or the base64 of either, as text"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="GPUs of the run, which decide the batch"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help='length of the run, where the file has "auto"'
    )
    parser.add_argument(
        "--hidden-size", type=int, metavar="N", help='width of the model, where the file has "auto"'
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser = add_command(
        inner, "keys", "deepspeed_keys", "list every key of DeepSpeed and what becomes of it"
    )
    parser.add_argument("word", metavar="WORD", nargs="?", help="only keys that mention it")
    parser.add_argument("--markdown", action="store_true", help="as docs/ds_config_keys.md has it")
