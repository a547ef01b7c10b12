"""Sums and averages outside the gradient's own exchanges: shared state, running statistics, barriers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import torch
from torch import Tensor, nn

from farflung.comm import COLLECTIVES, ExchangeChannel, Purpose
from farflung.types import Payload, Runtime

__all__ = ["averaged_buffers", "barrier", "broadcast", "sum_everywhere"]

_NOTHING = torch.empty(0)


async def sum_everywhere(
    runtime: Runtime, tensor: Tensor, side: Tensor, number: int, *, part: int = 0, purpose: Purpose
) -> tuple[Tensor, Tensor]:
    """One direct all-reduce of ``tensor``, which it overwrites, and ``side``."""
    channel = ExchangeChannel(runtime.comm, purpose.at(number), part)

    async def exchange() -> tuple[Tensor, Tensor]:
        return await COLLECTIVES["direct"](channel, tensor, side)

    return await runtime.launch(exchange())


async def barrier(runtime: Runtime, number: int, purpose: Purpose) -> None:
    """Returns when every replica has come here."""
    await sum_everywhere(runtime, _NOTHING, torch.zeros(1, dtype=torch.float64), number, purpose=purpose)


async def broadcast(runtime: Runtime, tensors: Iterable[Tensor], number: int) -> None:
    """Overwrites ``tensors`` with rank 0's."""
    kept = [tensor.detach() for tensor in tensors]
    channel = ExchangeChannel(runtime.comm, Purpose.START.at(number), 0)

    async def exchange() -> None:
        if channel.rank == 0:
            copies = Payload(tuple(tensor.clone() for tensor in kept))
            for rank in range(1, channel.size):
                channel.send(copies, rank, 0)
            return
        payload = await channel.recv(0, 0)
        for tensor, value in zip(kept, payload.tensors(), strict=True):
            tensor.copy_(value)

    await runtime.launch(exchange())


@asynccontextmanager
async def averaged_buffers(runtime: Runtime, model: nn.Module, number: int) -> AsyncIterator[None]:
    """Inside, running statistics (batch norm) are averaged over the replicas; afterwards each has its own again."""
    own = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    if own and runtime.comm.size > 1:
        flat = torch.cat([buffer.reshape(-1).float() for buffer in own.values()])
        zero = torch.zeros(1, dtype=torch.float64)
        total, _ = await sum_everywhere(runtime, flat, zero, number, part=1, purpose=Purpose.EVALUATION)
        parts = (total / runtime.comm.size).split([buffer.numel() for buffer in own.values()])
        _load(model, dict(zip(own, parts, strict=True)))
    try:
        yield
    finally:
        _load(model, own)


def _load(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name].reshape(buffer.shape))
