"""`zerojax.check` on unusual models that train the same on any devices: it says so of each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import zerojax
from tests.models import test_ensembles as ensembles
from tests.models import test_model as unusual
from tests.parallel.test_stand_ins import Tied
from tests.support import small_models as small
from tests.support.small_models import linen_loss, reference_model, regression_loss
from tests.support.trajectories import regression_batch, text_batch
from tests.zoo.test_lora import FlaxLora
from zerojax.equality import check_in_child, make_request
from zerojax.equality.check_in_child import check_here
from zerojax.equality.short_runs import Configuration

DEVICES = 4
LAST = Configuration(DEVICES, 3, 2)
STEEP = optax.adamw(1e-2, eps=1e-4)
LORA = zerojax.LoraConfig(rank=2, alpha=4)


def of_rows(model, loss=regression_loss, **options):
    return {"model": model, "batch": regression_batch, "loss": loss, **options}


def of_text(model, loss=None, **options):
    return {"model": model, "batch": text_batch, "loss": loss, **options}


class TiedLayers(nnx.Module):
    """One layer that is used twice, and a table that is also the head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(small.VOCAB, 12, rngs=rngs)
        self.first = nnx.Linear(12, 12, rngs=rngs)
        self.again = self.first

    def loss(self, batch):
        x = self.embed(batch["tokens"])
        x = self.again(jax.nn.gelu(self.first(x)))
        return zerojax.losses.next_token(self.embed.attend(x), batch["targets"])


MODELS = {
    **{name: of_rows(model, loss) for name, (model, loss, _) in unusual.UNUSUAL.items()},
    **{f"vmap: {name}": of_rows(model) for name, model in ensembles.MODELS.items()},
    "gpt2": of_text(reference_model("gpt2")),
    "llama": of_text(reference_model("llama")),
    "fp8": of_text(reference_model("gpt2", matmul_dtype="fp8")),
    "lora": of_text(zerojax.add_lora(reference_model("llama"), LORA), freeze=LORA.freeze),
    "lora of flax": of_text(FlaxLora, freeze=(r"^(?!.*/lora_[ab]$)",)),
    "scan and conv": of_text(small.UserText),
    "linen, scan": of_text(small.LinenText(), linen_loss),
    "functions": of_rows((small.init_functions, small.apply_functions)),
    "stacked layers": of_rows(small.Layers),
    "tied layers": of_text(TiedLayers),
    **{f"linen, variables {use}": of_rows(Tied(use)) for use in ("transposed", "lax", "carried")},
    "batch norm": of_rows(small.WithStatistics),
    "dropout": of_rows(lambda rngs: small.WithStatistics(rngs, rate=0.5)),
    "linen, both": of_rows(unusual.LinenNorm(), unusual.linen_loss),
}
BY_DESIGN = {
    "batch norm": {"batch_statistics"},
    "dropout": {"batch_statistics", "dropout"},
    "linen, both": {"batch_statistics", "dropout"},
}


def checked(name, monkeypatch, **options):
    """The result of a check of one run beside plain JAX."""
    monkeypatch.setattr(check_in_child, "configurations", lambda devices, thorough: [LAST])
    request: dict[str, Any] = {"optimizer": STEEP, "devices": DEVICES, **MODELS[name], **options}
    return check_here(make_request(request.pop("model"), request.pop("batch"), **request))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_unusual_models_agree(name, monkeypatch):
    result = checked(name, monkeypatch)
    assert result.agrees, result.table()
    assert {reason.kind for reason in result.reasons} == BY_DESIGN.get(name, set())


@pytest.mark.thorough
def test_an_optimizer_that_updates_layers_by_themselves_agrees(monkeypatch):
    """The reference is told which arrays are stacks of layers, as a step is."""
    model = functools.partial(small.Layers, num_layers=2, width=4)
    monkeypatch.setitem(MODELS, "lamb", of_rows(lambda rngs: model(rngs)))
    result = checked("lamb", monkeypatch, optimizer=zerojax.lamb(1e-2))
    assert result.agrees, result.table()
