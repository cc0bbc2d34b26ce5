"""A tokenizer.json of Hugging Face does here what it does there, for whole corpora, too."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerojax.cli import main
from zerojax.data import (
    HuggingFaceTokenizer,
    as_source,
    as_tokenizer,
    load_tokenizer,
    read_text,
    save_tokenizer,
    subwords,
)
from zerojax.data.preparation import prepare
from zerojax.zoo import text_generation
from zerojax.zoo.generation import Continued
from zerojax.zoo.sampling import Sampling

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")

TEXT = read_text()[:20_000]
LINES = "Ah, Rosalind!\nwell met;\n\n  a word\n"


def bert_like() -> Any:
    """WordPiece, lower case, [CLS] ... [SEP], and told to cut and to fill up."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer=trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(max_length=8)
    backend.enable_padding(length=8)
    return backend


def llama2_like() -> Any:
    """A mark at the start of the text, spaces as marks, words not taken apart at line ends."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False, unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(TEXT.split("\n"), trainer=trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def gpt2_like(end: str = "<|endoftext|>") -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end, "<extra>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer=trainer)
    return backend


MAKERS = {"bert": bert_like, "llama2": llama2_like, "gpt2": gpt2_like}


def written(folder: Path, backend: Any, **settings: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_ids_are_those_of_the_whole_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the pieces it is cut into nor what the file says of lengths changes them."""
    backend = MAKERS[name]()
    ours = load_tokenizer(written(tmp_path, backend))
    backend.no_truncation()
    backend.no_padding()
    monkeypatch.setattr(subwords, "PIECE_CHARACTERS", 50)
    expected = backend.encode(TEXT, add_special_tokens=False).ids
    np.testing.assert_array_equal(ours.encode(TEXT), expected)
    assert len(expected) > 5000
    assert ours.vocab_size == backend.get_vocab_size()
    assert ours.encode("").dtype == np.int32


def test_tokens_that_reach_over_line_ends_forbid_cutting() -> None:
    """What the test above would not show if nothing was at stake."""
    backend = llama2_like()
    first, second = "a line\n", "another"
    joined = backend.encode(first + second, add_special_tokens=False).ids
    halves = [backend.encode(x, add_special_tokens=False).ids for x in (first, second)]
    assert joined != halves[0] + halves[1]


@pytest.mark.parametrize(
    ("backend", "settings", "separator"),
    [
        (bert_like, {}, ["[SEP]", "[CLS]"]),
        (llama2_like, {"eos_token": {"content": "</s>"}}, ["</s>", "<s>"]),
        (gpt2_like, {}, ["<|endoftext|>"]),
        (gpt2_like, {"eos_token": "<extra>"}, ["<extra>"]),
        (lambda: gpt2_like("<nothing known>"), {}, []),
    ],
)
def test_between_documents_stands_what_the_model_knows(
    backend: Any, settings: dict[str, Any], separator: list[str], tmp_path: Path
) -> None:
    made = backend()
    folder = written(tmp_path, made, **settings)
    ours = as_tokenizer(folder)
    assert ours.separator.tolist() == [made.token_to_id(token) for token in separator]
    again = load_tokenizer(save_tokenizer(ours, tmp_path / "ours.json"))
    assert again.to_dict() == ours.to_dict() == as_tokenizer(folder / "tokenizer.json").to_dict()
    assert again.separator.tolist() == ours.separator.tolist()


def test_texts_for_a_model_of_texts() -> None:
    ours = HuggingFaceTokenizer(json.loads(bert_like().to_str()))
    assert [ours.id_of(x) for x in ("[CLS]", "[SEP]")] == [*ours.prefix, *ours.suffix]
    assert ours.special_ids.tolist() == [0, 1, 2, 3, 4]
    made = ours.encode_texts(["Rosalind", "As I remember, Adam, it was"], max_length=6)
    assert made["tokens"].shape == (2, 6)
    assert made["tokens"][:, 0].tolist() == [2, 2]
    assert made["tokens"][1, -1] == 3
    lengths = made["attention_mask"].sum(axis=1)
    assert lengths[1] == 6
    assert made["tokens"][0, lengths[0] - 1 :].tolist() == [3, *[0] * (6 - lengths[0])]
    assert ours.decode(ours.encode("ROSALIND")) == "rosalind"
    with pytest.raises(ValueError, match="the template alone has 2 tokens"):
        ours.encode_texts(["a"], max_length=2)
    with pytest.raises(ValueError, match="texts is empty"):
        ours.encode_texts([])
    with pytest.raises(ValueError, match=r"no token '<mask>'; its special tokens are \[PAD\]"):
        ours.id_of("<mask>")


