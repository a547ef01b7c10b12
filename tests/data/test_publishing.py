"""Publishing: samples leave when their rate says so, and the mean rate stays, however coarse the waits are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.data import Published, RateLimited, courses, in_turn, publish
from farflung.data.streams.messages import messages_like
from tests.data.test_streams import feed, numbers

DATA = numbers(10)


class Clockwork:
    """An outlet on a clock of its own, that is late by some time whenever it waits and takes some for each message.

    Args:
      late_s: how much later every wait ends.
      each_s: what a message takes.
    """

    name = "clockwork"

    def __init__(self, late_s: float = 0.0, each_s: float = 0.0) -> None:
        self.late_s, self.each_s, self.now = late_s, each_s, 100.0
        self.sent: dict[int, list[tuple[float, bytes]]] = {}
        self.finished = False

    def put(self, device: int, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.now += self.each_s
            self.sent.setdefault(device, []).append((self.now - 100.0, message))

    def wait(self, seconds: float) -> None:
        self.now += seconds + self.late_s

    def finish(self) -> None:
        self.finished = True

    def published(self, rates: object, devices: int, **bounds: float) -> Published:
        found = courses(rates, devices, 0)  # type: ignore[arg-type]
        sources = [in_turn(DATA, device, devices, shared=True, seed=3) for device in range(devices)]
        return publish(self, found, sources, clock=lambda: self.now, **bounds)  # type: ignore[arg-type]


def test_samples_leave_at_their_times() -> None:
    outlet = Clockwork()
    published = outlet.published([4, 10], 2, seconds=1.0)
    assert published.samples == (4, 10)
    assert [at for at, _ in outlet.sent[0]] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert [at for at, _ in outlet.sent[1]] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert published.rates == pytest.approx([4.0, 10.0])
    assert outlet.finished


@given(st.floats(1.0, 500.0), st.floats(0.0, 0.3), st.integers(1, 400))
def test_late_waits_do_not_lower_the_mean_rate(rate: float, late_s: float, samples: int) -> None:
    outlet = Clockwork(late_s)
    published = outlet.published(rate, 1, samples=samples)
    assert published.samples == (samples,)
    (seconds,) = published.seconds
    assert samples / rate - 1e-6 <= seconds <= samples / rate + late_s + 0.1 + 1e-6


def test_a_rate_that_cannot_be_kept_is_told() -> None:
    published = Clockwork(each_s=0.1).published(20, 1, samples=40)
    assert published.rates[0] == pytest.approx(10.0, rel=0.3)


def test_a_rate_may_change() -> None:
    outlet = Clockwork()
    published = outlet.published([(0, 4), (2, 1)], 1, seconds=5.0)
    assert published.samples == (11,)
    assert [at for at, _ in outlet.sent[0]][-3:] == pytest.approx([3.0, 4.0, 5.0])


def test_each_bound_ends_it() -> None:
    assert Clockwork().published(10, 1, seconds=2.0, samples=5).samples == (5,)
    assert Clockwork().published(10, 1, seconds=0.3, samples=5).samples == (3,)


def test_whoever_asks_ends_it() -> None:
    outlet, told = Clockwork(), []
    published = publish(
        outlet,
        courses(10, 1, 0),
        [in_turn(DATA, 0, 1, shared=True, seed=3)],
        stop_asked=lambda: outlet.now > 101.0,
        tell=lambda sent, elapsed_s: told.append((list(sent), elapsed_s)),
        clock=lambda: outlet.now,
    )
    assert published.samples[0] in (9, 10)
    assert told[-1][0] == list(published.samples)
    assert outlet.finished


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_sent_is_what_the_stream_of_that_rate_brings(shared: bool) -> None:
    reader = messages_like(DATA.rows(torch.tensor([0])), None)
    for rank in range(2):
        outlet = Clockwork()
        source = in_turn(DATA, rank, 2, shared=shared, seed=5)
        publish(outlet, courses(1e9, 1, 0), [source], samples=25)
        sent = reader.rows([value for _, value in outlet.sent[0]])
        streamed = RateLimited(1.0).open(feed(None, rank, 2, data=DATA, shared=shared)).rows(torch.arange(25))
        assert torch.equal(sent.inputs, streamed.inputs)
