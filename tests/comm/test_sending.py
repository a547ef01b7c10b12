"""What waits for room in a socket, where those who are told that it has left act at once."""

from __future__ import annotations

from typing import Any, cast

import pytest

from farflung.comm.sending import Sending
from farflung.errors import PeerLost

HERE, THERE = b"here", b"there"
LARGE = 1 << 20


class Taking:
    """A socket that takes all."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def send(self, frame: Any, flags: int, copy: bool = True) -> None:
        self.taken.append(frame)


@pytest.mark.parametrize("whose", [HERE, THERE])
@pytest.mark.parametrize("how", ["close", "divert"])
def test_a_connection_may_be_closed_by_who_hears_that_a_message_has_left(whose: bytes, how: str) -> None:
    sending = Sending(cast("Any", Taking()), LARGE, 2)

    def end(_: object) -> None:
        if how == "close":
            sending.close(whose, PeerLost(1, "gone"))
        else:
            sending.divert(whose, b"another")

    sending.put(HERE, [b"head", bytes(LARGE)], 0, 0).on_done(end)
    for to in (HERE, THERE):
        sending.put(to, [b"head", bytes(LARGE)], 0, 0)
    assert sending.flush() == []
    assert sending.flush() == []
    assert not sending.waits
