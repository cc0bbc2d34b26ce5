"""Low-rank adapters of projections (LoRA, arXiv:2106.09685): adds and merges them.

An adapter computes (x A) B, so that forward and backward pass never compute the product A B, which
has the shape of the kernel. Only merging computes it, one kernel at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zerojax.config.checks import names_keywords
from zerojax.config.sections import ADAPTERS_ONLY, LoraConfig
from zerojax.tracing import trees
from zerojax.tracing.protocol import ModelLike
from zerojax.tracing.stacking import stack_blocks
from zerojax.zoo.layers import Dropout, Projection
from zerojax.zoo.moe import GatedExperts, Router
from zerojax.zoo.task_heads import TASK_HEAD

A_SUFFIX, B_SUFFIX, KERNEL_SUFFIX = "/lora/a", "/lora/b", "/kernel"
"""Suffixes of the names of an adapter's parameters and of the kernel that it adapts."""


class LowRank(nnx.Module):
    """Adapter x -> scale * (x A) B from the last dimensions of x (`in_shape`) to `out_shape`.

    B starts as zeros, so that new adapters do not change the model's output. A is drawn uniformly
    between -1/sqrt(inputs) and 1/sqrt(inputs).
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        config: LoraConfig,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_inputs = len(in_shape)
        self.scale = config.scale
        bound = math.prod(in_shape) ** -0.5
        shape = (*in_shape, config.rank)
        self.a = nnx.Param(
            jax.random.uniform(rngs.params(), shape, jnp.float32, minval=-bound, maxval=bound)
        )
        self.b = nnx.Param(jnp.zeros((config.rank, *out_shape), jnp.float32))
        self.dropout = Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., *in_shape] to [..., *out_shape], in the dtype of A."""
        a, b = self.a[...], self.b[...]
        x = self.dropout(x).astype(a.dtype)
        first = x.ndim - self.num_inputs
        dims = tuple(range(first, x.ndim)), tuple(range(self.num_inputs))
        narrow = self.scale * lax.dot_general(x, a, (dims, ((), ())))
        return lax.dot_general(narrow, b, (((first,), (0,)), ((), ())))


@names_keywords()
def add_lora(model: ModelLike, config: LoraConfig, *, seed: int = 0) -> Any:
    """Adds an adapter to every projection that the configuration targets.

    Train the result with `freeze=config.freeze`, so that only adapters have gradients and optimizer
    state. Adapters need models built from zerojax's `Projection`, such as all models of
    `zerojax.zoo`; with Flax layers use `flax.nnx.LoRALinear`.

    >>> import zerojax
    >>> from flax import nnx
    >>> config = zerojax.zoo.GPT2Config(vocab_size=64, num_layers=2, num_heads=2, embed_dim=8)
    >>> model = zerojax.zoo.GPT2(config, rngs=nnx.Rngs(0))
    >>> lora = zerojax.LoraConfig(rank=4, targets=("attention/(query|value)",))
    >>> with_adapters = zerojax.add_lora(model, lora)
    >>> with_adapters.blocks.attention.query.lora.a.shape
    (2, 8, 4)

    Args:
      model: an `nnx.Module`, which is not modified and shares its arrays with the result; a factory
        `rngs -> nnx.Module`; or a pretrained model.
      config: settings of the adapters, with rank at least 1.
      seed: random seed of the adapters, if `model` is a module; a factory draws them from its
        `rngs` after all other parameters.

    Returns:
      A module, factory or pretrained model, of the same kind as `model`.

    Raises:
      ValueError: the rank is 0, targets match no projection, or a target does not support
        adapters.
      TypeError: `model` is neither an `nnx.Module` nor a factory.
    """
    if config.rank < 1:
        raise ValueError("LoraConfig.rank=0 means no adapters; set a rank, such as rank=8")
    if isinstance(model, nnx.Module):
        copy = nnx.clone(model, graph=True)
        return _insert(copy, config, nnx.Rngs(seed))
    if callable(adapted := getattr(model, "with_lora", None)):
        return adapted(config)
    if not callable(model):
        raise TypeError(
            f"cannot add adapters to a {type(model).__name__}: pass an nnx.Module, or a factory "
            "rngs -> nnx.Module"
        )

    def factory(rngs: nnx.Rngs) -> nnx.Module:
        module = model(rngs)
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"cannot add adapters to a {type(module).__name__}: pass an nnx.Module, or a "
                "factory rngs -> nnx.Module"
            )
        return _insert(module, config, rngs)

    return factory


@names_keywords()
def merge_lora(model: nnx.Module) -> Any:
    """Returns a module without adapters; their products are added to the kernels in float32.

    Args:
      model: an `nnx.Module` with adapters, which is not modified.

    Returns:
      A module of the same class, with kernels of the same dtype. Its outputs equal those of `model`
      without dropout, up to rounding.

    Raises:
      ValueError: `model` has no adapters.
    """
    merged = nnx.clone(model, graph=True)
    adapted = [part for _, part in _projections(merged) if isinstance(part.lora, LowRank)]
    if not adapted:
        raise ValueError(
            f"{type(model).__name__} has no adapters to merge; zerojax.add_lora adds them"
        )
    for projection in adapted:
        kernel, lora = projection.kernel, projection.lora
        assert isinstance(lora, LowRank)
        kernel[...] = merged_kernel(kernel[...], lora.a[...], lora.b[...], lora.scale)
        projection.lora = nnx.data(None)
    return merged


