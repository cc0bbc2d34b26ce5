"""The models that are measured on the GPU, with batch sizes and FLOPs.

Plain numbers; imports neither JAX nor torch, so that both sides can use it. Batches are sized for a
card of 80 GB with the states of two sides and separate space for the temporaries of each side,
since the allocator may not be able to reuse all memory of one side for the other.
"""

from __future__ import annotations

import dataclasses

from zerojax.hardware.gpus import gpu_of_device

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A decoder and its batch.

    Attributes:
      kind: "gpt2" or "llama".
      seq_len, batch_size: tokens per row and rows per step.
      untied: whether a GPT-2 has separate output weights (a Llama always has).
      steps: number of steps per sample, so that a sample takes a few seconds.
      rounds: number of samples per side.
      Other attributes are sizes of the model, as in `zerojax.config.ModelConfig`.
    """

    kind: str
    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    mlp_dim: int
    batch_size: int
    steps: int
    rounds: int
    remat: str = "none"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    untied: bool = False

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def flops_per_token(self) -> int:
        """Returns FLOPs per token of the matrix products in forward and backward pass.

        Attention counts all positions, recomputation is not counted. This is the convention of
        published MFUs (PaLM, arXiv:2204.02311 appendix B).
        """
        width, kv_width = self.embed_dim, self.num_kv_heads * self.head_dim
        matrices = 3 if self.kind == "llama" else 2
        layer = 2 * (2 * width * width + 2 * width * kv_width + matrices * width * self.mlp_dim)
        attention = 4 * self.seq_len * width
        return 3 * (self.num_layers * (layer + attention) + 2 * width * self.vocab_size)


# The model of configs/llama_1b_zero1_8xh100.yaml, 1.2 billion parameters, at 2048 tokens.
# Without remat XLA's attention would keep its scores: 263 GiB for 8 rows, compiled for an H200.
LLAMA_1B = Workload(
    kind="llama",
    vocab_size=32768,
    seq_len=2048,
    num_layers=22,
    num_heads=32,
    num_kv_heads=8,
    embed_dim=2048,
    mlp_dim=5632,
    batch_size=4,
    steps=10,
    rounds=3,
    remat="dots",
)

LLAMA_8B_LAYERS = Workload(
    kind="llama",
    vocab_size=32768,
    seq_len=2048,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    embed_dim=4096,
    mlp_dim=14336,
    batch_size=1,
    steps=3,
    rounds=1,
    remat="full",
)

FULL = {
    # GPT-2 124M, vocabulary rounded up to a multiple of 128.
    "gpt2": Workload(
        kind="gpt2",
        vocab_size=50304,
        seq_len=1024,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        embed_dim=768,
        mlp_dim=3072,
        batch_size=16,
        steps=20,
        rounds=4,
    ),
    "llama": LLAMA_1B,
    # The same model with 32,768 tokens per step, layers computed again: what leaves the device
    # has this long to do so.
    "offload": dataclasses.replace(LLAMA_1B, batch_size=16, steps=3, rounds=2, remat="full"),
    # Layers of Llama 3 8B, 218 million parameters each; how many is searched for.
    "largest": LLAMA_8B_LAYERS,
    # Llama 3 8B, with 1024 positions in the cache.
    "decoding": dataclasses.replace(
        LLAMA_8B_LAYERS, vocab_size=128256, seq_len=1024, steps=1, rounds=5, remat="none"
    ),
    # About 200 million parameters: predicted against measured memory.
    "memory": Workload(
        kind="gpt2",
        vocab_size=50304,
        seq_len=1024,
        num_layers=12,
        num_heads=16,
        num_kv_heads=16,
        embed_dim=1024,
        mlp_dim=4096,
        batch_size=16,
        steps=3,
        rounds=1,
    ),
    # Small enough to be exact about: stages against each other.
    "stages": Workload(
        kind="llama",
        vocab_size=4096,
        seq_len=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=512,
        mlp_dim=1536,
        batch_size=8,
        steps=10,
        rounds=1,
    ),
}


def model_rates(workload: Workload, seconds: float, device_kind: str) -> dict[str, float | None]:
    """Returns tokens per second, TFLOP/s and MFU of steps that take `seconds` seconds.

    MFU is relative to the published dense bf16 rate of the card; None for an unknown card.
    """
    tflops = workload.flops_per_token * workload.tokens_per_step / seconds / 1e12
    card = gpu_of_device(device_kind)
    peak = None if card is None else card.bf16_flops
    return {
        "tokens_per_s": workload.tokens_per_step / seconds,
        "TFLOP/s": tflops,
        "MFU": 1e12 * tflops / peak if peak else None,
    }


TINY = {"vocab_size": 128, "seq_len": 16, "num_layers": 2, "num_heads": 4, "embed_dim": 32}


def choose_workload(name: str, smoke: bool) -> Workload:
    """Returns a workload at its full size or, for a smoke run, at tiny sizes."""
    full = FULL[name]
    if not smoke:
        return full
    kv_heads = 4 if full.num_kv_heads == full.num_heads else 2
    small = {"num_kv_heads": kv_heads, "mlp_dim": 64, "batch_size": 4, "steps": 2, "rounds": 1}
    return dataclasses.replace(full, **TINY, **small)
