"""What is published about each kind of GPU, and how the compiler is told of it.

Knows numbers and their sources; never a model, and never JAX's devices.
"""

from zerojax.gpus.card import Gpu, Target
from zerojax.gpus.catalog import find_gpu, gpu_names, gpu_of_device
from zerojax.gpus.target import target_text

__all__ = ["Gpu", "Target", "find_gpu", "gpu_names", "gpu_of_device", "target_text"]
