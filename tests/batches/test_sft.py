"""Fine-tuning on chats equals TRL's, step by step, from one folder (tests/oracles/sft.py).

TRL 1.16 gives every text a row of its own, padded on the right, asks for the tokens that the
template marks (`assistant_only_loss`), and divides the sum of a step's token losses by the tokens
asked for in all its parts (`num_items_in_batch`).
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zerojax
from tests.support.hugging_face_folders import write_chat_model
from tests.support.hugging_face_weights import probes, weights
from tests.support.sft_cases import CASES, EPS, STEPS
from zerojax.config import LogConfig, LoraConfig
from zerojax.data import PackedSource
from zerojax.data.chats import prepare_chats
from zerojax.data.opening import open_texts
from zerojax.data.text_set import TextSet
from zerojax.optim import decay_mask
from zerojax.zoo.lora import adapted_kernels

pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "sft.json").read_text())["cases"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{case: its model, its chats as `zerojax data prepare` makes them}."""

    @functools.cache
    def made(name: str) -> tuple[Path, TextSet]:
        folder = tmp_path_factory.mktemp(name)
        write_chat_model(folder / "model", name)
        rows = "".join(f"{json.dumps(row)}\n" for row in CASES[name].chats())
        (folder / "chats.jsonl").write_text(rows)
        prepare_chats(folder / "chats.jsonl", folder / "chats", tokenizer=str(folder / "model"))
        return folder / "model", open_texts(folder / "chats")[0]

    return made


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_masks_are_those_of_trl(name, folders):
    _, texts = folders(name)
    case, seen = CASES[name], ORACLE[name]["texts"]
    assert texts.num_texts == len(seen) == STEPS * case.batch
    for number, text in enumerate(seen):
        places = np.arange(*texts.offsets[number : number + 2])
        assert texts.tokens[places].tolist() == text["ids"]
        assert texts.asked(places).astype(int).tolist() == text["asked"]
    for make in (alone, packed):
        batches = [make(texts, i * case.batch, case.batch, case.seq_len) for i in range(STEPS)]
        asked = np.reshape(ORACLE[name]["asked"], (STEPS, case.accumulation)).sum(axis=1)
        assert [batch["weights"].sum() for batch in batches] == asked.tolist()


def alone(texts: TextSet, first: int, count: int, seq_len: int) -> dict[str, np.ndarray]:
    """A row for each of `count` texts."""
    made = {name: np.zeros((count, seq_len), np.int32) for name in ("tokens", "targets")}
    made["weights"] = np.zeros((count, seq_len), np.float32)
    for row in range(count):
        places = np.arange(*texts.offsets[first + row : first + row + 2])
        size = len(places)
        made["tokens"][row, :size] = texts.tokens[places]
        made["targets"][row, : size - 1] = texts.tokens[places[1:]]
        made["weights"][row, : size - 1] = texts.asked(places[1:])
    return made


def packed(texts: TextSet, first: int, count: int, seq_len: int) -> dict[str, np.ndarray]:
    """The same texts side by side in half as many rows of twice the length."""
    source = PackedSource(
        texts=texts.part(first, first + count),
        seq_len=2 * seq_len,
        global_batch_size=count // 2,
        shuffle=False,
        fill=True,
    )
    assert source.num_rows == count // 2
    return source.batch(0)


def learning_rate(name: str):
    """Of a step, counted from 0; transformers 5.23, `optimization.py`, its two schedules."""
    case = CASES[name]
    peak, warmup, rest = case.learning_rate, case.warmup, STEPS - case.warmup

    def rate(count):
        after = (count - warmup) / rest
        falling = {"cosine": 0.5 * (1 + jnp.cos(math.pi * after)), "linear": 1 - after}
        rising = count / max(warmup, 1)
        return peak * jnp.where(count < warmup, rising, falling[case.schedule])

    return rate


