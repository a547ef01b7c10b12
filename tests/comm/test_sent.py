"""Bytes are counted once, when they are sent: by kind, and by who they are for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Peer, Purpose, View, WallCommunicator
from farflung.comm.channel import kind_of
from farflung.comm.collectives import native
from farflung.comm.staging import Stage, at_once
from farflung.errors import PeerLost
from farflung.tasks import Pending, done
from farflung.types import Payload, Sent, Tag

NUMBERS = Payload((torch.zeros(3), Payload((torch.zeros(2, dtype=torch.uint8),))))


def communicator(
    left: Pending[None] | None = None, stage: Stage = at_once, **settings: Any
) -> WallCommunicator:
    """Makes rank 1 of 3; a message of it has left once ``left`` is done, or at once."""
    transport: Any = SimpleNamespace(
        me=Peer(1, None, b"", None, None), send=lambda *_, **__: done(None) if left is None else left
    )
    view = View(transport, 3, now=lambda: 0.0)
    view._greeted.update((0, 2))
    view.stage = stage
    return WallCommunicator(view, **settings)


def test_every_purpose_has_a_kind_of_its_own() -> None:
    assert len({purpose.kind for purpose in Purpose}) == len(Purpose)
    for purpose in Purpose:
        assert kind_of(purpose.at(0)) == kind_of(purpose.at((1 << 56) - 1)) == purpose.kind
    assert kind_of((max(Purpose) + 1) << 56) == "other"


def test_a_communicator_counts_whoever_sends() -> None:
    comm = communicator()
    comm.send(NUMBERS, 0, Tag(Purpose.DECISION.at(4)))
    channel = ExchangeChannel(comm, Purpose.SHARING.at(4), 0)
    channel.send(NUMBERS, 2, 0)
    channel.send(NUMBERS, 2, 1)
    assert comm.sent.to_json() == {"decisions": [14, 0, 0], "sharing": [0, 0, 28]}
    assert channel.sent.tolist() == [0, 0, 28]
    assert channel.sent_nbytes == 28


def test_what_has_to_come_to_the_host_first_counts_once() -> None:
    staged: Pending[Payload] = Pending()
    comm = communicator(stage=lambda _: staged)
    comm.send(Payload((torch.empty(5, device="meta"),)), 0, Tag(0))
    assert comm.sent.to_json() == {"gradients": [20, 0, 0]}
    staged.set(Payload((torch.zeros(5),)))
    assert comm.sent.to_json() == {"gradients": [20, 0, 0]}


@pytest.mark.parametrize("error", [None, PeerLost(0, "its connection is gone")])
def test_a_payload_of_a_device_is_sent_when_it_has_left(error: PeerLost | None) -> None:
    staged, left = Pending[Payload](), Pending[None]()
    sent = communicator(left, stage=lambda _: staged).send(
        Payload((torch.empty(5, device="meta"),)), 0, Tag(0)
    )
    assert not sent.done, "it is still on its device"
    staged.set(Payload((torch.zeros(5),)))
    assert not sent.done, "it still waits to be sent"
    left.set(None) if error is None else left.fail(error)
    assert sent.done
    assert sent.error is error


def test_the_backends_sum_counts_as_a_rings_to_the_next_rank() -> None:
    def summed(tensor: Tensor) -> Pending[Tensor]:
        return done(tensor)

    comm = communicator(native=summed)
    channel = ExchangeChannel(comm, Purpose.STEP.at(0), 0)
    exchange = native(channel, torch.zeros(30), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(StopIteration):
        exchange.send(None)
    assert comm.sent.to_json() == {"gradients": [0, 0, 4 * 120 // 3 + 4 * 24 // 3]}
    assert channel.sent_nbytes == 192


def test_counts_add_up_and_kinds_of_which_nothing_was_sent_are_left_out() -> None:
    sent, more = Sent(3, {"sharing": [0, 0, 9], "evaluation": [0, 8, 8]}), Sent(3)
    more.add("evaluation", 1, 2)
    more.add("decisions", 0, 1)
    sent.add_all(more)
    assert sent.to_json() == {"evaluation": [0, 8, 9], "sharing": [0, 0, 9]}
    assert more.to_json() == {"evaluation": [0, 0, 1]}
