"""Delayed updates that are swapped: what replicas have in common is the same bits, and they differ by their own last
updates alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.loop import Replica
from tests.helpers import same_bits
from tests.schedules.runs import Run, Valleys, distance

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
    "clipped": {"momentum": 0.9, "clip_norm": 0.5},
}
LAGS = [(0, 1), (5, 1), (0, 4), (3, 4), (4, 4), (5, 4), (11, 4)]


def drop(replica: Replica, step: int) -> None:
    """A learning rate that falls twice, in the middle of blocks."""
    if step in (13, 27):
        for group in replica.optimizer.param_groups:
            group["lr"] *= 0.1


def anchor(replica: Replica) -> Tensor:
    found = replica.engine.get_anchor_parameters()
    assert found is not None
    return torch.cat([tensor.reshape(-1) for tensor in found.values()]).clone()


def blocks(replica: Replica) -> list[Tensor]:
    """Own updates under way, oldest first."""
    return [flight.saved[0]["contribution"] for flight in replica.engine.flights]


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("delay", "period"), LAGS)
def test_parameters_less_the_own_last_updates_are_the_same_bits(
    delay: int, period: int, settings: dict[str, Any]
) -> None:
    run = Run(f"delayed({delay}, {period}, pull='swap')", 3, settings={"learning_rate": 0.05, **settings})
    begin = run.weights()
    own: list[list[Tensor]] = [[] for _ in range(3)]

    def note(replica: Replica, step: int) -> None:
        drop(replica, step)
        optimizer, rank = replica.optimizer, replica.runtime.comm.rank
        if step == 0:
            before: list[Tensor] = []
            optimizer.register_step_pre_hook(lambda *_: before.append(run.weights(rank)))
            optimizer.register_step_post_hook(lambda *_: own[rank].append(run.weights(rank) - before.pop()))

    for step in range(40):
        run.steps(1, note)
        anchors = [anchor(replica) for replica in run.replicas]
        for rank in range(3):
            assert same_bits(anchors[rank], anchors[0]), step
        # What the anchor holds: the blocks whose results were due, and nothing of later ones.
        arrived = max(0, (step + 1 - delay) // period * period)
        for rank in range(3):
            pending = torch.stack([torch.zeros_like(begin), *own[rank][arrived:]]).double().sum(dim=0)
            assert distance(anchors[rank] + pending, run.weights(rank)) < 1e-6, step
        means = (
            torch.stack([torch.stack(updates).double() for updates in own]).mean(dim=0)[:arrived].sum(dim=0)
        )
        assert distance(anchors[0].double(), begin.double() + means) < 1e-6, step
        if period == 1:
            # Nothing recent: the parameters are the sum, to the bit.
            for replica in run.replicas:
                total = anchor(replica)
                for block in blocks(replica):
                    total += block
                assert same_bits(run.weights(replica.runtime.comm.rank), total), step
    run.flush()
    for rank in range(3):
        assert same_bits(run.weights(rank), run.weights())
    everything = torch.stack([torch.stack(updates).double() for updates in own]).mean(dim=0).sum(dim=0)
    assert distance(run.weights().double(), begin.double() + everything) < 1e-6


def test_rounding_does_not_drift() -> None:
    """A long run at a rate so small that every update is mostly rounded away."""
    run = Run("delayed(3, pull='swap')", 2, settings={"learning_rate": 1e-7}).steps(200)
    for replica in run.replicas:
        pending = torch.stack(blocks(replica)).sum(dim=0)
        rest = run.weights(replica.runtime.comm.rank) - anchor(replica) - pending
        assert rest.abs().max() <= 4 * torch.finfo(torch.float32).eps * run.weights().abs().max()


@pytest.mark.parametrize("pull", ["swap", "auto"])
def test_with_a_lossy_codec_the_residual_is_one_of_updates(pull: str) -> None:
    """Every update is in the anchor, in a block under way, or in some replica's residual."""
    codec = {"codec": "error_feedback(topk(density=0.2))"}
    run = Run(f"delayed(4, 2, pull='{pull}')", 2, codec)
    begin = run.weights()
    own: list[Tensor] = []
    before: dict[int, Tensor] = {}
    for step in range(30):
        before.update({rank: run.weights(rank) for rank in range(2)})
        for replica in run.replicas:
            if step == 0:
                rank = replica.runtime.comm.rank
                replica.optimizer.register_step_post_hook(
                    lambda *_, rank=rank: own.append((run.weights(rank) - before[rank]).double())
                )
        run.steps(1)
    total = torch.stack(own).sum(dim=0) / 2
    residuals = [replica.engine.reducer_states[0].state.local["residual"] for replica in run.replicas]
    under_way = [block for replica in run.replicas for block in blocks(replica)]
    found = anchor(run.replicas[0]).double() - begin.double()
    # A residual holds what exchanges under way have left out already, and these are not in the anchor yet.
    waiting = len(run.replicas[0].engine.flights)
    assert waiting == 2
    run.flush()
    after = anchor(run.replicas[0]).double() - begin.double()
    assert distance(after + torch.stack(residuals).double().sum(dim=0) / 2, total) < 1e-5
    assert len(under_way) == 4
    assert distance(found, total) > 1e-3