def test_ids_with_gaps_are_counted_to_the_last() -> None:
    content = json.loads(gpt2_like().to_str())
    extra = {**content["added_tokens"][0], "id": 400, "content": "<far>"}
    content["added_tokens"].append(extra)
    ours = HuggingFaceTokenizer(content)
    assert ours.vocab_size == ours.id_of("<far>") + 1 > len(content["model"]["vocab"])


def test_data_are_prepared_and_read_with_it(tmp_path: Path) -> None:
    """Documents, token files and text in memory; the token file brings its tokenizer along."""
    folder = written(tmp_path, bert_like())
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": x}) + "\n" for x in (TEXT, LINES)))
    made = prepare(corpus, tmp_path / "tokens", tokenizer=str(folder))
    train, _, ready = as_source(
        tmp_path / "tokens", seq_len=16, global_batch_size=2, validation_fraction=0.0
    )
    in_memory, _, _ = as_source(
        corpus, tokenizer=folder, seq_len=16, global_batch_size=2, validation_fraction=0.0
    )
    assert isinstance(ready, HuggingFaceTokenizer)
    assert made.vocab_size == train.vocab_size == ready.vocab_size
    np.testing.assert_array_equal(train.batch(3)["tokens"], in_memory.batch(3)["tokens"])
    ids = np.concatenate([part.ids for part in train.tokens.parts])
    between = np.flatnonzero((ids[:-1] == 3) & (ids[1:] == 2))
    assert between.tolist() == [len(ready.encode(TEXT))]


def test_generated_text_begins_as_texts_begin_and_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt of a model of Llama's kind follows <s>."""
    ours = HuggingFaceTokenizer(json.loads(llama2_like().to_str()))
    given: list[np.ndarray] = []

    def repeat(
        model: Any, prompts: list[np.ndarray], num_tokens: list[int], sampling: Any, **options: Any
    ) -> Continued:
        given.extend(prompts)
        return Continued(prompts[0][None, -num_tokens[0] :], np.asarray(num_tokens))

    monkeypatch.setattr(text_generation, "continue_rows", repeat)
    monkeypatch.setattr(text_generation, "check_decoder", lambda model: None)
    model = types.SimpleNamespace(config=types.SimpleNamespace(max_seq_len=16, vocab_size=99))
    prompt = ours.encode("to be").tolist()
    found = text_generation.continue_texts(model, ours, ["to be"], 2, Sampling(temperature=0.0))
    assert given[0].tolist() == [ours.id_of("<s>"), *prompt]
    assert found[0].text == ours.decode([*prompt, *prompt[-2:]])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {"type": "Unheard"}}, "cannot read it with this"),
        ({"kind": "hugging_face", "end": "<no>", "json": None}, "not a tokenizer"),
    ],
)
def test_bad_files_are_refused(content: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_tokenizer(content)


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="vocab.txt.*save_pretrained"):
        as_tokenizer(tmp_path)


def wordpiece() -> Any:
    """Without a template, so that a text of line ends alone is no token at all."""
    content = {**json.loads(bert_like().to_str()), "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shown", "has_sample"), [(llama2_like, "▁To▁be", True), (wordpiece, "tobe", False)]
)
def test_a_run_trains_and_writes_with_it(
    make: Any, shown: str, has_sample: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data.tokenizer` of a run file, the model's vocabulary, and the text of the trained model."""
    folder, run, corpus = (tmp_path / name for name in ("theirs", "run", "corpus.txt"))
    folder.mkdir()
    backend = make()
    written(folder, backend)
    corpus.write_text(TEXT)
    sizes = ["num_layers=1", "num_heads=2", "embed_dim=32", "max_seq_len=48", "seq_len=32"]
    words = ["global_batch_size=8", "steps=4", "warmup_steps=0", "precision=fp32", "eval_batches=1"]
    data = [f"data.path={corpus}", f"data.tokenizer={folder}", "validation_fraction=0.1"]
    assert main(["train", *sizes, *words, *data, f"run_dir={run}"]) == 0
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["vocab_size"] == backend.get_vocab_size()
    assert ("What the model writes" in capsys.readouterr().out) == has_sample
    assert main(["generate", str(run), "To be", "--tokens", "5", "--seed", "1"]) == 0
    text = capsys.readouterr().out
    assert text.replace(" ", "").strip().startswith(shown), text
    assert main(["generate", str(run), "\n", "--tokens", "5"]) == (0 if has_sample else 2)
