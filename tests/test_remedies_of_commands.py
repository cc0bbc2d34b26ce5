"""What errors of commands, settings, GPU cards and the compile-only client tell to type works.

What would compile or train is replaced. Each row: what is refused, what of its sentence is read,
and what is typed then.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml

import zerojax
from tests.forecast_samples import sample_memory, sample_plan
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
from zerojax.config import ConfigError, ElasticityConfig, MeshConfig, RunConfig, checks, load
from zerojax.config.loader import load_dataclass
from zerojax.config.mesh import as_mesh_config
from zerojax.config.sections import LossScale
from zerojax.forecasting import compiled_step, forecast_cache, roofline
from zerojax.forecasting.hlo.overlap import find_overlap
from zerojax.forecasting.hlo.program import read_program
from zerojax.hardware import compile_client, local_devices
from zerojax.hardware.gpus import find_gpu, target
from zerojax.training.metrics import metric_files, report, runlog
from zerojax.training.run_file import plan_from_config

ROOT = Path(__file__).resolve().parent.parent
Action = Callable[[], Any]
REFUSALS = (ConfigError, ValueError, TypeError, OSError, RuntimeError)


def sentence_of(action: Action) -> str:
    with pytest.raises(REFUSALS) as caught:
        action()
    return str(caught.value)


def remedies_of(action: Action, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern in the sentence with which something is refused."""
    sentence = sentence_of(action)
    found = re.search(pattern, sentence)
    assert found, sentence
    return found.groups()


# --- cards of GPUs --------------------------------------------------------------------------------

MINE = "name: mine\nbase: h100\n"


def card(folder: Path, text: str) -> Any:
    path = folder / "mine.yaml"
    path.write_text(text)
    return find_gpu(str(path))


CARDS: dict[str, tuple[str, str, Callable[..., list[str]]]] = {
    # the file, what is read of the sentence, the files that follow
    "a misspelt key": (
        MINE + "bf16_tflop: 3\n",
        r"did you mean '(\w+)'",
        lambda name: [f"{MINE}{name}: 3\n"],
    ),
    "a number as text": (
        MINE + "fp8_tflops: '1e9'\n",
        r"write (1e9) without quotes",
        lambda number: [f"{MINE}fp8_tflops: {number}\n"],
    ),
    "a number of 0": (MINE + "fp8_tflops: 0\n", r"(leave out) what is not", lambda _: [MINE]),
    "a name as a number": (
        "name: 5\nbase: h100\n",
        r"(put it in quotes)",
        lambda _: ["name: '5'\nbase: h100\n"],
    ),
    "a list": (
        MINE + "aliases: me\n",
        r"write (\[.*\])",
        lambda text: [f"{MINE}aliases: {text}\n"],
    ),
    "half a card": (
        "name: mine\n",
        r"start from a known card with `(base: \w+)`",
        lambda line: [f"name: mine\n{line}\n"],
    ),
    "a base that is not known": (
        "name: mine\nbase: h102\n",
        r"did you mean '(\w+)'\?",
        lambda name: [f"name: mine\nbase: {name}\n"],
    ),
    "a capability": (
        MINE + "compiler:\n  capability: hopper\n",
        r"write one like (\"8\.9\") or (\"9\.0a\")",
        lambda *found: [f"{MINE}compiler:\n  capability: {text}\n" for text in found],
    ),
    "a version": (
        MINE + "compiler:\n  dnn_version: 9\n",
        r"as in (\"12\.8\.0\")",
        lambda text: [f"{MINE}compiler:\n  dnn_version: {text}\n"],
    ),
    "a section as a number": (
        MINE + "compiler: 9\n",
        r"a section with the keys description, (capability)",
        lambda key: [f'{MINE}compiler:\n  {key}: "8.9"\n'],
    ),
    "no lines": ("- h100\n", r"has (KEY: VALUE) lines", lambda _: [MINE]),
    "notes in a list": (
        MINE + "sources: [me]\n",
        r"expected lines (KEY), KEY: TEXT",
        lambda _: [f"{MINE}sources:\n  memory_bytes, memory_gb: me\n"],
    ),
    "a note on no key": (
        MINE + "sources:\n  memory_byte: me\n",
        r"did you mean '(\w+)'",
        lambda name: [f"{MINE}sources:\n  {name}: me\n"],
    ),
}


