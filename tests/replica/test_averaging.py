"""Sums outside the gradient's exchanges."""

from __future__ import annotations

import pytest
import torch

from farflung.comm import ExchangeChannel, Purpose
from farflung.replica import averaging
from farflung.replica.averaging import average, broadcast
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload


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
    assert max(sent) == 1600  # a row of 400


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
