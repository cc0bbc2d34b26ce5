"""`zerojax checkpoint`: list, verify, export and delete saved steps, or try a resume."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zerojax.checkpoint.errors import CheckpointError
from zerojax.cli.arguments import (
    Parser,
    add_command,
    add_pretrained,
    add_run,
    add_weights,
    finite,
    step_or_name,
)
from zerojax.config.display import printable, show
from zerojax.config.loader import user_path
from zerojax.runtime.shutdown import DIFFERS, FAILED, OK

if TYPE_CHECKING:
    from zerojax.checkpoint import Verification
    from zerojax.checkpoint.inspection import SavedStep

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_TOKENIZER = "tokenizer.json"
_MOST_DAMAGES = 5

_HELP = """\
RUN is the folder of a run, its folder of checkpoints, or that of one step. No model and no
accelerator is needed, and a run that is training is not disturbed.

examples:
  zerojax checkpoint list runs/mine
  zerojax checkpoint verify runs/mine --all
  zerojax checkpoint export runs/mine exported --dtype bf16
  zerojax checkpoint export runs/mine for_transformers --format hugging_face
  zerojax checkpoint export runs/mine adapters --format peft
  zerojax checkpoint export runs/mine averaged --weights ema
  zerojax checkpoint prune runs/mine --keep 2 --every 1000 --dry-run
  zerojax checkpoint resume-check runs/mine --devices 4 mesh.zero=3

exit codes: 0 success, 1 failure (verify: damage was found), 2 invalid input, 4 resume-check: the
resumed run differs."""


def add(commands) -> None:
    """Adds the command `zerojax checkpoint` to the parser, with its sub-commands."""
    brief = "list, verify, export or delete saved steps, or try a resume on another mesh"
    parser = add_command(commands, "checkpoint", run, brief, _HELP)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    parser = _add(actions, "list", _list, "list the saved steps, and remains of interrupted saves")
    _add_json(parser)
    brief = "read a step completely and compare it with its checksums"
    parser = _add(actions, "verify", _verify, brief)
    parser.add_argument("step", metavar="STEP", nargs="?", type=int, help="default: the newest")
    parser.switch("--all", "every saved step")
    parser.switch("--full", "list all damaged files and arrays, not only the first")
    add_pretrained(parser)
    _add_json(parser)
    parser = _add(actions, "export", _export, "write a step's parameters as safetensors")
    parser.add_argument(
        "places",
        metavar="[STEP] OUT",
        nargs="+",
        help="step number or name of a kept step (best); new folder",
    )
    parser.option("--dtype", "default: the saved dtype", choices=("fp32", "bf16"))
    parser.option(
        "--format",
        "zerojax: arrays under zerojax's names; hugging_face: files for transformers (families of "
        "GPT-2, Llama and BERT; adapters are merged); peft: only the adapters",
        default="zerojax",
        choices=("zerojax", "hugging_face", "peft"),
    )
    parser.option(
        "--quantize",
        "8- or 4-bit kernels for vLLM and transformers; with --format hugging_face",
        choices=("int8", "int4", "fp8"),
    )
    add_weights(parser)
    add_pretrained(parser)
    parser.option("--shard-gb GB", "maximum size of one file (5)", type=finite, default=5.0)
    parser = _add(actions, "prune", _prune, "delete steps, but never the newest complete one")
    parser.option("--keep N", "keep the newest N complete steps", type=int)
    parser.option("--every K", "keep the steps divisible by K", type=int)
    parser.switch(
        "--damaged",
        "also delete damaged steps and remains of interrupted saves, if a complete step is kept",
    )
    parser.switch("--dry-run", "only print what would be deleted")
    brief = "train some steps on another mesh, and compare them with steps on the run's own"
    parser = _add(actions, "resume-check", _resume_check, brief)
    parser.option("--devices", "devices of the new mesh", type=int, required=True)
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="settings of the resumed run that differ, such as mesh.zero=3",
    )
    parser.option("--steps N", "steps to compare (%(default)s)", default=4)
    parser.option(
        "--platform",
        "cpu: virtual CPU devices; default: the devices of this machine, at least as many as "
        "either mesh has (%(default)s)",
        default="cpu",
        choices=("cpu", "default"),
    )
    _add_json(parser)


def _add(actions, name: str, action: Callable[[argparse.Namespace], int], brief: str) -> Parser:
    parser = actions.add_parser(
        name,
        help=brief,
        description=brief[0].upper() + brief[1:] + ".",
        allow_abbrev=False,
    )
    parser.set_defaults(action=action)
    add_run(parser)
    return parser


def _add_json(parser: Parser) -> None:
    parser.switch("--json", "print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs one sub-command of `zerojax checkpoint`."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # leaves accelerators to running jobs
    return args.action(args)


# --- list -----------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from zerojax.checkpoint.inspection import find_checkpoints, leftovers, saved_steps
    from zerojax.tracing.trees import format_bytes

    path, _ = find_checkpoints(args.run)
    steps, rest = saved_steps(path), leftovers(path)
    if args.json:
        body = {
            "folder": str(path),
            "steps": [_as_json(one) for one in steps],
            "others": [
                {"name": x.folder.name, "kind": x.kind, "bytes": x.num_bytes, "why": x.why}
                for x in rest
            ],
        }
        show(json.dumps(body, indent=1))
        return OK
    rows = [("step", "saved (UTC)", "size", "devices", "processes", "zerojax", "jax", "")]
    rows += [_row(one) for one in steps]
    show(_table(rows))
    for one in rest:
        show(f"{one.folder.name} ({format_bytes(one.num_bytes)}): {one.why}")
    total = sum(one.num_bytes for one in (*steps, *rest))
    damaged = sum(one.is_damaged for one in steps)
    unread = sum(one.error is not None for one in steps) - damaged
    counts = {"damaged": damaged, "cannot be read": unread}
    bad = [f"{count} {what}" for what, count in counts.items() if count]
    state = ", ".join(bad) or "all files have the recorded sizes"
    plural = "" if len(steps) == 1 else "s"
    show(f"{len(steps)} step{plural}, {format_bytes(total)} in {path}; {state}")
    return OK


def _row(one: SavedStep) -> tuple[str, ...]:
    from zerojax.tracing.trees import format_bytes

    size, found = format_bytes(one.num_bytes), one.metadata
    what = "damaged" if one.is_damaged else "cannot be read"
    state = "ok" if one.error is None else f"{what}: {one.problem}"
    if found is None:
        return (str(one.step), "", size, "", "", "", "", state)
    versions = [found.versions.get(name, "") for name in ("zerojax", "jax")]
    saved = found.saved[:19].replace("T", " ")
    counts = str(found.num_devices), str(found.num_processes)
    return (str(one.step), saved, size, *counts, *versions, state)


def _as_json(one: SavedStep) -> dict[str, Any]:
    values = {
        "step": one.step,
        "bytes": one.num_bytes,
        "problem": one.problem,
        "damaged": one.is_damaged,
    }
    if (found := one.metadata) is not None:
        names = ("saved", "num_devices", "num_processes", "versions")
        values |= {name: getattr(found, name) for name in names}
        values["num_arrays"] = len(found.arrays)
    return values


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of text as columns, right-aligned, the last column left-aligned."""
    rows = [[printable(cell) for cell in row] for row in rows]  # of files that anybody may write
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    lines = []
    for *cells, last in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*aligned, last]).rstrip())
    return "\n".join(lines)


