"""A mixture of experts and a dense model with equally many active parameters, on Shakespeare.

In each layer of the mixture eight experts replace the MLP, and each byte is routed to the two
experts with the highest scores: 2 x 64 units, as many as the dense model's MLP has. So both models
have the same FLOPs per byte. Each expert sees a quarter of the text, so that the mixture is behind
at first: with five seeds its loss after 250 steps was 0.014 below to 0.066 above the dense model's,
and with three after 500 steps 0.005 to 0.060 below (benchmarks/results/mixture.json). Weights,
gradients and optimizer state of both are sharded over four devices. Two cores take two minutes.
"""

import jax

import zerojax
from zerojax.config import ModelConfig, MoEConfig

jax.config.update("jax_num_cpu_devices", 4)

SIZES = {"name": "llama", "num_layers": 2, "num_heads": 4, "embed_dim": 64, "max_seq_len": 64}
MIXTURE = MoEConfig(num_experts=8, experts_per_token=2, expert_dim=64)


def curve(**mlp) -> dict[int, float]:
    """Trains a model with this MLP; returns {step: validation loss}."""
    trainer = zerojax.train(
        zerojax.zoo.build_model(ModelConfig(**SIZES, **mlp), 256),
        {"data": 4, "zero": 3},
        global_batch_size=16,
        optimizer=zerojax.adamw(3e-3),
        steps=250,
        eval_every=50,
        run_dir=None,
    )
    return {report["step"]: report["loss"] for report in trainer.evaluations}


dense, mixture = curve(mlp_dim=128), curve(moe=MIXTURE)
print("\nstep  dense  mixture")
for step in dense:
    print(f"{step:4}  {dense[step]:.3f}  {mixture[step]:.3f}")
assert mixture[250] < mixture[50] - 0.3, "it learns"
