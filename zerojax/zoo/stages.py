"""Model `Stages`: embedding, equal blocks and head, the structure that pipelines require."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from zerojax.tracing.stacking import check_remat, scan_blocks, stack_blocks, stack_modules


class Stages(nnx.Module):
    """Model `head(blocks(embed(*inputs)))` whose blocks run in one loop.

    The model trains on any mesh. With `MeshConfig(stage=...)` the blocks are divided among the
    pipeline stages; embed and head are on every stage. Stages send each other the input and output
    of a block: one array, or a tree of arrays such as activations and a mask.

    An existing model with these parts and a list of blocks is converted by
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
      embed, head: the arguments of the constructor.
      blocks: one block whose arrays have a leading layer dimension.
      remat: the argument of the constructor.
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
        """Builds the blocks and stacks them.

        Args:
          embed: module, or function without parameters, from the model's inputs to activations.
          block: function `rngs -> module` that builds one layer, which maps activations to
            activations of the same shapes and dtypes; or a list of such modules, equal except for
            their values.
          head: module, or function without parameters, from activations to the model's result. To
            reuse the parameters of `embed` (tied weights), store that module as an attribute.
          num_layers, rngs: number of layers and source of their random keys; only if `block` is a
            function.
          remat: part of a layer that the backward pass recomputes: "none", "full" (the whole
            layer), "attention" (all but chunked `zerojax.attention`) or "dots" (all but matrix
            products).

        Raises:
          TypeError: a part has the wrong type, or is a function with a module in its closure.
          ValueError: layers differ, the remat name is unknown, or there is no layer.
        """
        _check_part("embed", embed)
        _check_part("head", head)
        check_remat(remat)
        self.embed = embed
        self.blocks = _stacked(block, num_layers, rngs)
        self.head = head
        self.remat = remat

    def __call__(self, *inputs: Any) -> Any:
        """Computes `head(blocks(embed(*inputs)))`."""
        return self.head(scan_blocks(self.blocks, self.embed(*inputs), remat=self.remat))


def _stacked(block: object, num_layers: int | None, rngs: nnx.Rngs | None) -> nnx.Module:
    if isinstance(block, nnx.Module):
        raise TypeError(
            f"block is one {type(block).__name__}; pass a function that builds a layer, "
            f"lambda rngs: {type(block).__name__}(..., rngs=rngs), or a list of layers"
        )
    if isinstance(block, Sequence):
        if num_layers is not None or rngs is not None:
            raise TypeError(
                f"num_layers and rngs are for a function that builds layers, but block is a list "
                f"of {len(block)}; remove them"
            )
        return stack_modules(block)
    if not callable(block):
        raise TypeError(
            f"block is a {type(block).__name__}; pass a function rngs -> nnx.Module, or a list of "
            "modules"
        )
    if rngs is None or num_layers is None:
        raise TypeError(
            "block is a function, which builds one layer; also pass num_layers and rngs"
        )
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers} must be at least 1")
    return stack_blocks(block, num_layers, rngs=rngs)


def _check_part(name: str, part: object) -> None:
    """Raises a TypeError for a part that is not callable, or a function with a module in its
    closure.

    The parameters of that module would not be part of the model.
    """
    if isinstance(part, nnx.Module):
        return
    if not callable(part):
        raise TypeError(f"{name} is a {type(part).__name__}; pass an nnx.Module or a function")
    held = [getattr(part, "__self__", None), *getattr(part, "args", ())]
    for cell in getattr(part, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    for value in held:
        if isinstance(value, (nnx.Module, nnx.Variable)):
            raise TypeError(
                f"{name} is a function that holds a {type(value).__name__}, whose parameters would "
                "not be trained; pass an nnx.Module with it as an attribute"
            )
