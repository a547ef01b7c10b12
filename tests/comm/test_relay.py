"""Replicas that nobody can connect to: who connects, who relays, what a relay refuses, who is told of a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farflung.comm import RELAYED_KIND, Endpoint, Peer, Purpose, WallCommunicator
from farflung.comm.keys import Keys
from farflung.comm.peer import should_connect
from farflung.comm.records import CONTROL_VIEW
from farflung.comm.relay import Relay
from farflung.comm.routes import RoutingTable
from farflung.comm.transport import FIRST_PRIORITY
from farflung.comm.wire import Frame, Message, MessageKind, RelayRoute, WireError, encode
from farflung.errors import ConfigError, DeadlinePassed, PeerFailed, PeerLost, ProtocolError
from farflung.tasks import Pending
from farflung.types import Payload, Runtime, Tag
from farflung.wall import WallRuntime
from tests.covering import covered
from tests.helpers import (
    PATIENCE_S,
    Group,
    decode,
    in_threads,
    joined,
    number_in,
    numbered,
    parted,
    same_payload,
    tag,
)

LARGE = Payload((torch.arange(1 << 20, dtype=torch.float32),))
"""Of 4 MiB, which leaves in parts where it is encrypted."""
BEHIND_1, BEHIND_2 = (0, 2), (0, 1)
"""Of three, those without a way in, whom the third relays for."""


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def sealed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def group(sealed: bool) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(size: int, *hidden: int, meets: bool = True, **options: Any) -> Group:
        made.append(Group(size, hidden=hidden, keys=Keys.generate() if sealed else None, **options))
        return made[-1].meet() if meets else made[-1]

    yield make
    for members in made:
        members.close()


def third(hidden: tuple[int, ...]) -> int:
    (relay,) = {0, 1, 2} - set(hidden)
    return relay


# --- who connects, and who relays -------------------------------------------------------------------------------


def peers(size: int, *hidden: int) -> list[Peer]:
    return [
        Peer(rank, None if rank in hidden else f"tcp://127.0.0.1:{7000 + rank}", bytes([rank + 1]) * 16)
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("hidden", "connecting"), [((), [(1, 0)]), ((0,), [(0, 1)]), ((1,), [(1, 0)]), ((0, 1), [])]
)
def test_who_can_be_reached_is_connected_to(
    hidden: tuple[int, ...], connecting: list[tuple[int, int]]
) -> None:
    pair = peers(2, *hidden)
    assert [(a.rank, b.rank) for a in pair for b in pair if a is not b and should_connect(a, b)] == connecting


def routes(of: list[Peer], rank: int) -> RoutingTable:
    (me,) = (peer for peer in of if peer.rank == rank)
    found = RoutingTable(me)
    found.add_peers([peer for peer in of if peer.rank != rank])
    return found


def test_all_find_the_same_relay_and_only_for_those_who_need_one() -> None:
    everybody = peers(6, 0, 3, 4)
    for rank in range(6):
        found = routes(everybody, rank)
        pairs = {(a, b): found.find_relay(a, b) for a in range(6) for b in range(6)}
        assert {pair for pair, relay in pairs.items() if relay is not None} == {
            (a, b) for a in (0, 3, 4) for b in (0, 3, 4) if a != b
        }
        assert set(pairs.values()) == {None, 1}
    assert routes(everybody, 1).list_ranks_served(3) == [0, 4]
    assert routes(everybody, 3).list_ranks_behind(1) == [0, 4]
    assert routes(everybody, 3).next_hops[0] == 1
    assert routes(everybody, 3).next_hops[5] == 5


def test_who_comes_later_changes_no_way_that_there_is() -> None:
    everybody = peers(5, 0, 3, 4)
    for rank in (0, 2, 3):
        found = routes([peer for peer in everybody if peer.rank in (0, 2, 3)], rank)
        found.add_peers([everybody[1]])
        found.add_peers([everybody[4]])
        assert (found.find_relay(0, 3), found.find_relay(0, 4), found.find_relay(3, 4)) == (2, 1, 1)
        found.add_peers([replace(everybody[3], token=b"another")], lost_ranks=[1])
        assert (found.find_relay(0, 3), found.find_relay(0, 4)) == (2, 1)


def test_two_that_nobody_relays_between_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"ranks 0 and 1 advertise no address, .*: make .* \(--port, --advertise HOST:PORT\)",
    ):
        routes(peers(3, 0, 1, 2), 2)
    assert routes(peers(1, 0), 0).list_ranks_behind(0) == []


def test_a_replica_without_a_way_in_is_published_without_an_address() -> None:
    (hidden,) = peers(1, 0)
    assert "address" not in hidden.to_json()
    assert Peer.from_json(hidden.to_json()) == hidden
    with pytest.raises(ProtocolError):
        Peer.from_json(hidden.to_json().replace("}", ', "address": ""}'))


@pytest.mark.parametrize("hidden", [(0,), (1,), (0, 1), (1, 2), (0, 2), (0, 3)])
def test_all_reach_all(hidden: tuple[int, ...], group: Callable[..., Group]) -> None:
    members = group(max(2, max(hidden) + 1 + (hidden == (0, 1))), *hidden)
    size = len(members.comms)
    for src in range(size):
        for dst in range(src):
            members.exchange(1 + src * size + dst, src, dst)
    assert all(one.refusals.num_messages == 0 for one in members.transports)
    assert not any(other.early_messages for view in members.views for other in view.members.by_rank.values())
    for rank in hidden:
        assert members.transports[rank].handshaker.server_socket is None, "it listens"
    for rank, transport in enumerate(members.transports):
        connected = [other for other, member in transport._remotes.items() if member.connections]
        assert sorted(connected) == [b for b in range(size) if b != rank and not {rank, b} <= set(hidden)]


# --- what is relayed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [BEHIND_1, BEHIND_2])
def test_large_messages_pass_each_way_and_are_counted(
    hidden: tuple[int, ...], group: Callable[..., Group]
) -> None:
    members = group(3, *hidden)
    gradients = Tag(Purpose.STEP.build_exchange_id(3))
    arrived = []
    for src, dst in (hidden, hidden[::-1]):
        members.comms[src].send(LARGE, dst, gradients)
        members.comms[src].send(numbered(7), dst, Tag(Purpose.DECISION.build_exchange_id(3)))
        arrived.append(members.comms[dst].recv(src, gradients))
    members.until(lambda: all(one.is_done for one in arrived))
    assert all(same_payload(one.result(), LARGE) for one in arrived)
    for src, dst in (hidden, hidden[::-1]):
        to = [0] * 3
        to[dst] = LARGE.nbytes
        assert members.comms[src].sent_bytes.to_json()["gradients"] == to
    relay = members.comms[third(hidden)]
    expected = [0 if rank == relay.rank else LARGE.nbytes + numbered(7).nbytes for rank in range(3)]
    members.until(lambda: relay.sent_bytes.to_json() == {RELAYED_KIND: expected})


def test_the_urgent_overtake_at_the_relay_too(group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1)
    sender, relay, receiver = members.comms
    came: list[int] = []

    def sent(number: int, payload: Payload, priority: int) -> None:
        receiver.recv(0, tag(number)).add_done_callback(lambda _: came.append(number))
        sender.send(payload, 2, tag(number), priority)

    relay.send(Payload((torch.zeros(1 << 24),)), 2, tag(1))  # in whose way all of them are
    for number in range(2, 6):
        sent(number, LARGE, 0)
    members._open.remove(receiver.session)  # it reads nothing until all is on its way
    members.until(lambda: relay.session.members.relay.num_relayed >= 2 + 4)
    sent(6, numbered(6), -1)
    members.until(lambda: relay.session.members.relay.num_relayed >= 2 + 5)
    members._open.append(receiver.session)
    members.until(lambda: len(came) == 5)
    assert came[0] == 6


def test_what_overtakes_a_greeting_waits_for_it(group: Callable[..., Group]) -> None:
    """The relay sends greetings behind bulk of its own, and what comes with a better priority before it."""
    members = group(3, *BEHIND_1, meets=False)
    passed: list[Callable[[], object]] = []
    relay = members.transports[1]
    say = relay.send

    def late(rank: int, frames: list[Frame], **options: int) -> Pending[None]:
        held = (
            rank == 2 and options["view"] == CONTROL_VIEW and members.views[1].members.relay.num_relayed > 0
        )
        if not held:
            return say(rank, frames, **options)
        passed.append(partial(say, rank, frames, **options))
        return Pending()

    relay.send = late  # type: ignore[assignment, method-assign]
    for view in members.views:
        view.members.connect(members.peers)
    members.until(lambda: members.views[0].members.ready.is_done and len(passed) == 1)
    members.comms[0].send(numbered(5), 2, tag(5))
    members.until(lambda: bool(members.views[2].members.by_rank[0].early_messages))
    assert not members.views[2].members.ready.is_done
    arrived = members.comms[2].recv(0, tag(5))
    assert not arrived.is_done, "who has not greeted has no say"
    passed.pop()()
    members.until(lambda: arrived.is_done)
    assert number_in(arrived.result()) == 5
    assert members.transports[2].refusals.num_messages == 0
    members.meet()


def test_there_is_room_for_one_message_before_a_greeting(group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1, meets=False, about={"max_nbytes": 1000})
    for view in members.views:
        view.members.connect(members.peers)
    members.until(lambda: members.views[2].members.by_rank[1].has_greeted)
    sent = [relayed(0, 2, numbered(number)) for number in range(251)]
    receiver = members.views[2]
    for number, message in enumerate(sent):
        assert receiver.transport.refusals.num_messages == 0, number
        receiver.handle_message(1, message)
    assert receiver.transport.refusals.num_messages == 1
    members.meet()


def test_a_greeting_after_its_admission_was_revoked_is_refused(group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1, about={"needs_all_members": False})
    receiver = members.views[2]
    admitted = receiver.members.reconnect(0)
    receiver.members.revoke_admission(0, PeerLost(0, "it took too long"))
    assert str(admitted.error) == "lost rank 0: it took too long"
    receiver.handle_message(1, relayed(0, 2, text(b'{"rank": 0}'), MessageKind.HELLO))
    assert receiver.transport.refusals.num_messages == 1
    assert receiver.members.present_ranks == {1}
    assert receiver.mailbox.ended.error is None


def test_settings_are_compared_through_a_relay(group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1, meets=False, settings=[{"steps": 1}, {"steps": 1}, {"steps": 2}])
    members.views[1].members._compare_settings = lambda *_: None  # type: ignore[method-assign]
    for view in members.views:
        view.members.connect(members.peers)
    members.until(lambda: members.views[0].mailbox.ended.error is not None)
    assert "ranks disagree on steps: 1 on rank 0, 2 on rank 2" in str(members.views[0].mailbox.ended.error)


# --- forged -----------------------------------------------------------------------------------------------------


def relayed(source: int, destination: int, payload: Payload, kind: MessageKind = MessageKind.DATA) -> Message:
    route = RelayRoute(source, destination, 0)
    return decode([bytearray(one) for one in forged(route, payload, kind)], max_nbytes=1 << 20)


def forged(
    route: RelayRoute, payload: Payload | None = None, kind: MessageKind = MessageKind.DATA
) -> list[bytes]:
    frames = encode(kind, 0, tag(99), payload or numbered(666), route=route)
    return [bytes(frame) for frame in frames]


def text(content: bytes) -> Payload:
    return Payload((torch.frombuffer(bytearray(content), dtype=torch.uint8),))


LOST = text(b'{"rank": 0, "detail": "gone", "token": ""}')
FORGED = {
    "in the name of another, through the relay": (2, 1, RelayRoute(0, 2, 0)),
    "in the name of another who is not relayed": (2, 1, RelayRoute(3, 2, 0)),
    "in the name of another, to the relay itself": (2, 1, RelayRoute(0, 1, 0)),
    "in the name of the relay": (2, 1, RelayRoute(1, 0, 0)),
    "in the name of who is behind a relay, by another member": (3, 0, RelayRoute(2, 0, 0)),
    "for who can be reached": (2, 1, RelayRoute(2, 3, 0)),
    "for who is connected": (2, 1, RelayRoute(2, 1, 0)),
    "for itself": (2, 1, RelayRoute(2, 2, 0)),
    "for nobody": (2, 1, RelayRoute(2, 7, 0)),
    "through who relays nothing": (2, 3, RelayRoute(2, 0, 0)),
    "of nobody": (1, 2, RelayRoute(9, 2, 0)),
    "of who is not relayed": (1, 2, RelayRoute(3, 2, 0)),
    "of the relay itself, as if it were relayed": (1, 2, RelayRoute(1, 2, 0)),
}


@covered(
    "what, kind, sealed", FORGED, [MessageKind.DATA, MessageKind.HELLO, MessageKind.ABORT], [False, True]
)
def test_forged_messages_are_refused_and_counted(
    what: str, kind: MessageKind, group: Callable[..., Group]
) -> None:
    members = group(4, *BEHIND_1)
    liar, heard_by, route = FORGED[what]
    payload = (
        numbered(666) if kind is MessageKind.DATA else text(b'{"rank": %d, "detail": ""}' % route.source)
    )
    wanted = [comm.recv_any(tag(99)) for comm in members.comms]
    members.raw(liar, heard_by, *forged(route, payload, kind))
    members.until(lambda: members.transports[heard_by].refusals.num_messages == 1)
    for number, (a, b) in enumerate([(0, 2), (0, 1), (1, 2), (3, 0)], start=1):
        members.exchange(number, a, b)
    assert [one.refusals.num_messages for one in members.transports] == [
        int(rank == heard_by) for rank in range(4)
    ]
    assert not any(one.is_done for one in wanted)
    assert not any(view.mailbox.ended.error for view in members.views)


@pytest.mark.parametrize(
    ("liar", "route"), [(1, RelayRoute(0, 2, 0)), (3, RelayRoute(0, 0, 0)), (1, RelayRoute(0, 0, 0))]
)
def test_a_loss_is_believed_of_the_relay_alone(
    liar: int, route: RelayRoute, group: Callable[..., Group]
) -> None:
    """And not of one that had the rank before; nor is it when a relay passes it on as another's."""
    members = group(4, *BEHIND_1)
    members.raw(liar, 2, *forged(route, LOST, MessageKind.LOST))
    members.exchange(1, liar, 2)
    assert members.transports[2].refusals.num_messages == int(liar == 3 or route.destination == 2)
    members.exchange(2, 0, 2)
    assert members.views[2].mailbox.ended.error is None


