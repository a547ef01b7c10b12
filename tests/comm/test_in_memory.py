"""Replicas whose messages never leave the process: nothing above the transport knows."""

from __future__ import annotations

import pytest
import torch

from farflung.comm import ExchangeChannel, TcpTransport, Transport
from farflung.errors import PeerLost
from farflung.wall import WallRuntime
from tests.helpers import joined, parted, same_bits, tag
from tests.in_memory import InMemoryTransport


async def summed(runtime: WallRuntime) -> torch.Tensor:
    channel = ExchangeChannel(runtime.comm, 1, 0)
    tensor = torch.rand(70_000, generator=torch.Generator().manual_seed(runtime.comm.rank))
    return (await channel.get_collective("ring")(channel, tensor, torch.zeros(1, dtype=torch.float64)))[0]


def sums(transport: type[Transport]) -> list[torch.Tensor]:
    runtimes = joined(3, transport=transport)
    found = [runtime.launch(summed(runtime)) for runtime in runtimes]
    try:
        return [one.wait() for one in found]
    finally:
        parted(runtimes)


def test_sums_are_the_same_bits() -> None:
    expected = sums(TcpTransport)
    assert all(map(same_bits, sums(InMemoryTransport), expected))


def test_a_replica_that_leaves_has_left() -> None:
    one, other = joined(2, transport=InMemoryTransport)
    other.close()

    async def receive() -> None:
        await one.comm.recv(1, tag(4))

    with pytest.raises(PeerLost, match="it had left the run"):
        one.launch(receive()).wait()
    one.close()
