"""Several steps of Adam at once, made of what their gradients have added to m; and that in units, to be sent.

For fp32 on the CPU `windows_kernels` does the same in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 2048
LEAST_UNIT = 1e-3  # of the largest in its block
NOISE = 0.5  # the share of a surprise that is noise; the rest is that gradients have changed
TINY = 1e-12
HALF_BIAS = 0x1FBD1DF5  # about half the bits of 1.0


class Vectors(NamedTuple):
    """The common ones and a worker's own, all over the same coordinates. (For the kernels they are numpy's arrays.)"""

    x_hat: Tensor
    m_hat: Tensor
    v_hat: Tensor
    x: Tensor
    m: Tensor
    v: Tensor
    apart: Tensor  # the mean gradient less the own one, as last known

    def over(self, part: slice) -> Vectors:
        return Vectors(*(vector[part] for vector in self))


class Step(NamedTuple):
    """What a step was made with, in a parameter group: schedules change these."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # AdamW's; Adam's is part of the gradient

    @classmethod
    def of(cls, group: dict[str, Any]) -> Step:
        decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
        return cls(*map(float, (group["lr"], *group["betas"], group["eps"], decay)))


class Window(NamedTuple):
    """k steps of Adam that are made at once, as factors of the vectors.

    Of the gradients in the window only Σ (1−β₁) β₁ʲ g is known, with j the steps from each to the window's end: the
    gain. They are taken for equal, so that g is the gain over 1−β₁ᵏ, and after i steps m has become β₁ⁱ m + (1−β₁ⁱ) g.

    Squares are lost in a sum: of noise σ² only σ²/kₑ is left in ḡ², kₑ being the number of steps that the weights of
    the sum stand for. The rest is seen in how far ḡ is from m, which has σ²·(1−β₁)/(1+β₁) of noise itself: a surprise,
    of which a share is noise.
    """

    kept_m: float  # β₁ᵏ
    kept_v: float  # β₂ᵏ
    new_v: float  # 1−β₂ᵏ
    spread: float  # 1/(1−β₁ᵏ): from the gain to the gradient
    before: float  # 1/(1−β₁ᵗ) of m, or 0 when there was none
    noise: float  # of (ḡ − m)² in the square of a step's gradient
    unbiased: float  # 1/(1−β₂ᵗ) at the window's end
    eps: float
    decay: float  # of x, by AdamW's weight decay
    coast: float  # of m in x: Σ lr β₁ⁱ/(1−β₁ᵗ), less what decays
    push: float  # of the gain in x
    steered: float  # Σ (1−β₁) β₁ʲ share: of `apart` in the gain of a worker that has steered

    @classmethod
    def of(cls, group: dict[str, Any], steps: Sequence[Step], count: int, shares: Sequence[float]) -> Window:
        """`count`: the number of the optimizer's steps before these; `shares`: by which a worker steered in them."""
        k, (_, beta1, beta2, eps, _) = len(steps), steps[-1] if steps else Step.of(group)
        kept_m = kept_v = decay = 1.0
        coast = push = 0.0
        for i, step in enumerate(steps, start=count + 1):
            kept_m *= step.beta1
            kept_v *= step.beta2
            rate, left = step.lr / (1 - step.beta1**i), 1 - step.lr * step.weight_decay
            coast = coast * left + kept_m * rate
            push = push * left + (1 - kept_m) * rate
            decay *= left
        ratio = (1 + beta1) / (1 - beta1)
        k_e = ratio * (1 - kept_m) / (1 + kept_m)
        spread = 1 / (1 - kept_m) if k else 0.0
        return cls(
            kept_m=kept_m,
            kept_v=kept_v,
            new_v=1 - kept_v,
            spread=spread,
            before=1 / (1 - beta1**count) if count else 0.0,
            noise=NOISE * (k_e - 1) / (1 + k_e / ratio),
            unbiased=1 / (1 - beta2 ** (count + k)),
            eps=eps,
            decay=decay,
            coast=coast,
            push=spread * push,
            steered=in_m(steps, shares),
        )


class Run(NamedTuple):
    """A range of a part, in which m̂ is of one step."""

    part: slice
    kept: float  # of m̂ in m
    steered: float  # of `apart` in m


class Cut(NamedTuple):
    """A range of a part, in which all coordinates are made up for in the same way."""

    part: slice
    window: Window
    since: Window

    @property
    def steered(self) -> float:
        """Of `apart` in m, by both."""
        return self.window.steered * self.since.kept_m + self.since.steered


