"""Fine-tune a Hugging Face folder on chats in one command, and answer with the merged weights.

Nothing is downloaded: the script creates the folder, a small Llama with its own tokenizer, trained
for a few steps on Shakespeare. For real weights, use another folder. The loss
stays high, since adapters do not change the untrained head, but the likeliest tokens are right.
Needs the extra `chat`. Two cores take a minute.
"""

import json
from pathlib import Path

import jax
import numpy as np

import zerojax
from zerojax.cli import main
from zerojax.data import load_tokenizer

TEMPLATE = """
{%- for message in messages %}
{{- message.role + ':\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '.' }}{% endgeneration %}
{%- else %}{{ message.content }}
{%- endif %}{{ '\\n' }}
{%- endfor %}"""
ANSWERS = {
    "cat": "It says meow",
    "dog": "It says woof",
    "cow": "It says moo",
    "owl": "It says hoot",
}


def zerojax_command(line: str) -> None:
    print(f"\n$ zerojax {line}", flush=True)
    assert main(line.split()) == 0


def chat(animal: str) -> list:
    return [
        {"role": "user", "content": f"What does the {animal} say?"},
        {"role": "assistant", "content": ANSWERS[animal]},
    ]


jax.config.update("jax_num_cpu_devices", 2)
zerojax_command(
    "train run_dir=base_run model.name=llama num_layers=2 embed_dim=64 max_seq_len=128 seq_len=64 "
    "tokenizer=bpe:400 steps=20 log.every=10"
)
zerojax_command("checkpoint export base_run base --format hugging_face")
Path("base/chat_template.jinja").write_text(TEMPLATE)
rows = [json.dumps({"messages": chat(animal)}) for animal in ANSWERS] * 100
Path("chats.jsonl").write_text("\n".join(rows))

zerojax_command(
    "finetune base chats.jsonl --out tuned --epochs 5 seq_len=64 learning_rate=1e-2 log.every=20"
)
print(Path("tuned/run.yaml").read_text())
zerojax_command("checkpoint export tuned merged --format hugging_face")

tokenizer = load_tokenizer("merged")
model = zerojax.from_hugging_face("merged").to_model()
for animal, wanted in ANSWERS.items():
    prompt = f"user:\nWhat does the {animal} say?\nassistant:\n"
    ids = np.array([tokenizer.encode(prompt)], np.int32)
    drawn = zerojax.zoo.generate(model, ids, 16, temperature=0, num_ids=tokenizer.vocab_size)
    text = tokenizer.decode(drawn[0]).removeprefix(prompt)
    print(f"{prompt}{text!r}")
    assert text.startswith(f"{wanted}.")
