"""`Stages`: a model from embedding, equal blocks and head, as a pipeline needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from zerojax.tracing.stacking import check_remat, scan_blocks, stack_blocks, stack_modules


class Stages(nnx.Module):
    """`model(*inputs)` is `head(blocks(embed(*inputs)))`, the blocks being run by one loop.

    Such a model trains on any mesh. With `MeshConfig(stage=...)` the blocks are divided over the
    pipeline's stages; embed and head are on all of them. What a block takes and gives, one array
    or a tree of arrays (activations and a mask, say), is what travels from stage to stage.

    A model that has these parts, with its blocks in a list, becomes one by
    `Stages(model.embed, list(model.blocks), model.head)`.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> rngs = nnx.Rngs(0)
    >>> model = Stages(
    ...     nnx.Embed(10, 4, rngs=rngs),
    ...     lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    ...     nnx.Linear(4, 10, rngs=rngs),
    ...     num_layers=3,
    ...     rngs=rngs,
    ... )
    >>> model(jnp.zeros((2, 5), int)).shape
    (2, 5, 10)
    >>> model.blocks.kernel.shape
    (3, 4, 4)

    Attributes:
      embed, head: as given.
      blocks: one block whose arrays have a leading dimension, the layers.
      remat: as given.
    """

    def __init__(
        self,
        embed: Callable[..., Any],
        block: Callable[[nnx.Rngs], nnx.Module] | Sequence[nnx.Module],
        head: Callable[[Any], Any],
        *,
        num_layers: int | None = None,
        rngs: nnx.Rngs | None = None,
        remat: str = "none",
    ) -> None:
        """Args:
          embed: a module, or a function without parameters: the model's inputs -> activations.
          block: a function `rngs -> module` that makes one layer, activations -> activations of
            the same shapes and dtypes; or a list of such modules, alike but for their values.
          head: a module, or a function without parameters: activations -> the model's result. To
            use the parameters of `embed` again (tied weights), hold that module as an attribute.
          num_layers, rngs: with a function: how many layers, and what their keys are drawn from.
          remat: what the backward pass computes again: "none", "full" (all of a layer from its
            input), "attention" (all but `zerojax.attention` in chunks) or "dots" (all but matrix
            products).

        Raises:
          TypeError: a part is not what it has to be.
          ValueError: layers that differ, an unknown remat name, or fewer than one layer.
        """
        _check_part("embed", embed)
        _check_part("head", head)
        check_remat(remat)
        self.embed = embed
        self.blocks = _stacked(block, num_layers, rngs)
        self.head = head
        self.remat = remat

    def __call__(self, *inputs: Any) -> Any:
        """What the head makes of the model's inputs."""
        return self.head(scan_blocks(self.blocks, self.embed(*inputs), remat=self.remat))


def _stacked(block: Any, num_layers: int | None, rngs: nnx.Rngs | None) -> nnx.Module:
    if isinstance(block, nnx.Module):
        raise TypeError(
            f"block is one {type(block).__name__}; give a function that makes a layer, "
            f"lambda rngs: {type(block).__name__}(..., rngs=rngs), or a list of layers"
        )
    if isinstance(block, Sequence):
        if num_layers is not None or rngs is not None:
            raise TypeError(
                f"num_layers and rngs belong to a function that makes layers, but block is a list "
                f"of {len(block)}; leave them out"
            )
        return stack_modules(block)
    if not callable(block):
        raise TypeError(
            f"block is a {type(block).__name__}; give a function rngs -> nnx.Module, or a list of "
            "modules"
        )
    if rngs is None or num_layers is None:
        raise TypeError(
            "a block that is a function is called for every layer: pass num_layers and rngs, too"
        )
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers} must be at least 1")
    return stack_blocks(block, num_layers, rngs=rngs)


def _check_part(name: str, part: Any) -> None:
    """Refuses what cannot be called, and functions that hold modules where nobody finds them."""
    if isinstance(part, nnx.Module):
        return
    if not callable(part):
        raise TypeError(f"{name} is a {type(part).__name__}; give an nnx.Module or a function")
    held = [getattr(part, "__self__", None), *getattr(part, "args", ())]
    for cell in getattr(part, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a name that has no value yet
            continue
    for value in held:
        if isinstance(value, (nnx.Module, nnx.Variable)):
            raise TypeError(
                f"{name} is a function that holds a {type(value).__name__}, whose parameters would "
                "stay as they are: give an nnx.Module that has it as an attribute"
            )
