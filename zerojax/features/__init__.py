"""Optional features of a run, each in a folder: pruning, layer drop, 1-bit, equal bits."""
