"""Encryption driven by hand: who is bound to which rank, what the store cannot do, what is listened on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch.distributed as dist
import zmq

from farflung.comm import ZmqCommunicator
from farflung.comm.keys import Keys
from farflung.errors import ConfigError, ProtocolError
from farflung.runtime import WallRuntime
from tests.helpers import PATIENCE_S, Group
from tests.strangers import NOISE, abort, dealing, greeting, knock, until_closed, with_keys

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
        self.comms = [
            ZmqCommunicator(rank, size, now=lambda: self.clock, keys=keys)
            for rank, keys in enumerate(self.keys)
        ]
        self._open = list(self.comms)
        self.peers = [comm.me for comm in self.comms]


@pytest.fixture
def sealed() -> Iterator[Sealed]:
    members = Sealed()
    yield members
    members.close()


def test_who_answers_with_another_key_is_not_that_rank(sealed: Sealed) -> None:
    one, two = sealed.comms[:2]
    one.connect(sealed.peers)
    two.connect([replace(sealed.peers[0], key=Keys.fresh().public), *sealed.peers[1:]])
    assert two.greeting_of(0) == "its greeting"
    sealed.until(lambda: "did not prove to be that rank" in two.greeting_of(0) and one.refused > 0)
    assert 0 in two.missing()
    assert 1 in one.missing()


def test_who_is_not_on_the_list_is_told_so(sealed: Sealed) -> None:
    one, two = sealed.comms[:2]
    one.connect([sealed.peers[0], replace(sealed.peers[1], key=Keys.fresh().public), sealed.peers[2]])
    two.connect(sealed.peers)
    sealed.until(lambda: two.lost is not None and one.refused == 1)
    assert isinstance(two.lost, ProtocolError)
    assert str(two.lost) == "rank 0 does not accept this replica's key: it was given another list"
    assert one.lost is None


def test_a_member_under_anothers_name_is_refused(sealed: Sealed, dealer: zmq.Socket[bytes]) -> None:
    first = sealed.comms[0]
    first.connect(sealed.peers)
    dealer.setsockopt(zmq.ROUTING_ID, sealed.peers[1].token)
    with_keys(dealer, sealed.keys[2], str(sealed.peers[0].key))
    dealer.connect(sealed.peers[0].address)
    dealer.send_multipart(greeting(1))
    dealer.send_multipart(abort())
    sealed.until(lambda: first.refused == 2)
    assert first.missing() == [1, 2]
    assert first.lost is None


def test_a_member_cannot_take_the_place_of_a_rank_that_is_connected_to(
    sealed: Sealed, dealer: zmq.Socket[bytes]
) -> None:
    second = sealed.comms[1]
    second.connect(sealed.peers)
    dealer.setsockopt(zmq.ROUTING_ID, sealed.peers[0].token)
    with_keys(dealer, sealed.keys[2], str(sealed.peers[1].key))
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(sealed.peers[1].address)
    dealer.send_multipart(greeting(0))
    dealer.send_multipart(abort())
    sealed.until(lambda: bool(monitor.poll(0)))
    dealer.disable_monitor()
    monitor.close(linger=0)
    assert second.missing() == [0, 2]
    for comm in (sealed.comms[0], sealed.comms[2]):
        comm.connect(sealed.peers)
    sealed.until(lambda: all(comm.ready.done for comm in sealed.comms))
    sealed.exchange(1)
    assert second.lost is None


def test_who_has_not_greeted_has_no_say(sealed: Sealed, dealer: zmq.Socket[bytes]) -> None:
    first = sealed.comms[0]
    first.connect(sealed.peers)
    dealer.setsockopt(zmq.ROUTING_ID, sealed.peers[1].token)
    with_keys(dealer, sealed.keys[1], str(sealed.peers[0].key))
    dealer.connect(sealed.peers[0].address)
    dealer.send_multipart(abort())
    sealed.until(lambda: first.refused == 1)
    dealer.send_multipart(greeting(1))
    sealed.until(lambda: first.missing() == [2])


def test_nobody_gets_in_before_the_list_is_known(sealed: Sealed) -> None:
    late = sealed.comms[0]
    for comm in sealed.comms[1:]:
        comm.connect(sealed.peers)
    for _ in range(20):
        for comm in sealed.comms:
            comm.poll(0.001)
    assert 0 in sealed.comms[1].missing()
    late.connect(sealed.peers)
    sealed.until(lambda: all(comm.ready.done for comm in sealed.comms))


@pytest.mark.parametrize("kind", [Group, Sealed])
def test_the_descriptor_of_a_stranger_is_not_taken_for_a_ranks(kind: type[Group]) -> None:
    """Its closing is told after the greeting of a rank whose connection has got the same descriptor."""
    members = kind(2)
    first, second = members.comms
    with closing(members):
        with knock(first) as stranger:
            stranger.sendall(NOISE["a mechanism that is none"])
            until_closed(stranger)
        for comm in members.comms:
            comm.connect([comm.me for comm in members.comms])
        if first._gate:
            assert first._gate.questions.poll(int(PATIENCE_S * 1000))
            first._gate.answer()
        assert first._socket.poll(int(PATIENCE_S * 1000)), "the greeting of rank 1"
        members.until(lambda: first.ready.done and second.ready.done)
        members.exchange(1)
        assert len(first._connections._latest) == 1, "two connections, one descriptor"
        assert first.lost is None


def test_the_store_cannot_exchange_two_ranks_of_one_machine() -> None:
    members = Group(3, keys=Keys.fresh())
    zero, one, two = (comm.me for comm in members.comms)
    with closing(members):
        members.comms[0].connect([zero, one, two])
        members.comms[1].connect([zero, one, two])
        members.comms[2].connect([replace(one, rank=0), replace(zero, rank=1), two])
        members.until(lambda: members.comms[2].refused == 2)
        assert members.comms[2].missing() == [0, 1]


def test_the_store_may_not_name_a_replica_twice(sealed: Sealed) -> None:
    one, two, three = sealed.peers
    with pytest.raises(ProtocolError, match="names one replica twice"):
        sealed.comms[2].connect([one, replace(two, token=one.token), three])


# --- what is bound ----------------------------------------------------------------------------------------------

ELSEWHERE = "192.0.2.1"  # an address for documentation: no machine has it


def test_nothing_leaves_the_machine_without_encryption() -> None:
    with pytest.raises(ConfigError, match="without encryption"):
        ZmqCommunicator(0, 2, now=float, interface=ELSEWHERE)


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "*", "localhost"])
def test_one_address_is_bound(interface: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        ZmqCommunicator(0, 2, now=float, interface=interface, keys=Keys.fresh())


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"interface {ELSEWHERE}: cannot listen there"):
        WallRuntime(0, 2, dist.HashStore(), interface=ELSEWHERE)


def test_native_collectives_stay_on_one_machine() -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        WallRuntime(0, 2, dist.HashStore(), interface=ELSEWHERE, native=True)
