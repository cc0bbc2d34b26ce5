"""Families of decoders: logits and gradients of transformers, the same files out, strict keys."""

import dataclasses
import functools
import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import zerojax
from tests.support.hugging_face_folders import (
    DECODERS,
    FAMILIES,
    MIXTURES,
    case_of,
    tensors_of,
    write_folder,
    written_config,
)
from tests.support.hugging_face_weights import probes, text_of
from tests.zoo.test_hugging_face import plan_for
from tests.zoo.test_hugging_face_export import assert_same_bits, read_all, trainer_of
from zerojax.cli import main
from zerojax.config import ConfigError, LoraConfig, RunConfig
from zerojax.models.adapt import as_model, bound_attribute
from zerojax.operators import chunked_attention
from zerojax.tracing import trees
from zerojax.training.hugging_face_export import to_hugging_face
from zerojax.training.loading import load_run
from zerojax.training.run_file import plan_from_config
from zerojax.zoo.hugging_face import (
    ARCHITECTURES,
    UnsupportedError,
    architecture_of,
    config_from_hugging_face,
    factory_of,
    from_hugging_face,
)
from zerojax.zoo.hugging_face.peft import write_adapter
from zerojax.zoo.hugging_face.writing import Description, describe_model, merging, outgoing
from zerojax.zoo.layers import NormConfig
from zerojax.zoo.lora import adapter_names

IN_BLOCKS = (
    *("qwen2_windows", "qwen3_biases", "gemma2_low_caps", "gemma3", "olmo3", "cohere2"),
    *("granite", "gpt_oss"),
)
"""With layers of two windows, one whose logits are scaled, and attention sinks."""
IN_BFLOAT16 = [case for case in FAMILIES if "logits_in_bfloat16" in FAMILIES[case]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda case: write_folder(root / case, case))


def tokens_of(case):
    seen = case_of(case)
    return jnp.asarray(text_of(seen["length"], seen["config"]["vocab_size"]), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, state, tokens):
    """(logits, loss, gradients, [metrics] of experts); targets are the next tokens."""

    def loss(state):
        model = nnx.merge(graphdef, state)
        counts = jnp.ones(tokens.shape).at[:, -1].set(0)
        batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": counts}
        total, weight, *metrics = model.loss(batch)
        return total / weight, (model(tokens), metrics)

    (value, (logits, metrics)), gradients = jax.value_and_grad(loss, has_aux=True)(state)
    return logits, value, gradients, metrics


def computed(folder, tokens, **changes):
    """(the pretrained model, logits, loss, {name: gradient}, [metrics])."""
    pretrained = from_hugging_face(folder, **changes)
    graphdef, state = nnx.split(pretrained.to_model())
    logits, loss, gradients, metrics = run(graphdef, state, tokens)
    flat = {trees.path_name(path): x for path, x in nnx.to_flat_state(gradients)}
    arrays = {name: np.asarray(x.get_raw_value()) for name, x in flat.items()}
    return pretrained, np.asarray(logits), float(loss), arrays, metrics


def in_their_names(pretrained, arrays):
    """{their tensor: values} of arrays of ours."""

    def read(name, layer):
        return arrays[name] if layer is None else arrays[name][layer]

    tensors = outgoing(describe_model(pretrained), arrays)
    return {each.tensor.name: each.values(read) for each in tensors}


def assert_as_seen(case, pretrained, logits, loss, gradients, metrics):
    """Both sides compute in float32, with sums in other orders.

    The products of a difference with random directions are as large as it is, in the mean square. A
    gradient is held to the rounding of its own size, or of a 300th of the largest one. Only
    one is smaller: that of a key's bias without rotary positions, which is 0 but for rounding,
    since the bias moves all scores of a row alike. Where config.json asks for router logits, the
    balance of experts is in the loss and in the gradients.
    """
    seen = case_of(case)
    wanted = np.asarray(seen["last_logits"])
    size = max(1.0, np.abs(wanted).max())
    assert np.abs(logits[:, -3:] - wanted).max() <= 1e-5 * size
    assert abs(loss - seen["loss"]) <= 1e-5 * seen["loss"]
    for numbers in metrics:
        assert abs(float(numbers["moe_balance"]) - seen["balance"]) <= 1e-5 * seen["balance"]
    found = in_their_names(pretrained, gradients)
    assert found.keys() == seen["gradients"].keys()
    largest = max(values[0] for values in seen["gradients"].values())
    for name, values in seen["gradients"].items():
        _, *products = np.subtract(probes(name, found[name]), values)
        error = np.sqrt(np.mean(np.square(products)))
        assert error <= 1e-5 * max(values[0], largest / 300), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", DECODERS)