def test_who_has_not_greeted_has_nothing_relayed(group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1, meets=False)
    members.views[1].members.connect(members.peers)
    members.transports[0].connect_peers([members.peers[1]])
    members.raw(0, 1, *forged(RelayRoute(0, 2, 0)))
    members.until(lambda: members.transports[1].refusals.num_messages == 1)


def test_greetings_are_held_for_members_alone_and_no_large_ones(group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1)
    members.raw(0, 1, *forged(RelayRoute(0, 3, 0), text(b"{}"), MessageKind.HELLO))
    long = text(b" " * (1 << 20) + b"{}")
    members.transports[0].send(1, encode(MessageKind.HELLO, 0, tag(99), long, route=RelayRoute(0, 2, 0)))
    members.until(lambda: members.transports[1].refusals.num_messages == 2)
    assert not members.views[1].members.relay._greetings
    members.exchange(1, 0, 2)


# --- losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "not whole"])
@pytest.mark.parametrize("hidden", [BEHIND_1, BEHIND_2])
def test_who_is_lost_behind_a_relay_is_named(
    hidden: tuple[int, ...], whole: bool, group: Callable[..., Group]
) -> None:
    members = group(3, *hidden, about={"needs_all_members": whole})
    lost, stayer, relay = *hidden, third(hidden)
    comm = members.comms[stayer]
    departure, waiting = comm.wait_for_leave(), comm.recv(lost, tag(5))
    members.comms[lost].send(numbered(4), stayer, tag(4))
    members.until(lambda: members.views[relay].members.relay.num_relayed == 3)
    members.close(members.views[lost])
    members.until(lambda: waiting.is_done)
    assert isinstance(waiting.error, PeerLost)
    assert waiting.error.rank == lost
    assert str(waiting.error) == (
        f"lost rank {lost}: rank {relay}, which relays its messages, says: its connection was closed from its end"
    )
    assert number_in(comm.recv(lost, tag(4)).result()) == 4, "what it sent before is there"
    if whole:
        assert comm.session.mailbox.ended.error is waiting.error
        return
    assert comm.session.mailbox.ended.error is None
    assert departure.result() == lost
    members.exchange(8, stayer, relay)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "not whole"])
