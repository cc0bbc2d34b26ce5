"""Explains errors that a user can correct, each as one line."""

from __future__ import annotations

import errno
import os

from zerojax.config.display import cut

PACKAGES = ("zerojax", "pallas_kernels")
OUT_OF_MEMORY = "out of memory"
"""First words of the note that `zerojax.forecasting.out_of_memory` adds to an error."""
_NOT_OF_INPUT = ("zerojax.hardware.compile_client",)
_BAD_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EROFS)
_BAD_PATHS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def explain(error: Exception) -> tuple[str | None, bool]:
    """Returns (one-line explanation of `error` for the user, whether the input was invalid).

    Errors that zerojax raises on purpose already contain their explanation. Errors of files,
    memory or a missing accelerator get one here. Any other error from another library is a bug of
    zerojax: the explanation is None, so that the traceback is shown.
    """
    if isinstance(error, OSError):
        return _about_file(error), isinstance(error, _BAD_PATHS) or error.errno in _BAD_NAMES
    if isinstance(error, ImportError):
        return _about_import(error), False
    if _is_ours(type(error)):
        ours = type(error).__module__ not in _NOT_OF_INPUT
        return str(error), getattr(error, "is_bad_input", ours)
    if _raising_module(error) in PACKAGES:
        if isinstance(error, ValueError | TypeError):
            return str(error), True
        if isinstance(error, FloatingPointError | RuntimeError):  # possible errors during a run
            return str(error), False
    return _about_machine(error), False


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in PACKAGES


def _raising_module(error: Exception) -> str:
    """Returns the name of the top-level package whose code raised `error`."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").split(".")[0]


def _about_file(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    reason = error.strerror or os.strerror(error.errno)
    if reason != os.strerror(error.errno):  # zerojax's own sentence
        return reason
    where = f"{cut(str(error.filename), 300)}: " if error.filename else ""
    remedy = {
        errno.ENOSPC: "; free some space or choose another folder, such as run_dir=runs/mine",
        errno.EACCES: "; choose a folder that you may write to, such as run_dir=runs/mine",
        errno.EPERM: "; choose a folder that you may write to, such as run_dir=runs/mine",
        errno.EROFS: "; choose a folder that you may write to, such as run_dir=runs/mine",
        errno.ENOTDIR: "; a part of this path is a file, so choose another folder",
        errno.EEXIST: "; choose another name",
    }
    return f"{where}{reason}{remedy.get(error.errno, '')}"


def _about_import(error: ImportError) -> str | None:
    """Explains a missing package; returns None for a broken import inside zerojax, which is a
    bug."""
    if (error.name or "").split(".")[0] in PACKAGES:
        return None
    return (
        str(error)
        if "pip install" in str(error)
        else f"{error}; `zerojax env` lists what is missing"
    )


def _about_machine(error: Exception) -> str | None:
    text = str(error)
    for note in getattr(error, "__notes__", ()):
        if note.startswith(OUT_OF_MEMORY):
            return note
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return (
            "out of memory; raise num_microbatches (activations), mesh.zero (state) or set "
            f"model.remat=full. {text.splitlines()[0] if text else ''}".rstrip()
        )
    if "Unable to initialize backend" in text or "Unknown backend" in text:
        return (
            f"JAX found no accelerator of the requested kind ({text.splitlines()[0]}); see "
            "`zerojax env`"
        )
    if isinstance(error, AssertionError) and not text and _raising_module(error) == "jax":
        # JAX 0.10 raises this when JAX_PLATFORMS names a platform without a plugin.
        platforms = os.environ.get("JAX_PLATFORMS")
        if platforms not in (None, "", "cpu"):
            return f"JAX_PLATFORMS={platforms} names no installed platform; see `zerojax env`"
    return None
