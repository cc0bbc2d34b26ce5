"""Declaration of optimizer states that training stores in another form than checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateCoding:
    """How the two forms of an optimizer's state belong together.

    The canonical form is optax's, and its arrays depend neither on the mesh nor on how parameters
    are split. It is what checkpoints hold and what moves between meshes.

    Attributes:
      canonical_init: parameters -> the canonical state before the first update, for
        `jax.eval_shape` and `optax.tree.map_params`.
      abstract_state: ({name: `ShapeDtypeStruct` of the stored parameter with its `NamedSharding`},
        {name: elements of the parameter without padding}) -> the state that training keeps, as
        `ShapeDtypeStruct`s with `NamedSharding`s.
      new_state: that tree -> the state before the first update; constants only, to be traced.
      to_canonical: state -> canonical state of the same shards, inside `shard_map`.
      from_canonical: (canonical state, the tree of `plan.abstract_state`) -> state of the same
        shards, inside `shard_map`. After `to_canonical` on the same shards it gives every bit back.
    """

    canonical_init: Callable[[Tree], Tree]
    abstract_state: Callable[[Mapping[str, Any], Mapping[str, int]], Tree]
    new_state: Callable[[Tree], Tree]
    to_canonical: Callable[[Tree], Tree]
    from_canonical: Callable[[Tree, Tree], Tree]
