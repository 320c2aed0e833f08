"""Packs integers of a few bits into bytes, in plain torch; `kernels/bits.py` writes the same bytes."""

import torch
from torch import Tensor


def packed_nbytes(numel: int, width: int) -> int:
    """Returns the bytes that `numel` integers of `width` bits take, rounded up."""
    return (numel * width + 7) // 8


def pack_fields(symbols: Tensor, bits: int) -> Tensor:
    """Packs full blocks of integers so that both packing and unpacking vectorize.

    Integers of 8 bits are stored as they are. Others are split into fields of 4, 2 and 1 bits, lowest bits first
    (3 = 2 + 1). A field of w bits becomes a plane of n = block·w/8 bytes; byte i of the plane holds the field of
    integers i, i + n, i + 2n, …, lowest bits first.

    Args:
        symbols: (blocks, block) uint8, each below 2^bits.
        bits: the width of an integer, 1 to 8.

    Returns:
        (blocks, block·bits/8) uint8.
    """
    if bits == 8:
        return symbols
    planes, low = [], 0
    for width in (4, 2, 1):
        if bits & width:
            fields = (symbols >> low) & ((1 << width) - 1)
            fields = fields.view(len(symbols), 8 // width, symbols.shape[1] * width // 8)
            shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=symbols.device)[:, None]
            planes.append((fields << shifts).sum(1, dtype=torch.uint8))
            low += width
    return torch.cat(planes, dim=1)


def unpack_fields(packed: Tensor, bits: int) -> Tensor:
    """Inverts `pack_fields`: (blocks, block·bits/8) → (blocks, block)."""
    if bits == 8:
        return packed
    block = packed.shape[1] * 8 // bits
    symbols = torch.zeros(packed.shape[0], block, dtype=torch.uint8, device=packed.device)
    start, low = 0, 0
    for width in (4, 2, 1):
        if bits & width:
            n = block * width // 8
            plane = packed[:, start : start + n]
            fields = [(plane >> (width * j)) & ((1 << width) - 1) for j in range(8 // width)]
            symbols |= torch.cat(fields, dim=1) << low
            start += n
            low += width
    return symbols


def pack_sequence(values: Tensor, width: int) -> Tensor:
    """Packs integers of `width` bits one after the other, lowest bit first: (count) → (packed_nbytes(count, width))."""
    bits = (values.to(torch.int64)[:, None] >> torch.arange(width, device=values.device)) & 1
    padded = torch.zeros(packed_nbytes(values.numel(), width) * 8, dtype=torch.int64, device=values.device)
    padded[: bits.numel()] = bits.flatten()
    return (padded.view(-1, 8) << torch.arange(8, device=values.device)).sum(1).to(torch.uint8)


def unpack_sequence(packed: Tensor, width: int, count: int) -> Tensor:
    """Inverts `pack_sequence`; returns int64 (count)."""
    bits = (packed.to(torch.int64)[:, None] >> torch.arange(8, device=packed.device)) & 1
    return (bits.flatten()[: count * width].view(count, width) << torch.arange(width, device=packed.device)).sum(1)
