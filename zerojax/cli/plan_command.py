"""`zerojax plan`: forecasts a run, explains a parameter, proposes rules, or searches settings."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zerojax.cli.arguments import (
    add_command,
    add_settings,
    command_name,
    is_python,
    split_words,
)
from zerojax.cli.jax_environment import use_the_cpu_alone
from zerojax.cli.progress import Progress
from zerojax.config import ExpectConfig, RunConfig, load
from zerojax.config.display import show
from zerojax.config.loader import read_yaml
from zerojax.hardware.gpus import Gpu, find_gpu

if TYPE_CHECKING:
    from zerojax.forecasting.settings_search import Candidate, SearchedRun, SearchResult
    from zerojax.plan.make import Plan

PlanFor = Callable[..., Any]
"""Function (number of devices, gpu=None) that returns the plan of a run."""

FRACTION_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
EXIT_FITS, EXIT_DOES_NOT_FIT, EXIT_NOT_DECIDED, EXIT_VIOLATED = 0, 1, 3, 4
NO_COMPILE = "--no-compile was given"

_HELP = """\
Compiles the training step of `zerojax train CONFIG.yaml KEY=VALUE ...` for GPUs that you do not
have, and prints the needs of one device: memory by role, communication, and a lower bound on time.
Nothing is run and no GPU is needed: pip install 'zerojax[plan]'. Without it, estimates by formula
are printed.

examples:
  zerojax plan configs/llama_8b_zero3_8xh100.yaml --gpu h100 --devices 8
  zerojax plan configs/llama_8b_zero3_8xh100.yaml --gpu h200 --devices 8 zero=2 --json
  zerojax plan configs/llama_8b_zero3_8xh100.yaml --gpu h100 --devices 64 --search
  zerojax plan configs/llama_8b_zero3_8xh100.yaml --gpu h200 --devices 1 opt_state=host
  zerojax plan configs/llama_8b_zero3_8xh100.yaml --gpu h200 --devices 8 --generation
  zerojax plan configs/llama_8b_zero3_8xh100.yaml --devices 8 --parameter blocks/mlp/up/kernel
  zerojax plan train.py --devices 8 --propose-rules model=4
  zerojax plan train.py --gpu h100 --devices 8 zero=3
  zerojax plan train.py --gpu h100 --devices 8 --search
  zerojax plan train.py --gpu h100 --devices 8 --expect rules.yaml --golden plan.json

A script (train.py) runs up to its first zerojax.train, make_plan or engine step, whose arguments
are planned; KEY=VALUE changes their mesh options and num_microbatches.

The section expect of a run file, or the fields of FILE.yaml of --expect, are rules that the
compiled step must keep (zerojax keys expect).

