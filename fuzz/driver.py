"""The loop that fuzzers share: cases with seeds of their own, until the time is over."""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
from collections.abc import Callable

HANG_SECONDS = 60.0  # for one case, after which the stacks of all threads are written and the process ends


def main(name: str, try_case: Callable[[random.Random], None]) -> None:
    """Tries cases until the time is over. `try_case` raises an AssertionError for an input that breaks a promise."""
    parser = argparse.ArgumentParser(prog=f"python -m fuzz.{name}")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="try only this case")
    args = parser.parse_args()
    start, case = time.monotonic(), 0 if args.case is None else args.case
    while True:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        if sys.stderr.isatty() or case % 1000 == 0:  # near the case at which the process crashes, if it does
            print(f"\r{name}: case {case}", end="", file=sys.stderr, flush=True)
        try:
            try_case(random.Random(f"{args.seed}/{case}"))
        except BaseException:
            print(f"\nfound: python -m fuzz.{name} --seed {args.seed} --case {case}", flush=True)
            raise
        case += 1
        if args.case is not None or time.monotonic() - start > args.seconds:
            break
    faulthandler.cancel_dump_traceback_later()
    print(f"\r{name}: {case} cases in {time.monotonic() - start:.0f} s, seed {args.seed}: nothing found")
