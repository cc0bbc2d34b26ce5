"""Any user model as named arrays and a call with other arrays.

Besides the reference models no other package imports Flax. `on_read` is called when a parameter is
read.

The only room that knows Flax, besides the reference models. Knows nothing of meshes, shardings or
ZeRO: it lets a caller say what happens when the model reads a parameter (`on_read`).
"""

from zerojax.model.door import as_loss, as_model, bound_attribute, default_loss, width_of
from zerojax.model.index_limits import IndexLimit
from zerojax.model.protocol import Arrays, LazyArray, Loss, Model, ModelLike, OnRead
from zerojax.model.tracing import ModelTrace, trace_model

__all__ = [
    "Arrays",
    "IndexLimit",
    "LazyArray",
    "Loss",
    "Model",
    "ModelLike",
    "ModelTrace",
    "OnRead",
    "as_loss",
    "as_model",
    "bound_attribute",
    "default_loss",
    "trace_model",
    "width_of",
]
