"""Refusals of commands, GPU cards, the compile-only client, forecasts and folders of runs.

What would compile or train is replaced.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml

import zerojax
from tests.support.forecast_samples import sample_memory, sample_plan
from tests.support.refusals import Refusal, check_words, code_in, refused, table
from zerojax.cli import (
    build_parser,
    check_command,
    check_targets,
    jax_environment,
    main,
    plan_command,
    profile_command,
    run_commands,
)
from zerojax.cli.complaints import explain
from zerojax.config import ConfigError, RunConfig, load
from zerojax.forecasting import compiled_facts, forecast_cache, roofline
from zerojax.forecasting.hlo.overlap import find_overlap
from zerojax.forecasting.hlo.program import read_program
from zerojax.hardware import compile_client, local_devices
from zerojax.hardware.gpus import find_gpu, target
from zerojax.training.metrics import metric_files, report, runlog
from zerojax.training.run_file import plan_from_config

ROOT = Path(__file__).resolve().parents[2]

# --- cards of GPUs --------------------------------------------------------------------------------


def card(folder: Path, text: str) -> Any:
    path = folder / "mine.yaml"
    path.write_text(text)
    return find_gpu(str(path))


MINE = "name: mine\nbase: h100\n"
PLAIN = (
    "name: mine\nmemory_bytes: 1000\nmemory_gb_per_s: 100\nnode_devices: 1\nnode_gb_per_s: 16\n"
    "network_gb_per_s: 12\nhost_gb_per_s: 16\nmeasured: {product_tflops: 60}\n"
)
CAPABILITY = MINE + "compiler:\n  capability: "
CARDS = {
    "a misspelt key": (
        MINE + "bf16_tflop: 3",
        "bf16_tflop",
        "bf16_tflops",
        MINE + "bf16_tflops: 3",
    ),
    "text": (MINE + "fp8_tflops: '1e3'", "fp8_tflops 1e3", "quotes", MINE + "fp8_tflops: 1e3"),
    "a number of 0": (MINE + "fp8_tflops: 0", "fp8_tflops 0", "", MINE),
    "not a number": (MINE + "memory_gb_per_s: .nan", "memory_gb_per_s nan", ["base: CARD"], MINE),
    "an infinite rate": (MINE + "host_gb_per_s: .inf", "host_gb_per_s inf", ["base: CARD"], MINE),
    "a rate of text": (MINE + "node_gb_per_s: fast", "node_gb_per_s fast", ["base: CARD"], MINE),
    "a rate below 0": (
        MINE + "measured:\n  copy_gb_per_s: -5",
        "measured.copy_gb_per_s -5",
        ["leave the key out"],
        MINE + "measured: {}",
    ),
    "bytes where 10^9 bytes are asked for": (
        MINE + "network_gb_per_s: 5.0e10",
        "network_gb_per_s",
        "GB/s 1000000",
        MINE + "network_gb_per_s: 50",
    ),
    "a copy faster than the memory": (
        MINE + "measured: {copy_gb_per_s: 3600}",
        "measured.copy_gb_per_s 3600 memory_gb_per_s",
        "3517.5",
        MINE + "measured: {copy_gb_per_s: 3517.5}",
    ),
    "a product faster than the peak": (
        MINE + "measured: {product_tflops: 989.6}",
        "measured.product_tflops 989.6 bf16_tflops",
        "989.5",
        MINE + "measured: {product_tflops: 989.5}",
    ),
    "both ways faster than twice one way": (
        MINE + "measured: {host_both_gb_per_s: 135}",
        "measured.host_both_gb_per_s 135 host_gb_per_s",
        "134.4",
        MINE + "host_gb_per_s: 65\nmeasured: {host_both_gb_per_s: 135}",
    ),
    "a product of no published peak": (
        PLAIN,
        "measured.product_tflops",
        "bf16_tflops fp16_tflops",
        PLAIN + "fp16_tflops: 65",
    ),
    "a part of a GPU": (
        MINE + "node_devices: 2.5",
        "node_devices 2.5",
        "2 3",
        MINE + "node_devices: 3",
    ),
    "a base that is the card itself": ("name: mine\nbase: mine", "base mine", "h100", MINE),
    "a name as a number": ("name: 5\nbase: h100", "name 5", "quotes", "name: '5'\nbase: h100"),
    "a list": (MINE + "aliases: me", "aliases me", "['me']", MINE + "aliases: ['me']"),
    "half a card": ("name: mine", "memory_bytes", '"base: h100"', MINE),
    "an unknown base": ("name: mine\nbase: h102", "base h102", "h100 b200 l40s", MINE),
    "a capability": (CAPABILITY + "hopper", "hopper", "8.9 9.0a", CAPABILITY + '"9.0a"'),
    "a version": (
        MINE + "compiler:\n  dnn_version: 9",
        "dnn_version 9",
        "12.8.0",
        MINE + 'compiler:\n  dnn_version: "12.8.0"',
    ),
    "a section": (MINE + "compiler: 9", "compiler 9", "capability", CAPABILITY + '"8.9"'),
    "no lines": ("- h100", "h100", "KEY VALUE", MINE),
    "notes in a list": (
        MINE + "sources: [me]",
        "me",
        "KEY TEXT",
        MINE + "sources: {memory_gb: me}",
    ),
    "a note on no key": (
        MINE + "sources:\n  memory_byte: me",
        "memory_byte",
        "memory_bytes",
        MINE + "sources:\n  memory_bytes: me",
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", CARDS)
def test_files_of_cards(row, tmp_path):
    bad, value, remedy, good = CARDS[row]
    refused(lambda: card(tmp_path, bad), [*value.split(), "mine.yaml"], remedy)
    assert card(tmp_path, good).name in ("mine", "5")


def test_a_card_that_is_not_known(tmp_path):
    known = [path.stem for path in (ROOT / "zerojax/hardware/gpus/cards").glob("*.yaml")]
    assert len(known) > 30
    lines = ["name: mine", "base: h100", "memory_bytes: 85899345920"]
    Refusal("h300", "h300", [*known, "YAML", *lines], known).check(find_gpu)
    assert card(tmp_path, "\n".join(lines)).memory_bytes == 85899345920
    refused(lambda: find_gpu("no/such.yaml"), "no/such.yaml", "YAML a10")


def test_a_card_that_the_compiler_is_told_nothing_of(tmp_path):
    path = "zerojax/hardware/gpus/cards/h100.yaml"
    refused(lambda: target.target_text(find_gpu("a30")), "a30", ["base: a30", "compiler", path])
    section = yaml.safe_load((ROOT / path).read_text())["compiler"]
    mine = card(tmp_path, "name: mine\nbase: a30\n" + yaml.safe_dump({"compiler": section}))
    assert "core_count" in target.target_text(mine)
    known = ["8.0", "8.6", "8.9", "9.0a", "10.0a", "12.0"]
    told = lambda capability: target.target_text(  # noqa: E731
        card(tmp_path, f"{CAPABILITY}'{capability}'\n")
    )
    Refusal("11.0", "mine 11.0", known, known).check(told)


# --- the compile-only client ----------------------------------------------------------------------


def test_no_compiler(monkeypatch):
    h100, extra = find_gpu("h100"), "\"pip install 'zerojax[plan]'\""
    monkeypatch.setattr(compile_client, "_PLUGINS", ("no_such_plugin",))
    missing = compile_client.CompilerMissing
    refused(lambda: compile_client.gpu_devices(h100, 8), "client", extra, error=missing)

    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(target.importlib.metadata, "version", version)
    refused(lambda: target.target_text(h100), "jax-cuda13-pjrt", extra)
    text = (ROOT / "pyproject.toml").read_text()
    packages = {*tomllib.loads(text)["project"]["optional-dependencies"]["plan"]}
    assert {"jax-cuda13-pjrt", "jax-cuda13-plugin"} <= packages
    assert packages & {*target.COMPILERS}


def test_a_compiler_of_another_version(monkeypatch):
    versions = {"jaxlib": "0.11.2", "jax-cuda13-pjrt": "0.12.0.1"}
    monkeypatch.setattr(compile_client, "_plugin", lambda: "xla_cuda13")
    monkeypatch.setattr(compile_client, "_version", versions.get)
    words = re.findall(r"([\w-]+)==([\w.]+\w)", compile_client.missing())
    versions |= dict(words)  # as pip would
    assert compile_client.missing() is None


@pytest.fixture
def client(monkeypatch):
    """Devices of a compiler that is not there; the platforms for which it has any."""
    platforms = {"cpu"}

    def describe(**options: Any) -> Any:
        if os.environ.get("JAX_PLATFORMS") not in platforms:
            raise NotImplementedError
        nodes, count = map(int, options["topology"].split("x")[1:])
        return types.SimpleNamespace(devices=[object()] * (nodes * count))

    monkeypatch.setattr(compile_client, "missing", lambda: None)
    monkeypatch.setattr(compile_client.topologies, "get_topology_desc", describe)
    return compile_client


def test_numbers_of_gpus(client):
    h100 = find_gpu("h100")
    made = lambda number: client.gpu_devices(h100, number)  # noqa: E731
    Refusal(12, "12 8", "8 16", [8, 16]).check(made)
    Refusal(0, "0", "1", [1]).check(made)
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    message = refused(lambda: compiled_facts.nodes_of(mesh), "mesh", "devices", error=TypeError)
    call = code_in(message, "zerojax.hardware.compile_client.gpu_devices(")
    assert len(eval(call, {"zerojax": zerojax, "gpu": h100, "count": 8})) == 8


def test_jax_looked_for_a_gpu(client, monkeypatch):
    """What JAX itself does then is tests/hardware/test_compiler.py's matter."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    made = lambda: client.gpu_devices(find_gpu("h100"), 8)  # noqa: E731
    refused(made, "GPU plugin", "JAX_PLATFORMS=cpu", error=client.CompilerMissing)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    made()


