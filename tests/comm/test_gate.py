"""Connections driven by hand: who gets in, who is bound to which rank, what the store cannot do, what is bound."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch.distributed as dist
import zmq
from zmq.utils import z85

from farflung.comm import Endpoint, ZmqTransport, door
from farflung.comm.gate import Gate
from farflung.comm.keys import Keys
from farflung.comm.peer import Peer
from farflung.errors import ConfigError, ProtocolError
from farflung.runtime import WallRuntime
from tests.helpers import PATIENCE_S, Group
from tests.proxy import Proxy
from tests.strangers import (
    CURVE_GREETING,
    FORGED,
    NOISE,
    abort,
    dealing,
    forged,
    greeting,
    knock,
    until_closed,
    with_keys,
    with_password,
)

SIZE = 3


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    with dealing() as one:
        yield one


# --- who is bound to which rank ---------------------------------------------------------------------------------


class Sealed(Group):
    """Communicators with a key each."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(0)
        self.keys = [Keys.fresh() for _ in range(size)]
        transports = [ZmqTransport(rank, size, keys=keys) for rank, keys in enumerate(self.keys)]
        self.take(transports, [{}] * size)


@pytest.fixture
def sealed() -> Iterator[Sealed]:
    members = Sealed()
    yield members
    members.close()


def test_who_answers_with_another_key_is_not_that_rank(sealed: Sealed) -> None:
    one, two = sealed.comms[:2]
    one.view.connect(sealed.peers)
    two.view.connect([replace(sealed.peers[0], key=Keys.fresh().public), *sealed.peers[1:]])
    assert two.view.greeting_of(0) == "its greeting"
    sealed.until(
        lambda: (
            "did not prove to be that rank" in two.view.greeting_of(0) and one.view.transport.turned_away > 0
        )
    )
    assert 0 in two.view.missing()
    assert 1 in one.view.missing()


def test_who_is_not_on_the_list_is_told_so(sealed: Sealed) -> None:
    one, two = sealed.comms[:2]
    one.view.connect([sealed.peers[0], replace(sealed.peers[1], key=Keys.fresh().public), sealed.peers[2]])
    two.view.connect(sealed.peers)
    sealed.until(lambda: two.view.lost is not None and one.view.transport.turned_away == 2)
    assert isinstance(two.view.lost, ProtocolError)
    assert str(two.view.lost) == "rank 0 does not accept this replica's key: it was given another list"
    assert one.view.lost is None


def test_a_member_under_anothers_name_is_refused(sealed: Sealed, dealer: zmq.Socket[bytes]) -> None:
    first = sealed.comms[0]
    first.view.connect(sealed.peers)
    dealer.setsockopt(zmq.ROUTING_ID, sealed.peers[1].token)
    with_keys(dealer, sealed.keys[2], str(sealed.peers[0].key))
    dealer.connect(sealed.peers[0].where)
    dealer.send_multipart(greeting(1))
    dealer.send_multipart(abort())
    sealed.until(lambda: first.view.transport.refused == 2)
    assert first.view.missing() == [1, 2]
    assert first.view.lost is None


def test_a_member_cannot_take_the_place_of_a_rank_that_is_connected_to(
    sealed: Sealed, dealer: zmq.Socket[bytes]
) -> None:
    second = sealed.comms[1]
    second.view.connect(sealed.peers)
    dealer.setsockopt(zmq.ROUTING_ID, sealed.peers[0].token)
    with_keys(dealer, sealed.keys[2], str(sealed.peers[1].key))
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(sealed.peers[1].where)
    dealer.send_multipart(greeting(0))
    dealer.send_multipart(abort())
    sealed.until(lambda: bool(monitor.poll(0)))
    dealer.disable_monitor()
    monitor.close(linger=0)
    assert second.view.missing() == [0, 2]
    for comm in (sealed.comms[0], sealed.comms[2]):
        comm.view.connect(sealed.peers)
    sealed.until(lambda: all(comm.view.ready.done for comm in sealed.comms))
    sealed.exchange(1)
    assert second.view.lost is None


def test_who_has_not_greeted_has_no_say(sealed: Sealed, dealer: zmq.Socket[bytes]) -> None:
    first = sealed.comms[0]
    first.view.connect(sealed.peers)
    dealer.setsockopt(zmq.ROUTING_ID, sealed.peers[1].token)
    with_keys(dealer, sealed.keys[1], str(sealed.peers[0].key))
    dealer.connect(sealed.peers[0].where)
    dealer.send_multipart(abort())
    sealed.until(lambda: first.view.transport.refused == 1)
    dealer.send_multipart(greeting(1))
    sealed.until(lambda: first.view.missing() == [2])


def test_nobody_gets_in_before_the_list_is_known(sealed: Sealed) -> None:
    late = sealed.comms[0]
    for comm in sealed.comms[1:]:
        comm.view.connect(sealed.peers)
    for _ in range(20):
        for comm in sealed.comms:
            comm.view.transport.poll(0.001)
    assert 0 in sealed.comms[1].view.missing()
    late.view.connect(sealed.peers)
    sealed.until(lambda: all(comm.view.ready.done for comm in sealed.comms))


