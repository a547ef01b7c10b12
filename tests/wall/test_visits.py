"""What members of an elastic run answer and tell: replicas that join while something else fails."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from farflung.comm.visits import Access
from farflung.errors import ConfigError, RunLost
from farflung.membership import View
from farflung.tasks import Pending
from farflung.wall import WallRuntime, visits
from farflung.wall.visits import JoinClient, JoinTerms, create_elastic
from tests.helpers import PATIENCE_S, in_threads

pytestmark = pytest.mark.filterwarnings("ignore:.*coroutine.*:pytest.PytestUnraisableExceptionWarning")
"""Of runtimes that are stopped like processes that are killed."""

RANKS = 9


class Run:
    """Members of an elastic run and replicas that join it, up to their admission; none computes anything."""

    def __init__(self, size: int) -> None:
        self.published = [queue.SimpleQueue[Access]() for _ in range(size)]
        self.runtimes: dict[int, WallRuntime] = {}
        store = dist.HashStore()
        self.members: list[Any] = in_threads(
            *(partial(self._begin, rank, size, store) for rank in range(size))
        )
        self.access = self.next_of(0)
        for rank in range(1, size):
            self.next_of(rank)

    def _begin(self, rank: int, size: int, store: dist.Store) -> Any:
        options: Any = {"members": range(size), "connect_timeout_s": PATIENCE_S, "deadline_s": PATIENCE_S}
        runtime = self.runtimes[rank] = WallRuntime(rank, RANKS, store, **options)
        takes = JoinTerms({}, RANKS, self.published[rank].put)
        return self._elastic(runtime, range(size), join_terms=takes)

    def _elastic(self, runtime: WallRuntime, ranks: Any, **options: Any) -> Any:
        runtime.elastic = create_elastic(
            runtime, ranks, patience_s=10 * PATIENCE_S, can_return=True, **options
        )
        return runtime.elastic

    def next_of(self, rank: int) -> Access:
        """How the run is reached by a member's next view."""
        return self.published[rank].get(timeout=PATIENCE_S)

    def guest(self, *addresses: str) -> JoinClient:
        return JoinClient(self.access, addresses or self.access.addresses)

    def come(self, guest: JoinClient) -> Any:
        """Has a replica meet the members, which admit it."""
        runtime = self.runtimes[guest.rank] = WallRuntime(
            guest.rank, RANKS, None, members=[guest.rank], announce=lambda me: [me], deadline_s=PATIENCE_S
        )
        guest.announce(runtime)
        elastic = self._elastic(runtime, guest.members, guest=guest)
        elastic.admitted = Pending[View]()
        install = elastic.agreement.install_view

        def noted(view: View) -> None:
            install(view)
            elastic.admitted.set_result(view)

        async def ask() -> None:
            elastic.agreement.joiner._request_admission()

        elastic.agreement.install_view = noted
        runtime.launch(ask())
        return elastic

    def admitted(self, elastic: Any) -> tuple[str, ...]:
        """The members of the view that admits a replica."""
        (found,) = in_threads(lambda: elastic.admitted.wait().members)
        assert isinstance(found, tuple), found
        return found

    def kill(self, rank: int) -> None:
        self.runtimes.pop(rank)._stop()

    def close(self) -> None:
        for runtime in self.runtimes.values():
            runtime._stop()


@pytest.fixture
def run() -> Iterator[Callable[[int], Run]]:
    made: list[Run] = []

    def make(size: int) -> Run:
        made.append(Run(size))
        return made[-1]

    yield make
    while made:
        made.pop().close()
    gc.collect()  # of those that were killed, while their warnings are ignored


def once_told(guest: JoinClient, then: Callable[[], object]) -> JoinClient:
    """Does something between a replica's visit and its greetings."""
    ask = guest._ask_members

    def asks(question: Any) -> dict[str, Any]:
        answer = ask(question)
        then()
        return answer

    guest._ask_members = asks  # type: ignore[method-assign]
    return guest


