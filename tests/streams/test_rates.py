"""Rates: the laws and lists of the paper, and how many samples a rate that changes has sent by when."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import ConfigError, DataError
from farflung.streams.rates import RATE_SETS, RateCourse, build_courses, draw_rates


@pytest.mark.parametrize("name", RATE_SETS)
def test_laws_have_the_moments_of_the_table(name: str) -> None:
    law, found = RATE_SETS[name], draw_rates(name, 4000, seed=1)
    assert min(found) >= 8
    assert all(rate == round(rate) for rate in found)
    # A tenth of S1's law is below the floor of 8, which raises its mean by about 1.
    assert statistics.mean(found) == pytest.approx(law.mean, abs=2.0 if name == "S1" else 0.1 * law.deviation)
    assert statistics.stdev(found) == pytest.approx(law.deviation, rel=0.1)


def test_draws_depend_on_the_seed_and_are_those_of_all_replicas() -> None:
    assert build_courses("S1", 8, 3) == build_courses("S1", 8, 3)
    assert build_courses("S1", 8, 3) != build_courses("S1", 8, 4)
    assert len({one.rates for one in build_courses("S2", 8, 3)}) > 4


COURSES = st.lists(st.tuples(st.floats(0.05, 5.0), st.floats(0.1, 50.0)), min_size=1, max_size=5).map(
    lambda spans: RateCourse(
        tuple(sum(length for length, _ in spans[:index]) for index in range(len(spans))),
        tuple(rate for _, rate in spans),
    )
)


@given(COURSES, st.floats(0.0, 20.0), st.integers(1, 200))
def test_a_sample_has_been_sent_when_it_arrives(course: RateCourse, since: float, number: int) -> None:
    at = course.compute_delay(number, since)
    assert course.count_sent(since, at) == pytest.approx(number)
    assert course.count_sent(since, at / 2) < number


@given(COURSES, st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_spans_of_time_add_up(course: RateCourse, since: float, first: float, second: float) -> None:
    both = course.count_sent(since, first) + course.count_sent(since + first, second)
    assert both == pytest.approx(course.count_sent(since, first + second), abs=1e-9)


def test_a_rate_stays_until_the_next_begins() -> None:
    (course,) = build_courses([(0, 4), (2, 8)], 1, 0)
    assert [course.get_rate(t) for t in (0.0, 1.9, 2.0, 99.0)] == [4, 4, 8, 8]
    assert [course.compute_delay(k, 0.0) for k in (4, 8, 12, 16)] == [1.0, 2.0, 2.5, 3.0]
    assert course.compute_delay(4, 1.5) == 0.75
    assert course.constant_rate is None


def test_each_replica_may_have_a_course_or_a_number() -> None:
    changing = ((0.0, 4.0), (2.0, 8.0))
    one, two = build_courses([changing, 5], 2, 0)
    assert (one.rates, two.rates) == ((4, 8), (5,))
    assert build_courses(changing, 3, 0) == [one] * 3


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text("0,20\n60,5\n\n")
    assert build_courses(f"trace {path}", 2, 0) == build_courses([(0, 20), (60, 5)], 2, 0)
    path.write_text("0,twenty\n")
    with pytest.raises(DataError, match=r"rates.csv: must hold lines of seconds,samples per second"):
        build_courses(f"trace {path}", 1, 0)
    path.write_text("5,20\n")
    with pytest.raises(ConfigError, match=r"rates.csv: stream rate\(.*the first begin 0"):
        build_courses(f"trace {path}", 1, 0)


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        ("S3", "no such rates; there are S1, S2, S1', S2', trace FILE"),
        (True, "must be a number of samples per second above 0"),
        (None, "must be a number"),
        ([], "0 rates for 9 replicas"),
        ([1, 2], "2 rates for 9 replicas"),
        (["S1"] * 9, "must be a number"),
        ([(1, 5)], "the first begin 0"),
        ([(0, 5), (0, 6)], "the first begin 0"),
        ([(0, 5), (math.inf, 6)], "the first begin 0"),
        ([(0, 5), (3, 0)], "above 0"),
        (math.inf, "above 0"),
    ],
)
def test_what_cannot_work_is_refused(rate: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_courses(rate, 9, 0)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