# --- verify ---------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    from zerojax.checkpoint import Checkpointer
    from zerojax.checkpoint.inspection import find_checkpoints

    path, named = find_checkpoints(args.run)
    with Checkpointer(path) as checkpointer:
        if args.all:
            steps: Sequence[int | None] = checkpointer.steps()
        else:
            steps = [args.step if args.step is not None else named]
        found = []
        for step in steps:
            verification = checkpointer.verify(step, pretrained=args.pretrained)
            found.append(verification)
            if not args.json:
                _tell(verification, most=None if args.full else _MOST_DAMAGES)
    if args.json:
        show(json.dumps([_verified(one) for one in found], indent=1))
    if not found:
        raise CheckpointError(
            f"{path} has no complete step to verify; name the folder of a run that has saved a step"
        )
    return OK if all(one.is_good for one in found) else FAILED


def _tell(found: Verification, *, most: int | None) -> None:
    """Prints the result of a step.

    Args:
      found: the result.
      most: maximum number of damaged files, and of damaged arrays, that are listed; None: all.
    """
    from zerojax.tracing.trees import format_bytes

    checked = f"{found.num_files} files ({format_bytes(found.num_bytes)})"
    if found.has_fingerprints:
        checked += f" and {found.num_leaves} arrays"
    if found.is_good and not found.num_files:
        show(
            f"step {found.step}: file sizes are right; contents cannot be checked, as no "
            "checksums were saved"
        )
    elif found.is_good:
        show(f"step {found.step}: intact; {checked} equal what was saved")
    else:
        show(
            f"step {found.step}: damaged; of {checked} {len(found.damages)} differ from what "
            "was saved"
        )
    rest = []
    for what, is_file in (("files", True), ("arrays", False)):
        damages = [damage for damage in found.damages if (damage.file is not None) == is_file]
        for damage in damages[:most]:
            show(f"  {damage}")
        if more := len(damages) - len(damages[:most]):
            rest.append(f"{more} more {what}")
    if rest:
        show(f"  and {' and '.join(rest)}; --full lists all")


