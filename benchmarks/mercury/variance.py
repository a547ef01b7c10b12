"""What scores are worth where gradients are known: ``python -m benchmarks.mercury.variance [NAME...]`` prints a table.

Uniform sampling trains as in the rows, one replica with the batch of all. On its way the norm of each sample's own
gradient is taken, for some training samples, in evaluation mode; the second moment of a drawn sample's weighted
gradient follows from these, over that of a sample drawn uniformly. Below 1 is less noise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import in_turn
from benchmarks.common.worlds import replicas_in
from benchmarks.mercury.applications import APPLICATIONS, REPLICAS, workload_of
from benchmarks.mercury.methods import PUBLISHED_RATE
from farflung.config import Training
from farflung.loop import Replica
from farflung.runs.simulation import limit_to_one_thread
from farflung.sampling.importance import compute_variance_ratio, smooth_scores
from farflung.sampling.scoring import score_batch
from farflung.seeding import create_generator
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Batch

__all__ = ["HEADS", "Worth", "main", "worth"]

LOOKED_AT = 512
"""Training samples."""
LEARNED = 0.1
"""The loss below which a sample counts as learned: it is given its class with a probability of 0.9 and more."""
SMOOTHING = 0.5
"""Of the rule ``paper`` of :class:`farflung.sampling.GroupedImportance`."""
HEADS = ("data", "steps", "learned, %", "by norms", "by loss", "by the bound")


@dataclass(frozen=True)
class Worth:
    """What scores are worth at a moment.

    Args:
      steps: that were done.
      learned: share of the samples with a loss below :data:`LEARNING`.
      by_norms: second moment over that of uniform sampling, drawn by the norms themselves: the least there is.
      by_loss: drawn by smoothed losses.
      by_bound: drawn by smoothed norms of the gradient at the model's output.
    """

    steps: int
    learned: float
    by_norms: float
    by_loss: float
    by_bound: float


def worth(application: str, at: Sequence[int]) -> list[Worth]:
    """Of an application, after some steps.

    Args:
      application: which.
      at: steps, ascending.
    """
    what, task, found = APPLICATIONS[application], workload_of(application), list[Worth]()
    training = Training(at[-1], what.batch_size * REPLICAS, PUBLISHED_RATE, optimizer="adam")

    async def train(replica: Replica) -> None:
        data = task.load_datasets()[0]
        ids = torch.randperm(len(data), generator=create_generator(0, "variance"))[:LOOKED_AT]
        batch = data.take(ids, train=False)
        for step in range(1, at[-1] + 1):
            await replica.step()
            if step in at:
                found.append(_worth(replica, batch, step))

    with limit_to_one_thread():
        world = VirtualWorld(1)
        runs: list[Coroutine[Pending[Any], None, None]] = [
            train(one) for one in replicas_in(world, task, training, {})
        ]
        world.run(runs)
    return found


def _worth(replica: Replica, batch: Batch, steps: int) -> Worth:
    losses, bounds = (
        score_batch(replica.workload, replica.model, batch, by) for by in ("loss", "gradient_bound")
    )
    norms = torch.tensor([*_norms(replica, batch)])
    return Worth(
        steps,
        float((losses < LEARNED).double().mean()),
        compute_variance_ratio(norms, norms),
        compute_variance_ratio(norms, smooth_scores(losses, SMOOTHING)),
        compute_variance_ratio(norms, smooth_scores(bounds, SMOOTHING)),
    )


def _norms(replica: Replica, batch: Batch) -> Iterator[float]:
    """Of the gradient of each sample's loss with respect to all parameters."""
    parameters = [*replica.model.parameters()]
    for one in range(len(batch)):
        alone = Batch(batch.inputs[one : one + 1], batch.targets[one : one + 1])
        loss: Tensor = replica.workload.compute_losses(replica.model, alone).sum()
        gradients = torch.autograd.grad(loss, parameters)
        yield math.sqrt(sum(float(each.double().square().sum()) for each in gradients))


def main(names: Sequence[str]) -> int:
    """Prints a line of Markdown for each moment; the exit code."""
    print(f"| {' | '.join(HEADS)} |\n|---|{'---:|' * (len(HEADS) - 1)}", flush=True)

    def tell(name: str, steps: int) -> None:
        for one in worth(name, sorted({steps // 20, steps // 4, steps})):
            figures = (one.by_norms, one.by_loss, one.by_bound)
            cells = (
                name,
                str(one.steps),
                f"{100 * one.learned:.0f}",
                *(f"{figure:.2f}" for figure in figures),
            )
            print(f"| {' | '.join(cells)} |", flush=True)

    known = {name: APPLICATIONS[name].steps for name in ("cifar10", "speech", "aid", "agnews", "fashion")}
    return in_turn("data", names or [*known], known, tell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
