"""``auto`` is the collective that the model names, on every rank."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from farflung.comm import COLLECTIVES, ExchangeChannel
from farflung.network import NetworkProfile, choose, network_profile
from farflung.runtime import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Communicator, Runtime
from tests.helpers import same_bits

SIZE, SIDE = 8, 8


def took(network: NetworkProfile, name: str, nbytes: int) -> tuple[float, list[torch.Tensor]]:
    world = VirtualWorld(SIZE, network=network)

    def body(runtime: Runtime) -> Coroutine[Pending[Any], None, Any]:
        tensor = torch.rand(nbytes // 4, generator=torch.Generator().manual_seed(runtime.comm.rank))
        side = torch.ones(1, dtype=torch.float64)
        return COLLECTIVES[name](ExchangeChannel(runtime.comm, 1, 0), tensor, side)  # type: ignore[return-value]

    results = world.run([body(runtime) for runtime in world.runtimes])
    return world.clock.now(), [total for total, _ in results]


@pytest.mark.parametrize(
    ("network", "nbytes", "chosen"),
    [
        ("four-regions", 4_000_000, "direct"),
        ("wifi-shared-100mbps", 40_000, "parameter_server"),
        ("edge-5gbps", 40_000, "direct"),
        ("edge-5gbps", 4_000_000, "ring"),
    ],
)
def test_it_is_the_one_that_is_chosen(network: str, nbytes: int, chosen: str) -> None:
    profile = network_profile(network).for_nodes(SIZE)
    assert choose(profile, nbytes, side_nbytes=SIDE) == chosen
    seconds, sums = took(profile, "auto", nbytes)
    wanted_s, wanted = took(profile, chosen, nbytes)
    assert seconds == wanted_s
    assert all(same_bits(a, b) for a, b in zip(sums, wanted, strict=True))
    # The simulator finds no other faster.
    for other in ("direct", "ring", "parameter_server", "multi_parameter_server"):
        assert seconds <= took(profile, other, nbytes)[0]


def test_where_the_network_is_not_known_it_is_direct() -> None:
    class Plain:
        """A communicator of real processes has no profile."""

        def __init__(self, comm: Communicator) -> None:
            self.rank, self.size, self.features = comm.rank, comm.size, comm.features
            self.send, self.recv, self.all_reduce = comm.send, comm.recv, comm.all_reduce

    world = VirtualWorld(3, network=network_profile("wifi-shared-100mbps"))
    channel = ExchangeChannel(Plain(world.runtimes[0].comm), 1, 0)
    assert channel.fastest(("direct", "ring", "parameter_server"), 40_000, SIDE) == "direct"
