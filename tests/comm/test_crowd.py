"""Strangers in great numbers, and with much to say."""

from __future__ import annotations

import resource
from contextlib import closing, suppress

import pytest

from farflung.comm import ZmqTransport, door
from farflung.comm.keys import Keys
from farflung.errors import ConfigError
from tests.crowded import LIMIT, hopeless_scenario, late_scenario, resident_nbytes, scenario
from tests.forks import Fork
from tests.helpers import Group
from tests.strangers import CURVE_GREETING, FRAME, GREETING, PLAIN_GREETING, knock


def test_a_crowd_takes_no_descriptors_where_there_may_be_more() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    try:
        scenario()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_crowd_takes_no_descriptors_where_there_are_no_more() -> None:
    with Fork(hopeless_scenario) as process:
        _, err = process.finished()
    assert process.returncode == 0, "\n".join(err)


def test_a_newcomer_gets_in_among_a_crowd_endless_frames_and_forged_ones() -> None:
    with Fork(late_scenario) as process:
        _, err = process.finished()
    assert process.returncode == 0, "\n".join(err)


def test_more_replicas_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (LIMIT, LIMIT))
    with pytest.raises(ConfigError, match="1000 replicas take 2256 open files in each process, and 1024 are"):
        ZmqTransport(0, 1000)


# --- what they say ----------------------------------------------------------------------------------------------

MANY_NBYTES = 500 << 20
SAID = {
    "no mechanism": GREETING
    + b"NULL".ljust(20, b"\0")
    + bytes(32)
    + b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    "no password": PLAIN_GREETING,
    "no key": CURVE_GREETING,
}


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("what", SAID)
def test_endless_frames_of_strangers_are_not_kept(what: str, sealed: bool) -> None:
    with closing(Group(2, keys=Keys.fresh() if sealed else None)) as members:
        first = members.comms[0]
        first.view.connect(members.peers)
        before = resident_nbytes()
        with knock(first) as stranger, suppress(ConnectionError):
            stranger.sendall(SAID[what])
            for _ in range(MANY_NBYTES // len(FRAME)):
                stranger.sendall(FRAME)
        assert resident_nbytes() - before < 50 << 20
        members.until(lambda: first.view.transport.turned_away == 1)
        assert first.view.lost is None


def test_the_filter_may_be_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(door, "_SO_ATTACH_FILTER", 10_000)
    with closing(Group(2)) as members:
        members.meet().exchange(1)
    assert len(caplog.messages) == 2
    assert "cannot be shut here (Protocol not available)" in caplog.text
