"""Adam on the mean gradient, a few steps late, in workers that go ahead of it with their own gradients.

All ranks hold the same x̂, m̂ and v̂, as of some step. Since then each has made its own steps, in its own x, m and v.
Of these only one thing is sent: what the own gradients have added to m. From its mean follows what Adam would have made
of the mean gradient, all ranks alike; that takes the place of the own steps, and the worker goes ahead from there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.compress.backend import kernels_for
from laconic.compress.blockwise import Blockwise
from laconic.compress.compressor import Compressor, not_finite
from laconic.compress.quantizers import Sign
from laconic.method import Replica
from laconic.methods.carried import Carried, Codes
from laconic.methods.pieces import Piece
from laconic.methods.ranges import Ranges, seen_from
from laconic.methods.steering import Steering
from laconic.methods.windows import BLOCK, Cut, Run, Step, Vectors, Window, gain, in_m, least_units, make_up, units

M, V = "exp_avg", "exp_avg_sq"
LARGE = 1 << 10  # from here on the compiled kernels save more than it takes to load them
LOOKED_AT = 256  # coordinates, spread over all of x, in which others' changes are looked for before each step


class CommonAdam(Carried):
    """Sends, for each coordinate, what the own gradients have added to m since its last turn."""

    @staticmethod
    def unfit(optimizer: torch.optim.Optimizer) -> str | None:
        """Why this cannot be done with the optimizer, if it cannot."""
        if not makes_steps_of_adam(optimizer):
            return f"is for Adam and AdamW, not {type(optimizer).__name__}"
        if any(group["amsgrad"] for group in optimizer.param_groups):
            return "needs amsgrad=False"
        if any(group["eps"] <= 0 for group in optimizer.param_groups):
            return "needs eps above 0: where nothing was told yet, m and v are 0"
        if any(p.dtype == torch.float16 for group in optimizer.param_groups for p in group["params"]):
            return "needs numbers of a wider range than float16"
        return None

    @staticmethod
    def settings(optimizer: torch.optim.Optimizer) -> str:
        """What else must be the same on all ranks. (What may change from step to step is compared in each: `Step`.)"""
        names = ("decoupled_weight_decay", "maximize")
        return ", ".join(str({name: group[name] for name in names}) for group in optimizer.param_groups)

    def __init__(self, worker: Replica, x_hat: Tensor) -> None:
        d = worker.x.numel()
        self.m_hat, self.v_hat = torch.zeros_like(worker.x), torch.zeros_like(worker.x)
        self.since = Ranges([[d, 0]])  # the step that the common vectors are of
        self.steps: list[list[Step]] = []  # the latest, for each parameter group
        self.count = 0  # the optimizer's steps before the worker's first
        self._worker, self._x_hat, self._started = worker, x_hat, False
        self._vectors: Vectors | None = None  # as the kernels take them, if there are any
        self._is_fresh = False  # in this step the optimizer was seen to work in them
        number = {id(p): i for i, group in enumerate(worker.optimizer.param_groups) for p in group["params"]}
        self._groups = Ranges([[d, 0]])
        start = 0
        for p in worker.parameters:
            self._groups.raise_to(slice(start, start + p.numel()), number[id(p)])
            start += p.numel()
        self.steering = Steering(worker)
        self._kernels = find_kernels(worker.x)
        self._gain: Callable[..., Tensor] = gain if self._kernels is None else self._kernels.gain
        self._make_up: Callable[..., tuple[float, float]] = make_up if self._kernels is None else self._kernels.make_up
        self._windows: dict[tuple[int, int, int], Window] = {}  # that have been asked for in this step
        self.leave()

    def before_step(self) -> None:
        self._require_unchanged()
        if not self._started:
            self._started = True
            self._go_on_from(self._worker.moments())
        # A parameter without a gradient has one of 0: others may have one, and all count the same steps.
        for parameter in self._worker.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.steering.before_step(self._worker)

    def _go_on_from(self, moments: dict[str, Tensor]) -> None:
        """From an earlier training, if there was one."""
        worker = self._worker
        made = {round(float(worker.optimizer.state.get(p, {}).get("step", 0))) for p in worker.parameters}
        by_rank = worker.comm.meet("the steps of the optimizer", sorted(made))
        if len({count for counts in by_rank for count in counts}) > 1:
            counts = "; ".join(f"{counts} on rank {rank}" for rank, counts in enumerate(by_rank))
            raise ValueError(
                f"moments='common' needs an optimizer that has made the same number of steps with all parameters, on "
                f"all ranks, not {counts}; moments='local' does not"
            )
        self.count = made.pop() - (worker.step - 1)
        if M in moments:
            for name, common in ((M, self.m_hat), (V, self.v_hat)):
                moments[name].copy_(self._worker.comm.mean(moments[name], out=common))

    def after_step(self) -> None:
        self._is_fresh = False
        self._windows.clear()
        groups = self._worker.optimizer.param_groups
        self.steps.append([Step.of(group) for group in groups])
        self.steering.shares.append(self.steering.share)
        past = max(0, len(self.steps) - (self._worker.step - min(since for _, since in self.since.entries)))
        del self.steps[:past], self.steering.shares[:past]

    def leave(self) -> None:
        """The end of a step, or of a start: some of x is kept, each time some other, to be looked at in the next."""
        apart = max(1, self._worker.x.numel() // LOOKED_AT)
        here = slice(self._worker.step % apart, None, apart)
        self._left = here, self._worker.x[here].clone()

    def _require_unchanged(self) -> None:
        """x is made anew from the common vectors and m when its turn comes, so that what others do to it is lost."""
        here, left = self._left
        if torch.equal(self._worker.x[here], left):
            return
        raise ValueError(
            f"with moments='common' parameters must be changed by optimizer.step() alone, and between steps "
            f"{self._worker.step - 1} and {self._worker.step} something else has changed some: such changes would be "
            f"lost; moments='local' keeps them (weights to begin with: before the worker is made)"
        )

    def take(self, piece: Piece, part: slice) -> Tensor:
        piece.kept[part.start] = least = least_units(self.v_hat[part])
        return self._gain(self._own().over(part), self._runs(part), least)

    def put(self, piece: Piece, part: slice, mean: Tensor, own: Tensor) -> None:
        cuts, least = self._cuts(piece.step, part), piece.kept.pop(part.start)
        seen = self._make_up(self._own().over(part), mean, own, cuts, least, self.steering.is_on, True)
        self.steering.see(*seen, piece.share(part))

    def encode(self, piece: Piece, part: slice, compressor: Compressor, out: Tensor) -> None:
        if self._kernels is None or not in_blocks(compressor):
            super().encode(piece, part, compressor, out)
            return
        vectors, runs = self._own().over(part), self._runs(part)
        piece.kept[part.start] = least = self.v_hat.new_empty(-(-(part.stop - part.start) // BLOCK))
        if not self._kernels.encode(vectors, runs, compressor, piece.step, least, out):
            raise not_finite(self._gain(vectors, runs, least_units(self.v_hat[part])))

    def settle(self, piece: Piece, part: slice, codes: Codes) -> None:
        if part.start < part.stop:  # else the row has ended
            cuts, watches = self._cuts(piece.step, part), not isinstance(codes.compressor, Sign)
            seen = self._settle(piece, part, codes, cuts, self.steering.is_on, watches)
            if watches:
                self.steering.see(*seen, piece.share(part))
            else:  # what one bit leaves out is in all messages that follow, and looks like something that lasts
                self.steering.rest()

    def _settle(
        self, piece: Piece, part: slice, codes: Codes, cuts: list[Cut], steers: bool, watches: bool
    ) -> tuple[float, float]:
        vectors, least = self._own().over(part), piece.kept.pop(part.start)
        if self._kernels is not None and in_blocks(codes.compressor):
            seen: tuple[float, float] = self._kernels.settle(vectors, codes, cuts, least, steers, watches)
            return seen
        own = codes.compressor.decode(codes.codes[codes.own], part.stop - part.start, step=piece.step)
        return self._make_up(vectors, codes.mean(part.stop - part.start), own, cuts, least, steers, watches)

    def meet(self, block: slice) -> None:
        """Make up for all steps so far, also where a piece is on its way, which then comes too late."""
        comm = self._worker.comm
        vectors = self._own().over(block)
        own = self._gain(vectors, self._runs(block))
        pending = comm.all_gather_async(self._settings_now())
        mean = comm.mean(own)
        self._check_settings([one.tolist() for one in pending.wait()])
        cuts = self._cuts(self._worker.step, block)
        self._make_up(vectors, mean, own, cuts, None, self.steering.is_on, False)

    def tell(self, block: slice, compressor: Compressor) -> Callable[[], None]:
        """`meet` in two: tells the others, and gives what is to be done when they have told.

        What is done in between passes over these coordinates, but must not send any of them.
        """
        step, comm = self._worker.step, self._worker.comm
        piece, nbytes = Piece([block], step, step), compressor.nbytes(block.stop - block.start)
        settings = self._settings_now()
        message = torch.empty(nbytes + settings.nbytes, dtype=torch.uint8, device=self.m_hat.device)
        try:
            self.encode(piece, block, compressor, message[:nbytes])
        except ValueError:  # an entry is not finite, which all must know
            settings.fill_(math.nan)
        message[nbytes:] = settings.view(torch.uint8)
        cuts, steers = self._cuts(step, block), self.steering.is_on
        pending = comm.all_gather_async(message)

        def finish() -> None:
            told = pending.wait()
            self._check_settings(torch.stack([one[nbytes:] for one in told]).view(torch.float64).tolist())
            shares = [1 / comm.size] * comm.size
            codes = Codes(compressor, [one[:nbytes] for one in told], shares, comm.rank, step)
            self._settle(piece, block, codes, cuts, steers, watches=False)

        return finish

    def _settings_now(self) -> Tensor:
        """What must be the same on all ranks, and by how much this one steers."""
        settings = [number for step in self.steps[-1] for number in step]
        return torch.from_numpy(np.array([*settings, self.steering.share], np.float64)).to(self.m_hat.device)

    def _check_settings(self, told: list[list[float]]) -> None:
        step, by_rank = self._worker.step, [one[:-1] for one in told]
        if culprits := [str(rank) for rank, numbers in enumerate(by_rank) if math.isnan(numbers[0])]:
            raise FloatingPointError(f"foreground at step {step}: NaN or infinity on rank {', '.join(culprits)}")
        if any(numbers != by_rank[0] for numbers in by_rank):
            listed = "; ".join(f"{numbers} on rank {rank}" for rank, numbers in enumerate(by_rank))
            raise ValueError(
                f"{', '.join(Step._fields)} must be the same on all ranks, "
                f"and at step {step} are, group by group, {listed}"
            )
        self.steering.hear([one[-1] for one in told])

    def unit(self, piece: Piece, part: slice) -> Tensor:
        unit = units(self.v_hat[part], piece.kept[part.start])
        for run, since in self.since.within(part):
            if since >= piece.step:
                unit[seen_from(run, part)] = 0
        return unit

    def _ages(self, part: slice) -> list[tuple[slice, int, int]]:
        """Coordinates of one age and group, that step, and the group's number."""
        ages = self.since.within(part)
        if len(self._groups.entries) == 1:
            return [(aged, since, self._groups.entries[0][1]) for aged, since in ages]
        return [(run, since, group) for aged, since in ages for run, group in self._groups.within(aged)]

    def _runs(self, part: slice) -> list[Run]:
        runs = []
        for run, since, group in self._ages(part):
            steps, shares = self._made(group, since, self._worker.step)
            kept = math.prod(step.beta1 for step in steps)
            runs.append(Run(seen_from(run, part), kept, in_m(steps, shares)))
        return runs

    def _cuts(self, step: int, part: slice) -> list[Cut]:
        """What is to be made up for with news up to a step, and from now on is."""
        now, cuts = self._worker.step, []
        for run, began, group in self._ages(part):
            if began < step:  # else the foreground has been here, and was told of all steps up to then
                window, since = self._window(group, began, step), self._window(group, step, now)
                cuts.append(Cut(seen_from(run, part), window, since))
        self.since.raise_to(part, step)
        return cuts

    def _own(self) -> Vectors:
        if not self._is_fresh or self._vectors is None:
            moments = self._worker.moments()
            self._is_fresh = True
            if self._vectors is None:  # then for good: all of these are changed in place
                common, own = (self._x_hat, self.m_hat, self.v_hat), (self._worker.x, moments[M], moments[V])
                vectors = Vectors(*common, *own, self.steering.apart)
                self._vectors = vectors if self._kernels is None else self._kernels.arrays_of(vectors)
        return self._vectors

    def _window(self, number: int, start: int, stop: int) -> Window:
        """From the end of one step to the end of another, in a parameter group."""
        window = self._windows.get((number, start, stop))
        if window is None:
            steps, shares = self._made(number, start, stop)
            window = Window.of(self._worker.optimizer.param_groups[number], steps, self.count + start, shares)
            self._windows[number, start, stop] = window
        return window

    def _made(self, number: int, start: int, stop: int) -> tuple[list[Step], list[float]]:
        """The steps from the end of one to the end of another, in a parameter group, and the shares in them."""
        first = len(self.steps) - self._worker.step
        here = slice(first + start, first + stop)
        return [by_group[number] for by_group in self.steps[here]], self.steering.shares[here]

    def state_dict(self) -> dict[str, Any]:
        vectors = {"m_hat": self.m_hat, "v_hat": self.v_hat}
        steps = {
            "since": self.since.entries,
            "steps": [list(map(tuple, step)) for step in self.steps],
            "count": self.count,
        }
        return vectors | steps | {"steering": self.steering.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.m_hat.copy_(saved["m_hat"])
        self.v_hat.copy_(saved["v_hat"])
        self.since.entries, self.count = saved["since"], saved["count"]
        self.steps = [[Step(*group) for group in step] for step in saved["steps"]]
        self.steering.load_state_dict(saved["steering"])
        self._vectors, self._started = None, self._worker.step > 0
        self.leave()
        self._windows.clear()


def makes_steps_of_adam(optimizer: torch.optim.Optimizer) -> bool:
    """A subclass may make others. (torch wraps `step` when the first of a class is made.)"""
    step = inspect.unwrap(type(optimizer).step)
    return any(step is inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW))


def find_kernels(x: Tensor) -> ModuleType | None:
    if x.numel() < LARGE or kernels_for(x) is None:
        return None
    from laconic.methods import windows_kernels

    return windows_kernels


def in_blocks(compressor: Compressor) -> bool:
    """Whether its blocks are those of the units."""
    return isinstance(compressor, Blockwise) and compressor.block == BLOCK