@pytest.mark.parametrize("hidden", [BEHIND_1, BEHIND_2])
def test_a_lost_relay_loses_those_behind_it(
    hidden: tuple[int, ...], whole: bool, group: Callable[..., Group]
) -> None:
    members = group(3, *hidden, about={"needs_all_members": whole})
    relay = third(hidden)
    waits = [members.comms[one].recv(other, tag(5)) for one, other in (hidden, hidden[::-1])]
    of_relay = members.comms[hidden[0]].recv(relay, tag(5))
    members.close(members.views[relay])
    members.until(lambda: all(one.is_done for one in waits))
    assert str(of_relay.error) == f"lost rank {relay}: its connection was closed from its end"
    for rank, waiting in zip(hidden[::-1], waits, strict=True):
        assert isinstance(waiting.error, PeerLost)
        if whole:
            assert waiting.error.rank == relay
        else:
            assert str(waiting.error) == f"lost rank {rank}: rank {relay} is gone, which relayed its messages"
    late = members.comms[hidden[0]].recv(hidden[1], tag(6))
    assert isinstance(late.error, PeerLost)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "not whole"])
def test_farewells_and_failures_go_through_a_relay(whole: bool, group: Callable[..., Group]) -> None:
    members = group(4, 0, 2, 3, about={"needs_all_members": whole})
    waits = [members.comms[2].recv(0, tag(5)), members.comms[2].recv(3, tag(5))]
    members.leave(0)
    members.until(lambda: waits[0].is_done)
    assert str(waits[0].error) == "lost rank 0: it had left the run"
    assert members.views[2].mailbox.ended.error is None
    members.exchange(1, 2, 3)
    members.leave(3, ValueError("bad batch"))
    members.until(lambda: waits[1].is_done)
    assert isinstance(waits[1].error, PeerFailed)
    assert str(waits[1].error) == "rank 3 failed: ValueError: bad batch"


