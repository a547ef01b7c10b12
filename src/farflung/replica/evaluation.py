"""Evaluation on the test set, shared out among the replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.comm import Purpose
from farflung.replica.averaging import averaged, sum_everywhere
from farflung.replica.placement import batch_on
from farflung.types import Cost, Dataset, Runtime, Workload

__all__ = ["Score", "evaluate"]

BATCH = 256


@dataclass(frozen=True, slots=True)
class Score:
    """Means over the test set."""

    metric: float
    loss: float


async def evaluate(
    runtime: Runtime,
    workload: Workload,
    model: nn.Module,
    data: Dataset,
    step: int,
    *,
    apart: bool,
    device: torch.device,
) -> Score:
    """Each replica scores its share; the sums travel in one exchange and are equal everywhere.

    Args:
      runtime: the world.
      workload: what is trained.
      model: the replica's.
      data: the test set.
      step: of the evaluation.
      apart: whether replicas' parameters differ; what is scored is their mean.
      device: of the model.
    """
    comm = runtime.comm
    share = torch.arange(len(data)).tensor_split(comm.size)[comm.rank]
    async with averaged(runtime, model, step, apart=apart):
        sums = await runtime.compute(
            Cost("evaluate", len(share)), lambda: _score(workload, model, data, share, device)
        )
    _, total = await sum_everywhere(runtime, torch.empty(0), sums, step, purpose=Purpose.EVALUATION)
    return Score(float(total[0] / total[2]), float(total[1] / total[2]))


def _score(workload: Workload, model: nn.Module, data: Dataset, ids: Tensor, device: torch.device) -> Tensor:
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for part in ids.split(BATCH):
            batch = batch_on(data.take(part, train=False), device)
            sums[0] += workload.metric(model, batch).double().sum()
            sums[1] += workload.loss(model, batch).double().sum()
            sums[2] += len(part)
    return sums.cpu()
