"""The shortest run: a model and a mesh. Text, optimizer, precision and length have defaults.

Each default is printed with its reason. The code before the two lines simulates eight devices on a
CPU; the code after them checks the result.
"""

import jax

import zerojax
from zerojax.config import ModelConfig

jax.config.update("jax_num_cpu_devices", 8)

model = zerojax.zoo.build_model(ModelConfig(num_layers=2, embed_dim=64, max_seq_len=32), 256)
trainer = zerojax.train(model, {"zero": 3})

first, last = trainer.history[0]["loss"], trainer.metrics["loss"]
print(f"loss {first:.2f} -> {last:.2f} in {trainer.num_steps} steps")
assert last < first - 1.5
