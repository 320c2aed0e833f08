"""The command line: `python -m soak --faults 1200 --seed 0 --out soak.jsonl`, or `--replay SEED:EPISODE`."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from soak.episode import Runner
from soak.plan import Episode, make_episode
from soak.summary import counted, summarize

_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_BIND = 0x1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=1200, help="end after at least so many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for one line of JSON per fault")
    parser.add_argument("--slots", type=int, default=3, help="episodes at the same time")
    parser.add_argument("--first", type=int, default=0, help="the first episode")
    parser.add_argument("--method", default="", help="only methods whose name starts with this")
    parser.add_argument("--replay", metavar="SEED:EPISODE", help="run one episode, and print its records")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.replay else logging.WARNING, format="%(message)s")
    episodes: Iterator[Episode]
    if args.replay:
        seed, _, index = args.replay.partition(":")
        episodes = iter([make_episode(int(seed), int(index))])
    else:
        all_episodes = (make_episode(args.seed, index) for index in itertools.count(args.first))
        episodes = (episode for episode in all_episodes if episode.row.startswith(args.method))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        _isolate(Path(folder))
        with Runner(Path(folder), 1 if args.replay else args.slots) as runner:
            lines = run(runner, episodes, args.faults, args.slots, args.out, verbose=bool(args.replay))
        left = runner.find_namespaces()
    print(f"\n{summarize(lines)}\n\n{time.monotonic() - start:.0f} s on {os.cpu_count()} cores")
    if left:
        print(f"left behind: processes in emulated networks: {left}")
    return 1 if left or any(line["verdict"] != "ok" for line in counted(lines)) else 0


def run(
    runner: Runner, episodes: Iterator[Episode], faults: int, slots: int, out: Path | None, *, verbose: bool = False
) -> list[dict[str, Any]]:
    """Runs episodes until so many faults have happened, and returns their records."""
    lines: list[dict[str, Any]] = []
    file = out.open("w") if out is not None else None
    with ThreadPoolExecutor(slots) as pool:
        running: set[Future[list[dict[str, Any]]]] = set()
        while True:
            while len(running) < slots and len(counted(lines)) < faults and (episode := next(episodes, None)):
                running.add(pool.submit(runner.run, episode))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                found = future.result()
                lines += found
                for line in found:
                    if file is not None:
                        file.write(json.dumps(line) + "\n")
                        file.flush()
                    if verbose or line["verdict"] not in ("ok", "superseded"):
                        print(json.dumps(line), flush=True)
                print(f"{len(counted(lines))} faults", file=sys.stderr, flush=True)
    if file is not None:
        file.close()
    return lines


def _isolate(folder: Path) -> None:
    """Gives this process its own list of mounts, so that none is left behind, however it ends.

    In it, no name is looked up on the network: torch asks for the name of every peer that connects to a store, and a
    DNS server that answers after five seconds would be taken for a store that does not.
    """
    names = folder / "nsswitch.conf"
    names.write_text("hosts: files\n")
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
        or libc.mount(os.fsencode(names), b"/etc/nsswitch.conf", None, _MS_BIND, None)
    ):
        raise SystemExit(f"the soak mounts file systems, and must run as root: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    sys.exit(main())
