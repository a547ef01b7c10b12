"""Whoever leaves, fails, vanishes, falls silent or never comes is named, with what was waited for."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farflung.comm import ConnectionTraffic, Peer
from farflung.comm.wire import MessageKind, encode
from farflung.errors import (
    ConfigError,
    DataError,
    DeadlinePassed,
    FarflungError,
    PeerFailed,
    PeerLost,
    ProtocolError,
    RunLost,
)
from farflung.tasks import Pending
from farflung.types import Payload, Runtime
from farflung.wall import WallRuntime
from tests.forks import Fork
from tests.helpers import PATIENCE_S, Group, impostor, in_threads, joined, number_in, numbered, parted, tag


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(size: int = 2, *args: Any, **options: Any) -> Group:
        made.append(Group(size, *args, **options))
        return made[-1].meet()

    yield make
    for members in made:
        members.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("farflung")] == []


# --- leaving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [0, 2])
def test_an_orderly_farewell_is_no_error_unless_somebody_waits(
    leaver: int, group: Callable[..., Group]
) -> None:
    members = group(3)
    stayer, other = members.comms[1], 2 - leaver
    waited_for = stayer.recv(leaver, tag(5))
    members.comms[leaver].send(numbered(7), 1, tag(4))
    members.leave(leaver)
    members.until(lambda: waited_for.is_done)
    late = stayer.recv(leaver, tag(6))
    for pending in (waited_for, late):
        assert isinstance(pending.error, PeerLost)
        assert str(pending.error) == f"lost rank {leaver}: it had left the run"
    assert number_in(stayer.recv(leaver, tag(4)).result()) == 7, "what it sent before is there"
    assert stayer.session.mailbox.ended.error is None
    arrived = stayer.recv(other, tag(8))
    members.comms[other].send(numbered(8), 1, tag(8))
    members.until(lambda: arrived.is_done)
    assert number_in(arrived.result()) == 8


def test_a_farewell_counts_although_the_end_of_the_connection_is_seen_first(
    group: Callable[..., Group],
) -> None:
    members = group()
    stayer = members.comms[0]
    waited_for = stayer.recv(1, tag(5))
    members.comms[1].send(numbered(7), 0, tag(5))
    members.leave(1)
    (link,) = members.transports[0]._remotes[1].connections.values()
    link._is_broken = True  # as sending finds it
    members.until(lambda: stayer.session.members.by_rank[1].is_gone)
    assert number_in(waited_for.result()) == 7
    assert stayer.session.mailbox.ended.error is None


def test_a_farewell_that_has_overtaken_what_was_sent_before_waits_for_it(group: Callable[..., Group]) -> None:
    members = group()
    stayer = members.comms[0]
    waited_for, late = stayer.recv(1, tag(5)), stayer.recv(1, tag(6))
    said = torch.frombuffer(bytearray(b'{"behind": 2}'), dtype=torch.uint8)
    members.raw(1, 0, *map(bytes, encode(MessageKind.LEAVE, 0, tag(0), Payload((said,)))))
    members.comms[1].send(numbered(7), 0, tag(5))
    members.until(lambda: waited_for.is_done)
    assert not late.is_done
    members.comms[1].send(numbered(8), 0, tag(6))
    members.until(lambda: late.is_done)
    assert number_in(waited_for.result()) == 7
    assert number_in(late.result()) == 8
    never = stayer.recv(1, tag(9))
    assert str(never.error) == "lost rank 1: it had left the run"


def test_who_has_said_farewell_and_goes_has_left_although_something_is_missing(
    group: Callable[..., Group],
) -> None:
    members = group()
    stayer = members.comms[0]
    waited_for = stayer.recv(1, tag(5))
    members.views[1].members.by_rank[0].num_sent += 1  # what never comes
    members.leave(1)
    members.until(lambda: waited_for.is_done)
    assert str(waited_for.error) == "lost rank 1: it had left the run"
    assert stayer.session.mailbox.ended.error is None


def test_those_who_leave_together_see_each_other_leave(group: Callable[..., Group]) -> None:
    members = group(3)
    in_threads(*(lambda comm=comm: comm.session.leave(None) for comm in members.comms))
    for comm in members.comms:
        assert not comm.session.members.remaining_ranks


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("no such codec"), "no such codec"),
        (ValueError("bad shape"), "ValueError: bad shape"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_a_member_that_fails_says_why(
    leaver: int, error: BaseException, told: str, group: Callable[..., Group]
) -> None:
    members = group()
    stayer = members.comms[1 - leaver]
    waiting = stayer.recv(leaver, tag(5))
    members.leave(leaver, error)
    members.until(lambda: waiting.is_done)
    assert isinstance(waiting.error, PeerFailed)
    assert str(waiting.error) == f"rank {leaver} failed: {told}"
    assert stayer.recv(leaver, tag(6)).error is waiting.error


@pytest.mark.parametrize(
    "error", [PeerLost(2, "gone"), PeerFailed(2, "out of memory"), DeadlinePassed(2, "exchange 3", 60.0)]
)
def test_whoever_leaves_because_of_another_names_the_other(
    error: FarflungError, group: Callable[..., Group]
) -> None:
    members = group(3)
    waiting = members.comms[0].recv(2, tag(5))
    members.leave(1, error)
    members.until(lambda: waiting.is_done)
    assert isinstance(waiting.error, PeerLost)
    assert waiting.error.rank == 2
    assert str(waiting.error) == f"lost rank 2: rank 1 says: {error}"


def test_whoever_leaves_because_of_us_is_lost_itself(group: Callable[..., Group]) -> None:
    members = group()
    waiting = members.comms[0].recv(1, tag(5))
    members.leave(1, DeadlinePassed(0, "exchange 3", 60.0))
    members.until(lambda: waiting.is_done)
    assert str(waiting.error) == "lost rank 1: it left, saying: lost rank 0: waited 60.0 s for exchange 3"


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_closed_connection_is_a_lost_member(leaver: int, group: Callable[..., Group]) -> None:
    members = group()
    stayer = members.comms[1 - leaver]
    waiting = stayer.recv(leaver, tag(5))
    members.close(members.views[leaver])
    members.until(lambda: waiting.is_done)
    assert str(waiting.error) == f"lost rank {leaver}: its connection was closed from its end"
    assert stayer.session.mailbox.ended.error is waiting.error


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_comes_while_another_leaves_still_learns_why(leaver: int) -> None:
    members = Group(2)
    comm, late = members.comms[leaver], members.comms[1 - leaver]
    comm.session.members.connect([late.session.transport.local_peer])

    def come() -> None:
        late.session.members.connect([comm.session.transport.local_peer])
        while late.session.mailbox.ended.error is None:
            late.session.transport.poll(PATIENCE_S)
        members.close(late.session)

    in_threads(lambda: comm.session.leave(ConfigError("no such codec")), come)
    assert str(late.session.mailbox.ended.error) == f"rank {leaver} failed: no such codec"
    members.close()


# --- messages that are refused ----------------------------------------------------------------------------------

LARGE = [bytes(frame) for frame in encode(MessageKind.DATA, 0, tag(5), Payload((torch.zeros(2501),)))]
REFUSED = {
    "oversized": (LARGE, r"a payload of 10,004 bytes, where messages of this run have at most 10,000"),
    "malformed": ([bytes(256)], "not a frame of this protocol and version"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("whole", [True, False])
def test_a_message_that_is_refused_loses_its_sender_at_once(
    what: str, whole: bool, group: Callable[..., Group]
) -> None:
    members = group(3, about={"max_nbytes": 10_000, "needs_all_members": whole})
    sent, why = REFUSED[what]
    stayer, offender, other = members.comms
    waiting, anybody, departure = stayer.recv(1, tag(5)), stayer.recv_any(tag(6)), stayer.wait_for_leave()
    offender.session.transport.send(0, sent)
    members.until(lambda: waiting.is_done)
    assert isinstance(waiting.error, PeerLost)
    nbytes = sum(map(len, sent))
    assert str(waiting.error) == f"lost rank 1: refused {nbytes:,} bytes from it: {why}"
    members.until(lambda: offender.recv(0, tag(5)).is_done)
    assert str(offender.recv(0, tag(5)).error) == f"lost rank 0: it left, saying: {waiting.error}"
    if not whole:
        assert departure.result() == 1
        offender.session.transport.send(0, sent)
        members.exchange(7, 0, 2)
        assert not anybody.is_done
        return
    assert stayer.session.mailbox.ended.error is waiting.error
    members.leave(0, waiting.error)
    members.until(lambda: other.session.mailbox.ended.error is not None)
    assert str(other.session.mailbox.ended.error) == f"lost rank 1: rank 0 says: {waiting.error}"


def test_what_is_refused_through_a_relay_is_its_sources(group: Callable[..., Group]) -> None:
    members = group(3, hidden=(0, 2))
    waiting = members.comms[2].recv(0, tag(5))
    members.views[0].members.send_control(MessageKind.LEAVE, 2, {})
    members.until(lambda: waiting.is_done)
    assert str(waiting.error) == (
        "lost rank 0: refused 2 bytes from it: a leave without the number of messages sent before it"
    )


# --- silence ----------------------------------------------------------------------------------------------------

DEADLINE_S = 10.0
LONGER = ": to wait longer, raise deadline_s (--deadline)"


def at(members: Group, clock: float, *, without: Collection[int] = ()) -> list[float | None]:
    """All look at the clock, but those that stand still, and hear each other; when each looks again."""
    members.clock = clock
    awake = [comm for comm in members.comms if comm.rank not in without]
    for comm in awake:
        comm.session.wait_monitor.check(DEADLINE_S)
    for _ in range(8):  # on loopback what is sent is there at once
        for comm in awake:
            comm.session.transport.poll(0.0)
    return [comm.session.wait_monitor.check(DEADLINE_S) for comm in awake]


def pass_time(members: Group, begin: float, end: float, *, without: Collection[int] = ()) -> None:
    """Looks at the clock in every quarter of the deadline."""
    steps = round((end - begin) / DEADLINE_S * 4)
    for step in range(1, steps + 1):
        at(members, begin + step * DEADLINE_S / 4, without=without)


def losses(members: Group) -> list[int | None]:
    """The rank that each member's view ended with; -1 where it goes on."""
    ends = [comm.session.mailbox.ended.error for comm in members.comms]
    return [-1 if lost is None else lost.rank for lost in ends]  # type: ignore[attr-defined]


