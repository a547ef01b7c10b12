"""Live streams on a source that tests feed: each sample once, found again after a restart, else an error."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from farflung.data import TensorDataset
from farflung.decisions import DecisionLog
from farflung.errors import CheckpointError, ConfigError, DataError
from farflung.streams import LiveStream, as_messages
from farflung.streams.live import STRIDE, MessageSource, PartitionRange, Records
from farflung.types import Arrivals, Samples
from tests.helpers import PATIENCE_S
from tests.streams.test_streams import feed

DATA = TensorDataset(torch.arange(400.0).reshape(100, 4), torch.arange(100))
VALUES = as_messages(DATA.get_rows(torch.arange(100)))


def step(stream: Any, samples: Any, number: int) -> list[int]:
    """The labels of what the step has used, which say which samples they were."""
    arrivals = stream.poll(0.0, number)
    while arrivals.next_poll is not None:
        arrivals.next_poll.wait()
        arrivals = stream.poll(0.0, number)
    ids = arrivals.ids[: arrivals.count]
    labels: list[int] = samples.get_rows(ids).targets.tolist()
    stream.commit(ids, step=number)
    return labels


class Fountain(MessageSource):
    """Partitions that hold what tests put there.

    Args:
      partitions: messages of each.
    """

    name = "fountain"

    def __init__(self, *partitions: list[bytes]) -> None:
        self.partitions = {number: list(values) for number, values in enumerate(partitions)}
        self.first = dict.fromkeys(self.partitions, 0)
        self.begin = dict.fromkeys(self.partitions, 0)
        self.at: dict[int, int] = {}
        self.told: list[tuple[dict[int, int], int]] = []
        self.paused = False
        self.most_read = 0
        self.closed = 0
        self.heard = threading.Condition()
        self.looks = itertools.count()
        self.rates = dict.fromkeys(self.partitions, 8)
        """Messages that come to each partition in a second."""

    @override
    def count_received(self) -> Mapping[int, tuple[float, int]]:
        seconds = next(self.looks)
        return {number: (100.0 + seconds, 1000 + rate * seconds) for number, rate in self.rates.items()}

    @override
    def connect(self, rank: int, size: int) -> Mapping[int, PartitionRange]:
        return {
            number: PartitionRange(self.first[number], len(values), self.begin[number])
            for number, values in self.partitions.items()
            if number % size == rank
        }

    @override
    def start(self, positions: Mapping[int, int]) -> None:
        self.at = dict(positions)

    @override
    def read(self, max_messages: int, wait_s: float) -> list[Records]:
        found: list[Records] = []
        left = max_messages
        with self.heard:
            for number, at in self.at.items():
                values = self.partitions[number]
                positions = [one for one in range(at, len(values)) if values[one] != b"deleted"][:left]
                if positions:
                    left -= len(positions)
                    self.at[number] = positions[-1] + 1
                    read = [values[one] for one in positions]
                    found.append(Records(number, positions, read))
            self.most_read = max(self.most_read, max_messages - left)
            if not found:
                self.heard.wait(wait_s)
        return found

    def put(self, number: int, *values: bytes) -> None:
        with self.heard:
            self.partitions[number] += values
            self.heard.notify_all()

    @override
    def pause(self, is_paused: bool) -> None:
        self.paused = is_paused

    @override
    def commit_positions(self, positions: Mapping[int, int], step: int) -> None:
        with self.heard:
            self.told.append((dict(positions), step))
            self.heard.notify_all()

    @override
    def close(self) -> None:
        self.closed += 1


class Reader:
    """A live stream that is stepped through."""

    def __init__(
        self,
        source: Fountain,
        log: DecisionLog | None = None,
        *,
        skip: int = 0,
        deadline_s: float = PATIENCE_S,
        size: int = 1,
        **buffer: Any,
    ) -> None:
        self.stream = LiveStream(source, None, skip, deadline_s, buffer)
        self.samples: Samples = self.stream.start(feed(log, data=DATA, batch_size=5, size=size))

    def take(self, step: int) -> Arrivals:
        arrivals = self.stream.poll(0.0, step)
        while arrivals.next_poll is not None:
            assert not isinstance(arrivals.next_poll, float)
            arrivals.next_poll.wait()
            arrivals = self.stream.poll(0.0, step)
        return arrivals

    def step(self, step: int) -> list[tuple[int, int]]:
        """Partition and position of each sample that the step has used."""
        arrivals = self.take(step)
        ids = arrivals.ids[: arrivals.count]
        rows = self.samples.get_rows(ids)
        assert rows.inputs.tolist() == DATA.get_rows(rows.targets).inputs.tolist()
        self.stream.commit(ids, step=step)
        return [(one % STRIDE, one // STRIDE) for one in ids.tolist()]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("farflung.streams.live.MEASURE_S", 0.0)
    made: list[Reader] = []

    def make(*args: Any, **options: Any) -> Reader:
        made.append(Reader(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.stream.close()
        assert one.stream._thread is None or not one.stream._thread.is_alive()


Make = Callable[..., Reader]


def test_samples_are_used_in_order_and_once(reader: Make) -> None:
    source = Fountain(VALUES[:12])
    one = reader(source)
    assert [one.step(step) for step in range(2)] == [[(0, n) for n in range(k, k + 5)] for k in (0, 5)]
    arrivals = one.stream.poll(0.0, 2)
    assert arrivals.next_poll is not None
    source.put(0, *VALUES[12:15])
    told = one.take(2).metrics
    assert told == {"buffered": 5, "buffered_nbytes": 5 * (4 * 4 + 8), "dropped": 0, "skipped": 0}
    assert one.step(2) == [(0, n) for n in range(10, 15)]
    one.stream.close()
    assert source.closed == 1
    assert source.told[-1] == ({0: 15}, 2)


def test_what_was_held_is_read_again_after_a_restart(reader: Make) -> None:
    one = reader(Fountain(VALUES[:30], VALUES[:30]), least=1, most=7, backlog=20)
    used = [*one.step(0), *one.step(1)]
    one.take(2)
    state = one.stream.state_dict()
    again = reader(Fountain(VALUES[:40], VALUES[:40]), least=1, most=7, backlog=20)
    again.stream.load_state_dict(state)
    step = 2
    while len(used) < 80:
        used += again.step(step)
        step += 1
    assert sorted(used) == [(partition, position) for partition in range(2) for position in range(40)]


def test_rows_of_a_step_under_way_are_waited_for_after_a_restart(reader: Make) -> None:
    one = reader(Fountain(VALUES[:9]))
    ids = one.take(0).ids[:5]
    again = reader(Fountain(VALUES[:9]))
    again.stream.load_state_dict(one.stream.state_dict())
    assert again.samples.get_rows(ids).targets.tolist() == [0, 1, 2, 3, 4]


def test_rows_that_come_slowly_after_a_restart_are_no_silence(
    reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = reader(Fountain(VALUES[:9]))
    ids = one.take(0).ids[:5]
    source, now_s = Fountain(VALUES[:9]), 0.0
    read = source.read

    def read_slowly(max_messages: int, wait_s: float) -> list[Records]:
        nonlocal now_s
        now_s += 0.9 * PATIENCE_S
        return read(1, wait_s)

    monkeypatch.setattr(source, "read", read_slowly)
    monkeypatch.setattr("farflung.streams.live.time", SimpleNamespace(monotonic=lambda: now_s))
    again = reader(source)
    again.stream.load_state_dict(one.stream.state_dict())
    assert again.samples.get_rows(ids).targets.tolist() == [0, 1, 2, 3, 4]


def test_a_replay_takes_partitions_in_the_order_they_were_taken_in(reader: Make) -> None:
    log = DecisionLog()
    source = Fountain(VALUES[:7], VALUES[:3])
    one = reader(source, log, least=2, most=6)
    first = [one.step(0)]
    source.put(1, *VALUES[3:9])
    first += [one.step(step) for step in (1, 2)]
    again = reader(
        Fountain(VALUES[:50], VALUES[:50]), DecisionLog(replay=log.entries), least=2, most=6, backlog=99
    )
    assert [again.step(step) for step in range(3)] == first


def test_a_fresh_run_begins_where_the_source_says_and_a_replay_where_it_began(reader: Make) -> None:
    log, source = DecisionLog(), Fountain(VALUES[:30])
    source.begin[0] = 20
    assert reader(source, log).step(0)[0] == (0, 20)
    assert [(made.name, made.value) for made in log.entries] == [("positions", {"0": 20})]
    assert reader(Fountain(VALUES[:30]), DecisionLog(replay=log.entries)).step(0)[0] == (0, 20)
    other = reader(Fountain(VALUES, VALUES), DecisionLog(replay=log.entries))
    with pytest.raises(ConfigError, match="'positions' at step 0: not what this run decides"):
        other.step(0)


def test_a_full_buffer_pauses_its_source(reader: Make) -> None:
    source = Fountain(VALUES)
    one = reader(source, backlog=8)
    used: list[tuple[int, int]] = []
    for step in range(20):
        used += one.step(step)
        assert one.stream._next_positions[0] <= len(used) + 8
    assert used == [(0, position) for position in range(100)]
    assert source.most_read <= 8


def test_the_rate_is_measured_by_how_the_source_grows(reader: Make) -> None:
    log, source = DecisionLog(), Fountain(VALUES[:50], VALUES[:50])
    source.rates[1] = 9
    one = reader(source, log, window_s=1.0, least=4, weigh="by_rate")
    arrivals = one.take(0)
    assert [made.value for made in log.entries if made.name == "rate"] == [17.0]
    assert (arrivals.count, arrivals.weight) == (17, 17.0 / 5)


def test_a_source_that_does_not_say_is_waited_for_as_one_that_is_silent(reader: Make) -> None:
    source = Fountain(VALUES[:50])
    source.rates.clear()
    with pytest.raises(DataError, match="nothing arrived for 0 s"):
        reader(source, window_s=1.0, least=4, deadline_s=0.05).step(0)


def test_a_first_measurement_that_does_not_end_is_settled(
    reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an iterator that is held back: its clock stands still."""
    source = Fountain(VALUES[:50])
    monkeypatch.setattr(source, "count_received", lambda: {0: (0.5 * min(1, next(source.looks)), 20)})
    monkeypatch.setattr("farflung.streams.live.FINALIZE_SPANS", 0)
    assert reader(source, window_s=1.0, least=4).take(0).count == 4


