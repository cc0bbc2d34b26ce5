"""For which parameter a step multiplies, which operations a trace shows, and the page of both."""

import gzip
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.small_models import (
    VOCAB,
    UserText,
    apply_functions,
    init_functions,
    reference_model,
    regression_loss,
)
from zerojax.cli import main
from zerojax.cli.profile_command import measured_run
from zerojax.config import MeshConfig, OffloadConfig, OptimizerConfig
from zerojax.forecasting.hlo.program import read_program
from zerojax.forecasting.profiling import (
    ParameterFlops,
    StepProfile,
    draw,
    flops_by_parameter,
    newest_trace,
    read_trace,
    with_programs,
)
from zerojax.forecasting.profiling.parameter_flops import NO_PARAMETER
from zerojax.plan.inputs import PlanInputs
from zerojax.tracing.flops import count_program_flops
from zerojax.training.run_spec import RunSpec

ROWS, SEQ, WIDTH, LAYERS = 16, 16, 32, 2
TOKENS = ROWS * SEQ

# --- FLOPs by parameter ---------------------------------------------------------------------------


def rows_of_plan(model, mesh, batch, **settings):
    """{name: row}, after a check that rows add up to what is counted of the whole step."""
    devices = jax.devices()[: math.prod(mesh.values())]
    mesh = zerojax.make_mesh(mesh, devices=devices)
    plan = zerojax.make_plan(model, mesh, example_batch=batch, **settings)
    step = zerojax.build_step(plan)
    rows = flops_by_parameter(plan, step)
    traced = step.trace(plan.abstract_state, plan.abstract_batch)
    assert sum(row.total for row in rows) == count_program_flops(traced.jaxpr)
    assert all(min(row.forward, row.backward, row.recomputed) >= 0 for row in rows)
    return {row.name: row for row in rows}


def text_batch():
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ({"data": 8}, {"zero": 0}),
        ({"data": 4}, {"zero": 1, "num_microbatches": 2}),
        ({"data": 4}, {"zero": 2}),
        ({"data": 4}, {"zero": 3, "num_microbatches": 2}),
        ({"data": 2, "model": 2}, {"zero": 1}),
    ],
)
@pytest.mark.parametrize(("name", "remat"), [("gpt2", "none"), ("gpt2", "full"), ("llama", "dots")])
def test_every_parameter_has_its_products(mesh, settings, name, remat):
    rows = rows_of_plan(reference_model(name, remat=remat), mesh, text_batch(), **settings)
    head_dim, kv_heads = WIDTH // 4, 2 if name == "llama" else 4
    once = 2 * TOKENS * LAYERS * WIDTH
    wanted = {
        "blocks/attention/query/kernel": once * WIDTH,
        "blocks/attention/key/kernel": once * kv_heads * head_dim,
        "blocks/attention/value/kernel": once * kv_heads * head_dim,
        "blocks/attention/output/kernel": once * WIDTH,
        "lm_head/kernel" if name == "llama" else "token_embedding/embedding": (
            2 * TOKENS * WIDTH * VOCAB
        ),
    }
    for parameter, flops in wanted.items():
        row = rows[parameter]
        assert (row.forward, row.backward) == (flops, 2 * flops), parameter
        again = flops if remat == "full" and parameter.startswith("blocks") else 0
        assert row.recomputed == again, parameter
    mlp = [row for parameter, row in rows.items() if "/mlp/" in parameter]
    assert len(mlp) == (3 if name == "llama" else 2)
    assert len({row.forward for row in mlp}) == 1
    assert all(row.backward == 2 * row.forward for row in mlp)
    scores = rows[NO_PARAMETER]
    assert scores.forward == 2 * 2 * TOKENS * SEQ * WIDTH * LAYERS
    assert scores.backward == 2 * scores.forward


@pytest.mark.thorough
def test_stages_of_a_pipeline_too():
    rows = rows_of_plan(
        reference_model("gpt2"), {"data": 2, "stage": 2}, text_batch(), zero=1, num_microbatches=4
    )
    up = rows["blocks/mlp/up/kernel"]
    assert up.backward == 2 * up.forward
    assert up.forward >= 2 * TOKENS * LAYERS * WIDTH * 4 * WIDTH, "idle slots compute, too"


def test_a_frozen_parameter_has_half_of_the_backward_products():
    rows = rows_of_plan(
        reference_model("gpt2"), {"data": 4}, text_batch(), zero=3, freeze=["mlp/up/kernel"]
    )
    up, down = rows["blocks/mlp/up/kernel"], rows["blocks/mlp/down/kernel"]
    assert up.backward == up.forward == down.forward
    assert down.backward == 2 * down.forward


