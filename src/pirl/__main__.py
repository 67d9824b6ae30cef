"""`python -m pirl` is the `pirl` command."""

from pirl.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
