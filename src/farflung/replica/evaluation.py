"""Evaluation on the test set, shared out among the replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.comm import COLLECTIVES, ExchangeChannel, Purpose
from farflung.types import Cost, Dataset, Runtime, Workload

__all__ = ["Score", "barrier", "evaluate"]

BATCH = 256


@dataclass(frozen=True, slots=True)
class Score:
    """Means over the test set."""

    metric: float
    loss: float


async def evaluate(runtime: Runtime, workload: Workload, model: nn.Module, data: Dataset, step: int) -> Score:
    """Each replica scores its share; the sums travel in one exchange and are equal everywhere.

    Running statistics (batch norm) are averaged over the replicas for the evaluation; each replica trains on with
    its own.
    """
    comm = runtime.comm
    own_buffers = {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
    if own_buffers and comm.size > 1:
        flat = torch.cat([b.reshape(-1) for b in own_buffers.values()])
        mean = (await _sum(runtime, flat, torch.zeros(1, dtype=torch.float64), step, part=1))[0] / comm.size
        _load_buffers(
            model, dict(zip(own_buffers, mean.split([b.numel() for b in own_buffers.values()]), strict=True))
        )
    share = torch.arange(len(data)).tensor_split(comm.size)[comm.rank]
    sums = await runtime.compute(Cost("evaluate", len(share)), lambda: _score(workload, model, data, share))
    _load_buffers(model, own_buffers)
    _, total = await _sum(runtime, torch.empty(0), sums, step, part=0)
    return Score(float(total[0] / total[2]), float(total[1] / total[2]))


async def barrier(runtime: Runtime, step: int, purpose: Purpose) -> None:
    """Returns when every replica has come here."""
    await _sum(runtime, torch.empty(0), torch.zeros(1, dtype=torch.float64), step, part=0, purpose=purpose)


async def _sum(
    runtime: Runtime,
    tensor: Tensor,
    side: Tensor,
    step: int,
    *,
    part: int,
    purpose: Purpose = Purpose.EVALUATION,
) -> tuple[Tensor, Tensor]:
    channel = ExchangeChannel(runtime.comm, purpose.at(step), part)

    async def exchange() -> tuple[Tensor, Tensor]:
        return await COLLECTIVES["direct"](channel, tensor, side)

    return await runtime.launch(exchange())


def _score(workload: Workload, model: nn.Module, data: Dataset, ids: Tensor) -> Tensor:
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for part in ids.split(BATCH):
            batch = data.take(part, train=False)
            sums[0] += workload.metric(model, batch).double().sum()
            sums[1] += workload.loss(model, batch).double().sum()
            sums[2] += len(part)
    return sums


def _load_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name].reshape(buffer.shape))
