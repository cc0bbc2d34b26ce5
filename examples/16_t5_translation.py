"""English to German with a model of t5-small's shape and ZeRO-3, from a ds_config.json.

It corresponds to the first example of DeepSpeed with Hugging Face, run_translation.py with t5-small
and a stage 3 configuration. Nothing is downloaded: weights are new, and the text is a few
sentences. With a folder of weights, use `zerojax.from_hugging_face("t5-small")` as the model.
"""

import json
from pathlib import Path

import jax
import numpy as np

import zerojax
from zerojax.zoo import T5, T5Config, generate_from_source

jax.config.update("jax_num_cpu_devices", 8)

PREFIX = "translate English to German:"
PAIRS = [
    ("the house is small", "das Haus ist klein"),
    ("the house is old", "das Haus ist alt"),
    ("the garden is small", "der Garten ist klein"),
    ("the garden is old", "der Garten ist alt"),
    ("we read a book", "wir lesen ein Buch"),
    ("we read a letter", "wir lesen einen Brief"),
    ("I read a book", "ich lese ein Buch"),
    ("I write a letter", "ich schreibe einen Brief"),
]
DS_CONFIG = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

# Each word is a token; as in T5, 0 is padding and the start of a target, and 1 ends a text.
words = [PREFIX, *sorted({word for pair in PAIRS for text in pair for word in text.split()})]
number_of = {word: number for number, word in enumerate(words, start=2)}


def encode(texts, length, *, prefix=()):
    rows = np.zeros((len(texts), length), np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = [number_of[word] for word in (*prefix, *text.split())] + [1]
        row[: len(ids)] = ids
    return rows


def decode(ids):
    return " ".join(words[number - 2] for number in ids if number > 1)


tokens = encode([english for english, _ in PAIRS], 8, prefix=[PREFIX])
targets = encode([german for _, german in PAIRS], 8)
batch = {
    "tokens": tokens,
    "attention_mask": (tokens > 0).astype(np.int32),
    "targets": targets,
    "weights": (targets > 0).astype(np.float32),
}

Path("ds_config.json").write_text(json.dumps(DS_CONFIG))
config = T5Config()  # the sizes of t5-small: 60.5 million parameters
print(f"{config.num_parameters / 1e6:.1f} million parameters")

trainer = zerojax.train(
    lambda rngs: T5(config, rngs=rngs),
    "ds_config.json",
    lambda step: batch,
    steps=16,
    run_dir=None,
)

largest = max(trainer.state["params"].values(), key=lambda array: array.size)
share = largest.addressable_shards[0].data.size / largest.size
print(f"the token table on each device: {share:.3f} of it")

drawn = generate_from_source(
    trainer.to_model(), tokens, 8, attention_mask=batch["attention_mask"], end_token=1
)
right = 0
for (english, german), ids in zip(PAIRS, np.asarray(drawn), strict=True):
    print(f"{english}  ->  {decode(ids)}")
    right += decode(ids) == german

first, last = trainer.history[0]["loss"], trainer.history[-1]["loss"]
print(f"loss {first:.2f} -> {last:.3f}; {right} of {len(PAIRS)} sentences as in the text")
assert share == 1 / 8
assert last < 0.5 < 5 < first
assert right >= 6
