r"""Choice of the recipe that reaches a target first, by pilots that may only rule recipes out.

The target is the score of a reference at the end of the training, less a tolerance. A pilot is a whole training of
fewer steps. With d the differences of the scores of a reference's and a candidate's pilot on the same test samples,
the gap is their mean, and the noise twice the standard error of it. A gap is never read as a speed of learning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Gap", "Outcome", "Pilot", "Search", "compare_pilots", "find_crossing"]

Status: TypeAlias = Literal["reaches", "misses", "slower", "untried", "timed"]

RUNGS = ((1 / 3, 2.0), (1.0, 1.0), (2.0, 1.0))
"""Lengths of a candidate's pilots over that of the main one, and the gaps over the tolerance that rule it out.

A gap shrinks to about 0.7 of it when the training is twice as long. The last pilot decides what the main one has left
within its noise.
"""
LEAST_STEPS = 0.8
"""Smallest number of steps to a target over those of the reference that any recipe needed (measured)."""
MIN_INTERVAL_SHARE = 0.5
"""Smallest length of a pilot over that of the training that tells an interval of the time to the target."""
SHORTER, LONGER = 0.63, 1.1
"""Bounds of true times over planned ones: learning 0.7 to 1.0 of them, and a tenth for the machine (measured)."""


@dataclass(frozen=True, slots=True)
class Pilot:
    """Result of one short training.

    Args:
      steps: Number of its steps.
      curve: Steps and scores of its evaluations, on some of the test samples.
      scores: Final score of each test sample.
    """

    steps: int
    curve: Sequence[tuple[int, float]]
    scores: Tensor


@dataclass(frozen=True, slots=True)
class Gap:
    """Distance of a pilot's score below that of the reference, and twice its standard error."""

    mean: float
    noise: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a recipe.

    Args:
      status: ``reaches`` the target; ``misses`` it; ``slower``, if it could not be first; ``untried``; or
        only ``timed``.
      reason: Reason of ``untried``.
      gap: Gap of its longest pilot; ``None`` if it had none.
      steps: Estimated steps to the target; ``None`` unless it reaches it.
      max_steps: Upper bound of them, where a pilot was too short for an interval.
    """

    status: Status
    reason: str = ""
    gap: Gap | None = None
    steps: int | None = None
    max_steps: int | None = None

    def bound_seconds(self, compute_seconds: Callable[[int], float]) -> tuple[float | None, float] | None:
        """Returns the bounds of the time to the target, the lower one ``None`` if unknown; ``None`` if it misses it."""
        if self.steps is None:
            return None
        if self.max_steps is not None:
            return None, LONGER * compute_seconds(self.max_steps)
        seconds = compute_seconds(self.steps)
        return SHORTER * seconds, LONGER * seconds


def compare_pilots(pilots: Sequence[Pilot], references: Sequence[Pilot]) -> Gap:
    """Compares pilots with the reference's of the same seeds, sample by sample."""
    differences = torch.stack([b.scores - a.scores for a, b in zip(pilots, references, strict=True)]).double()
    error = differences.mean(dim=0).std() / differences.shape[1] ** 0.5
    return Gap(float(differences.mean()), 2 * float(error))


def find_crossing(curve: Sequence[tuple[int, float]], level: float) -> float | None:
    """Finds the step at which a curve first reaches a level, on a straight line between evaluations."""
    previous_step, previous = 0, curve[0][1]
    for step, score in curve:
        if score >= level:
            share = (level - previous) / (score - previous) if score > previous else 1.0
            return previous_step + max(0.0, share) * (step - previous_step)
        previous_step, previous = step, score
    return None


def average_curves(pilots: Sequence[Pilot]) -> list[tuple[int, float]]:
    """Averages the curves of several seeds."""
    points = zip(*(pilot.curve for pilot in pilots), strict=True)
    return [(seeds[0][0], fmean(score for _, score in seeds)) for seeds in points]


