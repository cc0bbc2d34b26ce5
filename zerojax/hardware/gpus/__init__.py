"""Published specifications of GPUs, and the description of each GPU that the compiler reads."""

from zerojax.hardware.gpus.card import Gpu, Target
from zerojax.hardware.gpus.catalog import find_gpu, gpu_names, gpu_of_device, named_gpu
from zerojax.hardware.gpus.target import target_text

__all__ = ["Gpu", "Target", "find_gpu", "gpu_names", "gpu_of_device", "named_gpu", "target_text"]
