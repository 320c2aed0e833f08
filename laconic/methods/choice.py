"""What `Divisible` chooses where nothing is asked for: period and code, by the link and by what the data is like."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from laconic.comm import Comm
from laconic.compress import Compressor, Pick, Uniform
from laconic.methods.pace import Pace
from laconic.methods.steering import Steering

# The shortest periods that "auto" takes. Below, own work and messages take more from computing than freshness gives;
# freshness gives more where workers are seen to hold unlike data ("common").
LEAST_PLAIN, LEAST_CODED, LEAST_UNLIKE = 2, 4, 3
# Of the background, if none is asked for: the next where a link is too slow for the one before. Where workers are seen
# to hold unlike data, only the first two: others cost one or two points of accuracy there. The last one only after
# some steps in a row in which there was no sign of that: with it, it is seen much later.
CODES = (Uniform(bits=4), Uniform(bits=3), Pick(of=4), Pick(of=7))
FINE, SEEING = 2, 3  # so many of them do for unlike data; with so many it is seen
QUIET = 96
LOOKED = 192  # steps after which no better code is waited for
# The longest period for which "common" is the default: it knows only the latest gradients of a window, as m does. On
# unlike data that is still better than "local" for long.
LONGEST_COMMON, LONGEST_UNLIKE = 8, 32


class Choice(Pace):
    """`journey`: the steps that a piece is on its way, and the shortest period that there can be."""

    def __init__(
        self,
        comm: Comm,
        x: Tensor,
        background: Compressor | Literal["auto"] | None,
        journey: int,
        max_period: int,
        *,
        is_common: bool,
    ) -> None:
        least = LEAST_PLAIN if background is None else LEAST_CODED
        codes = CODES if background == "auto" and is_common else CODES[:1]
        sizes = [code.nbytes(x.numel()) for code in codes]
        super().__init__(comm, max(least, journey), max_period, sizes, SEEING, x.device)
        self._least_unlike = max(LEAST_UNLIKE, journey)
        self.has_seen_unlike = False

    @property
    def compressor(self) -> Compressor:
        return CODES[self.code]

    def follow_data(self, step: int, steering: Steering) -> bool:
        """Unlike data asks for a shorter period and finer codes; where it is alike, the coarsest will do. True when
        there may be another choice. On all ranks the same."""
        allowed = self.allowed
        if steering.data_is_unlike:
            self.has_seen_unlike = True
            self.lower(self._least_unlike)
            self.allow(min(FINE, self.allowed))
        elif steering.quiet >= QUIET and self.allowed == SEEING:
            self.allow(len(CODES))
        if step == LOOKED:
            self.hoped = self.allowed
        return self.allowed != allowed or step == LOOKED

    def look_no_more(self) -> None:
        """With "local" nothing more is seen of the data: coarse codes unless it was unlike so far."""
        if self.allowed >= SEEING:
            self.allow(len(CODES))

    def is_too_long_for_common(self, step: int) -> bool:
        """And will be: no coarser code can make it shorter."""
        has_chosen = self.is_settled and (self.allowed != SEEING or step >= LOOKED)
        return has_chosen and self.period > (LONGEST_UNLIKE if self.has_seen_unlike else LONGEST_COMMON)

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"has_seen_unlike": self.has_seen_unlike}
