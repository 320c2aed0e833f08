"""The layout of packed codes, in plain torch; `kernels.bits` writes the same bytes."""

import torch
from torch import Tensor


def packed_nbytes(numel: int, width: int) -> int:
    return (numel * width + 7) // 8


def pack_fields(codes: Tensor, bits: int) -> Tensor:
    """Blocks of codes (blocks, block) as bytes (blocks, block·bits/8).

    A code of 8 bits is a byte. Others are cut into fields of 4, 2 and 1 bits, lowest bits first (3 = 2 + 1). A field of
    w bits is a plane in which byte i holds the field of codes i, i + n, i + 2n … for n = block·w/8.
    """
    if bits == 8:
        return codes
    planes, low = [], 0
    for width in (4, 2, 1):
        if bits & width:
            fields = ((codes >> low) & ((1 << width) - 1)).view(len(codes), 8 // width, codes.shape[1] * width // 8)
            shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)[:, None]
            planes.append((fields << shifts).sum(1, dtype=torch.uint8))
            low += width
    return torch.cat(planes, dim=1)


def unpack_fields(packed: Tensor, bits: int) -> Tensor:
    """The inverse: (blocks, block·bits/8) to (blocks, block)."""
    if bits == 8:
        return packed
    block = packed.shape[1] * 8 // bits
    codes = torch.zeros(packed.shape[0], block, dtype=torch.uint8, device=packed.device)
    start, low = 0, 0
    for width in (4, 2, 1):
        if bits & width:
            n = block * width // 8
            plane = packed[:, start : start + n]
            fields = [(plane >> (width * j)) & ((1 << width) - 1) for j in range(8 // width)]
            codes |= torch.cat(fields, dim=1) << low
            start += n
            low += width
    return codes


def pack_sequence(values: Tensor, width: int) -> Tensor:
    """Numbers of `width` bits one after the other, lowest bit first, in as few bytes as hold them."""
    bits = (values.to(torch.int64)[:, None] >> torch.arange(width, device=values.device)) & 1
    padded = torch.zeros(packed_nbytes(values.numel(), width) * 8, dtype=torch.int64, device=values.device)
    padded[: bits.numel()] = bits.flatten()
    return (padded.view(-1, 8) << torch.arange(8, device=values.device)).sum(1).to(torch.uint8)


def unpack_sequence(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse, as int64."""
    bits = (packed.to(torch.int64)[:, None] >> torch.arange(8, device=packed.device)) & 1
    return (bits.flatten()[: count * width].view(count, width) << torch.arange(width, device=packed.device)).sum(1)
