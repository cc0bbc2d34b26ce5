"""Plans with measured choices: what is asked, what is told, whole steps, runs that go on."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from pallas_kernels.choice import Choice
from tests.support.marks import needs_kernels
from tests.support.tuning_doubles import Clock, plan_for
from zerojax.cli import main
from zerojax.config import MeshConfig
from zerojax.hardware import compile_client, gpus
from zerojax.operators.attending import Call, calls_of_attention
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.open_choices import describe_open_choices
from zerojax.training import tuning
from zerojax.training.tuning import (
    Answer,
    KeptChoices,
    attention_choices,
    measured_choices,
    trials,
    tuned_plan,
    whole_steps,
)
from zerojax.transport import bucket_sizes


def test_on_a_cpu_nothing_is_measured() -> None:
    plan = plan_for()
    assert zerojax.tune(plan) is plan
    assert "not NVIDIA GPUs" in tuned_plan.why_not_measured(plan)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices are taken for GPUs."""
    monkeypatch.setattr(tuned_plan, "is_on_gpus", lambda plan: True)
    monkeypatch.setattr(tuned_plan, "OTHER_KERNEL", "interpret")


@needs_kernels
@pytest.mark.usefixtures("on_gpus")
def test_a_plan_has_the_choices_and_says_them(monkeypatch, kept):
    """The kernels run in interpret mode; which one wins is up to the clock alone."""
    monkeypatch.setattr(measured_choices, "_times", lambda *_: [[1.0] * 7, [0.5] * 7])
    monkeypatch.setattr(tuned_plan, "MAX_ARRAYS", 3)
    monkeypatch.setattr(tuned_plan, "open_calls", lambda plan: {})
    plan = plan_for()
    tuned = zerojax.tune(plan, kept=kept, clock=Clock())
    chosen = {what: one.implementation for what, one in tuned.program.kernels.items()}
    assert chosen == {"update": "interpret", "statistics": "interpret"}
    said = [reason for reason in tuned.reasons if "times as fast here" in reason]
    assert [reason.partition(":")[0] for reason in said] == [
        "optimizer update by interpret",
        "gradient statistics by interpret",
    ]
    assert tuned.fingerprint == plan.fingerprint


@pytest.mark.thorough
@needs_kernels
@pytest.mark.usefixtures("on_gpus")
def test_both_ways_are_timed_in_place_on_the_sizes_of_the_plan(kept, monkeypatch):
    """With the clock of the machine: interpreted kernels lose, by far."""
    monkeypatch.setattr(measured_choices, "NOISE", float("inf"))
    patient = dataclasses.replace(tuned_plan.AT_START, total=float("inf"))
    monkeypatch.setattr(tuned_plan, "AT_START", patient)
    tuned = zerojax.tune(plan_for(), kept=kept)
    for what in ("update", "statistics"):
        chosen = tuned.program.kernels[what]
        assert chosen.implementation == "xla"
        assert "interpret is 0." in chosen.reason
        assert "times as fast here, measured" in chosen.reason


def test_what_was_asked_for_is_not_measured(on_gpus: None) -> None:
    asked_for = {"kernels": "xla", "model": {"attention": "chunked"}}
    for options in (asked_for, {"tune": "off"}, {"deterministic": "mesh"}):
        plan = plan_for(**options)
        assert zerojax.tune(plan) is plan
        assert tuned_plan.why_not_measured(plan)


def test_what_runs_the_update_says_nothing_of_attention(on_gpus, monkeypatch):
    """`zerojax tune` advises `mesh.kernels=xla` for a step in which attention was measured."""
    said = Answer(choice="chunked", reason="said")
    monkeypatch.setattr(tuned_plan, "choose_attention", lambda *_: said)
    plan = plan_for(kernels="xla")
    chosen = zerojax.tune(plan, kept=KeptChoices(None), clock=Clock()).program.kernels
    assert chosen == {**plan.program.kernels, KIND: Choice("chunked", "said")}  # type: ignore[arg-type]


TINY = [
    *("cpu_devices=8", "steps=1", "model.num_layers=1", "model.embed_dim=16", "model.num_heads=2"),
    *("model.vocab_size=64", "data.seq_len=16", "model.max_seq_len=16", "global_batch_size=8"),
]


