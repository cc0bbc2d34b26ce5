"""Prints the files of zerojax in which one parameter is handed on by its name, in order.

    python tests/support/route_process.py FOLDER

Two steps of a small GPT-2 at stage 3 on 8 virtual CPU devices, with a checkpoint in FOLDER. A
parameter is handed to a function that is given its name, a dict with that key, or its placement.
"""

import os
import sys
from types import FrameType
from typing import Any

import jax
import numpy as np

import zerojax
from zerojax.config import ModelConfig
from zerojax.placement.leaf_placement import LeafPlacement

NAME = "blocks/mlp/up/kernel"
ROOT = os.path.dirname(zerojax.__file__)


class Route:
    """The files, each where it is first handed the parameter, and the moves between two files."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.moves = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_handed(frame.f_locals.get(name)) for name in arguments):
            file = os.path.relpath(code.co_filename, ROOT)
            self.files[file] = None
            self.moves += file != self._last
            self._last = file


def is_handed(value: Any) -> bool:
    """Whether a value is the parameter's name, placement, or a dict that has it."""
    if isinstance(value, dict):
        return NAME in value
    if isinstance(value, LeafPlacement):
        return value.name == NAME
    return isinstance(value, str) and value == NAME


def batch(number: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(number).integers(0, 64, (8, 17), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def main(folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    config = ModelConfig(num_layers=2, num_heads=2, embed_dim=32, max_seq_len=16)
    model = zerojax.zoo.build_model(config, 64)
    mesh = {"zero": 3, "persistence_threshold": 0}
    route = Route()
    sys.setprofile(route)
    zerojax.train(model, mesh, batch, steps=2, checkpoint=folder)
    sys.setprofile(None)
    print("ROUTE", *route.files)
    print("MOVES", route.moves)


if __name__ == "__main__":
    main(sys.argv[1])