def test_logits_and_gradients_are_those_of_transformers(case, folder_of):
    """Texts longer than a window and than those before scaling; logits seen to differ by 1e-6."""
    assert_as_seen(case, *computed(folder_of(case), tokens_of(case)))


@pytest.mark.thorough
@pytest.mark.parametrize("case", IN_BLOCKS)
def test_so_they_are_in_blocks_and_a_chunked_loss(case, folder_of, monkeypatch):
    """Where the attention function branches, and the loss makes logits for 7 tokens at a time."""
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)
    options = {"attention": "chunked", "loss_chunk": 7, "remat": "attention"}
    assert_as_seen(case, *computed(folder_of(case), tokens_of(case), **options))


def mean_divergence(first, second):
    """Kullback-Leibler divergence of tokens' distributions, in nats, from logits."""
    one, other = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in (first, second))
    return float(jnp.mean(jnp.sum(jnp.exp(one) * (one - other), axis=-1)))


@pytest.mark.thorough
@pytest.mark.parametrize("case", IN_BFLOAT16)
def test_in_bfloat16_they_are_as_near_as_rounding_lets_them(case, folder_of):
    """Nearer to transformers' bfloat16 than that is to its float32."""
    seen = case_of(case)
    graphdef, state = nnx.split(from_hugging_face(folder_of(case)).to_model())
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    logits = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens_of(case)))(narrow)
    theirs = seen["logits_in_bfloat16"]
    assert logits.dtype == jnp.bfloat16
    assert mean_divergence(theirs, logits[0]) <= mean_divergence(theirs, seen["logits"])


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", DECODERS)
def test_round_trip_byte_for_byte(case, folder_of, tmp_path):
    """And what is written is read as the same model, with their keys where they have them."""
    pretrained = from_hugging_face(folder_of(case))
    zero = 3 if case in MIXTURES else 1
    trainer = trainer_of(plan_for(pretrained, devices=2, zero=zero))
    to_hugging_face(trainer, tmp_path / "ours")
    assert_same_bits(read_all(tmp_path / "ours"), tensors_of(case))
    assert from_hugging_face(tmp_path / "ours").config == pretrained.config


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", DECODERS)
def test_transformers_computes_the_same_from_what_is_written(case):
    """The oracle has made a model of this config.json, and its logits were the same."""
    assert written_config(case) == case_of(case)["written"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", DECODERS)
def test_settings_come_back(case):
    """Through config.json and through what a run keeps of it."""
    config = case_of(case)["config"]
    row = ARCHITECTURES[config["model_type"]]
    ours = row.config_class(**row.read_config(config))
    described = Description(row=row, config=ours, kept=config)
    written = described.config_json()
    assert row.config_class(**row.read_config(written)) == ours
    assert Description.from_dict(json.loads(json.dumps(described.to_dict()))).config == ours
    for key in ("bos_token_id", "eos_token_id", "hidden_size", "layer_types", "sliding_window"):
        assert written.get(key) == config.get(key), key


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_key_that_no_row_knows_is_refused_by_its_name(name):
    """Named as no model of today: a new model's new switch is an error, not another loss."""
    given = {**minimal(name), "model_type": name}
    row = ARCHITECTURES[name]
    row.read_config(given)
    key = f"switch_{zlib.crc32(name.encode()):x}"
    with pytest.raises(UnsupportedError, match=f"{key}=0.5 is not supported"):
        row.read_config({**given, key: 0.5})
    with pytest.raises(UnsupportedError, match="is_decoder"):
        row.read_config({**given, "is_decoder": True})


def minimal(name):
    """config.json with the sizes alone, so that every other key has its default."""
    if name == "gpt2":
        return {"vocab_size": 20, "n_positions": 8, "n_layer": 2, "n_head": 2, "n_embd": 16}
    if name == "t5":
        sizes = {"vocab_size": 20, "num_layers": 2, "num_heads": 2, "d_kv": 8}
        return {**sizes, "d_model": 16, "d_ff": 8}
    sizes = {"vocab_size": 20, "max_position_embeddings": 8, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 8}
    return sizes if name == "bert" else {**sizes, "num_key_value_heads": 2}


COMMON_KEYS = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
    "use_cache": True,
    "tie_word_embeddings": False,
    "_name_or_path": "x",
    "auto_map": {},
}
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
"""{family: keys} as they stand in the files of transformers 4 that people bring."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_models_are_known(name):
    config = {**minimal(name), **COMMON_KEYS, **PUBLISHED[name]}
    row = ARCHITECTURES[name]
    sizes = row.config_class(**row.read_config(config))
    if name == "gemma3_text":  # four layers of a period of six have windows alone
        assert [kind.window for kind in sizes.kinds] == [512]
    if name == "phi3":
        assert sizes.kinds[0].rope.scaling.factor == 2.0
    if name == "smollm3":
        assert [kind.rope is None for kind in sizes.kinds] == [False, True]
    if name in (experts := {"mixtral": 8, "olmoe": 64, "qwen3_moe": 128, "gpt_oss": 32}):
        assert sizes.moe.renormalize == (name != "olmoe")
        assert sizes.moe.num_experts == experts[name]
        assert sizes.moe.balance_weight == 0


REFUSED = {
    "dropped scores": ("qwen2", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "positions of pictures": ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    "a window without a size": ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "no sliding"),
    "too few types": ("qwen3", {"layer_types": ["full_attention"]}, "1 entries, .* 4 layers"),
    "another layer": ("gemma3_text", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    "another activation": ("mistral", {"hidden_act": "relu6"}, "hidden_act='relu6'"),
    "both sides": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional"),
    "capped scores": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "unknown rope": ("qwen3", {"rope_scaling": {"rope_type": "proportional"}}, "'proportional'"),
    "a key of rope": (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "twist": 1}},
        "twist=1 is not supported",
    ),
    "flat rope": ("gemma3_text", {"rope_parameters": {"rope_theta": 1.0}}, "needs entries for"),
    "nested rope": ("qwen3", {"rope_parameters": {"full_attention": {}}}, "per type of layer"),
    "a part of the features": ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "stretched Phi": ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
    "dropout of Phi": ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
    "biases of Phi": ("phi3", {"attention_bias": True}, "attention_bias=True"),
    "norms of heads": ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    "scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
    "noise of a router": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    "layers without experts": ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    "each second layer": ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    "two numbers": (
        "qwen3_moe",
        {"num_experts": 8, "num_local_experts": 4},
        "two names of the same number",
    ),
    "heads apart": ("olmoe", {"head_dim": 4}, "head_dim=4"),
    "shared experts": ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_inter"),
    "split products": ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("what", REFUSED)
def test_values_that_would_make_another_model_are_refused(what):
    name, changes, words = REFUSED[what]
    with pytest.raises(UnsupportedError, match=words):
        ARCHITECTURES[name].read_config({**minimal(name), **changes})


def test_a_part_of_a_larger_model_is_named():
    inner = {"text_config": {"model_type": "gemma3_text"}, "model_type": "gemma3"}
    with pytest.raises(UnsupportedError, match=r"combines a gemma3_text .* as Gemma3ForCausalLM"):
        architecture_of(inner)


def test_switches_that_a_family_lacks_are_not_written(folder_of):
    pretrained = from_hugging_face(folder_of("qwen3"))
    changed = pretrained.with_changes(logit_softcap=30.0)
    with pytest.raises(UnsupportedError, match=r"logit_softcap=30.0 .*Qwen3ForCausalLM"):
        describe_model(changed)
    stranger = dataclasses.replace(pretrained.config, family="")
    with pytest.raises(UnsupportedError, match="family='' has no"):
        describe_model_of(stranger)
    # Where a cast stands is no switch of a file.
    norm = NormConfig(eps=pretrained.config.norm.eps)
    describe_model(pretrained.with_changes(norm=norm))


def describe_model_of(config):
    row = ARCHITECTURES["qwen3"]
    return describe_model(as_model(lambda rngs: row.build(config, rngs)))


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["phi3", "gemma2"])
def test_adapters_for_peft_add_what_merging_adds(case, folder_of, tmp_path):
    """Also where query, key and value of unequal sizes are one module to PEFT."""
    lora = LoraConfig(rank=2, targets=("attention/(query|value|output)", "mlp/up"))
    pretrained = zerojax.add_lora(from_hugging_face(folder_of(case)), lora)
    model = pretrained.to_model()
    flat = {trees.path_name(p): x for p, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    arrays = {name: np.asarray(x.get_raw_value()) for name, x in flat.items()}
    for number, name in enumerate(adapter_names(arrays)):
        shape = arrays[name].shape
        arrays[name] = np.random.default_rng(number).normal(size=shape).astype(np.float32)
    described = describe_model(pretrained)
    scales = dict(described.scales)
    write_adapter(tmp_path, pretrained.config, arrays, scales=scales)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    theirs = load_file(tmp_path / "adapter_model.safetensors")

    def read(name, layer):
        return arrays[name] if layer is None else arrays[name][layer]

    merged = merging(described, arrays, read)
    changed = 0
    for each in outgoing(described, arrays):
        module = each.tensor.name.removesuffix(".weight")
        key = f"base_model.model.{module}.lora_{{}}.weight"
        expected = tensors_of(case)[each.tensor.name]
        if key.format("A") in theirs:
            target = module.rpartition(".layers.")[2].partition(".")[2]
            rank = about["rank_pattern"].get(target, about["r"])
            alpha = about["alpha_pattern"].get(target, about["lora_alpha"])
            product = theirs[key.format("B")] @ theirs[key.format("A")]
            expected = expected + alpha / rank * product
            changed += 1
        np.testing.assert_allclose(each.values(merged), expected, rtol=0, atol=1e-4)
    assert changed == len(about["target_modules"]) * pretrained.config.num_layers


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow  # trains, evaluates, continues a text and exports by command: 60 s
def test_a_run_file_trains_a_family_from_its_config(tmp_path, capsys):
    """A config.json without weights; every command of a run knows the model afterwards."""
    config = {**case_of("gemma3")["config"], "vocab_size": 256, "max_position_embeddings": 48}
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 200)
    file, run, out = tmp_path / "run.yaml", tmp_path / "run", tmp_path / "exported"
    file.write_text(
        f"""
