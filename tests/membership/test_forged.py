"""Forged messages while views change are refused or harmless, and malformed ones of a member end no run."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from typing_extensions import override

from farflung.faults import FaultPlan
from farflung.membership import MalformedMessage, MemberReport, MessageCodec, Vote, elastic
from farflung.membership.agreement import Agreement
from farflung.membership.connections import build_payload, read_payload
from farflung.membership.giving import StatePublisher
from farflung.tasks import Pending, Task, create_completed
from farflung.types import Payload
from tests.membership.test_elastic import Ended, check, run

COUNT, SEEDS, AT_ONCE = 10_000, 5, 40
"""Forged messages in all, runs, and forged messages beside one that is not."""
CRASHED, ABSENT = 1, 4
"""The rank that crashes, and the one that joins later."""
PLAN = FaultPlan().crash(CRASHED, at_step=3).join(ABSENT, at_step=8)
OTHER = MessageCodec(b"another key")


def damaged(draw: random.Random, text: bytes) -> bytes:
    """A text with some bytes changed, left out or put in; now and then mere noise."""
    if draw.random() < 0.2:
        return draw.randbytes(draw.randrange(200))
    data = bytearray(text)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(3):
            case 0:
                data[at : at + 1] = draw.randbytes(1)
            case 1:
                del data[at : at + draw.randint(1, 9)]
            case _:
                data[at:at] = draw.choice([b"[", b"]", b"null", b"-1", b'"', draw.randbytes(3)])
    return bytes(data)


class Forged(Agreement):
    """Hears forged messages beside each that is not.

    Reports are believed, so a damaged text that is another message is decoded alone.
    """

    draw: random.Random
    counts: Counter[str]
    left: int

    @override
    def _handle_message(self, source: str, text: bytes) -> None:
        super()._handle_message(source, text)
        if not text.startswith(b"["):
            return
        said: list[tuple[str, bytes]] = self.__dict__.setdefault("said", [])
        said.append((source, text))
        for _ in range(min(AT_ONCE, self.left)):
            Forged.left -= 1
            kind = self._forge(said)
            self.counts[kind] += 1
            self.counts["while a view changes"] += self.log.is_frozen

    def _forge(self, said: list[tuple[str, bytes]]) -> str:
        """Make one and hear it; return what became of it."""
        source, text = self.draw.choice(said)
        match self.draw.randrange(4):
            case 0:
                dead = self.draw.choice(self.roster.view.members)
                with pytest.raises(MalformedMessage, match="signature"):
                    self.handle_certificate(OTHER.encode(OTHER.sign_certificate(dead, -9, None)))
                return "wrong key"
            case 1 if str(CRASHED) in self.connections.closed_names:
                certificate = self.codec.sign_certificate(str(CRASHED), -9, None)
                super()._handle_message(source, self.codec.encode(certificate))
                return "certificate again"
            case 2 if old := [one for one in said if self._is_old(one[1])]:
                super()._handle_message(*self.draw.choice(old))
                return "another view"
        text = damaged(self.draw, text)
        try:
            message = self.codec.decode(text)
        except MalformedMessage:
            gone = [str(CRASHED)] if str(CRASHED) in self.connections.closed_names else []
            for name in gone:
                super()._handle_message(name, text)
            return "malformed, of a rank that has crashed" if gone else "malformed"
        assert self.codec.decode(self.codec.encode(message)) == message
        return "another message"

    def _is_old(self, text: bytes) -> bool:
        message = self.codec.decode(text)
        return (isinstance(message, MemberReport) and message.view.number < self.roster.view.number) or (
            isinstance(message, Vote) and message.value.number <= self.roster.view.number
        )


def equal(ended: Ended, other: Ended) -> bool:
    return all(torch.equal(other.models[0][name], tensor) for name, tensor in ended.models[0].items())


def test_forged_messages_while_views_change(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(5, PLAN)
    monkeypatch.setattr(elastic, "Agreement", Forged)
    Forged.counts = Counter()
    for seed in range(SEEDS):
        Forged.draw, Forged.left = random.Random(seed), COUNT // SEEDS
        ended = run(5, PLAN)
        assert ended.error is None
        assert [replica.runtime.comm.rank for replica in ended.survivors] == [0, 2, 3, 4]
        check(ended)
        assert equal(plain, ended)
        assert Forged.left == 0
    assert Forged.counts["while a view changes"] > COUNT / 4


class Deaf(Agreement):
    """Some members get malformed messages of the agreement from rank 2."""

    receivers: tuple[str, ...]

    @override
    def _handle_message(self, source: str, text: bytes) -> None:
        malformed = source == "2" and self.member.name in self.receivers and text.startswith(b"[")
        super()._handle_message(source, b"{" if malformed else text)


CRASH, RESET = FaultPlan().crash(1, at_step=3), FaultPlan().reset(3, 1, at_step=3)


@pytest.mark.parametrize(
    ("receivers", "faults", "left"),
    [
        ("0", RESET, [0, 1, 3]),
        ("13", RESET, [0, 1, 3]),
        ("013", RESET, [0, 1, 3]),
        ("0", CRASH, [0, 3]),
        ("03", CRASH, [0, 3]),
        ("3", CRASH, [0, 2]),  # of two that are cut from each other the senior stays
    ],
)
def test_the_run_goes_on_where_a_member_sends_malformed_messages(
    receivers: str, faults: FaultPlan, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "Agreement", Deaf)
    Deaf.receivers = tuple(receivers)
    ended = run(4, faults, "synchronous(codec='int8')")
    assert ended.error is None
    assert [replica.runtime.comm.rank for replica in ended.survivors] == left
    check(ended)


@pytest.mark.parametrize(
    "payload",
    [
        Payload(()),
        Payload((torch.ones(1), torch.ones(1))),
        Payload((torch.ones(1, dtype=torch.bfloat16),)),
        *map(build_payload, (b"no JSON", b"[" * 20_000, b"{}")),
    ],
    ids=["empty", "two tensors", "floats", "text", "nested", "object"],
)
def test_a_garbled_request_gets_no_answer(payload: Payload) -> None:
    comm = SimpleNamespace(recv_any=Mock(side_effect=[create_completed((1, payload)), Pending()]))
    agreement: Any = SimpleNamespace(roster=None, runtime=SimpleNamespace(comm=comm), is_over=False)
    serving = Task(StatePublisher(agreement, Mock()).serve_requests(), lambda _: None, eager_start=True)
    assert comm.recv_any.call_count == 2, "it waits for the next one"
    assert not serving.is_done


@pytest.mark.parametrize("tensors", [(), (torch.ones(1),), (torch.ones(1, dtype=torch.bfloat16),)])
def test_a_message_of_no_bytes_is_malformed(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ValueError, match=r"bytes|values to unpack"):
        read_payload(Payload(tensors))
