"""Arguments of `zerojax elastic`."""

from __future__ import annotations

from zerojax.cli.parser_parts import add_command, add_settings

_HELP = """\
Chooses the batch of an elastic run from the section `elasticity` of the settings, by DeepSpeed's
arithmetic: the same on all the numbers of devices that are listed. For a scheduler: --json.

examples:
  zerojax elastic CONFIG.yaml max_global_batch_size=512
  zerojax elastic micro_batch_sizes=[2,4,8] max_global_batch_size=512 --devices 24
  zerojax train CONFIG.yaml elasticity.enabled=true max_global_batch_size=512"""


def add(commands) -> None:
    """Declares the command."""
    parser = add_command(
        commands,
        "elastic",
        "elastic",
        "choose a batch that stays valid when devices come and go",
        _HELP,
    )
    add_settings(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="only this number of devices")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
