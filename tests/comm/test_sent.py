"""Bytes are counted once, when they are sent: by kind, and by who they are for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Peer, Purpose, ViewSession, WallCommunicator
from farflung.comm.channel import get_exchange_kind
from farflung.comm.collectives import native
from farflung.comm.staging import Stage, stage_blocking
from farflung.errors import PeerLost
from farflung.tasks import Pending, create_completed
from farflung.types import Payload, SentBytes, Tag

NUMBERS = Payload((torch.zeros(3), Payload((torch.zeros(2, dtype=torch.uint8),))))


def communicator(
    left: Pending[None] | None = None, stage: Stage = stage_blocking, **settings: Any
) -> WallCommunicator:
    """Makes rank 1 of 3; a message of it has left once ``left`` is done, or at once."""
    transport: Any = SimpleNamespace(
        local_peer=Peer(1, None, b"", None, None),
        send=lambda *_, **__: create_completed(None) if left is None else left,
    )
    view = ViewSession(transport, 3, read_clock=lambda: 0.0)
    for rank in (0, 2):
        view.members.by_rank[rank].has_greeted = True
        view.members.routes.next_hops[rank] = rank
    view.stage = stage
    return WallCommunicator(view, **settings)


def test_every_purpose_has_a_kind_of_its_own() -> None:
    assert len({purpose.kind for purpose in Purpose}) == len(Purpose)
    for purpose in Purpose:
        assert (
            get_exchange_kind(purpose.build_exchange_id(0))
            == get_exchange_kind(purpose.build_exchange_id((1 << 56) - 1))
            == purpose.kind
        )
    assert get_exchange_kind((max(Purpose) + 1) << 56) == "other"


def test_a_communicator_counts_whoever_sends() -> None:
    comm = communicator()
    comm.send(NUMBERS, 0, Tag(Purpose.DECISION.build_exchange_id(4)))
    channel = ExchangeChannel(comm, Purpose.SHARING.build_exchange_id(4), 0)
    channel.send(NUMBERS, 2, 0)
    channel.send(NUMBERS, 2, 1)
    assert comm.sent_bytes.to_json() == {"decisions": [14, 0, 0], "sharing": [0, 0, 28]}
    assert channel.sent_counts.tolist() == [0, 0, 28]
    assert channel.sent_nbytes == 28


def test_what_has_to_come_to_the_host_first_counts_once() -> None:
    staged: Pending[Payload] = Pending()
    comm = communicator(stage=lambda _: staged)
    comm.send(Payload((torch.empty(5, device="meta"),)), 0, Tag(0))
    assert comm.sent_bytes.to_json() == {"gradients": [20, 0, 0]}
    staged.set_result(Payload((torch.zeros(5),)))
    assert comm.sent_bytes.to_json() == {"gradients": [20, 0, 0]}


@pytest.mark.parametrize("error", [None, PeerLost(0, "its connection is gone")])
def test_a_payload_of_a_device_is_sent_when_it_has_left(error: PeerLost | None) -> None:
    staged, left = Pending[Payload](), Pending[None]()
    sent = communicator(left, stage=lambda _: staged).send(
        Payload((torch.empty(5, device="meta"),)), 0, Tag(0)
    )
    assert not sent.is_done, "it is still on its device"
    staged.set_result(Payload((torch.zeros(5),)))
    assert not sent.is_done, "it still waits to be sent"
    left.set_result(None) if error is None else left.set_exception(error)
    assert sent.is_done
    assert sent.error is error


def test_the_backends_sum_counts_as_a_rings_to_the_next_rank() -> None:
    def summed(tensor: Tensor) -> Pending[Tensor]:
        return create_completed(tensor)

    comm = communicator(native=summed)
    channel = ExchangeChannel(comm, Purpose.STEP.build_exchange_id(0), 0)
    exchange = native(channel, torch.zeros(30), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(StopIteration):
        exchange.send(None)
    assert comm.sent_bytes.to_json() == {"gradients": [0, 0, 4 * 120 // 3 + 4 * 24 // 3]}
    assert channel.sent_nbytes == 192


def test_counts_add_up_and_kinds_of_which_nothing_was_sent_are_left_out() -> None:
    sent, more = SentBytes(3, {"sharing": [0, 0, 9], "evaluation": [0, 8, 8]}), SentBytes(3)
    more.add("evaluation", 1, 2)
    more.add("decisions", 0, 1)
    sent.add_all(more)
    assert sent.to_json() == {"evaluation": [0, 8, 9], "sharing": [0, 0, 9]}
    assert more.to_json() == {"evaluation": [0, 0, 1]}