def merged_kernel(kernel: Any, a: Any, b: Any, scale: float) -> Any:
    """Computes kernel + scale * A B in float32, for one projection or for stacked projections.

    Args:
      kernel: [*stack, *inputs, *outputs]; a JAX array, or a NumPy array to compute on the host.
      a: [*stack, *inputs, rank].
      b: [*stack, rank, *outputs].
      scale: factor of the product, `LoraConfig.scale`.

    Returns:
      An array of the kernel's shape and dtype.
    """
    stack = a.ndim + b.ndim - 2 - kernel.ndim
    rank = b.shape[stack]
    lead = kernel.shape[:stack]
    left = a.astype("float32").reshape(*lead, -1, rank)
    right = b.astype("float32").reshape(*lead, rank, -1)
    if isinstance(kernel, jax.Array):
        # By default an accelerator multiplies float32 with fewer bits.
        product = jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
    else:
        product = left @ right
    return (kernel.astype("float32") + scale * product.reshape(kernel.shape)).astype(kernel.dtype)


def trained_only(others: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the value of `freeze` with which only adapters, the head of a task and the parameters
    with the names `others` are trained."""
    (adapters,) = ADAPTERS_ONLY
    names = [re.escape(name) for name in sorted(others)]
    if not names:
        return ADAPTERS_ONLY
    return (f"^(?!(?:{'|'.join(names)})$){adapters.removeprefix('^')}",)


def adapted_kernels(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns {kernel name: (name of A, name of B)} of the adapters among parameter names."""
    bases = [name.removesuffix(A_SUFFIX) for name in names if name.endswith(A_SUFFIX)]
    return {base + KERNEL_SUFFIX: (base + A_SUFFIX, base + B_SUFFIX) for base in bases}


def adapter_names(names: Iterable[str]) -> frozenset[str]:
    """Returns the parameter names that belong to adapters."""
    return frozenset(x for pair in adapted_kernels(names).values() for x in pair)


def _projections(model: nnx.Module) -> Iterator[tuple[str, Projection]]:
    """Yields (name, projection) for every projection, in the model's order."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Projection):
            yield trees.path_name(path), node


def _insert(model: nnx.Module, config: LoraConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Adds adapters to the model in place and returns it."""
    projections = dict(_projections(model))
    if not projections:
        raise ValueError(
            f"{type(model).__name__} has none of zerojax's projections, which adapters need; "
            "build it with flax.nnx.LoRALinear in place of nnx.Linear, and train it with "
            f"freeze=({r'^(?!.*/lora_[ab]$)'!r},)"
        )
    _check_experts(model, projections, config)
    chosen = trees.match_names(projections, config.targets, option="LoraConfig.targets")
    for name in sorted(chosen):
        projection = projections[name]
        _check_free(name, projection)
        projection.lora = nnx.data(_build(projection, config, rngs))
    return model


def _check_experts(model: nnx.Module, projections: Iterable[str], config: LoraConfig) -> None:
    """Raises a ValueError for targets that match only experts or routers, which have no
    adapters."""
    experts = [
        trees.path_name(path)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, GatedExperts | Router)
    ]
    names = tuple(projections)
    for pattern in config.targets:
        matches = [name for name in experts if re.search(pattern, name)]
        if matches and not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"LoraConfig.targets: {pattern!r} matches {matches[0]}, but adapters for experts "
                "and routers are not supported; remove it: targets=('attention/',)"
            )


def _check_free(name: str, projection: Projection) -> None:
    if projection.lora is not None:
        raise ValueError(f"{name} already has an adapter; call zerojax.merge_lora(model) first")
    if (dtype := projection.matmul_dtype or "").startswith("fake_"):
        raise ValueError(
            f"{name}: adapters cannot be combined with matmul_dtype={dtype!r}, since an export "
            "rounds the sum of kernel and adapter; use matmul_dtype=None, or no adapters"
        )
    if name.rsplit(trees.SEPARATOR, 1)[-1] == "lm_head":
        raise ValueError(
            "lm_head does not support an adapter, since the chunked loss uses its kernel directly; "
            r"use targets inside the layers, such as 'blocks/.*'"
        )
    if name.split(trees.SEPARATOR)[0] == TASK_HEAD:
        raise ValueError(
            f"{name} is trained itself beside the adapters, and needs none; use targets inside the "
            "layers, such as 'blocks/.*'"
        )


def _build(projection: Projection, config: LoraConfig, rngs: nnx.Rngs) -> LowRank:
    shape, num_inputs = projection.kernel.shape, projection.num_inputs
    stack = len(shape) - num_inputs - projection.num_outputs
    ins, outs = shape[stack : stack + num_inputs], shape[stack + num_inputs :]

    def build(rngs: nnx.Rngs) -> LowRank:
        return LowRank(ins, outs, config, rngs=rngs)

    for size in reversed(shape[:stack]):
        build = _stacked(build, size)
    return build(rngs)


def _stacked(
    build: Callable[[nnx.Rngs], LowRank], num_layers: int
) -> Callable[[nnx.Rngs], LowRank]:
    return lambda rngs: stack_blocks(build, num_layers, rngs=rngs)