@pytest.mark.thorough
@pytest.mark.gpu_programs
def test_jax_is_told_not_to_look_for_a_gpu():
    program = (
        "import jax; jax.devices(); from zerojax.hardware import compile_client as compiler, gpus\n"
        "try: print(len(compiler.gpu_devices(gpus.find_gpu('h100'), 8)))\n"
        "except compiler.CompilerMissing as error: print(error)"
    )

    def said(**variables: str) -> str:
        rest = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=rest | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    if "JAX_PLATFORMS=cpu" not in said():
        pytest.skip("the plugin loads: there is a GPU, or its libraries are installed")
    assert said(JAX_PLATFORMS="cpu") == "8"


def test_text_that_is_no_compiled_program():
    compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile()
    lowered = "HloModule m\n\nENTRY e {\n  ROOT x = f32[] parameter(0)\n}\n"
    overlap = lambda text: find_overlap(read_program(text), [])  # noqa: E731
    for text, value in (("no program", '"no program"'), (lowered, "is_scheduled=true")):
        Refusal(text, value, "compiled.as_text()", [compiled.as_text()]).check(overlap)
    assert overlap(compiled.as_text()) == {}


# --- forecasts ------------------------------------------------------------------------------------


def test_a_share_of_the_memory_that_is_none():
    name = "XLA_CLIENT_MEM_FRACTION"
    share = lambda value: roofline.memory_fraction({name: value})  # noqa: E731
    refused(lambda: share("most"), [name, "most"], "0.9 unset")
    assert share("0.9")[0] == 0.9
    assert roofline.memory_fraction({})[0] == roofline.MEMORY_FRACTION


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "file"))
    key = forecast_cache.key_of("x")
    with pytest.warns(UserWarning, match="ZEROJAX_CACHE") as caught:
        forecast_cache.store(key, {"a": 1})
    check_words(str(caught[0].message), "forecast", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "other"))
        forecast_cache.store(key, {"a": 1})
        assert forecast_cache.load(key) == {"a": 1}
        monkeypatch.setenv("ZEROJAX_CACHE", "off")
        forecast_cache.store(key, {"a": 1})


