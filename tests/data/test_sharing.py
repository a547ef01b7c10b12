"""No sharing sends nothing."""

from __future__ import annotations

import torch

from farflung.comm import ExchangeChannel
from farflung.data import NoSharing, TensorDataset
from farflung.runtime import VirtualWorld
from farflung.types import Sharing


def test_nothing_leaves() -> None:
    world = VirtualWorld(2)
    sharing: Sharing = NoSharing()
    samples = TensorDataset(torch.zeros(3, 1), torch.zeros(3))
    channels = [ExchangeChannel(runtime.comm, 0, 0) for runtime in world.runtimes]
    world.run([sharing.exchange(channel, samples) for channel in channels])
    assert not sharing.data_leaves_device
    assert [channel.sent_nbytes for channel in channels] == [0, 0]
    assert world.clock.now() == 0.0
