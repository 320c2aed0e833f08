"""The interface of all compressors: a vector → a `uint8` code of known size → a vector."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from laconic.compress.backend import kernels_for


class Compressor(ABC):
    """Encodes vectors as bytes and decodes them again.

    A compressor is a frozen dataclass of settings and holds no state. Random numbers are a function of `step`.

    A code is a flat `uint8` tensor of exactly `nbytes(numel)` bytes without a header: the receiver must know the
    compressor, the number of entries and the step. Entries are encoded as fp32, whatever the dtype of `x`.

    A new compressor defines `nbytes`, `_encode` and `_decode`, and may override `_decode_add` and
    `_encode_with_feedback` with faster implementations that give the same bits.

    Example:
        >>> import torch
        >>> from laconic.compress import Log
        >>> compressor = Log(bits=3)
        >>> code = compressor.encode(torch.tensor([1.0, -0.6, 0.1, 0.0]))
        >>> code.dtype, code.numel(), compressor.nbytes(4)
        (torch.uint8, 6, 6)
        >>> compressor.decode(code, numel=4)
        tensor([ 1.0000, -0.5000,  0.0000,  0.0000])
    """

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Returns the exact size in bytes of the code of `numel` entries."""

    # Whether any vector gives a code and any bytes a vector, inside `unchecked`: then others may check values later.
    takes_anything: ClassVar[bool] = False

    @property
    def kernels(self) -> str | None:
        """The name of this compressor's numba kernels in `laconic.kernels.SETS`; None if it has none."""
        return None

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """Encodes `x`.

        Args:
            x: a tensor of any floating dtype; it is flattened and converted to fp32.
            step: the training step, on which random choices depend.
            out: where to write the code: a contiguous `uint8` vector of `nbytes(x.numel())` bytes. Default: a new one.

        Returns:
            The code.

        Raises:
            ValueError: an entry of `x` is NaN or infinite.
        """
        x = as_float32(x)
        out = self._check_or_allocate(out, x.numel(), x.device)
        self._encode(x, out, step)
        return out

    def decode(self, code: Tensor, numel: int, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """Decodes `code` into a vector.

        Args:
            code: what `encode` returned.
            numel: the number of entries that were encoded.
            step: the step at which they were encoded.
            out: where to write the entries: a contiguous floating vector of `numel` entries. Default: a new fp32 one.

        Returns:
            The decoded vector (numel).

        Raises:
            ValueError: `code` has the wrong size, or its bytes cannot come from `encode`.
        """
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
        """Adds the decoded vector to `accumulator` in place: accumulator += scale · decoded.

        Args:
            code: what `encode` returned.
            accumulator: a contiguous floating vector with as many entries as were encoded.
            scale: the factor of the decoded vector, e.g. 1/n for a mean over n workers.
            step: the step at which the code was made.

        Returns:
            `accumulator`.

        Raises:
            ValueError: as `decode`; `accumulator` is then unchanged.
        """
        check_vector("accumulator", accumulator)
        self._check_code(code, accumulator.numel())
        if accumulator.dtype == torch.float32:
            self._decode_add(code, accumulator, scale, step)
        else:
            decoded = self.decode(code, accumulator.numel(), step=step)
            accumulator.add_(decoded.to(accumulator.dtype) * scale)
        return accumulator

    def with_stream(self, number: int) -> Self:
        """Returns this compressor with an independent random stream.

        Ranks that round at random with the same stream would all err in the same direction, and the errors would not
        average out. A compressor without such randomness returns itself. Codes can be decoded without this.

        Args:
            number: the rank that encodes, or any other integer that no other encoder uses.

        Example:
            >>> from laconic.compress import Uniform
            >>> Uniform(8, stochastic=True).with_stream(0) == Uniform(8, stochastic=True).with_stream(1)
            False
            >>> Uniform(8).with_stream(1) == Uniform(8)
            True
        """
        return self

    def __str__(self) -> str:
        """Returns the text that `laconic.compress.parse` reads: the name, then the settings that are not the defaults.

        Example:
            >>> from laconic.compress import Uniform
            >>> str(Uniform(8, stochastic=True, seed=5))
            'uniform:8:stochastic:seed=5'
        """
        words = [type(self).__name__.lower()]
        for position, field in enumerate(settings_of(type(self))):
            value = getattr(self, field.name)
            if position == 0 and field.name in ("bits", "ratio"):
                words.append(str(value))
            elif value != field.default:
                positional = position == len(words) - 1 and field.name in ("stochastic", "format")
                words.append((field.name if value is True else str(value)) if positional else f"{field.name}={value}")
        return ":".join(words)

    # For subclasses. Arguments have been checked; vectors are flat, contiguous, detached and in fp32.

    @abstractmethod
    def _encode(self, x: Tensor, out: Tensor, step: int) -> None: ...

    @abstractmethod
    def _decode(self, code: Tensor, target: Tensor, step: int) -> None: ...

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        decoded = torch.empty_like(target)
        self._decode(code, decoded, step)
        target.add_(decoded.mul_(scale))  # not add_(alpha=scale): that may fuse and round once instead of twice

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        """Implements `encode_with_feedback` without a kernel.

        With an fp64 residual (and x), the error of rounding to fp32 is fed back too.
        """
        p = residual if x is None else x + residual
        self._encode(p.to(torch.float32), out, step)
        decoded = torch.empty(p.numel(), dtype=torch.float32, device=p.device)
        self._decode(out, decoded, step)
        residual.copy_(p - decoded)

    def _check_or_allocate(self, out: Tensor | None, numel: int, device: torch.device) -> Tensor:
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


def settings_of(cls: type[Compressor]) -> tuple[Field[Any], ...]:
    """Returns the dataclass fields of a compressor class, in order; all must have defaults."""
    settings: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    if missing := [field.name for field in settings if field.default is MISSING]:
        raise TypeError(f"every setting of a compressor must have a default; {cls.__name__}.{missing[0]} has none")
    return settings


def as_float32(x: Tensor) -> Tensor:
    """Returns `x` flat, contiguous, detached and in fp32, without a copy if possible. Values beyond fp32 become inf."""
    if not x.dtype.is_floating_point:
        raise ValueError(f"x must be of a floating dtype, not {x.dtype}")
    return x.detach().reshape(-1).to(torch.float32).contiguous()


def check_vector(name: str, vector: Tensor) -> None:
    """Raises ValueError unless `vector` is one-dimensional, contiguous and of a floating dtype."""
    if not vector.dtype.is_floating_point or vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous floating vector, not {vector.dtype} of shape {tuple(vector.shape)}"
        )


