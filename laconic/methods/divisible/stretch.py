"""Stretches each worker's Adam step to the length that Adam would give it on the mean gradient of all workers.

Adam divides by √v. The gradient of one worker is noisier than the mean gradient of n workers, so its second moment V is
larger than the second moment v of the mean gradient, and plain local steps are too short: by up to √n, and by an amount
that differs between coordinates, so no learning rate compensates for it. Let a share κ of V (the coherence) be common
to all workers, and the rest noise that is independent between workers. A mean of n gradients divides the noise by n:

    v = V·(κ + (1 − κ)/n)      so the step is multiplied by      ρ = √(V/v) = 1/√(1 − (1 − 1/n)(1 − κ)),   1 ≤ ρ ≤ √n

A worker estimates κ alone: m averages about (1+β₁)/(1−β₁) gradients, in which independent noise nearly cancels. With Q
the running mean of m̂² (by β₂, as V is of g²), Q/V = κ + κ₀(1 − κ), where κ₀ = (1−β₁)/(1+β₁) is what noise leaves in m:

    1 − κ = (1 − Q/V)/(1 − κ₀)

Nothing of this travels. With one worker ρ is 1.

Where stretching all entries in every step would cost much of the computing (it reads four vectors), entries are
stretched only when they are sent, once a sweep of k steps, by k·(ρ − 1) times the present step: m changes little in a
sweep. On Fashion-MNIST that learns as well, on a small GPT a little less (docs).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.compress.backend import kernels_for
from laconic.forms import Each, Fields, Form, Whole, form_of
from laconic.method import Replica, mean_of

# Below this many entries a call of a kernel saves nothing.
LARGE = 1 << 12
LEAST_MOMENTUM = 0.1  # β₁ from which on m says more about the mean gradient than g
TINY = 1e-38  # where V is 0, Q and m are
COUNTS = ("counts", "seen")
SAMPLE = 1 << 14  # entries that metrics look at


class Place(NamedTuple):
    """Where a parameter is trained."""

    optimizer: int  # among those that are stretched
    group: int


class Settings(NamedTuple):
    """Adam's settings of a parameter that stretching depends on."""

    lr: float
    beta1: float
    beta2: float
    eps: float


class Factors(NamedTuple):
    """The numbers of one step, for parameters with the same settings and the same count of Adam steps."""

    rate: float  # lr / (1 − β₁ᵗ)
    unbias_v: float  # 1 / (1 − β₂ᵗ)
    eps: float
    slope: float  # (1 − 1/n) / (1 − κ₀)
    least: float  # 1/n: v is at least this share of V
    kept: float  # of Q, if it is refreshed in this step
    added: float  # of m² in Q: (1 − kept) / (1 − β₁ᵗ)²

    @classmethod
    def of(cls, settings: Settings, count: int, seen: int, steps: float, workers: int) -> Factors:
        """Returns the factors of Adam's step number `count`, for a Q that was refreshed `steps` steps ago.

        Q is an average with weights that sum to 1 from the first of the `seen` steps on, as Adam's V̂ is.

        >>> settings = Settings(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
        >>> [Factors.of(settings, count, seen=count, steps=1, workers=4).kept for count in (1, 1000)]
        [0.0, 0.9899995...]
        """
        lr, beta1, beta2, eps = settings
        c1, c2 = 1 - beta1**count, 1 - beta2**count
        kept = 1 - (1 - beta2 ** min(steps, seen)) / (1 - beta2**seen)
        slope = _slope(beta1, workers)
        return cls(lr / c1, 1 / c2, eps, slope, 1 / workers, kept, (1 - kept) / c1**2)


def _slope(beta1: float, workers: int) -> float:
    """Returns (1 − 1/n) / (1 − κ₀); with little momentum 0, so that ρ is 1: m is nearly g and says nothing of κ."""
    return (1 - 1 / workers) * (1 + beta1) / (2 * beta1) if beta1 >= LEAST_MOMENTUM else 0.0


def refresh(q: Tensor, m: Tensor, factors: Factors) -> None:
    """Adds the present m̂² to its running mean Q, in place."""
    q.mul_(factors.kept).add_((m * m).mul_(factors.added))


