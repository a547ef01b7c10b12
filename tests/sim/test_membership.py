"""Which members of a view reach each other in virtual time, as connections break and are made again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import permutations

import pytest

from farflung.comm.mailbox import Mailbox
from farflung.sim.membership import Membership

SIZE = 4
ALL = set(permutations(range(SIZE), 2))
PAIR = {(0, 1), (1, 0)}


class Members:
    """Four members, whose notices arrive one after the other once :meth:`settle` is called."""

    def __init__(self) -> None:
        self._notices = deque[Callable[[], None]]()
        self.membership = Membership([Mailbox(lambda: 0.0) for _ in range(SIZE)], (), self._say, self._say)

    def _say(self, src: int, dst: int, then: Callable[[], None]) -> None:
        del src, dst
        self._notices.append(then)

    def settle(self) -> set[tuple[int, int]]:
        """The pairs of which the first reaches the second in the end."""
        while self._notices:
            self._notices.popleft()()
        return {pair for pair in ALL if self.membership.can_send(*pair)}

    def connect(self, relay: int | None) -> set[tuple[int, int]]:
        """Connects ranks 0 and 1 again."""
        if relay is not None:
            self.membership.offer_relay(relay, 0, 1)
        made = [self.membership.reconnect(*pair, relay) for pair in sorted(PAIR)]
        known = self.settle()
        assert all(one.is_done and one.error is None for one in made)
        assert self.membership.find_relay(0, 1) == self.membership.find_relay(1, 0) == relay
        return known


@pytest.fixture
def members() -> Members:
    made = Members()
    assert made.settle() == ALL
    made.membership.reset_connection(0, 1)
    assert made.settle() == ALL - {(0, 1)}, "the end that broke it, alone, knows"
    return made


@pytest.mark.parametrize("relays", [[None], [2], [2, None], [2, 3], [3, 2, None, 2]])
def test_a_pair_goes_by_its_last_relay_alone(relays: list[int | None], members: Members) -> None:
    """It outlasts relays that it had before; one without a relay may break again."""
    for relay in relays:
        assert members.connect(relay) == ALL
    before, last = members.membership.get_connection(0, 1), relays[-1]
    members.membership.reset_connection(1, 0)
    assert members.settle() == (ALL - {(1, 0)} if last is None else ALL)
    assert (members.membership.get_connection(0, 1) is before) == (last is not None)
    assert members.connect(last) == ALL
    for lost in (2, 3):
        members.membership.remove_crashed(lost)
        gone = {pair for pair in ALL if lost in pair}
        members.settle()
        assert not any(members.membership.can_send(*pair) for pair in gone)
        is_over = last is not None and lost >= last
        assert {members.membership.can_send(*pair) for pair in PAIR} == {not is_over}
