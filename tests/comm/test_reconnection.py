"""Connections that break while both ends are alive: made again directly or through a relay; real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farflung.comm.connection import Connection
from farflung.comm.handshake import HANDSHAKE_S, Handshaker
from farflung.comm.keys import load_keys, make_keys
from farflung.errors import PeerLost
from farflung.tasks import Pending
from tests.helpers import Group, numbered, tag


@pytest.fixture(params=["plain", "encrypted"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Group]]:
    made: list[Group] = []

    def make(size: int) -> Group:
        keys = None
        if request.param == "encrypted":
            make_keys(tmp_path, "all")
            keys = load_keys(tmp_path)
        made.append(Group(size, about={"needs_all_members": False}, allow_late=True, keys=keys))
        return made[-1].meet()

    yield make
    for members in made:
        members.close()


def cut(members: Group, one: int, other: int) -> None:
    """Shuts the connection of two members down, and waits until both have lost the other."""
    for link in members.transports[one]._remotes[other].connections.values():
        link.sock.shutdown(socket.SHUT_RDWR)
    members.until(
        lambda: (
            other not in members.views[one].members.present_ranks
            and one not in members.views[other].members.present_ranks
        )
    )


def again(members: Group, one: int, other: int, relay: int | None = None) -> None:
    """Both ends connect again."""
    made = [members.comms[a].reconnect(b, relay) for a, b in ((one, other), (other, one))]
    members.until(lambda: all(each.is_done for each in made))
    assert [each.error for each in made] == [None, None]


def test_a_broken_connection_is_made_again(group: Callable[[int], Group]) -> None:
    members = group(3)
    arrived = members.comms[0].wait_for_join()
    for number in range(1, 4):
        cut(members, 0, 2)
        assert isinstance(members.comms[0].send(numbered(0), 2, tag()).error, PeerLost)
        again(members, 0, 2)
        members.exchange(number, 0, 2)
        members.exchange(10 + number, 1, 2)
    assert arrived.result() == 2
    assert [each.refusals.num_connections for each in members.transports] == [0, 0, 0]


def test_a_member_whose_address_is_not_known_is_not_reached(group: Callable[[int], Group]) -> None:
    """One that was suspended hears of members that have come meanwhile."""
    made = group(2).comms[0].reconnect(7)
    assert str(made.error) == "lost rank 7: its address is not known"


def test_one_end_may_be_late(group: Callable[[int], Group]) -> None:
    members = group(2)
    cut(members, 0, 1)
    made = members.comms[1].reconnect(0)
    assert not made.is_done
    other = members.comms[0].reconnect(1)
    members.until(lambda: made.is_done and other.is_done)
    members.exchange(1)


def test_it_is_known_at_once_where_the_process_has_ended(group: Callable[[int], Group]) -> None:
    members = group(3)
    members.close(members.views[1])
    members.until(lambda: all(1 not in members.views[rank].members.present_ranks for rank in (0, 2)))
    made: list[Pending[None]] = [members.comms[rank].reconnect(1) for rank in (0, 2)]
    members.until(lambda: all(each.is_done for each in made))
    assert {str(each.error) for each in made} == {"lost rank 1: no process listens at its address any more"}


@pytest.mark.parametrize("served", ["first", "last"])
def test_a_relay_takes_the_place_of_a_connection(group: Callable[[int], Group], served: str) -> None:
    members = group(3)
    cut(members, 1, 2)
    if served == "first":
        members.comms[0].relay(1, 2)
    made = [members.comms[a].reconnect(b, 0) for a, b in ((1, 2), (2, 1))]
    members.exchange(1, 0, 1)
    members.exchange(2, 0, 2)
    if served == "last":
        members.comms[0].relay(1, 2)
    members.until(lambda: all(each.is_done for each in made))
    relayed = members.views[0].members.relay.num_relayed
    members.exchange(3, 1, 2)
    assert members.views[0].members.relay.num_relayed == relayed + 2
    cut(members, 0, 1)  # and with it the way from 1 to 2
    assert 2 not in members.views[1].members.present_ranks
    members.until(lambda: 1 not in members.views[2].members.present_ranks)
    again(members, 1, 2)
    members.exchange(4, 1, 2)
    again(members, 0, 1)
    members.exchange(5, 0, 1)
    assert members.views[0].members.relay.num_relayed == relayed + 2
    assert [each.refusals.num_connections + each.refusals.num_messages for each in members.transports] == [
        0,
        0,
        0,
    ]


def test_a_silent_member_is_reached_through_a_relay(group: Callable[[int], Group]) -> None:
    members = group(3)
    members.comms[0].relay(1, 2)
    gone = members.comms[2].wait_for_leave()
    again(members, 1, 2, 0)  # whose connection is there
    assert gone.result() == 1
    members.exchange(1, 1, 2)
    assert members.views[0].members.relay.num_relayed >= 4


def test_attempts_to_reconnect_last_longer_for_links_whose_answer_takes_seconds(
    group: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    members, limits = group(2), list[float]()
    cut(members, 0, 1)
    monkeypatch.setattr(
        Handshaker,
        "_limit_time",
        lambda self, link, limit_s, *state: limits.append(limit_s) if state else None,
    )
    monkeypatch.setattr(Connection, "connect", lambda self, address: self.end(None))
    transport = members.transports[1]
    transport.connect_peers([members.transports[0].local_peer], is_reconnect=True)
    for _ in range(15):
        transport.handshaker.connect(transport._remotes[0], 0)
    assert limits == [0.5, 0.5, 0.5, 1.5, 0.5, 0.5, 0.5, 3.0, 0.5, 0.5, 0.5, 6.0, 0.5, 0.5, 0.5, HANDSHAKE_S]
