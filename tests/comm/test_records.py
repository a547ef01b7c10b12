"""Sender and Receiver with bytes alone: every message arrives once, over any number of connections, or is refused."""

from __future__ import annotations

import random
import struct
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.comm import records
from farflung.comm.framing import HEAD_NBYTES, LOCAL_PIECE_NBYTES, PIECE_HEADER_NBYTES, compute_wire_nbytes
from farflung.comm.pool import BufferPool
from farflung.comm.records import (
    CONTROL_VIEW,
    FIRST_PRIORITY,
    LAST_PRIORITY,
    MAX_HEAD_NBYTES,
    MessageWithdrawn,
    Receiver,
    RecordKind,
    RecvBuffers,
    Sender,
)
from farflung.comm.wire import Frame, Message, MessageKind, WireError, encode
from farflung.types import Payload, Tag
from tests.helpers import number_in, numbered, same_payload, tag

PIECE = 1 << 13
ROOM = 1 << 20


def large(value: int, pieces: float = 3.5) -> Payload:
    """A payload of so many pieces."""
    return Payload((torch.full((int(pieces * PIECE / 4),), float(value)),))


def frames_of(payload: Payload, named: Tag | None = None) -> list[Frame]:
    return encode(MessageKind.DATA, 0, tag() if named is None else named, payload)


class Pipe:
    """A sender and a receiver with some connections between them, over which bytes pass by hand."""

    def __init__(self, connections: int = 1, room: int = ROOM) -> None:
        self.sender, self.widths = Sender(), list[int]()
        landings = RecvBuffers(
            lambda head, number: BufferPool().allocate_tensor(head.layout.large_nbytes[number]), lambda: room
        )
        self.ends = [
            Receiver(landings, is_first_connection=not index, on_connection_count=self.widths.append)
            for index in range(connections)
        ]
        self.ways: list[deque[bytes]] = [deque() for _ in range(connections)]
        """What is on its way over each connection."""
        self.came: list[Message] = []

    def send(self, index: int = 0) -> int:
        """A connection takes a chunk; its size."""
        chunk = self.sender.take_chunk(PIECE, is_first_connection=index == 0)
        if chunk is None:
            return 0
        said = b"".join(chunk.buffers)
        self.ways[index].append(said)
        self.sender.mark_sent(chunk)
        return len(said)

    def hear(self, index: int = 0, most: int = 1 << 30) -> None:
        """What is on its way over a connection arrives, so many bytes at a time."""
        while self.ways[index]:
            if self.ends[index].is_paused:
                self.came += self.ends[index].parse_bytes(0)
                if self.ends[index].is_paused:
                    return
            said = self.ways[index].popleft()
            room = self.ends[index].get_buffer()
            part = said[: min(len(room), most)]
            room[: len(part)] = part
            if said[len(part) :]:
                self.ways[index].appendleft(said[len(part) :])
            self.came += self.ends[index].parse_bytes(len(part))

    def all(self) -> list[Message]:
        """Everything arrives that was put."""
        while any(self.send(index) for index in range(len(self.ways))):
            pass
        while any(self.ways):
            before = sum(map(len, self.ways))
            for index in range(len(self.ways)):
                self.hear(index)
            assert sum(map(len, self.ways)) < before, "it stands still"
        for end in self.ends:
            if end.is_paused:
                self.came += end.parse_bytes(0)
        came, self.came = self.came, []
        return came


def first_number(message: Message) -> float:
    return float(next(iter(message.payload.iter_tensors())).reshape(-1)[0])


