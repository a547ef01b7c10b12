"""On real sockets: strangers and nonsense are refused, and whoever is lost is lost by name."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from farflung.comm import wire
from farflung.comm.keys import Keys
from farflung.comm.wire import MessageKind, encode
from farflung.errors import PeerLost, ProtocolError
from farflung.types import Payload
from tests.helpers import Group, tag


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.close()


@pytest.fixture
def group(groups: list[Group]) -> Callable[..., Group]:
    def make(size: int = 2, *args: Any, **options: Any) -> Group:
        groups.append(Group(size, *args, **options))
        return groups[-1]

    return make


# --- refused and counted ----------------------------------------------------------------------------------------


CONTROL = (MessageKind.HELLO, MessageKind.LEAVE, MessageKind.ABORT)
GOOD = [
    bytes(frame) for frame in encode(MessageKind.DATA, 0, tag(9), Payload((torch.ones(2000), torch.ones(3))))
]


def control(kind: MessageKind, *tensors: torch.Tensor) -> list[bytes]:
    return [bytes(frame) for frame in encode(kind, 0, tag(0), Payload(tensors))]


def text(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


NONSENSE: dict[str, list[bytes]] = {
    "empty": [b""],
    "noise": [bytes(range(256))],
    "another protocol": [b"XX" + GOOD[0][2:], *GOOD[1:]],
    "another version": [GOOD[0][:2] + bytes([wire.VERSION + 1]) + GOOD[0][3:], *GOOD[1:]],
    "header cut short": [GOOD[0][:-1], *GOOD[1:]],
    "a frame too many": [*GOOD, b"more"],
    "an absurd shape": [GOOD[0][:26] + b"\xff\x01\0\x02" + struct.pack("<2Q", 0, 2**63)],
}
for _kind in CONTROL:
    NONSENSE |= {
        f"{_kind.name} without content": control(_kind),
        f"{_kind.name} that is no JSON": control(_kind, text(b"{")),
        f"{_kind.name} that is no UTF-8": control(_kind, text(b"\xff\xfe")),
        f"{_kind.name} that is no object": control(_kind, text(b"[1]")),
        f"{_kind.name} without end": control(_kind, text(b"[" * 100_000)),
        f"{_kind.name} of numbers": control(_kind, torch.ones(4)),
        f"{_kind.name} of one number": control(_kind, torch.tensor(2**62)),
        f"{_kind.name} twice": control(_kind, text(b"{}"), text(b"{}")),
    }


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_from_a_member_is_refused(what: str, group: Callable[..., Group]) -> None:
    members = group().meet()
    receiver = members.comms[0]
    waiting = receiver.recv(1, tag(5))
    members.raw(1, 0, *NONSENSE[what])
    members.until(lambda: waiting.is_done)
    assert receiver.session.transport.refusals.num_messages == 1
    assert isinstance(waiting.error, PeerLost)
    assert str(waiting.error).startswith("lost rank 1: refused ")
    assert receiver.session.mailbox.ended.error is waiting.error


@pytest.mark.parametrize("sizes", [(2501,), (1250, 1251)])
def test_a_payload_larger_than_any_of_the_run_is_refused(
    sizes: tuple[int, ...], group: Callable[..., Group]
) -> None:
    members = group(about={"max_nbytes": 10_000}).meet()
    sender, receiver = members.comms[1], members.comms[0]
    waiting = receiver.recv(1, tag(1))
    sender.send(Payload((torch.zeros(2500),)), 0, tag(1))
    members.until(lambda: waiting.is_done)
    assert waiting.result().nbytes == 10_000
    waiting = receiver.recv(1, tag(2))
    sender.send(Payload(tuple(map(torch.zeros, sizes))), 0, tag(2))
    members.until(lambda: waiting.is_done)
    assert receiver.session.transport.refusals.num_messages == 1
    assert isinstance(waiting.error, PeerLost)


@pytest.mark.parametrize("keys", [None, Keys.generate()], ids=["plain", "sealed"])
def test_received_tensors_are_aligned(keys: Keys | None, group: Callable[..., Group]) -> None:
    members = group(keys=keys).meet()
    sizes = (1, 3, 100, 5000, 200_001, 3_000_000)
    arrived = [members.comms[0].recv(1, tag(number)) for number in range(3)]
    for number in range(3):
        tensors = tuple(
            torch.ones(numel, dtype=dtype) for numel in sizes for dtype in (torch.int8, torch.float64)
        )
        members.comms[1].send(Payload(tensors[number:]), 0, tag(number))
    members.until(lambda: all(one.is_done for one in arrived))
    assert {tensor.data_ptr() % 64 for one in arrived for tensor in one.result().iter_tensors()} == {0}


def test_only_loopback_is_bound(group: Callable[..., Group]) -> None:
    comm = group().comms[0]
    host, _, port = comm.session.transport.local_peer.address_text.removeprefix("tcp://").partition(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port))):
        pass
    # Another address of the same machine would be answered had it bound them all.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)))


def test_a_probe_of_the_port_before_the_start_is_not_taken_for_a_member(group: Callable[..., Group]) -> None:
    members = group()
    members.comms[0].session.members.connect(members.peers)
    host, _, port = (
        members.comms[0].session.transport.local_peer.address_text.removeprefix("tcp://").partition(":")
    )
    with socket.create_connection((host, int(port))) as probe:
        members.until(lambda: bool(members.transports[0].handshaker.unauthenticated))
        assert probe.recv(1)
    members.meet()
    members.exchange(2)
    assert members.comms[0].session.mailbox.ended.error is None


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"steps": 1}, {"steps": 2}, "steps: 1 on rank {}, 2 on rank {}"),
        ({"steps": 1}, {"steps": 1, "codec": "int8"}, "codec: None on rank {}, 'int8' on rank {}"),
        ({"recipe": {"codec": "a"}}, {"recipe": {"codec": "b"}}, "recipe: {{'codec': 'a'}} on rank {}, "),
    ],
)
def test_unlike_settings_are_found_at_the_start(
    one: dict[str, Any], other: dict[str, Any], named: str, group: Callable[..., Group]
) -> None:
    members = group(2, [one, other]).meet()
    error = members.comms[0].session.members.ready.error
    assert isinstance(error, ProtocolError)
    assert f"ranks disagree on {named.format(0, 1)}" in str(error)
    assert isinstance(members.comms[1].session.members.ready.error, ProtocolError)
    late = members.comms[0].recv(1, tag(1))
    assert late.error is error


def test_like_settings_are_fine_in_any_order(group: Callable[..., Group]) -> None:
    settings = [{"a": 1, "b": [1, {"c": None}]}, {"b": [1, {"c": None}], "a": 1}]
    members = group(2, settings).meet()
    assert members.comms[0].session.members.ready.error is None
    members.exchange(1)