TINY = ("num_layers=4", "num_heads=2", "embed_dim=64", "max_seq_len=64", "seq_len=64")
TINY += ("global_batch_size=32", "vocab_size=256", "model.name=llama", "optimizer.name=adamw")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "least"),
    [((), 6), (("zero=3", "remat=full", "opt_state=host"), 3), (("stage=2", "zero=3"), 3)],
)
def test_settings_for_a_step_that_does_not_fit(words, least):
    """Every setting that a page names is one that the same run takes."""

    def plan(more: tuple[str, ...] = (), devices: int = 8) -> Any:
        return plan_from_config(load(RunConfig, None, [*TINY, *words, *more]), devices)

    found = roofline.verdict(plan(), find_gpu("h100"), sample_memory(scale=3))
    count = 0
    for reason in found.reasons:
        settings = tuple(re.findall(r"(?<!\S)(?!XLA_)[\w.]+=[^\s,]+", reason))
        devices = re.search(r"--devices (\d+)", reason)
        count += bool(settings or devices)
        plan(settings, int(devices[1]) if devices else 8)
    assert count >= least, found.reasons


def test_a_larger_share_of_the_card(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    h100 = find_gpu("h100")
    plan, memory = sample_plan(), sample_memory(scale=1.85)
    found = roofline.verdict(plan, h100, memory)
    assert found.fits is False
    share = re.search(r"XLA_CLIENT_MEM_FRACTION=([\d.]+\d)", "\n".join(found.reasons))[1]
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
    assert roofline.verdict(plan, h100, memory).fits


# --- commands -------------------------------------------------------------------------------------


def command(words: str) -> Any:
    args = build_parser().parse_args(shlex.split(words))
    return args.command(args)


PLAN = "plan vocab_size=256 data.path=x --gpu h100 --devices 8"
TABLE = "schedule 1f1b --stages 2 --microbatches 2"
COMMANDS = table(
    f"""
plan | --gpu --devices | "--gpu h100 --devices 8" "--devices 8 --parameter NAME" | plan $
{PLAN} --devices 0 | --devices 0 | 1 | {PLAN} --devices $
{PLAN} --search --budget 0 | --budget 0 | 300 | {PLAN} --search --budget $
{PLAN} --search --no-compile | --search --no-compile | | {PLAN} --search ; {PLAN} --no-compile
check model | model | train.py train.py:parts package.file:parts CONFIG.yaml | check $
check train.py --devices 1 | --devices 1 | 2 | check train.py --devices $
check train.py --steps 0 | --steps 0 | 1 | check train.py --steps $
check train.py --time-limit 0 | --time-limit 0 | 1 | check train.py --time-limit $
keys xyzzy | xyzzy | "`zerojax keys`" | keys
eval runs/a --batches 0 | --batches 0 | 1 | eval runs/a --batches $
profile steps=3 --steps 1 | --steps 1 | 2 | profile steps=3 --steps $
profile steps=3 --out . | --out . | name | profile steps=3 --out new
{TABLE} --costs 1,2 | --costs 1,2 | "--costs 1,1,1" | {TABLE} $
{PLAN} --memory-fraction 1.5 | 1.5 | 0.92 | {PLAN} --memory-fraction $
{PLAN} --card node_devices | node_devices | node_devices=2 | {PLAN} --card $
{PLAN} --card node_devices=0 | 0 | "give one" | {PLAN} --card node_devices=1
{PLAN} --card host_gb_per_s=x | host_gb_per_s x | "leave the key out" | {PLAN}
{PLAN} --card name=a --card name=b | --card name | "leave out" | {PLAN} --card name=b
bench io . --size 0 | --size 0 | 1 | bench io . --size $
bench link --size 0 | --size 0 | 1 | bench link --size $
deepspeed explain ds.json --devices 0 | --devices 0 | 1 | deepspeed explain ds.json --devices $
"""
)
COMMANDS["bench io missing"] = Refusal(
    "bench io missing", "missing", "disk", ["bench io ."], FileNotFoundError
)
COMMANDS["bench io train.py"] = Refusal(
    "bench io train.py", "train.py", "disk", ["bench io ."], NotADirectoryError
)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder with the files that messages name; nothing is planned, checked or measured."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "CONFIG.yaml"):
        Path(name).write_text("")
    Path("ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv(plan_command.FRACTION_VARIABLE, "")  # so that it is as before afterwards
    done = lambda *_, **__: 0  # noqa: E731
    for module, name in (
        (plan_command, "predict"),
        (plan_command, "search_config"),
        (plan_command, "_check_mesh"),
        (check_command, "check"),
        (check_command, "run_in_child"),
        (check_command, "_start_on_the_cpu"),
        (profile_command, "profile"),
    ):
        monkeypatch.setattr(module, name, done)
    planned = types.SimpleNamespace(explain=lambda name: name)
    monkeypatch.setattr(plan_command, "_plan_of_config", lambda *_, **__: planned)
    loaded = types.SimpleNamespace(step=1, evaluate=lambda **_: {"loss": 1.0, "weight": 1})
    monkeypatch.setattr(run_commands, "open_run", lambda *_: loaded)
    rates = types.SimpleNamespace(num_threads=1, write=1.0, read=1.0, both=1.0, is_direct=False)
    link = local_devices.LinkRates(num_bytes=4, to_device=1.0, to_host=1.0, both=1.0)
    monkeypatch.setattr(local_devices, "measure_link", lambda **_: link)
    monkeypatch.setattr("zerojax.checkpoint.store.rates.measure_rates", lambda *_, **__: [rates])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", COMMANDS)
def test_commands(row, commands, capsys):
    def succeed(words: str) -> None:
        assert command(words) == 0

    COMMANDS[row].check(succeed)


def test_a_misspelt_command_and_option(capsys):
    for given, remedy in (("trian", "train"), ("keys --al", "")):
        with pytest.raises(SystemExit):
            main(given.split())
        complaint = check_words(capsys.readouterr().err, given.split()[-1], remedy)
        help_ = re.search(r"zerojax ([a-z ]*--help)", complaint)[1]
        with pytest.raises(SystemExit) as ended:
            main(help_.split())
        assert ended.value.code == 0
        assert "usage" in capsys.readouterr().out
    assert main(["train", "steps=2", "--print-config"]) == 0


def test_a_search_of_an_elastic_run(monkeypatch, capsys):
    monkeypatch.setattr(compile_client, "missing", lambda: "it ends here")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def search(words: str) -> None:
        """Goes as far as the compiler, which is not there."""
        missing = compile_client.CompilerMissing
        refused(lambda: command(f"{PLAN} --search {words}"), "", '"it ends here"', error=missing)

    elastic = "elasticity.enabled=true max_global_batch_size=512"
    with pytest.raises(ValueError, match="elasticity") as caught:
        command(f"{PLAN} --search {elastic}")
    remedy = 'elasticity.enabled=false global_batch_size "zerojax elastic"'
    check_words(str(caught.value), "--search num_microbatches", remedy)
    assert command(f"elastic {elastic} --json") == 0
    rows = json.loads(capsys.readouterr().out)["global_batch_size"]
    search(f"{elastic} elasticity.enabled=false global_batch_size={rows}")
    with pytest.raises(ValueError, match="--devices") as caught:
        command(f"{PLAN} --search --devices 5 global_batch_size=7")
    check_words(str(caught.value), "5 global_batch_size=7", "5")
    search("--devices 5 global_batch_size=5")


def test_virtual_devices_on_another_platform(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delitem(sys.modules, "jax")  # as a command begins
    use = lambda: jax_environment.use_cpu_devices(8)  # noqa: E731
    refused(use, "cpu_devices=8 cuda", "cpu_devices=null unset JAX_PLATFORMS")
    jax_environment.use_cpu_devices(load(RunConfig, None, ["cpu_devices=null"]).cpu_devices)
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    use()
    assert (os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"]) == ("cpu", "8")


ERRORS = [
    (RuntimeError("Unable to initialize backend 'cuda'"), "cuda", '"zerojax env"'),
    (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/a"), "/a", "run_dir=runs/mine"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a"), "a", "run_dir"),
    (MemoryError(), "memory", "num_microbatches mesh.zero model.remat=full"),
]


@pytest.mark.parametrize(("error", "value", "remedy"), ERRORS, ids=lambda x: type(x).__name__)
def test_errors_that_any_program_meets(error, value, remedy, capsys):
    check_words(explain(error)[0], value, remedy)
    values = {"num_microbatches": "4", "mesh.zero": "3", "run_dir": "elsewhere"}
    for name, _, setting in (word.partition("=") for word in remedy.split()):
        if name in values or setting:
            load(RunConfig, None, [f"{name}={setting or values[name]}"])
    if "env" in remedy:
        assert command("env") == 0
        assert "zerojax" in capsys.readouterr().out


SCRIPT = """
import jax, zerojax
model = (lambda key: {}, lambda params, x: x)
def parts():
    return {"model": model, "batch": {"x": 1.0}, "loss": lambda model, batch: batch["x"]}
"""
STRUCT = "zerojax.make_plan(model, None, example_batch=jax.ShapeDtypeStruct((8,), float))"


@pytest.mark.parametrize(("call", "value"), [("", "zerojax.train"), (STRUCT, "shapes")])
def test_a_script_that_gives_nothing_to_check(call, value, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + call)
    name = "FILE.py:NAME" if call else f"{path}:NAME"
    refused(lambda: check_targets.parts_of_script(str(path), 1), value, ["zerojax check", name])
    keys = ["model", "batch", "freeze", "loss", "optimizer", "seed"]
    path.write_text(f"{SCRIPT}\nwrong = {{'model': 1}}\nall_of_them = dict.fromkeys({keys})")
    named = lambda name: check_targets.parts_by_name(str(path), name)  # noqa: E731
    refused(lambda: named("wrong"), [f"{path}:wrong", "['model']"], keys)
    assert [*named("all_of_them")] == keys
    assert "model" in check_targets.read_target(str(path), "parts", overrides=[], steps=1)


# --- folders of runs ------------------------------------------------------------------------------


def open_log(folder: str | Path, *, steps: int = 0, **log: Any) -> None:
    config = load(RunConfig, None, ["log.tensorboard=false", "log.console=quiet"]).log
    config = dataclasses.replace(config, **log)
    with runlog.RunLog(folder, config, total_steps=1, stream=io.StringIO()) as log_:
        log_.start("", [], "", {}, {})
        for step in range(1, steps + 1):
            log_.write(step, {"loss": 1.0})


def test_a_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "run"
    refused(lambda: open_log(bad), [bad], "run_dir=", error=NotADirectoryError)
    open_log(load(RunConfig, None, [f"run_dir={tmp_path}/run"]).run_dir)


def test_reports_to_a_package_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    remedy = '"pip install wandb" log.wandb=null'
    refused(lambda: open_log(tmp_path, wandb="mine"), "log.wandb mine", remedy, error=ConfigError)
    open_log(tmp_path, wandb=load(RunConfig, None, ["log.wandb=null"]).log.wandb)
    asked: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **options: asked.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # as pip would
    open_log(tmp_path, wandb="mine")
    assert asked[0]["project"] == "mine"


def test_a_folder_without_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = metric_files.read_metrics
    refused(lambda: read("."), "metrics.jsonl .", "runs/default", error=FileNotFoundError)
    open_log("runs/default")
    refused(lambda: report.write_report("runs/default"), "runs/default report", "first")
    open_log("runs/default", steps=1)
    assert report.write_report("runs/default").exists()