@pytest.mark.parametrize("by", [{"window_s": 1.0}, {"weigh": "by_rate"}], ids=str)
def test_after_a_restart_the_rate_is_the_checkpoints_until_it_is_measured(
    reader: Make, by: dict[str, Any]
) -> None:
    one = reader(Fountain(VALUES[:40]), least=4, **by)
    before = one.take(0)
    one.step(0)
    source = Fountain(VALUES[:40])
    source.rates.clear()
    again = reader(source, least=4, **by)
    again.stream.load_state_dict(one.stream.state_dict())
    after = again.take(1)
    assert (after.count, after.weight) == (before.count, before.weight)


def test_messages_that_do_not_decode_are_skipped_and_counted(reader: Make) -> None:
    source = Fountain([*VALUES[:4], b"garbage", *VALUES[5:8], b"", *VALUES[9:12]])
    one = reader(source, skip=2)
    assert one.step(0) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 5)]
    assert one.take(1).metrics["skipped"] == 2
    assert one.stream.state_dict()["skipped"] == 2
    again = reader(Fountain(*source.partitions.values()), skip=2)
    again.stream.load_state_dict(one.stream.state_dict())
    assert again.take(1).metrics["skipped"] == 2
    source.put(0, b"worse")
    one.step(1)
    with pytest.raises(
        DataError, match=r"fountain: 3 messages do not decode, the last at position 12 .*raise skip"
    ):
        one.step(2)