exit codes: 0 it fits, 1 it does not fit, 2 invalid input, 3 the formulas alone cannot decide
whether it fits, 4 a rule of expect is violated or the golden file differs. ZEROJAX_CACHE: folder
for cached results, or off."""

MAX_DEVICES = 2**18


def add(commands) -> None:
    """Adds the command `zerojax plan` to the parser."""
    parser = add_command(
        commands,
        "plan",
        run,
        "predict memory, communication and time on GPUs that you do not have",
        _HELP,
    )
    add_settings(parser)
    parser.option("--gpu NAME", "GPU, such as h200, or a YAML file that describes one")
    parser.option("--devices N", "number of GPUs", type=int)
    parser.option(
        "--card KEY=VALUE",
        "another value of the GPU's card, such as the number of GPUs in a machine or the rates of "
        "its links (docs/plan.md)",
        default=[],
        action="append",
    )
    parser.option(
        "--memory-fraction X",
        "share of the GPU's memory that JAX may use in the run (its default is 0.75); the run "
        "needs XLA_CLIENT_MEM_FRACTION=X",
        type=float,
    )
    parser.option(
        "--parameter NAME",
        "explain one parameter: sharding, collectives, update, memory, names in a checkpoint",
    )
    parser.switch(
        "--propose-rules",
        "propose tensor-parallel rules (mesh.rules) for a mesh with model > 1, and their cost",
    )
    parser.switch("--json", "print every number as JSON")
    parser.switch("--no-compile", "estimates by formula only, in a second")
    parser.switch("--fast", "compile faster, with the same memory and communication")
    parser.switch(
        "--search",
        "find the cheapest zero, model, stage, expert, num_microbatches, remat and, if nothing "
        "fits, offload; then bucket sizes",
    )
    parser.switch(
        "--generation",
        "bytes read and sent per generated token, and bounds of its rate, by formula",
    )
    parser.option(
        "--budget SECONDS", "time limit of the search (%(default)g)", type=float, default=300.0
    )
    parser.option(
        "--expect FILE.yaml",
        "rules that the compiled step must keep, in place of the run file's section expect",
    )
    parser.option(
        "--golden FILE", "compare the compiled step with this file; write it if it does not exist"
    )
    parser.switch(
        "--collectives",
        "list the collectives of the compiled step in order, with the lines that cause them",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax plan`: reads the settings, then prints the requested forecast or search.

    Raises:
      ValueError: a setting, the GPU or a number is invalid.
    """
    path, overrides = split_words(args.config, args.overrides)
    is_script = is_python(path)
    config = RunConfig() if is_script else load(RunConfig, path, overrides)
    devices = args.devices
    needs_no_gpu = args.parameter is not None or args.propose_rules
    if devices is None and needs_no_gpu and not is_script:
        devices = config.cpu_devices
    found = {"--gpu": needs_no_gpu or args.gpu is not None, "--devices": devices is not None}
    missing = [option for option, is_there in found.items() if not is_there]
    if missing:
        raise ValueError(
            f"required: {', '.join(missing)}; an example is --gpu h100 --devices 8, or --devices 8 "
            "--parameter NAME"
        )
    if devices < 1:
        raise ValueError(f"--devices {devices}: at least 1 GPU is needed")
    if devices > MAX_DEVICES:
        raise ValueError(f"--devices {devices} is above the limit of {MAX_DEVICES}; use fewer")
    words = [*([path] if path else []), *overrides]
    plan_for: PlanFor = functools.partial(_plan_of_config, config)
    if is_script:
        plan_for = functools.partial(_plan_of_script, str(path), overrides)
    if needs_no_gpu:
        if args.expect or args.golden or args.collectives:
            raise ValueError(
                "--expect, --golden and --collectives read the compiled step; leave out "
                "--parameter and --propose-rules, and give --gpu"
            )
        use_the_cpu_alone()
        show(_answer(args, plan_for(devices)))
        return EXIT_FITS
    gpu = find_gpu(args.gpu, _card_changes(args.card))
    _check_options(args)
    expected = config.expect if args.expect is None else load(ExpectConfig, args.expect)
    use_the_cpu_alone()
    if args.search:
        how = {"as_json": args.json, "budget": args.budget}
        if is_script:
            return search_script(str(path), overrides, gpu, devices, **how)
        return search_config(config, gpu, devices, words=words, **how)
    if not is_script:
        _check_mesh(config, devices)
    return _predict_or_check(args, plan_for, gpu, expected)


def _predict_or_check(
    args: argparse.Namespace, plan_for: PlanFor, gpu: Gpu, expected: ExpectConfig
) -> int:
    """Prints the forecast of a run or of generation, or checks the compiled step."""
    devices = args.devices
    if args.generation:
        return bound_generation(plan_for(devices, gpu=gpu), gpu, as_json=args.json)
    how = {"as_json": args.json, "no_compile": args.no_compile, "fast": args.fast}
    if expected.names or args.golden or args.collectives:
        how |= {"golden": args.golden, "lists_collectives": args.collectives}
        return check(plan_for, gpu, devices, expected=expected, **how)
    return predict(plan_for, gpu, devices, **how)


def _card_changes(words: Sequence[str]) -> dict[str, Any]:
    """Parses KEY=VALUE words about a card.

    Raises:
      ValueError: a word has no =, its value is no YAML, or a key is there twice.
    """
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key or not text:
            raise ValueError(f"--card {word!r}: expected KEY=VALUE, such as --card node_devices=2")
        if key in found:
            raise ValueError(f"--card {key} is there twice; leave out one of them")
        found[key] = read_yaml(text, "--card")[0]
    return found


