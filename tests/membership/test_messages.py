"""Messages are decoded as they were encoded; what is malformed or wrongly signed is refused by a named error."""

from __future__ import annotations

import json
import random

import pytest

from farflung.membership import (
    EndCertificate,
    Fact,
    MalformedMessage,
    MemberReport,
    Message,
    MessageCodec,
    View,
    Vote,
)

CODEC = MessageCodec(b"a key")
FIRST = View(1, ("a", "b", "c", "d"), (0,), (("a", "b", "c", "d"),))
SECOND = View(2, ("a", "b", "t"), (11, 12, 14), (("a", "b"), ("b",), ("a",)))
VOTE = Vote(9, ("c", "d"), SECOND)
EARLIER = CODEC.sign_certificate("c", -9, MemberReport(FIRST, {Fact("link", "c", "a"): 1}, {}, (11,), None))
LATER = CODEC.sign_certificate(
    "d",
    0,
    MemberReport(FIRST, {Fact("link", "d", "c"): 3, Fact("leave", "d"): 1}, {"c": EARLIER}, (11, 14), VOTE),
)
REPORT = MemberReport(
    FIRST, {Fact("redo", "a"): 2, Fact("link", "b", "t"): 2}, {"d": LATER, "c": EARLIER}, (12,), VOTE
)
MESSAGES: dict[str, Message] = {
    "report": REPORT,
    "report that is not frozen": MemberReport(FIRST, {}, {}, None, None),
    "report without the model": MemberReport(SECOND, {}, {}, (), None),
    "vote": VOTE,
    "vote for a view without members": Vote(1, (), View(2, (), (3,), (("a",),))),
    "certificate": LATER,
    "certificate without a will": CODEC.sign_certificate("e", 137, None),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_encoded_is_decoded(name: str) -> None:
    message = MESSAGES[name]
    assert CODEC.decode(CODEC.encode(message)) == message


def test_the_ballot_is_the_sum_of_counts_and_the_number_of_certificates() -> None:
    assert REPORT.ballot == 2 + 2 + 2


def test_each_certificate_travels_once_however_wills_are_nested() -> None:
    names = [f"m{place}" for place in range(30)]
    view = View(1, tuple(names), (0,), (tuple(names),))
    wills: dict[str, EndCertificate] = {}
    for name in names[1:]:
        wills = {**wills, name: CODEC.sign_certificate(name, -9, MemberReport(view, {}, wills, (0,), None))}
    data = CODEC.encode(MemberReport(view, {}, wills, (0,), None))
    assert len(data) < 60_000
    assert CODEC.encode(CODEC.decode(data)) == data


def change(path: tuple[int, ...], value: object) -> bytes:
    """The report as it travels, with something else at a place."""
    plain = json.loads(CODEC.encode(REPORT))
    inner = plain
    for place in path[:-1]:
        inner = inner[place]
    inner[path[-1]] = value
    return json.dumps(plain).encode()


VIEW, KNOW, WILLS, HELD, IN_VOTE = range(5)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ((0, VIEW, 0), 0, "view"),
        ((0, VIEW, 0), 1.0, "integer"),
        ((0, VIEW, 0), True, "integer"),
        ((0, VIEW, 0), 1 << 60, "range"),
        ((0, VIEW, 1), ["a", "b", "b"], "view"),
        ((0, VIEW, 1), ["a", "", "c", "d"], "view"),
        ((0, VIEW, 1), ["a", "b", "c", "d" * 65], "string"),
        ((0, VIEW, 1), ["a", "b", "c", "d\n"], "string"),
        ((0, VIEW, 1), "abcd", "list"),
        ((0, VIEW, 2), [0, 0], "view"),
        ((0, VIEW, 3), [], "view"),
        ((0, VIEW, 3), [[]], "view"),
        ((0, VIEW), None, "list"),
        ((0, KNOW, 0, 0), "likes", "knowledge"),
        ((0, KNOW, 0, 2), "", "knowledge"),
        ((0, KNOW, 1, 2), "b", "knowledge"),
        ((0, KNOW, 0, 3), 0, "knowledge"),
        ((0, KNOW, 0), ["link", "a", "b"], "fields"),
        ((0, KNOW), [["redo", "a", "", 1], ["redo", "a", "", 2]], "knowledge"),
        ((0, WILLS), ["c", "c", "d"], "knowledge"),
        ((0, WILLS), ["b", "c", "d"], "missing"),
        ((0, HELD), [12, 11], "held"),
        ((0, HELD), "12", "list"),
        ((0, IN_VOTE, 1), ["c", "c"], "vote"),
        ((0, IN_VOTE, 2, 0), 3, "vote"),
        ((1,), json.loads(CODEC.encode(VOTE))[1], "neither"),
        ((2, 0, 0), "b", "signature"),
        ((2, 0, 1), 0, "signature"),
        ((2, 0, 2, 3), [12], "signature"),
        ((2, 0, 2), None, "signature"),
        ((2, 0, 3), "00" * 32, "signature"),
        ((2, 1), json.loads(CODEC.encode(REPORT))[2][0], "twice"),
        ((2,), [], "missing"),
    ],
)
def test_what_is_malformed_is_refused(path: tuple[int, ...], value: object, complaint: str) -> None:
    with pytest.raises(MalformedMessage, match=complaint):
        CODEC.decode(change(path, value))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}", b"[]", b"[null,null,[]]", b"\xff", b"[" * 100_000, b" " * (1 << 23)]
)
def test_what_is_no_message_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        CODEC.decode(data)


@pytest.mark.parametrize("other", [MessageCodec(b"another key")])
def test_certificates_of_another_run_or_key_are_refused(other: MessageCodec) -> None:
    with pytest.raises(MalformedMessage, match="signature"):
        other.decode(CODEC.encode(REPORT))
    assert other.decode(CODEC.encode(VOTE)) == VOTE


def test_a_run_needs_a_key() -> None:
    with pytest.raises(ValueError, match="key"):
        MessageCodec(b"")


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_are_refused_or_are_another_message(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        data = bytearray(CODEC.encode(draw.choice(list(MESSAGES.values()))))
        for _ in range(draw.randint(1, min(4, len(data)))):
            place = draw.randrange(len(data))
            if draw.random() < 0.5:
                data[place] = draw.randrange(256)
            else:
                del data[place : place + draw.randint(1, len(data) // 8)]
        try:
            message = CODEC.decode(bytes(data))
        except MalformedMessage:
            continue
        assert CODEC.decode(CODEC.encode(message)) == message
