"""The buffer of streams: whatever comes when, each sample is used once, dropped or held; a replay does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.decisions import DecisionLog
from farflung.errors import ConfigError
from farflung.streams.buffer import Buffer, with_buffer_options
from farflung.types import Decision, Json, StreamContext
from tests.streams.test_streams import numbers

LANES, STRIDE = 3, 16

SETTINGS: list[dict[str, Any]] = [
    {},
    {"least": 1, "most": 5},
    {"least": 2, "most": 6, "policy": "truncation"},
    {"least": 2, "most": 4, "backlog": 7, "full": "drop_oldest"},
    {"least": 1, "most": 9, "window_s": 0.5},
    {"least": 2, "most": 9, "window_s": 0.5, "policy": "truncation", "weigh": "by_rate"},
]


class Driven:
    """A buffer, and what became of each id."""

    def __init__(self, settings: dict[str, Any], log: DecisionLog, lanes: int) -> None:
        def decide(name: str, step: int, local: Callable[[], Json]) -> Decision:
            return log.decide(name, step, local, 0)

        self.gone: list[int] = []
        self.buffer = Buffer(**settings)
        self.buffer.prepare(
            StreamContext(numbers(4), 0, 1, True, 3, 5, decide),
            lanes=lanes,
            stride=STRIDE,
            on_remove=lambda ids: self.gone.extend(ids.tolist()),
        )
        self.next = dict.fromkeys(range(lanes), 0)
        self.step = 0
        self.taken: list[list[int]] = []
        self.dropped = 0

    def arrive(self, lane: int, count: int) -> None:
        first = self.next[lane]
        self.next[lane] += count
        self.buffer.add_arrivals(torch.arange(first, first + count) * STRIDE + lane)

    def try_step(self, rate: float) -> bool:
        missing, arrivals = self.buffer.poll(self.step, lambda: rate)
        if missing:
            return False
        assert self.buffer.poll(self.step, lambda: -1.0)[1].ids.tolist() == arrivals.ids.tolist()
        taken = arrivals.ids[: arrivals.count]
        assert arrivals.metrics["buffered_nbytes"] == (8 + 4) * arrivals.metrics["buffered"]  # type: ignore[operator]
        self.buffer.commit(taken)
        self.taken.append(taken.tolist())
        self.step += 1
        return True


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, LANES - 1), st.integers(1, 9)),
        st.floats(0.0, 40.0),
    ),
    max_size=40,
)


@given(st.sampled_from(SETTINGS), st.sampled_from([1, LANES]), EVENTS, st.randoms(use_true_random=False))
def test_each_sample_is_used_once_or_dropped_or_held(
    settings: dict[str, Any], lanes: int, events: list[Any], random: Any
) -> None:
    log = DecisionLog()
    first = Driven(settings, log, lanes)
    for event in events:
        if isinstance(event, tuple):
            first.arrive(event[0] % lanes, event[1])
        else:
            first.try_step(event)
    used = [one for step in first.taken for one in step]
    held = first.buffer.ids.tolist()
    came = [n * STRIDE + lane for lane, count in first.next.items() for n in range(count)]
    assert sorted([*first.gone, *held]) == sorted(came)
    assert len(set(used)) == len(used)
    assert set(used) <= set(first.gone)
    assert first.buffer.state_dict()["dropped"] == len(first.gone) - len(used)
    if not settings.get("backlog") and settings.get("policy") != "truncation":
        assert len(used) == len(first.gone)

    again = Driven(settings, DecisionLog(replay=log.entries), lanes)
    while again.step < first.step:
        if not again.try_step(-1.0):
            again.arrive(random.randrange(lanes), random.randint(1, 5))
    assert again.taken == first.taken


def test_what_was_shown_stays_as_it_was() -> None:
    one = Driven({"least": 2}, DecisionLog(), 1)
    one.arrive(0, 3)
    _, arrivals = one.buffer.poll(0, lambda: 0.0)
    shown, before = arrivals.ids[:2], arrivals.ids[:2].tolist()
    one.buffer.commit(shown)
    for _ in range(9):
        one.arrive(0, 50)
    assert shown.tolist() == before


@pytest.mark.parametrize(
    "value",
    [3, [], [{}], [{"oldest": 0}], [{"oldest": 0, "count": 2.0}], [{"oldest": 0, "count": 9}],
     [{"oldest": 1 << 60, "count": 2}], [{"oldest": 0, "count": 1}, {"oldest": 16, "count": 1}]],
)  # fmt: skip
def test_a_choice_that_cannot_have_been_made_is_refused(value: Json) -> None:
    log = DecisionLog(replay=[Decision("arrivals", 0, value, True, 0)])
    one = Driven({"least": 1, "most": 5}, log, LANES)
    one.arrive(0, 5)
    with pytest.raises(ConfigError, match="'arrivals' at step 0: not what this run decides"):
        one.try_step(1.0)


def test_a_stream_shows_the_options_of_its_buffer() -> None:
    @with_buffer_options
    class Some:
        def __init__(self, rate: float, **buffer: Any) -> None: ...

    import inspect

    assert str(inspect.signature(Some)).startswith(
        "(rate: 'float', *, policy: 'Policy' = 'persistence', least:"
    )
    assert "buffer" not in inspect.signature(Some).parameters
