"""Capacities over time."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import ConfigError
from farflung.network import BandwidthTrace
from farflung.network.link import scale_capacity


def test_steps() -> None:
    trace = BandwidthTrace((0.0, 1.0, 3.0), (5.0, 0.0, 7.0), 4.0, "hold")
    assert [trace.get_bandwidth(t) for t in (0.0, 0.99, 1.0, 2.9, 3.0, 4.0, 100.0)] == [
        5.0,
        5.0,
        0.0,
        0.0,
        7.0,
        7.0,
        7.0,
    ]
    assert [trace.get_next_change(t) for t in (0.0, 0.5, 1.0, 3.0, 9.0)] == [
        1.0,
        1.0,
        3.0,
        math.inf,
        math.inf,
    ]
    assert trace.mean_bps == 3.0


def test_it_repeats() -> None:
    trace = BandwidthTrace((0.0, 1.0), (5.0, 2.0), 4.0, "repeat")
    assert [trace.get_bandwidth(t) for t in (0.0, 1.0, 3.9, 4.0, 5.0, 8.5)] == [5.0, 2.0, 2.0, 5.0, 2.0, 5.0]
    assert [trace.get_next_change(t) for t in (0.0, 1.0, 4.0, 7.0)] == [1.0, 4.0, 5.0, 8.0]


def test_its_end_is_an_error_by_default() -> None:
    trace = BandwidthTrace((0.0,), (5.0,), 4.0, name="cell.toml: trace cell")
    assert trace.get_bandwidth(3.999) == 5.0
    assert trace.get_next_change(1.0) == 4.0
    with pytest.raises(ConfigError, match=r"cell.toml: trace cell: ends at 4 s"):
        trace.get_bandwidth(4.0)


@given(
    st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=4),
    st.floats(0.0, 1e4),
)
def test_time_always_moves_on(steps: list[float], t: float) -> None:
    """However times round: the next change is later, and the changes go through the steps in order."""
    times = [0.0]
    for step in steps:
        times.append(times[-1] + step)
    values = tuple(float(k + 1) for k in range(len(steps)))
    trace = BandwidthTrace(tuple(times[:-1]), values, times[-1], "repeat")
    seen = []
    for _ in range(2 * len(steps) + 2):
        later = trace.get_next_change(t)
        assert later > t
        t = later
        seen.append(trace.get_bandwidth(t))
    for one, following in itertools.pairwise(seen):
        assert following == one % len(steps) + 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (((), (), 1.0), "as many"),
        (((0.0, 1.0), (1.0,), 2.0), "as many"),
        (((1.0,), (1.0,), 2.0), "begin at 0"),
        (((0.0, 2.0, 1.0), (1.0, 1.0, 1.0), 3.0), "ascend"),
        (((0.0, 2.0), (1.0, 1.0), 2.0), "end_s = 2.0"),
        (((0.0,), (1.0,), math.inf), "end_s = inf"),
        (((0.0,), (-1.0,), 2.0), "bandwidth_bps = -1.0"),
        (((0.0,), (math.nan,), 2.0), "bandwidth_bps = nan"),
        (((0.0, 1.0), (0.0, 0.0), 2.0), "stays at 0"),
        (((0.0, 1.0), (1.0, 0.0), 2.0, "hold"), "stays at 0"),
        (((0.0,), (1.0,), 2.0, "stop"), "after = 'stop'"),
    ],
)
def test_what_is_no_trace(arguments: tuple[object, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        BandwidthTrace(*arguments)  # type: ignore[arg-type]


def test_stretched_and_mapped() -> None:
    trace = BandwidthTrace((0.0, 1.0), (5.0, 2.0), 4.0, "repeat", "cell")
    assert scale_capacity(trace, 3.0, 2.0) == BandwidthTrace((0.0, 2.0), (15.0, 6.0), 8.0, "repeat", "cell")
