"""Streams over an iterator: each sample once, found again after a restart and a kill, and errors that name it."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.errors import BadInput, ConfigError, DataError
from farflung.streams import LiveStream, iterator
from farflung.streams.iterators import IteratorSource
from farflung.streams.live import CHUNK
from tests.forks import farflung, ran
from tests.helpers import PATIENCE_S
from tests.logged_stream import Sample, used
from tests.streams.test_live import DATA, step
from tests.streams.test_streams import feed

Pairs = Iterator[tuple[int, Sample]]


def sample(index: int) -> Sample:
    rows = DATA.get_rows(torch.tensor([index]))
    return rows.inputs[0], rows.targets[0]


def evens(rank: int, size: int, position: int) -> Pairs:
    """Positions 0, 2, 4, ... of 100."""
    return ((at, sample(at // 2)) for at in range(position + position % 2, 200, 2))


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[LiveStream, Any]]]:
    made: list[LiveStream] = []

    def make(function: Any, rank: int = 0, size: int = 1, **options: Any) -> tuple[LiveStream, Any]:
        made.append(iterator(function, **{"deadline_s": PATIENCE_S, **options}))
        return made[-1], made[-1].start(feed(None, rank, size, data=DATA, batch_size=4))

    yield make
    for each in made:
        each.close()
        assert each._thread is None or not each._thread.is_alive()


Open = Callable[..., tuple[LiveStream, Any]]


def test_a_function_may_be_named_and_gets_rank_and_size(opened: Open) -> None:
    assert step(*opened(f"{__name__}:evens"), 0) == [0, 1, 2, 3]
    asked: list[tuple[int, ...]] = []

    def noted(*args: int) -> Pairs:
        asked.append(args)
        return evens(*args)

    step(*opened(noted, 2, 3), 0)
    assert asked == [(2, 3, 0)]


def test_no_more_is_read_ahead_than_may_wait(opened: Open) -> None:
    read: list[int] = []

    def endless(rank: int, size: int, position: int) -> Pairs:
        while True:
            read.append(len(read))
            yield position + len(read), sample(len(read) % 100)

    stream, samples = opened(endless, backlog=8)
    for number in range(600):
        step(stream, samples, number)
    assert 2400 <= len(read) <= 2400 + 8 + CHUNK + 2


def test_one_that_blocks_is_ended_by_the_deadline_and_named(opened: Open) -> None:
    never = threading.Event()

    def silent(rank: int, size: int, position: int) -> Pairs:
        yield from ((at, sample(at)) for at in range(5))
        never.wait()

    stream, samples = opened(silent, deadline_s=0.1)
    assert step(stream, samples, 0) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"iterator .*silent: nothing arrived for 0 s; .*raise deadline_s"):
        step(stream, samples, 1)
    never.set()


def test_the_samples_of_one_that_ends_are_used(opened: Open) -> None:
    stream, samples = opened(lambda *_: evens(0, 1, 184), deadline_s=0.1)
    assert [step(stream, samples, number) for number in range(2)] == [[92, 93, 94, 95], [96, 97, 98, 99]]
    with pytest.raises(DataError, match=r"nothing arrived for 0 s \(it has ended\)"):
        step(stream, samples, 2)


def broken(rank: int, size: int, position: int) -> Pairs:
    yield 0, sample(0)
    raise OSError("no such device")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (broken, "iterator broken: OSError: no such device"),
        (
            lambda *_: [(3, sample(0)), (3, sample(1))],
            "position 3 where 4 or more must come: positions ascend",
        ),
        (lambda *_: [(-1, sample(0))], "position -1 where 0 or more must come"),
        (lambda *_: [(0.5, sample(0))], "TypeError"),
        (lambda *_: [7], "TypeError"),
        (
            lambda *_: [(0, (torch.ones(3), torch.tensor(1)))],
            r"position 0 .*inputs of float32\[3\], and a sample",
        ),
        (lambda *_: [(0, 7)], "1 messages do not decode, the last at position 0"),
    ],
)
def test_what_cannot_be_used_ends_the_run(opened: Open, function: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        step(*opened(function), 0)
    assert "\n" not in str(caught.value)


def test_what_is_no_function_is_refused(opened: Open) -> None:
    for name in ("nowhere:readings", f"{__name__}:DATA"):
        with pytest.raises(ConfigError, match=f"stream iterator '{name}'"):
            opened(name)
    with pytest.raises(BadInput, match="skip -1 must be at least 0"):
        opened(evens, skip=-1)


@pytest.mark.thorough
def test_each_sample_is_trained_on_once_over_a_kill_and_a_replay_takes_the_same(tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    options = ["--workload", "synthetic/quadratic", "--steps", "60", "--evaluate-every", "0", "--out"]

    def stream(folder: Path) -> str:
        return f"tests.logged_stream:logged({str(folder)!r}, least=2, most=24)"

    with farflung(
        "train", *options, str(run), "--stream", stream(tmp_path), "--checkpoint-every", "20"
    ) as first:
        assert any("step-00000020" in line for line in first.stderr)
        first.send_signal(signal.SIGKILL)
    ran("train", "--resume", str(run))
    again.mkdir()
    ran(
        "train",
        *options,
        str(again / "run"),
        "--stream",
        stream(again),
        "--replay",
        str(run / "decisions.jsonl"),
    )
    for rank in range(2):
        steps = used(tmp_path, rank)
        taken = [position for number in sorted(steps) for _, position in steps[number]]
        assert taken == list(range(len(taken)))
        assert len({len(one) for one in steps.values()}) > 1
        assert steps == used(again, rank)
    assert (run / "model.safetensors").read_bytes() == (again / "run" / "model.safetensors").read_bytes()


def test_the_clock_of_an_iterator_stands_still_while_it_is_not_resumed() -> None:
    source = IteratorSource(lambda rank, size, position: ((at, sample(0)) for at in itertools.count()))
    source.connect(0, 1)
    source.start({0: 0})
    times = []
    for count in (CHUNK + 1, CHUNK + 2):  # the last of them waits for room
        while (mark := source.count_received()[0])[1] < count:
            pass
        assert source.count_received() == {0: mark}
        times.append(mark[0])
        source.read(1, 0.0)
    assert times[0] < times[1]
    source.close()
