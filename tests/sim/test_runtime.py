"""Virtual time is exact, deterministic, and says who waits for whom when nothing moves any more."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import RunLost
from farflung.seeding import RandomState
from farflung.sim import LinkModel, VirtualClock, VirtualWorld
from farflung.tasks import Pending
from farflung.types import Cost, Decision, Json, Payload, Runtime
from tests.helpers import in_virtual_time, number_in, numbered, tag

pytestmark = pytest.mark.usefixtures("unframed")

KILOBYTE = Payload((torch.zeros(250),))
LINK = LinkModel(latency_s=0.5, bandwidth_bps=8000.0)  # a kilobyte in a second, half a second later


# --- the clock --------------------------------------------------------------------------------------------------


def test_callbacks_run_at_their_times_in_order() -> None:
    clock, seen = VirtualClock(), []

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append((name, clock.time()))

    clock.call_at(2.0, note("c"))
    clock.call_at(1.0, note("b"))
    clock.call_at(1.0, note("b after"))
    clock.call_at(1.0, note("b before"), priority=-1)
    clock.call_soon(note("a"))

    def more() -> None:
        clock.call_soon(note("soon"))
        clock.call_at(0.0, note("late"))

    clock.call_at(1.0, more, priority=-2)
    clock.run()
    assert seen == [
        ("a", 0.0),
        ("soon", 1.0),
        ("b before", 1.0),
        ("b", 1.0),
        ("b after", 1.0),
        ("late", 1.0),
        ("c", 2.0),
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 2)), max_size=30))
def test_ties_are_broken_by_priority_and_then_by_who_asked_first(asked: list[tuple[int, int]]) -> None:
    clock, seen = VirtualClock(), []
    for index, (t, priority) in enumerate(asked):
        clock.call_at(float(t), lambda index=index: seen.append(index), priority)  # type: ignore[misc]
    clock.run()
    assert seen == sorted(range(len(asked)), key=lambda index: asked[index])


# --- messages ---------------------------------------------------------------------------------------------------


async def deliver(runtime: Runtime, sends: list[tuple[int, int, int]]) -> tuple[list[float], list[float]]:
    """Sends kilobytes as ``(src, dst, how many)`` says; when own ones had left and others' arrived."""
    rank = runtime.comm.rank
    mine = [(dst, k) for src, dst, count in sends if src == rank for k in range(count)]
    theirs = [(src, k) for src, dst, count in sends if dst == rank for k in range(count)]
    leaving = [runtime.comm.send(KILOBYTE, dst, tag(k)) for dst, k in mine]
    arriving = [runtime.comm.recv(src, tag(k)) for src, k in theirs]
    left, arrived = [], []
    for pending in leaving:
        await pending
        left.append(runtime.read_clock())
    for other in arriving:
        await other
        arrived.append(runtime.read_clock())
    return left, arrived


def test_a_message_takes_its_bytes_and_the_delay() -> None:
    results, _ = in_virtual_time(2, lambda r: deliver(r, [(0, 1, 1)]), LINK)
    assert results == [([1.0], []), ([], [1.5])]


def test_messages_in_one_direction_follow_each_other() -> None:
    results, seconds = in_virtual_time(2, lambda r: deliver(r, [(0, 1, 3)]), LINK)
    assert results == [([1.0, 2.0, 3.0], []), ([], [1.5, 2.5, 3.5])]
    assert seconds == 3.5


def test_links_and_directions_do_not_share() -> None:
    everybody = [(src, dst, 2) for src in range(3) for dst in range(3) if src != dst]
    results, seconds = in_virtual_time(3, lambda r: deliver(r, everybody), LINK)
    for left, arrived in results:
        assert left == [1.0, 2.0, 2.0, 2.0]  # awaited one after the other
        assert arrived == [2.0, 2.5, 2.5, 2.5]
    assert seconds == 2.5


def test_a_link_that_was_idle_owes_nothing() -> None:
    async def body(runtime: Runtime) -> float:
        if runtime.comm.rank == 0:
            await runtime.sleep_until(10.0)
            runtime.comm.send(KILOBYTE, 1, tag())
        else:
            await runtime.comm.recv(0, tag())
        return runtime.read_clock()

    assert in_virtual_time(2, body, LINK)[0] == [10.0, 11.5]


