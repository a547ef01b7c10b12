"""No sharing sends nothing."""

from __future__ import annotations

import torch

from farflung.comm import ExchangeChannel
from farflung.data import SHARINGS, NoSharing, TensorDataset
from farflung.runtime import VirtualWorld
from farflung.types import Sharing


def test_nothing_leaves() -> None:
    world = VirtualWorld(2)
    sharing: Sharing = NoSharing()
    samples = TensorDataset(torch.arange(3.0).reshape(3, 1), torch.zeros(3))
    channels = [ExchangeChannel(runtime.comm, 0, 0) for runtime in world.runtimes]
    rows = samples.rows(torch.tensor([2, 0]))
    found = world.run([sharing.exchange(channel, samples, rows, step=0) for channel in channels])
    assert not sharing.data_leaves_device
    assert not any(sharing.due(step) for step in range(100))
    assert all(batch is rows for batch in found)
    assert [channel.sent_nbytes for channel in channels] == [0, 0]
    assert world.clock.now() == 0.0


def test_it_is_found_by_its_name() -> None:
    assert isinstance(SHARINGS["none"](), NoSharing)