@pytest.mark.parametrize("lost", [0, 2])
def test_a_replica_begins_where_a_member_dies_before_it_has_greeted(
    lost: int, run: Callable[[int], Run]
) -> None:
    one = run(3)
    guest = one.guest()
    elastic = one.come(once_told(guest, lambda: one.kill(lost)))
    assert one.admitted(elastic) == (*(str(rank) for rank in range(3) if rank != lost), str(guest.rank))


def test_a_replica_does_not_wait_for_a_member_that_stands_still(run: Callable[[int], Run]) -> None:
    one, goes_on = run(3), threading.Event()
    guest = one.guest()
    try:
        elastic = one.come(
            once_told(guest, lambda: one.runtimes[2]._thread.call_soon(lambda: (goes_on.wait(), None)[1]))
        )
        assert set(guest.members) <= {0, 1}
    finally:
        goes_on.set()
    assert one.admitted(elastic) == ("0", "1", "2", str(guest.rank))


def test_two_replicas_join_at_once_by_different_members(run: Callable[[int], Run]) -> None:
    one = run(3)
    for place, rank in zip(
        one.access.addresses, (3, 4, 5), strict=True
    ):  # as where the senior does not answer
        assert one.access.ask(place, {"join": True}, PATIENCE_S)["rank"] == rank
    guests = [one.guest(address) for address in one.access.addresses[:2]]
    found = in_threads(*(partial(one.come, guest) for guest in guests))
    for guest, elastic in zip(guests, found, strict=True):
        assert str(guest.rank) in one.admitted(elastic)


def test_a_replica_is_told_of_members_that_it_does_not_know(run: Callable[[int], Run]) -> None:
    one = run(3)
    guest = one.guest()
    ask = guest._ask_members

    def asks(question: Any) -> dict[str, Any]:
        answer = ask(question)
        return {**answer, "members": answer["members"][:1]}

    guest._ask_members = asks  # type: ignore[method-assign]
    assert one.admitted(one.come(guest)) == ("0", "1", "2", str(guest.rank))


def test_a_rank_that_was_given_twice_is_one_replicas(run: Callable[[int], Run]) -> None:
    one = run(2)
    first, second = one.guest(), one.guest()
    second.rank = first.rank
    one.admitted(one.come(first))
    kept = one.runtimes[first.rank]
    with pytest.raises(RunLost, match="rank 2 was given to another replica meanwhile"):
        one.come(second)
    one.runtimes[first.rank]._stop()
    one.runtimes[first.rank] = kept


def test_other_members_are_asked_where_one_does_not_answer(run: Callable[[int], Run]) -> None:
    one = run(3)
    one.kill(0)
    guest = JoinClient(one.access, one.access.addresses)
    assert guest.rank in (3, 4)
    assert set(guest.addresses[:2]) <= set(one.access.addresses)
    with pytest.raises(ConfigError, match="no run answers there that this key belongs to"):
        JoinClient(one.access, one.access.addresses[:1])


def test_one_that_joins_itself_is_asked_later(
    run: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = run(2)
    monkeypatch.setattr(type(one.members[0]), "is_joining", True)
    asked = list[float]()

    def passes(seconds: float) -> None:
        asked.append(seconds)
        one.members[0].is_joining = False

    monkeypatch.setattr(time, "sleep", passes)
    assert one.guest(one.access.addresses[0]).rank == 2
    assert len(asked) == 1


def test_members_that_the_one_asked_does_not_reach_are_visited(
    run: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = run(3)
    monkeypatch.setattr(visits._VisitHandler, "_send_peer", lambda *_: None)
    guest = one.guest()
    assert one.admitted(one.come(guest)) == ("0", "1", "2", str(guest.rank))


def test_the_others_go_on_at_once_where_one_ends_on_an_error(run: Callable[[int], Run]) -> None:
    """Of two that no supervisor certifies the junior goes on too."""
    one = run(2)
    one.runtimes.pop(0).close(OSError("no space left on device"))
    one.next_of(1)
    assert one.members[1].members == (1,)
