"""Forecasts a plan: compiles its training step for a GPU and reads memory, communication and FLOPs
from the result."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh

from zerojax.config.checks import names_keywords
from zerojax.config.display import as_details
from zerojax.config.mesh import HOST
from zerojax.features.one_bit.one_bit_update import TwoPrograms
from zerojax.features.one_bit.sign_plan import compressed_bytes
from zerojax.forecasting import forecast_cache
from zerojax.forecasting.compiled_facts import (
    Facts,
    cache_key,
    compile_facts,
    digest_of_lines,
    read_facts,
)
from zerojax.forecasting.expected_time import expected_time, replay_at
from zerojax.forecasting.forecast_numbers import (
    COMPILED,
    FORMULA,
    Estimate,
    Expected,
    ForecastNumbers,
    Memory,
    Offload,
    RoleBytes,
)
from zerojax.forecasting.forecast_page import VERDICTS, forecast_dict, forecast_page
from zerojax.forecasting.hlo.timeline import COLLECTIVE
from zerojax.forecasting.roofline import estimate, verdict
from zerojax.forecasting.step_contents import (
    SentArray,
    StepContents,
    ValueAtPeak,
    contents_of,
    lines_in_programs,
)
from zerojax.forecasting.transfers import attention_wire_bytes, find_traffic, offload_numbers
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import Gpu, find_gpu
from zerojax.hardware.gpus.achieved import published_rates
from zerojax.placement import device_mesh as meshes
from zerojax.plan.counts import (
    LAYER_UPDATE,
    PIPELINE_BUFFERS,
    layer_update_bytes,
    model_flops,
    role_bytes,
    role_tiers,
    shard_bytes,
    state_bytes,
    tokens_per_step,
)
from zerojax.plan.fp8_costs import describe_eight_bits, eight_bit_share, wire_bytes_saved
from zerojax.plan.make import Plan, require_plan
from zerojax.plan.muon_matrices import matrix_bytes
from zerojax.plan.offload_costs import hiding
from zerojax.plan.open_choices import describe_open_choices
from zerojax.plan.reasons import WIDE_PRODUCTS
from zerojax.plan.rung_plans import with_rungs
from zerojax.plan.wire import bytes_by_level, wire_bytes
from zerojax.step.build import build_step
from zerojax.step.offload_variants import streamed_from_host
from zerojax.tracing.flops import count_program_flops
from zerojax.tracing.trees import format_bytes

_STREAMED = (
    "with offload.params=nvme a step runs several compiled programs in a loop; these numbers "
    "are for the "
    "one program that streams the same layers from host memory"
)

STATE_ROLES = (
    "master weights",
    "optimizer state",
    "average of weights",
    "weights",
    "frozen",
    "extras",
)


class Forecast(ForecastNumbers):
    """Forecast of the memory, communication and time of one training step; `print(forecast.page())`
    shows it."""

    def _repr_html_(self) -> str:
        page = self.page()
        # The verdict stands below the head of the page, whose first lines say what was forecast.
        verdict = next(line for line in page.splitlines() if line.startswith(VERDICTS))
        return as_details(verdict, page)

    def page(self) -> str:
        """Formats the forecast as one page of text, at most 100 columns."""
        return forecast_page(self)

    def as_dict(self) -> dict[str, Any]:
        """Returns every number of the forecast, unrounded, for JSON."""
        return forecast_dict(self)


@names_keywords()
def forecast(
    plan: Plan,
    *,
    gpu: Gpu | str,
    devices: int | None = None,
    fast: bool = False,
    why_formula: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Forecast:
    """Forecasts memory, communication and the shortest possible time of a plan's step on GPUs that
    you do not have.

    If the compile-only client is installed (`zerojax[plan]`), the step is compiled for these GPUs;
    otherwise formulas are used. Nothing is run. Results are cached by content.

    Args:
      plan: result of `make_plan`, on any devices.
      gpu: name of a GPU card ("h200"), path of a card's YAML file, or a `Gpu`.
      devices: number of devices; None: the number in the plan's mesh. The `data` axis takes the
        devices that the other axes leave, and the global batch stays the same.
      fast: whether to skip the compiler's search for faster kernels; memory and communication are
        the same (`hardware.compile_client.FAST_OPTIONS`).
      why_formula: reason to use formulas although a compiler is available; None: use the compiler.
      progress: called with a few words at each stage of the work.

    Raises:
      ValueError: an unknown card, or a number of devices that does not fit the mesh.
      CompilerMissing: the compile-only client is installed, but JAX has unloaded its CUDA plugin.
      CompileError: the compiler rejected the step.
      TypeError: `plan` is not a plan.
    """
    require_plan(plan, "forecast")
    options = {"fast": fast, "why_formula": why_formula, "progress": progress}
    return forecast_step(plan, gpu=gpu, devices=devices, **options).forecast


def forecast_attached(plan: Plan, step: Any, gpu: Gpu) -> Forecast:
    """Forecasts a step from the program that this process runs on the devices of the plan.

    The step is not compiled again if it was called before, because JAX caches it. Roles of
    temporary memory are unknown.

    Args:
      plan: plan on devices of this process; its step must be one program.
      step: result of `build_step(plan)`.
      gpu: card of the devices.
    """
    arguments = (plan.abstract_state, plan.abstract_batch)
    work = _work_of(plan, step.trace(*arguments).jaxpr, wire_bytes(plan))
    compiled = step.lower(*arguments).compile()
    program = compile_client.CompiledProgram(
        text=compiled.as_text(), memory=compile_client.memory_of(compiled)
    )
    made_by = compile_client.compiler_version()
    return _assemble(plan, gpu, work, read_facts(program, plan), None, 0.0, made_by)


class ForecastStep(NamedTuple):
    """A forecast, the plan on the forecast's mesh, contents of the step for program rules, and the
    facts of the compiled step.

    `contents` is None if they were not asked for, and both are if nothing was compiled.
    """

    forecast: Forecast
    plan: Plan
    contents: StepContents | None
    facts: Facts | None = None


def forecast_step(
    plan: Plan,
    *,
    gpu: Gpu | str,
    devices: int | None = None,
    fast: bool = False,
    why_formula: str | None = None,
    progress: Callable[[str], None] | None = None,
    with_contents: bool = False,
) -> ForecastStep:
    """Forecasts a plan's step as `forecast` does.

    Args:
      with_contents: also read what program rules ask of the step; other arguments as in `forecast`.
    """
    card = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    count = plan.mesh.size if devices is None else devices
    settings = dataclasses.replace(plan.settings, data=-1)
    why = why_formula or compile_client.missing()
    if why is None:
        mesh = meshes.make_mesh(settings, compile_client.gpu_devices(card, count))
    else:
        mesh = meshes.make_abstract_mesh(settings, count, gpu=card)
    moved, targets = with_rungs(plan.remake(mesh)), None
    # A step that reads pages runs several programs in a loop, and a compiler sees one at a time.
    counted = streamed_from_host(moved) if _reads_pages(moved) else moved
    if why is None and counted.settings.offload.on_host:
        # A mesh of absent devices has no host memory, so the step is traced on an abstract mesh.
        targets = list(mesh.devices.flat)
        moved, counted = (_over_axes(one, mesh) for one in (moved, counted))
    return _make_forecast(
        moved,
        card,
        counted=counted,
        devices=targets,
        why_formula=why,
        fast=fast,
        progress=progress,
        with_contents=with_contents,
    )


def _reads_pages(plan: Plan) -> bool:
    return plan.offload is not None and bool(plan.offload.paged)


def _over_axes(plan: Plan, mesh: Mesh | AbstractMesh) -> Plan:
    """Moves a plan to an abstract mesh with the same axes; keeps the choices that were made for the
    plan's devices."""
    remade = plan.remake(mesh.abstract_mesh)
    # The choices depend on the devices and their compiler, and an abstract mesh has neither.
    changes = {"program": plan.program, "reasons": plan.reasons, "ladder": plan.ladder}
    return dataclasses.replace(remade, **changes)


