"""`zerojax sweep`: trains trials with other settings, and drops the worse ones early."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from typing import TYPE_CHECKING

from zerojax.cli.arguments import add_command, add_settings, command_name, is_python, split_words
from zerojax.cli.jax_environment import prepare_devices
from zerojax.cli.progress import Progress
from zerojax.config import RunConfig, load
from zerojax.config.display import show
from zerojax.runtime import shutdown
from zerojax.runtime.redaction import redact

if TYPE_CHECKING:
    from zerojax.training.sweep_record import SweepRecord
    from zerojax.training.sweep_runs import Sweep

SHOWN = 10
"""Number of trials that the closing table lists."""

_HELP = """\
The section `sweep` of the run file names the settings that vary:

  sweep:
    axes:
      optimizer.learning_rate: {low: 1e-4, high: 1e-2, scale: log}
      optimizer.weight_decay: [0.03, 0.1, 0.3]
    trials: 27

All trials train for a few steps. The best third of them goes on from its checkpoints, three times
as long, and so on to one trial, which trains to the end. 27 trials then take the steps of three
runs. Each trial is an ordinary run in a folder of its own. Results and a page (trials.html) are in
the folder of the sweep, by default the run folder with -sweep at its end.

The plan of every trial is checked before the first one starts. The same command continues a sweep
that was stopped or killed.

examples:
  zerojax sweep run.yaml --plan
  zerojax sweep run.yaml sweep.eta=2 --max-trials 8

exit codes: 0 success, 1 no trial has a finite loss, 2 invalid input, 75 stopped by a signal with
everything saved (the same command continues)."""


def add(commands) -> None:
    """Adds the command `zerojax sweep` to the parser."""
    parser = add_command(
        commands, "sweep", run, "find settings: train many trials, and drop the worse ones", _HELP
    )
    add_settings(parser)
    parser.switch("--plan", "check and print the trials and their steps, and stop")
    parser.option("--max-trials N", "at most N trials (those of sweep.trials)", type=int)
    parser.option("--out FOLDER", "folder of the sweep")


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax sweep`: checks all trials, trains them rung by rung, and prints the ranking.

    Returns:
      Exit code: 0; 1 if no trial has a finite loss; 75 if a signal stopped the sweep with
      everything saved; 128 + the signal's number if it stopped with nothing saved.
    """
    path, overrides = split_words(args.config, args.overrides)
    if is_python(path):
        raise ValueError(
            f"{path} is a script, and a sweep sets other values of a run file in each trial; write "
            "the run as a run file (CONFIG.yaml), or call zerojax.train in a loop"
        )
    config = load(RunConfig, path, overrides)
    if args.max_trials is not None:
        if args.max_trials < 1:
            raise ValueError(f"--max-trials {args.max_trials} is below 1; use 1 trial or more")
        fewer = min(args.max_trials, config.sweep.trials or args.max_trials)
        config = dataclasses.replace(config, sweep=dataclasses.replace(config.sweep, trials=fewer))
    prepare_devices(config)
    from zerojax.runtime.preemption import sigterm_raised
    from zerojax.training.sweep_runs import Sweep

    sweep = Sweep(config, args.out)
    if args.plan:
        with Progress(quiet=False) as progress:
            sweep.check(progress)
        show(redact(_plan(sweep)))
        return 0
    options = [*(["--out", args.out] if args.out else [])]
    options += [] if args.max_trials is None else ["--max-trials", str(args.max_trials)]
    words = shlex.join(["sweep", *([path] if path else []), *overrides, *options])
    to_go_on = f"to go on: {command_name()} {words}"
    try:
        with sigterm_raised():
            record = sweep.run(lambda text: show(redact(text), flush=True), to_go_on)
    except KeyboardInterrupt as error:
        sentence = str(error) or "stopped"
        show(f"\nzerojax: {sentence}", file=sys.stderr)
        if to_go_on not in sentence:
            show(to_go_on, file=sys.stderr)
        return getattr(error, "exit_code", shutdown.INTERRUPTED)
    show(redact(_result(sweep, record)))
    best = record.ranking()[0]
    return 0 if max(record.results[best].items())[1].loss is not None else 1


def _plan(sweep: Sweep) -> str:
    """Returns the trials, the rungs and the steps of a sweep as lines of text."""
    from zerojax.training.sweep_trials import describe_warmup, steps_to_train

    note = describe_warmup(sweep.trials, sweep.rungs)
    last, total = sweep.rungs[-1].steps, steps_to_train(sweep.rungs)
    rungs = [
        f"  rung {number}: {rung.trials} trials to step {rung.steps}"
        for number, rung in enumerate(sweep.rungs, start=1)
    ]
    return "\n".join(
        [
            f"{len(sweep.trials)} trials, each planned and checked:",
            *(f"  {trial.name}  {trial.describe()}" for trial in sweep.trials),
            *rungs,
            f"{total:,} steps in all, {total / last:.3g} times the {last:,} of one run; "
            f"{len(sweep.trials) * last:,} without dropping trials",
            f"ranked by {sweep.measure}; folder {sweep.folder}",
            *([] if note is None else [f"note: {note}"]),
        ]
    )


def _result(sweep: Sweep, record: SweepRecord) -> str:
    """Returns the best trials and the next commands as lines of text."""
    lines = [f"\n{'trial':>5}  {'steps':>7}  {'loss':>10}  {sweep.measure}"]
    ranking = record.ranking()
    for number in ranking[:SHOWN]:
        steps, found = max(record.results[number].items())
        loss = "not finite" if found.loss is None else f"{found.loss:.5g}"
        trial = sweep.trials[number]
        lines.append(f"{trial.name:>5}  {steps:>7,}  {loss:>10}  {trial.describe()}")
    if len(ranking) > SHOWN:
        lines.append(f"and {len(ranking) - SHOWN} more")
    best = sweep.trials[ranking[0]]
    if max(record.results[best.number].items())[1].loss is None:
        return "\n".join([*lines, "", "no trial has a finite loss; try lower learning rates"])
    return "\n".join(
        [
            *lines,
            "",
            f"The best run is in {best.config.run_dir}: {best.describe()}",
            f"The page is {sweep.folder}/trials.html",
        ]
    )
