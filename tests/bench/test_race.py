"""The race: its lanes while it runs, and its table, of synthetic runs."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from laconic.bench.race import WINNER, Race, race_table
from laconic.bench.strategies import parse_contender
from tests.bench import synthetic


def rendered(what: RenderableType) -> list[str]:
    console = Console(width=160, file=io.StringIO())
    console.print(what)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_table_is_sorted_by_time_marks_the_winner_and_explains_each_column() -> None:
    lines = rendered(race_table(synthetic.comparison(), 0.85))
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert rows[0] == f"{WINNER} divisible+ratio=1024"
    assert sum(WINNER in row for row in rows) == 1
    assert rows.index("adpsgd") < rows.index("powersgd") < rows.index("ddp") < rows.index("none")
    assert rows[-1] == "divisible+ratio=1024 (seed 2)", "failed runs are listed"
    header = next(line for line in lines if "time to 85 %" in line)
    for column in [cell.strip() for cell in header.split("┃")[2:-1]]:
        explanation = [line for line in lines if line.startswith(f"{column} ") and "│" not in line]
        assert len(explanation) == 1, f"{column} must be explained in one line"
    cells = {line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]] for line in lines if "│" in line}
    assert cells["ddp"][1] == "×1.00"
    assert cells["none"][:2] == ["not reached", "–"]
    assert any("×" in line and "faster" in line for line in lines)


def test_a_target_that_is_too_easy_has_no_winner_and_no_speed_up() -> None:
    text = " ".join(" ".join(rendered(race_table(synthetic.comparison(), 0.8))).split())
    assert "80 % does not show what communication buys: none_averaged (workers that never communicate, averaged" in text
    assert "No speed-up is reported for this target: choose a harder one." in text
    assert WINNER not in text
    assert "×" not in text
    assert "against DDP" not in text


def test_lanes_grow_and_show_results() -> None:
    records = synthetic.comparison()
    contenders = [parse_contender(name) for name in ("none", "ddp", "local_sgd")]
    race = Race(Console(file=io.StringIO(), force_terminal=True), contenders, 0.85)
    for record in records:
        if record.name in ("none", "ddp") and record.seed == 0:
            race.show_result(record)
    none, ddp, local_sgd, progress = rendered(race.lanes("local_sgd", 1.0, "step 3/400"))
    assert none.split() == ["none", "not", "reached"]
    assert ddp.count("█") > local_sgd.count("█")
    assert ddp.rstrip().endswith(" s")
    assert progress.strip() == "local_sgd: step 3/400"