@pytest.mark.parametrize("silent", [[], [1], [2]], ids=["answers", "silent relay", "silent source"])
def test_signs_of_life_go_through_a_relay(silent: list[int], group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1)
    members.comms[0].recv(2, tag(1))
    awake = [comm.session for comm in members.comms if comm.rank not in silent]
    for quarter in range(1, 40):
        members.clock = 2.5 * quarter
        for view in awake:
            view.wait_monitor.check(10.0)
        for _ in range(8):  # on loopback what is sent is there at once
            for view in awake:
                view.transport.poll(0.0)
    lost = members.views[0].mailbox.ended.error
    assert (lost is None) == (not silent)
    if silent:
        assert isinstance(lost, DeadlinePassed)
        assert lost.rank == 2
        assert "the exchange at step 1, part 0, hop 0, through rank 1; nothing has arrived" in str(lost)


def test_who_does_not_come_is_named_with_its_relay_and_the_relay_before_it(
    group: Callable[..., Group],
) -> None:
    members = group(3, *BEHIND_1, meets=False)
    members.views[2].members.connect(members.peers)
    assert members.views[2].members.missing_ranks == [1, 0]
    members.views[1].members.connect(members.peers)
    members.until(lambda: members.views[2].members.missing_ranks == [0])
    assert str(members.views[2].members.build_timeout(1.0)).endswith("for its greeting, through rank 1")
    members.views[0].members.connect(members.peers)
    members.meet()


