"""Twenty steps of supervised fine-tuning by TRL, for tests/batches/test_sft.py.

Needs torch, transformers, trl and peft, which no test imports; run with trl 1.16.0, transformers
5.23.0, peft 0.21.2, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/sft.py tests/data/sft.json

TRL reads a folder of weights and a list of chats, renders and tokenises them, asks for the
assistant's tokens alone, pads on the right, and trains in float32 on the CPU. Its log rounds the
losses, so they are taken where they are computed. Of the weights a few numbers are kept (`probes`):
of the last ones, and of how far they have come.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import datasets
import peft
import torch
import transformers
import trl
from safetensors import safe_open

from tests.support.hugging_face_weights import probes, weights
from tests.support.sft_cases import CASES, EPS, STEPS, Case, adapter_name, write_tokenizer


class Recording(trl.SFTTrainer):
    """Keeps the loss of every piece, the labels that it saw, and the rate of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pieces: list[float] = []
        self.asked: list[int] = []

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        self.asked.append(int((inputs["labels"][:, 1:] != -100).sum()))
        loss = super().compute_loss(model, inputs, **options)
        self.pieces.append(float(loss.detach().double()))
        return loss


def make_folder(case: Case, folder: Path) -> dict[str, Any]:
    """Weights by formula as transformers saves them; what the folder holds."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    named = {n: torch.from_numpy(weights(n, x.shape)) for n, x in model.state_dict().items()}
    if config.tie_word_embeddings:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {"config": json.loads((folder / "config.json").read_text()), "tensors": tensors}


def settings_of(case: Case, folder: Path) -> trl.SFTConfig:
    """TRL's settings."""
    return trl.SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=case.accumulation,
        train_sampling_strategy="sequential",
        assistant_only_loss=True,
        learning_rate=case.learning_rate,
        lr_scheduler_type=case.schedule,
        warmup_steps=case.warmup,
        weight_decay=case.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=EPS,
        max_grad_norm=case.clip_norm,
        optim="adamw_torch",
        max_length=case.seq_len,
        packing=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )


def adapters_of(case: Case) -> peft.LoraConfig | None:
    """On every projection of the layers."""
    if not case.rank:
        return None
    modules = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=case.rank, lora_alpha=case.alpha, target_modules=modules
    )


def trained_of(trainer: Any) -> dict[str, torch.Tensor]:
    """{name in files: values} of what is trained."""
    return {
        adapter_name(name): x.detach().clone()
        for name, x in trainer.model.named_parameters()
        if x.requires_grad
    }


def run(case: Case) -> dict[str, Any]:
    """The run of a case."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        about = make_folder(case, folder)
        trainer = Recording(
            model=str(folder),
            args=settings_of(case, folder),
            train_dataset=datasets.Dataset.from_list(case.chats()),
            peft_config=adapters_of(case),
        )
        if case.rank:  # B is zero at first, whose gradient alone would move in the first step
            with torch.no_grad():
                for name, x in trainer.model.named_parameters():
                    if x.requires_grad:
                        x.copy_(torch.from_numpy(weights(adapter_name(name), x.shape)))
        assert all(x.dtype == torch.float32 for x in trainer.model.parameters())
        first = trained_of(trainer)
        trainer.train()
        last = trained_of(trainer)
        texts = [
            {"ids": row["input_ids"], "asked": [int(x != -100) for x in row["labels"]]}
            for row in trainer.train_dataset
        ]
    per_step = [trainer.pieces[i :: case.accumulation] for i in range(case.accumulation)]
    log = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert len(log) == STEPS
    return {
        **about,
        "losses": [sum(pieces) for pieces in zip(*per_step, strict=True)],
        "grad_norms": [row["grad_norm"] for row in log],
        "learning_rates": [row["learning_rate"] for row in log],
        "asked": trainer.asked,
        "texts": texts,
        "last": {name: probes(name, x.numpy()) for name, x in last.items()},
        "moved": {name: probes(name, (x - first[name]).numpy()) for name, x in last.items()},
    }


if __name__ == "__main__":
    found = {name: run(case) for name, case in CASES.items()}
    about = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "torch": torch.__version__,
    }
    text = json.dumps({"versions": about, "cases": found}, separators=(",", ":"))
    Path(sys.argv[1]).write_text(text + "\n")