def test_the_command_prints_what_was_chosen(on_gpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    answers = iter(["one", "two", "three", "four"])
    monkeypatch.setattr(
        tuned_plan, "decide", lambda *_, **__: Answer(choice="xla", reason=next(answers))
    )
    assert main(["tune", "--no-steps", *TINY]) == 0
    told = capsys.readouterr().out.splitlines()
    attention = "attention of 1 x 16 tokens to 16, 2 heads of 8, 2 of keys, float32, causal"
    assert sorted(told[1:]) == [
        f"  {attention}: xla (three; four)",
        "  statistics: xla (one)",
        "  update: xla (two)",
    ]


def test_the_command_refuses_what_leaves_nothing_to_measure(capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", *TINY]) == 2
    assert "nothing to measure: the devices are not NVIDIA GPUs" in capsys.readouterr().err
    assert main(["tune", *TINY, "kernels=xla", "model.attention=chunked"]) == 2
    told = capsys.readouterr().err
    assert "kernels=xla" in told
    assert "use kernels=auto" in told
    assert main(["tune", *TINY, "tune=off"]) == 2
    assert "tune=off; use tune=auto" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_command_times_whole_steps_and_advises_what_is_faster(
    on_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each variant trains for real; the times are injected."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned_plan, "decide", lambda *_, **__: Answer(choice="xla", reason="said"))
    monkeypatch.setattr(tuned_plan, "obstacle_of", lambda *_: "no GPU has run it")
    monkeypatch.setattr(bucket_sizes, "SMALLEST_BUCKET", 100)
    run = ["tune", *TINY, "mesh.zero=3", "mesh.persistence_threshold=0", "model.num_layers=2"]
    seconds = {"as planned": 0.5, "mesh.allgather_bucket_size=1640": 0.4}
    measured = whole_steps.time_steps

    def timed(variants: Any) -> Any:
        for step in measured(variants):
            assert 0 < step.seconds < float("inf"), step
            yield dataclasses.replace(step, seconds=seconds.get(step.name, 0.6))

    monkeypatch.setattr(tuning, "time_steps", timed)
    assert main(run) == 0
    told = capsys.readouterr().out.splitlines()
    assert "  as planned: 500 ms a step" in told
    assert "  mesh.allgather_bucket_size=1640: 400 ms a step, 1.250 times as fast" in told
    assert "  mesh.allgather_bucket_size=410: 600 ms a step, 0.833 times as fast" in told
    assert told[-1] == "write mesh.allgather_bucket_size=1640 into the run file"
    seconds.clear()
    assert main(run) == 0
    assert capsys.readouterr().out.endswith(
        "no setting is faster by 3%; leave the run file as it is\n"
    )


@pytest.mark.thorough
def test_variants_differ_from_the_plan_in_one_setting_each(on_gpus, monkeypatch):
    monkeypatch.setattr(bucket_sizes, "SMALLEST_BUCKET", 100)
    monkeypatch.setattr(tuned_plan, "obstacle_of", lambda *_: None)
    plan = plan_for()
    layer = bucket_sizes.elements_of_a_layer(plan)
    of_layer = [x for x in plan.placement.leaves.values() if x.num_slices == 2]
    assert 2 * layer == sum(int(np.prod(x.shape)) for x in of_layer)
    names = [f"mesh.allgather_bucket_size={layer // parts}" for parts in (2, 4, 8)]
    variants = whole_steps.variants_of(plan)
    assert [*variants] == ["as planned", "mesh.kernels=interpret", *names]
    chosen = variants["mesh.kernels=interpret"].program.kernels
    assert {one.implementation for one in chosen.values()} == {"interpret"}
    few = variants[names[-1]]
    text = zerojax.build_step(few).lower(few.abstract_state, few.abstract_batch).as_text()
    planned = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch).as_text()
    assert text.count('"stablehlo.all_gather"') > planned.count('"stablehlo.all_gather"')


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "options"),
    [
        (0, {"reduce_bucket_size": "all_reduce"}),
        (1, {"reduce_bucket_size": "reduce_scatter", "allgather_bucket_size": "all_gather"}),
        (2, {"reduce_bucket_size": "reduce_scatter", "allgather_bucket_size": "all_gather"}),
    ],
)
def test_below_stage_3_both_kinds_of_buckets_are_tried(zero, options, on_gpus, monkeypatch):
    """Smaller ones are more collectives, larger ones fewer; stage 2 reduces layers in parts."""
    monkeypatch.setattr(bucket_sizes, "SMALLEST_BUCKET", 100)
    limits = {"reduce_bucket_size": 8192, "allgather_bucket_size": 8192}
    plan = plan_for(zero=zero, kernels="xla", **limits)
    variants = whole_steps.variants_of(plan)
    tried = {name.partition("=")[0].removeprefix("mesh.") for name in variants} - {"as planned"}
    assert tried == {*options, "unroll"}
    count = {name: _collectives(one) for name, one in variants.items()}
    for option, kind in options.items():
        sizes = [int(name.partition("=")[2]) for name in variants if option in name]
        few, many = (count[f"mesh.{option}={size}"] for size in (max(sizes), min(sizes)))
        assert many[kind] > count["as planned"][kind] >= few[kind], (option, sizes)


