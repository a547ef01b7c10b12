"""Up to which learning rates schedules are stable: by eigenvalues of what they do, and that the code does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from farflung.schedules.merges import compute_step_share
from farflung.workloads import Quadratic
from tests.schedules.runs import Run, distance

Vector = NDArray[np.float64]
Step = Callable[[Vector, Vector, int], Vector]
"""One step of a linear recurrence: its state, where the loss is least, and the number of the step. In the first row of
the state are the parameters; the rest is momentum and what is under way. Columns are independent.
"""
FOR_GOOD = 1 << 20
"""A step at which results have long been arriving."""


def synchronous(momentum: float) -> float:
    """Up to which rate synchronous SGD is stable, on a quadratic of curvature 1."""
    return 2 * (1 + momentum)


# --- what schedules do to a quadratic of curvature 1 --------------------------------------------------------------


def swapped(rate: float, momentum: float, delay: int) -> Step:
    """The difference of two replicas whose updates are swapped: that of their last updates, and nothing else."""

    def step(x: Vector, least: Vector, number: int) -> Vector:
        w, u, *queue = x
        u = momentum * u - rate * (w - least)
        queue = [*queue[1:], u]
        return np.array([np.sum(queue, axis=0), u, *queue])

    return step


def pulled(rate: float, momentum: float, delay: int) -> Step:
    """The difference of two replicas that are pulled to the same anchor."""

    def step(x: Vector, least: Vector, number: int) -> Vector:
        w, u = x
        u = momentum * u - rate * (w - least)
        share = compute_step_share(momentum, delay) if number >= delay else 0.0
        return np.array([(1 - share) * (w + u), u])

    return step


def pulled_mean(rate: float, momentum: float, delay: int) -> Step:
    """Their mean; the last of the state is how far the anchor is behind it."""

    def step(x: Vector, least: Vector, number: int) -> Vector:
        w, u, *queue, behind = x
        u = momentum * u - rate * (w - least)
        queue = [*queue, u]
        behind = behind + queue[-1] - queue[0]
        share = compute_step_share(momentum, delay) if number >= delay else 0.0
        return np.array([w + u - share * behind, u, *queue[1:], (1 - share) * behind])

    return step


def late(rate: float, momentum: float, delay: int) -> Step:
    """All replicas, which step on stale means."""

    def step(x: Vector, least: Vector, number: int) -> Vector:
        w, v, *queue = x
        v = momentum * v + queue[0]
        return np.array([w - rate * v, v, *queue[1:], w - least])

    return step


def predictions(rate: float, momentum: float, delay: int) -> Step:
    """The difference of two replicas' predictions, which follow from their own gradients alone."""

    def step(x: Vector, least: Vector, number: int) -> Vector:
        w, v = np.zeros_like(least), np.zeros_like(least)
        for gradient in x[2:]:
            v = momentum * v + gradient
            w = w - rate * v
        return np.array([w, v, *x[3:], w - least])

    return step


def size(kind: Callable[..., Step], delay: int) -> int:
    """Of the state: parameters, momentum, what is under way, and how far the anchor is behind."""
    return 2 if kind is pulled else 2 + delay + (kind is pulled_mean)


def stable(kind: Callable[..., Step], rate: float, momentum: float, delay: int) -> bool:
    """Whether all eigenvalues lie inside the unit circle."""
    count = size(kind, delay)
    matrix = kind(rate, momentum, delay)(np.eye(count), np.zeros(count), FOR_GOOD)
    return bool(np.abs(np.linalg.eigvals(matrix)).max() < 1)


def largest_rate(kind: Callable[..., Step], momentum: float, delay: int) -> float:
    """Below which all rates are stable."""
    low, high = 0.0, synchronous(momentum)
    for rate in np.geomspace(1e-3, high, 60):
        if not stable(kind, rate, momentum, delay):
            high = rate
            break
        low = rate
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(kind, middle, momentum, delay) else (low, middle)
    return low


# --- what is documented -------------------------------------------------------------------------------------------

DOCUMENTED = {
    (swapped, 0.0): {5: 1.0, 20: 1.0},
    (swapped, 0.9): {5: 0.22, 10: 0.069, 15: 0.037, 20: 0.025},
    (late, 0.0): {1: 1.0, 5: 0.28, 10: 0.15, 15: 0.10, 20: 0.077},
    (late, 0.9): {1: 0.10, 5: 0.022, 10: 0.011, 15: 0.0079, 20: 0.0061},
    (predictions, 0.0): {1: 1.0, 5: 1.0, 10: 1.0, 15: 1.0, 20: 1.0},
    (predictions, 0.9): {1: 1.0, 5: 0.14, 10: 0.048, 15: 0.027, 20: 0.019},
}


@pytest.mark.parametrize(
    ("kind", "momentum", "delay", "documented"),
    [(*key, delay, rate) for key, rates in DOCUMENTED.items() for delay, rate in rates.items()],
)
def test_the_largest_learning_rate_is_as_documented(
    kind: Callable[..., Step], momentum: float, delay: int, documented: float
) -> None:
    assert largest_rate(kind, momentum, delay) == pytest.approx(documented, rel=0.04)


@pytest.mark.parametrize("kind", [pulled, pulled_mean])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("delay", [1, 2, 3, 4, 5, 10, 20, 50, 100])
def test_a_pull_allows_nearly_what_synchronous_sgd_does(
    kind: Callable[..., Step], momentum: float, delay: int
) -> None:
    for part in np.geomspace(1e-3, 0.75, 12):
        assert stable(kind, part * synchronous(momentum), momentum, delay), part