@dataclass(slots=True)
class Search:
    """Search for the recipe that reaches the target first.

    Candidates are tried in the order of the times of whole trainings, each with longer and longer pilots until it is
    ruled out or accepted. One that could not be earlier than an accepted one needs no pilot.

    Args:
      steps: Number of steps of the training.
      share: Length of the main pilot over that of the training.
      budget_steps: Number of steps of all pilots together, after which no other candidate is tried.
      reference: Name of the reference.
      equals: Names of candidates that learn what the reference does.
      compute_seconds: Computes the seconds of some steps of a candidate, on the slowest network.
      train: Trains pilots of a candidate, one for each seed.
      min_steps: Smallest number of steps of a pilot of each candidate.
      tolerance: Largest accepted gap.
    """

    steps: int
    share: float
    budget_steps: float
    reference: str
    equals: Sequence[str]
    compute_seconds: Callable[[str, int], float]
    train: Callable[[str, int], Sequence[Pilot]]
    min_steps: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 0.0
    spent_steps: int = 0
    _trained: dict[tuple[str, int], Sequence[Pilot]] = field(default_factory=dict)

    @property
    def pilot_steps(self) -> list[int]:
        """Steps of a candidate's pilots, in the order of training."""
        return [max(2, min(self.steps, round(self.share * length * self.steps))) for length, _ in RUNGS]

    def run_pilots(self, name: str, steps: int) -> Sequence[Pilot]:
        """Trains pilots once, and counts their steps."""
        if (name, steps) not in self._trained:
            self._trained[name, steps] = pilots = self.train(name, steps)
            self.spent_steps += steps * len(pilots)
        return self._trained[name, steps]

    def choose(self, names: Sequence[str]) -> dict[str, Outcome]:
        """Returns the outcome of each candidate, and of the reference; the earliest that reaches the target wins."""
        outcomes: dict[str, Outcome] = {}
        unlike = [name for name in names if name not in (self.reference, *self.equals)]
        for name in sorted(unlike, key=lambda name: self.compute_seconds(name, self.steps)):
            reference = self._estimate_steps(self.reference)
            alike = dict.fromkeys((self.reference, *self.equals), reference)
            reached = {other: out for other, out in {**alike, **outcomes}.items() if out.steps is not None}
            best_s = min(self.compute_seconds(other, out.steps or 0) for other, out in reached.items())
            least_steps = round(LEAST_STEPS * (reference.steps or self.steps))
            if self.compute_seconds(name, least_steps) >= best_s:
                outcomes[name] = Outcome("slower")
            else:
                outcomes[name] = self._try_candidate(name)
        reference = self._estimate_steps(self.reference)
        return {name: outcomes.get(name, reference) for name in names}

    def _try_candidate(self, name: str) -> Outcome:
        gap: Gap | None = None
        if self.min_steps.get(name, 1) > self.share * self.steps:
            return Outcome(
                "untried", f"its blocks are too long for pilots of {self.share * self.steps:.0f} steps"
            )
        if self.spent_steps >= self.budget_steps:
            return Outcome("untried", "the budget is spent")
        for steps, (length, slack) in zip(self.pilot_steps, RUNGS, strict=True):
            if steps < self.min_steps.get(name, 1):
                continue
            gap = compare_pilots(self.run_pilots(name, steps), self.run_pilots(self.reference, steps))
            if gap.mean - gap.noise > slack * self.tolerance:
                return Outcome("misses", gap=gap)
            if length >= 1 and gap.mean + gap.noise <= self.tolerance:
                break
        assert gap is not None
        return self._estimate_steps(name, gap) if gap.mean <= self.tolerance else Outcome("misses", gap=gap)

    def _estimate_steps(self, name: str, gap: Gap | None = None) -> Outcome:
        """Returns the outcome of a candidate that reaches the target, with its steps by its longest pilot."""
        length = max((steps for key, steps in self._trained if key == name), default=None)
        if length is None:
            return Outcome("reaches", gap=gap, steps=self.steps, max_steps=self.steps)
        level = average_curves(self._trained[self.reference, length])[-1][1] - self.tolerance
        crossing = find_crossing(average_curves(self._trained[name, length]), level)
        if crossing is None:
            return Outcome("reaches", gap=gap, steps=self.steps, max_steps=self.steps)
        steps = max(1, round(crossing / length * self.steps))
        is_long_enough = length >= MIN_INTERVAL_SHARE * self.steps
        return Outcome("reaches", "", gap, steps, None if is_long_enough else self.steps)
