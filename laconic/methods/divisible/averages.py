"""The averages over all workers that a foreground block or a background piece needs, each made once."""

from __future__ import annotations

from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.comm.coded_mean import CodedMean, GatheredMean, PlainMean, block_of, split
from laconic.comm.solo import Arrived
from laconic.compress import Compressor, Uniform

FOREGROUND = Uniform(8)


class WaitedMean(PlainMean):
    """The same by the blocking verb, which sends short vectors straight to all ranks: two rounds, not 4(n − 1)."""

    def _start(self, sent: Tensor) -> Pending[Tensor]:
        return Arrived(self._comm.mean(sent))


class ForegroundAverages:
    """Averages of a block of moves. Blocks of one length share one: all but the last have the same.

    Args:
        is_quantized: 8 bits, from all to all; otherwise fp32.
    """

    def __init__(self, comm: Comm, *, is_quantized: bool) -> None:
        self._comm, self.is_quantized = comm, is_quantized
        self._made: dict[int, GatheredMean | PlainMean] = {}

    def get(self, numel: int) -> GatheredMean | PlainMean:
        if numel not in self._made and self.is_quantized:
            self._made[numel] = GatheredMean(self._comm, 0, numel, FOREGROUND, name="move")
        elif numel not in self._made:
            self._made[numel] = WaitedMean(self._comm, numel)
        return self._made[numel]


class BackgroundAverages:
    """Averages of a piece of moves or of gradients. A sweep repeats its pieces.

    Args:
        residuals: for two hops, what this rank, as an owner, has not passed on: of moves and, if they travel, of
            gradients.
    """

    def __init__(self, channel: Comm, residuals: list[Tensor | None]) -> None:
        self._channel, self._residuals = channel, residuals
        self._made: dict[tuple[int, int, Compressor | None, int, bool], CodedMean | PlainMean] = {}

    def get(self, piece: slice, code: Compressor | None, hops: int, *, is_move: bool) -> CodedMean | PlainMean:
        """Returns the average of a piece; with one hop messages go from all to all, with two through owners."""
        key = (piece.start, piece.stop, code, hops, is_move)
        if key not in self._made:
            self._made[key] = self.make(piece, code, hops, is_move=is_move)
        return self._made[key]

    def make(self, piece: slice, code: Compressor | None, hops: int, *, is_move: bool) -> CodedMean | PlainMean:
        name = "move" if is_move else "gradient"
        if code is None:
            return PlainMean(self._channel, piece.stop - piece.start)
        if hops == 1:
            return GatheredMean(self._channel, piece.start, piece.stop, code, name=name)
        parts = split(piece.start, piece.stop, range(self._channel.size), unit=block_of(code))
        mine = parts[self._channel.rank]
        residual = self._residuals[0 if is_move else 1]
        assert residual is not None  # there are two hops
        return CodedMean(self._channel, parts, code, owner_residual=residual[mine.start : mine.stop], name=name)

    def clear(self) -> None:
        """Forgets averages of pieces that were cut another way."""
        self._made.clear()
