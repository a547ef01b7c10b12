"""Collectives computed as a whole: the times, bits and bytes of their hops, whoever is late."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.comm import COLLECTIVES, ExchangeChannel
from farflung.comm.collectives.segments import cut
from farflung.errors import ProtocolError, RunLost
from farflung.network import Connection, Link, Medium, NetworkProfile, Site, Trace, costs
from farflung.seeding import generator
from farflung.sim import VirtualWorld, closed_form
from farflung.tasks import Pending
from farflung.types import Payload, Runtime, Tag
from tests.covering import covering
from tests.helpers import same_bits

OURS = sorted(COLLECTIVES.keys() - {"auto", "native"})
ODD = Link(latency_s=0.0123, bandwidth_bps=3.7e6)
"""Figures that no binary fraction is equal to."""
UNEQUAL = NetworkProfile(
    "unequal",
    (Site("a", 1), Site("b", 2, Link(0.003, 1.1e7)), Site("c", None, Link(0.001, 9e8))),
    (Connection("a", "b", Link(0.07, 3.3e5)), Connection("b", "a", Link(0.011, 7e6))),
    default=Link(0.029, 2.3e6),
)
JITTERY = NetworkProfile.uniform(Link(0.05, 1e6, jitter_s=0.04))
SWITCH = NetworkProfile("switch", (Site("all", None, Link(0.0007), up_bps=3.7e6, down_bps=5.1e6),))
CELL = NetworkProfile(
    "cell",
    (
        Site(
            "office",
            2,
            Link(0.0003, 9.1e6),
            exit_bps=2.3e6,
            entry_bps=Trace((0, 0.05), (4e6, 1e6), 0.11, "repeat"),
        ),
        Site("field", None, Link(0.021), up_bps=1.7e6, medium="air"),
    ),
    (Connection("office", "field", Link(0.013, 6e6), shared=True),),
    (Medium("air", 7.3e6, relayed=True),),
    default=Link(0.017, 1.3e6),
)
NETWORKS = {
    "alike": NetworkProfile.uniform(ODD),
    "unequal": UNEQUAL,
    "jitter": JITTERY,
    "switch": SWITCH,
    "cell": CELL,
}


@dataclass(frozen=True)
class Plan:
    """What each rank does: exchanges of so many elements begin at its times; ``spare`` messages go beside them.

    Args:
      spare: from, to, when, how many bytes.
    """

    numels: tuple[int, ...]
    begin_s: tuple[tuple[float, ...], ...]
    spare: tuple[tuple[int, int, float, int], ...] = ()
    dtype: torch.dtype = torch.float32


def contribution(rank: int, exchange: int, plan: Plan) -> Tensor:
    numel = plan.numels[exchange]
    return torch.randn(numel, generator=generator(5, rank, exchange), dtype=torch.float64).to(plan.dtype)


def simulated(network: NetworkProfile, size: int, name: str, plan: Plan, closed_form: bool) -> list[Any]:
    """For each rank and exchange: bits of the sums, bytes sent to each, time of the end; when spare messages came; and
    what all of it has sent."""
    world = VirtualWorld(size, network=network, seed=9, closed_form=closed_form)

    async def exchange(runtime: Runtime, number: int) -> tuple[Any, ...]:
        rank = runtime.comm.rank
        channel = ExchangeChannel(runtime.comm, number, 1)
        side = torch.tensor([(-1.0) ** rank * 1e16 + rank, 0.1 * rank], dtype=torch.float64)
        total, sides = await channel.collective(name)(channel, contribution(rank, number, plan), side)
        return total, sides, channel.sent.tolist(), runtime.now()

    async def spare(runtime: Runtime) -> list[float]:
        rank, times = runtime.comm.rank, list[float]()

        async def hear(src: int, index: int) -> None:
            await runtime.comm.recv(src, Tag(10**6, index))
            times[index] = runtime.now()

        times += [0.0] * len(plan.spare)
        heard: list[Pending[None]] = []
        for index, message in enumerate(plan.spare):
            if message[1] == rank:
                heard.append(runtime.launch(hear(message[0], index)))
        for index, (src, dst, at, nbytes) in enumerate(plan.spare):
            if rank == src:
                await runtime.sleep_until(at)
                payload = Payload((torch.zeros(nbytes, dtype=torch.uint8),))
                runtime.comm.send(payload, dst, Tag(10**6, index))
        for one in heard:
            await one
        return times

    async def body(runtime: Runtime) -> tuple[Any, ...]:
        beside = runtime.launch(spare(runtime))
        running: list[Pending[Any]] = []
        for number, begin in enumerate(plan.begin_s[runtime.comm.rank]):
            await runtime.sleep_until(begin)
            running.append(runtime.launch(exchange(runtime, number)))
        return [await one for one in running], await beside, runtime.comm.sent.to_json()

    return world.run([body(runtime) for runtime in world.runtimes])


def assert_equal(network: NetworkProfile, size: int, name: str, plan: Plan) -> None:
    whole = simulated(network, size, name, plan, closed_form=True)
    hops = simulated(network, size, name, plan, closed_form=False)
    for (ours, our_spare, our_sent), (theirs, their_spare, their_sent) in zip(whole, hops, strict=True):
        assert our_spare == their_spare
        assert our_sent == their_sent
        for (total, side, sent, t), (their_total, their_side, sent_in_hops, their_t) in zip(
            ours, theirs, strict=True
        ):
            assert t == their_t
            assert sent == sent_in_hops
            assert same_bits(total, their_total)
            assert same_bits(side, their_side)


def together(size: int, *numels: int) -> Plan:
    return Plan(numels, tuple(tuple(0.0 for _ in numels) for _ in range(size)))


each_collective = pytest.mark.parametrize("name", OURS)
each_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)


EACH = [
    (network, size, name, numel)
    for network in NETWORKS
    for size in (2, 3, 4, 7, 16)
    for name in OURS
    for numel in (0, 1, 5, 840, 10_007)
    if size >= 4 or network not in ("unequal", "cell")
]


@pytest.mark.parametrize(("network", "size", "name", "numel"), covering(EACH, strength=3))
def test_all_at_once(network: str, size: int, name: str, numel: int) -> None:
    assert_equal(NETWORKS[network], size, name, together(size, numel))


@each_collective
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    assert_equal(NETWORKS["alike"], 5, name, Plan((101,), ((0.0,),) * 5, dtype=dtype))


@each_collective
@each_network
def test_shards_in_pieces(network: NetworkProfile, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "PIECE_NBYTES", 64)
    for size in (4, 5):
        assert_equal(network, size, name, together(size, 1003))


@each_collective
def test_sixty_four_ranks(name: str) -> None:
    assert_equal(NETWORKS["alike"], 64, name, together(64, 1000))


@each_collective
@each_network
def test_buckets_that_follow_each_other(network: NetworkProfile, name: str) -> None:
    """The same on all ranks: each begins while those before it are under way."""
    plan = Plan((3000, 40, 5001, 0), ((0.0, 0.004, 0.0091, 0.0105),) * 6)
    assert_equal(network, 6, name, plan)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_whoever_is_late_and_whatever_else_goes_on(data: st.DataObject) -> None:
    """Ranks join at times of their own, several exchanges are under way together, other messages between them."""
    size = data.draw(st.integers(2, 6), label="size")
    network = data.draw(
        st.sampled_from([NETWORKS["alike"], JITTERY, SWITCH] + [UNEQUAL, CELL] * (size > 3)), label="network"
    )
    numels = data.draw(st.lists(st.sampled_from([7, 40, 5000]), min_size=1, max_size=3), label="numels")
    # Each link is busy for about as long as ranks are late, so messages queue behind those of other exchanges.
    time = st.sampled_from([0.0, 0.001, 0.0123, 0.02, 0.05, 0.3])
    # No two things happen at one time: of two messages sent at once over one link, either may be first.
    begins = [
        [t + (rank * 10 + place) * 1.13e-6 for place, t in enumerate(sorted(data.draw(time) for _ in numels))]
        for rank in range(size)
    ]
    rank = st.integers(0, size - 1)
    spare_time = st.builds(lambda t, k: t + k * 7.77e-6, time, st.integers(1, 1000))
    spares = st.tuples(rank, rank, spare_time, st.integers(0, 20_000)).filter(
        lambda message: message[0] != message[1]
    )
    spare = sorted(data.draw(st.lists(spares, max_size=6), label="spare"), key=lambda message: message[2])
    plan = Plan(tuple(numels), tuple(map(tuple, begins)), tuple(spare))
    assert_equal(network, size, data.draw(st.sampled_from(OURS), label="collective"), plan)


@pytest.mark.parametrize("numel", [0, 5, 100, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_stack_adds_as_one_by_one(numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(numel, generator=generator(1, rank)).to(dtype) for rank in range(9)]
    segments = cut(numel, 9)
    one_by_one = closed_form._ring_sum(tensors, segments)
    monkeypatch.setattr(closed_form, "FEW", 1)
    assert same_bits(closed_form._ring_sum(tensors, segments), one_by_one)


# --- what is refused --------------------------------------------------------------------------------------------


def joining(
    world: VirtualWorld, ranks: Sequence[int], name: str = "direct"
) -> list[Coroutine[Any, Any, Any]]:
    async def body(runtime: Runtime) -> None:
        if runtime.comm.rank in ranks:
            channel = ExchangeChannel(runtime.comm, 7, 2)
            await channel.collective(name)(channel, torch.zeros(8), torch.zeros(1))

    return [body(runtime) for runtime in world.runtimes]


@each_collective
def test_a_deadlock_names_who_is_missing(name: str) -> None:
    world = VirtualWorld(4)
    with pytest.raises(
        RunLost,
        match=r"rank 0 waits for rank 1 \(the exchange at step 7, part 2, hop 0\); rank 2 waits for rank 1",
    ):
        world.run(joining(world, [0, 2, 3], name))


def test_a_rank_may_not_join_another_collective() -> None:
    world = VirtualWorld(3)

    async def body(runtime: Runtime) -> None:
        name = "ring" if runtime.comm.rank == 1 else "direct"
        channel = ExchangeChannel(runtime.comm, 7, 2)
        await channel.collective(name)(channel, torch.zeros(8), torch.zeros(1))

    with pytest.raises(ProtocolError, match="rank 1 sent another kind of segment"):
        world.run([body(runtime) for runtime in world.runtimes])


def test_the_sum_is_everybodys_own() -> None:
    """Reducers divide in place, so no two ranks may share the tensor."""
    world = VirtualWorld(3)

    async def body(runtime: Runtime) -> tuple[Tensor, Tensor]:
        channel = ExchangeChannel(runtime.comm, 7, 2)
        mine = torch.ones(8)
        total, side = await channel.collective("direct")(channel, mine, torch.ones(2))
        assert total is mine
        return total.div_(3), side.mul_(2)

    for total, side in world.run([body(runtime) for runtime in world.runtimes]):
        assert total.tolist() == [1.0] * 8
        assert side.tolist() == [6.0, 6.0]


def test_a_run_of_random_order_repeats() -> None:
    rng = random.Random(3)
    begins = tuple((rng.random(),) for _ in range(12))
    plan = Plan((500,), begins)
    first = simulated(JITTERY, 12, "ring", plan, closed_form=True)
    again = simulated(JITTERY, 12, "ring", plan, closed_form=True)
    assert [r[0][0][3] for r in first] == [r[0][0][3] for r in again]