def _collectives(plan: zerojax.Plan) -> dict[str, int]:
    text = lowered(plan)
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    return {kind: text.count(f'"stablehlo.{kind}"') for kind in kinds}


class Trials:
    """Stands for `TimedSteps`: steps that take given seconds, or fail, and are counted."""

    def __init__(self, plan: Any, clock: Any) -> None:
        self.plan, self.failure = plan, None

    def median_of(self, steps: int) -> float:
        self.plan.append(steps)
        if self.plan[0] == "bad":
            self.failure = "RuntimeError: out of memory"  # type: ignore[assignment]
            return float("inf")
        return float(self.plan[0])


def test_a_variant_that_fails_has_no_time_and_the_next_one_has(monkeypatch):
    monkeypatch.setattr(whole_steps, "TimedSteps", Trials)
    plans: Any = {"one": ["bad"], "two": [2.0], "three": [0.001], "four": [60.0]}
    bad, good, *_ = whole_steps.time_steps(plans)
    assert (bad.seconds, bad.failure) == (float("inf"), "RuntimeError: out of memory")
    assert (good.seconds, good.failure) == (2.0, None)
    taken = {name: steps for name, (_, *steps) in plans.items()}
    assert taken == {"one": [3], "two": [3, 5], "three": [3, 9], "four": [3]}


def test_all_processes_take_the_steps_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_steps, "TimedSteps", Trials)
    slower = lambda mine: np.stack([mine, mine + 3])  # noqa: E731
    plans: Any = {"one": [2.0]}
    (timed,) = whole_steps.time_steps(plans, exchange=slower)
    assert timed.seconds == 5.0
    assert plans["one"] == [2.0, 3, 2], "10 seconds are 2 steps of the slowest process"


@pytest.mark.thorough
def test_a_trial_trains_and_tells_what_failed() -> None:
    trial = whole_steps.TimedSteps(plan_for(), Clock())
    assert trial.median_of(1) == 0.0, "the clock stands"
    assert trial.failure is None
    broken = whole_steps.TimedSteps("no plan", Clock())  # type: ignore[arg-type]
    assert broken.median_of(1) == float("inf")
    assert str(broken.failure).startswith("TypeError: ")


def test_a_plan_says_why_a_kernel_was_not_taken() -> None:
    plan, why = plan_for(), "mosaic_gpu was not chosen: its results are wrong"
    answers = {what: Answer(choice="xla", reason=why) for what in ("update", "statistics")}
    reasons = tuned_plan.with_answers(plan, answers).reasons
    for title in ("optimizer update", "gradient statistics"):
        assert reasons.count(f"{title} by xla: {why}") == 1


def test_a_plan_gives_no_reason_for_an_attention_that_a_measurement_replaced() -> None:
    plan = plan_for()
    (planned,) = {call.describe(): call for call in plan.traced.attention_calls}.values()
    for choice in (planned.implementation, "chunked"):
        answers = {planned.kind: Answer(choice=choice, reason="faster here")}
        reasons = tuned_plan.with_answers(plan, answers).reasons
        assert f"{planned.kind} by {choice}: faster here" in reasons
        assert (planned.describe() in reasons) == (choice == planned.implementation)


def test_the_sample_has_small_and_large_arrays_within_the_room(monkeypatch):
    plan = plan_for()
    whole = {n: x.sharding.shard_shape(x.shape) for n, x in plan.abstract_state["params"].items()}
    monkeypatch.setattr(tuned_plan, "MAX_ARRAYS", 5)
    assert len(found := tuned_plan.sample_shapes(plan)) == 5
    assert all(whole[name] == shape for name, shape in found.items())
    monkeypatch.setattr(tuned_plan, "room", lambda plan: 600 * tuned_plan.BYTES_PER_ELEMENT)
    cut = tuned_plan.sample_shapes(plan)
    assert cut.keys() == found.keys()
    assert sum(int(np.prod(shape)) for shape in cut.values()) <= 600 + 5 * tuned_plan.SMALLEST
    assert any(cut[name] != whole[name] for name in cut)