def test_what_is_scored_is_the_mean_of_the_replicas() -> None:
    run = Run("delayed(6, 2, pull='swap')", 2, settings={"learning_rate": 0.5})

    async def go(replica: Replica) -> float:
        for _ in range(9):
            await replica.step()
        return (await replica.evaluate()).metric

    scores = run.world.run([go(replica) for replica in run.replicas])
    optimum = run.replicas[0].workload.get_optimum().double()  # type: ignore[attr-defined]
    assert scores[0] == scores[1]
    assert scores[0] == pytest.approx(-float((run.mean() - optimum).norm()), rel=1e-5)
    assert scores[0] != pytest.approx(-float((run.weights(0).double() - optimum).norm()), rel=1e-3)


def test_memory_is_reported() -> None:
    numel, block = 12 * 4, 12 * 4

    def held(schedule: str, **options: Any) -> int:
        return Run(schedule, 2, **options).whole().replicas[0].engine.peak_nbytes

    assert held("synchronous") == 0
    assert (
        held("delayed(6, pull='swap')") == numel + 7 * block
    )  # the newest is under way before the oldest is swapped
    assert held("delayed(6, 3, pull='swap')") == numel + 3 * block
    assert held("delayed(6, pull='auto')") == 2 * numel + 7 * block
    assert held("pipelined(3)") == 3 * block
    assert held("pipelined(3, correction=0.1)") == 6 * block


def test_the_gap_to_synchronous_grows_as_the_square_of_delay_and_period() -> None:
    """Valleys of unlike curvature: replicas drift apart between swaps, and their mean settles beside the optimum."""
    steps, rate = 120, 0.0125

    def gap(delay: int, period: int) -> float:
        run = Run(
            f"delayed({delay}, {period}, pull='swap')",
            2,
            shares=[torch.tensor([0]), torch.tensor([1])],
            workload=lambda: Valleys(dim=4, samples=2, groups=2),
            settings={"batch_size": 1, "learning_rate": rate, "steps": steps},
        )
        data = run.replicas[0].workload.load_datasets()[0].take(torch.arange(2), train=True)
        a, c = data.targets.double(), data.inputs.double()
        best = (a * c).sum(dim=0) / a.sum(dim=0)
        for replica in run.replicas:
            for p in replica.model.parameters():
                p.data.copy_(best)
            replica.engine.restart()
        run.steps(steps)
        return 0.5 * float((a.mean(dim=0) * (run.mean() - best).square()).sum())

    lags = [(2, 2), (4, 8), (12, 4), (16, 16)]
    x = torch.tensor([delay + period for delay, period in lags], dtype=torch.float64).log()
    y = torch.tensor([gap(*lag) for lag in lags], dtype=torch.float64).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert 1.7 < slope < 2.3, (slope, y.exp())