_CHECKS: ContextVar[bool] = ContextVar("laconic_checks", default=True)


@contextmanager
def unchecked() -> Iterator[None]:
    """Lets compressors without a kernel skip their checks of values, for which the host would wait for a device.

    Codes of vectors that are not finite, and vectors of bytes that are no code, are then without a meaning.
    """
    token = _CHECKS.set(False)
    try:
        yield
    finally:
        _CHECKS.reset(token)


def holds(condition: Callable[[], Tensor]) -> bool:
    """Returns whether a condition on values holds; True inside `unchecked`, where it is not computed."""
    return not _CHECKS.get() or bool(condition())


def check_finite(x: Tensor) -> None:
    """Raises ValueError if an entry of `x` is NaN or infinite."""
    kernels = kernels_for(x)
    if not (kernels.dense.all_finite(x.numpy()) if kernels else holds(lambda: torch.isfinite(x).all())):
        raise not_finite(x)


def check_sum_finite(x: Tensor, residual: Tensor) -> None:
    """Raises ValueError if an entry of x + residual is NaN or infinite."""
    kernels = kernels_for(x, residual)
    if not kernels:
        check_finite(x + residual)
    elif not kernels.dense.sum_is_finite(x.numpy(), residual.numpy()):
        raise not_finite(x + residual)


def not_finite(x: Tensor) -> ValueError:
    """Returns the error that names the first entry of `x` that is NaN or infinite."""
    index = int((~torch.isfinite(x)).nonzero()[0])
    return ValueError(f"entries must be finite, but entry {index} of {x.numel()} is {x[index].item()}")


def reinterpret(code: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bytes of `code` as numbers of `dtype`: a view if the address is aligned for it, else a copy."""
    if code.data_ptr() % dtype.itemsize or code.storage_offset() % dtype.itemsize:
        code = code.clone()
    return code.view(dtype)


def bits_per_entry(compressor: Compressor) -> float:
    """Returns the bits that an entry of a long vector takes, scales included.

    >>> from laconic.compress import Uniform
    >>> bits_per_entry(Uniform(4, block=64))
    4.5
    """
    numel = 1 << 20
    return round(8 * compressor.nbytes(numel) / numel, 1)
