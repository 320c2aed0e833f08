"""Speed of the compressors relative to a plain copy, in one thread.

    python benchmarks/compress/kernels.py > table.md

Every round runs each operation once untimed and once timed, with copies in between, so that all ratios come from one
interleaved run. Times are CPU time of the thread, which excludes waiting for a busy core; a cell is the median over
rounds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from laconic.compress import Compressor, encode_with_feedback, parse

SPECS = [
    "identity",
    "half",
    "half:bf16",
    "sign",
    "log:3",
    "log:4",
    "uniform:4",
    "uniform:8",
    "uniform:4:stochastic",
    "uniform:8:stochastic",
    "topk:0.01",
]
ENCODE_TARGETS = {
    "sign": 3,
    "log:3": 3,
    "log:4": 3,
    "uniform:4": 3,
    "uniform:8": 3,
    "topk:0.01": 8,
}
ENCODE_TARGETS |= {"uniform:4:stochastic": 6, "uniform:8:stochastic": 6}
DECODE_TARGET = 2
COPY_EVERY = 4


def operations(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Returns encode and decode of each compressor; all share one residual and one accumulator."""
    residual, accumulator = torch.zeros_like(x), torch.zeros_like(x)
    table: dict[str, Callable[[], object]] = {}
    for text in SPECS:
        compressor = parse(text)
        code = torch.empty(compressor.nbytes(x.numel()), dtype=torch.uint8)

        def encode(compressor: Compressor = compressor, code: torch.Tensor = code):
            encode_with_feedback(compressor, x, residual, out=code)

        def decode(compressor: Compressor = compressor, code: torch.Tensor = code):
            compressor.decode_add(code, accumulator, 0.125)

        table[f"{text} encode"], table[f"{text} decode"] = encode, decode
    return table


def measure(numel: int, rounds: int) -> dict[str, float]:
    """Returns the seconds of each operation, and of "copy"."""
    x, target = torch.randn(numel), torch.empty(numel)
    table = operations(x)
    for operation in table.values():
        operation()  # compiles the kernels
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *table)}

    def run(name: str, operation: Callable[[], object]) -> None:
        operation()
        start = time.thread_time()
        operation()
        seconds[name].append(time.thread_time() - start)

    for _ in range(rounds):
        for position, (name, operation) in enumerate(table.items()):
            if position % COPY_EVERY == 0:
                run("copy", lambda: target.copy_(x))
            run(name, operation)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def show(numel: int, seconds: dict[str, float]) -> None:
    copy = seconds["copy"]
    nbytes = 4 * numel
    print(f"\n{numel:,} floats; a copy takes {copy * 1e3:.3f} ms ({nbytes / copy / 1e9:.1f} GB/s)\n")
    print("| compressor | bits | encode ms | × copy | target | GB/s | decode-add ms | × copy | target | pays below |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for text in SPECS:
        compressor = parse(text)
        encode, decode = seconds[f"{text} encode"], seconds[f"{text} decode"]
        saved_bits = 8 * (nbytes - compressor.nbytes(numel))
        break_even = f"{saved_bits / (encode + decode) / 1e9:.1f} Gbit/s" if saved_bits else "–"
        target = ENCODE_TARGETS.get(text)
        print(
            f"| `{text}` | {8 * compressor.nbytes(numel) / numel:.3g} "
            f"| {encode * 1e3:.3f} | {ratio_cell(encode / copy, target)} | {target or '–'} "
            f"| {nbytes / encode / 1e9:.1f} "
            f"| {decode * 1e3:.3f} | {ratio_cell(decode / copy, DECODE_TARGET)} | {DECODE_TARGET} | {break_even} |"
        )


def ratio_cell(ratio: float, target: float | None) -> str:
    """Formats a ratio, in bold if it misses its target."""
    return f"**{ratio:.2f}**" if target is not None and ratio > target else f"{ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, nargs="+", default=[1 << 20, 1 << 24])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for numel in arguments.numel:
        show(numel, measure(numel, arguments.rounds))


if __name__ == "__main__":
    main()
