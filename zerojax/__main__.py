"""Entry point of `python -m zerojax`."""

from zerojax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
