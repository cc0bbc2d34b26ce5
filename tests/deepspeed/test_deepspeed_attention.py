"""DeepSpeed's section `sparse_attention` is the layout of a model's calls of zerojax.attention."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

import zerojax
from zerojax import deepspeed_config as deepspeed
from zerojax.config import (
    BigBirdLayout,
    BSLongformerLayout,
    ConfigError,
    FixedLayout,
    VariableLayout,
)
from zerojax.hardware.gpus import find_gpu
from zerojax.models.losses import next_token
from zerojax.operators.attending import calls_of_attention, layout_in_force
from zerojax.operators.attention_choice import attention_planned_for
from zerojax.placement.device_mesh import make_abstract_mesh

ROWS, LENGTH, VOCAB = 8, 16, 32
FIXED = {"mode": "fixed", "block": 2, "num_local_blocks": 2}
LAYOUT = FixedLayout(block=2, num_local_blocks=2)


def file(section=None):
    given = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    return given if section is None else given | {"sparse_attention": section}


def layout_of(section):
    return deepspeed.translate(file(section), num_devices=8).attention_layout


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("section", "layout"),
    [
        ({}, FixedLayout()),
        ({"mode": "dense", "block": 64}, None),
        (
            {
                "mode": "fixed",
                "block": 16,
                "different_layout_per_head": True,
                "num_local_blocks": 4,
                "num_global_blocks": 1,
                "attention": "bidirectional",
                "horizontal_global_attention": False,
                "num_different_global_patterns": 4,
            },
            FixedLayout(different_layout_per_head=True, num_different_global_patterns=4),
        ),
        (
            {
                "mode": "variable",
                "num_random_blocks": 2,
                "local_window_blocks": [4, 8],
                "global_block_indices": [0, 5],
                "global_block_end_indices": [1, 7],
                "attention": "unidirectional",
            },
            VariableLayout(
                num_random_blocks=2,
                local_window_blocks=(4, 8),
                global_block_indices=(0, 5),
                global_block_end_indices=(1, 7),
                attention="unidirectional",
            ),
        ),
        # In a file DeepSpeed's default of num_random_blocks is 0, in its class 1.
        ({"mode": "bigbird", "block": 32}, BigBirdLayout(block=32, num_random_blocks=0)),
        (
            {"mode": "bslongformer", "num_sliding_window_blocks": 5},
            BSLongformerLayout(num_sliding_window_blocks=5),
        ),
    ],
    ids=str,
)
def test_a_section_is_the_layout_that_deepspeed_makes_of_it(section, layout):
    assert layout_of(section) == layout


def test_a_file_without_the_section_has_no_layout():
    assert deepspeed.translate(file(), num_devices=8).attention_layout is None


def test_keys_that_deepspeed_does_not_read_have_no_effect_and_a_warning():
    section = {"mode": "bigbird", "attention": "unidirectional", "num_local_blocks": 8}
    says = deepspeed.translate(file(section), num_devices=8)
    assert says.attention_layout == BigBirdLayout(num_random_blocks=0)
    verdicts = {line.key: line.verdict for line in says.lines}
    assert verdicts["sparse_attention.mode"] == "honoured"
    for name in ("attention", "num_local_blocks"):
        assert verdicts[f"sparse_attention.{name}"] == "ignored"
        assert any(f"sparse_attention.{name}=" in warning for warning in says.warnings)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mode": "longformer"}, "use dense, fixed, variable, bigbird or bslongformer"),
        ({"mode": "fixed", "num_global_blocks": 3}, r"does not divide num_local_blocks \(4\)"),
        ({"mode": "fixed", "attention": "both"}, "bidirectional"),
        ({"mode": "fixed", "num_local_block": 4}, "did you mean 'num_local_blocks'"),
        ({"mode": "variable", "local_window_blocks": ["a"]}, "local_window_blocks"),
        (
            {"mode": "fixed", "attention": "unidirectional", "horizontal_global_attention": True},
            "use attention bidirectional",
        ),
    ],
    ids=str,
)
def test_a_section_that_cannot_be_is_refused(section, words):
    with pytest.raises(ConfigError, match=f"sparse_attention.*{words}"):
        layout_of(section)


# --- training -------------------------------------------------------------------------------------


class Own(nnx.Module):
    """A model of a user's own."""

    def __init__(self, layout=None, *, attend=zerojax.attention, rngs):
        self.layout, self.attend = layout, attend
        self.table = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.out = nnx.Linear(8, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens).reshape(*tokens.shape, 2, 4)
        x = self.attend(x, x, x, causal=True, layout=self.layout)
        return self.out(x.reshape(*tokens.shape, 8))

    def loss(self, batch):
        return next_token(self(batch["tokens"]), batch["targets"])


