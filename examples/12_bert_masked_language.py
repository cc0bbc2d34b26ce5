"""Pre-training of a small BERT on masked text with LAMB and sharded gradients and moments.

The data are the bytes of the text in the package; id 256 is the mask. LAMB scales the update of
each array of each layer by its norm (arXiv:1904.00962), which permitted batches of 32,768 rows for
BERT. The loss falls from that of uniform guesses among 257 tokens to about that of letter
frequencies; further progress takes thousands of steps.
"""

import math

import jax
import numpy as np

import zerojax
from zerojax.data import as_masked_source, as_source
from zerojax.zoo import Bert, BertConfig

jax.config.update("jax_num_cpu_devices", 4)

MASK = 256
config = BertConfig(vocab_size=257, max_seq_len=32, num_layers=2, num_heads=4, embed_dim=64)
train, validation, _ = as_source(None, seq_len=config.max_seq_len, global_batch_size=64)
masked = as_masked_source(train, mask_token=MASK)

batch = masked.batch(0)
shown = bytes(np.where(batch["tokens"][0] == MASK, ord("_"), batch["tokens"][0]).astype(np.uint8))
print(f"a row:  {shown!r}, of which {masked.num_places} places are masked")

trainer = zerojax.train(
    lambda rngs: Bert(config, rngs=rngs),
    zerojax.MeshConfig(data=4, zero=2, persistence_threshold=0),
    masked,
    validation=as_masked_source(validation, mask_token=MASK),
    optimizer=zerojax.OptimizerConfig(
        name="lamb", learning_rate=0.02, weight_decay=0.01, beta2=0.999, warmup_steps=10
    ),
    steps=70,
    run_dir=None,
)

# Every evaluation has the same masks, since validation masks depend on the row only.
start, last = trainer.history[0]["loss"], trainer.evaluate()["loss"]
steps = trainer.num_steps
print(f"loss {start:.2f} at the first step, {last:.2f} on text not seen, after {steps} steps")

moments = trainer.state["opt_state"]
whole = sum(leaf.nbytes for leaf in jax.tree.leaves(moments))
mine = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(moments))
print(f"moments: {whole / 2**20:.2f} MiB, {mine / 2**20:.2f} MiB on each of four devices")

assert abs(start - math.log(257)) < 0.2
assert last < 3.6
assert mine < 0.3 * whole