def test_a_silent_rank_is_lost_after_a_deadline_and_named(group: Callable[..., Group]) -> None:
    members = group()
    assert at(members, 99.0) == [None, None]
    members.clock = 100.0
    waiting = members.comms[0].recv(1, tag(7, 2, 1))
    assert at(members, 100.0, without=[1]) == [102.5]
    assert at(members, 102.5, without=[1]) == [105.0]
    pass_time(members, 102.5, 107.5, without=[1])
    assert at(members, 109.9, without=[1]) == [110.0]
    assert not waiting.is_done
    assert at(members, 110.0, without=[1]) == [None]
    assert isinstance(waiting.error, DeadlinePassed)
    assert (waiting.error.rank, waiting.error.waited_s) == (1, 10.0)
    assert str(waiting.error) == (
        "lost rank 1: waited 10.0 s for the exchange at step 7, part 2, hop 1; nothing has arrived for 10.0 s"
        + LONGER
    )
    assert members.comms[0].session.mailbox.ended.error is waiting.error


def test_what_arrives_in_time_is_no_loss(group: Callable[..., Group]) -> None:
    members = group()
    members.comms[0].recv(1, tag(1))
    pass_time(members, 0.0, 7.5, without=[1])
    members.exchange(2)
    members.comms[1].send(numbered(1), 0, tag(1))
    members.exchange(3)
    assert at(members, 11.0) == [None, None]
    assert members.comms[0].session.mailbox.ended.error is None


