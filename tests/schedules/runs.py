"""Small runs in virtual time, for the tests of schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.config import Training
from farflung.data.datasets import TensorDataset
from farflung.engine import select_device
from farflung.loop import Checkpoints, Replica
from farflung.recipes import parse_recipe
from farflung.reducers import list_summed_nbytes
from farflung.sim import LinkModel, VirtualWorld
from farflung.telemetry import Event, Telemetry
from farflung.types import Batch, Dataset, SampleIds, Sampler, Schedule
from farflung.workloads import Quadratic

NO_LINK = LinkModel()


class Valleys(Quadratic):
    r"""One paraboloid for each sample, of a curvature of its own: :math:`f_i(w) = \tfrac12 \sum a_i (w - c_i)^2`."""

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        """Centres as inputs, curvatures as targets."""
        centres, labels = self.draw_centres()
        random = torch.Generator().manual_seed(self.seed + 1)
        curvatures = 0.2 + torch.rand(centres.shape, generator=random)
        data = TensorDataset(centres, curvatures, labels, origin="test")
        return data, data

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of each sample."""
        offsets: Tensor = model(batch.inputs)
        return (offsets.square() * batch.targets).sum(dim=1).mul(0.5)


class Pieces(nn.Module):
    """A vector in several parameters."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.zeros(dim // count) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.pieces)) - x


class InPieces(Quadratic):
    """A quadratic whose parameters make four buckets."""

    def build_model(self, generator: torch.Generator) -> nn.Module:
        return Pieces(self.dim, 4)

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        return -self.compute_losses(model, batch)


APART = {"bucket_nbytes": 1}
"""A bucket for each parameter."""


def pieces() -> Quadratic:
    return InPieces(dim=12, samples=64)


@dataclass
class Run:
    """Replicas on one clock.

    Args:
      schedule: as text, or itself.
      size: number of replicas.
      parts: other members and settings of the recipe.
      link: between any two.
      seconds_per_sample: of a forward pass.
      alike: whether all replicas draw the same batches.
      shares: the samples of each replica.
      workload: makes one.
      settings: of the training.
      folder: of checkpoints.
      device: that all of them train on.
      around: what else the world has: device profiles, faults, decisions.
      sampler: makes the one of a rank; ``None``: that of the recipe.
    """

    schedule: str | Schedule
    size: int = 2
    parts: Mapping[str, Any] = field(default_factory=dict)
    link: LinkModel = NO_LINK
    seconds_per_sample: float = 0.0
    alike: bool = False
    shares: list[SampleIds] | None = None
    workload: Callable[[], Quadratic] = lambda: Quadratic(dim=12, samples=64)
    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    device: str = "cpu"
    around: Mapping[str, Any] = field(default_factory=dict)
    sampler: Callable[[int], Sampler] | None = None

    def __post_init__(self) -> None:
        given = {"steps": 20, "batch_size": 4, "learning_rate": 0.05, "seed": 3, **self.settings}
        self.training = Training(**given)
        world = {"network": self.link, **self.around}
        self.world = VirtualWorld(self.size, seconds_per_sample=self.seconds_per_sample, **world)
        self.events: list[list[Event]] = [[] for _ in range(self.size)]
        self.replicas = [self._replica(rank) for rank in range(self.size)]
        first = self.replicas[0]
        nbytes = list_summed_nbytes(first.components.reducer, first.bucket_specs, self.size)
        self.world.resolve_collective(self.parts.get("collective", "auto"), nbytes)

    def _replica(self, rank: int) -> Replica:
        work = self.workload()
        everything = torch.arange(work.samples)
        share = everything if self.alike else None if self.shares is None else self.shares[rank]
        order = 0 if self.alike else None if self.shares is None else rank
        checkpoints = None
        if self.folder is not None:
            checkpoints = Checkpoints(self.folder, rank, self.size, is_leader=rank == 0, num_kept=99)
        text = self.schedule if isinstance(self.schedule, str) else None
        parts = (
            parse_recipe("synchronous")
            .with_components(schedule=text, **self.parts)
            .build_components(self.training.seed, order)
        )
        if self.sampler is not None:
            parts = replace(parts, sampler=self.sampler(rank))
        return Replica(
            self.world.runtimes[rank],
            work,
            self.training,
            parts if isinstance(self.schedule, str) else replace(parts, schedule=self.schedule),
            Telemetry(rank, self.events[rank].append, self.world.injector),
            checkpoints,
            share=share,
            should_trace=True,
            device=select_device(self.device),
        )

    def whole(self) -> Run:
        """To the end, with flush and evaluation."""
        self.world.run([replica.run() for replica in self.replicas])
        return self

    def steps(self, count: int, before: Callable[[Replica, int], None] | None = None) -> Run:
        """Some steps, and what to do before each."""

        async def go(replica: Replica) -> None:
            for _ in range(count):
                if before is not None:
                    before(replica, replica.completed_steps)
                await replica.step()

        self.world.run([go(replica) for replica in self.replicas])
        return self

    def flush(self) -> Run:
        """What is under way."""
        self.world.run([replica.flush() for replica in self.replicas])
        return self

    def weights(self, rank: int = 0) -> Tensor:
        """A replica's parameters."""
        parameters = [p.detach().reshape(-1) for p in self.replicas[rank].model.parameters()]
        return torch.cat(parameters).cpu().clone()

    def mean(self) -> Tensor:
        """Of all replicas' parameters, in float64."""
        return torch.stack([self.weights(rank).double() for rank in range(self.size)]).mean(dim=0)

    def step_events(self, rank: int = 0) -> list[Event]:
        """What it told of its steps."""
        return [event for event in self.events[rank] if event["event"] == "step"]


def distance(a: Tensor, b: Tensor) -> float:
    """Relative to ``b``."""
    return float((a.double() - b.double()).norm() / b.double().norm())
