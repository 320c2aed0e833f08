"""States the result of a comparison in one or two sentences, computed from its runs."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.bench.baselines import WITHOUT_COMMUNICATION
from laconic.bench.record import Record
from laconic.bench.summary import Summary, ToTarget
from laconic.bench.units import labelled_metric_text, link_text, named_metric_text, nbytes_text, seconds_text

REFERENCE = "ddp"
_DESCRIPTIONS = {
    "none": "one worker alone",
    "none_averaged": "workers that never communicate, averaged for evaluation",
}


@dataclass(frozen=True)
class Headline:
    """The main sentence, and the sentences that a reader needs to interpret it."""

    sentence: str
    details: list[str]


def headline(summaries: list[Summary], target: float | None) -> Headline:
    """Returns the result of a comparison in words.

    Says so when the target was missed, not given, or reached without communication; when DDP was not run; and when a
    baseline is faster than all methods.

    Args:
        summaries: One per contender.
        target: A value of the task's metric, or None.
    """
    ran = [summary for summary in summaries if summary.runs and summary.final]
    if not ran:
        return Headline("All runs failed, so there is nothing to compare.", [])
    first = ran[0].runs[0]
    communicating = [summary for summary in ran if summary.method not in WITHOUT_COMMUNICATION]
    if not communicating:
        return Headline(f"{_network(first)}, only training without communication was run.", [])
    if target is None:
        return _without_target(first, communicating)
    trivial = reached_without_communication(ran, target)
    if trivial is not None:
        return _trivial_target(first, trivial, communicating, target)
    reached = {s.name: cost for s in communicating if (cost := s.to_target(target)) and cost.by_all}
    ranking = sorted((s for s in communicating if s.name in reached), key=lambda s: reached[s.name].seconds)
    if not ranking:
        return _target_missed(first, communicating, target)
    return _target_reached(first, communicating, ranking, reached, target)


def reached_without_communication(summaries: list[Summary], target: float) -> Summary | None:
    """Returns the first of the baselines `none` and `none_averaged` that reaches the target with any seed, or None.

    Such a target does not show what communication buys, so no speed-up to it is reported.
    """
    alone = (summary for summary in summaries if summary.runs and summary.method in WITHOUT_COMMUNICATION)
    return next((summary for summary in alone if summary.to_target(target)), None)


def _trivial_target(first: Record, trivial: Summary, communicating: list[Summary], target: float) -> Headline:
    cost = trivial.to_target(target)
    assert cost is not None
    goal = named_metric_text(first.metric, target)
    sentence = (
        f"{_network(first)}, {goal} does not show what communication buys: {trivial.name} "
        f"({_DESCRIPTIONS[trivial.method]}) reaches it in {seconds_text(cost.seconds)}."
    )
    best = _best_final(communicating)
    ends = (
        f"After {first.steps:,} steps, {trivial.name} ends at {_final(trivial)} and {_label(best)} at {_final(best)}."
    )
    return Headline(sentence, ["No speed-up is reported for this target: choose a harder one.", ends])


def _target_reached(
    first: Record, communicating: list[Summary], ranking: list[Summary], reached: dict[str, ToTarget], target: float
) -> Headline:
    goal = named_metric_text(first.metric, target)
    fastest = ranking[0]
    best = next((s for s in ranking if not s.is_baseline), fastest)
    reference = _reference(communicating)
    cost = reached[best.name]
    start = f"{_network(first)}, {_label(best)} reaches {goal} in {seconds_text(cost.seconds)}"
    details = []
    if reference is None:
        details.append("There is no DDP run to compare with.")
        others = [s for s in ranking if s is not best]
        if others:
            start += f"; {_label(others[0])} takes {seconds_text(reached[others[0].name].seconds)}"
        sentence = f"{start}."
    elif reference is best:
        sentence = f"{start}, and nothing else is faster." if len(communicating) > 1 else f"{start}."
    elif reference.name not in reached:
        sentence = f"{start}; DDP does not reach it in {seconds_text(reference.seconds)} of training."
    else:
        against = reached[reference.name]
        sentence = f"{start} where DDP takes {seconds_text(against.seconds)}."
        details.append(_speed_up(cost, against))
    if best is not fastest and fastest is not reference:
        seconds = seconds_text(reached[fastest.name].seconds)
        details.append(f"The baseline {_label(fastest)} is faster still: {seconds}.")
    return Headline(sentence, details)


def _speed_up(cost: ToTarget, against: ToTarget) -> str:
    if not (cost.seconds and against.seconds):
        return "The target was met before any training."
    faster = against.seconds / cost.seconds
    if faster >= 1:
        words = f"That is {factor_text(faster)} faster"
    else:
        words = f"That is {factor_text(1 / faster)} slower"
    sent, instead = nbytes_text(cost.payload_nbytes), nbytes_text(against.payload_nbytes)
    return f"{words}, with {sent} sent by each worker instead of {instead}."


def _target_missed(first: Record, communicating: list[Summary], target: float) -> Headline:
    goal = named_metric_text(first.metric, target)
    nearest = _best_final(communicating)
    by_some = any(summary.to_target(target) for summary in communicating)
    scope = " with all of its seeds" if by_some else ""
    sentence = f"{_network(first)}, no method reaches {goal}{scope} in {first.steps:,} steps."
    ends = "ends nearest," if len(communicating) > 1 else "ends"
    return Headline(sentence, [f"{_label(nearest)} {ends} at {_final(nearest)}."])


def _without_target(first: Record, communicating: list[Summary]) -> Headline:
    timed = [s for s in communicating if s.step_time]
    reference = _reference(communicating)
    methods = [s for s in timed if not s.is_baseline] or [s for s in timed if s is not reference]
    details = ["No target was given, so this compares the training time of whole runs and their final values."]
    if reference is None:
        details.append("There is no DDP run to compare with.")
    if not methods:
        only = communicating[0]
        return Headline(
            f"{_network(first)}, {_label(only)} ends at {_final(only)} after {seconds_text(only.seconds)}.", details
        )
    fastest = min(methods, key=lambda s: s.seconds or float("inf"))
    sentence = f"{_network(first)}, {_label(fastest)} makes {first.steps:,} steps in {seconds_text(fastest.seconds)}"
    if reference is None:
        return Headline(f"{sentence} and ends at {_final(fastest)}.", details)
    sentence += f" where DDP takes {seconds_text(reference.seconds)}"
    sentence += f"; they end at {_final(fastest)} and {_final(reference)}."
    return Headline(sentence, details)


def factor_text(factor: float) -> str:
    """Formats a ratio.

    Example:
        >>> factor_text(1.234), factor_text(3.21), factor_text(24.2)
        ('×1.23', '×3.2', '×24')
    """
    return f"×{factor:.0f}" if factor >= 9.95 else f"×{factor:.1f}" if factor >= 1.995 else f"×{factor:.2f}"


def _network(first: Record) -> str:
    return "On loopback" if first.link == "none" else f"At {link_text(first.link)}"


def _label(summary: Summary) -> str:
    return "DDP" if summary.method == REFERENCE else summary.name


def _reference(summaries: list[Summary]) -> Summary | None:
    return next((s for s in summaries if s.method == REFERENCE), None)


def _final(summary: Summary) -> str:
    assert summary.final is not None
    return labelled_metric_text(summary.runs[0].metric, summary.final.mean)


def _best_final(summaries: list[Summary]) -> Summary:
    """Returns the summary with the best final value; NaN counts as the worst."""

    def goodness(summary: Summary) -> float:
        assert summary.final is not None
        value = summary.final.mean
        if value != value:
            return float("-inf")
        return value if summary.runs[0].higher_is_better else -value

    return max(summaries, key=goodness)