def _make_forecast(
    plan: Plan,
    gpu: Gpu,
    *,
    counted: Plan,
    devices: Sequence[Any] | None = None,
    why_formula: str | None = None,
    fast: bool = False,
    progress: Callable[[str], None] | None = None,
    with_contents: bool = False,
) -> ForecastStep:
    """Forecasts one step of a plan.

    Args:
      plan: plan on a mesh of `compile_client.gpu_devices(gpu, ...)`, or on an abstract mesh.
      gpu: specification of the GPU.
      counted: plan whose step is traced and compiled. It is `plan` itself, unless a step of `plan`
        runs several programs; then it is a plan that streams the same layers from host memory in
        one program.
      devices: devices from `gpu_devices` in the order of an abstract mesh, for a plan with arrays
        in host memory; a mesh of these devices would lose the memory kind of such arrays.
      why_formula: reason why the step is not compiled; None: it is compiled.
      fast: whether to skip the compiler's search for faster kernels.
      progress: called with a few words at each stage of the work.
      with_contents: see `forecast_step`.

    Raises:
      CompileError: the compiler rejected the step.
    """
    step = build_step(counted)
    options: dict[str, Any] = {
        "counted": counted,
        "devices": devices,
        "why_formula": why_formula,
        "fast": fast,
        "say": progress or (lambda _: None),
    }
    first = _of_program(
        step, plan, gpu, sent=wire_bytes(plan), with_contents=with_contents, **options
    )
    # A 1-bit optimizer has a second program after its warm-up; both must fit, so both are
    # compiled. Only the second one sends signs.
    if not isinstance(step, TwoPrograms):
        return first
    sent = compressed_bytes(plan.placement, plan.precision)
    later = _of_program(step.compressed, plan, gpu, sent=sent, with_contents=False, **options)
    return first._replace(forecast=_of_both(first.forecast, later.forecast))


