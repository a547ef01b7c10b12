"""Ranks that meet in a store: whatever earlier processes have left there, and whoever comes again meanwhile."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from farflung.comm import Peer
from farflung.errors import DeadlinePassed, ProtocolError
from farflung.wall import WallRuntime, stores
from farflung.wall.rendezvous import Rendezvous, ask_leader
from tests.helpers import PATIENCE_S, impostor, in_threads, joined, number_in, numbered, parted, tag

KINDS: dict[str, Callable[[Path], dist.Store]] = {
    "tcp": lambda _: stores.serve_store("127.0.0.1", 0),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 3),
    "hash": lambda _: dist.HashStore(),
    "prefix": lambda _: dist.PrefixStore("job", dist.HashStore()),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    return KINDS[request.param](tmp_path)


def meeting(
    store: dist.Store, rank: int, size: int = 3, *, for_s: float = PATIENCE_S, **options: Any
) -> Rendezvous:
    return Rendezvous(store, "test", rank, range(size), time.monotonic() + for_s, **options)


def exchanged(ranks: Sequence[Rendezvous], values: Sequence[str]) -> list[Any]:
    return in_threads(*(partial(one.exchange, value) for one, value in zip(ranks, values, strict=True)))


def confirmed(ranks: Sequence[Rendezvous]) -> list[Any]:
    return in_threads(*(one.try_confirm for one in ranks))


def lives(store: dist.Store, life: str, size: int = 3) -> list[Rendezvous]:
    """As processes that have met each other, and nobody else."""
    ranks = [meeting(store, rank, size) for rank in range(size)]
    values = [f"{life}{rank}" for rank in range(size)]
    assert exchanged(ranks, values) == [dict(enumerate(values))] * size
    return ranks


class Background:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result.append(call())
        except Exception as error:
            self._result.append(error)

    def result(self) -> Any:
        self._thread.join(PATIENCE_S)
        return self._result[0]


def until(store: dist.Store, key: str, differs_from: bytes = b"") -> bytes:
    """Waits until a key holds something else."""
    end = time.monotonic() + PATIENCE_S
    while not store.check([key]) or store.get(key) == differs_from:
        assert time.monotonic() < end
        threading.Event().wait(0.001)
    return store.get(key)


# --- what is left of others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["confirmed", "met", "called"])
def test_all_start_again(store: dist.Store, end: str) -> None:
    if end == "called":
        with pytest.raises(DeadlinePassed):
            meeting(store, 0, for_s=0.0).exchange("alone")
    else:
        before = lives(store, "a")
        if end == "confirmed":
            assert confirmed(before) == [True] * 3
    for life in ("b", "c"):
        assert confirmed(lives(store, life)) == [True] * 3


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ranks_come_in_any_order(order: tuple[int, ...]) -> None:
    store = dist.HashStore()
    lives(store, "a")
    waiting: dict[int, Background] = {}
    for rank in order:
        key = f"farflung/test/{rank}" if rank else "farflung/test"
        before = store.get(key)
        waiting[rank] = Background(partial(meeting(store, rank).exchange, f"b{rank}"))
        until(store, key, before)  # it answers the call of a process that has ended, or calls
    assert [waiting[rank].result() for rank in range(3)] == [{0: "b0", 1: "b1", 2: "b2"}] * 3


def test_ranks_that_have_tried_unlike_numbers_of_times_meet(store: dist.Store) -> None:
    for rank in (0, 0, 1):
        with pytest.raises(DeadlinePassed):
            meeting(store, rank, for_s=0.0).exchange("nobody comes")
    lives(store, "a")


def test_what_cannot_be_read_is_absent() -> None:
    for text in ("", "7", "[]", "null", '["x"]', '["x", {"y": []}]', '["x", "y", "z", "no"]', "{" * 9999):
        store = dist.HashStore()
        for key in ("farflung/test", "farflung/test/1", "farflung/test/2/question"):
            store.set(key, text)
        lives(store, "a")


# --- who comes again ----------------------------------------------------------------------------------------------


def test_who_comes_again_before_all_have_come_takes_its_own_place() -> None:
    store = dist.HashStore()
    leader = Background(partial(meeting(store, 0).exchange, "0"))
    first = Background(partial(meeting(store, 1).exchange, "of a process that ends"))
    before = until(store, "farflung/test/1")
    second = Background(partial(meeting(store, 1).exchange, "1"))
    until(store, "farflung/test/1", before)
    last = Background(partial(meeting(store, 2).exchange, "2"))
    assert [one.result() for one in (leader, second, last)] == [{0: "0", 1: "1", 2: "2"}] * 3
    del first


@pytest.mark.parametrize("again", range(3))
def test_who_comes_again_after_all_have_come_makes_all_meet_anew(store: dist.Store, again: int) -> None:
    ranks = lives(store, "a")
    others = [rank for rank in range(3) if rank != again]
    assert not any(ranks[rank].is_repeated() for rank in others)
    before = store.get("farflung/test" if again == 0 else f"farflung/test/{again}")
    ranks[again] = meeting(store, again)
    newcomer = Background(partial(ranks[again].exchange, f"b{again}"))
    until(store, "farflung/test" if again == 0 else f"farflung/test/{again}", before)
    first = others[0]
    assert ranks[first].is_repeated()
    if again:
        assert ranks[first].try_confirm() is False
    anew = [Background(partial(ranks[first].exchange, f"b{first}"))]
    if again:
        until(store, "farflung/test", before)
    last = others[1]
    end = time.monotonic() + PATIENCE_S
    while not ranks[last].is_repeated():
        assert time.monotonic() < end
    anew.append(Background(partial(ranks[last].exchange, f"b{last}")))
    assert [one.result() for one in (newcomer, *anew)] == [{0: "b0", 1: "b1", 2: "b2"}] * 3
    assert confirmed(ranks) == [True] * 3


def test_who_goes_on_to_the_next_meeting_has_not_come_again() -> None:
    store = dist.HashStore()
    first, second = lives(store, "a"), [meeting(store, rank) for rank in range(3)]
    assert first[1].try_confirm()
    ahead = Background(partial(second[1].exchange, "b1"))
    leader = Background(first[0].try_confirm)
    assert not first[0].is_repeated()
    assert not first[2].is_repeated(), "the leader has not called again"
    assert first[2].try_confirm()
    assert leader.result() is True
    rest = [Background(partial(second[rank].exchange, f"b{rank}")) for rank in (0, 2)]
    assert [one.result() for one in (ahead, *rest)] == [{0: "b0", 1: "b1", 2: "b2"}] * 3


def test_two_processes_of_one_rank_are_told() -> None:
    store = dist.HashStore()
    first = lives(store, "a")
    with pytest.raises(DeadlinePassed):
        meeting(store, 0, for_s=0.0).exchange("another")
    with pytest.raises(ProtocolError, match="another process has come to the store as rank 0"):
        first[0].is_repeated()
    stale = store.get("farflung/test/1")
    waiting = Background(partial(meeting(store, 1, for_s=1.0).exchange, "one"))
    before = until(store, "farflung/test/1", stale)
    with pytest.raises(DeadlinePassed):
        meeting(store, 1, for_s=0.0).exchange("another")
    assert store.get("farflung/test/1") != before
    assert "another process has come to the store as rank 1" in str(waiting.result())


# --- who does not come --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("missing", range(3))
def test_who_does_not_come_is_named(missing: int, stale: bool) -> None:
    store = dist.HashStore()
    if stale:
        lives(store, "a")
    others = [rank for rank in range(3) if rank != missing]
    for error in exchanged([meeting(store, rank, for_s=0.3) for rank in others], ["", ""]):
        assert isinstance(error, DeadlinePassed)
        assert error.rank == missing
        assert "for its address in the store" in str(error)


def test_who_does_not_confirm_is_named() -> None:
    ranks = [meeting(dist.HashStore(), 0, 1)]
    assert ranks[0].exchange("alone") == {0: "alone"}
    assert ranks[0].try_confirm()
    store = dist.HashStore()
    ranks = [meeting(store, rank, for_s=0.5) for rank in range(3)]
    exchanged(ranks, ["", "", ""])
    ranks[1].try_confirm()
    with pytest.raises(DeadlinePassed, match=r"lost rank 2: .* its word that it has met all others"):
        ranks[0].try_confirm()
    assert ranks[0].try_confirm(is_due=lambda rank: rank != 2), "it is known to be lost"


def test_who_was_lost_is_named_and_not_who_waits_for_it() -> None:
    store = dist.HashStore()
    ranks = [meeting(store, rank, for_s=0.5) for rank in range(3)]
    exchanged(ranks, "abc")
    with pytest.raises(
        DeadlinePassed, match="lost rank 2"
    ):  # rank 1 does not confirm, since it waits for rank 2
        ranks[0].try_confirm(is_due=lambda rank: rank != 2)


def test_unlike_numbers_of_ranks_are_told() -> None:
    store = dist.HashStore()
    _, error = in_threads(
        lambda: meeting(store, 0, 2).exchange(""), lambda: meeting(store, 1, 3).exchange("")
    )
    assert isinstance(error, ProtocolError)
    assert "rank 0 meets 2 ranks, and rank 1 3" in str(error)


def test_a_store_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(_: object, keys: Collection[str]) -> bool:
        raise dist.DistStoreError("connection reset")

    monkeypatch.setattr(dist.HashStore, "check", ended)
    with pytest.raises(DeadlinePassed, match=r"lost rank 0: .* its address in the store \(DistStoreError\)"):
        meeting(dist.HashStore(), 1, 2).exchange("")


# --- what the leader says before ----------------------------------------------------------------------------------


def test_who_asks_is_told_by_a_leader_that_is_there(store: dist.Store) -> None:
    for life in ("a", "b"):  # what the first has said is in the store when the second asks
        leader = meeting(store, 0, 2, advice=f"by {life}")

        def follower(life: str = life) -> str:
            told = ask_leader(store, "test", 1, "the folder", PATIENCE_S)
            meeting(store, 1, 2).exchange(life)
            return told

        asks = Background(follower)
        assert leader.exchange(life) == {0: life, 1: life}
        assert asks.result() == f"by {life}"
    with pytest.raises(DeadlinePassed, match=r"lost rank 0: .* for the folder in the store"):
        ask_leader(store, "test", 1, "the folder", 0.0)


# --- replicas -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_replica_that_comes_again_is_met_and_not_its_earlier_life(again: int) -> None:
    store = dist.HashStore()
    peer = Peer(again, "tcp://127.0.0.1:1", bytes(16)).to_json()
    ends = impostor(store, again, 3, peer)
    others = [
        Background(partial(WallRuntime, rank, 3, store, connect_timeout_s=PATIENCE_S))
        for rank in range(3)
        if rank != again
    ]
    ends()
    mine = WallRuntime(again, 3, store, connect_timeout_s=PATIENCE_S)
    runtimes = [mine, *(one.result() for one in others)]

    async def greets(runtime: WallRuntime) -> list[float]:
        rest = [rank for rank in range(3) if rank != runtime.comm.rank]
        for rank in rest:
            runtime.comm.send(numbered(runtime.comm.rank), rank, tag(1))
        return [number_in(await runtime.comm.recv(rank, tag(1))) for rank in rest]

    said = [runtime.launch(greets(runtime)) for runtime in runtimes]
    assert sorted(itertools.chain(*(one.wait() for one in said))) == [0, 0, 1, 1, 2, 2]
    parted(runtimes)


def test_the_backends_collectives_find_no_keys_of_an_earlier_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def group(store: dist.Store, rank: int, *_: object) -> Any:
        found.append(store.check([f"{rank}"]))
        store.set(f"{rank}", "the address of a process that ends")
        return mock.Mock()

    monkeypatch.setattr("farflung.wall.runtime._create_gloo", group)
    store = dist.HashStore()
    for _ in range(2):
        parted(joined(2, store, is_native=True))
    assert found == [False] * 4
