"""What `python -m zerojax` runs.

Knows the command line's entry point and nothing else.
"""

from zerojax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