@pytest.fixture(params=[Group, Sealed], ids=["plain", "sealed"])
def members(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Rank 0 lets others in already, who have not come yet."""
    group = request.param(SIZE)
    group.comms[0].view.connect(group.peers)
    yield group
    group.close()


@pytest.mark.parametrize("kind", [Group, Sealed], ids=["plain", "sealed"])
def test_the_descriptor_of_a_stranger_is_not_taken_for_a_ranks(kind: Callable[[int], Group]) -> None:
    """Its closing is told after the greeting of a rank whose connection has got the same descriptor, most times."""
    for _ in range(20):
        with closing(kind(SIZE)) as members:
            members.comms[0].view.connect(members.peers)
            got = _descriptors_got(members)
            assert members.comms[0].view.lost is None
        if got == 2 * (SIZE - 1):
            return
    raise AssertionError("a stranger and two connections of each never had one descriptor less")


def _descriptors_got(members: Group) -> int:
    """How many the connections of a stranger, of rank 1 and of rank 2 have had at rank 0."""
    first = members.comms[0]
    for_the_door_of_rank_1 = os.open(os.devnull, os.O_RDONLY)
    with knock(first) as stranger:
        stranger.sendall(NOISE["a mechanism that is none"])
        until_closed(stranger)
    os.close(for_the_door_of_rank_1)
    members.comms[1].view.connect(members.peers)
    assert members.transports[0]._gate.questions.poll(int(PATIENCE_S * 1000))
    members.transports[0]._gate.answer()
    assert members.transports[0]._socket.poll(int(PATIENCE_S * 1000)), "the greeting of rank 1"
    members.meet().exchange(1)
    return len(members.transports[0]._connections._latest)


# --- strangers --------------------------------------------------------------------------------------------------

Arm = Callable[["zmq.Socket[bytes]", Group], None]


def _nothing(dealer: zmq.Socket[bytes], members: Group) -> None:
    del dealer, members


def _a_guess(dealer: zmq.Socket[bytes], members: Group) -> None:
    del members
    dealer.setsockopt(zmq.PLAIN_USERNAME, b"1")
    dealer.setsockopt(zmq.PLAIN_PASSWORD, b"rank 1")


def _what_is_good_elsewhere(dealer: zmq.Socket[bytes], members: Group) -> None:
    """What rank 1 would say to somebody who has taken the place of rank 2."""
    with_password(dealer, members.peers[1], members.peers[2])


def _nobody(dealer: zmq.Socket[bytes], members: Group) -> None:
    with_password(dealer, replace(members.peers[1], rank=7), members.peers[0])


def _own_key(dealer: zmq.Socket[bytes], members: Group) -> None:
    with_keys(dealer, Keys.fresh(), members.peers[0].key or Keys.fresh().public)


def _wrong_server_key(dealer: zmq.Socket[bytes], members: Group) -> None:
    del members
    with_keys(dealer, Keys.fresh(), Keys.fresh().public)


@pytest.mark.parametrize(
    "arm", [_nothing, _a_guess, _what_is_good_elsewhere, _nobody, _own_key, _wrong_server_key]
)
def test_a_stranger_gets_nothing_in(arm: Arm, members: Group, dealer: zmq.Socket[bytes]) -> None:
    first = members.comms[0]
    dealer.setsockopt(zmq.ROUTING_ID, members.peers[1].token)  # even who knows a member's name
    arm(dealer, members)
    dealer.connect(first.view.transport.me.where)
    with suppress(zmq.Again):  # cut off already
        for message in (greeting(1), forged(), abort()):
            dealer.send_multipart(message, zmq.NOBLOCK)
    members.until(lambda: first.view.transport.turned_away >= 1)
    dealer.close(linger=0)
    assert (first.view.transport.refused, first.view.missing()) == (0, [1, 2])
    wanted = first.recv_any(FORGED)
    members.meet().exchange(1)
    assert first.view.lost is None
    assert not wanted.done


def test_a_member_has_no_other_name(dealer: zmq.Socket[bytes]) -> None:
    with closing(Group(SIZE)) as members:
        first = members.comms[0]
        first.view.connect(members.peers)
        with_password(dealer, members.peers[1], members.peers[0])
        dealer.setsockopt(zmq.ROUTING_ID, b"nobody")
        dealer.connect(first.view.transport.me.where)
        for count, message in enumerate((greeting(1), forged(), abort()), start=1):
            dealer.send_multipart(message)
            members.until(lambda count=count: first.view.transport.refused == count)  # type: ignore[misc]
        dealer.close(linger=0)
        members.meet().exchange(1)
        assert first.view.lost is None


def test_refusals_are_logged_with_their_count_each_time_it_has_doubled(
    members: Group, caplog: pytest.LogCaptureFixture
) -> None:
    first = members.comms[0]
    for known in range(1, 6):
        with knock(first) as stranger:
            stranger.sendall(NOISE["another protocol"])
            until_closed(stranger)
        members.until(lambda known=known: first.view.transport.turned_away == known)  # type: ignore[misc]
    assert caplog.messages == [
        f"rank 0 at {first.view.transport.me.address}: refused a connection that is not of this run; 0 messages and "
        f"{count} connections so far"
        for count in (1, 2, 4)
    ]


@pytest.mark.parametrize("what", NOISE)
def test_noise_is_cut_off(what: str, members: Group) -> None:
    first = members.comms[0]
    with knock(first) as stranger:
        stranger.sendall(NOISE[what])
        until_closed(stranger)
    members.until(lambda: first.view.transport.turned_away == 1)
    members.meet().exchange(1)
    assert first.view.lost is None


def asked(gate: Gate, question: zmq.Socket[bytes], *credentials: bytes) -> None:
    """As ZeroMQ asks for each connection (RFC 27)."""
    question.connect("inproc://zeromq.zap.01")
    question.send_multipart([b"", b"1.0", b"1", b"farflung", b"127.0.0.1", b"", *credentials])
    assert gate.questions.poll(int(PATIENCE_S * 1000))
    gate.answer()


@pytest.mark.parametrize("mechanism", ["PLAIN", "CURVE"])
def test_who_knocks_before_it_is_admitted_is_let_in_then(mechanism: str) -> None:
    key = Keys.fresh().public if mechanism == "CURVE" else None
    knocks = Peer(2, None, secrets.token_bytes(16), key)
    token = secrets.token_bytes(16)
    proof = [z85.decode(key)] if key else [b"2", hmac.digest(token, knocks.token, "sha256").hex().encode()]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, token, Keys.fresh() if key else None, later=True)
    with context.socket(zmq.DEALER) as early, context.socket(zmq.DEALER) as stranger, closing(gate):
        asked(gate, early, mechanism.encode(), *proof)
        for _ in range(255):
            asked(gate, stranger, mechanism.encode(), *(bytes(32) for _ in proof))
        gate.admit([Peer(1, None, secrets.token_bytes(16), Keys.fresh().public if key else None)])
        assert not early.poll(0)
        gate.admit([knocks])
        assert early.poll(int(PATIENCE_S * 1000))
        assert early.recv_multipart()[3] == b"200"
        assert not stranger.poll(0)
    context.term()


@pytest.mark.parametrize("kind", [Group, Sealed])
def test_who_says_nothing_is_cut_off(kind: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    with closing(kind(SIZE)) as members:
        first = members.comms[0]
        first.view.connect(members.peers)
        links = [knock(first) for _ in range(5)]
        for link in links[::2]:
            link.sendall(CURVE_GREETING[:40])
        for link in links:
            with closing(link):
                until_closed(link)
        members.until(lambda: first.view.transport.turned_away == 5)
        members.meet().exchange(1)


def test_a_recording_played_again_gets_nothing_in(sealed: Sealed) -> None:
    first, second = sealed.comms[:2]
    first.view.connect(sealed.peers)
    with closing(Proxy(first.view.transport.me.where)) as proxy:
        second.view.connect([replace(sealed.peers[0], address=proxy.address), *sealed.peers[1:]])
        sealed.until(lambda: first.view.missing() == [2] and second.view.missing() == [2])
        sealed.until(lambda: 1 in sealed.transports[0]._urgent)
        for number, recorded in enumerate(map(bytes, proxy.to_target), start=1):
            with knock(first) as stranger:
                stranger.sendall(recorded)
                until_closed(stranger)
            sealed.until(lambda number=number: first.view.transport.turned_away == number)  # type: ignore[misc]
        assert first.view.transport.turned_away == 2
        sealed.meet().exchange(1)
        assert first.view.lost is None


def test_the_store_cannot_exchange_two_ranks_of_one_machine() -> None:
    members = Group(3, keys=Keys.fresh())
    zero, one, two = (comm.view.transport.me for comm in members.comms)
    with closing(members):
        members.comms[0].view.connect([zero, one, two])
        members.comms[1].view.connect([zero, one, two])
        members.comms[2].view.connect([replace(one, rank=0), replace(zero, rank=1), two])
        members.until(lambda: members.comms[2].view.transport.refused == 2)
        assert members.comms[2].view.missing() == [0, 1]


def test_the_store_may_not_name_a_replica_twice(sealed: Sealed) -> None:
    one, two, three = sealed.peers
    with pytest.raises(ProtocolError, match="names one replica twice"):
        sealed.comms[2].view.connect([one, replace(two, token=one.token), three])


# --- what is bound ----------------------------------------------------------------------------------------------

ELSEWHERE = "192.0.2.1"  # an address for documentation: no machine has it


def test_nothing_leaves_the_machine_without_encryption() -> None:
    with pytest.raises(ConfigError, match="without encryption"):
        ZmqTransport(0, 2, interface=ELSEWHERE)


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "*", "localhost"])
def test_one_address_is_bound(interface: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        ZmqTransport(0, 2, interface=interface, keys=Keys.fresh())


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"interface {ELSEWHERE}: cannot listen there"):
        WallRuntime(0, 2, dist.HashStore(), endpoint=Endpoint(ELSEWHERE))


def test_native_collectives_stay_on_one_machine() -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        WallRuntime(0, 2, dist.HashStore(), endpoint=Endpoint(ELSEWHERE), native=True)