# --- all of it, in its order ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.floats(0.001, 4.0), st.integers(0, 3)), max_size=12),
    st.integers(1, 4),
    st.integers(1, 3 * PIECE),
)
def test_every_message_arrives_once_over_any_number_of_connections(
    plan: list[tuple[int, float, int]], connections: int, most: int
) -> None:
    pipe = Pipe(connections)
    sent = [large(number, pieces) for number, (_, pieces, _) in enumerate(plan)]
    for number, (priority, _, turns) in enumerate(plan):
        frames = frames_of(sent[number], tag(number))
        left = pipe.sender.put(frames, priority, 0)
        assert left.is_done == (len(frames) == 1)
        for turn in range(turns):
            index = (number + turn) % connections
            pipe.send(index)
            pipe.hear(index, most)
    came = [*pipe.came]
    pipe.came = []
    came += pipe.all()
    numbers = [one.tag.exchange for one in came]
    assert sorted(numbers) == [*range(len(plan))]
    assert all(same_payload(one.payload, sent[one.tag.exchange]) for one in came)
    if connections == 1:
        for priority in range(-2, 3):
            alike = [number for number in numbers if plan[number][0] == priority]
            assert alike == sorted(alike)


@pytest.mark.parametrize(
    ("plan", "order"),
    [
        (((4.5, 2), (3.75, 1)), [0, 1]),  # two and a half pieces are left of the first
        (((4.5, 2), (1.5, 1)), [1, 0]),
        (((4.5, 2), (3.75, 1), (1.5, 0)), [2, 1, 0]),  # what has been interrupted is overtaken by both
    ],
)
def test_only_shorter_messages_overtake_the_rest_of_one_that_is_leaving(
    plan: tuple[tuple[float, int], ...], order: list[int]
) -> None:
    pipe = Pipe()
    for name, (pieces, priority) in enumerate(plan):
        pipe.sender.put(frames_of(large(name, pieces), tag(name)), priority, 0)
        if not name:
            pipe.send()
            pipe.send()
    assert [one.tag.exchange for one in pipe.all()] == order


def test_the_urgent_overtake_the_rest_of_what_is_under_way() -> None:
    pipe = Pipe()
    slow = pipe.sender.put(frames_of(large(1, 6)), 0, 0)
    pipe.send()
    urgent = pipe.sender.put(frames_of(numbered(2)), -1, 0)
    assert urgent.is_done
    pipe.send()
    pipe.hear()
    assert [number_in(one.payload) for one in pipe.came] == [2]
    pipe.came.clear()
    assert [first_number(one) for one in pipe.all()] == [1]
    assert slow.is_done


def test_urgent_messages_are_expected_for_some_megabytes_after_one_has_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "URGENT_NBYTES", 3 * PIECE)
    pipe = Pipe()
    pipe.sender.put(frames_of(large(1, 9)), 0, 0)
    pipe.send()
    pipe.sender.put(frames_of(numbered(2)), 0, 0)  # behind it
    pipe.send()
    assert not pipe.sender.expects_urgent
    pipe.sender.put(frames_of(numbered(3)), -1, 0)
    expected = []
    for _ in range(5):
        pipe.send()
        expected.append(pipe.sender.expects_urgent)
    assert expected == [True, True, True, False, False]


def test_small_ones_that_waited_leave_together() -> None:
    pipe = Pipe()
    for number in range(40):
        pipe.sender.put(frames_of(numbered(number)), 0, 0)
    pipe.send()
    assert not pipe.sender.has_data(is_first_connection=True)
    pipe.hear()
    assert [number_in(one.payload) for one in pipe.came] == [*range(40)]


def test_a_chunk_is_a_piece_or_so() -> None:
    pipe = Pipe()
    for number in range(5):
        pipe.sender.put(frames_of(large(number, 2.5)), 0, 0)
        pipe.sender.put(frames_of(numbered(number)), 0, 0)
    sizes = []
    while nbytes := pipe.send():
        sizes.append(nbytes)
    assert max(sizes) < PIECE + 200
    assert pipe.sender.queued_nbytes == 0


def test_sizes_of_records_are_those_that_are_documented() -> None:
    pipe = Pipe()
    head, body = frames_of(large(1, 0.9))
    pipe.sender.put([head, body], 0, 0)
    while pipe.send():
        pass
    assert len(head) == HEAD_NBYTES
    assert sum(map(len, pipe.ways[0])) == compute_wire_nbytes(len(body), PIECE, is_encrypted=False)