def test_a_first_layer_has_no_gradient_of_its_input():
    batch = {"x": np.ones((8, 12), np.float32), "y": np.ones((8, 5), np.float32)}
    rows = rows_of_plan(
        (init_functions, apply_functions),
        {"data": 4},
        batch,
        loss=regression_loss,
        optimizer=optax.sgd(0.1),
        zero=1,
    )
    assert rows["in/w"].forward == 2 * 8 * 12 * 40
    assert rows["out/w"].backward == 2 * rows["out/w"].forward
    # Nothing multiplies a cotangent by it, so its gradient cannot be told from other products.
    left = rows[NO_PARAMETER]
    assert rows["in/w"].backward + left.total == rows["in/w"].forward


@pytest.mark.thorough
def test_a_users_modules_with_convolution_and_stock_attention():
    tokens = jax.ShapeDtypeStruct((8, 10), jnp.int32)
    rows = rows_of_plan(
        UserText, {"data": 4}, {"tokens": tokens, "targets": tokens}, zero=2, optimizer=optax.sgd(1)
    )
    for name in ("blocks/up/kernel", "blocks/down/kernel", "blocks/attention/out/kernel"):
        assert rows[name].backward == 2 * rows[name].forward, name
    assert rows["conv/kernel"].forward == 2 * 80 * 3 * 30 * 30


# --- traces ---------------------------------------------------------------------------------------


def event(name, micros, *, pid=1, tid=1, module="jit_step", **facts):
    found = {"hlo_op": name, "hlo_module": module, **facts}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 0, "dur": micros, "args": found}


def write_trace(folder, events):
    path = folder / "plugins" / "profile" / "2026" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_operations_are_added_up_over_devices_and_steps(tmp_path):
    line = {"ph": "M", "pid": 1, "tid": 9, "name": "thread_name", "args": {"name": "XLA Modules"}}
    path = write_trace(
        tmp_path,
        [
            line,
            event("fusion.1", 1000, device_ordinal="0"),
            event("fusion.1", 3000, device_ordinal="1"),
            event("copy.2", 500, device_ordinal="0"),
            event("fusion.1", 9e9, tid=9),
            {"ph": "X", "pid": 1, "tid": 2, "name": "python", "dur": 7, "args": {}},
        ],
    )
    assert newest_trace(tmp_path) == path
    ops = read_trace(path)
    assert [(op.name, op.count, op.devices) for op in ops] == [("fusion.1", 2, 2), ("copy.2", 1, 1)]
    assert ops[0].seconds == pytest.approx(4e-3)


def test_gpus_have_a_process_each(tmp_path):
    events = [event("gemm", 10, pid=pid) for pid in (1, 2, 3)]
    (op,) = read_trace(write_trace(tmp_path, events))
    assert (op.count, op.devices) == (3, 3)


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="trace of jax.profiler"):
        read_trace(path)
    assert newest_trace(tmp_path / "missing") is None


def test_a_real_trace_has_the_products_of_a_real_program(tmp_path):
    function = jax.jit(lambda x, w: jnp.tanh(x @ w) @ w)
    x = jnp.ones((256, 256))
    compiled = function.lower(x, x).compile()
    jax.block_until_ready(function(x, x))
    jax.profiler.start_trace(str(tmp_path))
    for _ in range(3):
        jax.block_until_ready(function(x, x))
    jax.profiler.stop_trace()
    trace = newest_trace(tmp_path)
    assert trace is not None
    ops = with_programs(read_trace(trace), read_program(compiled.as_text()))
    products = [op for op in ops if op.kind == "product"]
    assert sum(op.flops * op.count for op in products) == 3 * 2 * 2 * 256**3
    assert all(op.seconds > 0 and op.count % 3 == 0 for op in products)
    assert any("dot_general" in op.where for op in products)


# --- the page and the command ---------------------------------------------------------------------


def test_a_page_without_a_trace_or_a_peak_says_so():
    text = draw(
        StepProfile(
            steps=2,
            devices=2,
            device_kind="cpu",
            step_seconds=0.25,
            spent={"data": 0.1, "step": 0.4, "save": 0.0, "eval": 0.0, "host": 0.0},
            save_seconds=1.5,
            tokens_per_second=None,
            tflops=None,
            mfu=None,
            memory={},
            ops=[],
            traced_steps=2,
            traced_devices=1,
            flops=[ParameterFlops(name="w", forward=1e9, backward=2e9, recomputed=0)],
            counted_flops=3e9,
            trace=None,
        )
    )
    assert "250 ms per step" in text
    assert "MFU unknown: no published peak for 'cpu'" in text
    assert "    50.000 ms  20.0%  waiting for data" in text
    assert "  1500.000 ms         one save, until training continues" in text
    assert "the trace has no operations" in text
    assert "     1.00B    2.00B        - 100.0%  w" in text