def test_a_rank_that_answers_is_waited_for_while_it_makes_steps(group: Callable[..., Group]) -> None:
    members = group()
    waiting = members.comms[0].recv(1, tag(7))
    pass_time(members, 0.0, 90.0)
    members.views[1].wait_monitor.count_events = lambda: 1
    pass_time(members, 90.0, 190.0)
    assert not waiting.is_done
    at(members, 192.5)
    assert isinstance(waiting.error, DeadlinePassed)
    assert str(waiting.error) == (
        "lost rank 1: waited 192.5 s for the exchange at step 7, part 0, hop 0; it answers, but has made no progress "
        "for 100.0 s" + LONGER
    )


@pytest.mark.parametrize("ways", [[(1, 2)], [(2, 1)], [(1, 2), (2, 1)]])
def test_messages_to_and_from_others_are_progress(
    ways: list[tuple[int, int]], group: Callable[..., Group]
) -> None:
    members = group(3)
    waiting = members.comms[0].recv(1, tag(7))
    for begin in range(0, 250, 50):
        for src, dst in ways:
            members.comms[src].send(numbered(begin), dst, tag(begin))
        pass_time(members, begin, begin + 50)
    assert not waiting.is_done


def test_the_silence_of_the_root_counts_and_no_age(group: Callable[..., Group]) -> None:
    members = group(4)
    for rank in (0, 1, 2):
        members.comms[rank].recv(rank + 1, tag(1))
    pass_time(members, 0.0, 50.0)
    assert losses(members) == [-1, -1, -1, -1]
    pass_time(members, 50.0, 60.0, without=[3])
    assert losses(members) == [-1, -1, 3, -1]
    members.leave(2, members.views[2].mailbox.ended.error)
    at(members, 60.0, without=[2, 3])
    assert losses(members) == [3, 3, 3, -1]


