"""Payloads of another device on their way to the host; here payloads of the host stand for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farflung.codecs import TopK, error_feedback
from farflung.comm import ExchangeChannel, view
from farflung.reducers import CodecReducer, PowerSGD, SharedScaleQSGD
from farflung.types import Payload, Reducer, Runtime
from tests.helpers import Cluster, joined, number_in, numbered, parted, same_bits
from tests.reducers.replicas import Replica, run

REDUCERS = [CodecReducer(), CodecReducer(error_feedback(TopK(0.1))), PowerSGD(), SharedScaleQSGD()]


class Elsewhere:
    """Takes every payload for one that has to be brought to the host once, and lets a test hold the copies back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = 0
        self.wait: Callable[[], object] = lambda: None
        self._here: dict[int, Payload] = {}  # kept, for an id is another's once its payload is gone
        monkeypatch.setattr(view, "is_on_host", lambda payload: id(payload) in self._here)
        monkeypatch.setattr("farflung.wall.runtime.to_host", self.to_host)

    def to_host(self, payload: Payload) -> tuple[Payload, Callable[[], object]]:
        self.copies += 1
        host = Payload(payload.parts)
        self._here[id(host)] = host
        return host, self.wait


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_staged_payloads_change_no_bit(reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, cluster = Elsewhere(monkeypatch), Cluster()
    real = cluster.run(
        2, lambda runtime, number: Replica(runtime, reducer, width=2, first=1000 * number).run(range(3))
    )
    cluster.close()
    assert elsewhere.copies >= 6
    for one, two in zip(real, run(reducer, 2, steps=3, width=2), strict=True):
        assert all(same_bits(a.mean, b.mean) for a, b in zip(one.results, two.results, strict=True))
        assert one.nbytes == two.nbytes


async def _send(runtime: Runtime, dst: int = 1) -> None:
    ExchangeChannel(runtime.comm, 1, 0).send(numbered(3.0), dst, 0)


async def _has_sent(runtime: Runtime) -> None:
    await ExchangeChannel(runtime.comm, 1, 0).send(numbered(3.0), 1, 0)


async def _receive(runtime: Runtime) -> float:
    return number_in(await ExchangeChannel(runtime.comm, 1, 0).recv(0, 0))


def test_what_is_still_being_copied_is_sent_before_the_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    Elsewhere(monkeypatch)
    runtimes = joined(2)
    arrived = runtimes[1].launch(_receive(runtimes[1]))
    runtimes[0].launch(_send(runtimes[0])).wait()
    parted(runtimes)
    assert arrived.wait() == 3.0


def test_a_device_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(monkeypatch)

    def fails() -> None:
        raise RuntimeError("an illegal memory access")

    elsewhere.wait = fails
    runtimes = joined(2)
    waiting = runtimes[0].launch(_receive_from_1(runtimes[0]))
    sent = runtimes[0].launch(_has_sent(runtimes[0]))
    for pending in (waiting, sent):
        with pytest.raises(Exception, match="copied from its device: an illegal memory access"):
            pending.wait()
    parted(runtimes)


async def _receive_from_1(runtime: Runtime) -> float:
    return number_in(await ExchangeChannel(runtime.comm, 2, 0).recv(1, 0))