def test_messages_for_who_has_left_are_no_forgeries(group: Callable[..., Group]) -> None:
    members = group(3, *BEHIND_1, about={"needs_all_members": False})
    members.close(members.views[2])
    members.until(lambda: members.views[1].members.by_rank[2].is_gone)
    members.raw(0, 1, *forged(RelayRoute(0, 2, 0)))
    members.raw(0, 1, *forged(RelayRoute(0, 2, FIRST_PRIORITY), text(b"{}"), MessageKind.WAITING))
    members.exchange(1)
    assert members.transports[1].refusals.num_messages == 0


# --- those who come again ---------------------------------------------------------------------------------------


class Passing:
    """A relay between ranks 0 and 2, whose messages go nowhere."""

    def __init__(self) -> None:
        of = peers(3, *BEHIND_1)
        self.said: list[int] = []
        transport: Any = SimpleNamespace(local_peer=of[1], send=lambda rank, *_, **__: self.said.append(rank))
        self.routes = routes(of, 1)
        self.relay = Relay(transport, self.routes, 3)

    def greet(self, source: int, destination: int) -> None:
        to = text(b'{"to": "%s"}' % self.routes.get_token(destination).encode())
        self.relay.handle_message(source, relayed(source, destination, to, MessageKind.HELLO))

    def again(self, rank: int) -> None:
        self.relay.handle_lost(rank)
        self.routes.add_peers([Peer(rank, None, b"another")])