def test_the_root_of_a_chain_is_named_where_it_answers_and_stands_still(group: Callable[..., Group]) -> None:
    members = group(3)
    members.comms[0].recv(1, tag(1))
    members.comms[1].recv(2, tag(1))
    pass_time(members, 0.0, 102.5)
    assert losses(members)[:2] == [2, 2]


def test_a_circle_of_waits_is_given_up_and_names_somebody_else(group: Callable[..., Group]) -> None:
    members = group(3)
    for rank in range(3):
        members.comms[rank].recv((rank + 1) % 3, tag(1))
    pass_time(members, 0.0, 97.5)
    assert losses(members) == [-1, -1, -1]
    pass_time(members, 97.5, 102.5)
    assert losses(members) == [1, 2, 0]


def test_a_wait_for_anybody_names_who_does_not_wait_for_this_rank(group: Callable[..., Group]) -> None:
    members = group(3)
    members.comms[0].recv_any(tag(3))
    members.comms[1].recv(0, tag(4))
    pass_time(members, 0.0, 20.0)
    assert losses(members) == [-1, -1, -1]
    pass_time(members, 20.0, 30.0, without=[2])
    assert losses(members)[0] == 2


def test_a_rank_that_stood_still_itself_suspects_nobody(group: Callable[..., Group]) -> None:
    members = group()
    waiting = members.comms[0].recv(1, tag(1))
    at(members, 0.0)
    at(members, 500.0)
    pass_time(members, 500.0, 520.0)
    assert not waiting.is_done


# --- bytes under way --------------------------------------------------------------------------------------------


def large(nbytes: int) -> Payload:
    return Payload((torch.zeros(nbytes, dtype=torch.uint8),))


class Slow:
    """Has a member's connections carry so many bytes of large tensors in each quarter of a deadline."""

    def __init__(self, members: Group, rank: int, peer: int, nbytes: int) -> None:
        self.carried, self.nbytes = 0, nbytes
        transport = members.transports[rank]
        found = transport.get_traffic

        def traffic(other: int) -> ConnectionTraffic:
            self.carried += self.nbytes if other == peer else 0
            return ConnectionTraffic(self.carried, self.carried) if other == peer else found(other)

        transport.get_traffic = traffic  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 12])
def test_bytes_of_what_is_waited_for_are_progress(nbytes: int, group: Callable[..., Group]) -> None:
    """As many within a deadline as are carried by any network that is of use."""
    members = group()
    waiting = members.comms[0].recv(1, tag(1))
    Slow(members, 0, 1, nbytes)
    pass_time(members, 0.0, 500.0)
    assert not waiting.is_done


def test_a_rank_that_drips_is_given_up(group: Callable[..., Group]) -> None:
    members = group()
    waiting = members.comms[0].recv(1, tag(1))
    Slow(members, 0, 1, 500)
    pass_time(members, 0.0, 97.5)
    assert not waiting.is_done
    pass_time(members, 97.5, 102.5)
    assert "has made no progress for 100.0 s" in str(waiting.error)


def test_a_rank_that_receives_what_it_waits_for_holds_nobody_up(group: Callable[..., Group]) -> None:
    members = group(3)
    waits = [members.comms[0].recv(1, tag(1)), members.comms[1].recv(2, tag(1))]
    Slow(members, 1, 2, 1 << 14)
    pass_time(members, 0.0, 500.0)
    assert not any(waiting.is_done for waiting in waits)


def test_what_large_messages_carry_is_counted_at_both_ends(group: Callable[..., Group]) -> None:
    members = group()
    before = [members.transports[rank].get_traffic(1 - rank) for rank in (0, 1)]
    members.comms[0].send(large(1 << 20), 1, tag(1))
    arrived = members.comms[1].recv(0, tag(1))
    members.until(lambda: arrived.is_done)
    after = [members.transports[rank].get_traffic(1 - rank) for rank in (0, 1)]
    assert [b.bulk_nbytes - a.bulk_nbytes for a, b in zip(before, after, strict=True)] == [1 << 20, 1 << 20]
    assert after[1].received_nbytes - before[1].received_nbytes > 1 << 20