model: {{config: {tmp_path / "gemma"}, attention: chunked, loss_chunk: 64}}
data: {{path: {tmp_path / "text.txt"}, seq_len: 32}}
optimizer: {{learning_rate: 1e-2, warmup_steps: 0}}
mesh: {{zero: 3}}
global_batch_size: 8
steps: 6
eval_every: null
precision: fp32
run_dir: {run}
"""
    )
    assert main(["train", str(file)]) == 0
    printed = capsys.readouterr()
    assert "5 of 6 layers: a window of 5, rotary base 10000" in printed.out + printed.err
    name = "blocks/attention/query_norm/scale"
    assert main(["plan", str(file), "--devices", "8", "--parameter", name]) == 0
    assert "gather" in capsys.readouterr().out
    assert main(["generate", str(run), "to be", "--tokens", "12"]) == 0
    assert main(["eval", str(run)]) == 0
    words = ["checkpoint", "export", str(run), str(out), "--format", "hugging_face"]
    assert main(words) == 0
    loaded = load_run(run).model
    again = from_hugging_face(out).to_model()
    tokens = tokens_of("gemma3")
    np.testing.assert_allclose(loaded(tokens), again(tokens), rtol=0, atol=1e-6)
    assert json.loads((out / "config.json").read_text())["model_type"] == "gemma3_text"
    assert loaded.config.kinds == again.config.kinds


@pytest.mark.thorough
def test_a_config_names_a_model_without_weights(folder_of, tmp_path):
    """A file or its folder; sizes are the file's alone, and weights are new ones."""
    folder = folder_of("qwen3")
    config = config_from_hugging_face(folder / "config.json", remat="full")
    assert config == dataclasses.replace(from_hugging_face(folder).config, remat="full")
    state = nnx.state(factory_of(config)(nnx.Rngs(0)), nnx.Param)
    assert np.std(state["lm_head"]["kernel"].get_raw_value()) < 0.03
    run = {"data": {"seq_len": 8}, "global_batch_size": 8}
    plan = plan_from_config(
        RunConfig(model={"config": str(folder), "remat": "dots", "vocab_size": 20}, **run), 8
    )
    assert bound_attribute(plan.model, "config") == dataclasses.replace(
        config, remat="dots", loss_chunk=1024
    )
    with pytest.raises(ConfigError, match="num_layers: 2 is set by the file of model.config"):
        RunConfig(model={"config": str(folder), "num_layers": 2}, **run)
    with pytest.raises(ConfigError, match=r"cannot be combined with model\.pretrained"):
        RunConfig(model={"config": str(folder), "pretrained": str(folder)}, **run)
    with pytest.raises(ValueError, match="256 different tokens, but .* has rows for 22"):
        plan_from_config(RunConfig(model={"config": str(folder), "vocab_size": 256}, **run), 8)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        config_from_hugging_face(tmp_path)