@pytest.mark.parametrize("row", CARDS)
def test_files_of_cards(row, tmp_path):
    given, pattern, then = CARDS[row]
    for text in then(*remedies_of(lambda: card(tmp_path, given), pattern)):
        assert card(tmp_path, text).name in ("mine", "5")


def test_a_card_that_is_not_known(tmp_path):
    near, names, *lines = remedies_of(
        lambda: find_gpu("h300"),
        r"mean '(\w+)'\? The cards are (.*)\. For.* `(.*)`, `(.*)` .* `(.*)`",
    )
    assert [find_gpu(name) for name in (near, *names.split(", "))]
    assert card(tmp_path, "\n".join(lines)).memory_bytes == 85899345920
    remedies_of(lambda: find_gpu("no/such.yaml"), r"give the path of a (YAML) file or one of a10")


def test_a_card_that_the_compiler_is_told_nothing_of(tmp_path):
    line, section, path = remedies_of(
        lambda: target.target_text(find_gpu("a30")),
        r"with `(base: a30)` and a section `(\w+)` as in (\S+)\.$",
    )
    values = yaml.safe_load((ROOT / path).read_text())
    mine = card(tmp_path, f"name: mine\n{line}\n" + yaml.safe_dump({section: values[section]}))
    assert "core_count" in target.target_text(mine)
    other = MINE + "compiler: {capability: '11.0'}\n"
    (known,) = remedies_of(
        lambda: target.target_text(card(tmp_path, other)), r"is not one of (.*)$"
    )
    for capability in known.split(", "):
        target.target_text(card(tmp_path, other.replace("11.0", capability)))


# --- the compile-only client ----------------------------------------------------------------------


def packages_of(command: str) -> list[str]:
    """What `pip install 'zerojax[EXTRA]'` brings, by pyproject.toml."""
    extra = re.fullmatch(r"pip install 'zerojax\[(\w+)\]'", command)
    assert extra, command
    text = (ROOT / "pyproject.toml").read_text()
    return tomllib.loads(text)["project"]["optional-dependencies"][extra[1]]


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(compile_client, "_PLUGINS", ("no_such_plugin",))
    (command,) = remedies_of(
        lambda: compile_client.gpu_devices(find_gpu("h100"), 8), r": (pip install '.*?') \("
    )
    assert {"jax-cuda13-pjrt", "jax-cuda13-plugin"} <= {*packages_of(command)}

    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(target.importlib.metadata, "version", version)
    (command,) = remedies_of(lambda: target.target_text(find_gpu("h100")), r"; (pip install .*)$")
    assert {*packages_of(command)} & {*target.COMPILERS}


def test_a_compiler_of_another_version(monkeypatch):
    versions = {"jaxlib": "0.11.2", "jax-cuda13-pjrt": "0.12.0.1"}
    monkeypatch.setattr(compile_client, "_plugin", lambda: "xla_cuda13")
    monkeypatch.setattr(compile_client, "_version", versions.get)
    words = compile_client.missing().partition("pip install ")[2].split()
    versions |= dict(word.split("==") for word in words)  # as pip would
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
    for number in remedies_of(lambda: client.gpu_devices(h100, 12), r"use (\d+) or (\d+)$"):
        assert len(client.gpu_devices(h100, int(number))) == int(number)
    (least,) = remedies_of(lambda: client.gpu_devices(h100, 0), r"at least (\d) GPU")
    client.gpu_devices(h100, int(least))
    program = "zerojax.hardware.compile_client.gpu_devices(gpu, count)"
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    (call,) = remedies_of(lambda: compiled_step._nodes(mesh), r"pass (\S+\(gpu, count\))$")
    assert call == program
    assert len(eval(call, {"zerojax": zerojax, "gpu": h100, "count": 8})) == 8