WORDS = [
    "model.num_layers=1",
    "model.num_heads=2",
    "model.embed_dim=32",
    "model.max_seq_len=16",
    "data.seq_len=16",
    "global_batch_size=8",
]


def settings_measured(folder, **optimizer):
    offload = OffloadConfig(opt_state="nvme", durable=True, folder=folder)
    rows = np.zeros((8, 3), np.int32)
    inputs = PlanInputs(model=None, example_batch=rows, optimizer=OptimizerConfig(**optimizer))
    return RunSpec(inputs=inputs, mesh=MeshConfig(offload=offload))


@pytest.mark.parametrize("folder", [None, "disk"])
def test_a_profile_leaves_the_files_of_the_run_alone(tmp_path, folder):
    short = measured_run(settings_measured(folder), 2, tmp_path / "profile-2", save=False, every=1)
    found = short.mesh.offload
    assert found.folder == (None if folder is None else "disk/profile-2")
    assert (found.opt_state, found.durable) == ("nvme", False)
    assert short.folder == short.offload_folder == tmp_path / "profile-2"


def test_a_profile_warms_up_in_its_own_steps(tmp_path):
    for given, steps in (({"warmup_steps": 9}, 2), ({"warmup_tokens": 900}, None)):
        run = settings_measured(None, **given)
        found = measured_run(run, 2, tmp_path, save=False, every=1).inputs.optimizer
        assert (found.warmup_steps, found.warmup_tokens) == (steps, None)


@pytest.mark.parametrize("state", ["device", "nvme"])
def test_the_profile_of_a_start_leaves_the_users_folder_alone(tmp_path, monkeypatch, capsys, state):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "disk" / "mine"
    mine.parent.mkdir()
    mine.touch()
    words = [f"mesh.offload.opt_state={state}", "mesh.offload.folder=disk", "zero=1"]
    assert main(["profile", *WORDS, *words, "run_dir=run", "--start"]) == 0
    assert list((tmp_path / "disk").iterdir()) == [mine]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_a_profile_keeps_in_files_is_gone_afterwards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = ["opt_state=nvme", "durable=true", "folder=disk", "min_elements=100", "zero=1"]
    words = [*WORDS, *files, "data.validation_fraction=0", "run_dir=run"]
    assert main(["train", *words, "steps=3", "log.console=quiet"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file()}
    assert main(["profile", *words, "--steps", "2"]) == 0
    assert {p: p.read_bytes() for p in (tmp_path / "disk").rglob("*") if p.is_file()} == before
    assert main(["train", *words, "steps=4", "log.console=lines"]) == 0
    assert "after step 3" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_measures_traces_and_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *WORDS, "zero=2", "--steps", "2", "--out", "looked", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == found["traced_steps"] == 2
    assert (
        sum(row["forward"] + row["backward"] + row["recomputed"] for row in found["flops"])
        == (found["counted_flops"])
    )
    spent = found["spent"]
    assert sum(spent.values()) == pytest.approx(2 * found["step_seconds"], rel=0.2)
    assert spent["step"] > 0
    assert found["save_seconds"] > 0
    assert found["ops"]
    assert {op["kind"] for op in found["ops"]} >= {"product", "collective"}
    products = [op for op in found["ops"] if op["kind"] == "product"]
    assert all(op["module"] == "jit_step" for op in products)
    folder = tmp_path / "looked"
    assert (folder / "profile.json").is_file()
    assert not (folder / "checkpoints").exists()
    assert main(["profile", *WORDS, "--out", "looked"]) == 2
    assert "--out looked" in capsys.readouterr().err


@pytest.mark.slow
def test_steps_of_a_run_are_traced_as_it_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["steps=6", "log.profile=[3,4]", "run_dir=run", "eval_every=null", "eval_batches=1"]
    assert main(["train", *WORDS, *words, "log.console=lines"]) == 0
    assert "step 4: a trace of steps 3 to 4 is in run/trace" in capsys.readouterr().out
    trace = newest_trace(tmp_path / "run")
    assert trace is not None
    names = {op.module for op in read_trace(trace)}
    assert "jit_step" in names


def test_the_command_refuses_too_few_steps(capsys):
    assert main(["profile", "--steps", "1"]) == 2
    assert "--steps 1 is below 2" in capsys.readouterr().err