def stretch(x: Tensor, m: Tensor, v: Tensor, q: Tensor, factors: Factors) -> None:
    """Adds (ρ − 1) times the Adam step that has just been made, −rate·m/(√V̂ + eps), to x, in place."""
    v_hat = v * factors.unbias_v
    ratio = q / v_hat.clamp(min=TINY)
    share = 1 - (1 - ratio).mul_(factors.slope)  # v/V
    root = _sqrt(share.clamp_(factors.least, 1.0))  # 1/ρ
    denominator = _sqrt(v_hat).add_(factors.eps)
    x.sub_(((1 - root) * (m * factors.rate)).div_(root.mul_(denominator)))


def _sqrt(x: Tensor) -> Tensor:
    """Returns the correctly rounded square root, as compiled kernels do; torch's may differ in the last bit."""
    return x.double().sqrt().to(x.dtype)


class Stretch:
    """Stretches the steps of torch's Adam or AdamW, and keeps what that needs: one vector, two counts a parameter.

    Parameters that another kind of optimizer trains are left alone.
    """

    def __init__(self, worker: Replica) -> None:
        kind = torch.promote_types(worker.x.dtype, torch.float32)
        self.q = torch.zeros_like(worker.x, dtype=kind)  # running mean of m̂² (d)
        self.counts: list[int] = []  # of each parameter's Adam steps
        self.seen: list[int] = []  # the same since this object was made: the optimizer may have made steps before
        # Of each parameter, if Adam trains it. `optimizer.load_state_dict` replaces the groups themselves.
        self._optimizers = [optimizer for optimizer in worker.optimizers if is_adam(optimizer)]
        places = {
            id(p): Place(number, i)
            for number, optimizer in enumerate(self._optimizers)
            for i, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._places = [places.get(id(p)) for p in worker.parameters]
        self._numels = worker.numels
        self._workers = worker.comm.size
        self._moments: dict[str, Tensor] = {}  # the optimizers', from the first step on
        self._is_moved: list[bool] = []  # of each parameter, whether this step has moved it
        self._kernels = find_kernels(worker.x)

    def count(self, worker: Replica) -> None:
        """Counts the step just made."""
        self._workers = len(worker.counted)
        self._is_moved = [gradient is not None for gradient in worker.gradients()]
        self._moments = worker.moments()
        if not self._moments:
            self._is_moved = [False] * len(self._is_moved)
        if not any(self._is_moved):
            return  # no parameter has had a gradient yet, or this rank has run out of data
        if not self.counts:
            self.counts = [
                _steps_so_far(self._optimizers[place.optimizer], p) - (p.grad is not None) if place else 0
                for place, p in zip(self._places, worker.parameters, strict=True)
            ]
            self.seen = [0] * len(self.counts)
        for i, place in enumerate(self._places):
            if self._is_moved[i] and place is not None:
                self.counts[i] += 1
                self.seen[i] += 1

    def apply(self, worker: Replica, due: slice, steps: int, *, in_every_step: bool) -> None:
        """Refreshes Q in the entries `due`, last done `steps` steps ago, and stretches.

        In the first `steps` steps all of Q is refreshed: where Q is still 0, all would be taken for noise.

        Args:
            worker: this replica.
            due: entries.
            steps: of a sweep.
            in_every_step: whether the step just made is stretched, in all entries. Otherwise, in the entries that are
                due, as many like it as were made since.
        """
        if not any(self._is_moved):
            return
        vectors = worker.x, self._moments["exp_avg"], self._moments["exp_avg_sq"], self.q
        for part, factors, since in self._segments(steps, only_moved=in_every_step):
            now = slice(max(part.start, due.start), min(part.stop, due.stop))
            refreshed = part if factors.kept == 0 else now
            if refreshed.start < refreshed.stop:
                self._call("refresh", self.q[refreshed], vectors[1][refreshed], factors)
            if in_every_step:
                self._call("stretch", *(vector[part] for vector in vectors), factors)
            elif now.start < now.stop:
                longer = factors._replace(rate=since * factors.rate)
                self._call("stretch", *(vector[now] for vector in vectors), longer)

    def _segments(self, steps: int, *, only_moved: bool) -> Iterator[tuple[slice, Factors, float]]:
        """Yields neighbouring parameters with the same settings and counts, as one slice of x, and how many of the last
        `steps` steps have moved them.

        Args:
            steps: of a sweep.
            only_moved: leaves parameters out that this step has not moved. Otherwise a parameter that had gradients in
                a share of all steps so far is taken to have had them in that share of the last `steps`.
        """
        total, start = max(1, *self.seen), 0
        settings = {place: self._settings(place) for place in set(self._places) if place is not None}
        keys = [
            None if place is None or not (moved if only_moved else seen) else (settings[place], count, seen)
            for place, count, seen, moved in zip(self._places, self.counts, self.seen, self._is_moved, strict=True)
        ]
        for key, run in itertools.groupby(zip(keys, self._numels, strict=True), key=itemgetter(0)):
            stop = start + sum(numel for _, numel in run)
            if key is not None:
                own, count, seen = key
                since = float(min(steps, seen)) if only_moved else min(steps, total) * seen / total
                yield slice(start, stop), Factors.of(own, count, seen, since, self._workers), since
            start = stop

    def _settings(self, place: Place) -> Settings:
        """Returns the settings of an optimizer's group that stretching depends on: weight decay is none of them."""
        group = self._optimizers[place.optimizer].param_groups[place.group]
        beta1, beta2 = group["betas"]
        return Settings(float(group["lr"]), float(beta1), float(beta2), float(group["eps"]))

    def _call(self, name: str, *arguments: Any) -> None:
        *vectors, factors = arguments
        if self._kernels is not None and vectors[0].numel() >= LARGE:
            getattr(self._kernels, name)(*(vector.numpy() for vector in vectors), *factors)
            return
        wide = [vector if vector.dtype.itemsize >= 4 else vector.float() for vector in vectors]
        globals()[name](*wide, factors)
        if wide[0] is not vectors[0]:
            vectors[0].copy_(wide[0])

    def mean_stretch(self) -> float:
        """Returns the mean of ρ over some entries, for metrics; 1 before the first step."""
        of_adam = [place is not None for place in [*self._places, None]]
        first = of_adam.index(True)
        start, stop = (sum(self._numels[:i]) for i in (first, of_adam.index(False, first)))
        entries = slice(start, min(start + SAMPLE, stop))
        if not self._moments or not self.counts:
            return 1.0
        v = self._moments["exp_avg_sq"][entries].double()
        place = self._places[first]
        assert place is not None  # Adam trains it
        settings = self._settings(place)
        v_hat = v / (1 - settings.beta2 ** max(1, self.counts[first]))
        share = 1 - (1 - self.q[entries].double() / v_hat.clamp(min=TINY)) * _slope(settings.beta1, self._workers)
        return float(share.clamp_(1 / self._workers, 1.0).rsqrt_().mean())

    def state_dict(self) -> dict[str, Any]:
        return {"q": self.q, "counts": list(self.counts), "seen": list(self.seen)}

    def form(self) -> Form:
        """Returns what a saved state must look like, but for the lengths of its counts."""
        return Fields({"q": form_of(self.q, least=0), "counts": Each(Whole()), "seen": Each(Whole())})

    def check_state(self, what: str, saved: Any) -> None:
        self.form().check(what, saved)
        lengths = {len(saved["counts"]), len(saved["seen"])}
        if len(lengths) > 1 or not lengths <= {0, len(self._numels)}:
            raise ValueError(f"{what} must have one count for each of {len(self._numels)} parameters, not {lengths}")

    def merge(self, saved: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Returns the state in a run of another number of workers: the mean of Q, as the optimizer's V is averaged."""
        found = [one for one in saved if one is not None and one["counts"]]
        if not found:
            return {"q": torch.zeros_like(self.q), "counts": [], "seen": []}
        counts = {name: [max(of) for of in zip(*(one[name] for one in found), strict=True)] for name in COUNTS}
        return {"q": mean_of([one["q"] for one in found]), **counts}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.q.copy_(saved["q"])
        self.counts, self.seen = list(saved["counts"]), list(saved["seen"])


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether every step of this optimizer is one of torch's Adam or AdamW, without amsgrad.

    A subclass may step differently. (torch wraps `step` when the first optimizer of a class is made.)

    >>> is_adam(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    True
    """
    step = inspect.unwrap(type(optimizer).step)
    known = any(step is inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW))
    return known and not any(group["amsgrad"] for group in optimizer.param_groups)


def _steps_so_far(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> int:
    # .get: the optimizer's state is a defaultdict, and looking must not create entries.
    state = optimizer.state.get(parameter, {})
    return int(state["step"]) if "step" in state else 0


def find_kernels(x: Tensor) -> ModuleType | None:
    if kernels_for(x) is None:
        return None
    from laconic.methods.divisible import stretch_numba

    return stretch_numba
