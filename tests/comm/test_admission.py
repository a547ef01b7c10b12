"""Members that come after the first meeting, messages that overtake, and views that follow each other; real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farflung.comm import Endpoint, Peer
from farflung.comm.keys import Keys
from farflung.comm.wire import MessageKind, RelayRoute
from farflung.errors import DeadlinePassed, PeerLost, ProtocolError, WaitEnded
from farflung.types import Payload
from farflung.wall import WallRuntime
from tests.helpers import (
    PATIENCE_S,
    Group,
    admitted,
    coming_late,
    in_threads,
    number_in,
    numbered,
    parted,
    tag,
)
from tests.late import Late
from tests.strangers import forged

SIZE = 5
SETTINGS = {"model": "a"}


# --- while 4 MB are under way ----------------------------------------------------------------------------------

FOUNDERS = [0, 1, 2]
WRONG, RIGHT = 3, 4
NUMEL = 1_000_000


async def summed(runtime: WallRuntime, turn: int, again: bool) -> tuple[float, bool]:
    """One all-reduce of 4 MB among the founders, and whether any of them wants another."""
    comm, total = runtime.comm, torch.full((NUMEL,), float(runtime.comm.rank))
    others = [rank for rank in FOUNDERS if rank != comm.rank]
    for rank in others:
        comm.send(Payload((total.clone(), torch.tensor([again]))), rank, tag(1, turn))
    for rank in others:
        theirs, wants = (await comm.recv(rank, tag(1, turn))).iter_tensors()
        total += theirs
        again |= bool(wants)
    return float(total.min() + total.max()), again


async def founder(runtime: WallRuntime, store: dist.Store) -> dict[str, Any]:
    """Lets two in while it sums, of whom one is wrong, and then hears from the other."""
    arrived, turn, again, sums = runtime.comm.wait_for_join(), 0, True, set()
    waits = {WRONG: 20.0, RIGHT: PATIENCE_S}
    greeted = {rank: admitted(runtime, store, rank, join_s=wait) for rank, wait in waits.items()}
    while again:
        total, again = await summed(runtime, turn, not all(one.is_done for one in greeted.values()))
        sums.add(total)
        turn += 1
    who, payload = await runtime.comm.recv_any(tag(2))
    return {
        "sums": sums,
        "arrived": arrived.result(),
        "heard": (who, number_in(payload)),
        "ended": {rank: str(one.error) for rank, one in greeted.items()},
        "lost": runtime.session.mailbox.ended.error,
    }


def as_founder(rank: int, store: dist.Store, **options: Any) -> dict[str, Any]:
    runtime = WallRuntime(
        rank, SIZE, store, members=FOUNDERS, settings=SETTINGS, connect_timeout_s=PATIENCE_S, **options
    )
    try:
        return runtime.launch(founder(runtime, store)).wait()
    finally:
        runtime.close()


def as_newcomer(rank: int, settings: dict[str, Any], store: dist.Store, **options: Any) -> None:
    runtime = WallRuntime(
        rank,
        SIZE,
        None,
        announce=coming_late(store, FOUNDERS),
        members=[*FOUNDERS, rank],
        settings=settings,
        connect_timeout_s=PATIENCE_S,
        **options,
    )

    async def tells() -> None:
        for other in FOUNDERS:
            runtime.comm.send(numbered(rank), other, tag(2))

    runtime.launch(tells()).wait()
    runtime.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_one_comes_and_one_is_refused_alone_while_others_sum(encrypt: bool) -> None:
    store = dist.HashStore()
    found = in_threads(
        *(partial(as_founder, rank, store, endpoint=Endpoint(encrypt=encrypt)) for rank in FOUNDERS),
        partial(as_newcomer, WRONG, {"model": "b"}, store, endpoint=Endpoint(encrypt=encrypt)),
        partial(as_newcomer, RIGHT, SETTINGS, store, endpoint=Endpoint(encrypt=encrypt)),
    )
    assert isinstance(found[WRONG], ProtocolError), found[WRONG]
    assert "ranks disagree on model" in str(found[WRONG])
    assert found[RIGHT] is None
    refused = 0
    for rank in FOUNDERS:
        said = found[rank]
        assert isinstance(said, dict), said
        ended = said.pop("ended")
        # Who is told by one that it is wrong leaves, and greets no other.
        unlike = f"ranks disagree on model: 'a' on rank {rank}, 'b' on rank {WRONG}; start all of them with the same"
        assert ended[WRONG].startswith((unlike, f"lost rank {WRONG}: "))
        refused += ended[WRONG].startswith(unlike)
        assert ended[RIGHT] == "None"
        assert said == {"sums": {6.0}, "arrived": RIGHT, "heard": (RIGHT, float(RIGHT)), "lost": None}
    assert refused >= 1


def never_greets(rank: int) -> Peer:
    return Peer(rank, None, b"token")


def test_a_rank_that_does_not_come_is_named() -> None:
    runtime = WallRuntime(0, 2, None, members=[0], announce=lambda me: [me])

    async def lets_in() -> None:
        await runtime.admit(never_greets(1), 0.05)

    with pytest.raises(DeadlinePassed, match=r"rank 1.*its greeting"):
        runtime.launch(lets_in()).wait()
    runtime.close()


# --- one by one -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "sealed"])
def late(request: pytest.FixtureRequest) -> Iterator[Late]:
    options = {"keys": Keys.generate()} if request.param == "sealed" else {}
    with closing(Late(3, **options)) as members:
        members.meet()
        yield members


def test_it_is_told_and_exchanges_with_all(late: Late) -> None:
    late.newcomer()
    told = [comm.wait_for_join() for comm in late.comms[:-1]]
    late.admit()
    late.until(lambda: all(one.is_done for one in told))
    assert [one.result() for one in told] == [2, 2]
    late.exchange(1, 0, 2)
    late.exchange(2, 2, 1)
    late.exchange(3, 0, 1)


def test_it_may_leave_and_come_again_as_another_process(late: Late) -> None:
    late.newcomer()
    late.admit()
    late.until(lambda: late.views[-1].members.ready.is_done)
    late.exchange(1, 0, 2)
    gone = [comm.wait_for_leave() for comm in late.comms[:-1]]
    late.leave(2)
    late.until(lambda: all(one.is_done for one in gone))
    assert [one.result() for one in gone] == [2, 2]
    assert isinstance(late.comms[0].recv(2, tag(5)).error, PeerLost)
    late.newcomer()
    told = [comm.wait_for_join() for comm in late.comms[:-1]]
    assert [one.result() for one in told] == [2, 2], "when it came first"
    told = [comm.wait_for_join() for comm in late.comms[:-1]]
    late.admit()
    late.until(lambda: all(one.is_done for one in told))
    assert [one.result() for one in told] == [2, 2]
    late.exchange(6, 0, 2)


def test_before_it_is_admitted_nobody_lets_it_in_and_nothing_is_sent_to_it(late: Late) -> None:
    newcomer = late.newcomer()
    newcomer.members.connect(late.peers)
    late.exchange(1, 0, 1)
    sent = late.comms[0].send(numbered(1), 2, tag(1))
    assert isinstance(sent.error, PeerLost)
    assert "its connection is gone" in str(sent.error)
    assert newcomer.members.missing_ranks == [0, 1]
    late.exchange(3, 0, 1)


def test_a_whole_view_admits_nobody() -> None:
    with closing(Group(3)) as members:
        peers = members.peers
        members.meet()
        with pytest.raises(
            ProtocolError, match="rank 2 cannot join later: every exchange of this run needs all"
        ):
            members.views[0].members.admit(peers[2])


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_who_is_there_or_none_of_the_runs_is_not_admitted(late: Late, rank: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"rank {rank} of 3 is present already, or not a rank of this run"
    ):
        late.views[0].members.admit(replace(late.peers[2], rank=rank))


def test_forged_messages_of_a_newcomer_are_refused_and_it_comes_in(late: Late) -> None:
    late.newcomer()
    for view in late.views[:-1]:
        view.members.admit(late.peers[-1])
    late.views[-1].members.connect(late.peers)
    first = late.transports[0]
    before = first.refusals.num_messages
    for _ in range(50):
        late.raw(2, 0, *forged(RelayRoute(1, 0, 0)))
        late.raw(2, 0, *forged(RelayRoute(1, 2, 0)))
    late.until(lambda: late.views[-1].members.ready.is_done and first.refusals.num_messages == before + 100)
    late.exchange(1, 0, 2)
    assert late.views[0].mailbox.ended.error is None


def test_a_newcomer_whose_message_is_malformed_is_refused_alone(late: Late) -> None:
    late.newcomer()
    admitted = late.views[0].members.admit(late.peers[-1])
    late.transports[-1].connect_peers([late.peers[0]])
    late.transports[-1].send(0, [bytes(256)])
    late.until(lambda: admitted.is_done)
    assert str(admitted.error) == (
        "lost rank 2: refused 256 bytes from it: not a frame of this protocol and version"
    )
    late.exchange(1, 0, 1)
    assert late.views[0].mailbox.ended.error is None


# --- views that follow each other -------------------------------------------------------------------------------


def test_messages_of_a_newer_view_wait_for_it_and_those_of_an_older_are_dropped() -> None:
    with closing(Group(2, about={"needs_all_members": False})) as members:
        members.meet()
        one, other = members.comms
        other.send(numbered(1), 0, tag(1))
        members.exchange(9)
        waiting = one.recv(1, tag(2))
        other.advance_view(4)
        other.send(numbered(2), 0, tag(3))
        one.send(numbered(3), 1, tag(4))
        members.until(
            lambda: (
                bool(members.views[0].mailbox._future_messages) and members.views[1].mailbox.num_dropped == 1
            )
        )
        early = one.recv(1, tag(3))
        assert not early.is_done
        one.advance_view(4)
        assert isinstance(waiting.error, WaitEnded)
        assert isinstance(early.error, WaitEnded)
        assert number_in(one.recv(1, tag(3)).result()) == 2
        assert members.views[0].mailbox.num_dropped == 1, (
            "what had come of the older view and nobody had taken"
        )
        members.exchange(10)
        with pytest.raises(ValueError, match="view 4 is not newer than 4"):
            one.advance_view(4)


# --- what overtakes ---------------------------------------------------------------------------------------------


def test_an_urgent_message_arrives_before_the_rest_of_what_was_sent_first() -> None:
    """Nobody reads until all is sent: what the kernel does not take waits here, where it is overtaken."""
    with closing(Group(2, keys=Keys.generate())) as members:
        one, other = members.meet().comms
        order: list[str] = []
        for number in range(8):
            one.send(Payload((torch.zeros(2_000_000),)), 1, tag(1, number))
        one.send(numbered(1), 1, tag(2), priority=-1)
        late, urgent = [other.recv(0, tag(1, number)) for number in range(8)], other.recv(0, tag(2))
        for wait in late:
            wait.add_done_callback(lambda _: order.append("bulk"))
        urgent.add_done_callback(lambda _: order.append("urgent"))
        assert members.transports[0].queued_nbytes > 0
        members.until(lambda: len(order) == 9)
        assert order[0] == "urgent"
        assert members.transports[0].queued_nbytes == 0


def test_what_is_withdrawn_does_not_arrive_and_what_follows_does() -> None:
    with closing(Group(2, about={"needs_all_members": False}, keys=Keys.generate())) as members:
        one, other = members.meet().comms
        for number in range(8):
            one.send(Payload((torch.zeros(2_000_000),)), 1, tag(1, number))
        held = members.transports[0].queued_nbytes
        one.advance_view(1)
        assert members.transports[0].queued_nbytes < held - 8_000_000
        other.advance_view(1)
        members.exchange(3)
        left = [number for number in range(8) if other.recv(0, tag(1, number)).is_done]
        assert left == []
        assert members.transports[1].refusals.num_messages == 0


def test_peer_that_has_left_receives_all_that_was_sent_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing a socket with unread bytes resets the connection, which discards what the peer has not acknowledged."""
    with closing(Group(2, keys=Keys.generate())) as members:
        (one, other), (sender, receiver) = members.meet().comms, members.transports
        arrived = [other.recv(0, tag(1, number)) for number in range(8)]
        for number in range(8):
            one.send(Payload((torch.zeros(2_000_000),)), 1, tag(1, number))
        members.views[1].members.announce_end(MessageKind.LEAVE, {}, {0})
        while sender.queued_nbytes:
            sender.poll(0.0)
            if sender.queued_nbytes:
                receiver.poll(0.0)
        assert not members.views[0].members.remaining_ranks
        assert not arrived[-1].is_done
        other.send(numbered(1), 0, tag(2))
        has_begun, close = threading.Event(), sender.handshaker.close

        def begin() -> None:
            close()
            has_begun.set()

        def receive() -> None:
            has_begun.wait(PATIENCE_S)
            members.until(lambda: arrived[-1].is_done)

        monkeypatch.setattr(sender.handshaker, "close", begin)
        assert in_threads(partial(members.close, members.views[0]), receive) == [None, None]
        assert [wait.error for wait in arrived] == [None] * 8


def test_runtimes_close_side_by_side_with_bulk_under_way() -> None:
    store = dist.HashStore()
    found = in_threads(
        *(
            partial(
                WallRuntime, rank, 2, store, endpoint=Endpoint(encrypt=True), connect_timeout_s=PATIENCE_S
            )
            for rank in range(2)
        )
    )
    runtimes = [one for one in found if isinstance(one, WallRuntime)]

    have_sent = [threading.Event() for _ in runtimes]

    async def sends(runtime: WallRuntime) -> float:
        other = 1 - runtime.comm.rank
        runtime.comm.send(Payload((torch.full((3_000_000,), float(runtime.comm.rank)),)), other, tag(1))
        have_sent[runtime.comm.rank].set()
        return float(next(iter((await runtime.comm.recv(other, tag(1))).iter_tensors()))[-1])

    results = [runtime.launch(sends(runtime)) for runtime in runtimes]
    for event in have_sent:  # what is sent to a rank that has left is dropped
        assert event.wait(PATIENCE_S)
    parted(runtimes)
    assert [one.result() for one in results] == [1.0, 0.0]