def test_a_key_changes_with_what_an_answer_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, shapes = plan_for(), {"x": (1000,)}
    key = tuned_plan.key_of(plan, "adamw", shapes)
    assert key == tuned_plan.key_of(plan, "adamw", {"x": (1010,)}), "sizes are rounded"
    assert key != tuned_plan.key_of(plan, "adamw", {"x": (3000,)})
    assert key != tuned_plan.key_of(plan, "lion", shapes)
    monkeypatch.setattr(trials, "source_hash", lambda: "another")
    assert key != tuned_plan.key_of(plan, "adamw", shapes)


# Attention


@pytest.fixture
def chunked_is_faster(monkeypatch: pytest.MonkeyPatch, on_gpus: None) -> None:
    """Attention alone is measured, stored scores beside chunks, and the clock is for the chunks."""
    monkeypatch.setattr(attention_choices, "NO_MORE_MEMORY", {"xla": ("chunked",)})
    monkeypatch.setattr(tuned_plan, "open_kernels", lambda plan: {})
    monkeypatch.setattr(measured_choices, "_times", lambda *_: [[1.0] * 7, [0.5] * 7])


KIND = "attention of 1 x 16 tokens to 16, 4 heads of 8, 4 of keys, float32, causal"


def lowered(plan: zerojax.Plan) -> str:
    return zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch).as_text()


@pytest.mark.thorough
@pytest.mark.usefixtures("chunked_is_faster")
def test_attention_is_measured_and_the_step_takes_what_is_faster(kept, monkeypatch):
    plan = plan_for()
    tuned = zerojax.tune(plan, kept=kept, clock=Clock())
    choice = tuned.program.kernels[KIND]
    assert choice.implementation == "chunked"
    assert f"{KIND} by chunked: {choice.reason}" in tuned.reasons
    assert "2.00 times as fast here" in choice.reason
    assert tuned.as_dict()["kernels"][KIND] == "chunked"
    asked = plan_for(model={"attention": "chunked"})
    assert lowered(tuned) == lowered(asked) != lowered(plan)
    again = zerojax.tune(plan, kept=kept, clock=Clock())
    assert again.program.kernels[KIND] == choice


@pytest.mark.usefixtures("chunked_is_faster")
def test_attention_that_is_wrong_is_refused(kept, monkeypatch):
    right = attention_choices.attention

    def wrong(*operands: Any, implementation: str, **options: Any) -> jax.Array:
        out = right(*operands, implementation=implementation, **options)
        return 1.1 * out if implementation == "chunked" else out

    monkeypatch.setattr(attention_choices, "attention", wrong)
    choice = zerojax.tune(plan_for(), kept=kept, clock=Clock()).program.kernels[KIND]
    assert choice.implementation == "xla"
    assert "chunked was not chosen: its results are wrong: the result differs by" in choice.reason


@pytest.mark.usefixtures("chunked_is_faster")
def test_attention_without_room_stays_what_auto_takes(kept, monkeypatch):
    monkeypatch.setattr(attention_choices, "room", lambda plan: 100)
    choice = zerojax.tune(plan_for(), kept=kept, clock=Clock()).program.kernels[KIND]
    assert choice.implementation == "xla"
    assert "nothing was measured: one row takes" in choice.reason
    assert "may use 100" in choice.reason


@pytest.mark.usefixtures("on_gpus")
def test_attention_by_a_kernel_of_another_card_is_an_obstacle(kept: KeptChoices) -> None:
    (call,) = tuned_plan.open_calls(plan := plan_for()).values()
    asked = attention_choices.attention_question(plan, call, "xla", "mosaic_gpu")
    assert asked.reference.obstacle is None
    assert "needs an NVIDIA GPU" in str(asked.other.obstacle)


@pytest.mark.thorough
def test_attention_that_was_asked_for_or_hangs_on_data_is_not_measured() -> None:
    assert not tuned_plan.open_calls(plan_for(model={"attention": "chunked"}))
    x = jnp.zeros((2, 8, 4, 8))
    segments = jnp.zeros((2, 8), jnp.int32)
    with calls_of_attention() as calls:
        zerojax.attention(x, x, x, causal=True)
        zerojax.attention(x, x, x, segments=segments)
        zerojax.attention(x, x, x, layout=zerojax.config.FixedLayout(block=4))
    assert [call.kind is None for call in calls] == [False, True, True]