def own(layout=None, **options):
    return lambda rngs: Own(layout, rngs=rngs, **options)


def llama(layout):
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_seq_len": 32}
    config = zerojax.zoo.LlamaConfig(vocab_size=VOCAB, attention_layout=layout, **sizes)
    return lambda rngs: zerojax.zoo.Llama(config, rngs=rngs)


def batches():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, LENGTH), dtype=np.int32)
    return [{"tokens": each, "targets": np.roll(each, -1, 1)} for each in tokens]


def losses(model, section, run_dir=None, **options):
    found = []
    zerojax.train(
        model,
        file(section) | {"steps_per_print": 1},
        batches(),
        steps=2,
        precision="fp32",
        run_dir=run_dir,
        callbacks=[lambda _, metrics: found.append(metrics["loss"])],
        **options,
    )
    return found


@pytest.mark.thorough
def test_a_model_of_the_users_own_trains_with_the_layout_of_the_file():
    of_file = losses(own(), FIXED)
    assert of_file == losses(own(LAYOUT), None)


@pytest.mark.thorough
def test_the_same_layout_may_be_said_in_both_places():
    assert losses(own(LAYOUT), FIXED) == losses(own(LAYOUT), None)


def test_a_layout_in_force_keeps_auto_from_a_kernel_without_layouts():
    """On a GPU "auto" is cuDNN for these operands; with a layout in force it is refused by name."""
    x = jax.ShapeDtypeStruct((1, LENGTH, 2, 8), "bfloat16")
    mesh = make_abstract_mesh({"data": 8}, 8, gpu=find_gpu("h100"))

    def trace(implementation="auto"):
        run = functools.partial(zerojax.attention, implementation=implementation)
        jax.eval_shape(lambda x: run(x, x, x), x)  # a new function: JAX keeps traces by function

    with attention_planned_for(mesh), calls_of_attention() as calls:
        trace()
        with layout_in_force(LAYOUT):
            trace()
            with pytest.raises(ValueError, match="cuDNN: .* support layout"):
                trace("cudnn")
    assert [call.implementation for call in calls] == ["cudnn", "chunked"]
    assert re.search("auto: cuDNN: .* layout", calls[1].why)


@pytest.mark.thorough
def test_so_does_an_engine():
    def steps(section):
        engine = zerojax.initialize(own(), file(section))
        return [float(engine.train_batch(batch)) for batch in batches()]

    assert abs(steps(FIXED)[0] - steps(None)[0]) > 1e-4


REFUSED = {
    "no attention": (
        own(attend=lambda x, *_, **__: x),
        "call it in the model, or remove the section",
    ),
    "another layout": (
        own(BigBirdLayout(block=4, num_random_blocks=0)),
        r"blocks of 4.*blocks of \d+; remove layout=",
    ),
    "a reference model": (llama(None), r"attention_layout=zerojax.config.FixedLayout\(block=2"),
    "with another": (llama(FixedLayout(block=4)), "mode fixed.* the model has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_says_otherwise_is_refused(case):
    model, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        losses(model, FIXED)


@pytest.mark.thorough
def test_a_reference_model_says_it_too_and_is_read_back_with_it(tmp_path):
    """The remedy, typed: a model that states the layout generates and is loaded with it."""
    section = {"mode": "bslongformer", "block": 2, "global_block_indices": [0, 3]}
    with pytest.raises(ConfigError) as error:
        losses(llama(None), section)
    written = str(error.value).partition("attention_layout=zerojax.")[2].partition(", or remove")[0]
    layout = eval(f"zerojax.{written}")
    assert layout == BSLongformerLayout(block=2, global_block_indices=(0, 3))
    assert len(losses(llama(layout), section, tmp_path, checkpoint=tmp_path)) == 2
    loaded = zerojax.load_run(tmp_path)
    assert loaded.plan.model.template.config.attention_layout == layout
    assert "layout bslongformer, blocks of 2" in "".join(loaded.plan.reasons)


@pytest.mark.thorough
def test_a_run_with_the_layout_of_a_file_asks_for_its_loss(tmp_path):
    losses(own(), FIXED, tmp_path, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="loss function of your own"):
        zerojax.load_run(tmp_path, model=own())


@pytest.mark.thorough
def test_jitted_parts_of_a_model_are_traced_once():
    """The first trace takes the layout; later ones reuse it and are not refused."""
    jitted = jax.jit(functools.partial(zerojax.attention, causal=True))
    jitted_model = own(attend=lambda x, *_, **__: jitted(x, x, x))
    assert losses(jitted_model, FIXED) == losses(own(LAYOUT), None)