def _of_program(
    step: Any,
    plan: Plan,
    gpu: Gpu,
    *,
    sent: int,
    counted: Plan,
    devices: Sequence[Any] | None,
    why_formula: str | None,
    fast: bool,
    say: Callable[[str], None],
    with_contents: bool,
) -> ForecastStep:
    """Forecasts one program of a step.

    Args:
      step: the step of `counted`, or its program after the warm-up of a 1-bit optimizer.
      sent: bytes that ZeRO sends in the program, by formula.
      say: called with a few words at each stage of the work; see `_make_forecast` for the others.
    """
    facts: Facts | None = None
    seconds = 0.0
    say("tracing the step")
    traced = step.trace(counted.abstract_state, counted.abstract_batch)
    if why_formula is None:
        say("lowering")
        with lines_in_programs() if with_contents else contextlib.nullcontext():
            lowered = traced.lower() if devices is None else compile_client.lower_for_gpus(traced)
        # The text has no lines of sources: an edit that only moves lines must not compile again.
        key = cache_key(counted, gpu, fast, program=lowered.as_text())
        facts = forecast_cache.load(key)
        lines = digest_of_lines(lowered) if with_contents else None
        # The cached facts may be of a run that asked for no contents, or of sources with other
        # lines.
        if facts is None or (
            with_contents and (facts.get("lines") != lines or "largest" not in facts)
        ):
            say(f"compiling for {plan.mesh.size} {gpu.title}" + " (fast options)" * fast)
            began = time.perf_counter()
            facts = compile_facts(lowered, counted, devices, fast, lines)
            seconds = time.perf_counter() - began
            forecast_cache.store(key, facts)
    made_by = compile_client.compiler_version(fast=fast)
    work = _work_of(plan, traced.jaxpr, sent)
    made = _assemble(plan, gpu, work, facts, why_formula, seconds, made_by)
    if facts is None or not with_contents:
        return ForecastStep(made, counted, None, facts)
    contents = contents_of(
        counted,
        traced.jaxpr,
        map(SentArray.from_json, facts["sent"]),
        peak=compile_client.MemoryUse(**facts["memory"]).peak,
        largest=[ValueAtPeak(**one) for one in facts["largest"]],
        wire_bytes=made.traffic.wire_bytes or 0,
        network_bytes=made.traffic.network_bytes,
        calls_cudnn=facts["calls_cudnn"],
        on_gpus=True,
    )
    return ForecastStep(made, counted, contents, facts)


