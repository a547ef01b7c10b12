"""What the running statistics of a batch norm follow where a sampler scores or weighs its samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from farflung.config import Training
from farflung.recipes import parse_recipe
from farflung.runs import make_replica
from farflung.sampling.scoring import ScoringSampler
from farflung.sim import VirtualWorld
from farflung.types import Decision, Draw, DrawContext, Json, WaitWork
from farflung.workloads import Quadratic
from tests.helpers import same_tree

DRAWN, BESIDE = torch.tensor([0, 3, 5, 9]), [torch.tensor([1, 2, 4]), torch.tensor([20, 30])]


class Weighed(ScoringSampler):
    """Draws the same samples in each step, and names others for the statistics."""

    def __init__(self, statistics: Any, is_weighted: bool) -> None:
        self.statistics, self.scored_by, self._is_weighted = statistics, "loss", is_weighted

    @override
    def draw(self, context: DrawContext) -> Draw:
        return Draw(DRAWN, torch.ones(4)) if self._is_weighted else Draw(DRAWN)

    @override
    def plan_wait(
        self, context: DrawContext, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> WaitWork:
        return WaitWork([torch.arange(10)], statistics=BESIDE if self.statistics == "uniform" else ())


class Normed(Quadratic):
    """A model with running statistics."""

    @override
    def build_model(self, generator: torch.Generator) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False))


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("statistics", ["batch", "uniform"])
def test_running_statistics_are_those_of_batches_or_of_samples_beside_them(
    statistics: Any, is_weighted: bool
) -> None:
    world = VirtualWorld(1)
    parts = parse_recipe("synchronous").with_components(sampler=lambda seed: Weighed(statistics, is_weighted))
    task, training = Normed(dim=6, samples=40), Training(1, 4, 0.05, seed=3)
    replica = make_replica(world.runtimes[0], task, parts, training, shares=[torch.arange(40)])
    model, data = copy.deepcopy(replica.model), task.load_datasets()[0]
    world.run([replica.run()])
    batches = [] if is_weighted and statistics == "uniform" else [DRAWN]
    for ids in [*batches, *(BESIDE if statistics == "uniform" else ())]:
        model.train()
        model(data.take(ids, train=True).inputs)
    for (name, found), wanted in zip(replica.model.named_buffers(), model.buffers(), strict=True):
        assert same_tree({name: found}, {name: wanted}), name
