"""Sums outside the gradient's exchanges."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.comm.broadcasts import choose_trees
from farflung.engine import averaging
from farflung.engine.averaging import average, broadcast
from farflung.errors import FarflungError, PeerLost
from farflung.faults import FaultPlan
from farflung.network import Link, NetworkProfile, Site
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload, Runtime
from farflung.wall import WallRuntime
from tests.helpers import in_threads, joined, parted, same_bits

SITES = NetworkProfile(
    "two sites",
    tuple(Site(name, 2, Link(0.001), exit_bps=1e6, entry_bps=1e6) for name in ("east", "west")),
    default=Link(0.02),
)
"""Between two sites there is little room, which a chain takes once."""


def test_a_start_is_sent_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = ExchangeChannel.send

    def watched(self: ExchangeChannel, payload: Payload, dst: int, hop: int) -> Pending[None]:
        sent.append(payload.nbytes)
        return send(self, payload, dst, hop)

    monkeypatch.setattr(averaging, "_MESSAGE_NBYTES", 1000)
    monkeypatch.setattr(ExchangeChannel, "send", watched)
    world = VirtualWorld(2)
    # The second has rows that are no message's whole, and other strides on the other rank.
    wanted = [torch.randn(1001), torch.randn(40, 24), torch.randn(3, 400), torch.tensor(2.0), torch.ones(5)]
    given = [
        [*wanted],
        [
            torch.zeros(40, 24).t().contiguous().t() if t.dim() > 1 and len(t) == 40 else torch.zeros_like(t)
            for t in wanted
        ],
    ]
    world.run(
        [
            broadcast(runtime, tensors, 0, purpose=Purpose.START)
            for runtime, tensors in zip(world.runtimes, given, strict=True)
        ]
    )
    assert all(torch.equal(one, two) for one, two in zip(*given, strict=True))
    assert sum(sent) == sum(tensor.nbytes for tensor in wanted)
    assert max(sent) <= 1000  # no row of 400


def tensors_of(rank: int, numel: int = 100_000) -> list[Tensor]:
    """Some of each kind: in pieces and whole, of other strides on odd ranks, complex, of bits and without a size."""
    drawn = torch.Generator().manual_seed(rank)
    matrix = torch.randn(40, 60, generator=drawn)
    return [
        torch.randn(numel, generator=drawn),
        torch.randn(1, 2, 9000, generator=drawn),
        matrix.t().contiguous().t() if rank % 2 else matrix,
        torch.randn(500, dtype=torch.complex64, generator=drawn),
        torch.rand(100, generator=drawn) < 0.5,
        torch.tensor(float(rank)),
        torch.empty(0),
    ]


def all_broadcast(
    runtimes: Sequence[Runtime], src: int, network: NetworkProfile | None = None
) -> tuple[list[list[Tensor]], list[Coroutine[Pending[Any], None, None]]]:
    """The tensors of all ranks, and what gives them those of one."""
    tensors = [tensors_of(runtime.comm.rank) for runtime in runtimes]
    return tensors, [
        broadcast(runtime, own, 0, src=src, network=network)
        for runtime, own in zip(runtimes, tensors, strict=True)
    ]


def check_broadcast(runtimes: Sequence[Runtime], tensors: Sequence[Sequence[Tensor]], src: int) -> list[Any]:
    """Checks that all have the source's bits, and none has sent much more than these; returns what each has sent."""
    wanted = tensors_of(src)
    for own in tensors:
        assert all(
            same_bits(one.contiguous(), two.contiguous()) for one, two in zip(own, wanted, strict=True)
        )
    sent = [runtime.comm.sent_bytes.to_json().get("start", [0]) for runtime in runtimes]
    nbytes = sum(tensor.nbytes for tensor in wanted)
    assert sum(map(sum, sent)) == (len(runtimes) - 1) * nbytes
    assert all(sum(own) <= 1.1 * nbytes for own in sent)
    return sent


@pytest.mark.parametrize(
    ("size", "src", "network"),
    [(2, 0, None), (3, 0, None), (5, 0, None), (8, 0, None), (5, 3, None), (4, 0, SITES), (4, 3, SITES)],
)
def test_no_rank_sends_a_start_more_than_about_once(
    size: int, src: int, network: NetworkProfile | None
) -> None:
    world = VirtualWorld(size)
    tensors, bodies = all_broadcast(world.runtimes, src, network)
    world.run(bodies)
    virtual = check_broadcast(world.runtimes, tensors, src)
    runtimes = joined(size)
    try:
        tensors, bodies = all_broadcast(runtimes, src, network)
        assert in_threads(*map(partial, [one.drive for one in runtimes], bodies)) == [None] * size
        assert check_broadcast(runtimes, tensors, src) == virtual
    finally:
        parted(runtimes)


