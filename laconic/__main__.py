"""The entry point of `laconic` and `python -m laconic`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line, or says what to install for it."""
    try:
        from laconic import cli
    except ModuleNotFoundError as missing:
        sys.exit(f"laconic: the command line needs more packages: pip install 'laconic[bench]' ({missing})")
    cli.main()


if __name__ == "__main__":
    main()
