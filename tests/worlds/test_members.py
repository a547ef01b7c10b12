"""Members of a view that is not whole: one is lost, a wait is given up, an answer is late; the same in both worlds."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farflung.comm import LinkModel
from farflung.errors import DeadlinePassed, FarflungError, PeerLost, WaitEnded
from farflung.faults import FaultPlan
from farflung.runtime import VirtualWorld, WallRuntime
from farflung.tasks import Pending
from farflung.types import Payload, Runtime
from tests.forks import Fork
from tests.helpers import PATIENCE_S, in_threads, number_in, numbered, tag

SIZE = 5
VICTIM = 4
HERE, GO, SUMS, ASK, LATE, AFTER, NEVER = range(1, 8)


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
    seen.append(await comm.departure())
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
        comm.forget(LATE)
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
    runtime = WallRuntime(VICTIM, SIZE, dist.FileStore(meeting, SIZE), whole=False, join_s=PATIENCE_S)
    runtime.launch(victim(runtime)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def lives(rank: int, meeting: str) -> tuple[list[Any], int]:
    runtime = WallRuntime(rank, SIZE, dist.FileStore(meeting, SIZE), whole=False, join_s=PATIENCE_S)
    try:
        return runtime.launch(survivor(runtime)).wait(), runtime.view.mailbox.dropped
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
    world = VirtualWorld(SIZE, LinkModel(0.01), faults=plan, whole=False)

    async def stays(runtime: Runtime) -> list[Any]:
        await victim(runtime)
        await runtime.sleep_until(2.0)
        raise AssertionError("it has crashed")

    bodies: list[Coroutine[Pending[Any], None, list[Any]]] = [
        (stays if runtime.comm.rank == VICTIM else survivor)(runtime) for runtime in world.runtimes
    ]
    found = world.run(bodies)
    return [(seen, world.network.mailboxes[rank].dropped) for rank, seen in enumerate(found)]


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


def test_a_view_that_is_whole_ends_with_its_first_loss() -> None:
    async def body(runtime: Runtime) -> Payload:
        if runtime.comm.rank == VICTIM:
            await runtime.sleep_until(9.0)
        return await runtime.comm.recv((runtime.comm.rank + 1) % SIZE, tag(SUMS))

    plan = FaultPlan().crash(VICTIM, at_s=1.0)
    world = VirtualWorld(SIZE, LinkModel(0.01), faults=plan)
    with pytest.raises(PeerLost, match=f"lost rank {VICTIM}"):
        world.run([body(runtime) for runtime in world.runtimes])


def test_who_has_ended_is_gone_for_the_others_in_virtual_time() -> None:
    async def body(runtime: Runtime) -> tuple[int, str]:
        comm = runtime.comm
        if comm.rank == 1:
            comm.send(Payload((torch.tensor([3.0]),)), 0, tag(HERE))
            return 0, ""
        rank = await comm.departure()
        return rank, str(await error_of(comm.recv(rank, tag(GO))))

    world = VirtualWorld(2, LinkModel(0.01), whole=False)
    assert world.run([body(runtime) for runtime in world.runtimes])[0] == (
        1,
        "lost rank 1: it had left the run",
    )
