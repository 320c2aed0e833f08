"""The result of a comparison in one or two sentences, computed from its runs."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.bench.record import Record
from laconic.bench.summary import Summary, ToTarget
from laconic.bench.units import labelled_metric_text, link_text, named_metric_text, nbytes_text, seconds_text

ALONE = "none"  # the peer that does not communicate: a floor for the time, not a way to train together
REFERENCE = "ddp"


@dataclass(frozen=True)
class Headline:
    sentence: str
    details: list[str]  # what else must be known to read the sentence rightly


def headline(summaries: list[Summary], target: float | None) -> Headline:
    """Says so when a target was missed or not given, when DDP is not there, and when something beats the methods."""
    ran = [summary for summary in summaries if summary.runs and summary.final]
    if not ran:
        return Headline("No run ended well, so there is nothing to compare.", [])
    some = ran[0].runs[0]
    together = [summary for summary in ran if summary.way != ALONE]
    if not together:
        return Headline(f"{_where(some)}, only training without communication was run.", [])
    if target is None:
        return _without_target(some, together)
    reached = {s.name: cost for s in ran if (cost := s.to_target(target)) and cost.by_all}
    racing = sorted((s for s in together if s.name in reached), key=lambda s: reached[s.name].seconds)
    if not racing:
        return _target_missed(some, together, target)
    return _race(some, together, racing, reached, target)


def _race(
    some: Record, together: list[Summary], racing: list[Summary], reached: dict[str, ToTarget], target: float
) -> Headline:
    goal = named_metric_text(some.metric, target)
    fastest = racing[0]
    best = next((s for s in racing if not s.is_peer), fastest)
    reference = _reference(together)
    cost = reached[best.name]
    start = f"{_where(some)}, {_label(best)} reaches {goal} in {seconds_text(cost.seconds)}"
    details = []
    if reference is None:
        details.append("There is no DDP run to compare with.")
        others = [s for s in racing if s is not best]
        if others:
            start += f"; {_label(others[0])} takes {seconds_text(reached[others[0].name].seconds)}"
        sentence = f"{start}."
    elif reference is best:
        sentence = f"{start}, and nothing else is faster." if len(together) > 1 else f"{start}."
    elif reference.name not in reached:
        sentence = f"{start}; DDP does not reach it in {seconds_text(reference.seconds)} of training."
    else:
        against = reached[reference.name]
        sentence = f"{start} where DDP takes {seconds_text(against.seconds)}."
        details.append(_compared(cost, against))
    if best is not fastest and fastest is not reference:
        seconds = seconds_text(reached[fastest.name].seconds)
        details.append(f"PyTorch’s own {_label(fastest)} is faster still: {seconds}.")
    alone = next((cost for name, cost in reached.items() if name == ALONE), None)
    if alone and alone.seconds < reached[fastest.name].seconds:
        details.append(
            f"One worker alone gets there in {seconds_text(alone.seconds)}: "
            "this target is too easy to show what communication buys."
        )
    return Headline(sentence, details)


def _compared(cost: ToTarget, against: ToTarget) -> str:
    if not (cost.seconds and against.seconds):
        return "The target was met before any training."
    faster = against.seconds / cost.seconds
    if faster >= 1:
        words = f"That is {times(faster)} faster"
    else:
        words = f"That is {times(1 / faster)} slower"
    sent, instead = nbytes_text(cost.payload_nbytes), nbytes_text(against.payload_nbytes)
    return f"{words}, with {sent} sent by each worker instead of {instead}."


def _target_missed(some: Record, together: list[Summary], target: float) -> Headline:
    goal = named_metric_text(some.metric, target)
    nearest = _best_final(together)
    by_some = any(summary.to_target(target) for summary in together)
    scope = " with all of its seeds" if by_some else ""
    sentence = f"{_where(some)}, no way reaches {goal}{scope} in {some.steps:,} steps."
    ends = "ends nearest," if len(together) > 1 else "ends"
    return Headline(sentence, [f"{_label(nearest)} {ends} at {_final(nearest)}."])


def _without_target(some: Record, together: list[Summary]) -> Headline:
    timed = [s for s in together if s.split]
    reference = _reference(together)
    methods = [s for s in timed if not s.is_peer] or [s for s in timed if s is not reference]
    details = ["No target was given, so this compares the time of a whole run and where it ends."]
    if reference is None:
        details.append("There is no DDP run to compare with.")
    if not methods:
        only = together[0]
        return Headline(
            f"{_where(some)}, {_label(only)} ends at {_final(only)} after {seconds_text(only.seconds)}.", details
        )
    fastest = min(methods, key=lambda s: s.seconds or float("inf"))
    sentence = f"{_where(some)}, {_label(fastest)} makes {some.steps:,} steps in {seconds_text(fastest.seconds)}"
    if reference is None:
        return Headline(f"{sentence} and ends at {_final(fastest)}.", details)
    sentence += f" where DDP takes {seconds_text(reference.seconds)}"
    sentence += f"; they end at {_final(fastest)} and {_final(reference)}."
    return Headline(sentence, details)


def times(factor: float) -> str:
    return f"×{factor:.0f}" if factor >= 9.95 else f"×{factor:.1f}" if factor >= 1.995 else f"×{factor:.2f}"


def _where(some: Record) -> str:
    return "On loopback" if some.link == "none" else f"At {link_text(some.link)}"


def _label(summary: Summary) -> str:
    return "DDP" if summary.way == REFERENCE else summary.name


def _reference(summaries: list[Summary]) -> Summary | None:
    return next((s for s in summaries if s.way == REFERENCE), None)


def _final(summary: Summary) -> str:
    assert summary.final is not None
    return labelled_metric_text(summary.runs[0].metric, summary.final.mean)


def _best_final(summaries: list[Summary]) -> Summary:
    """A final value that is not a number is the worst there is."""

    def goodness(summary: Summary) -> float:
        assert summary.final is not None
        value = summary.final.mean
        if value != value:
            return float("-inf")
        return value if summary.runs[0].higher_is_better else -value

    return max(summaries, key=goodness)