# --- waiting for data -------------------------------------------------------------------------------------------


def test_who_waits_for_data_is_not_put_out(group: Callable[..., Group]) -> None:
    members = group()
    waiting = members.comms[0].recv(1, tag(7))
    members.views[1].wait_monitor.wait_for_data(Pending())
    pass_time(members, 0.0, 500.0)
    members.views[1].wait_monitor.end_wait_for_data()
    pass_time(members, 500.0, 597.5)
    assert not waiting.is_done
    pass_time(members, 597.5, 602.5)
    assert "it answers, but has made no progress for 100.0 s" in str(waiting.error)


def test_who_falls_silent_while_it_waits_for_data_is_put_out(group: Callable[..., Group]) -> None:
    members = group()
    waiting = members.comms[0].recv(1, tag(7))
    members.views[1].wait_monitor.wait_for_data(Pending())
    pass_time(members, 0.0, 5.0)
    pass_time(members, 5.0, 12.5, without=[1])
    assert not waiting.is_done
    pass_time(members, 12.5, 17.5, without=[1])
    assert isinstance(waiting.error, DeadlinePassed)
    assert waiting.error.rank == 1


def test_whoever_is_held_up_by_who_waits_for_data_is_not_put_out(group: Callable[..., Group]) -> None:
    members = group(3)
    waits = [members.comms[0].recv(1, tag(7)), members.comms[1].recv(2, tag(7))]
    members.views[2].wait_monitor.wait_for_data(Pending())
    pass_time(members, 0.0, 500.0)
    assert not any(waiting.is_done for waiting in waits)


def test_who_is_silent_is_put_out_although_another_waits_for_data(group: Callable[..., Group]) -> None:
    members = group(3)
    waiting = members.comms[0].recv(1, tag(7))
    members.views[2].wait_monitor.wait_for_data(Pending())
    pass_time(members, 0.0, 10.0, without=[1])
    assert isinstance(waiting.error, DeadlinePassed)
    assert waiting.error.rank == 1


def test_a_wait_for_data_ends_with_the_view() -> None:
    runtimes = joined(2)
    there: Pending[None] = Pending()
    waiting = runtimes[0].wait_for_data(there)
    runtimes[1].close(ValueError("bad batch"))
    with pytest.raises(PeerFailed, match="rank 1 failed: ValueError: bad batch"):
        waiting.wait()
    with pytest.raises(PeerFailed):
        runtimes[0].wait_for_data(Pending()).wait()
    there.set_result(None)
    runtimes[0].close()


def test_a_wait_for_data_ends_as_the_source_says() -> None:
    (runtime,) = joined(1)
    there: Pending[None] = Pending()
    waiting, broken = runtime.wait_for_data(there), Pending[None]()
    thread = threading.Thread(target=lambda: there.set_result(None))
    thread.start()
    waiting.wait()
    thread.join()
    failing = runtime.wait_for_data(broken)
    broken.set_exception(DataError("camera: nothing for 30 s"))
    with pytest.raises(DataError, match="camera: nothing for 30 s"):
        failing.wait()
    runtime.wait_for_data(runtime.read_clock()).wait()
    runtime.close()


# --- whole replicas, each with its thread -----------------------------------------------------------------------


async def receive(runtime: Runtime, src: int) -> Payload:
    return await runtime.comm.recv(src, tag(4))


def failures(results: list[Any]) -> list[Exception]:
    """What all of them raised; closes those that did not."""
    parted([result for result in results if isinstance(result, WallRuntime)])
    errors = [result for result in results if isinstance(result, Exception)]
    assert len(errors) == len(results)
    return errors


def test_a_wait_ends_by_its_deadline() -> None:
    runtimes = joined(2, deadline_s=0.05)
    pending = runtimes[0].launch(receive(runtimes[0], 1))
    with pytest.raises(
        DeadlinePassed, match=r"lost rank 1: waited \d+\.\d s for the exchange at step 4, part 0, hop 0"
    ):
        pending.wait()
    with pytest.raises(DeadlinePassed):
        runtimes[0].launch(receive(runtimes[0], 1)).wait()
    parted(runtimes)


@pytest.mark.parametrize("leaver", [0, 1])
def test_the_message_of_a_failed_replica_reaches_who_waits(leaver: int) -> None:
    runtimes = joined(2)
    stayer = runtimes[1 - leaver]

    def stay() -> None:
        try:
            stayer.launch(receive(stayer, leaver)).wait()
        except PeerFailed as error:
            stayer.close(error)
            raise

    _, error = in_threads(lambda: runtimes[leaver].close(ValueError("bad batch")), stay)
    assert isinstance(error, PeerFailed)
    assert str(error) == f"rank {leaver} failed: ValueError: bad batch"


