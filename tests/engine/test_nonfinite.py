"""A loss that is not finite: every replica does the same about it, at the same step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from farflung.config import Training
from farflung.errors import NonFinite
from farflung.loop import Replica
from farflung.recipes import parse_recipe
from farflung.sim import VirtualWorld
from farflung.telemetry import Event, Telemetry
from farflung.types import Batch
from farflung.workloads import Quadratic

TRAINING = Training(steps=6, batch_size=4, learning_rate=0.1, seed=1)
BAD_STEP = 3


class Spoilt(Quadratic):
    """One whose loss becomes infinite for one replica at one step."""

    forwards = 0
    spoils = False

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            self.forwards += 1
            if self.spoils and self.forwards == BAD_STEP + 1:
                return super().compute_losses(model, batch) * float("inf")
        return super().compute_losses(model, batch)


def trained(policy: str, size: int = 3, bad: tuple[int, ...] = (1,)) -> tuple[list[Replica], list[Event]]:
    """The replicas after all steps, and rank 0's events."""
    world = VirtualWorld(size)
    events: list[Event] = []
    replicas = []
    for runtime in world.runtimes:
        work = Spoilt(dim=8, samples=64)
        work.spoils = runtime.comm.rank in bad
        sinks = [events.append] if runtime.comm.rank == 0 else []
        replicas.append(
            Replica(
                runtime,
                work,
                replace(TRAINING, on_nonfinite=policy),
                parse_recipe("synchronous").build_components(1),
                Telemetry(runtime.comm.rank, *sinks),
            )
        )
    world.run([replica.run() for replica in replicas])
    return replicas, events


def weights(replica: Replica) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in replica.model.parameters()])


@pytest.mark.parametrize(
    ("bad", "who"), [((1,), "on rank 1:"), ((0, 2), "on rank 0, 2:"), ((0, 1, 2), "on 3 ranks:")]
)
def test_stop_names_step_and_replicas(bad: tuple[int, ...], who: str) -> None:
    with pytest.raises(NonFinite, match=f"at step {BAD_STEP} {who}"):
        trained("stop", bad=bad)


def test_skip_leaves_the_parameters_as_they_were() -> None:
    replicas, events = trained("skip")
    assert [e["nonfinite"] for e in events if e["event"] == "step"] == [0, 0, 0, 1, 0, 0]
    for replica in replicas:
        assert torch.isfinite(weights(replica)).all()
        assert torch.equal(weights(replica), weights(replicas[0]))
    everywhere, _ = trained("skip", bad=(0, 1, 2))
    assert torch.equal(weights(everywhere[0]), weights(replicas[0]))


def test_exclude_takes_the_mean_of_the_others() -> None:
    replicas, _ = trained("exclude")
    assert torch.isfinite(weights(replicas[0])).all()
    assert all(torch.equal(weights(replica), weights(replicas[0])) for replica in replicas)
    skipped, _ = trained("skip")
    assert not torch.equal(weights(skipped[0]), weights(replicas[0]))


def test_exclude_with_nobody_left_skips() -> None:
    excluded, _ = trained("exclude", bad=(0, 1, 2))
    skipped, _ = trained("skip", bad=(0, 1, 2))
    assert torch.equal(weights(excluded[0]), weights(skipped[0]))
