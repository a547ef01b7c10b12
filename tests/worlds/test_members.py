"""Members of a view that is not whole, the same in both worlds.

One is lost, one comes late, leaves and comes again; a wait is given up, an answer is late, an urgent message overtakes.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farflung.comm import Endpoint
from farflung.errors import ConfigError, DeadlinePassed, FarflungError, PeerLost, RunLost, WaitEnded
from farflung.faults import FaultPlan
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload, Runtime
from farflung.wall import WallRuntime
from tests.forks import Fork
from tests.helpers import PATIENCE_S, admitted, coming_late, in_threads, number_in, numbered, tag

pytestmark = pytest.mark.usefixtures("unframed")

SIZE = 5
VICTIM = 4
HERE, GO, SUMS, ASK, LATE, AFTER, NEVER, BULK = range(1, 9)


async def victim(runtime: Runtime) -> None:
    """Is lost once rank 0 has heard of it."""
    runtime.comm.send(numbered(VICTIM), 0, tag(HERE))
    await runtime.comm.recv(0, tag(GO))


async def error_of(pending: Pending[Any]) -> FarflungError:
    try:
        await pending
    except FarflungError as error:
        return error
    raise AssertionError("it was done")


async def survivor(runtime: Runtime) -> list[Any]:
    """What one of the others sees and does."""
    comm, seen = runtime.comm, list[Any]()
    if comm.rank == 0:
        src, payload = await comm.recv_any(tag(HERE))
        seen.append((src, number_in(payload)))
        comm.send(numbered(0), VICTIM, tag(GO))
    lost = comm.recv(VICTIM, tag(SUMS))
    seen.append(await comm.wait_for_leave())
    error = await error_of(lost)
    assert isinstance(error, PeerLost)
    seen.append((error.rank, str(await error_of(comm.recv(VICTIM, tag(ASK))))))
    left = [rank for rank in range(SIZE) if rank not in (comm.rank, VICTIM)]
    for turn in range(3):
        for other in left:
            comm.send(numbered(10 * turn + comm.rank), other, tag(SUMS, turn))
        came = [number_in(await comm.recv(other, tag(SUMS, turn))) for other in left]
        seen.append(sum(came))
    if comm.rank == 0:
        given_up = comm.recv(1, tag(LATE))
        comm.cancel_exchange(LATE)
        seen.append(type(await error_of(given_up)))
        own = await error_of(comm.recv(2, tag(NEVER), deadline_s=0.05))
        assert isinstance(own, DeadlinePassed)
        seen.append(own.rank)
        comm.send(numbered(0), 1, tag(ASK))
        seen.append(number_in(await comm.recv(1, tag(AFTER))))
        seen.append(type(await error_of(comm.recv(1, tag(LATE)))))
        comm.send(numbered(0), 2, tag(GO))
    elif comm.rank == 1:
        await comm.recv(0, tag(ASK))
        comm.send(numbered(1), 0, tag(LATE))
        comm.send(numbered(2), 0, tag(AFTER))
    elif comm.rank == 2:
        await comm.recv(0, tag(GO), deadline_s=math.inf)
    return seen


def dies(meeting: str) -> None:
    runtime = WallRuntime(
        VICTIM, SIZE, dist.FileStore(meeting, SIZE), members=range(SIZE), connect_timeout_s=PATIENCE_S
    )
    runtime.launch(victim(runtime)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def lives(rank: int, meeting: str) -> tuple[list[Any], int]:
    runtime = WallRuntime(
        rank, SIZE, dist.FileStore(meeting, SIZE), members=range(SIZE), connect_timeout_s=PATIENCE_S
    )
    try:
        return runtime.launch(survivor(runtime)).wait(), runtime.session.mailbox.num_dropped
    finally:
        runtime.close()


def on_the_wall(folder: Path) -> list[tuple[list[Any], int]]:
    meeting = str(folder / "store")
    with Fork(partial(dies, meeting)):
        found = in_threads(*(partial(lives, rank, meeting) for rank in range(SIZE - 1)))
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found  # type: ignore[return-value]


def in_virtual_time() -> list[tuple[list[Any], int]]:
    plan = FaultPlan().crash(VICTIM, at_s=1.0)
    world = VirtualWorld(SIZE, LinkModel(0.01), faults=plan, needs_all_members=False)

    async def stays(runtime: Runtime) -> list[Any]:
        await victim(runtime)
        await runtime.sleep_until(2.0)
        raise AssertionError("it has crashed")

    bodies: list[Coroutine[Pending[Any], None, list[Any]]] = [
        (stays if runtime.comm.rank == VICTIM else survivor)(runtime) for runtime in world.runtimes
    ]
    found = world.run(bodies)
    return [(seen, world.network.mailboxes[rank].num_dropped) for rank, seen in enumerate(found)]


@pytest.fixture
def expected() -> list[tuple[list[Any], int]]:
    lost = (VICTIM, f"lost rank {VICTIM}: its connection was closed from its end")
    sums = [[6 - rank + 30 * turn for turn in range(3)] for rank in range(4)]
    begin: list[Any] = [(VICTIM, float(VICTIM))]
    end: list[Any] = [WaitEnded, 2, 2.0, WaitEnded]
    first = ([*begin, VICTIM, lost, *sums[0], *end], 1)
    return [first, *(([VICTIM, lost, *sums[rank]], 0) for rank in range(1, 4))]


def test_in_virtual_time(expected: list[tuple[list[Any], int]]) -> None:
    assert in_virtual_time() == expected


def test_on_the_wall(expected: list[tuple[list[Any], int]], tmp_path: Path) -> None:
    assert on_the_wall(tmp_path) == expected


def test_who_has_ended_is_gone_for_the_others_in_virtual_time() -> None:
    async def body(runtime: Runtime) -> tuple[int, str]:
        comm = runtime.comm
        if comm.rank == 1:
            comm.send(Payload((torch.tensor([3.0]),)), 0, tag(HERE))
            return 0, ""
        rank = await comm.wait_for_leave()
        return rank, str(await error_of(comm.recv(rank, tag(GO))))

    world = VirtualWorld(2, LinkModel(0.01), needs_all_members=False)
    assert world.run([body(runtime) for runtime in world.runtimes])[0] == (
        1,
        "lost rank 1: it had left the run",
    )


# --- coming and going -------------------------------------------------------------------------------------------

HOSTS = (0, 1)
LATECOMER = 2
LATENCY_S = 0.01
GONE = f"lost rank {LATECOMER}: its connection is gone"
LEFT = f"lost rank {LATECOMER}: it had left the run"


async def host(runtime: Runtime, admit: Callable[[], object] = lambda: None) -> tuple[list[Any], list[float]]:
    """What a member sees of one that comes, leaves and comes again; and when it hears of each."""
    comm, seen, when = runtime.comm, list[Any](), list[float]()
    for last in (False, True):
        seen.append(str(await error_of(comm.send(numbered(0), LATECOMER, tag(ASK)))))
        admit()
        # A wait for who is not there yet is a wait; one for who has left fails, until it comes again.
        early = None if last else comm.recv(LATECOMER, tag(HERE))
        seen.append(await comm.wait_for_join())
        when.append(runtime.read_clock())
        seen.append(number_in(await (early or comm.recv(LATECOMER, tag(HERE)))))
        comm.send(numbered(comm.rank), LATECOMER, tag(GO))
        never = comm.recv(LATECOMER, tag(NEVER))
        seen.append(await comm.wait_for_leave())
        when.append(runtime.read_clock())
        seen.append(str(await error_of(never)))
    # Hosts leave together: else one may hear of the other's leave before it hears of the newcomer's.
    other = next(rank for rank in HOSTS if rank != comm.rank)
    comm.send(numbered(0), other, tag(AFTER))
    await comm.recv(other, tag(AFTER))
    return seen, when


async def latecomer(runtime: Runtime, number: float, *, stays: bool) -> list[float]:
    """Meets the hosts, and stays until it is made to leave, or leaves by itself."""
    for rank in HOSTS:
        runtime.comm.send(numbered(number), rank, tag(HERE))
    came = [number_in(await runtime.comm.recv(rank, tag(GO))) for rank in HOSTS]
    if stays:
        await runtime.comm.recv(0, tag(NEVER), deadline_s=math.inf)
    return came


def test_one_comes_leaves_and_comes_again_in_virtual_time() -> None:
    plan = FaultPlan().join(LATECOMER, at_s=1.0).leave(LATECOMER, at_s=5.0).join(LATECOMER, at_s=9.0)
    world = VirtualWorld(3, LinkModel(LATENCY_S), faults=plan, needs_all_members=False)
    bodies: list[Coroutine[Pending[Any], None, Any]] = [host(world.runtimes[rank]) for rank in HOSTS]
    bodies.append(latecomer(world.runtimes[LATECOMER], 8.0, stays=True))
    *hosts, newcomer = world.run(bodies, build_rejoined=partial(latecomer, number=7.0, stays=False))
    for seen, when in hosts:
        assert seen == [GONE, 2, 8.0, 2, LEFT, GONE, 2, 7.0, 2, LEFT]
        # Each a delay later; the second time it leaves once it has heard the hosts, who had heard it.
        assert when == pytest.approx([1 + LATENCY_S, 5 + LATENCY_S, 9 + LATENCY_S, 9 + 3 * LATENCY_S])
    assert newcomer == [0.0, 1.0]


def as_host(rank: int, meeting: dist.Store) -> list[Any]:
    runtime = WallRuntime(rank, 3, meeting, members=HOSTS, connect_timeout_s=PATIENCE_S)
    try:
        body = host(runtime, lambda: admitted(runtime, meeting, LATECOMER, join_s=PATIENCE_S))
        return runtime.launch(body).wait()[0]
    finally:
        runtime.close()


def as_latecomer(meeting: dist.Store) -> list[list[float]]:
    """Twice, as two processes would one after the other."""
    found = []
    for number in (8.0, 7.0):
        come = coming_late(meeting, HOSTS)
        runtime = WallRuntime(
            LATECOMER, 3, None, announce=come, members=range(3), connect_timeout_s=PATIENCE_S
        )
        found.append(runtime.launch(latecomer(runtime, number, stays=False)).wait())
        meeting.delete_key(f"late/{LATECOMER}")  # is not taken for that of the next one
        runtime.close()
    return found


def test_one_comes_leaves_and_comes_again_on_the_wall() -> None:
    meeting = dist.HashStore()
    *hosts, newcomer = in_threads(
        *(partial(as_host, rank, meeting) for rank in HOSTS), partial(as_latecomer, meeting)
    )
    assert hosts == [[GONE, 2, 8.0, 2, LEFT, GONE, 2, 7.0, 2, LEFT]] * 2
    assert newcomer == [[0.0, 1.0]] * 2


async def hurried(runtime: Runtime) -> list[float]:
    """Rank 0 sends 4 MB and, while they are under way, a few urgent bytes: when these were sent, or else which of the
    two came first and when both were there."""
    comm = runtime.comm
    if comm.rank == 0:
        comm.send(Payload((torch.zeros(4_000_000, dtype=torch.uint8),)), 1, tag(BULK))
        await comm.recv(1, tag(GO))
        sent = runtime.read_clock()
        comm.send(numbered(3.0), 1, tag(ASK), priority=-1)
        await comm.recv(1, tag(AFTER))
        return [sent]
    comm.send(numbered(1), 0, tag(GO))
    both = [comm.recv(0, tag(ASK)), comm.recv(0, tag(BULK))]
    found = [float(await runtime.wait_any(*both)), runtime.read_clock()]
    for one in both:
        await one
    found.append(runtime.read_clock())
    comm.send(numbered(2), 0, tag(AFTER))
    return found


def test_an_urgent_message_waits_for_two_pieces_of_bulk_in_virtual_time() -> None:
    world = VirtualWorld(2, LinkModel(LATENCY_S, 10e6), needs_all_members=False)
    [sent], [first, heard, all_there] = world.run([hurried(runtime) for runtime in world.runtimes])
    assert first == 0
    # It is sent when 10 ms of the first piece have left: two of 64 KiB at 10 Mbit/s, 4 bytes, and the delay.
    assert sent == pytest.approx(LATENCY_S + 3.2e-6, abs=1e-12)
    assert heard == pytest.approx(2 * 8 * 65_536 / 10e6 + 3.2e-6 + LATENCY_S, abs=1e-12)
    assert all_there == pytest.approx(3.2 + 3.2e-6 + LATENCY_S)


def as_hurried(rank: int, meeting: dist.Store) -> list[float]:
    runtime = WallRuntime(rank, 2, meeting, endpoint=Endpoint(encrypt=True), connect_timeout_s=PATIENCE_S)
    try:
        return runtime.launch(hurried(runtime)).wait()
    finally:
        runtime.close()


def test_an_urgent_message_waits_for_no_bulk_on_the_wall() -> None:
    """Order alone; in the lab it crosses a link of 10 Mbit/s."""
    meeting = dist.HashStore()
    found = in_threads(*(partial(as_hurried, rank, meeting) for rank in range(2)))
    assert not any(isinstance(one, Exception) for one in found), found


async def waits_for_nobody(runtime: Runtime) -> list[int]:
    """Who came and who went, until a time."""
    told = list[int]()

    async def note(which: str) -> None:
        while True:
            rank = await getattr(runtime.comm, which)()
            told.append(rank if which == "wait_for_join" else -rank)

    for which in ("wait_for_join", "wait_for_leave"):
        runtime.launch(note(which))
    await runtime.sleep_until(20.0)
    return told


async def until_the_end(runtime: Runtime) -> list[int]:
    await runtime.sleep_until(20.0)
    return []


def told(plan: FaultPlan, link: LinkModel) -> list[int]:
    world = VirtualWorld(2, link, faults=plan, needs_all_members=False)
    bodies = [waits_for_nobody(world.runtimes[0]), until_the_end(world.runtimes[1])]
    return world.run(bodies, build_rejoined=until_the_end)[0]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (FaultPlan().crash(1, at_s=1.0).join(1, at_s=2.0).leave(1, at_s=3.0), [-1, 1, -1]),
        (FaultPlan().leave(1, at_s=1.0).leave(1, at_s=2.0), [-1]),
        (FaultPlan().leave(1, at_s=1.0).crash(1, at_s=2.0), [-1]),
        (FaultPlan().leave(1, at_s=1.0).join(1, at_s=1.0).join(1, at_s=4.0), [-1, 1]),
        (FaultPlan().join(1, at_s=1.0).hang(1, at_s=2.0, for_s=3.0).leave(1, at_s=3.0), [1, -1]),
        # Its greeting is held up until it is gone already: nobody has met it.
        (FaultPlan().join(1, at_s=1.0).cut(1, at_s=0.5, for_s=9.0).crash(1, at_s=2.0), []),
        # Its farewell is held up, and it is back.
        (FaultPlan().leave(1, at_s=1.0).cut(1, at_s=0.5, for_s=9.0).join(1, at_s=2.0), [-1, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("jitter_s", [0.0, 0.3])
def test_each_is_told_once_of_who_comes_and_goes(
    plan: FaultPlan, expected: list[int], jitter_s: float
) -> None:
    assert told(plan, LinkModel(0.3, jitter_s=jitter_s)) == expected


def test_a_farewell_comes_behind_what_was_sent_before() -> None:
    async def leaves(runtime: Runtime) -> list[Any]:
        runtime.comm.send(Payload((torch.zeros(125_000, dtype=torch.uint8),)), 0, tag(BULK), priority=1)
        await runtime.sleep_until(9.0)
        raise AssertionError("it has left")

    async def stays(runtime: Runtime) -> list[Any]:
        bulk = await runtime.comm.recv(1, tag(BULK))
        there, rank = runtime.read_clock(), await runtime.comm.wait_for_leave()
        return [bulk.nbytes, there, rank, runtime.read_clock()]

    # A megabit in two seconds, and a delay of half a second for both.
    world = VirtualWorld(
        2, LinkModel(0.5, 5e5), faults=FaultPlan().leave(1, at_s=1.0), needs_all_members=False
    )
    found = world.run([stays(world.runtimes[0]), leaves(world.runtimes[1])])
    assert found == [[125_000, 2.5, 1, 2.5]]


def test_who_comes_again_hears_nothing_that_was_for_the_one_before() -> None:
    """It is back before all has left that the one before has sent; the other is told of both nevertheless."""
    bulk = Payload((torch.zeros(125_000, dtype=torch.uint8),))

    async def stays(runtime: Runtime) -> list[Any]:
        runtime.comm.send(bulk, 1, tag(BULK))
        seen = [(await runtime.comm.recv(1, tag(BULK))).nbytes]
        seen += [await runtime.comm.wait_for_leave(), await runtime.comm.wait_for_join()]
        runtime.comm.send(numbered(5), 1, tag(GO))
        return [*seen, number_in(await runtime.comm.recv(1, tag(AFTER)))]

    async def first(runtime: Runtime) -> list[Any]:
        runtime.comm.send(bulk, 0, tag(BULK))
        await runtime.sleep_until(99.0)
        raise AssertionError("it has left")

    async def again(runtime: Runtime) -> list[Any]:
        error = await error_of(runtime.comm.recv(0, tag(BULK), deadline_s=9.0))
        assert isinstance(error, DeadlinePassed)
        found = number_in(await runtime.comm.recv(0, tag(GO)))
        runtime.comm.send(numbered(6), 0, tag(AFTER))
        return [found]

    plan = FaultPlan().leave(1, at_s=0.1).join(1, at_s=0.2)
    world = VirtualWorld(2, LinkModel(0.05, 5e5), faults=plan, needs_all_members=False)
    found = world.run([stays(world.runtimes[0]), first(world.runtimes[1])], build_rejoined=again)
    assert found == [[125_000, 1, 1, 6.0], [5.0]]


def test_nothing_of_who_has_crashed_goes_on_when_it_comes_again() -> None:
    async def crashes(runtime: Runtime) -> list[int]:
        await runtime.sleep_until(5.0)
        raise AssertionError("it has crashed")

    world = VirtualWorld(2, faults=FaultPlan().crash(1, at_s=1.0).join(1, at_s=2.0), needs_all_members=False)
    bodies = [waits_for_nobody(world.runtimes[0]), crashes(world.runtimes[1])]
    assert world.run(bodies, build_rejoined=until_the_end) == [[-1, 1], []]


def test_who_comes_again_needs_something_to_run() -> None:
    plan = FaultPlan().leave(1, at_s=1.0).join(1, at_s=2.0)
    world = VirtualWorld(2, faults=plan, needs_all_members=False)
    with pytest.raises(ConfigError, match=r"rank 1 comes in again: say what it runs"):
        world.run([until_the_end(runtime) for runtime in world.runtimes])


def test_waiting_for_somebody_who_never_comes_ends_the_run() -> None:
    async def body(runtime: Runtime) -> None:
        await runtime.comm.wait_for_join()

    world = VirtualWorld(2, faults=FaultPlan().join(1, at_step=5), needs_all_members=False)
    with pytest.raises(RunLost, match="rank 0 waits for something other than a message"):
        world.run([body(runtime) for runtime in world.runtimes])


def test_a_wait_for_who_is_not_there_has_a_deadline() -> None:
    async def body(runtime: Runtime) -> str:
        return str(await error_of(runtime.comm.recv(1, tag(HERE))))

    plan = FaultPlan().join(1, at_s=99.0)
    world = VirtualWorld(2, faults=plan, needs_all_members=False, deadline_s=5.0)
    assert "rank 1" in world.run([body(world.runtimes[0]), body(world.runtimes[1])])[0]
