"""Delayed updates with a pull: by the equations, with an anchor of the same bits on all, and a past that fades."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.errors import ConfigError
from farflung.loop import Replica
from farflung.moments import get_momentum
from farflung.schedules.merges import compute_step_share, pull
from farflung.sim import LinkModel
from farflung.types import Batch
from farflung.workloads import Quadratic
from tests.helpers import same_bits
from tests.schedules.runs import Run, distance
from tests.schedules.test_anchor import LAGS, OPTIMIZERS, anchor, drop


class Recorder:
    """What the optimizers of a run do to the parameters, step by step."""

    def __init__(self, run: Run) -> None:
        self.begin = run.weights().double()
        self.own: list[dict[int, Tensor]] = [{} for _ in range(run.size)]
        for replica in run.replicas:
            self._listen(run, replica)

    def _listen(self, run: Run, replica: Replica) -> None:
        rank = replica.runtime.comm.rank
        before: list[Tensor] = []

        def after(*_: object) -> None:
            self.own[rank][replica.completed_steps] = (run.weights(rank) - before.pop()).double()

        replica.optimizer.register_step_pre_hook(lambda *_: before.append(run.weights(rank)))
        replica.optimizer.register_step_post_hook(after)

    def expected(
        self, steps: int, delay: int, period: int, share: float, left_out: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The anchor, and each replica's parameters, by the equations from the updates alone.

        Args:
          steps: so many were done.
          delay: D.
          period: K.
          share: rho.
          left_out: steps whose updates never were.
        """
        size, zero = len(self.own), torch.zeros_like(self.begin)
        whole = 1 - (1 - share) ** period
        a, s, f = self.begin.clone(), [self.begin.clone() for _ in self.own], [zero.clone() for _ in self.own]
        means: dict[int, Tensor] = {}
        for step in range(steps):
            for rank in range(size):
                f[rank] += zero if step in left_out else self.own[rank].get(step, zero)
            if (step + 1) % period == 0:
                means[step + delay] = torch.stack(f).mean(dim=0)
                for rank in range(size):
                    s[rank], f[rank] = s[rank] + f[rank], zero.clone()
            if step in means:
                a = a + means[step]
                s = [each + whole * (a - each) for each in s]
        return a, [one + other for one, other in zip(s, f, strict=True)]


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("delay", "period"), LAGS)
def test_it_is_by_the_equations(delay: int, period: int, settings: dict[str, Any]) -> None:
    run = Run(f"delayed({delay}, {period}, pull='auto')", 3, settings={"learning_rate": 0.05, **settings})
    recorder = Recorder(run)
    share = compute_step_share(get_momentum(run.replicas[0].optimizer), delay, period)
    for step in range(40):
        run.steps(1, drop)
        a, w = recorder.expected(step + 1, delay, period, share)
        for rank, replica in enumerate(run.replicas):
            assert same_bits(anchor(replica), anchor(run.replicas[0])), step
            assert distance(run.weights(rank), w[rank]) < 1e-6, step
        assert distance(anchor(run.replicas[0]), a) < 1e-6, step
    run.flush()
    for rank in range(3):
        assert same_bits(run.weights(rank), run.weights())
    everything = torch.stack([torch.stack(list(own.values())) for own in recorder.own]).mean(dim=0).sum(dim=0)
    assert distance(run.weights().double(), recorder.begin + everything) < 1e-6


def test_a_share_of_ones_own() -> None:
    run = Run("delayed(6, 2, pull=0.03)", 2, settings={"momentum": 0.9})
    recorder = Recorder(run)
    run.steps(30)
    _, w = recorder.expected(30, 6, 2, 0.03)
    assert distance(run.weights(1), w[1]) < 1e-6


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ((0.9, 0), 1.0),
        ((0.9, 0, 4), 1.0),
        ((0.0, 1), 1 / 3),
        ((0.0, 5), 1 / 7),
        ((0.9, 5), 0.1),
        ((0.9, 40), 1 / 42),
        ((0.99, 40), 0.01),
        ((0.9, 20, 8), 1 / 29),
    ],
)
def test_the_rule(given: tuple[float, int], share: float) -> None:
    assert compute_step_share(*given) == pytest.approx(share)


def test_rounding_is_forgotten() -> None:
    """A long run at a rate so small that every update is mostly rounded away."""
    run = Run("delayed(3, pull='auto')", 2, settings={"learning_rate": 1e-7}).steps(400)
    for replica in run.replicas:
        rest = run.weights(replica.runtime.comm.rank) - anchor(replica)
        assert rest.abs().max() <= 8 * torch.finfo(torch.float32).eps * run.weights().abs().max()


# --- whose momentum, and which delay ------------------------------------------------------------------------------


def test_momentum_is_the_largest_of_all_groups() -> None:
    def found(kind: Callable[..., torch.optim.Optimizer], *groups: dict[str, Any]) -> float:
        return get_momentum(
            kind([{"params": nn.Linear(2, 2).parameters(), **group} for group in groups], lr=0.1)
        )

    assert found(torch.optim.SGD, {}, {"momentum": 0.8}, {"momentum": 0.5}) == 0.8
    assert found(torch.optim.AdamW, {"betas": (0.7, 0.95)}, {}) == 0.9
    assert found(torch.optim.Adagrad, {}) == 0.0


