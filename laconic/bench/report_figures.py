"""All figures of a comparison. The report's page and the pictures of README and docs draw the same specifications."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from laconic.bench import report_costs as costs
from laconic.bench import report_metric as metric
from laconic.bench.record import Record
from laconic.bench.report_lines import Figure
from laconic.bench.report_metric import Comparison
from laconic.bench.summary import Summary
from laconic.bench.units import is_simulated, link_text


def figures_of(summaries: Sequence[Summary], target: float | None) -> list[Figure]:
    """Returns the figures for which there is data, in the order of the page.

    Args:
        summaries: One per contender.
        target: A value of the metric, or None.
    """
    c = Comparison.of(summaries, target)
    if not c.ran:
        return []
    figures = [
        metric.metric_over_time(c),
        metric.time_to_target(c),
        metric.metric_over_bytes(c),
        metric.metric_over_steps(c),
        costs.link_use(c),
        costs.training_loss(c),
        costs.step_time(c),
        costs.bytes_per_step(c),
        costs.waiting(c),
        *costs.internals(c),
    ]
    drawn = [figure for figure in figures if figure is not None]
    return [*_without_gap(drawn, folded=False), *_without_gap(drawn, folded=True)]


def _without_gap(figures: Sequence[Figure], folded: bool) -> list[Figure]:
    """Returns the (un)folded figures; the last one is as wide as the page if it would stand beside a gap."""
    chosen = [figure for figure in figures if figure.folded == folded]
    halves = [figure for figure in chosen if figure.size == "half"]
    if len(halves) % 2:
        chosen = [dataclasses.replace(f, size="whole") if f is halves[-1] else f for f in chosen]
    return chosen


def provenance(records: Sequence[Record]) -> str:
    """Returns how the numbers of all figures came about, for the line below each figure."""
    links = list(dict.fromkeys(record.link for record in records))
    simulated = [link_text(link) for link in links if is_simulated(link)]
    texts = ["loopback" if link == "none" else f"an emulated network, {link_text(link)}" for link in links]
    measured = [text for link, text in zip(links, texts, strict=True) if not is_simulated(link)]
    return "; ".join(
        [f"Measured with real processes on {' and on '.join(measured)}"] * bool(measured)
        + [f"Simulated in one process, not measured: {' and '.join(simulated)}"] * bool(simulated)
    )
