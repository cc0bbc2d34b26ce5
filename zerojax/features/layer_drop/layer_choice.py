"""Decides whether a model's layers can be dropped (progressive layer drop), and which parameters
belong to them.

This module reads settings and the traced loss; `dropped_layers` rewrites the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zerojax.config import ConfigError, LayerDropConfig
from zerojax.config.batch_division import BatchDivision
from zerojax.config.late_dataclasses import dataclass
from zerojax.features.layer_drop.dropped_layers import find_layers
from zerojax.placement.state_layout import PipelineLayout
from zerojax.tracing.flops import count_program_flops, equation_flops
from zerojax.tracing.loops import find_stacks
from zerojax.tracing.protocol import Model
from zerojax.tracing.trace import ModelTrace

NEEDED_JAX = (0, 12)
"""Older versions of JAX copy the operands of a branch for the backward pass."""


@dataclass(frozen=True, kw_only=True)
class LayerDrop:
    """Progressive layer drop of a model.

    Attributes:
      config: settings of layer drop, which is always on here.
      num_layers: number of iterations of the loop over layers.
      stacks: names of the parameters with one row for each layer.
      layer_share: fraction of the forward pass's FLOPs that the layers compute.
      stages: numbers of the layers of each virtual pipeline stage; empty without a pipeline.
      division: division of a batch over data shards and microbatches.
    """

    config: LayerDropConfig
    num_layers: int
    stacks: frozenset[str]
    layer_share: float
    division: BatchDivision
    stages: tuple[range, ...] = ()

    @property
    def kept(self) -> float:
        """Expected fraction of layers that a step keeps, after many steps."""
        return self.config.kept(self.num_layers)

    def work(self, step: int | None = None) -> float:
        """Returns the expected FLOPs of a step, divided by the FLOPs of a step with all layers.

        Args:
          step: number of completed steps; None: after many steps.
        """
        return 1 - self.layer_share * (1 - self.config.kept(self.num_layers, step))

    def slowest(self) -> float:
        """Returns the expected largest number of layers that a virtual stage keeps, divided by the
        largest number that it has.

        A slot takes as long, because all stages wait for the slowest. With several chunks this is
        an upper bound, since only one chunk of a stage runs in a slot. Virtual stages keep layers
        independently of each other, because they run different layers.
        """
        theta, most = self.config.theta, max(map(len, self.stages))
        below = np.ones(most + 1)
        for layers in self.stages:
            chances = np.ones(1)
            for layer in layers:
                kept = 1 - (layer + 1) / self.num_layers * (1 - theta)
                chances = np.convolve(chances, [1 - kept, kept])
            padded = np.pad(chances, (0, most + 1 - len(chances)))
            below *= np.cumsum(padded)
        return float(np.sum(1 - below[:-1])) / most

    def times_used(self, name: str) -> float:
        """Returns the expected fraction of steps that read a parameter and reduce its gradient."""
        return self.kept if name in self.stacks else 1.0

    def describe(self) -> list[str]:
        """Returns the lines of the plan page about layer drop."""
        theta, layers = self.config.theta, self.num_layers
        lines = [
            f"layer drop: of {layers} layers, layer i is kept with probability 1 - i/{layers} x "
            f"(1 - theta), and theta falls from 1 to {theta:g}; after many steps, a step computes "
            f"{self.kept:.1%} of the layers, which FLOPs and communication of layers take into "
            "account",
        ]
        if self.stages:
            lines.append(
                f"layer drop: all stages wait for the slowest of {len(self.stages)} virtual stages "
                f"in each slot, which on average computes at most {self.slowest():.1%} of its "
                "layers; fewer stages with more layers each save more time"
            )
        if self.division.parts > 1 and self.division.shards > 1:
            lines.append(
                f"layer drop: each of {self.division.parts} microbatches draws its own layers, and "
                "which rows are in a microbatch depends on the number of data shards "
                f"({self.division.shards}): losses are equal only on meshes with as many"
            )
        if jax.__version_info__[:2] < NEEDED_JAX:
            lines.append(
                f"layer drop: JAX {jax.__version__} copies the weights of all layers for the "
                "backward pass; JAX 0.12 does not"
            )
        return lines


def plan_layer_drop(
    config: LayerDropConfig,
    model: Model,
    trace: ModelTrace,
    params: Mapping[str, Any],
    zero: int,
    pipeline: PipelineLayout | None,
    division: BatchDivision,
) -> LayerDrop:
    """Plans the layer drop of a run.

    Args:
      config: settings of layer drop, with a theta below 1.
      model: model that is trained.
      trace: trace of the loss of one microbatch.
      params: {name: shape and dtype of the parameter}.
      zero: ZeRO stage.
      pipeline: pipeline of the plan, if it has one.
      division: division of a batch over data shards and microbatches.

    Raises:
      ConfigError: the layers cannot be dropped; the message states the remedy.
    """
    if model.overwritten:
        raise _refusal(
            f"cannot be combined with the state {min(model.overwritten)}, whose new value is "
            "computed in "
            "every layer (matmul_dtype=fp8); use another matmul_dtype, or leave layer_drop out"
        )
    forward = trace.jaxpr
    try:
        scan = find_layers(forward, len(params))
    except ValueError as error:
        raise _refusal(str(error)) from error
    stacks = find_stacks(forward, sorted(params))
    for name in sorted(stacks):
        if zero > 1 and params[name].shape in trace.read_shapes.get(name, ()):
            raise _refusal(
                f"would not save the gather of {name}, which the loss reads before the loop over "
                f"layers, where zero={zero} gathers it; read it in the loop, as nnx.scan over "
                "modules and zerojax.Stages do, or use zero=1"
            )
    total = count_program_flops(forward)
    return LayerDrop(
        config=config,
        num_layers=scan.num_layers,
        stacks=stacks,
        layer_share=equation_flops(scan.equation) / total if total else 0.0,
        stages=() if pipeline is None else tuple(pipeline.stage_layers),
        division=division,
    )


def _refusal(text: str) -> ConfigError:
    return ConfigError(text, ("layer_drop", "theta"))
