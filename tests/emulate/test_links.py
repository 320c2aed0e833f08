"""The text form of links, and which texts are rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.emulate import Link, parse_links


def test_one_link_for_all() -> None:
    assert parse_links("100mbit", workers=4) == [Link(100_000_000)] * 4


def test_one_link_for_each_in_order() -> None:
    links = parse_links("100mbit, 2.5gbit,10mbit,1500kbit", workers=4)
    assert [link.bits_per_second for link in links] == [100_000_000, 2_500_000_000, 10_000_000, 1_500_000]


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10mbit+20ms", Link(10_000_000, delay_seconds=0.02)),
        ("10mbit+1s%0.5", Link(10_000_000, delay_seconds=1.0, loss=0.005)),
        ("10MBIT%1", Link(10_000_000, loss=0.01)),
        ("100mbit+25ms~5ms%0.1", Link(100_000_000, delay_seconds=0.025, loss=0.001, jitter_seconds=0.005)),
    ],
)
def test_delay_and_loss(text: str, link: Link) -> None:
    assert parse_links(text, workers=1) == [link]
    assert link.is_relayed


@pytest.mark.parametrize(
    "text", ["", "none", "100", "mbit", "100mb", "100 mbit", "-1mbit", "100mbit,", "1e3mbit", "1mbit%1+1ms", "1mbit+1"]
)
def test_errors_name_the_text_and_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match=r"RATE\[\+DELAY\]\[~JITTER\]\[%LOSS\].*not ") as raised:
        parse_links(text, workers=2)
    assert repr(text.split(",")[-1]) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0mbit", "between 1mbit and 10gbit, not 0 bit/s"),
        ("10kbit", "between 1mbit and 10gbit, not 10000 bit/s"),
        ("11gbit", "between 1mbit and 10gbit, not 11000000000 bit/s"),
        ("10mbit+1ms~2ms", "between 0 and its delay of 0.001 seconds, not 0.002"),
        ("2gbit+1ms", "at most 1gbit, not 2000000000 bit/s"),
        ("10mbit+11s", "between 0 and 10 seconds, not 11.0"),
        ("10mbit%100", "less than 1 (100 %), not 1.0"),
    ],
)
def test_values_out_of_range_are_rejected(text: str, rule: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_links(text, workers=1)
    assert rule in str(raised.value)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("workers", [-1, 0, 65])
def test_number_of_workers_out_of_range(workers: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 64, not {workers}"):
        parse_links("100mbit", workers)


def test_number_of_links_must_match() -> None:
    with pytest.raises(ValueError, match="one for each of the 3 workers, not 2: '1mbit,1mbit'"):
        parse_links("1mbit,1mbit", workers=3)


@given(st.integers(1_000_000, 10_000_000_000))
def test_a_segment_fits_into_the_burst_and_the_queue_is_short(bits_per_second: int) -> None:
    link = Link(bits_per_second)
    assert 2 * 1514 <= link.frames_per_segment * 1514 * 2 <= link.burst_nbytes <= link.queue_nbytes
    seconds_to_drain = link.queue_nbytes / link.frame_bytes_per_second
    assert seconds_to_drain < 0.026 or link.queue_nbytes == 64 * 1514
