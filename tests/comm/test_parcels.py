"""What waits to be sent, and what has come in part: every message arrives once, the urgent ones first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.comm import inbox
from farflung.comm.inbox import Inbox
from farflung.comm.outbox import Outbox, Withdrawn
from farflung.comm.pool import Pool
from farflung.comm.wire import Frame, Kind, Message, WireError, begin, encode, part
from farflung.types import Payload, Tag
from tests.helpers import number_in, numbered, same_payload, tag

PIECE = 1 << 13
ROOM = 1 << 20


def large(value: int, pieces: float = 3.5) -> Payload:
    """A payload of so many pieces."""
    return Payload((torch.full((int(pieces * PIECE / 4),), float(value)),))


def frames_of(payload: Payload, named: Tag | None = None) -> list[Frame]:
    return encode(Kind.DATA, 0, tag() if named is None else named, payload, piece=PIECE)


def parcels(outbox: Outbox) -> Iterator[Sequence[Frame]]:
    while outbox:
        parcel, through = outbox.take()
        for left in through:
            left.set(None)
        yield parcel


def heard(inbox: Inbox, parcel: Sequence[Frame]) -> list[Message]:
    found = inbox.take([bytearray(frame) for frame in parcel], ROOM)
    assert all(isinstance(one, Message) for one in found)
    return cast("list[Message]", found)


def first_number(message: Message) -> float:
    return float(next(iter(message.payload.tensors())).reshape(-1)[0])


# --- all of it, in its order ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-2, 2), st.floats(0.001, 4.0), st.integers(0, 3)), max_size=12))
def test_every_message_arrives_once_and_those_of_one_priority_in_their_order(
    plan: list[tuple[int, float, int]],
) -> None:
    outbox, peer = Outbox(PIECE), Inbox(PIECE, Pool())
    came: list[Message] = []
    sent = [large(number, pieces) for number, (_, pieces, _) in enumerate(plan)]
    for number, (priority, _, turns) in enumerate(plan):
        frames = frames_of(sent[number], tag(number))
        left = outbox.put(frames, priority, 0)
        assert left.done == (len(frames) == 1)
        for _, parcel in zip(range(turns), parcels(outbox), strict=False):
            came += heard(peer, parcel)
    for parcel in parcels(outbox):
        came += heard(peer, parcel)
    numbers = [one.tag.exchange for one in came]
    assert sorted(numbers) == [*range(len(plan))]
    assert all(same_payload(one.payload, sent[one.tag.exchange]) for one in came)
    for priority in range(-2, 3):
        alike = [number for number in numbers if plan[number][0] == priority]
        assert alike == sorted(alike)


def test_the_urgent_overtake_the_rest_of_what_is_under_way() -> None:
    outbox, peer = Outbox(PIECE), Inbox(PIECE, Pool())
    slow = outbox.put(frames_of(large(1, 6)), 0, 0)
    first, _ = outbox.take()
    assert heard(peer, first) == []
    urgent = outbox.put(frames_of(numbered(2)), -1, 0)
    second, through = outbox.take()
    assert through == []
    assert urgent.done
    (message,) = heard(peer, second)
    assert number_in(message.payload) == 2
    rest = [one for parcel in parcels(outbox) for one in heard(peer, parcel)]
    assert [first_number(one) for one in rest] == [1]
    assert slow.done


def test_small_ones_that_waited_leave_together() -> None:
    outbox, peer = Outbox(PIECE), Inbox(PIECE, Pool())
    for number in range(40):
        outbox.put(frames_of(numbered(number)), 0, 0)
    (only,) = parcels(outbox)
    assert [number_in(one.payload) for one in heard(peer, only)] == [*range(40)]


def test_a_parcel_is_a_piece_or_so() -> None:
    outbox = Outbox(PIECE)
    for number in range(5):
        outbox.put(frames_of(large(number, 2.5)), 0, 0)
        outbox.put(frames_of(numbered(number)), 0, 0)
    sizes = [sum(map(len, parcel)) for parcel in parcels(outbox)]
    assert max(sizes) < PIECE + 200
    assert outbox.nbytes == 0


# --- taken back -------------------------------------------------------------------------------------------------


def test_what_a_view_has_queued_is_withdrawn_and_the_rest_arrives() -> None:
    outbox, peer = Outbox(PIECE), Inbox(PIECE, Pool())
    gone = [outbox.put(frames_of(large(1, 6)), 0, 7), outbox.put(frames_of(numbered(2)), 0, 7)]
    stays = outbox.put(frames_of(numbered(3)), 0, 8)
    parcel, _ = outbox.take()
    assert heard(peer, parcel) == []
    outbox.withdraw(7)
    assert isinstance(gone[0].error, Withdrawn)
    came = [one for parcel in parcels(outbox) for one in heard(peer, parcel)]
    assert [number_in(one.payload) for one in came] == [3]
    assert stays.result() is None
    assert not peer._begun, "a part is kept for ever"


def test_a_connection_that_is_gone_fails_what_waits_for_it() -> None:
    outbox = Outbox(PIECE)
    waiting = [outbox.put(frames_of(large(number)), number, 0) for number in range(3)]
    outbox.close(OSError("gone"))
    assert [str(one.error) for one in waiting] == ["gone"] * 3
    assert not outbox


# --- what is none -----------------------------------------------------------------------------------------------


def in_parts(number: int) -> list[list[Frame]]:
    head, *others = frames_of(large(number))
    return [[begin(head, number, 1), others[0]], [part(Kind.PART, number, len(others) - 1), *others[1:]]]


def test_parts_of_nothing_are_refused() -> None:
    peer = Inbox(PIECE, Pool())
    with pytest.raises(WireError, match="a part of nothing that has begun"):
        heard(peer, in_parts(1)[1])
    heard(peer, in_parts(1)[0])
    with pytest.raises(WireError, match="more messages in parts than may be"):
        heard(peer, in_parts(1)[0])
    (message,) = heard(peer, in_parts(1)[1])
    assert first_number(message) == 1


def test_fewer_frames_than_announced_are_refused_and_nothing_beside_them_is_used() -> None:
    peer = Inbox(PIECE, Pool())
    good = frames_of(numbered(1))
    with pytest.raises(WireError, match="fewer frames than announced"):
        heard(peer, [*good, *frames_of(large(2))[:-1]])
    with pytest.raises(WireError, match="a header of 4 bytes"):
        heard(peer, [*good, b"more"])
    with pytest.raises(WireError, match="a header of 0 bytes"):
        heard(peer, [])


def test_a_message_larger_than_any_of_the_run_is_refused_at_its_first_part() -> None:
    head, *others = frames_of(large(1, 200))
    parcel = [bytearray(one) for one in ([begin(head, 1, 1), others[0], *frames_of(numbered(2))])]
    refused, message = Inbox(PIECE, Pool()).take(parcel, ROOM)
    assert "where messages of this run have at most" in str(refused)
    assert isinstance(message, Message)
    assert number_in(message.payload) == 2


def test_only_so_many_come_in_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "AT_ONCE", 3)
    peer, due = Inbox(PIECE, Pool()), deque(in_parts(number) for number in range(1, 5))
    rests = []
    for _ in range(3):
        first, rest = due.popleft()
        heard(peer, first)
        rests.append(rest)
    with pytest.raises(WireError, match="more messages in parts than may be"):
        heard(peer, due[0][0])
    assert [first_number(one) for rest in rests for one in heard(peer, rest)] == [1, 2, 3]


def test_more_frames_than_a_message_has_are_refused() -> None:
    head, *others = frames_of(large(1))
    with pytest.raises(WireError):
        heard(Inbox(PIECE, Pool()), [begin(head, 1, len(others) + 1), *others, bytes(PIECE)])


def test_a_large_tensor_in_one_frame_where_pieces_are_due_is_refused() -> None:
    head, *others = encode(Kind.DATA, 0, tag(), large(1, pieces=1.5))
    assert len(others) == 1
    with pytest.raises(WireError, match=r"bytes where .* were described"):
        heard(Inbox(PIECE, Pool()), [head, *others])
