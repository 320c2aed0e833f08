"""Figures of what training costs, as Vega-Lite specifications: bytes, time, waiting, use of the link, loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from laconic.bench.record import Record
from laconic.bench.report_axes import Axis, axis
from laconic.bench.report_lines import Figure, Line, line_spec, short
from laconic.bench.report_metric import Comparison, time_axis, values_at
from laconic.bench.report_rows import dot_spec, stack_spec
from laconic.bench.summary import Curve, Summary, curve_of
from laconic.bench.units import SIMULATED, is_simulated, nbytes_text, number_text, seconds_text
from laconic.emulate import parse_links
from laconic.link import parse_link

HEIGHT = 240


def bytes_per_step(c: Comparison) -> Figure | None:
    """Returns payload and network traffic per step, on a logarithmic scale."""
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for summary in c.ran:
        channels = summary.payload_nbytes_per_step
        payload, nic = sum(channels.values()), summary.nic_nbytes_per_step
        parts = ", ".join(f"{channel} {nbytes_text(nbytes)}" for channel, nbytes in channels.items() if nbytes)
        tip = f"{summary.name}\npayload {nbytes_text(payload)}" + (f" ({parts})" if parts else "")
        tip += "" if nic is None else f"\nnetwork interface {nbytes_text(nic)}"
        row: dict[str, Any] = {
            "method": summary.name,
            "payload": short(payload),
            "nic": short(nic),
            "text": nbytes_text(payload),
        }
        rows.append(row | {channel: short(nbytes) for channel, nbytes in channels.items()})
        for kind, value in {"payload": payload, "network interface": nic}.items():
            if payload and value:
                points.append({"method": summary.name, "kind": kind, "value": short(value), "tip": tip})
    if not points:
        return None
    rows.sort(key=lambda row: row["payload"])
    x = axis("sent by one worker in a step", "bytes", [point["value"] for point in points], log=True)
    columns = {"method": "method", "payload": "payload_nbytes", "nic": "network_interface_nbytes"}
    columns |= {channel: f"{channel}_nbytes" for s in c.ran for channel in s.payload_nbytes_per_step}
    note = "The number is the payload; the network interface also counts headers and other traffic."
    return Figure("step-bytes", "Bytes per step", note, dot_spec(rows, points, c.looks, x), columns)


def step_time(c: Comparison) -> Figure | None:
    """Returns where the time of a step goes, in seconds or as shares."""
    rows: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for summary in c.ran:
        time = summary.step_time
        if time is None or not time.total:
            continue
        split = {"compute": time.compute, "overhead": time.overhead, "waiting": time.waiting}
        known = {part: max(0.0, seconds) for part, seconds in split.items() if seconds is not None}
        if (rest := time.total - sum(known.values())) > 0.01 * time.total:
            known["not measured"] = rest
        tip = "\n".join([summary.name, *(f"{part} {seconds_text(seconds)}" for part, seconds in known.items())])
        start = 0.0
        for part, seconds in known.items():
            ends = {"seconds_start": start, "seconds_end": start + seconds}
            ends |= {"share_start": start / time.total, "share_end": (start + seconds) / time.total}
            parts.append({"method": summary.name, "part": part, "tip": tip} | {k: short(v) for k, v in ends.items()})
            start += seconds
        row: dict[str, Any] = {"method": summary.name, "text": seconds_text(time.total), "total": short(time.total)}
        rows.append(row | {part: short(seconds) for part, seconds in split.items()})
    if not rows:
        return None
    rows.sort(key=lambda row: row["total"])
    longest = max(part["seconds_end"] for part in parts)
    specs = [
        stack_spec(rows, parts, Axis("time per step", "seconds", 0, longest), "seconds"),
        stack_spec(rows, parts, Axis("share of the step", "share", 0, 1), "share"),
    ]
    note = "Average step, mean over workers and seeds. Overhead is the method’s work on the training thread."
    columns = {"method": "method", "total": "seconds"}
    columns |= {part: f"{part}_seconds" for part in ("compute", "overhead", "waiting")}
    return Figure("step-time", "Time per step", note, specs[0], columns, {"as shares": specs[1]})


def waiting(c: Comparison) -> Figure | None:
    """Returns the waiting time of each worker, one dot per rank."""
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for summary in c.communicating:
        waits = [time.waiting for time in summary.worker_step_times]
        known = [max(wait, 0.0) for wait in waits if wait is not None]
        if not known or len(known) < len(waits):
            continue
        longest = max(range(len(known)), key=lambda rank: known[rank])
        text = f"{seconds_text(min(known))} to {seconds_text(max(known))} (rank {longest})"
        rows.append({"method": summary.name, "text": text, "mean": sum(known) / len(known)})
        for rank, wait in enumerate(known):
            tip = f"{summary.name}, rank {rank}\nwaits {seconds_text(wait)} per step"
            points.append({"method": summary.name, "kind": "", "rank": rank, "value": short(wait), "tip": tip})
    if not rows:
        return None
    rows.sort(key=lambda row: row["mean"])
    x = axis("waiting per step", "seconds", [point["value"] for point in points], zero=True)
    note = "One dot per worker, mean over seeds. The worker that waits least is the one that the others wait for."
    columns = {"method": "method", "rank": "rank", "value": "waiting_seconds"}
    spec = dot_spec(rows, points, c.looks, x)
    return Figure("waiting", "Waiting per worker", note, spec, columns, table="points")


def link_use(c: Comparison) -> Figure | None:
    """Returns the rate at which a worker sends, between evaluations, and the rate of its link."""
    by_nic = all(point.nic_nbytes is not None for s in c.ran for run in s.runs for point in run.points)
    lines = []
    for summary in c.communicating:
        curve = curve_of([_rates(run, by_nic) for run in summary.runs])
        seconds = values_at(curve, summary.curve(lambda point: point.seconds))
        lines.append(Line(summary.name, seconds, curve, {}, _rate_tip(summary, curve, seconds)))
    rows = [row for line in lines for row in line.rows() if row["x"] > 0]
    if not rows:
        return None
    links = {run.link for summary in c.ran for run in summary.runs}
    rate = _link_rate(links.pop(), by_nic) if len(links) == 1 else None
    highs = [row["high"] for row in rows] + ([] if rate is None else [rate])
    y = axis("sent by one worker", "bits", highs, zero=True, log=False)
    goal = None if rate is None else (rate, "full rate of the link")
    spec = line_spec(rows, c.looks, time_axis(rows), y, HEIGHT, goal, interpolate="step-before")
    counted = "Counted by the network interface" if by_nic else "Payload"
    note = f"{counted}, mean over workers; each marker ends the interval between two evaluations that it averages."
    if rate is not None and max(row["value"] for row in rows) > 1.02 * rate:
        note += (
            " In runs of earlier versions the clock stopped for evaluations, but background traffic went on: hence "
            "values above the link’s rate."
        )
    columns = {"method": "method", "step": "step", "x": "seconds", "value": "bits_per_second"}
    columns |= {"low": "bits_per_second_lowest_seed", "high": "bits_per_second_highest_seed"}
    return Figure("link-use", "Use of the link over time", note, spec, columns)


def training_loss(c: Comparison) -> Figure | None:
    """Returns the training loss over steps."""
    note = "On each worker’s own batches." + c.bands()
    curves = {summary.name: summary.loss_curve() for summary in c.ran}
    return _over_steps(c, "train-loss", "Training loss over steps", note, "training loss", curves)


def internals(c: Comparison) -> list[Figure | None]:
    """Returns one folded figure per metric that methods report of themselves, if it varies."""
    curves = {summary.name: summary.method_curves() for summary in c.ran}
    keys = dict.fromkeys(key for by_key in curves.values() for key in by_key)
    figures = []
    for i, key in enumerate(keys):
        varying = {name: by_key[key] for name, by_key in curves.items() if key in by_key and _varies(by_key[key])}
        words = key.replace("_", " ")
        note = "As the method reports it." + c.bands()
        figures.append(
            _over_steps(c, f"internal-{i}", words[:1].upper() + words[1:], note, words, varying, folded=True)
        )
    return figures


def _over_steps(
    c: Comparison, id: str, title: str, note: str, label: str, curves: dict[str, Curve], folded: bool = False
) -> Figure | None:
    lines = [
        Line(name, [float(step) for step in curve.steps], curve, {}, _step_tip(name, label, curve))
        for name, curve in curves.items()
    ]
    rows = [row for line in lines for row in line.rows()]
    if not rows:
        return None
    x = axis("training steps", "count", [row["x"] for row in rows], zero=True, log=False)
    y = axis(label, "count", [row[key] for row in rows for key in ("low", "high")])
    columns = {"method": "method", "step": "step", "value": label.replace(" ", "_")}
    columns |= {"low": "lowest_seed", "high": "highest_seed"}
    return Figure(id, title, note, line_spec(rows, c.looks, x, y, HEIGHT), columns, folded=folded)


def _rates(run: Record, by_nic: bool) -> list[tuple[int, float | None]]:
    """Returns the bits per second that one worker sent between each evaluation and the one before, by step."""
    rates: list[tuple[int, float | None]] = []
    seconds = nbytes = 0.0
    for point in run.points:
        sent = (point.nic_nbytes if by_nic else point.payload_nbytes) or 0.0
        if point.seconds > seconds:
            rates.append((point.step, 8 * (sent - nbytes) / (point.seconds - seconds)))
        seconds, nbytes = point.seconds, sent
    return rates


def _link_rate(link: str, with_headers: bool) -> float | None:
    """Returns the bits per second that one host can send, or None if there is no limit or hosts differ."""
    if link == "none":
        return None
    if is_simulated(link):
        texts = link.removeprefix(SIMULATED).split(",")
        simulated = {float(parse_link(text).bits_per_second) for text in texts}
        return simulated.pop() if len(simulated) == 1 else None
    links = parse_links(link, link.count(",") + 1)
    rates = {8.0 * one.frame_bytes_per_second if with_headers else float(one.bits_per_second) for one in links}
    return rates.pop() if len(rates) == 1 else None


def _varies(curve: Curve) -> bool:
    values = [value for value in curve.mean if math.isfinite(value)]
    return bool(values) and max(values) - min(values) > 1e-6 * max(map(abs, values))


def _rate_tip(summary: Summary, curve: Curve, seconds: Sequence[float | None]) -> Callable[[int], str]:
    return lambda i: f"{summary.name}\n{number_text(curve.mean[i] / 1e6)} Mbit/s\nuntil {seconds_text(seconds[i])}"


def _step_tip(name: str, label: str, curve: Curve) -> Callable[[int], str]:
    return lambda i: f"{name}\n{label} {number_text(curve.mean[i])}\nstep {curve.steps[i]:,}"
