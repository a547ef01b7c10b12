"""The rate of a source, by how it grows while it is looked at: exact numbers from exact times."""

from __future__ import annotations

import pytest

from farflung.streams.growth import Growth


def rate_of(*marks: tuple[float, int], span_s: float = 1.0) -> float | None:
    growth = Growth(span_s)
    for mark in marks:
        growth.record_count(*mark)
    return growth.rate


def test_a_rate_is_known_once_the_span_is_over() -> None:
    assert rate_of((10.0, 500)) is None
    assert rate_of((10.0, 500), (10.5, 520)) is None
    assert rate_of((10.0, 500), (10.5, 520), (11.0, 540)) == 40.0


def test_messages_of_before_and_bursts_count_for_nothing_else() -> None:
    marks = [(0.5 * number, 1_000_000 + 50 * (number // 2)) for number in range(9)]
    assert rate_of(*marks) == 50.0


def test_a_rate_follows_the_last_span() -> None:
    faster = [(float(second), 10 * second) for second in range(5)]
    faster += [(4.0 + second, 40 + 100 * second) for second in range(1, 4)]
    assert rate_of(*faster) == 100.0
    assert rate_of(*faster, span_s=3.0) == 100.0
    assert rate_of(*faster, span_s=6.0) == pytest.approx((340 - 10) / 6)


def test_where_few_come_more_time_is_looked_at() -> None:
    assert rate_of(*((0.25 * number, number // 40) for number in range(600))) == pytest.approx(0.1, rel=0.1)


def test_what_is_silent_is_the_slower_the_longer_and_never_nothing() -> None:
    assert rate_of((0.0, 7), (1.0, 7)) == 1.0
    assert rate_of((0.0, 7), (1.0, 7), (4.0, 7)) == 0.25
    fast = [(0.25 * number, min(number, 40) * 25) for number in range(400)]
    assert rate_of(*fast) == pytest.approx(1 / (99.75 - 10.0))


def test_a_measurement_may_have_to_do_before_its_time() -> None:
    growth = Growth(2.0)
    growth.finalize()
    assert growth.rate is None
    growth.record_count(1.0, 40)
    growth.finalize()
    assert growth.rate == 0.5, "one in a span: nothing is known"
    growth.finalize()
    growth.record_count(2.0, 70)
    growth.record_count(3.0, 100)
    assert growth.rate == 30.0
    growth = Growth(2.0)
    growth.record_count(0.0, 0)
    growth.record_count(0.1, 40)
    growth.finalize()
    assert growth.rate == 400.0
