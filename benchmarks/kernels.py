"""Speed of the compressors against a plain copy, one thread: `python benchmarks/kernels.py > table.md`.

Every round runs each operation once untimed and once timed, the copy several times among them, so that all ratios come
from one interleaved run. Times are processor time of the one thread, so that waiting for a busy processor does not
count; a cell is the median over rounds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from laconic.compress import Compressor, RandomBlock, encode_with_feedback, parse

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
    "randomblock:1024",
]
ENCODE_BARS = {
    "sign": 3,
    "log:3": 3,
    "log:4": 3,
    "uniform:4": 3,
    "uniform:8": 3,
    "topk:0.01": 8,
    "randomblock:1024": 0.1,
}
ENCODE_BARS |= {"uniform:4:stochastic": 6, "uniform:8:stochastic": 6}
DECODE_BAR = 2
COPY_EVERY = 4


def operations(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Both operations of each compressor; all share one residual and one accumulator, as the copy has one target."""
    residual, accumulator = torch.zeros_like(x), torch.zeros_like(x)
    table: dict[str, Callable[[], object]] = {}
    for text in SPECS:
        compressor = parse(text)
        code = torch.empty(compressor.nbytes(x.numel()), dtype=torch.uint8)
        # RandomBlock is made for residuals to which x has been added already; adding it costs a copy's time by itself.
        source = None if isinstance(compressor, RandomBlock) else x

        def encode(
            compressor: Compressor = compressor, source: torch.Tensor | None = source, code: torch.Tensor = code
        ):
            encode_with_feedback(compressor, source, residual, out=code)

        def decode(compressor: Compressor = compressor, code: torch.Tensor = code):
            compressor.decode_add(code, accumulator, 0.125)

        table[f"{text} encode"], table[f"{text} decode"] = encode, decode
    return table


def measure(numel: int, rounds: int) -> dict[str, float]:
    """Seconds of each operation, and of "copy"."""
    x, target = torch.randn(numel), torch.empty(numel)
    table = operations(x)
    for operation in table.values():
        operation()  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *table)}

    def run(name: str, operation: Callable[[], object]) -> None:
        operation()
        start = time.thread_time()
        operation()
        seconds[name].append(time.thread_time() - start)

    for _ in range(rounds):
        for place, (name, operation) in enumerate(table.items()):
            if place % COPY_EVERY == 0:
                run("copy", lambda: target.copy_(x))
            run(name, operation)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def show(numel: int, seconds: dict[str, float]) -> None:
    copy = seconds["copy"]
    nbytes = 4 * numel
    print(f"\n{numel:,} floats; a copy takes {copy * 1e3:.3f} ms ({nbytes / copy / 1e9:.1f} GB/s)\n")
    print("| compressor | bits | encode ms | × copy | bar | GB/s | decode-add ms | × copy | bar | pays below |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for text in SPECS:
        compressor = parse(text)
        encode, decode = seconds[f"{text} encode"], seconds[f"{text} decode"]
        saved_bits = 8 * (nbytes - compressor.nbytes(numel))
        line_rate = f"{saved_bits / (encode + decode) / 1e9:.1f} Gbit/s" if saved_bits else "–"
        bar = ENCODE_BARS.get(text)
        print(
            f"| `{text}` | {8 * compressor.nbytes(numel) / numel:.3g} "
            f"| {encode * 1e3:.3f} | {verdict(encode / copy, bar)} | {bar or '–'} | {nbytes / encode / 1e9:.1f} "
            f"| {decode * 1e3:.3f} | {verdict(decode / copy, DECODE_BAR)} | {DECODE_BAR} | {line_rate} |"
        )


def verdict(ratio: float, bar: float | None) -> str:
    return f"**{ratio:.2f}**" if bar is not None and ratio > bar else f"{ratio:.2f}"


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
