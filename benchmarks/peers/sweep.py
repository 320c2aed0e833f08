"""Peers at their best: sweeps the periods and rates of methods by others, beside laconic's, on an emulated network.

python benchmarks/peers/sweep.py run --out runs/peers --seconds 170   # repeat until it says that nothing is left
python benchmarks/peers/sweep.py table --out runs/peers

`run` needs the right to create network namespaces, and `pip install '.[bench,peers]'` for torchft. Runs that are in the
folder are not repeated, so that it can be done in parts of a few minutes on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from laconic.bench.record import Record, RunsFile
from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender
from laconic.tasks import Fashion

TARGET = 0.85
EQUAL = "+period=32+fragments=2+delay=8"  # the same settings for torchft and laconic
CONTENDERS = [
    "none",
    "none_averaged",
    "divisible",
    "local_sgd+compressor=Uniform(4)",
    # torchft and laconic at equal settings: streaming, and waiting.
    f"torchft_diloco{EQUAL}+mixing=0",
    f"diloco{EQUAL}+mixing=0",
    "torchft_diloco+period=32+fragments=1+delay=0",
    "diloco+period=32",
    # The period and the outer rate, of streaming DiLoCo ...
    f"torchft_diloco{EQUAL}+mixing=0+outer_lr=0.4",
    f"torchft_diloco{EQUAL}+mixing=0.5",
    f"torchft_diloco{EQUAL}+mixing=0.5+outer_lr=0.4",
    "torchft_diloco+period=16+fragments=2+delay=6+mixing=0",
    "torchft_diloco+period=16+fragments=2+delay=6+mixing=0+outer_lr=0.4",
    "torchft_diloco+period=64+fragments=2+delay=8+mixing=0",
    # ... of laconic's, quantized ...
    "diloco+period=8+compressor=Uniform(4)",
    "diloco+period=16+compressor=Uniform(4)",
    "diloco+period=32+compressor=Uniform(4)",
    "diloco+period=8+outer_lr=0.4+compressor=Uniform(4)",
    "diloco+period=8+fragments=4+delay=2+compressor=Uniform(4)",
    "diloco+period=8+fragments=4+delay=2+outer_lr=0.4+compressor=Uniform(4)",
    "diloco+period=8+fragments=4+delay=2+outer_momentum=0.5+compressor=Uniform(4)",
    # ... of SparseLoCo ...
    "sparseloco",
    "sparseloco+period=8",
    "sparseloco+period=4",
    "sparseloco+period=8+outer_lr=0.7",
    "sparseloco+period=8+kept=256",
    # ... and the rate of DeMo.
    "demo",
    "demo+rate=0.5",
    "demo+rate=0.25",
]


def run_missing(out: Path, seconds: float, link: str, steps: int, seeds: int, only: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    runs = RunsFile(out)
    done = {(record.name, record.seed) for record in runs.read()} if runs.path.exists() else set()
    end = time.monotonic() + seconds
    longest = 0.0
    for seed in range(seeds):
        for name in only or CONTENDERS:
            if (name, seed) in done:
                continue
            if time.monotonic() + longest > end:
                print("time is over: repeat the command for the rest")
                return
            start = time.monotonic()
            plan = Plan(Fashion(), workers=4, steps=steps, seed=seed, link=link, evaluations=30, target=TARGET)
            record = run(parse_contender(name), plan)
            runs.append(record)
            longest = max(longest, time.monotonic() - start)
            print(row(record) if record.status == "ok" else f"{name}: {record.reason}", flush=True)
    print("nothing is left")


def row(record: Record) -> str:
    point = record.reached(TARGET)
    assert record.step_time is not None
    nic = record.nic_nbytes_per_step or sum(record.payload_nbytes_per_step.values())
    reached = "– | –" if point is None else f"{point.seconds:.1f} | {point.step}"
    step = f"{1e3 * record.step_time.total:.1f} | {nic / 1e3:.0f}"
    return f"| {record.name} | {record.seed} | {reached} | {step} | {100 * (record.final() or 0):.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run that would end later")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="contenders, instead of the list above")
    options = parser.parse_args()
    if options.what == "run":
        run_missing(options.out, options.seconds, options.link, options.steps, options.seeds, options.only)
        return
    print("| contender | seed | s to 85 % | steps | ms a step | kB a step on the wire | final % |")
    print("|---|---|---|---|---|---|---|")
    for record in RunsFile(options.out).read():
        if record.status == "ok":
            print(row(record))


if __name__ == "__main__":
    main()
