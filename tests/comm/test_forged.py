"""Ten thousand forged messages: each is refused or read, and a run beside them ends with the same bits."""

from __future__ import annotations

import random
import socket
from collections import Counter
from contextlib import closing, suppress

import pytest
import torch

from farflung.comm.wire import MAX_INLINE_HEAD_NBYTES, MessageKind, WireError, encode, parse_json
from farflung.types import Payload, Tag
from tests.helpers import Group, decode, same_bits, tag
from tests.strangers import NOISE, knock

pytestmark = pytest.mark.slow

COUNT = 10_000
ROOM = 1 << 20
FAR = Tag(1 << 40, 7, 3)
"""No exchange of the run's."""


def text(content: bytes) -> Payload:
    return Payload((torch.frombuffer(bytearray(content), dtype=torch.uint8),))


GOOD = [
    (MessageKind.DATA, Payload((torch.arange(2000.0), torch.ones(3, dtype=torch.bfloat16)))),
    (
        MessageKind.DATA,
        Payload((Payload((torch.zeros(0, 5), torch.ones(2, 3, dtype=torch.int64))), torch.ones(()))),
    ),
    (MessageKind.DATA, Payload((torch.zeros(3 * MAX_INLINE_HEAD_NBYTES, dtype=torch.uint8),))),
    (MessageKind.HELLO, text(b'{"rank": 1, "settings": {"number of replicas": 2}}')),
    (MessageKind.WAITING, text(b'{"for": 1, "asks": true}')),
    (MessageKind.ABORT, text(b'{"rank": 1, "detail": "gone"}')),
    (MessageKind.LEAVE, text(b'{"behind": 0}')),
]


def forged(draw: random.Random) -> list[bytes]:
    """A good message with some bytes changed, cut off, put in or exchanged; now and then mere noise."""
    if draw.random() < 0.1:
        return [draw.randbytes(draw.randrange(200)) for _ in range(draw.randint(1, 3))]
    kind, payload = draw.choice(GOOD)
    frames = [bytearray(frame) for frame in encode(kind, 0, FAR, payload)]
    for _ in range(draw.randint(1, 4)):
        frame = draw.choice(frames)
        at = draw.randrange(min(len(frame), 80) + 1)
        match draw.randrange(6):
            case 0 | 1 if at < len(frame):
                frame[at] ^= 1 << draw.randrange(8)
            case 2:
                frame[at : at + 8] = draw.choice([bytes(8), b"\xff" * 8, draw.randbytes(8)])
            case 3:
                del frame[at:]
            case 4:
                frame[at:at] = draw.randbytes(draw.randrange(1, 9))
            case _:
                draw.shuffle(frames)
    if draw.random() < 0.1:
        frames.append(bytearray(draw.randbytes(draw.randrange(5000))))
    return [bytes(frame) for frame in frames]


def verdict(frames: list[bytes]) -> str:
    """What becomes of a message; anything but a refusal by name is an error."""
    try:
        message = decode([bytearray(frame) for frame in frames], max_nbytes=ROOM)
        if message.kind is not MessageKind.DATA:
            parse_json(message.payload)
    except WireError:
        return "refused"
    assert message.payload.nbytes <= min(ROOM, sum(map(len, frames)))
    return "accepted" if message.kind is MessageKind.DATA else "accepted, and has a say"


def test_each_is_refused_or_read() -> None:
    draw = random.Random(1)
    counts = Counter(verdict(forged(draw)) for _ in range(COUNT))
    print(dict(counts))
    assert counts.total() == COUNT
    assert counts["refused"] > COUNT // 2
    assert counts["accepted"] > COUNT // 100
    assert counts["accepted, and has a say"] > COUNT // 1000


def sums(members: Group, between: int) -> list[torch.Tensor]:
    """Makes rank 0's sums of what it and rank 1 have; ``between`` two of them rank 2 sends it forged messages."""
    draw, found, total = random.Random(2), [], torch.zeros(5000)
    for number in range(1, 51):
        for _ in range(between):
            frames = forged(draw)
            if verdict(frames) != "accepted, and has a say":  # who is a member may end a run
                members.raw(2, 0, *frames)
        tensor = torch.rand(5000, generator=torch.Generator().manual_seed(number))
        members.comms[1].send(Payload((tensor,)), 0, tag(number))
        arrived = members.comms[0].recv(1, tag(number))
        members.until(lambda arrived=arrived: arrived.is_done)  # type: ignore[misc]
        (came,) = arrived.result().iter_tensors()
        total = total + came
        found.append(total)
    return found


@pytest.mark.parametrize("interface", ["127.0.0.1", "127.0.0.2"], ids=["loopback", "as of two machines"])
def test_a_run_beside_them_ends_with_the_same_bits(interface: str) -> None:
    apart = {"needs_all_members": False}
    with (
        closing(Group(3, about=apart)) as alone,
        closing(Group(3, about=apart, interface=interface)) as members,
    ):
        expected = sums(alone.meet(), 0)
        found = sums(members.meet(), COUNT // 50)
        print({"refused": members.comms[0].session.transport.refusals.num_messages})
        assert alone.comms[0].session.transport.refusals.num_messages == 0
        assert members.comms[0].session.transport.refusals.num_messages >= 1
        assert members.comms[0].session.members.by_rank[2].is_gone, (
            "it is out with the first that is malformed"
        )
        assert members.comms[0].session.mailbox.ended.error is None
    assert all(map(same_bits, found, expected))


def test_no_forged_handshake_gets_in() -> None:
    draw = random.Random(3)
    count = 300
    with closing(Group(2)) as members:
        first = members.comms[0]
        first.session.members.connect(members.peers)
        for known in range(1, count + 1):
            said = bytearray(draw.choice([*NOISE.values(), bytes(60), draw.randbytes(60)]))
            for _ in range(draw.randint(0, 3)):
                said[draw.randrange(len(said))] = draw.randrange(256)
            with knock(first) as stranger:
                with suppress(OSError):  # cut off already
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                members.until(lambda known=known: first.session.transport.refusals.num_connections == known)  # type: ignore[misc]
        assert first.session.transport.refusals.num_messages == 0
        members.meet().exchange(1)
        assert first.session.mailbox.ended.error is None