def test_greetings_pass_together() -> None:
    both = Passing()
    both.greet(0, 2)
    assert both.said == []
    assert not both.relay.is_needed({0, 2})
    both.greet(2, 0)
    assert sorted(both.said) == [0, 2]
    assert both.relay.is_needed({0, 2})
    assert not both.relay.is_needed({0})


def test_a_greeting_for_who_had_the_rank_before_is_not_passed_on() -> None:
    both = Passing()
    both.greet(0, 2)
    both.again(2)
    both.greet(2, 0)
    assert both.said == []
    both.greet(0, 2)
    assert sorted(both.said) == [0, 2]


def test_a_greeting_of_who_had_the_rank_before_is_not_passed_on() -> None:
    both = Passing()
    both.greet(0, 2)
    both.again(0)
    both.greet(2, 0)
    assert both.said == []
    both.greet(0, 2)
    assert sorted(both.said) == [0, 2]


def test_what_was_for_who_is_lost_is_not_passed_to_who_has_its_rank_now() -> None:
    both = Passing()
    both.greet(0, 2)
    both.greet(2, 0)
    both.again(2)
    both.relay.handle_message(0, relayed(0, 2, text(b"{}"), MessageKind.WAITING))
    assert len(both.said) == 2


def test_a_greeting_that_is_no_json_is_refused_when_it_comes() -> None:
    both = Passing()
    with pytest.raises(WireError, match="no JSON"):
        both.relay.handle_message(0, relayed(0, 2, text(b"{"), MessageKind.HELLO))
    both.greet(2, 0)
    both.greet(0, 2)
    assert sorted(both.said) == [0, 2]


