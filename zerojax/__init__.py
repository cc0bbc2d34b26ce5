"""The public face: every name a user needs, imported when it is first asked for.

Knows where each public name lives; imports nothing at once, so that `zerojax --help` and
`import zerojax` do not wait for JAX.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME_OF_NAME: dict[str, str] = {}

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    """Imports the module a public name lives in (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
