"""The entry point of `laconic` and `python -m laconic`."""

from __future__ import annotations

import sys

from laconic.extras import MissingExtra, need


def main() -> None:
    """Runs the command line, or says what to install for it."""
    try:
        need("rich", "cli")
    except MissingExtra as missing:
        sys.exit(f"laconic: {missing} (with everything that comparisons need: 'laconic[bench]')")
    from laconic import cli

    cli.main()


if __name__ == "__main__":
    main()
