"""Divisible communication with moments="common" as one loop over all workers: windows are made step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.compress import Compressor, Uniform
from tests.helpers import Optimize, build_model, flat, loss
from tests.oracles.divisible import foreground_blocks, moment, set_moment

B1, B2, EPS = 0.9, 0.999, 1e-8


def about_root(x: Tensor) -> Tensor:
    """2ᵉ(1 + f), f < 1, has about the logarithm e + f."""
    mantissa, exponent = torch.frexp(x)
    half = (exponent - 1 + 2 * mantissa - 1) / 2 - 0.02252
    return torch.where(x > 0, torch.exp2(half.floor()) * (1 + half - half.floor()), 0.0)


def units(v_hat: Tensor) -> Tensor:
    root = about_root(v_hat)
    return torch.maximum(root, 1e-3 * root.max() + 1e-12)


def coded(vectors: list[Tensor], unit: Tensor, compressor: Compressor) -> list[Tensor]:
    return [compressor.decode(compressor.encode(own / unit), len(own)) * unit for own in vectors]


def lasting(products: float, squares: float) -> float:
    """The share of a difference in the next one."""
    share = products / squares if squares else 0.0
    return min(share, 1.0) if share >= 0.1 else 0.0


def adam_window(
    x: Tensor, m: Tensor, v: Tensor, gain: Tensor, count: int, steps: int, lr: float, decay: float, grows: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps of Adam with one and the same gradient, which is such that m gains what it has gained. v is that of the end
    all along: it has grown already (None), it grows by the gradient's square ("plain"), or by that of gradients with
    the noise that is seen in how far the gradient is from m, of which half is taken for noise ("noisy")."""
    if steps == 0:
        return x.clone(), m + gain, v.clone()
    g = gain / (1 - B1**steps)
    weights = torch.tensor([(1 - B1) * B1**j for j in range(steps)]) / (1 - B1**steps)
    lost = 1 - weights.square().sum()  # the share of a step's noise that a weighted mean of so many does not have
    seen = weights.square().sum() + (1 - B1) / (1 + B1)  # the noise of the mean and of m
    square = g**2
    if grows == "noisy":
        surprise = g - (m / (1 - B1**count) if count else 0 * m)
        square = square + 0.5 * lost / seen * surprise**2
    for _ in range(steps if grows else 0):
        v = B2 * v + (1 - B2) * square
    root = (v / (1 - B2 ** (count + steps))).sqrt() + EPS
    for i in range(1, steps + 1):
        m = B1 * m + (1 - B1) * g
        x = x * (1 - lr * decay) - lr * m / (1 - B1 ** (count + i)) / root
    return x, m, v