def test_a_pull_that_is_too_strong_breaks_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the rule has a reason."""
    monkeypatch.setattr(f"{__name__}.compute_step_share", lambda momentum, delay: 0.1)
    assert not stable(pulled_mean, 0.02, 0.9, 20)
    assert stable(pulled, 3.8, 0.9, 20)


# --- that the code does it ----------------------------------------------------------------------------------------


def two_valleys(schedule: str, rate: float, momentum: float) -> Run:
    """Two replicas with one sample each, so that nothing is random."""
    return Run(
        schedule,
        2,
        shares=[torch.tensor([0]), torch.tensor([1])],
        workload=lambda: Quadratic(dim=4, samples=2, groups=2, spread=1.0),
        settings={"batch_size": 1, "learning_rate": rate, "momentum": momentum},
    )


def least(run: Run) -> tuple[Vector, Vector]:
    """Where the loss of each replica is least."""
    centres = (
        run.replicas[0].workload.load_datasets()[0].take(torch.arange(2), train=True).inputs.double().numpy()
    )
    return centres[0], centres[1]


def followed(
    kind: Callable[..., Step], start: Vector, least: Vector, given: tuple[Any, ...], steps: int
) -> Vector:
    """Where a recurrence comes to from parameters and nothing under way."""
    step, x = kind(*given), np.zeros((size(kind, given[-1]), len(start)))
    x[0] = start
    for number in range(steps):
        x = step(x, least, number)
    return x


MOMENTA, DELAYS = (0.0, 0.9, 0.99), (1, 5, 20, 100)


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("delay", DELAYS)
def test_the_pull_is_the_recurrence(momentum: float, delay: int) -> None:
    rate, steps = 0.3 * synchronous(momentum), 2 * delay + 30
    run = two_valleys(f"delayed({delay}, pull='auto')", rate, momentum)
    start, (one, other) = run.mean().numpy(), least(run)
    run.steps(steps)
    follow = partial(followed, given=(rate, momentum, delay), steps=steps)
    mean = follow(pulled_mean, start, (one + other) / 2)[0]
    assert distance(run.mean(), torch.from_numpy(mean)) < 1e-3
    difference = follow(pulled, 0 * start, one - other)[0]
    assert distance(run.weights(0) - run.weights(1), torch.from_numpy(difference)) < 1e-3


@pytest.mark.parametrize("momentum", MOMENTA[:2])
@pytest.mark.parametrize("delay", DELAYS[:3])
def test_swaps_are_the_recurrence(momentum: float, delay: int) -> None:
    rate = 0.5 * largest_rate(swapped, momentum, delay)
    run = two_valleys(f"delayed({delay}, pull='swap')", rate, momentum)
    one, other = least(run)
    run.steps(60)
    difference = followed(swapped, 0 * one, one - other, (rate, momentum, delay), 60)[0]
    assert distance(run.weights(0) - run.weights(1), torch.from_numpy(difference)) < 1e-3


@pytest.mark.parametrize("momentum", MOMENTA[:2])
@pytest.mark.parametrize("delay", DELAYS[:3])
def test_stale_means_and_predictions_are_the_recurrences(momentum: float, delay: int) -> None:
    rate = 0.5 * largest_rate(late, momentum, delay)
    run = two_valleys(f"pipelined({delay + 1}, predict=False)", rate, momentum)
    start, (one, other) = run.mean().numpy(), least(run)
    run.steps(60)
    mean = followed(late, start, (one + other) / 2, (rate, momentum, delay), 60)[0]
    assert distance(run.mean(), torch.from_numpy(mean)) < 1e-3

    rate = 0.5 * largest_rate(predictions, momentum, delay)
    run = two_valleys(f"pipelined({delay + 1}, predict=True)", rate, momentum).steps(60)
    newest = [replica.engine.flights[-1].saved[0]["contribution"] for replica in run.replicas]
    difference = followed(predictions, 0 * one, one - other, (rate, momentum, delay), 60)[-1]
    assert distance(newest[0] - newest[1], torch.from_numpy(difference)) < 1e-3


def apart(schedule: str, rate: float, momentum: float, steps: int) -> float:
    """How far two replicas are from each other."""
    run = Run(
        schedule,
        2,
        workload=lambda: Quadratic(dim=4, samples=64, spread=1.0),
        settings={"learning_rate": rate, "momentum": momentum},
    )
    run.steps(steps)
    return float((run.weights(0) - run.weights(1)).norm())


@pytest.mark.parametrize(("delay", "momentum", "steps"), [(5, 0.9, 100), (10, 0.9, 300), (5, 0.0, 100)])
def test_replicas_part_above_the_largest_learning_rate(delay: int, momentum: float, steps: int) -> None:
    rate = largest_rate(swapped, momentum, delay)
    schedule = f"delayed({delay}, pull='swap')"
    assert apart(schedule, 0.8 * rate, momentum, steps) < 5
    assert apart(schedule, 1.5 * rate, momentum, steps) > 100


def test_pulled_replicas_stay_together_where_synchronous_sgd_is_stable_only_just() -> None:
    rate = 0.9 * synchronous(0.9)
    assert apart("delayed(20, pull='auto')", rate, 0.9, 400) < 50
    assert apart("delayed(20, pull='auto')", 1.3 * synchronous(0.9), 0.9, 60) > 1e6
    assert apart("delayed(20, pull='swap')", rate, 0.9, 40) > 200