def test_jax_looked_for_a_gpu(client, monkeypatch):
    """What JAX itself does then is tests/test_compiler.py's matter."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    h100 = find_gpu("h100")
    name, value = remedies_of(lambda: client.gpu_devices(h100, 8), r"with (\w+)=(\w+)$")
    monkeypatch.setenv(name, value)
    client.gpu_devices(h100, 8)


@pytest.mark.thorough
@pytest.mark.gpu_programs
@pytest.mark.skipif(compile_client.missing() is not None, reason=str(compile_client.missing()))
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

    found = re.search(r"start Python with (\w+)=(\w+)$", said())
    if not found:
        pytest.skip("the plugin loads: there is a GPU, or its libraries are installed")
    assert said(**{found[1]: found[2]}) == "8"


def test_text_that_is_no_compiled_program():
    compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile()
    lowered = "HloModule m\n\nENTRY e {\n  ROOT x = f32[] parameter(0)\n}\n"
    for refused in (
        lambda: read_program("no program"),
        lambda: find_overlap(read_program(lowered), []),
    ):
        (call,) = remedies_of(refused, r"pass what (compiled\.as_text\(\)) returns$")
        assert find_overlap(read_program(eval(call, {"compiled": compiled})), []) == {}


# --- forecasts ------------------------------------------------------------------------------------


def test_a_share_of_the_memory_that_is_none():
    given = {"XLA_CLIENT_MEM_FRACTION": "most"}
    (value,) = remedies_of(lambda: roofline.memory_fraction(given), r"use ([\d.]+), or unset it$")
    assert roofline.memory_fraction({"XLA_CLIENT_MEM_FRACTION": value})[0] == float(value)
    assert roofline.memory_fraction({})[0] == roofline.MEMORY_FRACTION


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "file"))
    key = forecast_cache.key_of("x")
    with pytest.warns(UserWarning, match="this forecast was not kept") as caught:
        forecast_cache.store(key, {"a": 1})
    name, off = re.search(
        r"set (\w+) to another folder, or to (\w+)\)$", str(caught[0].message)
    ).groups()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv(name, str(tmp_path / "other"))
        forecast_cache.store(key, {"a": 1})
        assert forecast_cache.load(key) == {"a": 1}
        monkeypatch.setenv(name, off)
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
    lines = [line for line in found.reasons if line.startswith("try ")]
    assert len(lines) >= least, found.reasons
    for line in lines:
        typed = re.match(r"try (.*?) \(", line)[1].replace(" with ", " ").split()
        if typed[0] == "--devices":
            plan(tuple(typed[2:]), int(typed[1]))
        elif not typed[0].startswith("XLA_"):
            plan(tuple(typed))


def test_a_larger_share_of_the_card(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    h100 = find_gpu("h100")
    plan, memory = sample_plan(), sample_memory(scale=1.85)
    found = roofline.verdict(plan, h100, memory)
    assert found.fits is False
    line = next(line for line in found.reasons if "XLA_CLIENT" in line)
    name, value = re.match(
        r"try (\w+)=(\S+) in the environment of the run \(enough\)", line
    ).groups()
    monkeypatch.setenv(name, value)
    assert roofline.verdict(plan, h100, memory).fits


# --- commands -------------------------------------------------------------------------------------


def command(*words: str) -> Any:
    args = build_parser().parse_args(words)
    return args.command(args)


PLAN = ("plan", "vocab_size=256", "data.path=x", "--gpu", "h100", "--devices", "8")
COMMANDS: dict[str, tuple[tuple[str, ...], str, Callable[..., list[tuple[str, ...]]]]] = {
    "plan without a card": (
        ("plan",),
        r"an example is (--gpu .*), or (--devices .*)$",
        lambda *found: [("plan", *shlex.split(words)) for words in found],
    ),
    "plan for no device": (
        (*PLAN, "--devices", "0"),
        r"(--devices) 0: at least (1)",
        lambda *words: [(*PLAN, *words)],
    ),
    "a search without time": (
        (*PLAN, "--search", "--budget", "0"),
        r"(--budget) 0: .* such as (\d+)$",
        lambda *words: [(*PLAN, "--search", *words)],
    ),
    "a search without a compiler": (
        (*PLAN, "--search", "--no-compile"),
        r"(--search) needs .*(--no-compile) forbids it; leave out one of them",
        lambda *options: [(*PLAN, option) for option in options],
    ),
    "a check of no file": (
        ("check", "model"),
        r"a script \((\S+)\), a function \((\S+), (\S+)\) or a run file \((\S+)\)",
        lambda *targets: [("check", target) for target in targets],
    ),
    "a check on one device": (
        ("check", "train.py", "--devices", "1"),
        r"(--devices) 1: at least (2)",
        lambda *words: [("check", "train.py", *words)],
    ),
    "a check of no step": (
        ("check", "train.py", "--steps", "0"),
        r"(--steps) 0: at least (1)",
        lambda *words: [("check", "train.py", *words)],
    ),
    "a check without time": (
        ("check", "train.py", "--time-limit", "0"),
        r"(--time-limit) 0: give seconds from (1)",
        lambda *words: [("check", "train.py", *words)],
    ),
    "a word in no setting": (("keys", "xyzzy"), r"`zerojax (keys)` lists", lambda word: [(word,)]),
    "an evaluation of nothing": (
        ("eval", "runs/a", "--batches", "0"),
        r"(--batches) 0: at least (1)",
        lambda *words: [("eval", "runs/a", *words)],
    ),
    "a profile of one step": (
        ("profile", "steps=3", "--steps", "1"),
        r"(--steps) 1: at least (2)",
        lambda *words: [("profile", "steps=3", *words)],
    ),
    "a profile into a folder that is there": (
        ("profile", "steps=3", "--out", "."),
        r"(--out) \. is there already; name a folder that is not",
        lambda option: [("profile", "steps=3", option, "new")],
    ),
    "costs": (
        ("schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--costs", "1,2"),
        r"such as (--costs \S+)$",
        lambda words: [
            ("schedule", "1f1b", "--stages", "2", "--microbatches", "2", *shlex.split(words))
        ],
    ),
    "a disk that is not there": (
        ("bench", "io", "missing"),
        r"name (one) on the disk",
        lambda _: [("bench", "io", ".")],
    ),
    "a file in place of a disk": (
        ("bench", "io", "train.py"),
        r"name (one) on the disk",
        lambda _: [("bench", "io", ".")],
    ),
    "a file of no size": (
        ("bench", "io", ".", "--size", "0"),
        r"(--size) 0: at least (1) MiB",
        lambda *words: [("bench", "io", ".", *words)],
    ),
    "a link of no size": (
        ("bench", "link", "--size", "0"),
        r"(--size) 0: at least (1) MiB",
        lambda *words: [("bench", "link", *words)],
    ),
    "a file of DeepSpeed on no device": (
        ("deepspeed", "explain", "ds.json", "--devices", "0"),
        r"(--devices) 0 must be at least (1)",
        lambda *words: [("deepspeed", "explain", "ds.json", *words)],
    ),
}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder with the files that sentences name; nothing is planned, checked or measured."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "CONFIG.yaml"):
        Path(name).write_text("")
    Path("ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    done = lambda *_, **__: 0  # noqa: E731
    for module, name in (
        (plan_command, "plan"),
        (plan_command, "explain"),
        (check_command, "check"),
        (check_command, "run_in_child"),
        (check_command, "_start_on_the_cpu"),
        (profile_command, "profile"),
    ):
        monkeypatch.setattr(module, name, done)
    loaded = types.SimpleNamespace(step=1, evaluate=lambda **_: {"loss": 1.0, "weight": 1})
    monkeypatch.setattr(run_commands, "open_run", lambda *_: loaded)
    rates = types.SimpleNamespace(num_threads=1, write=1.0, read=1.0, both=1.0, is_direct=False)
    link = local_devices.LinkRates(num_bytes=4, to_device=1.0, to_host=1.0, both=1.0)
    monkeypatch.setattr(local_devices, "measure_link", lambda **_: link)
    monkeypatch.setattr("zerojax.checkpoint.store.rates.measure_rates", lambda *_, **__: [rates])


@pytest.mark.parametrize("row", COMMANDS)
def test_commands(row, commands, capsys):
    given, pattern, then = COMMANDS[row]
    for words in then(*remedies_of(lambda: command(*given), pattern)):
        assert command(*words) == 0


def test_a_misspelt_command_and_option(capsys):
    for given in (["trian"], ["keys", "--al"]):
        with pytest.raises(SystemExit):
            main(given)
        complaint = capsys.readouterr().err
        help_ = re.search(r"\(help: \S* ?(.*)\)$", complaint.strip())[1].split()
        with pytest.raises(SystemExit) as ended:
            main(help_)
        assert ended.value.code == 0
        assert "usage" in capsys.readouterr().out
        if near := re.search(r"did you mean '(\w+)'", complaint):
            assert main([near[1], "steps=2", "--print-config"]) == 0


def test_a_search_of_an_elastic_run(monkeypatch, capsys):
    monkeypatch.setattr(compile_client, "missing", lambda: "it ends here")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    given = (*PLAN, "--search")
    elastic = ("elasticity.enabled=true", "max_global_batch_size=512")
    off, key, shows = remedies_of(
        lambda: command(*given, *elastic), r"set (\S+) and (\w+) to .* `zerojax (\w+)` shows$"
    )
    assert command(shows, *elastic, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["global_batch_size"]
    last = (*elastic, off, f"{key}={rows}")
    assert "it ends here" in sentence_of(lambda: command(*given, *last))
    given = (*given, "--devices", "5")
    (rows,) = remedies_of(
        lambda: command(*given, "global_batch_size=7"), r"use a multiple of (\d) rows$"
    )
    assert "it ends here" in sentence_of(lambda: command(*given, f"global_batch_size={rows}"))


def test_virtual_devices_on_another_platform(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delitem(sys.modules, "jax")  # as a command begins
    setting, name = remedies_of(
        lambda: jax_environment.use_cpu_devices(8), r"set (\S+) to use .*, or unset (\w+)$"
    )
    jax_environment.use_cpu_devices(load(RunConfig, None, [setting]).cpu_devices)
    monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    jax_environment.use_cpu_devices(8)
    assert (os.environ[name], os.environ["JAX_NUM_CPU_DEVICES"]) == ("cpu", "8")


def test_errors_that_any_program_meets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    absent, _ = explain(RuntimeError("Unable to initialize backend 'cuda'"))
    assert command(re.search(r"see `zerojax (\w+)`$", absent)[1]) == 0
    assert "zerojax" in capsys.readouterr().out
    denied, _ = explain(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/a"))
    setting = re.search(r"such as (\S+)$", denied)[1]
    assert load(RunConfig, None, [setting]).run_dir == "runs/mine"
    full, _ = explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a"))
    name = re.search(r"another (\w+)$", full)[1]
    load(RunConfig, None, [f"{name}=elsewhere"])
    memory, _ = explain(MemoryError())
    names = re.search(r"raise (\w+) .*, (\S+) \(state\) or set (\S+)\.$", memory).groups()
    load(RunConfig, None, [f"{names[0]}=4", f"{names[1]}=3", names[2]])


SCRIPT = """
import jax, zerojax
model = (lambda key: {}, lambda params, x: x)
def parts():
    return {"model": model, "batch": {"x": 1.0}, "loss": lambda model, batch: batch["x"]}
