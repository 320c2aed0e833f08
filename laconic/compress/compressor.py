"""What every compressor can do: turn a vector into a `uint8` code of known size and back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from laconic.compress.backend import kernels_for


class Compressor(ABC):
    """A frozen dataclass of settings without state; what varies over time is a function of `step`.

    A code is a flat `uint8` tensor with exactly `nbytes(numel)` bytes and nothing but data: the receiver must know the
    compressor, the number of entries and the step. Entries travel as fp32, whatever the dtype of `x`.
    """

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """The exact size of the code of `numel` entries."""

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """The code of `x`, in `out` if given. A nan or inf raises ValueError."""
        x = as_float32(x)
        out = self._place_for_code(x.numel(), x.device, out)
        self._encode(x, out, step)
        return out

    def decode(self, code: Tensor, numel: int, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """The vector that `code` stands for, in fp32, or in `out` and its dtype."""
        self._check_code(code, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=code.device)
        check_vector("out", out)
        if out.numel() != numel:
            raise ValueError(f"out must have {numel} entries, not {out.numel()}")
        target = out if out.dtype == torch.float32 else torch.empty(numel, dtype=torch.float32, device=code.device)
        self._decode(code, target, step)
        if target is not out:
            out.copy_(target)
        return out

    def decode_add(self, code: Tensor, accumulator: Tensor, scale: float = 1.0, *, step: int = 0) -> Tensor:
        """accumulator += scale · decoded, in place, in one pass over memory where a kernel can."""
        check_vector("accumulator", accumulator)
        self._check_code(code, accumulator.numel())
        if accumulator.dtype == torch.float32:
            self._decode_add(code, accumulator, scale, step)
        else:
            decoded = self.decode(code, accumulator.numel(), step=step)
            accumulator.add_(decoded.to(accumulator.dtype) * scale)
        return accumulator

    def decode_part(self, code: Tensor, numel: int, start: int, stop: int, *, step: int = 0) -> Tensor:
        """Entries `start` to `stop` of what `code` stands for, in fp32, without decoding all where blocks allow it."""
        self._check_code(code, numel)
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"start and stop must be in order and from 0 to {numel}, not {start} and {stop}")
        return self._decode_part(code, numel, start, stop, step)

    def encode_difference(self, x: Tensor, base: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """The code of x − base, in `out` if given, in one pass over memory where a kernel can."""
        for name, vector in (("x", x), ("base", base)):
            check_vector(name, vector)
        if x.numel() != base.numel():
            raise ValueError(f"x must have as many entries as base, {base.numel()}, not {x.numel()}")
        out = self._place_for_code(x.numel(), x.device, out)
        self._encode_difference(x.detach(), base.detach(), out, step)
        return out

    def settle(
        self,
        codes: Sequence[Tensor],
        weights: Sequence[float],
        own: int,
        x: Tensor,
        base: Tensor | None = None,
        *,
        step: int = 0,
    ) -> None:
        """Apply what workers said of their x − base, and `codes[own]` this one: in place, and in one pass over memory
        where a kernel can.

        With news = Σ weight · decoded, base += news, and x += news − what `codes[own]` says. Without a base, x becomes
        that. All who are given the same codes and base have the same base after it, to the last bit.
        """
        for name, vector in (("x", x), ("base", base)):
            if vector is not None:
                check_vector(name, vector)
                if vector.numel() != x.numel():
                    raise ValueError(f"base must have as many entries as x, {x.numel()}, not {vector.numel()}")
        for code in codes:
            self._check_code(code, x.numel())
        if len(weights) != len(codes) or not 0 <= own < len(codes):
            raise ValueError(
                f"each of {len(codes)} codes must have a weight and own be one of them, "
                f"not {len(weights)} weights and own={own}"
            )
        self._settle(codes, weights, own, x, base, step)

    def for_rank(self, rank: int) -> Self:
        """The same compressor with randomness of its own, where it has any that must differ among ranks."""
        return self

    def __str__(self) -> str:
        from laconic.compress.spec import spec  # spec knows all compressors, and they this class

        return spec(self)

    # The inner side: arguments have been checked; vectors are fp32, flat and contiguous.

    @abstractmethod
    def _encode(self, x: Tensor, out: Tensor, step: int) -> None: ...

    @abstractmethod
    def _decode(self, code: Tensor, target: Tensor, step: int) -> None: ...

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        decoded = torch.empty_like(target)
        self._decode(code, decoded, step)
        target.add_(decoded.mul_(scale))  # not add_(alpha=scale): that may fuse and round once instead of twice

    def _decode_part(self, code: Tensor, numel: int, start: int, stop: int, step: int) -> Tensor:
        return self.decode(code, numel, step=step)[start:stop]

    def _encode_difference(self, x: Tensor, base: Tensor, out: Tensor, step: int) -> None:
        self._encode((x - base).to(torch.float32), out, step)

    def _settle(
        self, codes: Sequence[Tensor], weights: Sequence[float], own: int, x: Tensor, base: Tensor | None, step: int
    ) -> None:
        news = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        for code, weight in zip(codes, weights, strict=True):
            self._decode_add(code, news, weight, step)
        said = self.decode(codes[own], x.numel(), step=step)
        if base is None:
            x.copy_(news - said)
        else:
            base += news
            x += news - said

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        """Without a kernel. `residual` may also be fp64: then the rounding to fp32 is fed back too."""
        p = residual if x is None else x + residual
        self._encode(p.to(torch.float32), out, step)
        decoded = torch.empty(p.numel(), dtype=torch.float32, device=p.device)
        self._decode(out, decoded, step)
        residual.copy_(p - decoded)

    def _place_for_code(self, numel: int, device: torch.device, out: Tensor | None) -> Tensor:
        if out is None:
            return torch.empty(self.nbytes(numel), dtype=torch.uint8, device=device)
        self._check_code(out, numel)
        return out

    def _check_code(self, code: Tensor, numel: int) -> None:
        if code.dtype != torch.uint8 or code.dim() != 1 or not code.is_contiguous():
            raise ValueError(f"a code must be a contiguous uint8 vector, not {code.dtype} of shape {tuple(code.shape)}")
        if code.numel() != self.nbytes(numel):
            raise ValueError(
                f"the code of {numel} entries by {self!r} must have {self.nbytes(numel)} bytes, not {code.numel()}"
            )


def as_float32(x: Tensor) -> Tensor:
    """`x` flat, contiguous and in fp32: itself if it is so already. Numbers beyond fp32 become inf."""
    if not x.dtype.is_floating_point:
        raise ValueError(f"x must be of a floating dtype, not {x.dtype}")
    return x.detach().reshape(-1).to(torch.float32).contiguous()


def check_vector(name: str, vector: Tensor) -> None:
    if not vector.dtype.is_floating_point or vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous floating vector, not {vector.dtype} of shape {tuple(vector.shape)}"
        )


def check_finite(x: Tensor) -> None:
    kernels = kernels_for(x)
    if not (kernels.dense.all_finite(x.numpy()) if kernels else bool(torch.isfinite(x).all())):
        raise not_finite(x)


def check_sum_finite(x: Tensor, residual: Tensor) -> None:
    kernels = kernels_for(x, residual)
    if not kernels:
        check_finite(x + residual)
    elif not kernels.dense.sum_is_finite(x.numpy(), residual.numpy()):
        raise not_finite(x + residual)


def not_finite(x: Tensor) -> ValueError:
    index = int((~torch.isfinite(x)).nonzero()[0])
    return ValueError(f"entries must be finite, but entry {index} of {x.numel()} is {x[index].item()}")


def view_as(code: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of `code` as numbers, without a copy where their address allows it."""
    if code.data_ptr() % dtype.itemsize or code.storage_offset() % dtype.itemsize:
        code = code.clone()
    return code.view(dtype)
