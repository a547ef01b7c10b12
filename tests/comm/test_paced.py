"""Messages at the pace of a modelled network: never before the model has them arrive, and all of them."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from farflung.comm import NetworkModel, PacedTransport, View, WallCommunicator, ZmqTransport
from farflung.errors import RunLost
from farflung.network import Link, NetworkProfile
from farflung.runtime.communication import CommunicationThread
from farflung.tasks import Pending
from farflung.types import Payload, Tag
from tests.helpers import PATIENCE_S

NBYTES = 25_000
LINK = Link(0.05, 2e6)
"""A message of 25 kB takes 0.1 s to leave and 0.05 s more to arrive."""


def now() -> float:
    return time.monotonic()


def started(rank: int, folder: Path) -> tuple[WallCommunicator, CommunicationThread]:
    view = View(PacedTransport(ZmqTransport(rank, 2), folder), 2, now=now)
    return WallCommunicator(view), CommunicationThread(view, now, PATIENCE_S)


def test_messages_arrive_when_the_model_says(tmp_path: Path) -> None:
    with NetworkModel(NetworkProfile.uniform(LINK).for_nodes(2), tmp_path):
        ends = [started(rank, tmp_path) for rank in range(2)]
        for comm, _ in ends:
            comm.view.connect([other.view.transport.me for other, _ in ends])
        for _, thread in ends:
            thread.start()
        (one, its_thread), (other, others_thread) = ends
        for comm, _ in ends:
            comm.view.ready.wait()
        arrived: list[tuple[int, float]] = []
        everything = threading.Event()

        def ask() -> None:
            for hop in range(3):
                other.recv(0, Tag(1, 0, hop)).on_done(partial(note, hop))

        def note(hop: int, got_it: Pending[Payload]) -> None:
            assert got_it.error is None
            arrived.append((hop, now()))
            if hop == 2:
                everything.set()

        def send() -> None:
            for hop in range(3):
                one.send(Payload((torch.zeros(NBYTES, dtype=torch.uint8),)), 1, Tag(1, 0, hop))
            its_thread.soon(lambda: one.view.farewell(None))  # it waits for what it holds

        others_thread.soon(ask)
        begin = now()
        its_thread.soon(send)
        assert everything.wait(PATIENCE_S)
        others_thread.soon(lambda: other.view.farewell(None))
        for _, thread in ends:
            thread.stop()
    assert [hop for hop, _ in arrived] == [0, 1, 2]
    for hop, t in arrived:
        assert t - begin >= 0.05 + 0.1 * (hop + 1) - 1e-3


def test_without_a_model_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunLost, match="models the network"):
        PacedTransport(ZmqTransport(0, 2), tmp_path)
