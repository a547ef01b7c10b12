"""Streams: what is held stays held until it is taken out, and arrives when the rate says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from farflung.data import STREAMS, InMemory, TensorDataset
from farflung.decisions import DecisionLog
from farflung.errors import ConfigError, DataError
from farflung.streams import RateLimited
from farflung.types import Arrivals, Dataset, Decision, Json, Stream, StreamContext


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.zeros(count))


def feed(
    log: DecisionLog | None = None,
    rank: int = 0,
    size: int = 1,
    *,
    data: Dataset | None = None,
    shared: bool = True,
    batch_size: int = 2,
) -> StreamContext:
    kept = log or DecisionLog()

    def decide(name: str, step: int, local: Callable[[], Json]) -> Decision:
        return kept.decide(name, step, local, rank)

    return StreamContext(data or numbers(10), rank, size, shared, batch_size, 5, decide)


def opened(stream: Stream, log: DecisionLog | None = None, **given: Any) -> Stream:
    stream.start(feed(log, **given))
    return stream


def shown(arrivals: Arrivals) -> tuple[list[int], object, int | None]:
    return arrivals.ids.tolist(), arrivals.next_poll, arrivals.count


ROWS: dict[str, Callable[[], Stream]] = {
    "in memory": InMemory,
    "rate": lambda: RateLimited(4.0),
    "rate, as it comes": lambda: RateLimited(4.0, least=1, most=8),
    "rate, paused": lambda: RateLimited(4.0, backlog=3),
    "rate, dropped": lambda: RateLimited(4.0, least=1, most=2, backlog=3, full="drop_oldest"),
    "rate, by window": lambda: RateLimited(4.0, least=1, window_s=0.5),
    "rate, truncated": lambda: RateLimited(4.0, policy="truncation", least=1, most=1),
}


def test_each_stream_is_in_the_table() -> None:
    """Or has a source outside, and tests of its own: ``test_iterator.py`` here, and ``tests/runs/test_kafka.py``."""
    outside = {STREAMS[name] for name in ("iterator", "kafka")}
    assert {type(make()) for make in ROWS.values()} == set(STREAMS.values()) - outside


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_what_is_held_is_shown_until_it_is_taken_out(make: Callable[[], Stream]) -> None:
    stream = opened(make())
    stream.poll(0.0, 0)
    first = stream.poll(5.0, 0)
    again = stream.poll(5.0, 0)
    assert shown(first) == shown(again)
    assert first.next_poll is None
    used = first.ids[: first.count]
    stream.commit(used, step=0)
    left = stream.poll(5.0, 1).ids.tolist()
    assert left[: len(first.ids) - len(used)] == first.ids[len(used) :].tolist()
    stream.close()
    stream.close()


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_a_position_is_gone_back_to(make: Callable[[], Stream]) -> None:
    stream, later = opened(make()), opened(make())
    stream.poll(0.0, 0)
    first = stream.poll(1.0, 0)
    stream.commit(first.ids[:1], step=0)
    later.load_state_dict(stream.state_dict())
    at_once = later.poll(100.0, 1)
    assert at_once.ids.tolist() == first.ids[1:].tolist()
    beyond = later.poll(100.5, 2).ids.tolist()
    assert not beyond or beyond[-1] == int(first.ids[-1]) + 2


def test_arrivals_have_exact_times() -> None:
    stream = opened(RateLimited(4.0, least=3))
    assert shown(stream.poll(10.0, 0)) == ([], 10.75, None)
    assert shown(stream.poll(10.5, 0)) == ([0, 1], 10.75, None)
    assert shown(stream.poll(10.75, 0)) == ([0, 1, 2], None, 3)


@pytest.mark.parametrize("rate", [0.1, 3.0, 7.3, 1000.0])
def test_what_is_awaited_is_there_at_its_time(rate: float) -> None:
    stream, now = opened(RateLimited(rate, least=1)), 0.3
    for step in range(200):
        arrivals = stream.poll(now, step)
        assert isinstance(arrivals.next_poll, float)
        now = arrivals.next_poll
        (index,) = stream.poll(now, step).ids.tolist()
        assert index == step
        stream.commit(torch.tensor([index]), step=step)


def test_a_step_takes_all_there_is_between_two_bounds() -> None:
    log = DecisionLog()
    stream = opened(RateLimited(10.0, least=2, most=5), log)
    assert stream.poll(0.0, 0).next_poll == 0.2
    sizes = []
    for step, now in enumerate((0.2, 0.5, 1.8, 1.9)):
        arrivals = stream.poll(now, step)
        assert arrivals.count is not None
        sizes.append((arrivals.count, len(arrivals.ids)))
        stream.commit(arrivals.ids[: arrivals.count], step=step)
    assert sizes == [(2, 2), (3, 3), (5, 13), (5, 9)]
    assert [(d.name, d.step, d.rank, d.timing) for d in log.entries] == [
        ("arrivals", step, 0, True) for step in range(4)
    ]


def test_a_full_backlog_pauses_its_source_until_a_step_takes_some() -> None:
    log = DecisionLog()
    stream = opened(RateLimited(1.0, backlog=3), log)
    stream.poll(0.0, 0)
    # Three are there at 3 s and no fourth comes; at 10 s a step takes two, and the source goes on.
    assert shown(stream.poll(10.0, 0)) == ([0, 1, 2], None, 2)
    assert stream.poll(11.5, 0).ids.tolist() == [0, 1, 2, 3]
    stream.commit(torch.tensor([0, 1]), step=0)
    assert shown(stream.poll(12.5, 1)) == ([2, 3, 4], None, 2)
    assert log.entries == [], "a fixed number of all that comes is no decision"


def test_a_full_backlog_drops_its_oldest() -> None:
    log = DecisionLog()
    stream = opened(RateLimited(1.0, backlog=3, full="drop_oldest"), log)
    stream.poll(0.0, 0)
    assert shown(stream.poll(10.0, 0)) == ([7, 8, 9], None, 2)
    stream.commit(torch.tensor([7, 8]), step=0)
    assert shown(stream.poll(11.0, 1)) == ([9, 10], None, 2)
    assert [d.value for d in log.entries] == [[{"oldest": 7, "count": 2}], [{"oldest": 9, "count": 2}]]


def test_a_replay_takes_and_drops_what_it_did_on_a_slower_clock() -> None:
    log = DecisionLog()
    stream = opened(RateLimited(1.0, least=1, most=2, backlog=3, full="drop_oldest"), log)
    stream.poll(0.0, 0)
    taken = []
    for step, now in enumerate((10.0, 10.0, 17.0)):
        arrivals = stream.poll(now, step)
        taken.append(arrivals.ids[: arrivals.count].tolist())
        stream.commit(arrivals.ids[: arrivals.count], step=step)
    again = opened(
        RateLimited(1.0, least=1, most=2, backlog=3, full="drop_oldest"), DecisionLog(replay=log.entries)
    )
    retaken, now = [], 0.0
    for step in range(3):
        arrivals = again.poll(now, step)
        while arrivals.next_poll is not None:
            assert isinstance(arrivals.next_poll, float)
            now = arrivals.next_poll
            arrivals = again.poll(now, step)
        retaken.append(arrivals.ids[: arrivals.count].tolist())
        again.commit(arrivals.ids[: arrivals.count], step=step)
    assert retaken == taken == [[7, 8], [9], [14, 15]]
    assert now == 16.0


def test_a_backlog_that_must_not_be_passed_ends_the_run() -> None:
    stream = opened(RateLimited(1.0, backlog=3, full="stop"))
    stream.poll(0.0, 0)
    assert shown(stream.poll(3.0, 0)) == ([0, 1, 2], None, 2)
    stream.commit(torch.tensor([0, 1]), step=0)
    with pytest.raises(DataError, match="5 samples wait to be used, and backlog=3: raise it or most"):
        stream.poll(7.0, 1)


def test_a_truncated_stream_takes_the_newest_and_holds_no_more_than_just_streamed_in() -> None:
    log = DecisionLog()
    stream = opened(RateLimited(1.0, policy="truncation", least=2, most=3), log)
    assert shown(stream.poll(0.0, 0)) == ([], 2.0, None)
    told, taken = [], []
    for step, now in enumerate((2.0, 12.0, 15.0)):
        arrivals = stream.poll(now, step)
        assert arrivals.next_poll is None
        taken.append(arrivals.ids.tolist())
        told.append(tuple(arrivals.metrics.values()))
        stream.commit(arrivals.ids, step=step)
    assert taken == [[0, 1], [9, 10, 11], [12, 13, 14]]
    assert told == [(2, 24, 0), (10, 120, 7), (3, 36, 7)]
    assert shown(stream.poll(16.0, 3)) == ([15], 17.0, None)
    assert [d.value for d in log.entries][1] == [{"oldest": 9, "count": 3}]


def test_what_a_truncated_step_leaves_is_dropped() -> None:
    stream = opened(RateLimited(1.0, policy="truncation", least=2, most=4))
    stream.poll(0.0, 0)
    arrivals = stream.poll(4.0, 0)
    stream.commit(arrivals.ids[:3], step=0)
    assert shown(stream.poll(5.0, 1)) == ([4], 6.0, None)
    assert stream.poll(6.0, 1).metrics["dropped"] == 1


@pytest.mark.parametrize(("rate", "size"), [(8.0, 8), (20.4, 20), (38, 38), (5000.0, 1024)])
def test_a_step_is_made_of_what_a_window_brings(rate: float, size: int) -> None:
    log = DecisionLog()
    stream = opened(RateLimited(rate, window_s=1.0), log)
    arrivals = stream.poll(0.0, 0)
    assert arrivals.next_poll == pytest.approx(size / rate)
    stream.poll(0.0, 0)
    assert stream.poll(30.0, 0).count == size
    assert log.entries == []


def test_the_window_of_a_rate_that_changes_is_decided() -> None:
    log = DecisionLog()
    course = [(0, 10), (4, 20), (8, 2)]
    for replays in (False, True):
        kept = DecisionLog(replay=log.entries) if replays else log
        stream = opened(RateLimited(course, window_s=1.0, least=4, weigh="by_rate"), kept)
        stream.poll(0.0, 0)
        sizes = []
        for step, now in enumerate((1.0, 5.0, 30.0)):
            arrivals = stream.poll(60.0 if replays else now, step)
            sizes.append((arrivals.count, arrivals.weight))
            stream.commit(arrivals.ids[: arrivals.count], step=step)
        assert sizes == [(10, 5.0), (20, 10.0), (4, 1.0)]
    assert [(d.name, d.value) for d in log.entries] == [("rate", 10.0), ("rate", 20.0), ("rate", 2.0)]


def test_a_step_may_weigh_by_its_rate() -> None:
    for rank, weight in ((0, 10.0), (1, 1.5)):
        stream = opened(RateLimited([20, 3], least=2, weigh="by_rate"), rank=rank, size=2)
        stream.poll(0.0, 0)
        assert stream.poll(9.0, 0).weight == weight


def test_replicas_take_turns_in_passes_over_the_whole() -> None:
    data = numbers(6)
    rows = [
        RateLimited(1.0).start(feed(rank=rank, size=2, data=data)).get_rows(torch.arange(6)).inputs
        for rank in range(2)
    ]
    for first, last in ((0, 3), (3, 6)):
        of_a_pass = torch.cat([each[first:last] for each in rows])
        assert sorted(of_a_pass.tolist()) == list(range(6))
    assert rows[0][:3].tolist() != rows[0][3:].tolist()
    alone = [
        RateLimited(1.0)
        .start(feed(rank=rank, size=2, shared=False))
        .get_rows(torch.arange(10))
        .inputs.tolist()
        for rank in range(2)
    ]
    assert [sorted(each) for each in alone] == [list(range(10))] * 2, "a share is its replica's alone"
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("rate", "options", "says"),
    [
        (0.0, {}, r"stream rate\(0.0\): must be a number of samples per second above 0"),
        ([3, -1], {}, "must be a number of samples per second above 0"),
        (1.0, {"full": "burst"}, "full 'burst' must be 'pause' or 'stop' or 'drop_oldest'"),
        (1.0, {"policy": "both"}, "policy 'both' must be 'persistence' or 'truncation'"),
        (1.0, {"weigh": "all"}, "weigh 'all' must be 'by_batch' or 'by_rate'"),
        (1.0, {"full": "stop"}, "full='stop' says what happens at a backlog: give one"),
        (1.0, {"policy": "truncation", "backlog": 9}, "keeps no backlog"),
        (1.0, {"window_s": 0.0}, "window_s 0.0 must be a number of at least 0.001"),
        (1.0, {"least": 0}, "least 0 must be at least 1"),
        (1.0, {"most": 2.5}, "most 2.5 must be a whole number"),
        ([1.0], {}, "1 rates for 2 replicas"),
        ([9, 5], {"window_s": 1.0}, "5 samples per second bring 5 in window_s=1, and"),
        (1.0, {"least": 3, "most": 2}, "least 3, most 2, backlog 2"),
        (1.0, {"backlog": 1}, "least 2, most 2, backlog 1"),
    ],
)
def test_what_cannot_work_is_refused(rate: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        opened(RateLimited(rate, **options), size=2)
    assert "\n" not in str(caught.value)