async def error_of(runtime: Runtime, body: Coroutine[Pending[Any], None, None]) -> tuple[str, bool]:
    """The error that it ends with, and whether it ends soon after a loss at 1 s."""
    try:
        await body
    except FarflungError as error:
        return str(error), 1.0 < runtime.read_clock() < 1.2
    return "", False


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("network", [None, SITES])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_is_lost_on_the_way_is_named(
    lost: int, network: NetworkProfile | None, whole: bool
) -> None:
    """By all that get something from it or by it, where it is in no other's place."""
    plan = FaultPlan().crash(lost, at_s=1.0)
    link = NetworkProfile.create_uniform(Link(0.01, 1e6))
    world = VirtualWorld(4, network=network or link, faults=plan, needs_all_members=whole)
    _, bodies = all_broadcast(world.runtimes, 0, network)
    if whole:
        with pytest.raises(PeerLost, match=f"lost rank {lost}: its connection was closed"):
            world.run(bodies)
        return
    ends = world.run(list(map(error_of, world.runtimes, bodies)))
    named = [text.startswith(f"lost rank {lost}: its connection") and in_time for text, in_time in ends]
    assert sum(named) == 3 if network is None else any(named)


@pytest.mark.parametrize("members", [None, range(4)])
@pytest.mark.parametrize("network", [None, SITES])
def test_a_process_that_fails_on_the_way_is_named(
    members: Sequence[int] | None, network: NetworkProfile | None
) -> None:
    runtimes = joined(4, members=members)

    def drive(runtime: WallRuntime, body: Coroutine[Pending[Any], None, None]) -> None:
        error: FarflungError | None = None
        try:
            runtime.drive(body)
        except FarflungError as found:
            error = found
            raise
        finally:
            runtime.close(error)

    _, bodies = all_broadcast(runtimes, 0, network)
    bodies[1].close()
    *errors, _ = in_threads(
        *(partial(drive, runtimes[rank], bodies[rank]) for rank in (2, 3)),
        partial(drive, runtimes[0], bodies[0]),
        partial(runtimes[1].close, ValueError("no memory")),
    )
    assert all(isinstance(error, FarflungError) for error in errors[:2])
    assert any("rank 1" in str(error) for error in errors)


def virtual_s(size: int, profile: NetworkProfile, src: int, *, knows: bool) -> float:
    """The seconds of a broadcast on a network that the replicas know or do not."""
    world = VirtualWorld(size, network=profile)
    _, bodies = all_broadcast(world.runtimes, src, profile if knows else None)
    world.run(bodies)
    return world.clock.time()


@pytest.mark.parametrize("src", [0, 1, 3])
def test_a_chain_is_chosen_where_it_is_faster(src: int) -> None:
    nbytes = sum(tensor.nbytes for tensor in tensors_of(0))
    seconds = virtual_s(4, SITES, src, knows=True)
    assert seconds < 1.1 * (0.022 + 8 * nbytes / 1e6)
    assert seconds < 0.8 * virtual_s(4, SITES, src, knows=False)
    assert len(choose_trees(4, src, nbytes, SITES)) == 1
    homes = NetworkProfile("homes", (Site("homes", 4, Link(0.02), up_bps=1e6),))
    assert len(choose_trees(4, src, nbytes, homes)) == 3
    assert virtual_s(4, homes, src, knows=True) < 1.1 * (0.04 + 8 * nbytes / 1e6)


def test_little_goes_straight_to_all() -> None:
    assert choose_trees(4, 1, 1000, None) == [{2: 1, 3: 1, 0: 1}]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_mean_that_is_in_range_is_found(dtype: torch.dtype, size: int) -> None:
    most = torch.finfo(dtype).max
    world = VirtualWorld(size)
    tensors = [[torch.tensor([most, -most, 0.5, 3.0 * rank], dtype=dtype)] for rank in range(size)]
    world.run(
        [
            average(runtime, own, 0, Purpose.EVALUATION)
            for runtime, own in zip(world.runtimes, tensors, strict=True)
        ]
    )
    for (mean,) in tensors:
        assert mean[2:].tolist() == [0.5, 1.5 * (size - 1)]
        assert torch.equal(mean[:2], torch.tensor([most, -most], dtype=dtype))