def test_a_piece_waits_for_the_head_that_comes_over_the_first_connection() -> None:
    pipe = Pipe(2)
    pipe.sender.put(frames_of(large(1, 2)), 0, 0)
    pipe.send(0)
    pipe.send(1)
    pipe.hear(1)
    assert pipe.ends[1].is_paused
    pipe.hear(0)
    assert [first_number(one) for one in pipe.all()] == [1]
    assert not pipe.ends[1].is_paused


def test_the_number_of_connections_is_told() -> None:
    pipe = Pipe()
    pipe.sender.put(frames_of(numbered(1)), FIRST_PRIORITY, 0)
    pipe.sender.queue_connection_count(5)
    pipe.all()
    assert pipe.widths == [5]


# --- taken back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connections", [1, 2])
def test_what_a_view_has_queued_is_withdrawn_and_the_rest_arrives(connections: int) -> None:
    pipe = Pipe(connections)
    gone = [pipe.sender.put(frames_of(large(1, 6)), 0, 7), pipe.sender.put(frames_of(numbered(2)), 1, 7)]
    stays = pipe.sender.put(frames_of(numbered(3)), 2, 8)
    said = pipe.sender.put(frames_of(numbered(4)), LAST_PRIORITY, CONTROL_VIEW)
    for index in range(connections):
        pipe.send(index)
    pipe.sender.withdraw(7)
    assert isinstance(gone[0].error, MessageWithdrawn)
    assert [number_in(one.payload) for one in pipe.all()] == [3, 4]
    assert stays.result() is None
    assert said.result() is None
    assert not pipe.ends[0]._buffers._partial, "a part is kept for ever"


def test_a_connection_that_is_gone_fails_what_waits_for_it() -> None:
    for keep_control in (True, False):
        pipe = Pipe(1)
        waiting = [pipe.sender.put(frames_of(large(number)), number, 0) for number in range(3)]
        pipe.sender.put(frames_of(numbered(7)), FIRST_PRIORITY, CONTROL_VIEW)
        pipe.sender.close(OSError("gone"), keep_control=keep_control)
        assert [str(one.error) for one in waiting] == ["gone"] * 3
        assert pipe.sender.has_data(is_first_connection=True) == keep_control
        assert [number_in(one.payload) for one in pipe.all()] == [7] * keep_control


# --- what is refused --------------------------------------------------------------------------------------------


def record(kind: int, body: bytes, size: int | None = None) -> bytes:
    return struct.pack("<IB3x", len(body) if size is None else size, kind) + body


def more(number: int, tensor: int, offset: int, body: bytes) -> bytes:
    return record(RecordKind.PIECE, struct.pack("<IBQ", number, tensor, offset) + body)