def in_m(steps: Sequence[Step], values: Sequence[float]) -> float:
    """What these are in m, when each was added to the gradient of a step."""
    total = 0.0
    for step, value in zip(steps, values, strict=True):
        total = step.beta1 * total + (1 - step.beta1) * value
    return total


def least_units(v_hat: Tensor) -> Tensor:
    """For each block, what its units are at least."""
    full, rest = v_hat[: v_hat.numel() // BLOCK * BLOCK], v_hat[v_hat.numel() // BLOCK * BLOCK :]
    largest = full.view(-1, BLOCK).amax(1)
    if rest.numel():
        largest = torch.cat([largest, rest.amax().reshape(1)])
    return _about_root(largest) * LEAST_UNIT + TINY


def units(v_hat: Tensor, least: Tensor) -> Tensor:
    """What gains are told in: about √v̂, so that they are alike and suit any code.

    Where a gradient was hardly ever seen, the first one would be many units, and leave no code for its neighbours.
    """
    return torch.maximum(_about_root(v_hat), least.repeat_interleave(BLOCK)[: v_hat.numel()])


def gain(vectors: Vectors, runs: list[Run], least: Tensor | None = None) -> Tensor:
    """What the own gradients have added to m, over what has been kept of m̂; in units, if these are given."""
    gain = torch.empty_like(vectors.m)
    for part, kept, steered in runs:
        torch.sub(vectors.m[part] - vectors.m_hat[part] * kept, vectors.apart[part] * steered, out=gain[part])
    return gain if least is None else gain.div_(units(vectors.v_hat, least))


def make_up(
    vectors: Vectors, mean: Tensor, said: Tensor, cuts: list[Cut], least: Tensor | None, steers: bool, watches: bool
) -> tuple[float, float]:
    """Make the steps of the windows in the common vectors; the own ones are ahead of them by the own steps since.

    The mean of the gains, and what this rank has said, are in units, if these are given. Kernels give the same bits;
    but a worker that only watches keeps `apart` up in some blocks there, here in all. What is seen: sums over the new
    `apart` times that before, and over its squares.
    """
    gain, change = mean, mean - said
    if least is not None:
        unit = units(vectors.v_hat, least)
        gain, change = gain * unit, change * unit
    products = squares = 0.0
    for cut in cuts:
        before = vectors.apart[cut.part]
        apart = (change[cut.part] * cut.window.spread).to(before.dtype)
        if watches:
            products += float(apart @ before)
            squares += float(before @ before)
        _make_up_cut(vectors.over(cut.part), gain[cut.part], change[cut.part], apart, cut)
        if steers or watches:
            before.copy_(apart)
    return products, squares


def _make_up_cut(vectors: Vectors, gain: Tensor, change: Tensor, apart: Tensor, cut: Cut) -> None:
    x_hat, m_hat, v_hat, x, m, v, apart_before = vectors
    w, since = cut.window, cut.since
    g = gain * w.spread
    surprise = g - m_hat * w.before
    v_hat.mul_(w.kept_v).add_((g * g + surprise * surprise * w.noise) * w.new_v)
    root = _sqrt(v_hat * w.unbiased) + w.eps
    x_hat.mul_(w.decay).sub_((m_hat * w.coast + gain * w.push) / root)
    m_hat.mul_(w.kept_m).add_(gain)

    m.add_(change * since.kept_m)  # what the own code has not said stays in m
    m.sub_(apart_before * cut.steered).add_(apart * since.steered)
    gain = m - m_hat * since.kept_m
    g = gain * since.spread
    v_since = v_hat * since.kept_v + g * g * since.new_v
    larger = torch.maximum(v, v_since)
    root = _sqrt(larger * since.unbiased) + since.eps  # with the v of then, own steps were no longer
    torch.sub(x_hat * since.decay, (m_hat * since.coast + gain * since.push) / root, out=x)
    # Without own steps since, v̂ may know nothing of what is left in m, which next to nothing would be a huge step.
    v.copy_(v_since if since.spread else larger)


def _about_root(x: Tensor) -> Tensor:
    """√x, from 2.2 % below to 4.5 % above: half its bits are half its logarithm. The same on any processor."""
    return ((x.float().view(torch.int32) >> 1) + HALF_BIAS).view(torch.float32).to(x.dtype)


def _sqrt(x: Tensor) -> Tensor:
    """Rounded to the nearest, as kernels do; torch's own may be one bit off."""
    return x.double().sqrt().to(x.dtype)
