"""Randomness without state: numbers as a function of (seed, step, index), the same on all devices and in all runs."""

import functools

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF


def splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _LONG
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=1024)
def mix(*numbers: int) -> int:
    """A key of 64 bits that depends on all numbers and on their order."""
    key = 0
    for number in numbers:
        key = splitmix64(key ^ splitmix64(number & _LONG))
    return key


def permuted(position: int, size: int, key: int) -> int:
    """Where a random permutation of range(size) sends `position`: a Feistel network, repeated until it lands inside."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for rounds in range(4):
            left, right = right, left ^ (splitmix64(key ^ (right << 2 | rounds)) & mask)
        position = left << half | right
        if position < size:
            return position


def chances(key: int, blocks: int, block: int, device: torch.device) -> Tensor:
    """Uniform in ±½, (blocks, block): a hash of the index in the block, keyed by a hash of `key` and the block."""
    keys = [splitmix64((key + b) & _LONG) for b in range(blocks)]
    first = torch.tensor([k & _WORD for k in keys], dtype=torch.int64, device=device)[:, None]
    second = torch.tensor([k >> 32 for k in keys], dtype=torch.int64, device=device)[:, None]
    h = (torch.arange(block, device=device) + first) & _WORD
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _WORD
    h = h ^ (h >> 15) ^ second
    h = (h * 0x846CA68B) & _WORD
    h = h ^ (h >> 16)
    signed = torch.where(h > 0x7FFFFFFF, h - (_WORD + 1), h)
    return signed.to(torch.float32) * 2.0**-32
