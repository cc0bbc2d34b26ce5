"""Splits sequences over the mesh axis `context`: raises for unsupported combinations and chooses
the method of attention."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.config.tree_types import Batch
from zerojax.operators.attending import Call
from zerojax.operators.attention_choice import SET_BY_CALL
from zerojax.operators.context import Choice, ContextSplit, Sizes, choose_way
from zerojax.operators.marks import what_takes_whole_sequences
from zerojax.placement.device_mesh import CONTEXT, MODEL, STAGE
from zerojax.tracing.protocol import Model
from zerojax.tracing.trace import ModelTrace

GPUS_OF_A_NODE = 8


def check_context(settings: MeshConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises if `context` > 1 is combined with settings that are unsupported or could change the
    results.

    Args:
      settings: mesh options.
      mesh: the device mesh.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    devices = mesh.shape[CONTEXT]
    if devices == 1:
        return
    asked = f"context={devices}"
    if settings.deterministic is not None:
        raise ValueError(
            f"{asked} with deterministic: sums over `context` depend on its size; use context=1, "
            "or leave deterministic out"
        )
    if mesh.shape[STAGE] > 1:
        raise ValueError(
            f"{asked} with stage={mesh.shape[STAGE]}: attention between devices inside the ticks "
            f"of a pipeline is not supported; use stage=1, or context=1"
        )
    for name in ("update_in_backward", "delayed_update", "update_in_forward"):
        if getattr(settings.offload, name):
            raise ValueError(
                f"{asked} together with offload.{name} is not supported; leave {name} out, or use "
                "context=1"
            )
    if settings.sequence_sharding and mesh.shape[MODEL] > 1:
        raise ValueError(
            f"{asked} together with sequence_sharding is not supported; use "
            "sequence_sharding=False: sequences are split over `context` already"
        )


def check_layout(mesh: Mesh | AbstractMesh, layout: object) -> None:
    """Raises if `context` > 1 is combined with a layout of attention; `layout`: None without one.

    Raises:
      ValueError: the message states both remedies.
    """
    if layout is not None and mesh.shape[CONTEXT] > 1:
        raise ValueError(
            "context > 1 together with a layout of attention is not supported; leave the layout "
            "out, or use context=1"
        )


def check_parts_of_rows(mesh: Mesh | AbstractMesh, model: Model, loss: object) -> None:
    """Raises if `context` > 1, and a model or loss has not declared that it supports parts of rows.

    Args:
      mesh: the device mesh.
      model: the model.
      loss: the user's loss; None: the model's own loss.

    Raises:
      ValueError: the message states the remedy.
    """
    devices = mesh.shape[CONTEXT]
    if devices == 1:
        return
    asked = f"context={devices}"
    if not _says_so(model):
        raise ValueError(
            f"{asked} splits sequences, but the class of the {model.kind} defines no method "
            "before_cut(batch) of its own, which declares that the loss supports parts of rows; "
            "use context=1, or a reference decoder without a task (zerojax.zoo.Llama, GPT2)"
        )
    if loss is not None:
        raise ValueError(
            f"{asked} splits sequences, and a custom loss may mix tokens of a row; use loss=None, "
            "the model's method loss(batch), or context=1"
        )


def _says_so(model: Model) -> bool:
    """Returns whether the model's class itself defines `before_cut`, or is a zerojax class that
    defines it; False if the model replaced it by None, as decoders for a task do.

    A subclass of a user's class may mix tokens where its parent does not, so it must define the
    method itself.
    """
    target = getattr(model, "template", None) or model.source
    if getattr(target, "before_cut", None) is None:
        return False
    for one in type(target).__mro__:
        if "before_cut" in vars(one):
            return True
        if not one.__module__.startswith("zerojax."):
            return False
    return False


def plan_context(
    settings: MeshConfig, mesh: Mesh | AbstractMesh, trace: ModelTrace, microbatch: Batch
) -> tuple[ContextSplit | None, list[str]]:
    """Plans how sequences are split over the axis `context`.

    Args:
      settings: mesh options.
      mesh: the device mesh.
      trace: trace of the loss on whole sequences.
      microbatch: rows of one microbatch, with shape [rows, tokens].

    Returns:
      (layout of the split sequences, sentences with the reasons); (None, []) if context=1.

    Raises:
      ValueError: sequence lengths or numbers of heads are not divisible; the message states the
        next values that are.
    """
    devices, model = mesh.shape[CONTEXT], mesh.shape[MODEL]
    if devices == 1:
        return None, []
    rows, tokens = _shape_of(microbatch)
    mixes = what_takes_whole_sequences(trace.jaxpr.jaxpr)
    if mixes is not None:
        raise ValueError(
            f"context={devices} splits sequences, but {mixes} needs whole sequences; leave {mixes} "
            "out, or use context=1"
        )
    if not trace.attention_calls:
        raise ValueError(
            f"context={devices} splits sequences, but the model never calls zerojax.attention, the "
            "only attention that reads the rest of a sequence from other devices; use context=1"
        )
    by_heads = all(call.heads % model == call.kv_heads % model == 0 for call in _of(trace))
    heads_axis = MODEL if model > 1 and by_heads else None
    split_heads = model if heads_axis else 1
    choice: Choice | None = None
    for call in _of(trace):
        if (call.queries, call.keys) != (tokens, tokens):
            raise ValueError(
                f"context={devices} splits sequences of {tokens} tokens, but attention is called "
                f"with {call.queries} queries and {call.keys} keys; use context=1"
            )
        sizes = Sizes(
            rows=rows,
            tokens=tokens,
            heads=call.heads // split_heads,
            kv_heads=call.kv_heads // split_heads,
            head_dim=call.head_dim,
            itemsize=call.itemsize,
            devices=devices,
            causal=call.causal,
            windows_differ=call.layers is not None,
        )
        crosses = devices * model * mesh.shape[STAGE] > GPUS_OF_A_NODE
        asked = settings.context_parallel if choice is None else choice.way
        found = choose_way(asked, sizes, crosses_nodes=crosses)
        check_layout(mesh, call.layout)
        _check_implementation(found, call)
        choice = choice or found
    assert choice is not None
    split = ContextSplit(CONTEXT, devices, choice.way, heads_axis)
    parts = f"each device has {tokens // devices} of {tokens} tokens of each sequence"
    return split, [f"context={devices}: {parts}, {choice.order}", choice.reason]


def _of(trace: ModelTrace) -> tuple[Call, ...]:
    return trace.attention_calls


def _shape_of(microbatch: Batch) -> tuple[int, int]:
    """Returns (rows, tokens) of a batch whose arrays all have the shape [rows, tokens].

    Raises:
      ValueError: an array has another shape.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(microbatch)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            f"the batch has arrays of shapes {sorted(shapes)}; with context > 1 all must be "
            "[rows, tokens] of one length; use context=1"
        )
    rows, tokens = next(iter(shapes))
    return rows, tokens


def _check_implementation(choice: Choice, call: Call) -> None:
    """Raises if an attention call uses attention sinks or an implementation that the chosen method
    does not support."""
    is_set = call.why == SET_BY_CALL and call.implementation != "chunked"
    if call.has_sinks:
        raise ValueError(
            "context > 1 together with attention sinks is not supported, since each device would "
            "need the sinks of its own heads only; use context=1"
        )
    if choice.way == "ring" and is_set:
        raise ValueError(
            f"attention={call.implementation!r} cannot be combined with "
            "context_parallel='ring', which computes in "
            "chunks; use attention='chunked' or 'auto', or context_parallel='ulysses'"
        )
