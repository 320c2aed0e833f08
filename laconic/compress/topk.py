"""`TopK`: the entries of largest magnitude, with their indices."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.compress import packing
from laconic.compress.backend import kernels_for
from laconic.compress.compressor import Compressor, check_finite, not_finite


class Layout(NamedTuple):
    """Where the parts of a code end: k values in fp32, low bits of their indices, Elias–Fano bitmap of the rest."""

    k: int
    low_bits: int
    values_end: int
    lows_end: int
    end: int


@dataclass(frozen=True)
class TopK(Compressor):
    """Exactly round(ratio·numel) entries, at least one: the largest in magnitude, of equals the first, in fp32.

    Sorted indices cost about 2 + log2(1/ratio) bits each (Elias–Fano), within half a bit of the least possible.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"ratio must be above 0 and at most 1, not {self.ratio}")

    def _layout(self, numel: int) -> Layout:
        if numel == 0:
            return Layout(0, 0, 0, 0, 0)
        k = max(1, round(self.ratio * numel))
        low_bits = int(math.log2(numel // k))
        lows_end = 4 * k + packing.packed_nbytes(k, low_bits)
        return Layout(k, low_bits, 4 * k, lows_end, lows_end + packing.packed_nbytes(k + ((numel - 1) >> low_bits), 1))

    def nbytes(self, numel: int) -> int:
        return self._layout(numel).end

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        indices = self._select(x, None)
        self._write(x[indices], indices, out, x.numel())

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(residual, out)
        if not kernels:
            super()._encode_with_feedback(x, residual, out, step)
            return
        indices = self._select(residual if x is None else x, None if x is None else residual)
        if x is not None:
            kernels.topk.add_into(residual.numpy(), x.numpy())
        values = residual[indices]
        residual[indices] = 0.0
        self._write(values, indices, out, residual.numel())

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        values, indices = self._read(code, target.numel())
        target.zero_()
        target[indices] = values

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        values, indices = self._read(code, target.numel())
        target.index_add_(0, indices, values.mul_(scale))

    def _select(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Indices of the entries to send, ascending; raises unless all entries are finite."""
        k = self._layout(x.numel()).k
        kernels = kernels_for(x)
        if kernels:
            indices = torch.empty(k, dtype=torch.int64)
            other = x if residual is None else residual
            if not kernels.topk.select(x.numpy(), other.numpy(), residual is not None, indices.numpy()):
                raise not_finite(x if residual is None else x + residual)
            return indices
        check_finite(x)
        magnitude = x.abs()
        limit = magnitude.topk(k).values.min() if k else magnitude.new_tensor(0.0)
        above = (magnitude > limit).nonzero().flatten()
        equal = (magnitude == limit).nonzero().flatten()[: k - above.numel()]
        return torch.cat([above, equal]).sort().values

    def _write(self, values: Tensor, indices: Tensor, out: Tensor, numel: int) -> None:
        k, low_bits, values_end, lows_end, end = self._layout(numel)
        out[:values_end] = values.view(torch.uint8)
        kernels = kernels_for(out)
        if kernels:
            kernels.topk.pack_indices(
                indices.numpy(), low_bits, out[values_end:lows_end].numpy(), out[lows_end:].numpy()
            )
            return
        if low_bits:
            out[values_end:lows_end] = packing.pack_sequence(indices & ((1 << low_bits) - 1), low_bits)
        bitmap = torch.zeros(8 * (end - lows_end), dtype=torch.uint8, device=out.device)
        bitmap[(indices >> low_bits) + torch.arange(k, device=out.device)] = 1
        out[lows_end:] = packing.pack_sequence(bitmap, 1)

    def _read(self, code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        k, low_bits, values_end, lows_end, _ = self._layout(numel)
        values = code[:values_end].clone().view(torch.float32)
        check_finite(values)
        kernels = kernels_for(code)
        if kernels:
            indices = torch.empty(k, dtype=torch.int64)
            lows, highs = code[values_end:lows_end].numpy(), code[lows_end:].numpy()
            valid = kernels.topk.unpack_indices(lows, highs, low_bits, numel, indices.numpy())
        else:
            bitmap = packing.unpack_sequence(code[lows_end:], 1, 8 * (code.numel() - lows_end))
            places = bitmap.nonzero().flatten()
            valid = places.numel() == k
            if valid:
                indices = (places - torch.arange(k, device=code.device)) << low_bits
                if low_bits:
                    indices |= packing.unpack_sequence(code[values_end:lows_end], low_bits, k)
                valid = bool((indices < numel).all() and (indices.diff() > 0).all())
        if not valid:
            raise ValueError(f"the indices in this code are not {k} ascending ones below {numel}")
        return values, indices