def test_tensors_change_hands_without_a_copy() -> None:
    sent = numbered(3)

    async def body(runtime: Runtime) -> Payload:
        runtime.comm.send(sent, 1 - runtime.comm.rank, tag())
        return await runtime.comm.recv(1 - runtime.comm.rank, tag())

    assert all(payload is sent for payload in in_virtual_time(2, body)[0])


# --- compute ----------------------------------------------------------------------------------------------------


def alone(
    body: Callable[[Runtime], Coroutine[Pending[Any], None, Any]], seconds_per_sample: float = 0.25
) -> Any:
    world = VirtualWorld(1, seconds_per_sample=seconds_per_sample)
    return world.run([body(world.runtimes[0])])[0]


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("forward", 2.0), ("backward", 4.0), ("evaluate", 2.0), ("score", 2.0), ("other", 0.0)],
)
def test_computing_takes_the_modelled_time(kind: Any, seconds: float) -> None:
    async def body(runtime: Runtime) -> tuple[float, str]:
        value = await runtime.compute(Cost(kind, samples=8), lambda: f"computed at {runtime.read_clock()}")
        return runtime.read_clock(), value

    # A forward pass at the end of its time, everything else at the beginning.
    assert alone(body) == (seconds, f"computed at {seconds if kind == 'forward' else 0.0}")


def test_a_forward_pass_is_computed_just_before_its_backward_pass() -> None:
    """So that the activations of one replica are there at a time."""
    seen: list[tuple[str, int]] = []

    async def body(runtime: Runtime) -> None:
        rank = runtime.comm.rank
        for _ in range(2):
            await runtime.compute(Cost("forward", 8), lambda: seen.append(("forward", rank)))
            await runtime.run_backward(
                Cost("backward", 8), lambda ready: seen.append(("backward", rank)), lambda bucket: None
            )

    world = VirtualWorld(3, seconds_per_sample=0.25)
    world.run([body(runtime) for runtime in world.runtimes])
    assert seen == [(what, rank) for rank in range(3) for what in ("forward", "backward")] * 2


def test_buckets_are_ready_at_even_steps_in_the_order_they_filled() -> None:
    async def body(runtime: Runtime) -> list[tuple[int | str, float]]:
        seen: list[tuple[int | str, float]] = []

        def fill(ready: Callable[[int], None]) -> None:
            for index in (2, 0, 3, 1):
                ready(index)

        await runtime.sleep_until(1.0)
        await runtime.run_backward(
            Cost("backward", 8), fill, lambda index: seen.append((index, runtime.read_clock()))
        )
        return [*seen, ("done", runtime.read_clock())]

    assert alone(body) == [(2, 2.0), (0, 3.0), (3, 4.0), (1, 5.0), ("done", 5.0)]


def test_a_backward_without_buckets_takes_its_time_too() -> None:
    async def body(runtime: Runtime) -> float:
        await runtime.run_backward(Cost("backward", 8), lambda ready: None, lambda index: None)
        return runtime.read_clock()

    assert alone(body) == 4.0


def test_an_error_in_a_computation_is_raised_where_it_is_awaited() -> None:
    async def body(runtime: Runtime) -> str:
        try:
            await runtime.compute(Cost("forward", 1), lambda: dict[str, float]()["loss"])
        except KeyError as error:
            return str(error)
        return "nothing"

    assert alone(body) == "'loss'"


def test_exchanges_run_beside_the_replica() -> None:
    async def exchange(runtime: Runtime) -> float:
        other = 1 - runtime.comm.rank
        runtime.comm.send(KILOBYTE, other, tag())
        await runtime.comm.recv(other, tag())
        return runtime.read_clock()

    async def body(runtime: Runtime) -> tuple[float, float, float]:
        under_way = runtime.launch(exchange(runtime))
        await runtime.compute(Cost("forward", 8), lambda: None)
        computed = runtime.read_clock()
        return computed, await under_way, runtime.read_clock()

    world = VirtualWorld(2, LINK, seconds_per_sample=0.125)
    assert world.run([body(runtime) for runtime in world.runtimes]) == [(1.0, 1.5, 1.5)] * 2


def test_first_of_several_in_time() -> None:
    async def body(runtime: Runtime) -> list[int]:
        late, early, tie = (runtime.sleep_until(t) for t in (3.0, 2.0, 2.0))
        return [await runtime.wait_any(late, early, tie), await runtime.wait_any(late, tie, early)]

    assert alone(body) == [1, 2]  # of two for the same time, the one asked for first


