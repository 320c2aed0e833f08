"""Divisible communication as one loop over all workers: no messages, no owners, no kernels.

Everything that the method's state amounts to is written out: of each worker x, what it has in flight and, with Adam,
the running mean Q of m̂²; of all workers x̂ and what the second hop has not passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laconic.compress import Compressor, Log, Uniform

Optimize = Callable[[nn.Module], torch.optim.Optimizer]
Schedule = Callable[[torch.optim.Optimizer, int], None]  # (optimizer, step): sets learning rates
SetGradient = Callable[[nn.Module, int, int], None]  # (model, worker, step): sets p.grad, or leaves it None


@dataclass
class Settings:
    """As the fields of `laconic.Divisible`, with "auto" resolved. `background`: None is fp32."""

    ratio: int
    period: int | None
    background: Compressor | None = None
    delay: int = 1
    hops: int = 1
    corrected: bool = False
    # By step: the period, the delay, the hops and whether there is a foreground, from the end of that step on, as long
    # as there was one hop.
    changes: dict[int, tuple[int, int, int, bool]] = field(default_factory=dict)
    stretched_when_sent: int | None = None  # from the end of this step on; before, in every step


@dataclass
class Flight:
    """One piece in flight: what each worker sent and, after the first of two hops, the averages that owners send."""

    entries: range
    due: int
    moves: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor] = field(default_factory=list)


@dataclass
class Path:
    x: list[list[Tensor]] = field(default_factory=list)  # after each step: of each worker
    x_hat: list[Tensor] = field(default_factory=list)  # after each step
    moved: list[Tensor] = field(default_factory=list)  # after each step: Σ mean(local, stretched steps)
    foreground: list[int] = field(default_factory=list)  # in each step: the length of the averaged block, or 0
    background: list[int] = field(default_factory=list)  # in each step: the length of the piece sent, or 0
    end: Tensor = field(default_factory=lambda: torch.empty(0))  # the model after the block


def divisible(
    build: Callable[[], nn.Module],
    optimize: Optimize,
    set_gradient: SetGradient,
    workers: int,
    steps: int,
    settings: Settings,
    schedule: Schedule | None = None,
) -> Path:
    n, ratio, period, delay, hops = workers, settings.ratio, settings.period, settings.delay, settings.hops
    models = [build() for _ in range(n)]
    optimizers = [optimize(model) for model in models]
    x_hat = flat(models[0])
    d = len(x_hat)
    q = [torch.zeros_like(x_hat) for _ in range(n)]
    lost, lost_gradient = torch.zeros_like(x_hat), torch.zeros_like(x_hat)  # the second hop's error feedback
    totals = [torch.zeros_like(x_hat) for _ in range(n)]  # of local gradients since they were last sent
    shifts = [torch.zeros_like(x_hat) for _ in range(n)]
    sent_at: dict[int, int] = {}  # by the first entry of a piece
    blocks = foreground_blocks(d, ratio)
    flights: list[Flight] = []
    next_entry = 0
    has_foreground = True
    path = Path()
    moved = torch.zeros_like(x_hat)

    def apply(entries: range, average: Tensor, own: list[Tensor]) -> None:
        part = slice(entries.start, entries.stop)
        x_hat[part] += average
        for model, sent in zip(models, own, strict=True):
            x = flat(model)
            x[part] += average - sent
            set_flat(model, x)

    def stretch_all(entries: range, steps: int, *, in_every_step: bool) -> None:
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if isinstance(optimizer, torch.optim.Adam):
                before = flat(model)
                stretch(model, optimizer, q[i], n, entries, steps, in_every_step)
                moved.add_((flat(model) - before) / n)

    def unsent(entries: range) -> list[Tensor]:
        """e of entries of which nothing is in flight."""
        return [(flat(model) - x_hat)[entries.start : entries.stop] for model in models]

    def land(flight: Flight) -> None:
        part = slice(flight.entries.start, flight.entries.stop)
        averages = flight.averages or [mean(flight.moves), *([mean(flight.gradients)] if flight.gradients else [])]
        apply(flight.entries, averages[0], flight.moves)
        for shift, own in zip(shifts, flight.gradients, strict=False):
            shift[part] = averages[1] - own

    def answer(flight: Flight) -> None:
        """The second hop: the average is quantized again."""
        part = slice(flight.entries.start, flight.entries.stop)
        for vectors, code, residual in (
            (flight.moves, settings.background, lost),
            (flight.gradients, Log(4), lost_gradient),
        ):
            if vectors:
                with_lost = mean(vectors) + residual[part]
                flight.averages.append(quantize(code, with_lost))
                residual[part] = with_lost - flight.averages[-1]
        flight.due += delay

    for step in range(1, steps + 1):
        piece = range(d)[next_entry : next_entry + -(-d // (period or 1))]
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if schedule is not None:
                schedule(optimizer, step)
            optimizer.zero_grad()
            set_gradient(model, i, step)
            if settings.corrected:
                correct(model, totals[i], shifts[i])
            before = flat(model)
            optimizer.step()
            moved += (flat(model) - before) / n
        in_every_step = settings.stretched_when_sent is None or step <= settings.stretched_when_sent
        sweep = 1 if period is None else max(period, delay * hops)
        if in_every_step:
            stretch_all(piece, sweep, in_every_step=True)

        block = blocks[step % len(blocks)]
        skipped = not has_foreground or any(overlap(block, flight.entries) for flight in flights)
        own = unsent(block)
        for flight in [flight for flight in flights if flight.due == step]:
            if hops == 2 and not flight.averages:
                answer(flight)
            else:
                land(flight)
                flights.remove(flight)
        if not skipped:
            if settings.background is not None and settings.hops == 1:
                own = [quantize(Uniform(8), e) for e in own]
            apply(block, mean(own), own)
        path.foreground.append(0 if skipped else len(block))

        sends = period is not None and not any(overlap(piece, flight.entries) for flight in flights)
        if sends:
            if not in_every_step:
                stretch_all(piece, sweep, in_every_step=False)
            moves = [quantize(settings.background, e) for e in unsent(piece)]
            gradients = []
            if settings.corrected:
                part = slice(piece.start, piece.stop)
                window = step - sent_at.get(piece.start, 0)
                code = None if settings.background is None else Log(4)
                gradients = [quantize(code, total[part] / window) for total in totals]
                for total in totals:
                    total[part] = 0
                sent_at[piece.start] = step
            flights.append(Flight(piece, step + delay, moves, gradients))
            next_entry = piece.stop % d
        path.background.append(len(piece) if sends else 0)
        if step in settings.changes:
            old, (period, delay, hops, has_foreground) = (period, delay, hops), settings.changes[step]
            if (period, delay, hops) != old:  # everything in flight is applied, and a new sweep begins
                next_entry = 0
                while flights:
                    land(flights.pop(0))

        path.x.append([flat(model) for model in models])
        path.x_hat.append(x_hat.clone())
        path.moved.append(moved.clone())

    while flights:
        for flight in list(flights):
            if hops == 2 and not flight.averages:
                answer(flight)
            else:
                land(flight)
                flights.remove(flight)
    path.end = mean([flat(model) for model in models]) + lost
    return path


def stretch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    q: Tensor,
    workers: int,
    due: range,
    steps: int,
    in_every_step: bool,
) -> None:
    """Lengthens the Adam step just made by the factor ρ = √(V/v), weight decay apart; or, if steps are stretched when
    they are sent, the last `steps` of the entries that are `due`."""
    if all(p.grad is None for p in model.parameters()):
        return
    start = 0
    counts = [int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in model.parameters()]
    for p, count in zip(model.parameters(), counts, strict=True):
        group = next(group for group in optimizer.param_groups if any(p is other for other in group["params"]))
        entries = range(start, start + p.numel())
        start = entries.stop
        if count == 0 or (in_every_step and p.grad is None):
            continue
        state, (beta1, beta2) = optimizer.state[p], group["betas"]
        # The steps that moved it since the last refresh: counted, or in the mean as many as among all steps.
        since = min(steps, count) if in_every_step else min(steps, max(counts)) * count / max(counts)
        m_hat = state["exp_avg"].flatten() / (1 - beta1**count)
        v_hat = state["exp_avg_sq"].flatten() / (1 - beta2**count)
        own_q = q[entries.start : entries.stop]
        # A mean over the steps so far, weighted as in v̂, where each refresh stands for the steps of one sweep.
        weight = (1 - beta2**since) / (1 - beta2**count)
        for i, entry in enumerate(entries):
            if entry in due or since == count:
                own_q[i] += weight * (m_hat[i] ** 2 - own_q[i])
        in_m = (1 - beta1) / (1 + beta1)  # the share of independent noise that is left in m²
        noise = (1 - own_q / v_hat.clamp(min=1e-38)) / (1 - in_m)  # the share of v that is noise
        v_of_mean = v_hat * (1 - noise + noise / workers).clamp(1 / workers, 1)
        rho = (v_hat / v_of_mean.clamp(min=1e-300)).sqrt()
        longer = (rho - 1) * -group["lr"] * m_hat / (v_hat.sqrt() + group["eps"])
        if not in_every_step:
            longer = since * longer.where(torch.tensor([entry in due for entry in entries]), 0.0)
        p.data += longer.view_as(p)


def correct(model: nn.Module, total: Tensor, shift: Tensor) -> None:
    start = 0
    for p in model.parameters():
        part = slice(start, start + p.numel())
        start = part.stop
        if p.grad is not None:
            total[part] += p.grad.flatten()
            p.grad += shift[part].view_as(p)


def foreground_blocks(d: int, ratio: int) -> list[range]:
    """Returns the blocks in the order of their turns, from step 0 on.

    Turns go in strides near the golden section of the number of blocks, without a common divisor.
    """
    length = -(-d // ratio)
    blocks = [range(d)[i : i + length] for i in range(0, d, length)]
    stride = max(1, round(0.618 * len(blocks)))
    while len({stride * i % len(blocks) for i in range(len(blocks))}) < len(blocks):
        stride += 1
    return [blocks[stride * i % len(blocks)] for i in range(len(blocks))]


def quantize(code: Compressor | None, vector: Tensor) -> Tensor:
    """Returns the vector as it arrives: in fp32, whatever its dtype, unless it travels as it is."""
    return vector if code is None else code.decode(code.encode(vector), len(vector))


def mean(vectors: list[Tensor]) -> Tensor:
    return sum(vectors[1:], vectors[0]) / len(vectors)  # in the order of the ranks, as rounding depends on it


def overlap(one: range, other: range) -> bool:
    return bool(set(one) & set(other))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def set_flat(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(x, model.parameters())