def _work_of(plan: Plan, jaxpr: Jaxpr, sent: int) -> _Work:
    return _Work(
        # The traced step has the FLOPs of the whole mesh, but every other number is of one device.
        flops=count_program_flops(jaxpr) / plan.mesh.size,
        eight_bits=eight_bit_share(jaxpr),
        attention_bytes=attention_wire_bytes(jaxpr, plan.mesh.shape),
        zero_bytes=sent,
    )


def _of_both(warm_up: Forecast, compressed: Forecast) -> Forecast:
    """Joins the forecasts of both programs of a 1-bit optimizer. The verdict is that of the program
    that needs more memory."""
    verdict = warm_up.verdict
    if compressed.verdict.needed > verdict.needed:
        reasons = ("of the steps after the warm-up, which need more", *compressed.verdict.reasons)
        verdict = dataclasses.replace(compressed.verdict, reasons=reasons)
    return dataclasses.replace(warm_up, verdict=verdict, compressed=compressed)


# --- one forecast ---------------------------------------------------------------------------------


class _Work(NamedTuple):
    """Work of a traced step on one device.

    Attributes:
      flops: number of FLOPs.
      eight_bits: share of `flops` that are products of 8-bit floats, from 0 to 1.
      attention_bytes: number of bytes that attention over split sequences sends.
      zero_bytes: number of bytes that ZeRO sends, by formula.
    """

    flops: float
    eight_bits: float
    attention_bytes: int
    zero_bytes: int


def _assemble(
    plan: Plan,
    gpu: Gpu,
    work: _Work,
    facts: Facts | None,
    why_formula: str | None,
    seconds: float,
    made_by: str,
) -> Forecast:
    mesh = {str(name): size for name, size in plan.mesh.shape.items()}
    dtype = np.dtype(plan.precision.compute_dtype).name
    memory = _memory(plan, facts)
    offload = offload_numbers(plan, gpu, facts)
    folder = plan.settings.offload.folder
    at_best = None
    if facts is not None:
        # Which transfers nothing hides is asked at the published peaks here, as the bound below
        # uses them.
        at_best = replay_at(facts, published_rates(gpu), mesh, dtype, folder=folder)
    traffic = find_traffic(
        plan,
        gpu,
        mesh,
        facts,
        waited={} if at_best is None else at_best.waited_for_each(COLLECTIVE),
        zero_bytes=work.zero_bytes,
        attention_bytes=work.attention_bytes,
    )
    least = estimate(
        gpu,
        mesh=mesh,
        dtype=dtype,
        flops=work.flops,
        eight_bits=work.eight_bits,
        model_eight_bits=eight_bit_share(plan.traced.forward),
        model_flops=model_flops(plan) / plan.mesh.size,
        hbm_bytes=None if facts is None else facts["hbm_bytes"],
        rows=traffic.rows,
        formula_bytes=traffic.formula_bytes,
        level_bytes=bytes_by_level(plan),
        message_bytes=traffic.message_formula_bytes,
        attention_bytes=work.attention_bytes,
        exchange_bytes=traffic.exchange_formula_bytes,
        matrix_bytes=matrix_bytes(plan),
        tokens=tokens_per_step(plan),
        hiding=None if offload is None else offload.hiding,
    )
    return Forecast(
        gpu=gpu,
        num_devices=plan.mesh.size,
        mesh=mesh,
        plan=plan.as_dict(),
        source=FORMULA if facts is None else COMPILED,
        why_formula=why_formula,
        compiler=made_by,
        options_dropped=dict(plan.program.dropped),
        seconds=seconds,
        memory=memory,
        traffic=traffic,
        offload=offload,
        # The bound and the expected time differ in their rates; `_expected` replays the schedule
        # again.
        estimate=dataclasses.replace(least, expected=_expected(plan, gpu, facts, least, offload)),
        verdict=verdict(plan, gpu, memory),
        remarks=(
            *_unmeasured(plan, gpu),
            *_of_wide_products(plan),
            *_of_eight_bits(plan, gpu),
            *(_STREAMED,) * (facts is not None and _reads_pages(plan)),
            *(() if facts is None else _remarks(facts)),
            *describe_open_choices(plan),
            *_of_ladder(plan),
        ),
    )