HEAD = record(RecordKind.HEAD, bytes(frames_of(large(1))[0]))
NBYTES = large(1).nbytes
WITHDRAWN = HEAD + record(RecordKind.WITHDRAWN, struct.pack("<I", 1))
REFUSED = {
    "a kind that is none": record(9, b""),
    "a head larger than any": record(RecordKind.HEAD, b"", MAX_HEAD_NBYTES + 1),
    "an empty head": record(RecordKind.HEAD, b""),
    "an empty piece": HEAD + more(1, 0, 0, b""),
    "a piece of nothing": more(1, 0, 0, bytes(8)),
    "a piece of another message": HEAD + more(2, 0, 0, bytes(8)),
    "a piece of another tensor": HEAD + more(1, 1, 0, bytes(8)),
    "a piece behind the end": HEAD + more(1, 0, NBYTES - 4, bytes(8)),
    "a piece at an absurd place": HEAD + more(1, 0, 1 << 63, bytes(8)),
    "a piece twice": HEAD + more(1, 0, 0, bytes(8)) + more(1, 0, 4, bytes(8)),
    "a piece of a message that is whole": HEAD + more(1, 0, 0, bytes(NBYTES)) + more(1, 0, 0, bytes(8)),
    "withdrawn, and not begun": record(RecordKind.WITHDRAWN, struct.pack("<I", 1)),
    "a piece of a withdrawn message larger than any": WITHDRAWN
    + record(RecordKind.PIECE, struct.pack("<IBQ", 1, 0, 0), PIECE_HEADER_NBYTES + LOCAL_PIECE_NBYTES + 1),
    "withdrawn in other words": HEAD + record(RecordKind.WITHDRAWN, b"\1"),
    "a payload larger than any": record(RecordKind.HEAD, bytes(frames_of(Payload((torch.zeros(ROOM),)))[0])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_is_refused(what: str) -> None:
    pipe = Pipe()
    pipe.ways[0].append(REFUSED[what])
    with pytest.raises(WireError):
        pipe.hear()


def test_the_largest_piece_of_a_withdrawn_message_is_passed_over() -> None:
    pipe = Pipe()
    pipe.ways[0] += [WITHDRAWN, more(1, 0, 0, bytes(LOCAL_PIECE_NBYTES))]
    pipe.ways[0] += [record(RecordKind.HEAD, bytes(frames_of(numbered(2))[0]))]
    pipe.hear()
    assert [number_in(one.payload) for one in pipe.came] == [2]


@pytest.mark.parametrize("said", [HEAD, more(2000, 0, 0, bytes(8)), record(RecordKind.CONNECTIONS, b"\2")])
def test_other_connections_take_pieces_alone_and_only_soon_due_ones(said: bytes) -> None:
    pipe = Pipe(2)
    pipe.ways[1].append(said)
    with pytest.raises(WireError):
        pipe.hear(1)


def test_only_so_many_come_in_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MAX_PARTIAL_MESSAGES", 3)
    pipe = Pipe()
    pipe.ways[0].append(HEAD * 3)
    pipe.hear()
    pipe.ways[0].append(HEAD)
    with pytest.raises(WireError, match="more messages in parts than may be"):
        pipe.hear()


def mutated(draw: random.Random) -> bytes:
    """Records of some messages, with bytes changed, cut off, put in or exchanged."""
    sender, said = Sender(), list[bytes]()
    for number in range(draw.randint(1, 3)):
        sender.put(frames_of(large(number, draw.choice([0.01, 0.5, 2.5]))), 0, number % 2)
        if (chunk := sender.take_chunk(PIECE, is_first_connection=True)) is not None:
            said.append(b"".join(chunk.buffers))
    sender.withdraw(0)
    while (chunk := sender.take_chunk(PIECE, is_first_connection=True)) is not None:
        said.append(b"".join(chunk.buffers))
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(said))
        one = bytearray(said[at])
        place = draw.randrange(min(len(one), 120) + 1)
        match draw.randrange(5):
            case 0:
                one[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                one[place : place + 8] = draw.choice([bytes(8), b"\xff" * 8, draw.randbytes(8)])
            case 2:
                del one[place:]
            case 3:
                one[place:place] = draw.randbytes(draw.randrange(1, 9))
            case _:
                draw.shuffle(said)
                continue
        said[at] = bytes(one)
    return b"".join(said)


def test_mutations_are_refused_or_read_within_bounds() -> None:
    draw, refused = random.Random(1), 0
    for _ in range(3000):
        pipe = Pipe()
        said = mutated(draw)
        pipe.ways[0].append(said)
        try:
            pipe.hear()
        except WireError:
            refused += 1
        landings = pipe.ends[0]._buffers
        taken = sum(
            tensor.nbytes
            for one in landings._partial.values()
            for tensor in one._tensors
            if tensor is not None
        )
        assert taken <= len(landings._partial) * ROOM
        assert sum(message.payload.nbytes for message in pipe.came) <= len(said)
    assert refused > 900
