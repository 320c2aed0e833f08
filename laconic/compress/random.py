"""Random numbers without state: pure functions of (seed, step, index), the same on all devices and in all runs."""

import functools

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def splitmix64(value: int) -> int:
    """Returns the SplitMix64 hash of a 64-bit integer (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=1024)
def derive_key(*numbers: int) -> int:
    """Returns a 64-bit key that depends on all numbers and on their order."""
    key = 0
    for number in numbers:
        key = splitmix64(key ^ splitmix64(number & _MASK_64))
    return key


def uniform_noise(key: int, blocks: int, block: int, device: torch.device) -> Tensor:
    """Returns random numbers (blocks, block), uniform in [−½, ½), in fp32.

    Each is a hash of its index in the block, keyed by a hash of `key` + the block's number; `kernels/bits.py` has the
    same function as `hash32`. Block b with key k gets the numbers of block 0 with key k + b.
    """
    keys = _splitmix64(torch.arange(blocks, device=device)[:, None] + _signed(key))
    first, second = keys & _MASK_32, (keys >> 32) & _MASK_32
    h = (torch.arange(block, device=device) + first) & _MASK_32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK_32
    h = h ^ (h >> 15) ^ second
    h = (h * 0x846CA68B) & _MASK_32
    h = h ^ (h >> 16)
    signed = torch.where(h > 0x7FFFFFFF, h - (_MASK_32 + 1), h)
    return signed.to(torch.float32) * 2.0**-32


def _splitmix64(value: Tensor) -> Tensor:
    """`splitmix64` of each entry. 64-bit integers are signed in torch: products wrap around, and shifts are masked."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ ((value >> 30) & (_MASK_64 >> 30))) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ ((value >> 27) & (_MASK_64 >> 27))) * _signed(0x94D049BB133111EB)
    return value ^ ((value >> 31) & (_MASK_64 >> 31))


def _signed(value: int) -> int:
    """Returns the signed integer with the same 64 bits."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value
