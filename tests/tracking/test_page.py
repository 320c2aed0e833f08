"""The live view's page in a real browser: wide and narrow, light and dark, with hostile texts, when the job ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.tracking.report import Overview, Report
from laconic.tracking.server import Server
from tests.bench import chromium

HOSTILE = "<img src=x onerror=\"document.title='broken'\"> " + "a" * 200
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# The contrast between an element's text and the ground of the page, as WCAG defines it.
CONTRAST = """(selector => {
  const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((s, c, i) => s + c * [.2126, .7152, .0722][i], 0);
  const a = light(getComputedStyle(document.querySelector(selector)).color);
  const b = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
})"""


@pytest.fixture
def server() -> Iterator[Server]:
    overview = Overview("Divisible", 4)
    own = Report(beat=1, host="node0", step=12345, step_seconds=0.25, waiting_share=0.4, bytes_per_second=1.25e6)
    own.nbytes = {"foreground": 10**9, "background": 5 * 10**8}
    slow = Report(beat=1, host="node1", step=7, doing="after_step", doing_seconds=12.0)
    failed = Report(beat=1, host=HOSTILE, state="failed", error=HOSTILE)
    overview.add({0: own.to_text(), 1: slow.to_text(), 2: failed.to_text()})
    running = Server(("127.0.0.1", 0), overview.status)
    running.start()
    yield running
    running.close()


def wait_until(page: chromium.Page, condition: str) -> None:
    deadline = time.monotonic() + chromium.TIMEOUT_SECONDS
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"the page never came to: {condition}; {page.problems()}"


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page(browser: chromium.Chromium, server: Server, width: int, scheme: str, tmp_path: Path) -> None:
    page = browser.open(f"{server.url}/", width=width, scheme=scheme)
    wait_until(page, "document.documentElement.dataset.drawn === 'yes'")
    rows = page.evaluate(
        "[...document.querySelectorAll('#rows tr')].map(tr => Object.fromEntries("
        "[...tr.querySelectorAll('td')].map(td => [td.dataset.name, td.textContent])))"
    )
    assert len(rows) == 4
    assert rows[0] | {"last seen": ""} == {
        "rank": "0",
        "host": "node0",
        "state": "training",
        "step": "12,345",
        "step time": "250 ms",
        "waiting": "40 %",
        "doing": "computing",
        "link rate": "1.25 MB/s",
        "sent": "1.50 GB",
        "last seen": "",
        "last error": "–",
    }
    assert rows[1]["doing"] == "after_step, 12.0 s"
    assert rows[2]["last error"] == rows[2]["host"] == HOSTILE
    assert set(rows[3].values()) == {"3", "no report", "–"}
    assert [row["state"] for row in rows] == ["training", "training", "failed", "no report"]
    assert page.evaluate("document.title") == "2/4 – laconic"
    assert page.evaluate(OVERFLOW) <= 0
    visible = (
        "[...document.querySelectorAll('#rows td span')].every(e => e.getBoundingClientRect().right <= innerWidth)"
    )
    assert page.evaluate(visible)
    for selector in (".good", ".bad", "#note", "body"):
        assert page.evaluate(f"{CONTRAST}({selector!r})") >= 4.5, f"{selector} can be read"
    assert {url.partition("?")[0] for url in page.requests()} <= {
        f"{server.url}/",
        f"{server.url}/status.json",
        "data:,",
    }
    assert page.problems() == []
    page.screenshot(tmp_path / f"{scheme}-{width}.png")
    page.close()


def test_the_page_says_when_the_job_has_ended(browser: chromium.Chromium, server: Server) -> None:
    page = browser.open(f"{server.url}/")
    wait_until(page, "document.documentElement.dataset.drawn === 'yes'")
    server.close()
    wait_until(page, "document.getElementById('note').textContent.startsWith('rank 0 does not answer')")
    assert page.evaluate("document.querySelectorAll('#rows tr').length") == 4, "the last view stays"
    page.close()