def _expected(
    plan: Plan, gpu: Gpu, facts: Facts | None, least: Estimate, offload: Offload | None
) -> Expected | None:
    """Returns the expected time of a step; None if nothing was compiled."""
    if facts is None:
        return None
    dtype = np.dtype(plan.precision.compute_dtype).name
    hidden = None if offload is None else offload.hiding
    return expected_time(
        facts,
        gpu,
        {str(name): size for name, size in plan.mesh.shape.items()},
        dtype,
        folder=plan.settings.offload.folder,
        disk_in_pass=0.0 if hidden is None else hidden.disk_in_pass,
        disk_after=0.0 if hidden is None else hidden.disk_after,
        link_after=0.0 if hidden is None else hidden.link_after,
        model_flops=least.model_flops,
        model_peak=gpu.peak_flops(dtype, eight_bit_share(plan.traced.forward)),
        tokens=tokens_per_step(plan),
    )


def _of_ladder(plan: Plan) -> Iterator[str]:
    """Yields remarks if the size of a step changes during the run."""
    if plan.ladder is not None:
        yield from plan.ladder.describe()
        whole = plan.ladder.describe_rung(plan.ladder.whole)
        yield f"the numbers of this page are for a step with {whole}"


def _of_wide_products(plan: Plan) -> Iterator[str]:
    """Yields a remark on matrix products that have float32 operands although the compute dtype has
    16 bits."""
    computed = np.dtype(plan.precision.compute_dtype).name
    for reason in plan.reasons:
        if reason.startswith(WIDE_PRODUCTS):
            yield f"{reason}. TIME assumes the rate of {computed} for these products"


def _of_eight_bits(plan: Plan, gpu: Gpu) -> Iterator[str]:
    """Yields remarks on bytes that 8-bit floats save, and on GPUs that have no units for 8-bit
    floats."""
    said = describe_eight_bits(plan.traced.forward, plan.precision)
    yield from said
    if said and gpu.fp8_flops is None:
        yield (
            f"{gpu.title} has no units for 8-bit floats with published rates: TIME counts these "
            "products "
            "like others, and their operands are first cast to a wider dtype"
        )
    saved = wire_bytes_saved(plan)
    if saved:
        yield (
            f"kernels that are gathered in 8 bits send {format_bytes(saved)} less per step, by "
            "formula, than in the compute dtype"
        )


def _unmeasured(plan: Plan, gpu: Gpu) -> tuple[str, ...]:
    """Returns a remark if the disk's bandwidth is unknown, because times are then only lower
    bounds."""
    found = None if plan.offload is None else hiding(plan, gpu)
    if found is None or found.disk_seconds is not None:
        return ()
    return (
        "the time of slices in files is not known, so times are lower bounds: "
        f"{found.rates.disk_source}",
    )