def test_sleeping_into_the_past_takes_no_time() -> None:
    async def body(runtime: Runtime) -> float:
        await runtime.sleep_until(4.0)
        await runtime.sleep_until(1.0)
        return runtime.read_clock()

    assert alone(body) == 4.0


# --- order ------------------------------------------------------------------------------------------------------


def test_a_run_repeats_event_for_event() -> None:
    def history(seed: int) -> list[tuple[float, int, float]]:
        seen: list[tuple[float, int, float]] = []

        async def body(runtime: Runtime) -> None:
            rng = random.Random(seed + runtime.comm.rank)
            others = [rank for rank in range(4) if rank != runtime.comm.rank]
            for turn in range(5):
                await runtime.sleep_until(runtime.read_clock() + rng.choice([0.0, 0.5, 1.0]))
                for other in others:
                    runtime.comm.send(numbered(runtime.comm.rank), other, tag(turn))
                for _ in others:
                    _, payload = await runtime.comm.recv_any(tag(turn))
                    seen.append((runtime.read_clock(), runtime.comm.rank, number_in(payload)))

        in_virtual_time(4, body, LinkModel(0.25))
        return seen

    assert history(1) == history(1)
    assert len(history(1)) == 60
    assert history(1) != history(2)


def test_the_outside_random_state_is_left_alone() -> None:
    async def body(runtime: Runtime) -> None:
        state = RandomState(runtime.comm.rank)
        for _ in range(3):
            state.install()
            torch.rand(3)
            await runtime.sleep_until(runtime.read_clock() + 1.0)

    before = torch.get_rng_state()
    in_virtual_time(3, body)
    assert torch.equal(torch.get_rng_state(), before)


# --- the end ----------------------------------------------------------------------------------------------------


def test_a_deadlock_says_who_waits_for_whom() -> None:
    async def body(runtime: Runtime) -> None:
        rank = runtime.comm.rank
        if rank == 0:
            await runtime.sleep_until(2.5)
            await runtime.comm.recv(1, tag(7, 1, 2))
        elif rank == 1:
            await runtime.comm.recv_any(tag(8))
        elif rank == 2:
            await Pending()

    with pytest.raises(RunLost) as caught:
        in_virtual_time(4, body)
    assert str(caught.value) == (
        "nothing is on its way at 2.500000 virtual seconds: "
        "rank 0 waits for rank 1 (the exchange at step 7, part 1, hop 2); "
        "rank 1 waits for any rank (the exchange at step 8, part 0, hop 0); "
        "rank 2 waits for something other than a message"
    )


def test_a_replicas_error_comes_before_the_deadlock_it_causes() -> None:
    async def body(runtime: Runtime) -> None:
        if runtime.comm.rank == 2:
            raise ValueError("bad batch")
        await runtime.comm.recv(2, tag())

    with pytest.raises(ValueError, match="bad batch"):
        in_virtual_time(3, body)


# --- decisions --------------------------------------------------------------------------------------------------


def test_rank_0_decides_for_everybody() -> None:
    asked: list[int] = []
    world = VirtualWorld(3, LinkModel(latency_s=0.5))

    async def body(runtime: Runtime) -> tuple[list[Decision], float]:
        def local() -> Json:
            asked.append(runtime.comm.rank)
            return {"rank": runtime.comm.rank, "asked": len(asked), "none": [None, True, 0.5, "ü"]}

        made = [await runtime.decide(name, step, local) for name, step in (("a", 1), ("b", 1), ("a", 2))]
        return made, runtime.read_clock()

    results = world.run([body(runtime) for runtime in world.runtimes])
    assert asked == [0, 0, 0]
    made = results[0][0]
    assert [(decision.name, decision.step) for decision in made] == [("a", 1), ("b", 1), ("a", 2)]
    assert made[0].value == {"rank": 0, "asked": 1, "none": [None, True, 0.5, "ü"]}
    assert all(others == made for others, _ in results)
    assert [seconds for _, seconds in results] == [0.0, 0.5, 0.5]
    assert world.decisions.entries == made


def test_messages_on_their_way_are_seldom_gone_through_for_garbage() -> None:
    seen = []

    async def replica() -> None:
        seen.append(gc.get_threshold())

    before = gc.get_threshold()
    VirtualWorld(1).run([replica()])
    assert seen[0][:2] == before[:2]
    assert seen[0][2] > before[2]
    assert gc.get_threshold() == before
