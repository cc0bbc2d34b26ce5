"""Files of llama.cpp (GGUF) as folders of Hugging Face.

Knows both sides' names and settings; never a run, a plan or a mesh.
"""

from zerojax.llama_cpp.conversion import Converted, convert_gguf

__all__ = ["Converted", "convert_gguf"]