def _remarks(facts: Facts) -> Iterator[str]:
    """Yields remarks on differences between the compiled program and a run on real GPUs."""
    if facts["by_cublas"]:
        # The compile-only client has no GPU on which to measure, so it cannot choose as the GPU
        # does.
        yield (
            "all products are compiled for cuBLAS, because Triton has no kernel for one of "
            "them; the "
            "GPU itself measures both for each product, and its peak memory may differ by some "
            "percent"
        )
    else:
        yield (
            "the GPU measures Triton and cuBLAS for each product and uses the faster one; here "
            "Triton "
            "computes all products that it supports, so the GPU's peak memory may differ by "
            "some percent"
        )
    if facts["calls_cudnn"]:
        yield (
            "attention by cuDNN: its FLOPs and bytes are counted, but not its workspace, whose "
            "size only "
            "the GPU's library knows"
        )
    loops = facts["unknown_loops"]
    if loops:
        yield (
            f"{len(loops)} loops have a length that depends on the data ({', '.join(loops[:3])}): "
            "traffic and memory traffic count one iteration of each, so they are lower bounds"
        )


def _memory(plan: Plan, facts: Facts | None) -> Memory:
    formula = role_bytes(plan)
    on_host = sum(tiers.get(HOST, 0) for tiers in role_tiers(plan).values())
    state = state_bytes(plan)
    batch = shard_bytes(plan.abstract_batch)
    if facts is None:
        roles = tuple(RoleBytes(role=r, bytes=None, formula=b) for r, b in formula.items())
        return Memory(
            state=state,
            batch=batch,
            arguments=None,
            outputs=None,
            aliased=None,
            temporary=None,
            peak=None,
            host=on_host,
            formula_peak=sum(formula.values()),
            roles=roles,
        )
    use = compile_client.MemoryUse(**facts["memory"])
    updated = layer_update_bytes(plan)  # not in the compiled program, which updates afterwards
    roles = _roles(use, facts["roles"], formula, batch)
    if updated:
        roles = tuple(
            dataclasses.replace(one, bytes=updated) if one.role == LAYER_UPDATE else one
            for one in roles
        )
    return Memory(
        state=state,
        batch=batch,
        arguments=use.arguments,
        outputs=use.outputs,
        aliased=use.aliased,
        temporary=use.temporary + updated,
        peak=use.peak + updated,
        # State that the plan stores in files is in host memory in the compiled program.
        host=on_host if _reads_pages(plan) else use.host_peak,
        formula_peak=sum(formula.values()),
        roles=roles,
    )


def _roles(
    use: compile_client.MemoryUse,
    found: Mapping[str, int] | None,
    formula: Mapping[str, int],
    batch: int,
) -> tuple[RoleBytes, ...]:
    """Returns one `RoleBytes` for each role; the compiled bytes of all roles add up to the peak.

    Without the compiler's report of live buffers, all temporary memory is one row. The compiler
    counts a pipeline's buffers as activations.

    Args:
      use: memory of the compiled program.
      found: {role: bytes at the peak} from the report of live buffers; None: there is no report.
      formula: {role: bytes by formula}.
      batch: bytes of a device's rows of the batch.
    """
    if found is None:
        # The state is known exactly from the plan; only the rest needs the compiler's report.
        found = {role: formula[role] for role in STATE_ROLES if role in formula}
        found |= {"batch": batch, "temporary": use.temporary}
        found["other"] = use.peak - sum(
            found.values()
        )  # counters, and outputs with memory of their own
    names = list(dict.fromkeys([*formula, *found]))
    return tuple(
        RoleBytes(
            role=name,
            bytes=None if name == PIPELINE_BUFFERS else found.get(name, 0),
            formula=formula.get(name),
        )
        for name in names
        if found.get(name) or formula.get(name)
    )
