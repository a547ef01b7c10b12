"""What goes wrong in virtual time: exact times, and the errors of the real world."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import torch

from farflung.config import Training
from farflung.errors import DeadlinePassed, PeerLost, Unsupported
from farflung.faults import FaultPlan
from farflung.loop import Replica, Summary
from farflung.recipes import parse_recipe
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.telemetry import Event, Telemetry
from farflung.types import Cost, Payload, Runtime
from farflung.workloads import create_workload
from tests.helpers import number_in, numbered, tag

pytestmark = pytest.mark.usefixtures("unframed")

T = TypeVar("T")

LINK = LinkModel(
    latency_s=0.5, bandwidth_bps=32.0
)  # a number takes a second, and arrives half a second later


def driven(
    size: int,
    plan: FaultPlan,
    body: Callable[[Runtime], Coroutine[Pending[Any], None, T]],
    seconds_per_sample: float = 0.0,
) -> list[T]:
    world = VirtualWorld(size, LINK, seconds_per_sample, faults=plan, deadline_s=60.0)
    return world.run([body(runtime) for runtime in world.runtimes])


async def passes(runtime: Runtime) -> list[tuple[float, float]]:
    """Rank 0 sends three numbers, at 0, 0 and 5 s; rank 1 tells what came when."""
    if runtime.comm.rank == 0:
        runtime.comm.send(numbered(1.0), 1, tag(1))
        runtime.comm.send(numbered(2.0), 1, tag(2))
        await runtime.sleep_until(5.0)
        runtime.comm.send(numbered(3.0), 1, tag(3))
        return []
    came = []
    for number in (1, 2, 3):
        came.append((number_in(await runtime.comm.recv(0, tag(number))), runtime.read_clock()))
    return came


@pytest.mark.parametrize(
    ("plan", "times"),
    [
        (FaultPlan().cut(0, at_s=100.0), [1.5, 2.5, 6.5]),
        (FaultPlan().cut(0, 1, at_s=1.25).restore(1, 0, at_s=4.25), [4.5, 5.5, 6.5]),
        (FaultPlan().cut(1, at_s=1.25).restore(1, at_s=10.25), [10.5, 11.5, 11.75]),
        (
            FaultPlan().cut(0, at_s=0.5).restore(0, at_s=1.0).cut(0, at_s=2.25).restore(0, at_s=2.75),
            [2.0, 3.5, 6.5],
        ),
        (FaultPlan().cut(0, at_s=0.5, for_s=0.5).cut(0, 1, at_s=2.25, for_s=0.5), [2.0, 3.5, 6.5]),
    ],
    ids=["after all", "in the middle", "beyond the next", "twice", "for a time"],
)
def test_a_cut_link_holds_messages_up_for_exactly_as_long(plan: FaultPlan, times: list[float]) -> None:
    came = driven(2, plan, passes)[1]
    assert came == [(float(number), t) for number, t in enumerate(times, start=1)]


@pytest.mark.parametrize(
    ("plan", "times"),
    [
        # Half of the first is left at 0.5 and takes 2 s; the delay is what it was.
        (FaultPlan().throttle(0, bandwidth_bps=8.0, at_s=0.5), [3.0, 7.0, 11.0]),
        (FaultPlan().throttle(1, 0, bandwidth_bps=8.0, at_s=0.5).restore(0, 1, at_s=2.5), [3.0, 4.0, 6.5]),
        (FaultPlan().throttle(0, bandwidth_bps=64.0, at_s=0.5), [1.5, 2.5, 6.5]),
        # At 1.5 a quarter of the first is left.
        (
            FaultPlan()
            .throttle(0, 1, bandwidth_bps=8.0, at_s=0.5)
            .throttle(0, 1, bandwidth_bps=2.0, at_s=1.5),
            [6.0, 22.0, 38.0],
        ),
        (
            FaultPlan()
            .throttle(0, 1, bandwidth_bps=8.0, at_s=0.5)
            .throttle(1, 0, bandwidth_bps=16.0, at_s=1.5),
            [2.5, 4.5, 7.5],
        ),
        (FaultPlan().throttle(0, 1, bandwidth_bps=8.0, at_s=0.5).restore(0, 1, at_s=1.5), [2.25, 3.25, 6.5]),
        # A lost half of the packets takes half of the bandwidth.
        (FaultPlan().lose(0, 1, loss=0.5, at_s=0.5), [2.0, 4.0, 7.5]),
        (FaultPlan().lose(0, 1, loss=0.5, at_s=0.5).restore(0, 1, at_s=3.5), [2.0, 4.0, 6.5]),
        (FaultPlan().lose(0, 1, loss=0.5, at_s=0.5, for_s=3.0), [2.0, 4.0, 6.5]),
        # The second ends first, and then the first holds again.
        (
            FaultPlan()
            .throttle(0, 1, bandwidth_bps=16.0, at_s=0.5)
            .throttle(0, 1, bandwidth_bps=8.0, at_s=0.5, for_s=1.0),
            [2.5, 4.5, 7.5],
        ),
    ],
    ids=[
        "throttled",
        "for a while",
        "above what there is",
        "then less",
        "then more",
        "then all",
        "lossy",
        "lossy for a while",
        "lossy for a time",
        "one in another",
    ],
)
def test_less_bandwidth_counts_from_the_middle_of_a_message(plan: FaultPlan, times: list[float]) -> None:
    came = driven(2, plan, passes)[1]
    assert came == [(float(number), t) for number, t in enumerate(times, start=1)]


def test_a_cut_between_two_leaves_others_alone() -> None:
    async def body(runtime: Runtime) -> float:
        if runtime.comm.rank == 0:
            runtime.comm.send(numbered(1.0), 1, tag())
            runtime.comm.send(numbered(1.0), 2, tag())
            return 0.0
        await runtime.comm.recv(0, tag())
        return runtime.read_clock()

    assert driven(3, FaultPlan().cut(0, 1, at_s=0.0).restore(0, at_s=9.0), body) == [0.0, 10.5, 1.5]


def test_a_hang_stops_computations_half_way() -> None:
    async def body(runtime: Runtime) -> tuple[float, float]:
        await runtime.compute(Cost("forward", 4), lambda: None)
        first = runtime.read_clock()
        await runtime.compute(Cost("forward", 4), lambda: None)
        return first, runtime.read_clock()

    for plan in (
        FaultPlan().hang(1, at_s=3.0).restore(1, at_s=13.0),
        FaultPlan().hang(1, at_s=3.0, for_s=10.0),
    ):
        assert driven(2, plan, body, 0.5) == [(2.0, 4.0), (2.0, 14.0)]


def test_slow_holds_until_it_is_restored() -> None:
    async def body(runtime: Runtime) -> list[float]:
        ends = []
        for _ in range(3):
            await runtime.compute(Cost("forward", 4), lambda: None)
            ends.append(runtime.read_clock())
        return ends

    slow = FaultPlan().slow(1, factor=3.0, at_s=1.0)
    for plan in (slow.restore(1, at_s=7.0), FaultPlan().slow(1, factor=3.0, at_s=1.0, for_s=6.0)):
        assert driven(2, plan, body, 0.5) == [[2.0, 4.0, 6.0], [2.0, 8.0, 10.0]]


# --- silence ------------------------------------------------------------------------------------------------------

WATCHED = FaultPlan().slow(0, factor=1.0, at_s=0.0)
"""Changes nothing, but deadlines are watched."""
SLOW_LINK = LinkModel(latency_s=0.01, bandwidth_bps=1e6)


def relayed(plan: FaultPlan, *, seconds: float = 0.0, nbytes: int = 4 << 20) -> VirtualWorld:
    """Rank 0 computes and sends to 1, which sends that on to 2, over links where it takes half a minute each time."""
    world = VirtualWorld(3, SLOW_LINK, 1.0, faults=plan, deadline_s=2.0)

    async def body(runtime: Runtime) -> float:
        rank, large = runtime.comm.rank, Payload((torch.zeros(nbytes, dtype=torch.uint8),))
        for _ in range(round(seconds)):
            if rank == 0:
                await runtime.compute(Cost("forward", 1), lambda: None)
        if rank > 0:
            await runtime.comm.recv(rank - 1, tag(1))
        if rank < 2:
            await runtime.comm.send(large, rank + 1, tag(1))
        return runtime.read_clock()

    world.run([body(runtime) for runtime in world.runtimes])
    return world


def test_what_is_under_way_is_waited_for_and_what_waits_for_it() -> None:
    assert 67 < relayed(WATCHED).clock.time() < 70


def test_a_rank_that_computes_is_waited_for() -> None:
    assert 97 < relayed(WATCHED, seconds=30.0).clock.time() < 100


def test_a_rank_that_computes_one_thing_for_long_is_given_up() -> None:
    with pytest.raises(DeadlinePassed, match=r"lost rank 0: .* it answers, but has made no progress for 20"):
        relayed(WATCHED.slow(0, factor=25.0, at_s=0.0), seconds=2.0)
    assert relayed(WATCHED.slow(0, factor=15.0, at_s=0.0), seconds=2.0).clock.time() > 80


@pytest.mark.parametrize(("cut", "lost"), [((0, 1), 0), ((1, 2), 1)])
def test_what_a_cut_holds_up_is_silent(cut: tuple[int, int], lost: int) -> None:
    at_s = 50.0 if lost else 20.0
    with pytest.raises(DeadlinePassed, match=rf"lost rank {lost}: .* nothing has arrived for 2") as caught:
        relayed(WATCHED.cut(*cut, at_s=at_s))
    assert at_s + 1.4 < caught.value.waited_s < at_s + 2.1


def test_what_drips_is_given_up() -> None:
    with pytest.raises(DeadlinePassed, match=r"lost rank 0: .* has made no progress for 2"):
        relayed(WATCHED.throttle(0, 1, bandwidth_bps=1e3, at_s=10.0))


# --- whole replicas ---------------------------------------------------------------------------------------------


def trained(plan: FaultPlan, size: int = 3, steps: int = 6) -> tuple[list[Summary], dict[int, list[Event]]]:
    """A small run with faults; its summaries and its events."""
    task = create_workload("synthetic/quadratic")
    training = Training(steps=steps, batch_size=4, learning_rate=0.05, evaluate_every=2)
    world = VirtualWorld(size, LinkModel(0.05, 1e6), 0.001, faults=plan, deadline_s=30.0)
    events: dict[int, list[Event]] = {rank: [] for rank in range(size)}
    replicas = [
        Replica(
            runtime,
            task,
            training,
            parse_recipe("synchronous").build_components(training.seed),
            Telemetry(rank, events[rank].append, world.injector),
        )
        for rank, runtime in enumerate(world.runtimes)
    ]
    return world.run([replica.run() for replica in replicas]), events


@pytest.mark.parametrize("plan", [FaultPlan().crash(2, at_step=3), FaultPlan().crash(2, at_s=0.2)])
def test_a_crash_is_seen_as_a_closed_connection(plan: FaultPlan) -> None:
    with pytest.raises(PeerLost) as caught:
        trained(plan)
    assert caught.value.rank == 2
    assert str(caught.value) == "lost rank 2: its connection was closed from its end"


def test_a_single_replica_that_crashes_is_lost_too() -> None:
    with pytest.raises(PeerLost, match=r"lost rank 0"):
        trained(FaultPlan().crash(0, at_step=2), size=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_is_noticed_by_the_deadline_and_named(rank: int) -> None:
    with pytest.raises(DeadlinePassed) as caught:
        trained(FaultPlan().hang(rank, at_step=3))
    assert caught.value.rank == rank
    assert str(caught.value).startswith(f"lost rank {rank}: waited 30.0 s for the exchange at step 3, ")


def test_a_cut_that_lasts_is_noticed_by_the_deadline() -> None:
    with pytest.raises(DeadlinePassed, match=r"waited 30\.0 s"):
        trained(FaultPlan().cut(1, at_step=3))


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().hang(1, at_step=2).restore(1, at_s=20.0),
        FaultPlan().cut(0, 2, at_step=2).restore(0, at_s=20.0),
        FaultPlan().slow(1, factor=50.0, at_step=1),
        FaultPlan().throttle(1, bandwidth_bps=1e3, at_step=1).restore(1, at_s=20.0),
    ],
    ids=["hang", "cut", "slow", "throttle"],
)
def test_what_passes_changes_the_time_and_nothing_else(plan: FaultPlan) -> None:
    undisturbed, _ = trained(FaultPlan())
    summaries, _ = trained(plan)
    assert summaries[0].duration_s > undisturbed[0].duration_s
    for disturbed, one in zip(summaries, undisturbed, strict=True):
        assert (disturbed.final_loss, disturbed.bytes_sent) == (one.final_loss, one.bytes_sent)
    again, _ = trained(plan)
    assert again == summaries


def test_a_plan_that_never_strikes_changes_no_time() -> None:
    """The watched world has the gates of faults in its way."""
    assert trained(FaultPlan().hang(0, at_step=1000)) == trained(FaultPlan())


@pytest.mark.parametrize("kind", ["join", "leave"])
def test_what_needs_a_change_of_members_is_refused_by_name(kind: str) -> None:
    says = f"{kind} of rank 1 at step 3: virtual time supports only crash, cut, "
    with pytest.raises(Unsupported, match=f"{says}.* members come and go with VirtualWorld"):
        trained(getattr(FaultPlan(), kind)(1, at_step=3))