"""


@pytest.mark.parametrize("call", ["", "struct", "wrong"])
def test_a_script_that_gives_nothing_to_check(call, tmp_path):
    path = tmp_path / "script.py"
    struct = "zerojax.make_plan(model, None, example_batch=jax.ShapeDtypeStruct((8,), float))"
    path.write_text(SCRIPT + (struct if call == "struct" else "") + "\nwrong = {'model': 1}\n")
    if call == "wrong":
        found = remedies_of(
            lambda: check_targets.parts_by_name(str(path), "wrong"),
            r"a dict with (\w+) and (\w+), and may have (.*)$",
        )
        names = [*found[:2], *found[2].split(", ")]
        path.write_text(f"parts = dict.fromkeys({names})")
        assert [*check_targets.parts_by_name(str(path), "parts")] == names
        return
    (target_,) = remedies_of(
        lambda: check_targets.parts_of_script(str(path), 1), r"zerojax check (\S+):NAME$"
    )
    assert target_ in (str(path), "FILE.py")
    path.write_text(SCRIPT)
    assert "model" in check_targets.read_target(str(path), "parts", overrides=[], steps=1)


# --- settings -------------------------------------------------------------------------------------


def read(*words: str) -> RunConfig:
    return load_dataclass(RunConfig, None, words)


def yaml_file(folder: Path, text: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text)
    return load(RunConfig, path, [])


SETTINGS: dict[str, tuple[list[str], str, Callable[..., list[list[str]]]]] = {
    "a factor": (
        ["precision=fp16", "loss_scale.factor=1"],
        r"use (2)",
        lambda n: [["precision=fp16", f"loss_scale.factor={n}"]],
    ),
    "a scale beyond float32": (
        ["precision=fp16", "loss_scale.static=1e30"],
        r"between (1) and 2\*\*32 is usual",
        lambda n: [["precision=fp16", f"loss_scale.static={n}"]],
    ),
    "no step": (["steps=0"], r"must be >= (\d)", lambda least: [[f"steps={least}"]]),
    "a fraction": (
        ["data.validation_fraction=2"],
        r"must be in \[(0), (?:1)",
        lambda least: [[f"data.validation_fraction={least}"]],
    ),
    "a window": (
        ["precision=fp16", "loss_scale.window=0"],
        r"(1000) is usual",
        lambda n: [["precision=fp16", f"loss_scale.window={n}"]],
    ),
    "hysteresis": (
        ["precision=fp16", "loss_scale.hysteresis=0"],
        r"(1) lowers the scale",
        lambda n: [["precision=fp16", f"loss_scale.hysteresis={n}"]],
    ),
    "a scale of 0": (
        ["precision=fp16", "loss_scale.static=0"],
        r"use (null)",
        lambda n: [["precision=fp16", f"loss_scale.static={n}"]],
    ),
    "a scale that never changes": (
        ["precision=fp16", "loss_scale.static=8", "loss_scale.window=5"],
        r"(leave out one or the other)",
        lambda _: [
            ["precision=fp16", "loss_scale.static=8"],
            ["precision=fp16", "loss_scale.window=5"],
        ],
    ),
    "a scale above its limit": (
        ["precision=fp16", "loss_scale.initial=1024", "loss_scale.maximum=512"],
        r"minimum \((\d+)\) and maximum \((\d+)\); change it, or the limit",
        lambda low, high: [
            ["precision=fp16", f"loss_scale.initial={low}", "loss_scale.maximum=512"],
            ["precision=fp16", f"loss_scale.initial={high}", "loss_scale.maximum=512"],
            ["precision=fp16", "loss_scale.initial=1024", "loss_scale.maximum=1024"],
        ],
    ),
    "a tier by another name": (
        ["mesh.offload.opt_state=cpu"],
        r"did you mean '(\w+)'",
        lambda name: [[f"mesh.offload.opt_state={name}"]],
    ),
    "a tier that is none": (
        ["mesh.offload.opt_state=xyzzy"],
        r"use (\w+), (\w+) or (\w+)",
        lambda *names: [[f"mesh.offload.opt_state={name}"] for name in names],
    ),
    "no tiers": (
        ["mesh.offload.opt_state=[]"],
        r"use device, host, nvme, or (\{.*\})",
        lambda text: [[f"mesh.offload.opt_state={text}"]],
    ),
    "no pair": (
        ["mesh.offload.opt_state=[host]"],
        r"write (\{.*\})",
        lambda text: [[f"mesh.offload.opt_state={text}"]],
    ),
    "a tier twice": (
        ["mesh.offload.opt_state=[[host, 0.5], [host, 0.5]]"],
        r"(add its shares up)",
        lambda _: [["mesh.offload.opt_state=[[host, 1.0]]"]],
    ),
    "durable memory": (
        ["mesh.offload.durable=true"],
        r"set (\w+): (\w+), or leave it",
        lambda name, tier: [["mesh.offload.durable=true", f"{name}={tier}"], []],
    ),
    "an update in backward": (
        ["mesh.offload.update_in_backward=true"],
        r"set params: (host) as well",
        lambda tier: [["mesh.offload.update_in_backward=true", f"mesh.offload.params={tier}"]],
    ),
    "no layers of a stage": (
        ["mesh.partition=[2, 0]"],
        r"a list for 4 stages is (\[.*\])",
        lambda text: [["mesh.stage=4", f"mesh.partition={text}"]],
    ),
    "no schedule": (
        ["mesh.pipeline_schedule="],
        r"a name such as (\w+), the path of a CSV",
        lambda name: [[f"mesh.pipeline_schedule={name}"], ["mesh.pipeline_schedule=mine.csv"]],
    ),
    "no devices of the batch": (
        ["mesh.data=0"],
        r"must be >= (1), or (-1) for all",
        lambda *found: [[f"mesh.data={n}"] for n in found],
    ),
    "rows of an elastic batch": (
        ["elasticity.micro_batch_sizes=[]"],
        r"such as (\[.*\])",
        lambda text: [[f"elasticity.micro_batch_sizes={text}"]],
    ),
    "nodes of an elastic run": (
        ["elasticity.enabled=true", "devices_per_node=3", "mesh.model=2"],
        r"use a multiple of (\d)",
        lambda n: [["elasticity.enabled=true", f"devices_per_node={n}", "mesh.model=2"]],
    ),
    "too small an elastic batch": (
        ["elasticity.enabled=true", "max_devices=1", "devices_per_node=8"],
        r"raise (\w+) or (max_global_batch_size)",
        lambda name, _: [["elasticity.enabled=true", f"{name}=8", "devices_per_node=8"]],
    ),
    "no rows for a node": (
        ["elasticity.enabled=true", "max_global_batch_size=8", "devices_per_node=8"],
        r"raise max_devices or (\w+)",
        lambda name: [["elasticity.enabled=true", f"{name}=2000", "devices_per_node=8"]],
    ),
    "narrow limits": (
        ["elasticity.enabled=true", "min_devices=997", "max_devices=998"],
        r"from (\d+) to \d+ divides .*; (widen the limits)",
        lambda *_: [["elasticity.enabled=true", "min_devices=1", "max_devices=998"]],
    ),
    "rows of microbatches": (
        ["global_batch_size=30", "num_microbatches=4"],
        r"use (\d+) or (\d+)",
        lambda *found: [[f"global_batch_size={n}", "num_microbatches=4"] for n in found],
    ),
    "a folder on no disk": (
        ["run_dir=gs://bucket/a"],
        r"(mount the bucket)",
        lambda _: [["run_dir=/mnt/bucket/a"]],
    ),
}


@pytest.mark.parametrize("row", SETTINGS)
def test_settings(row):
    given, pattern, then = SETTINGS[row]
    for words in then(*remedies_of(lambda: read(*given), pattern)):
        read(*words)


FILES: dict[str, tuple[str, str, Callable[..., list[str]]]] = {
    "a number as text": (
        'steps: "3"\n',
        r"is a string; use (\d+)",
        lambda number: [f"steps: {number}\n"],
    ),
    "a section as a number": (
        "mesh: 3\n",
        r"a section with the keys (\w+),",
        lambda key: [f"mesh:\n  {key}: 1\n"],
    ),
    "a key twice": ("steps: 3\nsteps: 4\n", r"(keep one)", lambda _: ["steps: 3\n"]),
    "a misspelt key": ("stpes: 3\n", r"did you mean '(\w+)'", lambda name: [f"{name}: 3\n"]),
    "a date that is none": (
        "run_dir: 2024-99-99\n",
        r"put it (in quotes)",
        lambda _: ['run_dir: "2024-99-99"\n'],
    ),
    "a number as a name": (
        "run_dir: 5\n",
        r"text \(put it (in quotes)\)",
        lambda _: ['run_dir: "5"\n'],
    ),
    "an alias inside of itself": (
        "freeze: &a [embed, *a]\n",
        r"(write the values out)",
        lambda _: ["freeze: [embed]\n"],
    ),
    "deep nesting": (
        "freeze: " + "[" * 200 + "]" * 200,
        r"(write it flat)",
        lambda _: ["freeze: []\n"],
    ),
}


@pytest.mark.parametrize("row", FILES)
def test_files_of_settings(row, tmp_path):
    given, pattern, then = FILES[row]
    for text in then(*remedies_of(lambda: yaml_file(tmp_path, given), pattern)):
        yaml_file(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    remedies_of(lambda: load(RunConfig, tmp_path / "no.yaml"), r"give the path of a (YAML) file")
    assert yaml_file(tmp_path, "steps: 3").steps == 3


def test_numbers_of_devices_of_an_elastic_run():
    batch = ElasticityConfig(max_global_batch_size=100).choose_batch()
    near, some = remedies_of(
        lambda: batch.micro_batch_size(11), r"use (\d+), or one of ([\d, ]+\d)"
    )
    for number in (near, *some.split(", ")):
        batch.micro_batch_size(int(number))
    run = read("elasticity.enabled=true", "num_microbatches=7")
    remedies_of(lambda: run.on_devices(8), r"(leave it out)$")
    read("elasticity.enabled=true").on_devices(8)


def test_settings_in_python():
    assert remedies_of(lambda: LossScale(static=0), r"use null \((None)\)")
    LossScale(static=None)
    (name,) = remedies_of(lambda: MeshConfig(zerro=2), r"did you mean '(\w+)'")
    MeshConfig(**{name: 2})
    found = remedies_of(lambda: as_mesh_config(3), r"give a (\w+), a dict of its fields, or (\w+)$")
    assert found == ("MeshConfig", "None")
    assert (
        MeshConfig() == as_mesh_config({}) == as_mesh_config(None) == as_mesh_config(MeshConfig())
    )
    (least,) = remedies_of(lambda: checks.check_whole_number("steps", 0, 1), r"at least (\d)$")
    checks.check_whole_number("steps", int(least), 1)


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
    (name,) = remedies_of(
        lambda: open_log(tmp_path / "file" / "run"), r"choose another with (\w+)=$"
    )
    open_log(load(RunConfig, None, [f"{name}={tmp_path}/run"]).run_dir)


def test_reports_to_a_package_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    package, off = remedies_of(
        lambda: open_log(tmp_path, wandb="mine"), r"pip install (\w+), or set (\S+)"
    )
    open_log(tmp_path, wandb=load(RunConfig, None, [off]).log.wandb)
    asked: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **options: asked.append(options) or run)
    monkeypatch.setitem(sys.modules, package, fake)  # as pip would
    open_log(tmp_path, wandb="mine")
    assert asked[0]["project"] == "mine"


def test_a_folder_without_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder,) = remedies_of(lambda: metric_files.read_metrics("."), r"such as (\S+)$")
    open_log(folder)
    remedies_of(lambda: report.write_report(folder), r"(wait for the first one)$")
    open_log(folder, steps=1)
    assert report.write_report(folder).exists()