def test_who_was_lost_comes_again_behind_its_relay(group: Callable[..., Group], sealed: bool) -> None:
    members = group(3, *BEHIND_1, about={"needs_all_members": False})
    members.close(members.views[2])
    members.until(lambda: members.views[0].members.by_rank[2].is_gone)
    again = Group(3, hidden=BEHIND_1, keys=members.transports[1].keys, about={"needs_all_members": False})
    newcomer = again.views[2]
    again.close(*again.views[:2])
    members._open.append(newcomer)
    members.views[2], members.transports[2], members.comms[2] = newcomer, again.transports[2], again.comms[2]
    arrival = members.comms[0].wait_for_join()
    newcomer.members.connect(members.peers)
    # Whoever is told first: its greeting is held until the relay and the other know of the newcomer.
    members.views[0].members.admit(members.peers[2])
    members.until(lambda: bool(members.views[1].members.relay._greetings))
    assert not arrival.is_done
    members.views[1].members.admit(members.peers[2])
    members.until(lambda: newcomer.members.ready.is_done and arrival.is_done)
    assert arrival.result() == 2
    members.exchange(1, 0, 2)
    assert all(one.refusals.num_messages == 0 for one in members.transports)


# --- whole replicas, each with its thread -----------------------------------------------------------------------


def together(hidden: tuple[int, ...], *, encrypt: bool) -> list[WallRuntime]:
    store = dist.HashStore()
    ends = [Endpoint(advertise="none" if rank in hidden else None, encrypt=encrypt) for rank in range(3)]
    given: dict[str, Any] = {"deadline_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S}
    found = in_threads(
        *(partial(WallRuntime, rank, 3, store, endpoint=ends[rank], **given) for rank in range(3))
    )
    runtimes = [one for one in found if isinstance(one, WallRuntime)]
    assert len(runtimes) == 3, found
    return runtimes


async def received(runtime: Runtime, src: int) -> float:
    return number_in(await runtime.comm.recv(src, tag(4)))


async def sent(runtime: Runtime, dst: int, value: float) -> None:
    await runtime.comm.send(numbered(value), dst, tag(4))


@pytest.mark.parametrize("hidden", [BEHIND_1, BEHIND_2])
def test_a_relay_that_is_through_stays_for_those_behind_it(
    hidden: tuple[int, ...], sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.comm.view.LEAVE_WAIT_S", 0.0)
    runtimes = together(hidden, encrypt=sealed)
    one, other, relay = (runtimes[rank] for rank in (*hidden, third(hidden)))
    gone = relay.comm.rank

    def talk() -> float:
        with pytest.raises(PeerLost, match="it had left the run"):
            one.launch(received(one, gone)).wait()  # so the relay has taken its leave
        other.launch(sent(other, one.comm.rank, 3.0)).wait()
        value = one.launch(received(one, other.comm.rank)).wait()
        parted([one, other])
        return value

    assert in_threads(relay.close, talk) == [None, 3.0]


def test_without_anybody_to_relay_a_run_does_not_begin() -> None:
    with pytest.raises(ConfigError, match="ranks 0 and 1 advertise no address"):
        joined(2, endpoint=Endpoint(advertise="none"))


def test_who_has_no_way_in_listens_at_no_port() -> None:
    with pytest.raises(ConfigError, match=r"--advertise none: no peer connects .*: leave out --port 7000"):
        Endpoint(advertise="none", port=7000)


def test_who_cannot_be_reached_alone_needs_nobody() -> None:
    (runtime,) = joined(1, endpoint=Endpoint(advertise="none"))
    assert isinstance(runtime.comm, WallCommunicator)
    runtime.close()
