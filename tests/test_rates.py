"""Learning-rate schedules against torch's, what they refuse, and that a run follows them wherever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from farflung.config import Training
from farflung.errors import ConfigError
from farflung.rates import RATES
from farflung.types import RateSchedule
from tests.helpers import same_bits
from tests.schedules.runs import Run

RATE = 0.3
STEPS = 40


def _warm(optimizer: torch.optim.Optimizer, warmup: int, after: LRScheduler) -> LRScheduler:
    rise = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    return lr_scheduler.SequentialLR(optimizer, [rise, after], [warmup])


def _linear(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)


def _warm_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return _warm(optimizer, 8, lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 8, 0.05 * RATE))


TORCH: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 1.0),
    "constant(warmup=7)": lambda optimizer: _warm(
        optimizer, 7, lr_scheduler.ConstantLR(optimizer, factor=1.0)
    ),
    "linear(final=0.1)": _linear,
    "linear(final=0.25, until=16)": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.25, 16),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "cosine(warmup=8, final=0.05)": _warm_cosine,
    "step(every=7, gamma=0.5)": lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.5),
    "step(milestones=(5, 6, 30))": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [5, 6, 30]),
}


def rates(how: str | RateSchedule) -> RateSchedule:
    return Training(
        steps=STEPS, batch_size=1, learning_rate=RATE, learning_rate_schedule=how
    ).make_rate_schedule()


@pytest.mark.parametrize("how", TORCH)
def test_the_rate_is_that_of_torch(how: str) -> None:
    assert {one.partition("(")[0] for one in TORCH} == set(RATES), "every name is compared"
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = TORCH[how](optimizer)
    ours = rates(how)
    for step in range(STEPS):
        theirs = optimizer.param_groups[0]["lr"]
        assert RATE * ours.compute_factor(step, STEPS) == pytest.approx(theirs, rel=0, abs=1e-12), step
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("how", ["linear(final=0.2, until=10)", "cosine(warmup=3, final=0.2, until=10)"])
def test_a_fall_stays_at_its_end(how: str) -> None:
    assert [rates(how).compute_factor(done, STEPS) for done in (10, 11, STEPS, 2 * STEPS)] == pytest.approx(
        [0.2] * 4
    )


def test_milestones_inside_the_warm_up_count() -> None:
    factors = [
        rates("step(milestones=(2,), gamma=0.5, warmup=4)").compute_factor(done, STEPS) for done in range(5)
    ]
    assert factors == [0.25, 0.5, 0.375, 0.5, 0.5]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cosin", "unknown learning-rate schedule 'cosin'; did you mean cosine?"),
        ("cosine(", "write it as name or name(option=value)"),
        ("cosine(warmup=-1)", "cosine: warmup -1 must be at least 0"),
        ("cosine(final=1.5)", "cosine: final 1.5 must be at most 1"),
        ("linear(warmup=5, until=5)", "linear: until 5 must be at least 6"),
        ("linear(unit='epochs')", "linear: unit 'epochs' must be 'steps' or 'samples'"),
        ("step", "give one of every=1000 and milestones=(1000, 2000)"),
        ("step(every=3, milestones=(1, 2))", "give one of every=1000"),
        ("step(every=0)", "step: every 0 must be at least 1"),
        ("step(every=3, gamma=0)", "step: gamma must be above 0"),
        ("step(milestones=(3, 3))", "step: milestones (3, 3) must be strictly increasing"),
        ("constant(final=0.1)", "unexpected keyword argument 'final'"),
        (3, "neither text nor a RateSchedule"),
    ],
)
def test_bad_schedules_are_refused(how: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rates(how)
    assert said in str(caught.value)


# --- in a run ---------------------------------------------------------------------------------------------------

COSINE = "cosine(warmup=4, final=0.1)"
BY_SAMPLES = "cosine(warmup=32, final=0.1, unit='samples')"


def run(
    how: str | RateSchedule, schedule: str = "synchronous", folder: Path | None = None, **settings: Any
) -> Run:
    return Run(schedule, settings={"learning_rate_schedule": how, "momentum": 0.9, **settings}, folder=folder)


def told(run: Run, rank: int = 0) -> list[Any]:
    return [event.get("learning_rate") for event in run.step_events(rank)]


@pytest.mark.parametrize("how", [COSINE, BY_SAMPLES])
def test_a_run_follows_its_schedule_and_says_so(how: str) -> None:
    going = run(how).whole()
    per_step = 1 if how == COSINE else 4 * 2
    wanted = [0.05 * rates(how).compute_factor(step * per_step, 20 * per_step) for step in range(20)]
    assert told(going) == told(going, 1) == wanted
    assert same_bits(going.weights(0), going.weights(1))


def test_steps_are_those_of_torch_with_its_own_schedule() -> None:
    """The mean gradient of two replicas on the same batches is that of one: plain SGD, step by step."""
    going = Run(
        "synchronous", alike=True, settings={"learning_rate_schedule": "linear(warmup=3)", "steps": 12}
    )
    alone = Run("synchronous", size=1, alike=True, settings={"steps": 12})
    theirs = alone.replicas[0].optimizer

    def decide(replica: Any, step: int) -> None:
        theirs.param_groups[0]["lr"] = 0.05 * min(1, (step + 1) / 3) * (1 - max(0, step - 3) / 9)

    assert same_bits(going.steps(12).weights(), alone.steps(12, decide).weights())


def test_a_constant_rate_leaves_the_events_as_they_were() -> None:
    assert all("learning_rate" not in event for event in run("constant").whole().step_events())
    assert told(run("constant(warmup=2)", steps=3).whole()) == [0.025, 0.05, 0.05]


@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("synchronous", BY_SAMPLES),
        ("pipelined(3)", COSINE),
        ("pipelined(2, predict=True)", "step(milestones=(6, 9, 14), gamma=0.5)"),
        ("delayed(3, 2)", BY_SAMPLES),
    ],
)
def test_a_run_resumed_in_the_middle_ends_as_the_whole(schedule: str, how: str, tmp_path: Path) -> None:
    whole = run(how, schedule).whole()
    run(how, schedule, tmp_path, checkpoint_every=7).whole()
    again = run(how, schedule, tmp_path)
    for replica in again.replicas:
        replica.resume(7)
    again.whole()
    assert told(again) == told(whole)[7:]
    for rank in range(2):
        assert same_bits(again.weights(rank), whole.weights(rank))


def test_a_resumed_run_takes_the_rate_it_is_given(tmp_path: Path) -> None:
    run("constant", folder=tmp_path, steps=4).whole()
    resumed = run("constant", folder=tmp_path, steps=5, learning_rate=0.01)
    for replica in resumed.replicas:
        replica.resume(4)
    before = resumed.weights()
    resumed.whole()
    slow = float((resumed.weights() - before).norm())
    resumed = run("constant", folder=tmp_path, steps=5, learning_rate=0.02)
    for replica in resumed.replicas:
        replica.resume(4)
    assert float((resumed.whole().weights() - before).norm()) == pytest.approx(2 * slow, rel=1e-3)


def test_predictions_follow_the_rate_of_their_step() -> None:
    """At a rate of next to nothing a prediction leads nowhere, so gradients are those of the pipeline without it."""
    how = "constant(warmup=1000000000)"
    predicted, plain = (
        run(how, schedule, steps=6) for schedule in ("pipelined(2, predict=True)", "pipelined(2)")
    )
    assert same_bits(predicted.whole().weights(), plain.whole().weights())


@dataclass(frozen=True)
class Sawtooth:
    """A schedule that is no part of farflung."""

    unit: Literal["steps", "samples"] = "steps"

    def compute_factor(self, progress: int, total: int) -> float:
        del total
        return 1 - progress % 3 / 4


def test_a_schedule_of_ones_own() -> None:
    going = run(Sawtooth(), steps=4).whole()
    assert told(going) == pytest.approx([0.05, 0.0375, 0.025, 0.05])
    assert (
        json.loads(json.dumps(going.training.to_json()))["learning_rate_schedule"]
        == "tests.test_rates:Sawtooth"
    )
