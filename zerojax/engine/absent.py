"""Names of DeepSpeed's engine that are not here, and what to write in their place.

Knows words only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

ONE_CALL = (
    "forward, backward and update are one compiled program: write loss = engine.train_batch(batch) "
    "in place of loss = engine(batch), engine.backward(loss) and engine.step(), with the rows of "
    "all gradient_accumulation_steps() micro-batches in one batch"
)
_INSIDE = "gradients exist inside train_batch only; leave this out"
_FIXED = "batch sizes are part of the compiled step; initialize another engine, and load into it"
ABSENT: Mapping[str, str] = {
    "backward": ONE_CALL,
    "step": ONE_CALL,
    "forward": ONE_CALL,
    "zero_grad": _INSIDE,
    "allreduce_gradients": _INSIDE,
    "no_sync": _INSIDE,
    "coalesce_grad_reduction": _INSIDE,
    "set_gradient_accumulation_boundary": _INSIDE,
    "set_train_batch_size": _FIXED,
    "set_train_micro_batch_size": _FIXED,
    "module": "engine.to_model() is the trained model, and engine.state['params'] its arrays",
    "module_state_dict": "engine.to_model() is the trained model",
    "save_16bit_model": "zerojax.to_hugging_face(engine, folder); or save engine.to_model()",
    "optimizer": "the optimizer is a part of the compiled step; its state is in engine.state",
    "lr_scheduler": "the schedule is a part of the compiled step; engine.get_lr() is its value",
    "get_mom": "betas are a part of the compiled step; they are what the configuration says",
    "training_dataloader": "hand each batch to train_batch",
    "deepspeed_io": "hand each batch to train_batch",
    "world_size": "a process may have many devices: jax.process_count() and jax.device_count()",
}
"""{name: what to write instead}."""


class Absent:
    """What a ported loop may still have in it, each refused with a sentence."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"engine(batch): {ONE_CALL}")

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "zerojax.initialize returns the engine alone, which holds optimizer and schedule: "
            "write engine = zerojax.initialize(...)"
        )

    def __getattr__(self, name: str) -> NoReturn:
        reason = f": {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"the engine has no {name!r}{reason}")
