"""`laconic` and `python -m laconic`: the command line, or what to install for it."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from laconic import cli
    except ModuleNotFoundError as missing:
        sys.exit(f"laconic: the command line needs more packages: pip install 'laconic[bench]' ({missing})")
    cli.main()


if __name__ == "__main__":
    main()