def test_silence_ends_a_wait_and_names_the_source(reader: Make) -> None:
    source = Fountain(VALUES[:3])
    source.trouble = "unplugged"
    with pytest.raises(DataError, match=r"fountain: nothing arrived for 0 s \(unplugged\).*raise deadline_s"):
        reader(source, deadline_s=0.05).step(0)
    assert source.closed == 1


def test_a_partition_that_is_gone_is_named_and_a_new_one_is_read_from_its_beginning(reader: Make) -> None:
    one = reader(Fountain(VALUES[:5], VALUES[:5]), least=10)
    one.step(0)
    state = one.stream.state_dict()
    with pytest.raises(
        CheckpointError, match="fountain: partition 1, from which the checkpoint continues, is gone"
    ):
        reader(Fountain(VALUES[:9])).stream.load_state_dict(state)
    more = Fountain(VALUES[:5], VALUES[:5], VALUES[:5])
    more.begin[2] = 5
    again = reader(more, least=5)
    again.stream.load_state_dict(state)
    assert again.step(1) == [(2, position) for position in range(5)]


def test_positions_that_are_not_there_any_more_are_refused(reader: Make) -> None:
    one = reader(Fountain(VALUES[:20]))
    one.step(0)
    state = one.stream.state_dict()
    trimmed = Fountain(VALUES[:20])
    trimmed.first[0] = 6
    with pytest.raises(CheckpointError, match=r"position 5 of partition 0, which has 6 to 20: .*deleted"):
        reader(trimmed).stream.load_state_dict(state)
    with pytest.raises(CheckpointError, match="position 5 of partition 0, which has 0 to 3"):
        reader(Fountain(VALUES[:3])).stream.load_state_dict(state)
    holed = Fountain([*VALUES[:7], b"deleted", *VALUES[8:30]])
    again = reader(holed)
    again.stream.load_state_dict(state)
    with pytest.raises(DataError, match=r"the sample at position 7 of partition 0 was held .* deleted there"):
        again.step(1)


def test_one_that_was_never_read_is_closed(reader: Make) -> None:
    source = Fountain(VALUES)
    one = reader(source)
    one.stream.close()
    one.stream.close()
    assert source.closed == 1
    with pytest.raises(ConfigError, match="deadline_s 0 must be a number"):
        reader(source, deadline_s=0)