def _check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be combined, and for an invalid budget or memory
    fraction; sets `FRACTION_VARIABLE` to the fraction."""
    if args.memory_fraction is not None:
        if not 0 < args.memory_fraction <= 1:
            raise ValueError(
                f"--memory-fraction {args.memory_fraction:g} is not above 0 and at most 1; give "
                "a share of the GPU's memory, such as 0.92"
            )
        os.environ[FRACTION_VARIABLE] = str(args.memory_fraction)
    if args.budget <= 0:
        raise ValueError(f"--budget {args.budget:g}: give seconds above 0, such as 300")
    readers = {name: getattr(args, name) for name in ("expect", "golden", "collectives")}
    reader = next((f"--{name}" for name, value in readers.items() if value), None)
    if reader is not None and (args.search or args.no_compile):
        other = "--search" if args.search else "--no-compile"
        raise ValueError(
            f"{reader} reads the compiled step of one plan and cannot be combined with {other}; "
            "leave out one of them"
        )
    if args.generation and (args.search or reader):
        raise ValueError(
            f"--generation counts no training step and cannot be combined with "
            f"{reader or '--search'}; leave out one of them"
        )
    if args.search and args.no_compile:
        raise ValueError(
            "--search needs the compiler to decide what fits, and --no-compile disables it; "
            "leave out one of them"
        )


def _plan_of_config(config: RunConfig, devices: int, gpu: Gpu | None = None) -> Plan:
    from zerojax.plan.rung_plans import with_rungs
    from zerojax.training.run_file import plan_from_config

    return with_rungs(plan_from_config(config, devices, gpu=gpu))


def _plan_of_script(path: str, overrides: list[str], devices: int, gpu: Gpu | None = None) -> Plan:
    from zerojax.cli.script_runs import plan_of_script

    return plan_of_script(path, overrides, devices, gpu)


def _answer(args: argparse.Namespace, plan: Plan) -> str:
    """Returns the page for --parameter NAME, or the rules for --propose-rules."""
    from zerojax.plan.rule_proposal import propose_for

    if args.parameter is not None:
        return plan.explain(args.parameter)
    proposal = propose_for(plan.inputs, plan.mesh)
    return json.dumps(dataclasses.asdict(proposal), indent=2) if args.json else str(proposal)


def _check_mesh(config: RunConfig, devices: int) -> None:
    """Raises ValueError if the mesh of the settings does not fit the number of devices."""
    from zerojax.placement.device_mesh import make_abstract_mesh

    try:
        make_abstract_mesh(config.mesh_on(devices), devices)
    except ValueError as error:
        raise ValueError(f"--devices {devices}: {error}") from None


def bound_generation(plan: Plan, gpu: Gpu, *, as_json: bool) -> int:
    """Prints bytes and bounds of generation with the model of a plan.

    Returns:
      Exit code 0.

    Raises:
      TypeError, ValueError: the model or the mesh is not supported.
    """
    from zerojax.forecasting.generation_bounds import generation_bounds, generation_page

    bounds = generation_bounds(plan, gpu)
    if as_json:
        show(json.dumps([dataclasses.asdict(each) for each in bounds], indent=2))
    else:
        show(generation_page(bounds, plan, gpu))
    return EXIT_FITS


def predict(
    plan_for: PlanFor, gpu: Gpu, devices: int, *, as_json: bool, no_compile: bool, fast: bool
) -> int:
    """Prints the forecast of a run: memory, communication and time.

    Args:
      plan_for: function (number of devices, gpu=) that returns the plan of the run.

    Returns:
      Exit code: 0 it fits, 1 it does not, 3 only formulas are available and cannot decide it.

    Raises:
      ValueError: the settings are invalid.
      CompileError: the compiler refused the training step.
    """
    from zerojax.forecasting import forecast
    from zerojax.forecasting.forecast_page import forecast_dict, forecast_page

    with Progress(quiet=as_json) as progress:
        progress(f"planning for {devices} x {gpu.title}")
        found = forecast(
            plan_for(devices, gpu=gpu),
            gpu=gpu,
            fast=fast,
            why_formula=NO_COMPILE if no_compile else None,
            progress=progress,
        )
    show(json.dumps(forecast_dict(found), indent=2) if as_json else forecast_page(found))
    fits = found.verdict.fits
    return {True: EXIT_FITS, False: EXIT_DOES_NOT_FIT, None: EXIT_NOT_DECIDED}[fits]


def check(
    plan_for: PlanFor,
    gpu: Gpu,
    devices: int,
    *,
    expected: ExpectConfig,
    golden: str | None,
    lists_collectives: bool,
    as_json: bool,
    no_compile: bool,
    fast: bool,
) -> int:
    """Prints the forecast of a run, checks rules in its compiled step, and compares a golden file.

    Without a compiler only the forecast is printed, and nothing is checked.

    Args:
      plan_for: as in `predict`.
      expected: the rules; none may be set.
      golden: path of the golden file, if any.
      lists_collectives: whether to print the collectives of the step.

    Returns:
      As `predict`; 3 also if nothing was checked, and 4 for a violation or a difference.

    Raises:
      ValueError: a rule cannot be checked. CompileError: the compiler refused the step.
    """
    from zerojax.forecasting.forecast_page import forecast_dict, forecast_page
    from zerojax.forecasting.program_rules import check_golden, check_step, plan_record
    from zerojax.forecasting.step_contents import by_collective, describe_sent
    from zerojax.hardware import compile_client

    if no_compile or compile_client.missing() is not None:
        how = {"as_json": as_json, "no_compile": no_compile, "fast": fast}
        code = predict(plan_for, gpu, devices, **how)
        show("the step was not checked, because nothing was compiled", file=sys.stderr)
        # Not a success, which would mean that the rules are kept.
        return EXIT_NOT_DECIDED if code == EXIT_FITS else code
    with Progress(quiet=as_json) as progress:
        progress(f"planning for {devices} x {gpu.title}")
        plan = plan_for(devices, gpu=gpu)
        checked = check_step(plan, expected, gpu, fast=fast, progress=progress)
    assert checked.forecast is not None
    differences = None if golden is None else check_golden(plan_record(checked), golden)
    if as_json:
        found = {"expect": checked.as_dict()["rules"], "differences": differences}
        if lists_collectives:
            found["collectives"] = [dataclasses.asdict(one) for one in checked.contents.sent]
        show(json.dumps({**forecast_dict(checked.forecast), **found}, indent=2))
    else:
        show(forecast_page(checked.forecast))
        if expected.names:
            show(f"\n{checked.page()}")
        if lists_collectives:
            lines = map(describe_sent, by_collective(checked.contents.sent).values())
            show("\n".join(["", "COLLECTIVES of a step, in order", *(f"  {x}" for x in lines)]))
        if golden is not None:
            show(f"\n{_golden_page(golden, differences)}")
    if checked.violations or differences:
        return EXIT_VIOLATED
    return EXIT_DOES_NOT_FIT if checked.forecast.verdict.fits is False else EXIT_FITS


def _golden_page(path: str, differences: list[str] | None) -> str:
    if differences is None:
        return f"GOLDEN: {path} was written"
    if not differences:
        return f"GOLDEN: the step is that of {path}"
    lines = [f"GOLDEN: {len(differences)} differences from {path}; delete it to accept them"]
    return "\n".join([*lines, *(f"  - {line}" for line in differences)])


def search_config(
    config: RunConfig,
    gpu: Gpu,
    devices: int,
    *,
    as_json: bool,
    budget: float,
    words: list[str],
) -> int:
    """Finds the cheapest settings that fit for the run of a run file, and prints them.

    Args:
      words: CONFIG and KEY=VALUE as typed, repeated in the suggested commands.

    Returns:
      Exit code: 0 if settings fit, 1 if none do.
    """
    from zerojax.forecasting.settings_search import (
        REMATS,
        SearchedRun,
        chosen_words,
        list_candidates,
        own_candidate,
    )
    from zerojax.training.run_file import plan_from_config

    if config.elasticity.enabled:
        raise ValueError(
            "--search chooses num_microbatches, and so does elasticity; set elasticity.enabled="
            "false and global_batch_size to the batch that `zerojax elastic` shows"
        )
    if config.mesh.offload.auto:  # the search tries offload by itself
        mesh = dataclasses.replace(config.mesh, offload=config.mesh.offload.chosen())
        config = dataclasses.replace(config, mesh=mesh)
    candidates = list_candidates(
        devices,
        config.global_batch_size,
        node_devices=gpu.node_devices,
        replicas=config.mesh.replica,
        context=config.mesh.context,
        num_layers=config.model.num_layers,
        num_experts=config.model.moe.num_experts,
        unrolls=can_unroll(config),
        remats=[
            remat for remat in REMATS if remat != "attention" or config.model.attention != "xla"
        ],
    )
    if not candidates:
        raise ValueError(
            f"--devices {devices}: with model=1, 2, 4 or 8 no mesh divides both the devices and "
            f"global_batch_size={config.global_batch_size}; set global_batch_size to a multiple of "
            f"{devices}"
        )

    def plan_for(candidate, options):
        return plan_from_config(with_candidate(config, candidate, options), devices, gpu=gpu)

    own = own_candidate(
        candidates,
        zero=config.mesh.zero,
        model=config.mesh.model,
        stage=config.mesh.stage,
        expert=config.mesh.expert,
        num_microbatches=config.num_microbatches or 1,
        remat=config.model.remat,
    )
    searched = SearchedRun(
        plan_for=plan_for, candidates=candidates, offload=config.mesh.offload, own=own
    )
    result = _search(searched, gpu, as_json=as_json, budget=budget)
    if result.chosen is not None and not as_json:
        where = ["--gpu", gpu.name, "--devices", str(devices)]
        chosen = [*words, *chosen_words(result)]
        show(f"\nits plan page: {command_name()} {shlex.join(['plan', *chosen, *where])}")
        show(f"its run:       {command_name()} {shlex.join(['train', *chosen])}")
    return EXIT_DOES_NOT_FIT if result.chosen is None else EXIT_FITS


def search_script(
    path: str,
    overrides: list[str],
    gpu: Gpu,
    devices: int,
    *,
    as_json: bool,
    budget: float,
) -> int:
    """Finds the cheapest settings that fit for the run of a script, and prints them.

    Returns:
      Exit code: 0 if settings fit, 1 if none do.
    """
    from zerojax.cli.script_runs import call_of_script
    from zerojax.forecasting.settings_search import chosen_words
    from zerojax.training.search_runs import searched_run

    call = call_of_script(path, overrides, devices, gpu)
    with Progress(quiet=as_json) as progress:
        progress("planning")
        searched = searched_run(call, gpu, devices)
    result = _search(searched, gpu, as_json=as_json, budget=budget)
    if result.chosen is not None and not as_json:
        chosen = [path, *overrides, *chosen_words(result)]
        where = ["--gpu", gpu.name, "--devices", str(devices)]
        show(f"\nits plan page: {command_name()} {shlex.join(['plan', *chosen, *where])}")
        show(f"its run:       {command_name()} {shlex.join(['train', *chosen])}")
    return EXIT_DOES_NOT_FIT if result.chosen is None else EXIT_FITS


def _search(searched: SearchedRun, gpu: Gpu, *, as_json: bool, budget: float) -> SearchResult:
    """Searches for settings that fit with fast compiler options, and prints the result."""
    from zerojax.forecasting import forecast
    from zerojax.forecasting.settings_search import find_settings, search_dict, search_page
    from zerojax.hardware import compile_client

    missing = compile_client.missing()
    if missing is not None:
        raise compile_client.CompilerMissing(f"--search compares compiled plans, but {missing}")
    with Progress(quiet=as_json) as progress:
        result = find_settings(
            searched,
            gpu,
            forecast_of=lambda plan: forecast(plan, gpu=gpu, fast=True, progress=progress),
            budget=budget,
            report=progress,
            improved=lambda trial: progress.line(
                f"best so far: {trial.candidate.describe()}, {trial.seconds or 0.0:.3g} s expected"
            ),
        )
    show(json.dumps(search_dict(result), indent=2) if as_json else search_page(result))
    return result


def can_unroll(config: RunConfig) -> bool:
    """Returns whether a search may unroll the loop over layers.

    Unrolling is allowed for at most `MOST_UNROLLED` layers without experts (expert layers have a
    loop of their own), and with settings that `why_never_unrolled` permits.
    """
    from zerojax.tracing.unrolling import MOST_UNROLLED, why_never_unrolled

    below_stage_3 = dataclasses.replace(config.mesh, zero=0, stage=1)
    few = config.model.num_layers <= MOST_UNROLLED
    return few and not config.model.moe.num_experts and why_never_unrolled(below_stage_3) is None


def with_candidate(
    config: RunConfig, candidate: Candidate, options: Mapping[str, Any] | None = None
) -> RunConfig:
    """Returns `config` with the mesh options, remat and microbatches of a candidate.

    Args:
      options: additional fields of the mesh settings.
    """
    mesh = {**candidate.mesh_options(), **(options or {})}
    assert candidate.remat != "elementwise", "only layers of a list have this value"
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, **mesh),
        model=dataclasses.replace(config.model, remat=candidate.remat),
        num_microbatches=candidate.num_microbatches,
    )