# Plans of GPUs that are not here


@pytest.mark.thorough
def test_a_page_names_both_where_nothing_can_be_measured(capsys: pytest.CaptureFixture) -> None:
    config = "configs/llama_13b_host_offload_1xh200.yaml"
    page = ["plan", config, "--gpu", "h200", "--devices", "1", "--no-compile"]
    assert main(page) in (0, 3)
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "measured on the run's GPUs before step 1 (tune: auto); "
        "planned is the first choice of each: "
        "gradient statistics and update by adamw (xla, or mosaic_gpu; both launch a kernel for "
        "each of 12 arrays and move about the same bytes); attention of 4 "
        "x 4096 tokens to 4096, 40 heads of "
        "128, 40 of keys, bfloat16, causal (cudnn, or mosaic_gpu); slices of state on the host (at "
        "most 16,777,216 elements, or 4,194,304 or 33,554,432)"
    ) in told
    assert main([*page, "mesh.tune=off"]) in (0, 3)
    assert "tune: auto" not in capsys.readouterr().out


def test_what_is_not_open_is_not_named() -> None:
    plan = plan_for(kernels="xla", model={"attention": "chunked"})
    assert describe_open_choices(plan) == []
    (told,) = describe_open_choices(plan_for(optimizer=optax.adam(1e-3)))
    assert "gradient statistics (xla" in told
    assert "update" not in told
    assert "slices" not in told


# Memory of a call of attention, compiled for a GPU


CALLS = {
    "tiny": {"queries": 16, "heads": 2, "head_dim": 16, "dtype": "bfloat16"},
    "small": {"queries": 64, "heads": 4, "head_dim": 32, "dtype": "bfloat16"},
    "short": {"queries": 128, "heads": 4, "head_dim": 64, "dtype": "bfloat16"},
    "medium": {"queries": 1024, "heads": 12, "head_dim": 64, "dtype": "bfloat16"},
    "float32": {"queries": 1024, "heads": 12, "head_dim": 64, "dtype": "float32"},
    "grouped": {"queries": 4096, "heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"},
}


@pytest.mark.gpu_programs
@pytest.mark.parametrize(
    "name",
    [name if name == "short" else pytest.param(name, marks=pytest.mark.slow) for name in CALLS],
)
def test_a_call_takes_the_memory_that_was_counted(name: str) -> None:
    mesh = make_mesh(MeshConfig(), compile_client.gpu_devices(gpus.find_gpu("h200"), 1))
    alone = Mesh(np.array(mesh.devices.flat[:1]), ("alone",), axis_types=(AxisType.Auto,))
    rows, sizes = 4, {"kv_heads": CALLS[name]["heads"], **CALLS[name]}
    itemsize = jnp.dtype(sizes["dtype"]).itemsize
    plain = {"why": "", "tile": None, "computed": None, "layout": None, "window": None}
    seen = 0
    for reference, others in attention_choices.NO_MORE_MEMORY.items():
        call = Call(
            **sizes,
            **plain,
            implementation=reference,
            keys=sizes["queries"],
            rows=rows,
            itemsize=itemsize,
            causal=True,
            kind="a call",
        )
        counted = rows * attention_choices.row_bytes(call)
        for way in (reference, *others):
            try:
                programs = attention_choices.programs_of(call, way, alone.abstract_mesh)
                found = [_memory(one, call, alone) for one in programs]
            except ValueError:  # a kernel that does not take the dtype or the head_dim
                assert name in ("float32", "tiny", "small")
                continue
            once, several = found
            # Scalars are not counted.
            assert once.arguments + 3 * once.outputs + once.temporary <= 1.001 * counted
            assert 2 * several.arguments + several.outputs + several.temporary <= 1.001 * counted
            seen += 1
    assert seen >= 3


def _memory(program: Any, call: Call, alone: Mesh) -> compile_client.MemoryUse:
    place = NamedSharding(alone.abstract_mesh, P())
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x in jax.eval_shape(lambda: attention_choices._drawn(call))
    ]
    lowered = compile_client.lower_for_gpus(program.trace(*arrays))
    devices = list(alone.devices.flat)
    return compile_client.compile_for_gpus(lowered, devices=devices, options={}, sketch=True).memory
