"""The two reference models in PyTorch, with the same parts, shapes, order and arithmetic.

Does not import JAX, so that it runs with only torch installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.workloads import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Workload


class RMSNorm(nn.Module):
    """x / root mean square, computed in float32."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped key/value heads, through PyTorch's fused kernels."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = w.num_heads, w.num_kv_heads, w.head_dim
        bias = w.kind == "gpt2"
        kv_width = w.num_kv_heads * w.head_dim
        self.query = nn.Linear(w.embed_dim, w.embed_dim, bias=bias)
        self.key = nn.Linear(w.embed_dim, kv_width, bias=bias)
        self.value = nn.Linear(w.embed_dim, kv_width, bias=bias)
        self.output = nn.Linear(w.embed_dim, w.embed_dim, bias=bias)

    def forward(self, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        rows, length, width = x.shape
        query = self._heads(self.query(x), self.num_heads)
        key = self._heads(self.key(x), self.num_kv_heads)
        value = self._heads(self.value(x), self.num_kv_heads)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return self.output(mixed.transpose(1, 2).reshape(rows, length, width))

    def _heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], count, self.head_dim).transpose(1, 2)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotates [batch, heads, seq, head_dim] by positions; feature i pairs with i + head_dim / 2."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)


class GeluMlp(nn.Module):
    """Computes down(gelu(up(x))) with biases and the tanh form of gelu."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.up = nn.Linear(w.embed_dim, w.mlp_dim)
        self.down = nn.Linear(w.mlp_dim, w.embed_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class SwiGluMlp(nn.Module):
    """Computes down(silu(gate(x)) * up(x)) without biases."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.gate = nn.Linear(w.embed_dim, w.mlp_dim, bias=False)
        self.up = nn.Linear(w.embed_dim, w.mlp_dim, bias=False)
        self.down = nn.Linear(w.mlp_dim, w.embed_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Computes x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.attention_norm = make_norm(w)
        self.attention = Attention(w)
        self.mlp_norm = make_norm(w)
        self.mlp = GeluMlp(w) if w.kind == "gpt2" else SwiGluMlp(w)

    def forward(self, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


def make_norm(w: Workload) -> nn.Module:
    """Returns LayerNorm for GPT-2 and RMSNorm for Llama."""
    if w.kind == "gpt2":
        return nn.LayerNorm(w.embed_dim, eps=w.norm_eps)
    return RMSNorm(w.embed_dim, w.norm_eps)


class Decoder(nn.Module):
    """GPT-2 (learned positions, tied head by default) or a Llama-style decoder (rotary, untied)."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.workload = w
        self.token_embedding = nn.Embedding(w.vocab_size, w.embed_dim)
        is_gpt2 = w.kind == "gpt2"
        self.position_embedding = nn.Embedding(w.seq_len, w.embed_dim) if is_gpt2 else None
        self.blocks = nn.ModuleList(Block(w) for _ in range(w.num_layers))
        self.final_norm = make_norm(w)
        untied = w.untied or not is_gpt2
        self.lm_head = nn.Linear(w.embed_dim, w.vocab_size, bias=False) if untied else None
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean next-token cross-entropy, computed in float32."""
        x = self.token_embedding(tokens)
        rotary = None
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            rotary = self._rotary(tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = block(x, rotary)
        x = self.final_norm(x)
        if self.lm_head is None:
            logits = functional.linear(x, self.token_embedding.weight).float()
        else:
            logits = self.lm_head(x).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _rotary(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.workload.head_dim // 2
        exponents = torch.arange(half, device=device, dtype=torch.float32) / half
        frequencies = self.workload.rope_theta**-exponents
        positions = torch.arange(length, device=device, dtype=torch.float32)
        angles = positions[:, None] * frequencies[None, :]
        return angles.cos(), angles.sin()


def make_optimizer(model: nn.Module, *, masters: dict[str, nn.Parameter] | None = None) -> Any:
    """Returns fused AdamW with weight decay on each layer's matrices, as zerojax selects them.

    Args:
      model: model that gives names and shapes.
      masters: {name: parameter to update}, if not the model's own parameters.
    """
    named = dict(model.named_parameters()) if masters is None else masters
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)


def load_jax_parameters(model: Decoder, params: dict[str, np.ndarray]) -> None:
    """Copies zerojax's parameters, {name: array with stacked layers}, into the PyTorch model.

    Kernels are [in..., out...] in JAX and [out, in] in PyTorch; JAX has heads as a dimension.

    Raises:
      ValueError: a parameter of one model has no counterpart in the other.
    """
    left = dict(params)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs, layer = _jax_name(name)
            if theirs not in params:
                raise ValueError(f"{name} has no counterpart {theirs} among {sorted(params)}")
            left.pop(theirs, None)
            value = params[theirs] if layer is None else params[theirs][layer]
            if theirs.endswith("kernel"):
                # Only the kernel of attention's output has several input dimensions.
                num_in = 2 if theirs.endswith("attention/output/kernel") else 1
                inputs = int(np.prod(value.shape[:num_in]))
                value = value.reshape(inputs, -1).T
            parameter.copy_(torch.from_numpy(np.array(value).reshape(parameter.shape)))
    if left:
        raise ValueError(f"the PyTorch model has no parameters for {sorted(left)}")


def _jax_name(name: str) -> tuple[str, int | None]:
    """Returns ("blocks/mlp/up/kernel", 3) for "blocks.3.mlp.up.weight"."""
    parts = name.split(".")
    layer = None
    if parts[0] == "blocks":
        layer = int(parts.pop(1))
    if parts[-1] == "weight":
        if parts[-2].endswith("embedding"):
            parts[-1] = "embedding"
        else:
            parts[-1] = "scale" if parts[-2].endswith("norm") else "kernel"
    return "/".join(parts), layer
