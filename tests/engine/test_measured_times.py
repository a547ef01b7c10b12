"""What a rank counts as its steps, its waits and its exchanges, on a clock set by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from farflung.engine.times import MEDIAN_WINDOW, StepTimer


class Clock:
    now = 7.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_waits_and_what_is_excluded_are_no_part_of_a_step() -> None:
    clock = Clock()
    times = StepTimer(lambda: clock.now)
    times.resume_from(100.0)
    for number, computing_s in enumerate([2.0, 4.0, 9.0], 1):
        times.begin_step()
        clock.passes(computing_s)
        for _ in range(2):
            with times.measure_wait():
                clock.passes(3.0)
        with times.exclude():
            clock.passes(50.0)
        assert times.waited_s == 6.0 * number
    times.begin_step()
    assert times.to_json() == {"elapsed_s": 100.0 + 15.0 + 18.0 + 150.0, "step_s": 4.0, "exchange_s": None}
    for _ in range(MEDIAN_WINDOW):
        clock.passes(1.0)
        times.begin_step()
    assert times.to_json()["step_s"] == 1.0  # type: ignore[index,call-overload]


def test_exchanges_of_one_step_count_from_the_first_to_the_last() -> None:
    clock = Clock()
    times = StepTimer(lambda: clock.now)

    def record(step: int, began_s: float, ended_s: float | None) -> Any:
        times.record_exchange(SimpleNamespace(step=step, start_s=began_s, end_s=ended_s))  # type: ignore[arg-type]
        return times.to_json()["exchange_s"]  # type: ignore[index,call-overload]

    assert record(0, 2.0, 4.0) is None
    assert record(0, 1.0, 3.0) is None
    assert record(1, 5.0, None) == 3.0, "from 1 to 4"
    assert times.last_arrival_s == 7.0
    assert record(2, 6.0, 6.5) == 2.5, "the median of 3 and 2"
    assert times.last_arrival_s == 7.0
