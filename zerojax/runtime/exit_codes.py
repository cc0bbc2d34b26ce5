"""Exit statuses of a run."""

OK = 0
FAILED = 1
BAD_INPUT = 2
"""The same command fails again; starting it again is of no use."""
DIFFERS = 4
"""`zerojax check`: runs of a model differ, or it is refused."""
SAVED_AND_STOPPED = 75
"""A signal asked for the end and everything is saved: the same command goes on. It is the number of
sysexits.h for a failure that passes, which schedulers are often told to requeue."""
HUNG = 79
"""The watchdog ended a step that did not come to its end."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it. Another signal n, with nothing saved, is 128 + n."""