def trained(name: str, folder: Path, texts: TextSet, make, out: Path, *, mesh, parts: int):
    """(history of our run, {name in the files of what it trained: its last values})."""
    case = CASES[name]
    lora = LoraConfig(rank=case.rank, alpha=case.alpha)
    pretrained = zerojax.from_hugging_face(folder, max_seq_len=2 * case.seq_len)
    model = with_adapters(pretrained.with_lora(lora)) if case.rank else pretrained
    trainer = zerojax.train(
        model,
        mesh,
        lambda step: make(texts, step * case.batch, case.batch, case.seq_len),
        steps=STEPS,
        num_microbatches=parts,
        optimizer=zerojax.adamw(
            learning_rate(name),
            b2=0.999,
            eps=EPS,
            weight_decay=case.weight_decay,
            mask=decay_mask,
            clip_norm=case.clip_norm,
        ),
        freeze=lora.freeze,
        run_dir=None,
        log=LogConfig(every=1, spike=None),
    )
    if case.rank:
        zerojax.to_peft(trainer, out)
        return trainer.history, load_file(out / "adapter_model.safetensors")
    zerojax.to_hugging_face(trainer, out)
    return trainer.history, load_file(out / "model.safetensors")


def with_adapters(pretrained):
    """The model with adapters by the formula of their names, as in the oracle: B is not zero."""
    params, extras = pretrained.initial_arrays()
    names = adapted_kernels(params)
    arrays = {n: x.read([(0, size) for size in x.shape]) for n, x in pretrained.stored.items()}
    for leaf in pretrained.row.leaves(pretrained.config):
        for ours, part in zip(names.get(leaf.name, ()), ("lora_A", "lora_B"), strict=False):
            layers, *shape = params[ours].shape  # of A [inputs..., rank], of B [rank, outputs...]
            rank = shape[-1] if part == "lora_A" else shape[0]
            other = math.prod(shape) // rank
            theirs = (rank, other) if part == "lora_A" else (other, rank)
            modules = [leaf.tensor_of(layer).removesuffix(".weight") for layer in range(layers)]
            made = [weights(f"base_model.model.{x}.{part}.weight", theirs) for x in modules]
            arrays[ours] = np.stack([values.T.reshape(shape) for values in made])
    assert arrays.keys() == params.keys()
    return pretrained.to_source({n: jnp.asarray(x) for n, x in arrays.items()}, extras)


def check(name: str, history, last) -> None:
    """Compares a run with TRL's; in float32 both, with sums in other orders.

    Measured over all cases: losses 6.7e-6, norms 9.5e-6, last weights 2.5e-6, their ways 8.9e-5.
    """
    seen = ORACLE[name]
    losses, norms = (np.array([row[key] for row in history]) for key in ("loss", "grad_norm"))
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, seen["losses"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(norms, seen["grad_norms"], rtol=5e-5)
    assert seen["last"].keys() <= last.keys()
    for tensor, wanted in seen["last"].items():
        values, first = last[tensor].astype(np.float64), weights(tensor, last[tensor].shape)
        assert_near(probes(tensor, values), wanted, 1e-5, tensor)
        assert_near(probes(tensor, values - first), seen["moved"][tensor], 3e-4, tensor)


def assert_near(found: list[float], wanted: list[float], tolerance: float, name: str) -> None:
    """Probes of a tensor, relative to its length, which is the first of them."""
    limit = tolerance * wanted[0]
    assert limit > 0
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit, err_msg=name)


ONE = None
"""One device, at ZeRO-1."""
EIGHT = {"zero": 3, "data": 4, "model": 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "make", "mesh"),
    [
        ("whole", alone, ONE),
        ("whole", packed, ONE),
        ("whole", alone, EIGHT),
        ("accumulated", alone, ONE),
        ("accumulated", packed, ONE),
        ("accumulated", alone, EIGHT),
        ("lora", alone, ONE),
        ("lora", packed, ONE),
        ("lora", alone, EIGHT),
    ],
)
def test_losses_and_last_weights_are_those_of_trl(name, make, mesh, folders, tmp_path):
    folder, texts = folders(name)
    one_device = zerojax.make_mesh({}, devices=jax.devices()[:1])
    history, last = trained(
        name,
        folder,
        texts,
        make,
        tmp_path / "out",
        mesh=mesh or one_device,
        parts=1 if mesh else CASES[name].accumulation,
    )
    check(name, history, last)