def test_a_replica_that_never_joins_is_named() -> None:
    store = dist.HashStore()
    results = in_threads(
        *(lambda rank=rank: WallRuntime(rank, 3, store, connect_timeout_s=0.1) for rank in (0, 2))
    )
    for error in failures(results):
        assert isinstance(error, DeadlinePassed)
        assert error.rank == 1
        assert "for its address in the store" in str(error)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_replica_that_never_greets_is_named(silent: int) -> None:
    store = dist.HashStore()
    peer = Peer(silent, "tcp://127.0.0.1:1", bytes(16)).to_json()
    error, _ = in_threads(
        lambda: WallRuntime(1 - silent, 2, store, connect_timeout_s=0.5), impostor(store, silent, 2, peer)
    )
    assert isinstance(error, DeadlinePassed)
    assert re.search(f"lost rank {silent}: waited .* for its greeting", str(error))


def test_a_replica_that_only_its_own_machine_reaches_is_told() -> None:
    store = dist.HashStore()
    peer = Peer(0, "tcp://127.0.0.1:1", bytes(16), machine="node-a").to_json()
    error, _ = in_threads(
        lambda: WallRuntime(1, 2, store, connect_timeout_s=0.5), impostor(store, 0, 2, peer)
    )
    assert isinstance(error, DeadlinePassed)
    assert f"tcp://127.0.0.1:1 is reached only from node-a, and this is {socket.gethostname()}" in str(error)
    assert "set MASTER_ADDR" in str(error)


@pytest.mark.parametrize(
    "published", ["", "[]", "7", "null", '{"rank": 1}', '{"rank": 1, "address": "", "token": 3}']
)
def test_nonsense_in_the_store_is_no_address(published: str) -> None:
    store = dist.HashStore()
    error, _ = in_threads(
        lambda: WallRuntime(0, 2, store, connect_timeout_s=PATIENCE_S), impostor(store, 1, 2, published)
    )
    assert isinstance(error, ProtocolError)
    assert re.search(r"the store holds .* where an address was due", str(error))


def test_unlike_settings_end_every_replica_by_name() -> None:
    store = dist.HashStore()
    results = in_threads(
        *(
            lambda rank=rank: WallRuntime(
                rank, 3, store, connect_timeout_s=PATIENCE_S, settings={"steps": 10 + rank // 2}
            )
            for rank in range(3)
        )
    )
    for error in failures(results):
        assert "ranks disagree on steps" in str(error)
        assert "11 on rank 2" in str(error)


def test_an_error_on_the_communication_thread_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes = joined(2)
    waiting = runtimes[0].launch(receive(runtimes[0], 1))

    def broken(timeout_s: float | None) -> None:
        raise OSError("no such socket")

    monkeypatch.setattr(runtimes[0].session.transport, "poll", broken)
    for pending in (runtimes[0].launch(receive(runtimes[0], 0)), waiting):
        with pytest.raises(RunLost, match="the communication thread failed: OSError: no such socket"):
            pending.wait()
    runtimes[0]._thread.join()
    for wait in (
        lambda: runtimes[0].launch(receive(runtimes[0], 1)),
        lambda: runtimes[0].sleep_until(0.0),
        lambda: runtimes[0].wait_for_data(0.0),
        lambda: runtimes[0].wait_for_data(Pending()),
        lambda: runtimes[0].run_in_executor(lambda: 1),
    ):
        with pytest.raises(RunLost, match="no such socket"):
            wait().wait()
    monkeypatch.undo()
    parted(runtimes)


def silent(rank: int, meeting: str) -> None:
    """One of two replicas, which says nothing."""
    _runtime = WallRuntime(rank, 2, dist.FileStore(meeting, 2))
    signal.pause()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_lost_by_name(victim: int, tmp_path: Path) -> None:
    meeting = str(tmp_path / "store")
    with Fork(partial(silent, victim, meeting)) as child:
        try:
            survivor = WallRuntime(1 - victim, 2, dist.FileStore(meeting, 2), connect_timeout_s=PATIENCE_S)
            pending = survivor.launch(receive(survivor, victim))
        finally:
            child.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match=f"lost rank {victim}: its connection was closed from its end"):
            pending.wait()
        survivor.close()
