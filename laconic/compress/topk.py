"""`TopK`: the entries of largest magnitude, with their indices."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.compress import packing
from laconic.compress.backend import kernels_for
from laconic.compress.compressor import Compressor, check_finite, not_finite
from laconic.compress.dense import Identity
from laconic.compress.quantizers import Sign
from laconic.rules import check_choice, check_number

EXACT, SIGNS = Identity(), Sign(block=512)  # of the values that are sent


class _Sections(NamedTuple):
    """The number of entries k, and the byte offsets at which the three sections of a code end.

    The sections are the k values, the lowest `low_bits` bits of the k sorted indices, and the Elias–Fano bitmap
    of the indices' high bits: bit (index >> low_bits) + position is set.
    """

    k: int
    low_bits: int
    values_end: int
    low_bits_end: int
    bitmap_end: int


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the k = max(1, round(ratio·numel)) entries of largest magnitude; the others decode to 0.

    Among entries of equal magnitude the first are sent. The sorted indices are Elias–Fano coded in about
    2 + log2(1/ratio) bits each, within half a bit of the information-theoretic minimum.

    Args:
        ratio: the fraction of entries that is sent, above 0 and at most 1.
        bits: 32 sends their values in fp32; 1 sends signs, and the mean magnitude of every 512 of them (`Sign`).

    Example:
        >>> import torch
        >>> from laconic.compress import TopK
        >>> compressor = TopK(ratio=0.5)
        >>> compressor.decode(compressor.encode(torch.tensor([0.1, -3.0, 2.0, 0.5])), 4)
        tensor([ 0., -3.,  2.,  0.])

    References:
        Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv 1704.05021.

        Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", J. ACM 21(2), 1974.
    """

    ratio: float = 0.01
    bits: int = 32

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, most=1, above=0)
        check_choice("bits", self.bits, (1, 32))

    @property
    def _values(self) -> Compressor:
        return SIGNS if self.bits == 1 else EXACT

    def _sections(self, numel: int) -> _Sections:
        if numel == 0:
            return _Sections(0, 0, 0, 0, 0)
        k = max(1, round(self.ratio * numel))
        low_bits = int(math.log2(numel // k))
        values_end = self._values.nbytes(k)
        low_bits_end = values_end + packing.packed_nbytes(k, low_bits)
        bitmap_end = low_bits_end + packing.packed_nbytes(k + ((numel - 1) >> low_bits), 1)
        return _Sections(k, low_bits, values_end, low_bits_end, bitmap_end)

    @property
    def kernels(self) -> str:
        return "topk" if self.bits == 32 else "topk signs"

    def nbytes(self, numel: int) -> int:
        return self._sections(numel).bitmap_end

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
        self._write(values, indices, out, residual.numel())
        sent = self._values.decode(out[: self._values.nbytes(values.numel())], values.numel())
        residual[indices] = values - sent

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        values, indices = self._read(code, target.numel())
        target.zero_()
        target[indices] = values

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        values, indices = self._read(code, target.numel())
        target.index_add_(0, indices, values.mul_(scale))

    def _select(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the sorted indices of the k largest entries of x (+ residual); raises if an entry is not finite."""
        k = self._sections(x.numel()).k
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
        k, low_bits, values_end, low_bits_end, bitmap_end = self._sections(numel)
        self._values.encode(values, out=out[:values_end])
        kernels = kernels_for(out)
        if kernels:
            lows, bitmap = out[values_end:low_bits_end].numpy(), out[low_bits_end:].numpy()
            kernels.topk.pack_indices(indices.numpy(), low_bits, lows, bitmap)
            return
        if low_bits:
            out[values_end:low_bits_end] = packing.pack_sequence(indices & ((1 << low_bits) - 1), low_bits)
        flags = torch.zeros(8 * (bitmap_end - low_bits_end), dtype=torch.uint8, device=out.device)
        flags[(indices >> low_bits) + torch.arange(k, device=out.device)] = 1
        out[low_bits_end:] = packing.pack_sequence(flags, 1)

    def _read(self, code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns the values and the sorted indices in `code`; raises if its bytes are not a valid code."""
        k, low_bits, values_end, low_bits_end, _ = self._sections(numel)
        values = self._values.decode(code[:values_end], k)
        kernels = kernels_for(code)
        if kernels:
            indices = torch.empty(k, dtype=torch.int64)
            lows, bitmap = code[values_end:low_bits_end].numpy(), code[low_bits_end:].numpy()
            valid = kernels.topk.unpack_indices(lows, bitmap, low_bits, numel, indices.numpy())
        else:
            flags = packing.unpack_sequence(code[low_bits_end:], 1, 8 * (code.numel() - low_bits_end))
            positions = flags.nonzero().flatten()
            valid = positions.numel() == k
            if valid:
                indices = (positions - torch.arange(k, device=code.device)) << low_bits
                if low_bits:
                    indices |= packing.unpack_sequence(code[values_end:low_bits_end], low_bits, k)
                valid = bool((indices < numel).all() and (indices.diff() > 0).all())
        if not valid:
            raise ValueError(f"the code is damaged: its indices are not {k} ascending numbers below {numel}")
        return values, indices
