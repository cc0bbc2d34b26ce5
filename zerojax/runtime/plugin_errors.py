"""Hides JAX's tracebacks about a CUDA plugin that cannot start because there is no GPU.

`zerojax[plan]` installs JAX's CUDA plugin in order to compile for GPUs. On a machine without a GPU,
JAX tries to start the plugin whenever it initializes devices, and logs the failure with a traceback
of about 18 lines. `zerojax env` lists the hidden errors.
"""

from __future__ import annotations

import logging
import os

from zerojax.runtime.process_group import visible_gpus

_LOGGER = "jax._src.xla_bridge"
"""Name of the logger through which JAX reports plugins that do not start."""
_BEGINNING = "Jax plugin configuration error"
_LONGEST = 200

_hidden: list[str] = []


class _HidePluginErrors(logging.Filter):
    """Log filter that drops errors of GPU plugins if this process sees no GPU."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(_BEGINNING) or visible_gpus(_environment()):
            return True
        _hidden.append(_one_line(record))
        return False


def _environment() -> dict[str, str]:
    """Returns the environment variables without JAX_PLATFORMS, which may exclude GPUs."""
    return {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}


def _one_line(record: logging.LogRecord) -> str:
    """Returns the message of a log record and the first line of its exception's text."""
    try:
        text = record.getMessage()
    except TypeError:  # JAX 0.10 logs this message without its argument
        text = str(record.msg)
    error = record.exc_info[1] if record.exc_info else None
    reason = "" if error is None else f": {str(error).splitlines()[0] if str(error) else error!r}"
    return (text + reason)[:_LONGEST]


_FILTER = _HidePluginErrors()


def hide_plugin_errors() -> None:
    """Hides errors of JAX's GPU plugins from now on if there is no GPU.

    Call it before JAX initializes its devices. If this process sees a GPU, errors are shown as JAX
    logs them, because they then explain why JAX does not use the GPU. Further calls have no effect.
    """
    logging.getLogger(_LOGGER).addFilter(_FILTER)


def hidden_plugin_errors() -> list[str]:
    """Returns one line for each error of a GPU plugin that was hidden in this process."""
    return list(dict.fromkeys(_hidden))
