"""Pacing: exact times on a clock that the test moves."""

from __future__ import annotations

import pytest

from farflung.devices import DeviceProfile
from farflung.types import Cost
from farflung.wall.pace import Pace

FORWARD, BACKWARD, OPTIMIZER = Cost("forward", 10), Cost("backward", 10), Cost("optimizer", 0)


class Clock:
    """A clock that idling and computing move."""

    def __init__(self) -> None:
        self.now = 100.0

    def move(self, seconds: float) -> None:
        self.now += seconds


def paced(clock: Clock) -> Pace:
    device = DeviceProfile("test", forward_s=0.1)
    return Pace(device, 0, 0, lambda: clock.now, clock.move)


def compute(pace: Pace, clock: Clock, cost: Cost, seconds: float) -> None:
    """What the runtime does around a computation that takes ``seconds`` here."""
    _, ends = pace.begin(cost)
    clock.move(seconds)
    if cost.kind != "optimizer":
        pace.record_overrun(ends)
    pace.end_computation(ends)


def test_a_fast_machine_idles_to_the_modelled_end() -> None:
    clock = Clock()
    pace = paced(clock)
    compute(pace, clock, FORWARD, 0.25)
    assert clock.now == pytest.approx(101.0)
    compute(pace, clock, BACKWARD, 0.25)
    assert clock.now == pytest.approx(103.0)
    assert (pace.steps, pace.num_overruns) == (1, 0)


def test_what_lies_between_computations_is_made_up_for() -> None:
    clock = Clock()
    pace = paced(clock)
    compute(pace, clock, FORWARD, 0.25)
    compute(pace, clock, OPTIMIZER, 0.1)  # the model gives it no time
    clock.move(0.2)
    compute(pace, clock, FORWARD, 0.25)
    assert clock.now == pytest.approx(102.0)
    assert pace.num_overruns == 0


def test_a_wait_is_not_made_up_for_but_what_follows_it_is() -> None:
    clock = Clock()
    pace = paced(clock)
    compute(pace, clock, FORWARD, 0.25)
    clock.move(5.0)
    pace.finish_wait()
    compute(pace, clock, OPTIMIZER, 0.1)
    clock.move(0.2)
    compute(pace, clock, FORWARD, 0.25)
    assert clock.now == pytest.approx(107.0), "a step is never shorter than the model's"


def test_a_part_of_a_pass_begins_when_the_device_is_free() -> None:
    clock = Clock()
    pace = paced(clock)
    pace.begin(FORWARD)
    pace.advance(0.25)
    assert clock.now == pytest.approx(100.25)
    clock.move(0.5)  # this machine computes meanwhile
    pace.advance(0.75)
    assert clock.now == pytest.approx(101.0)
    clock.move(2.0)
    pace.finish_wait()
    pace.advance(0.25)
    assert clock.now == pytest.approx(103.25)


def test_a_step_that_overran_is_counted_once_and_not_shortened() -> None:
    clock = Clock()
    pace = paced(clock)
    compute(pace, clock, FORWARD, 1.5)
    assert clock.now == pytest.approx(101.5)
    compute(pace, clock, BACKWARD, 4.0)
    assert pace.num_overruns == 1
    pace.finish_wait()
    compute(pace, clock, FORWARD, 0.1)
    assert (pace.steps, pace.num_overruns) == (2, 1)
    assert pace.to_json() == {"device": "test", "steps": 2, "num_overruns": 1}
