"""Callbacks: a metric of your own, a callback that ends the run, early stopping, the best step.

A classifier is trained on points in the plane. Its loss also returns the accuracy as a metric.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax

jax.config.update("jax_num_cpu_devices", 4)


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(2, 32, rngs=rngs)
        self.out = nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def rows(seed):
    """Returns 64 points, float32 [64, 2]; the label is 1 inside the unit circle."""
    x = np.random.default_rng(seed).normal(size=(64, 2)).astype(np.float32)
    return {"x": x, "label": (np.linalg.norm(x, axis=1) < 1).astype(np.int32)}


def loss(model, batch):
    logits = model(batch["x"])
    right = logits.argmax(-1) == batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.mean(losses), {"accuracy": jnp.mean(right)}


def train(**options):
    return zerojax.train(
        Classifier,
        {"zero": 3},
        rows,
        loss=loss,
        optimizer=zerojax.adamw(1e-2),
        steps=300,
        validation=[rows(1000), rows(1001)],
        eval_every=10,
        log=zerojax.LogConfig(every=5),
        **options,
    )


# A callback is a function that gets each report, and ends the run with `return True`.
reported = []


def until_90_percent(trainer, metrics):
    reported.append(metrics["step"])
    return metrics["accuracy"] > 0.9


trainer = train(callbacks=[until_90_percent])
print(f"{trainer.metrics['accuracy']:.0%} of a batch are right after {trainer.num_steps} steps")
assert reported[-1] <= trainer.num_steps < 300  # a report is read during the next step

# Built-in callbacks: stop if the validation accuracy no longer improves, and keep the best step.
watched = {"metric": "validation/accuracy", "mode": "max"}
stopping = zerojax.EarlyStopping(**watched, patience=4)
trainer = train(
    checkpoint="runs/callbacks", callbacks=[stopping, best := zerojax.KeepBest(**watched)]
)
print(f"stopped after {trainer.num_steps} steps; the best is step {best.best_step}")

loaded = zerojax.load_run("runs/callbacks", "best", model=Classifier, loss=loss)
accuracy = loaded.evaluate([rows(1000), rows(1001)])["accuracy"]
print(f"its accuracy on the validation data is {accuracy:.1%}")
assert abs(accuracy - best.best) < 1e-6