def test_a_momentum_that_never_fades_is_refused() -> None:
    with pytest.raises(ConfigError, match="momentum 1: must be below 1"):
        pull.Pull().check(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1, momentum=1.0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int, int]]:
    """What the rule was asked, in order."""
    found: list[tuple[float, int, int]] = []

    def share(*given: Any) -> float:
        found.append(given)
        return compute_step_share(*given)

    monkeypatch.setattr(pull, "compute_step_share", share)
    return found


def test_a_delay_of_its_own_choice_takes_the_share_with_it(asked: list[tuple[float, int, int]]) -> None:
    run = Run(
        "delayed('auto', pull='auto')",
        2,
        {"collective": "direct"},
        LinkModel(0.17),
        0.1 / 3,
        settings={"batch_size": 1, "momentum": 0.9},
    )
    run.steps(12)
    assert asked == [(0.9, 0, 1)] * 8 + [(0.9, 4, 1)] * 8, (
        "alike on both, four steps without and four with a delay"
    )
    assert not same_bits(run.weights(0), run.weights(1))
    assert same_bits(anchor(run.replicas[0]), anchor(run.replicas[1]))


def test_momentum_that_changes_takes_the_share_with_it(asked: list[tuple[float, int, int]]) -> None:
    def fall(replica: Replica, step: int) -> None:
        replica.optimizer.param_groups[0]["momentum"] = 0.9 if step < 5 else 0.5

    Run("delayed(2, pull='auto')", 1, settings={"momentum": 0.9}).steps(7, fall)
    assert [momentum for momentum, _, _ in asked] == [0.9] * 3 + [0.5] * 2


def test_with_adam_it_is_the_first_beta(asked: list[tuple[float, int, int]]) -> None:
    Run("delayed(2, pull='auto')", 1, settings={"optimizer": "adam(betas=(0.7, 0.9))"}).steps(3)
    assert asked == [(0.7, 2, 1)]


# --- evaluation ---------------------------------------------------------------------------------------------------


def test_what_is_scored_and_kept_is_the_anchor() -> None:
    run = Run("delayed(6, 2, pull='auto')", 2, settings={"learning_rate": 0.5})

    async def go(replica: Replica) -> tuple[float, Tensor]:
        for _ in range(9):
            await replica.step()
        return (await replica.evaluate()).metric, (await replica.get_consensus_state())["w"]

    found = run.world.run([go(replica) for replica in run.replicas])
    a, optimum = anchor(run.replicas[0]), run.replicas[0].workload.get_optimum()  # type: ignore[attr-defined]
    own = [run.weights(rank) for rank in range(2)]
    for score, kept in found:
        assert score == pytest.approx(-float((a - optimum).norm()), rel=1e-6)
        assert score != pytest.approx(-float((run.mean() - optimum).norm()), rel=1e-3)
        assert same_bits(kept, a)
    assert not same_bits(own[0], own[1])
    assert all(not same_bits(each, a) for each in own), "each has its own again"


def test_a_run_that_is_scored_trains_alike() -> None:
    often, never = (
        Run("delayed(3, 2, pull='auto')", 3, settings={"evaluate_every": every}).whole() for every in (1, 0)
    )
    assert same_bits(often.weights(), never.weights())


# --- losses that are not finite -----------------------------------------------------------------------------------


class Spoilt(Quadratic):
    """One whose loss becomes infinite at step 5 of the replica that spoils."""

    forwards = 0
    spoils = False

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        self.forwards += model.training
        losses = super().compute_losses(model, batch)
        return losses * float("inf") if self.spoils and self.forwards == 6 else losses


@pytest.mark.parametrize(("delay", "period", "block"), [(4, 1, (5,)), (5, 2, (4, 5)), (1, 3, (3, 4, 5))])
def test_what_is_skipped_is_taken_out_at_once(delay: int, period: int, block: tuple[int, ...]) -> None:
    """Also where pulls have gone over it while its exchange was under way."""
    run = Run(
        f"delayed({delay}, {period}, pull='auto')",
        3,
        workload=lambda: Spoilt(dim=6, samples=48),
        settings={"on_nonfinite": "skip", "momentum": 0.5},
    )
    run.replicas[1].workload.spoils = True  # type: ignore[attr-defined]
    recorder, share = Recorder(run), compute_step_share(0.5, delay, period)
    due = block[-1] + delay
    run.steps(due)
    _, before = recorder.expected(due, delay, period, share, block)
    assert distance(run.weights(0), before[0]) > 1e-3
    for step in range(due, due + 6):
        run.steps(1)
        a, w = recorder.expected(step + 1, delay, period, share, block)
        assert distance(anchor(run.replicas[2]), a) < 1e-6
        for rank in range(3):
            assert distance(run.weights(rank), w[rank]) < 1e-6, (step, rank)
