"""`zerojax plan` after its settings are read: one forecast, or the search for the cheapest plan."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence

from zerojax.cli.invocation import command_name
from zerojax.cli.progress import Progress
from zerojax.config import RunConfig
from zerojax.config.display import show
from zerojax.config.offload import HOST
from zerojax.forecasting import forecast as compile_forecast
from zerojax.forecasting.page import forecast_dict, forecast_page
from zerojax.forecasting.search import (
    Candidate,
    SearchResult,
    list_candidates,
    search,
    search_dict,
    search_page,
)
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import Gpu
from zerojax.plan import mesh as meshes
from zerojax.training.run_file import plan_from_config

EXIT_FITS, EXIT_DOES_NOT_FIT, EXIT_NOT_DECIDED = 0, 1, 3
OFFLOADED = "mesh.offload.opt_state=host"
NO_COMPILE = "--no-compile was given"


def plan(
    config: RunConfig,
    gpu: Gpu,
    devices: int,
    *,
    as_json: bool,
    no_compile: bool,
    fast: bool,
    budget: float | None,
    words: list[str],
) -> int:
    """Prints the forecast of a run, or with a `budget` what the search has found.

    Args:
      words: CONFIG and KEY=VALUE as they were given, for the commands to go on with.

    Returns:
      0 it fits, 1 it does not, 3 only formulas are known and they do not decide it.

    Raises:
      ValueError: settings that cannot be. CompileError: the compiler refused the step.
    """
    try:
        meshes.make_abstract_mesh(config.mesh, devices)
    except ValueError as error:
        if budget is None:
            raise ValueError(f"--devices {devices}: {error}") from None
    if budget is not None:
        return _search(config, gpu, devices, as_json=as_json, budget=budget, words=words)
    with Progress(quiet=as_json) as progress:
        progress(f"planning for {devices} x {gpu.title}")
        forecast = compile_forecast(
            plan_from_config(config, devices),
            gpu=gpu,
            fast=fast,
            why_formula=NO_COMPILE if no_compile else None,
            progress=progress,
        )
    show(json.dumps(forecast_dict(forecast), indent=2) if as_json else forecast_page(forecast))
    fits = forecast.verdict.fits
    return {True: EXIT_FITS, False: EXIT_DOES_NOT_FIT, None: EXIT_NOT_DECIDED}[fits]


def explain(config: RunConfig, devices: int, name: str) -> int:
    """Prints the explanation of one parameter of a run.

    Returns:
      0.

    Raises:
      ValueError: settings that cannot be, or no such parameter.
    """
    show(plan_from_config(config, devices).explain(name))
    return EXIT_FITS


def _search(
    config: RunConfig,
    gpu: Gpu,
    devices: int,
    *,
    as_json: bool,
    budget: float,
    words: list[str],
) -> int:
    """The search compiles with the fast options, which give the same memory in less time.

    Where nothing fits it looks once more, with the optimizer's state in host memory, for what is
    left of the budget.
    """
    if config.elasticity.enabled:
        raise ValueError(
            "--search chooses num_microbatches, and so does elasticity; set elasticity.enabled="
            "false and global_batch_size to the batch that `zerojax elastic` shows"
        )
    candidates = list_candidates(
        devices,
        config.global_batch_size,
        node_devices=gpu.node_devices,
        replicas=config.mesh.replica,
        num_layers=config.model.num_layers,
    )
    if not candidates:
        raise ValueError(
            f"--devices {devices}: neither they nor global_batch_size={config.global_batch_size} "
            f"can be cut evenly for model=1, 2, 4 or 8; use a multiple of {devices} rows"
        )
    missing = compile_client.missing()
    if missing is not None:
        raise compile_client.CompilerMissing(f"--search compares compiled plans, but {missing}")
    result = _find(config, gpu, devices, candidates, budget=budget, quiet=as_json)
    if result.chosen is None and result.certain and config.mesh.offload.is_off:
        offload = dataclasses.replace(config.mesh.offload, opt_state=HOST)
        mesh = dataclasses.replace(config.mesh, offload=offload)
        offloaded = dataclasses.replace(config, mesh=mesh)
        left = max(budget - result.elapsed, 0.0)
        found = _find(offloaded, gpu, devices, candidates, budget=left, quiet=as_json)
        sentence = f"{result.sentence} With {OFFLOADED}: {found.sentence}"
        better = result if found.chosen is None else found
        settings = () if found.chosen is None else (OFFLOADED,)
        result = dataclasses.replace(better, sentence=sentence, settings=settings)
    if as_json:
        show(json.dumps(search_dict(result), indent=2))
    else:
        show(search_page(result))
        if result.chosen is not None:
            where = ["--gpu", gpu.name, "--devices", str(devices)]
            chosen = [*words, *result.settings, *result.chosen.candidate.words()]
            show(f"\nits page: {command_name()} {shlex.join(['plan', *chosen, *where])}")
            show(f"its run:  {command_name()} {shlex.join(['train', *chosen])}")
    return EXIT_DOES_NOT_FIT if result.chosen is None else EXIT_FITS


def _find(
    config: RunConfig,
    gpu: Gpu,
    devices: int,
    candidates: Sequence[Candidate],
    *,
    budget: float,
    quiet: bool,
) -> SearchResult:
    where = " with the optimizer's state on the host" * config.mesh.offload.moves_opt_state
    with Progress(quiet=quiet) as progress:
        progress(f"searching {len(candidates)} candidates{where}, for {budget:.0f} s at most")
        return search(
            lambda candidate: plan_from_config(with_candidate(config, candidate), devices),
            candidates,
            gpu,
            forecast_of=lambda plan: compile_forecast(plan, gpu=gpu, fast=True, progress=progress),
            budget=budget,
            report=progress,
        )


def with_candidate(config: RunConfig, candidate: Candidate) -> RunConfig:
    """The settings of a run with those of a candidate laid over them."""
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(
            config.mesh,
            data=-1,
            model=candidate.model,
            stage=candidate.stage,
            zero=candidate.zero,
        ),
        model=dataclasses.replace(config.model, remat=candidate.remat),
        num_microbatches=candidate.num_microbatches,
    )
