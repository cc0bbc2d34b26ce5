"""Measurements of zerojax and of plain JAX doing the same, both in one run; see README.md.

Imports zerojax; nothing of zerojax imports it, and it is not part of the installed package.
"""

import os

# Containers often set it. Every process of a benchmark would compile all of zerojax's sources,
# which took 2.8 of the 3.0 CPU seconds of importing them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