def common_adam(
    optimize: Optimize,
    workers: int,
    steps: int,
    ratio: int,
    period: int,
    delay: int,
    background: Compressor | None = None,
    hops: int = 1,
) -> list[list[Tensor]]:
    """For each step, x of each worker. In two hops, `owed` is what owners have not passed on.

    Beside m, `steer` says what a worker has steered by since the common vectors are of, as m would hold it.
    """
    models = [build_model() for _ in range(workers)]
    optimizers = [optimize(model) for model in models]
    group = optimizers[0].param_groups[0]
    settings = group["lr"], group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    x_hat = flat(models[0])
    d = len(x_hat)
    m_hat, v_hat, since = torch.zeros(d), torch.zeros(d), torch.zeros(d, dtype=torch.int64)
    blocks = foreground_blocks(d, ratio)
    every = min(hops, period)
    row = -(-d // (workers if hops == 2 else 1))
    length = -(-row * every // period)
    # Each the same columns of all rows, one after the other.
    pieces = [
        [list(range(d)[start + i : min(start + i + length, start + row)]) for start in range(0, d, row)]
        for i in range(0, row, length)
    ]
    flying: list[tuple[int, list[list[int]], list[list[Tensor]], list[Tensor]]] = []
    passed_on: dict[int, list[Tensor]] = {}  # by the step a piece was sent in
    owed = torch.zeros(d)
    apart, steer = torch.zeros(workers, d), torch.zeros(workers, d)
    shares = [[0.0] for _ in range(workers)]  # by step, from 1 on
    seen = [(0.0, 0.0) for _ in range(workers)]
    has_seen = [False] * workers  # something that lasts, once
    path = []
    for step in range(1, steps + 1):
        for i in range(workers):
            loss(models[i], i, step - 1).backward()
            shares[i].append(lasting(*seen[i]))
            start = 0
            for p in models[i].parameters():
                assert p.grad is not None
                p.grad += shares[i][step] * apart[i, start : start + p.numel()].view_as(p)
                start += p.numel()
            steer[i] = B1 * steer[i] + (1 - B1) * shares[i][step] * apart[i]
            optimizers[i].step()
            optimizers[i].zero_grad()
        x = [flat(model) for model in models]
        m = [moment(models[i], optimizers[i], "exp_avg") for i in range(workers)]
        v = [moment(models[i], optimizers[i], "exp_avg_sq") for i in range(workers)]

        def gains(where: list[int], step: int = step, m: list[Tensor] = m) -> list[Tensor]:
            return [m[i][where] - B1 ** (step - since[where]) * m_hat[where] - steer[i][where] for i in range(workers)]

        def make_up(
            until: int,
            where: list[int],
            told: list[Tensor],
            mean: Tensor | None = None,
            step: int = step,
            x: list[Tensor] = x,
            m: list[Tensor] = m,
            v: list[Tensor] = v,
            is_fresh: bool = False,
            share: float = 1.0,  # of a piece
        ) -> None:
            mean = torch.stack(told).mean(0) if mean is None else mean
            pairs: list[list[Tensor]] = [[] for _ in range(workers)]  # apart and that before, by worker
            for began in since[where].unique().tolist():
                here = since[where] == began
                at = torch.tensor(where)[here]
                if began >= until:  # the foreground has been here
                    continue
                x_hat[at], m_hat[at], v_hat[at] = adam_window(
                    x_hat[at], m_hat[at], v_hat[at], mean[here], began, until - began, *settings, grows="noisy"
                )
                for i in range(workers):
                    change = mean[here] - told[i][here]
                    before = apart[i, at].double()
                    if not is_fresh or has_seen[i]:
                        apart[i, at] = change / (1 - B1 ** (until - began))
                    pairs[i].append(torch.stack([apart[i, at].double(), before]))
                    again = sum((1 - B1) * B1 ** (step - j) * shares[i][j] for j in range(until + 1, step + 1))
                    m[i][at] += B1 ** (step - until) * change - steer[i, at] + again * apart[i, at]
                    steer[i, at] = again * apart[i, at]
                    own = m[i][at] - B1 ** (step - until) * m_hat[at]
                    window = own, until, step - until, *settings
                    _, _, v_now = adam_window(x_hat[at], m_hat[at], v_hat[at], *window, grows="plain")
                    larger = torch.maximum(v[i][at], v_now)
                    x[i][at], _, _ = adam_window(x_hat[at], m_hat[at], larger, *window, grows=None)
                    v[i][at] = v_now if step > until else larger
            since[where] = since[where].clamp(min=until)
            if not is_fresh:
                for i in range(workers):
                    new, old = torch.cat(pairs[i], 1) if pairs[i] else torch.zeros(2, 1).double()
                    kept = 0.95**share
                    seen[i] = kept * seen[i][0] + float(old @ new), kept * seen[i][1] + float(old @ old)
                    has_seen[i] |= lasting(*seen[i]) > 0

        block = list(blocks[step % len(blocks)])
        in_8_bits = background is not None and hops == 1
        told = coded(gains(block), units(v_hat[block]), Uniform(8)) if in_8_bits else gains(block)
        make_up(step, block, told, is_fresh=True)

        for sent, parts, messages, unit in list(flying):
            if hops == 2 and sent + delay == step:
                assert background is not None
                passed_on[sent] = []
                for part, message, one in zip(parts, messages, unit, strict=True):
                    counts = since[part] < sent  # else the foreground has been here
                    mean = torch.where(counts, torch.stack(message).mean(0) + owed[part], 0.0)
                    (said,) = coded([mean], one, background) if part else [mean]
                    owed[part] = torch.where(counts, mean - said, owed[part])
                    passed_on[sent].append(said)
            if sent + hops * delay == step:
                flying.pop(0)
                means = passed_on.pop(sent, [None] * len(parts))
                for part, message, mean in zip(parts, messages, means, strict=True):
                    make_up(sent, part, message, mean, share=len(part) / sum(map(len, parts)))

        if step % every == 0:
            parts = pieces[(step // every - 1) % len(pieces)]
            unit = [units(v_hat[part]) if part else torch.ones(0) for part in parts]
            messages = [
                gains(part) if background is None or not part else coded(gains(part), one, background)
                for part, one in zip(parts, unit, strict=True)
            ]
            flying.append((step, parts, messages, unit))

        for i in range(workers):
            nn.utils.vector_to_parameters(x[i].clone(), models[i].parameters())
            set_moment(models[i], optimizers[i], "exp_avg", m[i])
            set_moment(models[i], optimizers[i], "exp_avg_sq", v[i])
        path.append([own.clone() for own in x])
    return path
