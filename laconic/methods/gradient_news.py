"""News of the mean gradient, which travels in the background: summed, sent, and heard of some steps later."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from laconic.method import Replica
from laconic.methods.carried import Carried, Codes
from laconic.methods.pieces import Piece

V = "exp_avg_sq"


class GradientNews(Carried):
    """Sums a worker's own gradients, and sends their mean since the last time."""

    def __init__(self, worker: Replica) -> None:
        self.total = torch.zeros_like(worker.x)  # of the own gradients since they were last sent (d)
        self._totals = worker.views(self.total)

    @abstractmethod
    def before_step(self, worker: Replica) -> None: ...

    def take(self, piece: Piece, part: slice) -> Tensor:
        total = self.total[part]
        mean = torch.empty_like(total)
        for (own, age), (summed, _) in zip(piece.by_age(mean), piece.by_age(total), strict=True):
            torch.div(summed, age, out=own)
        total.zero_()
        return mean

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        for name, vector in self.state_dict().items():
            vector.copy_(saved[name])


class Correction(GradientNews):
    """Gradients corrected by the stale mean gradient, so that workers with different data move alike.

    The idea of SCAFFOLD (Karimireddy et al., arXiv 1910.06378): g + (mean of what all had − what this worker had).
    """

    def __init__(self, worker: Replica) -> None:
        super().__init__(worker)
        self.shift = torch.zeros_like(worker.x)  # mean of all − own, as last known (d)
        self._shifts = worker.views(self.shift)

    def before_step(self, worker: Replica) -> None:
        for gradient, total, shift in zip(worker.gradients(), self._totals, self._shifts, strict=True):
            if gradient is not None:
                total += gradient
                gradient += shift

    def put(self, piece: Piece, part: slice, mean: Tensor, own: Tensor) -> None:
        torch.sub(mean, own, out=self.shift[part])

    def settle(self, piece: Piece, part: slice, codes: Codes) -> None:
        codes.settle(self.shift[part])

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self.total, "shift": self.shift}


class SecondMoment(GradientNews):
    """Adam's v as the mean gradient would make it, in workers that step with their own gradients.

    A worker's own gradient has more noise than the mean of all, so its own v is larger, up to n times, and by how much
    differs from coordinate to coordinate: the mean of the own steps is no step of Adam on the mean gradient. With a v
    that is that of the mean gradient it is one, for Adam is linear but for v.

    With μ the gradient and σ² an own one's noise, the own square is μ² + σ², that of the mean over n workers and k
    steps, which is heard of, μ² + σ²/(nk), and that of a step's mean gradient μ² + σ²/n: `own_share` of the first and
    the rest of the second.
    """

    @staticmethod
    def unfit(optimizer: torch.optim.Optimizer) -> str | None:
        """Why this cannot be done with the optimizer, if it cannot."""
        groups = optimizer.param_groups
        if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            return f"is for Adam and AdamW, not {type(optimizer).__name__}"
        if any(group["amsgrad"] for group in groups):
            return "needs amsgrad=False"
        if len(decays := {group["betas"][1] for group in groups}) > 1:
            return f"needs one beta2 for all parameter groups, not {sorted(decays)}"
        if any(group["weight_decay"] and not group["decoupled_weight_decay"] for group in groups):
            return "needs weight_decay=0 or AdamW: with Adam, v has the weights in it"
        return None

    def __init__(self, worker: Replica) -> None:
        super().__init__(worker)
        self.v = torch.zeros_like(worker.x)  # what v was made when news last came (d)
        self._worker = worker
        self._knows_v = False
        self._some_idle = False  # whether some parameter ever had no gradient

    def before_step(self, worker: Replica) -> None:
        if not self._knows_v:
            self._knows_v = True
            if V in (moments := worker.moments()):  # of an earlier training
                self.v.copy_(moments[V])
        for gradient, total in zip(worker.gradients(), self._totals, strict=True):
            if gradient is not None:
                total += gradient
            else:
                self._some_idle = True

    def put(self, piece: Piece, part: slice, mean: Tensor, own: Tensor) -> None:
        moments = self._worker.moments()
        if V not in moments:  # the first gradient is still to come
            return
        beta2 = self._worker.optimizer.param_groups[0]["betas"][1]
        for (now, age), (v, _), (news, _) in zip(
            piece.by_age(moments[V][part]), piece.by_age(self.v[part]), piece.by_age(mean), strict=True
        ):
            share, kept = own_share(self._worker.comm.size, age), beta2**age
            # Without a gradient, the optimizer leaves v alone.
            idle = (now == v) & (news == 0) if self._some_idle else None
            # kept · v + share · (now − kept · v), what the own gradients have added since, + the rest of the mean's
            v *= (1 - share) * kept
            v.add_(now, alpha=share).addcmul_(news, news, value=(1 - share) * (1 - kept))
            if idle is not None:
                torch.where(idle, now, v, out=v)
            now.copy_(v)

    def settle(self, piece: Piece, part: slice, codes: Codes) -> None:
        mean = codes.mean(part.stop - part.start)
        self.put(piece, part, mean, mean)  # what this rank said is no matter

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self.total, "v": self.v}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        super().load_state_dict(saved)
        self._knows_v = True


def own_share(workers: int, steps: int) -> float:
    """How much the own squares count beside the square of a mean over workers and steps: see `SecondMoment`.

    It would be 0 for one step; but where a gradient is too small for its code, v has to stay above 0.
    """
    return max(0.5 / workers, (steps - 1) / (workers * steps - 1))