def _verified(found: Verification) -> dict[str, Any]:
    return {
        "step": found.step,
        "good": found.is_good,
        "files": found.num_files,
        "arrays": found.num_leaves,
        "bytes": found.num_bytes,
        "damages": [dataclasses.asdict(damage) for damage in found.damages],
    }


# --- export ---------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    from zerojax.checkpoint.export import export
    from zerojax.checkpoint.inspection import find_step
    from zerojax.tracing.trees import format_bytes
    from zerojax.training.hugging_face_export import export_adapters, export_step, run_folders

    *steps, out = args.places
    if len(steps) > 1:
        raise CheckpointError(
            f"export {args.run} {' '.join(args.places)}: give RUN, a step number or name (default: "
            "the newest step), and a new folder"
        )
    if args.quantize is not None and args.format != "hugging_face":
        raise CheckpointError(f"--quantize {args.quantize} needs --format hugging_face")
    if args.shard_gb <= 0:
        raise CheckpointError(f"--shard-gb {args.shard_gb} must be above 0; use for example 5")
    step = step_or_name(steps[0]) if steps else None
    saved = find_step(args.run, step, pretrained=args.pretrained)
    runs = run_folders(args.run, saved)
    place = user_path(out).absolute()
    how: dict[str, Any] = {"weights": args.weights, "dtype": _DTYPES.get(args.dtype)}
    how["shard_bytes"] = int(args.shard_gb * 1e9)
    of_step = f"step {saved.step}" + " (ema)" * (args.weights == "ema")
    if args.format == "hugging_face":
        done = export_step(saved, runs, place, quantize=args.quantize, **how)
        there = sorted(path.name for path in done.folder.iterdir())
        show(
            f"{of_step}: {done.num_arrays} tensors ({format_bytes(done.num_bytes)}) for "
            f"transformers in {done.folder}: {', '.join(there)}"
        )
        return OK
    if args.format == "peft":
        folder = export_adapters(saved, runs, place, weights=args.weights)
        size = format_bytes(sum(path.stat().st_size for path in folder.iterdir()))
        show(f"{of_step}: adapters ({size}) for peft in {folder}")
        return OK
    tokenizer = next((x / _TOKENIZER for x in runs if (x / _TOKENIZER).is_file()), None)
    done = export(saved, place, tokenizer=tokenizer, **how)
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    with_ = "" if tokenizer is None else f" and {_TOKENIZER}"
    show(
        f"{of_step}: {done.num_arrays} arrays ({format_bytes(done.num_bytes)}) in "
        f"{files}, config.json{with_} are in {done.folder}"
    )
    if tokenizer is None:
        show("no tokenizer was exported: the folder of the run has none")
    return OK


# --- prune ----------------------------------------------------------------------------------------


def _prune(args: argparse.Namespace) -> int:
    from zerojax.checkpoint.deletion import alone_in, removals, remove
    from zerojax.checkpoint.inspection import find_checkpoints, saved_steps
    from zerojax.tracing.trees import format_bytes

    path, _ = find_checkpoints(args.run)
    word = "would delete" if args.dry_run else "deleted"
    failed = 0
    with contextlib.nullcontext() if args.dry_run else alone_in(path):
        found = removals(path, keep=args.keep, every=args.every, damaged=args.damaged)
        for one in found:
            try:
                if not args.dry_run:
                    remove(path, one)
            except OSError as error:
                failed += 1
                show(f"zerojax: {one.folder} cannot be deleted: {error.strerror}", file=sys.stderr)
                continue
            name = one.folder.name if one.step is None else f"step {one.step}"
            show(f"{word} {name} ({format_bytes(one.num_bytes)}): {one.why}")
        gone = {one.step for one in found} if args.dry_run else ()
        left = [str(one.step) for one in saved_steps(path) if one.step not in gone]
    total, stay = format_bytes(sum(one.num_bytes for one in found)), ", ".join(left) or "none"
    show(f"{word} {len(found) - failed} of {len(found)} ({total}); kept steps: {stay}")
    return FAILED if failed else OK


# --- resume-check ---------------------------------------------------------------------------------


def _resume_check(args: argparse.Namespace) -> int:
    from zerojax.cli.progress import Progress
    from zerojax.training.resume_check import check_resume

    with Progress(quiet=args.json) as progress:
        found = check_resume(
            args.run,
            devices=args.devices,
            words=args.overrides,
            steps=args.steps,
            on_cpu=args.platform == "cpu",
            progress=progress,
        )
    show(json.dumps(found.as_dict(), indent=1) if args.json else found.page())
    return OK if found.agrees else DIFFERS
