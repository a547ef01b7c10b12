"""DiLoCo and Streaming DiLoCo go the way of torchft's, on the same batches."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn

from farflung.types import Batch
from tests.helpers import PATIENCE_S, in_threads
from tests.schedules.runs import APART, InPieces, Pieces, Run, distance

local_sgd: Any = pytest.importorskip(
    "torchft.local_sgd", reason="torchft is not installed: pip install torchft-nightly"
)
manager: Any = pytest.importorskip(
    "torchft.manager", reason="torchft is not installed: pip install torchft-nightly"
)

SIZE, STEPS, DIM = 2, 24, 12
INNER: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.9, 0.95)}


class Remembering(InPieces):
    """Keeps the batches that it is trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches: list[Batch] = []

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            self.batches.append(batch)
        return super().compute_losses(model, batch)


class Meeting:
    """Where the replicas of one process take means."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE, timeout=PATIENCE_S)
        self._given: dict[int, Tensor] = {}

    def average(self, rank: int, tensor: Tensor) -> None:
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        mean = torch.stack([self._given[each] for each in range(SIZE)]).mean(dim=0)
        self._barrier.wait()
        tensor.copy_(mean)


class Through:
    """Work that is done."""

    def wait(self, *_: object) -> bool:
        return True


def manager_of(rank: int, meeting: Meeting) -> Any:
    """torchft's own interface, of replicas that are never lost."""
    made = create_autospec(manager.Manager, instance=True)
    made._use_async_quorum = False
    made.should_commit.return_value = True
    made.current_step.side_effect = lambda: made.should_commit.call_count

    def allreduce(tensor: Tensor, *_: object, **__: object) -> Through:
        meeting.average(rank, tensor)
        return Through()

    made.allreduce.side_effect = allreduce
    return made


def theirs(
    batches: list[list[Batch]], sync_every: int, fragments: int, rate: float, mix: float
) -> list[Tensor]:
    """Each replica's parameters after training with torchft."""
    meeting, task = Meeting(), InPieces(dim=DIM, samples=64)

    def train(rank: int) -> Tensor:
        model = Pieces(DIM, 4)
        last_first = list(model.pieces)[::-1]  # the order of buckets
        parts = [nn.ParameterList(last_first[turn::fragments]) for turn in range(fragments)]
        outer = [torch.optim.SGD(part.parameters(), lr=rate, momentum=0.9, nesterov=True) for part in parts]
        inner = torch.optim.AdamW(model.parameters(), **INNER)
        with local_sgd.DiLoCo(
            manager_of(rank, meeting),
            parts,
            inner,
            outer,
            sync_every,
            pin_memory=False,
            fragment_update_alpha=mix,
        ):
            for batch in batches[rank]:
                inner.zero_grad()
                task.compute_losses(model, batch).mean().backward()
                inner.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    found = in_threads(*(lambda rank=rank: train(rank) for rank in range(SIZE)))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each for each in found if isinstance(each, Tensor)]


@pytest.mark.parametrize(
    ("schedule", "sync_every", "fragments", "rate", "mix"),
    [
        ("diloco(4)", 4, 1, 0.7, 0.0),
        ("streaming_diloco(8, 2, delay=0, mix=0.5)", 8, 2, 0.4, 0.5),
    ],
)
def test_the_same_way(schedule: str, sync_every: int, fragments: int, rate: float, mix: float) -> None:
    tasks: list[Remembering] = []

    def task() -> Remembering:
        tasks.append(Remembering(dim=DIM, samples=64))
        return tasks[-1]

    settings = {
        "steps": STEPS + 1,  # an outer step that no step follows is a plain mean
        "optimizer": f"adamw(betas={INNER['betas']})",
        "learning_rate": INNER["lr"],
        "weight_decay": INNER["weight_decay"],
    }
    ours = Run(schedule, SIZE, APART, workload=task, settings=settings).steps(STEPS)
    batches = [made.batches for made in tasks]
    for rank, weights in enumerate(theirs(batches, sync_every, fragments, rate, mix)):
        assert distance(ours.weights(rank), weights) < 1e-4
