"""``auto`` is the collective that the model names, on every rank."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.codecs import Truncate16
from farflung.comm import COLLECTIVES, Coding, Collective, ExchangeChannel
from farflung.comm.collectives.auto import CHOICES, auto
from farflung.network import NetworkProfile, choose, network_profile
from farflung.runtime import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Channel, Communicator, Runtime, Seeds
from tests.helpers import same_bits

SIZE, SIDE = 8, 8


def took(
    network: NetworkProfile, name: str, nbytes: int, coding: Coding | None = None
) -> tuple[float, list[Tensor]]:
    world = VirtualWorld(network.nodes or SIZE, network=network)

    def body(runtime: Runtime) -> Coroutine[Pending[Any], None, Any]:
        tensor = torch.rand(nbytes // 4, generator=torch.Generator().manual_seed(runtime.comm.rank))
        side = torch.ones(1, dtype=torch.float64)
        channel = ExchangeChannel(runtime.comm, 1, 0)
        return COLLECTIVES[name](channel, tensor, side, coding=coding)  # type: ignore[return-value]

    results = world.run([body(runtime) for runtime in world.runtimes])
    return world.clock.now(), [total for total, _ in results]


@pytest.mark.parametrize(
    ("network", "nbytes", "chosen"),
    [
        ("four-regions", 4_000_000, "direct"),
        ("wifi-shared-100mbps", 40_000, "parameter_server"),
        ("four-regions", 4_000, "all_gather"),
        ("edge-5gbps", 400_000, "direct"),
    ],
)
def test_it_is_the_one_that_is_chosen(network: str, nbytes: int, chosen: str) -> None:
    profile = network_profile(network).for_nodes(SIZE)
    assert choose(profile, nbytes, side_nbytes=SIDE, among=tuple(CHOICES)) == chosen
    seconds, sums = took(profile, "auto", nbytes)
    wanted_s, wanted = took(profile, chosen, nbytes)
    assert seconds == wanted_s
    assert all(same_bits(a, b) for a, b in zip(sums, wanted, strict=True))
    # The simulator finds no other faster that adds in the same order.
    for other in CHOICES:
        assert seconds <= took(profile, other, nbytes)[0]


class Plain:
    """A communicator of real processes has no profile."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self.features = comm.rank, comm.size, comm.features
        self.send, self.recv, self.all_reduce = comm.send, comm.recv, comm.all_reduce


@pytest.mark.parametrize(
    ("size", "nbytes", "chosen"),
    [
        (2, 40_000_000, "all_gather"),
        (4, 4_000, "all_gather"),
        (4, 40_000, "all_gather"),
        (4, 48_000, "direct"),
        (64, 1_000, "all_gather"),
        (64, 1_200, "direct"),
    ],
)
def test_where_the_network_is_not_known_it_hangs_on_the_traffic(
    monkeypatch: pytest.MonkeyPatch, size: int, nbytes: int, chosen: str
) -> None:
    called = []

    def taken(name: str) -> Collective:
        async def collective(
            channel: Channel, tensor: Tensor, side: Tensor, **_: Any
        ) -> tuple[Tensor, Tensor]:
            called.append(name)
            return tensor, side

        return collective

    for name in CHOICES:
        monkeypatch.setitem(CHOICES, name, taken(name))
    world = VirtualWorld(size, network=network_profile("wifi-shared-100mbps"))
    for runtime in world.runtimes:
        channel = ExchangeChannel(Plain(runtime.comm), 1, 0)
        with pytest.raises(StopIteration):
            auto(channel, torch.empty(nbytes // 4), torch.ones(1)).send(None)
    assert set(called) == {chosen}


def test_a_codec_travels_as_direct() -> None:
    profile = network_profile("four-regions").for_nodes(2)
    coding = Coding(Truncate16(), Seeds(0, 0), step=0)
    assert took(profile, "auto", 4_000, coding)[0] == took(profile, "direct", 4_000, coding)[0]
