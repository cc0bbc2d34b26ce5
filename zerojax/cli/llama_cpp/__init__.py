"""Conversion of llama.cpp files (GGUF) to Hugging Face folders."""

from zerojax.cli.llama_cpp.conversion import Converted, convert_gguf

__all__ = ["Converted", "convert_gguf"]
