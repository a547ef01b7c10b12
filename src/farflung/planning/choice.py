r"""Choice of the recipe that reaches a target first, by pilots that may only rule recipes out.

The target is the score of a reference at the end of the training, less a tolerance. A pilot is a whole training of
fewer steps. With d the differences of the scores of a reference's and a candidate's pilot on the same test samples,
the gap is their mean, and the noise twice the standard error of it. A gap is never read as a speed of learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, TypeAlias

import torch

from farflung.planning.timing import Pace

__all__ = ["Pilot", "PlanRow", "Search", "compare_pilots", "find_crossing"]

Status: TypeAlias = Literal["reaches", "misses", "slower", "timed", "untried"]

RUNGS = ((1 / 3, 2.0), (1.0, 1.0), (2.0, 1.0))
"""Lengths of a candidate's pilots over that of the main one, and the gaps over the tolerance that rule it out.

The last pilot decides what the main one has left within its noise, once all other candidates have been tried.
"""
SHRINKS = 0.7
"""Factor of a gap, and of the share of the steps that a target takes, when a training is twice as long (measured)."""
LEAST_STEPS = 0.8
"""Smallest number of steps to a target over those of the reference that any recipe needed (measured)."""
UNFOUND_FACTOR = 2
"""Factor of the default budget as long as nothing but the reference is known to reach the target."""
NUM_TENTHS = 10
"""Number of parts of a training in each of which its loss is bounded."""
NORMAL_80 = 1.28
"""Standard deviations of a normal distribution within which 80 % of it lie."""
MACHINE = 1.1
"""Factor between real and simulated times in either direction."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Figures of one recipe, on the network where it is slowest.

    Args:
      recipe: Recipe with its changes.
      network: That network.
      pace: Times of its steps there; ``None`` if they were not timed.
      duration_s: Seconds of all steps.
      step_s: Mean seconds of a step.
      waiting: Share of a step that waits for exchanges.
      status: ``reaches`` the target; ``misses`` it; ``slower`` than one that reaches it; ``timed`` only; or
        ``untried``.
      reason: Reason of ``untried``.
      gap: Score of its longest pilot below the reference's; ``None`` without a pilot.
      noise: Twice the standard error of the gap.
      steps: Estimated steps to the target; ``None`` unless it reaches it.
      low_s: Lower bound of the seconds to the target; ``None`` if only the upper one is known.
      high_s: Upper bound; ``None`` unless it reaches the target.
      sent_nbytes: Bytes that a replica sends up to the target.
      loss_bounds: Upper bounds of the training loss in each tenth of the training, if it reaches the target.
      uncharged: Methods whose coding takes no time, because the device has no rate for it.
    """

    recipe: str
    network: str = ""
    pace: Pace | None = None
    duration_s: float | None = None
    step_s: float | None = None
    waiting: float = 0.0
    status: Status = "untried"
    reason: str = ""
    gap: float | None = None
    noise: float | None = None
    steps: int | None = None
    low_s: float | None = None
    high_s: float | None = None
    sent_nbytes: float | None = None
    loss_bounds: Sequence[float | None] = ()
    uncharged: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Pilot:
    """Result of one short training.

    Args:
      steps: Number of its steps.
      curve: Steps and scores of its evaluations, on some of the test samples.
      scores: Final score of each test sample.
      loss_bounds: Mean of the training loss in each tenth and twice its standard deviation; ``None`` if unknown.
      seconds: Processor seconds that it took.
    """

    steps: int
    curve: Sequence[tuple[int, float]]
    scores: Sequence[float]
    loss_bounds: Sequence[float | None] = ()
    seconds: float = 0.0


def compare_pilots(pilots: Sequence[Pilot], references: Sequence[Pilot]) -> tuple[float, float]:
    """Returns the gap of pilots to the reference's of the same seeds, and its noise."""
    scores, reference_scores = (
        torch.tensor([pilot.scores for pilot in group], dtype=torch.float64) for group in (pilots, references)
    )
    differences = (reference_scores - scores).mean(dim=0)
    return float(differences.mean()), 2 * float(differences.std()) / len(differences) ** 0.5


def find_crossing(curve: Sequence[tuple[int, float]], level: float) -> float | None:
    """Finds the step at which a curve first reaches a level, on a straight line between evaluations."""
    previous_step, previous = 0, curve[0][1]
    for step, score in curve:
        if score >= level:
            share = (level - previous) / (score - previous) if score > previous else 1.0
            return previous_step + max(0.0, share) * (step - previous_step)
        previous_step, previous = step, score
    return None


def bound_crossing(
    pilots: Sequence[Pilot], references: Sequence[Pilot], tolerance: float
) -> tuple[float | None, float | None, float | None]:
    """Bounds the step at which pilots reach the reference's last score less the tolerance.

    Curves are averaged over seeds and over three evaluations. The noise of a score is how far evaluations in the second
    half of both curves are from these means. Noise of 80 % of all cases moves the level down and up.

    Returns:
      The step for the lower level, the level itself and the upper one; ``None`` where the curve does not reach it.
    """
    curves, deviations = [], list[float]()
    for group in (pilots, references):
        steps = [step for step, _ in group[0].curve]
        scores = [fmean(score for _, score in seeds) for seeds in zip(*(p.curve for p in group), strict=True)]
        means = [fmean(scores[max(0, index - 1) : index + 2]) for index in range(len(scores))]
        deviations += [
            score - mean for score, mean in list(zip(scores, means, strict=True))[len(scores) // 2 :]
        ]
        curves.append([*zip(steps, means, strict=True)])
    curve, reference = curves
    level, noise = reference[-1][1] - tolerance, NORMAL_80 * fmean(d * d for d in deviations) ** 0.5
    low, middle, high = (find_crossing(curve, level + shift) for shift in (-noise, 0.0, noise))
    return low, middle, high


@dataclass(slots=True)
class Search:
    """Search for the recipe that reaches the target first.

    Candidates are tried in the order of the times of whole trainings, each with longer and longer pilots until it is
    ruled out or accepted. Those whose gap is within its noise get a last pilot after all others have been tried. One
    that could not be earlier than an accepted one needs no pilot. A pilot that would exceed the budget is not begun.

    Args:
      rows: Rows of the timed candidates and the reference by recipe, which :meth:`choose` completes.
      reference: Recipe of the reference.
      equals: Recipes that learn what the reference does.
      steps: Number of steps of the training.
      share: Length of the main pilot over that of the training.
      train: Trains pilots of a candidate, one for each seed.
      min_steps: Smallest number of steps of a pilot of each candidate.
      budget_s: Processor seconds of all pilots.
      budget_steps: Number of steps of all pilots together, if ``budget_s`` is ``None``; :data:`UNFOUND_FACTOR` times as
        many as long as nothing but the reference is known to reach the target.
      tolerance: Largest accepted gap.
    """

    rows: dict[str, PlanRow]
    reference: str
    equals: Collection[str]
    steps: int
    share: float
    train: Callable[[str, int], Sequence[Pilot]]
    min_steps: Mapping[str, int] = field(default_factory=dict)
    budget_s: float | None = None
    budget_steps: float = math.inf
    tolerance: float = 0.0
    spent_steps: int = 0
    _spent_s: float = 0.0
    _trained: dict[tuple[str, int], Sequence[Pilot]] = field(default_factory=dict)

    @property
    def pilot_steps(self) -> list[int]:
        """Steps of a candidate's pilots, in the order of training."""
        return [max(2, min(self.steps, round(self.share * length * self.steps))) for length, _ in RUNGS]

    def compute_seconds(self, name: str) -> float:
        """Computes the seconds of a candidate to the target, or of all steps if its steps to it are not known."""
        row = self.rows[name]
        assert row.pace is not None
        return row.pace.compute_seconds(row.steps or self.steps)

    def run_pilots(self, name: str, steps: int) -> Sequence[Pilot]:
        """Trains pilots once, and counts what they cost."""
        if (name, steps) not in self._trained:
            self._trained[name, steps] = pilots = self.train(name, steps)
            self.spent_steps += steps * len(pilots)
            self._spent_s += sum(pilot.seconds for pilot in pilots)
        return self._trained[name, steps]

    def _can_afford(self, name: str, steps: int) -> bool:
        """Returns True if pilots of a candidate and the reference are within the budget, by those so far."""
        num_seeds = max((len(pilots) for pilots in self._trained.values()), default=1)
        new_steps = (
            num_seeds * steps * sum((key, steps) not in self._trained for key in (name, self.reference))
        )
        if self.budget_s is None:
            others = self.rows.keys() - {self.reference, *self.equals}
            is_found = any(self.rows[other].status == "reaches" for other in others)
            return self.spent_steps + new_steps <= self.budget_steps * (1 if is_found else UNFOUND_FACTOR)
        return self._spent_s * (1 + new_steps / max(1, self.spent_steps)) <= self.budget_s

    def choose(self) -> str:
        """Decides on each candidate, and returns the earliest that reaches the target."""
        unlike = [name for name in self.rows if name != self.reference and name not in self.equals]
        for try_candidate in (self._try_candidate, self._decide_candidate):
            for name in sorted(unlike, key=self.compute_seconds):
                row = self.rows[name]
                if row.status != "timed" or row.pace is None:
                    continue
                best_s = self.compute_seconds(self._find_best())
                least_steps = round(LEAST_STEPS * (self.rows[self.reference].steps or self.steps))
                if row.pace.compute_seconds(least_steps) >= best_s:
                    self.rows[name] = replace(row, status="slower")
                else:
                    try_candidate(name)
        return self._find_best()

    def _find_best(self) -> str:
        for name in (self.reference, *self.equals):  # a longer pilot of the reference may have come
            self._accept(name)
        reached = [name for name, row in self.rows.items() if row.status == "reaches"]
        return min(reached, key=self.compute_seconds)

    def _try_candidate(self, name: str) -> None:
        """Rules a candidate out or accepts it, unless its gap is within its noise."""
        min_steps = self.min_steps.get(name, 1)
        if min_steps > self.share * self.steps:
            reason = f"its blocks are too long for pilots of {self.share * self.steps:.0f} steps"
            self.rows[name] = replace(self.rows[name], status="untried", reason=reason)
        for steps, (_, slack) in zip(self.pilot_steps, RUNGS[:-1], strict=False):
            if self.rows[name].status == "timed" and steps >= min_steps:
                if self._can_afford(name, steps):
                    self._compare(name, steps, slack)
                else:
                    self.rows[name] = replace(self.rows[name], status="untried", reason="the budget is spent")
        row = self.rows[name]
        if row.status == "timed" and (row.gap or 0.0) + (row.noise or 0.0) <= self.tolerance:
            self._accept(name)

    def _decide_candidate(self, name: str) -> None:
        """Decides on a candidate whose gap is within its noise, by the last pilot if the budget has it."""
        steps, (_, slack) = self.pilot_steps[-1], RUNGS[-1]
        if self._can_afford(name, steps):
            self._compare(name, steps, slack)
        if (self.rows[name].gap or 0.0) <= self.tolerance:
            self._accept(name)
        else:
            self.rows[name] = replace(self.rows[name], status="misses")

    def _compare(self, name: str, steps: int, slack: float) -> None:
        """Runs pilots of a candidate and the reference, and rules it out if the gap exceeds ``slack`` tolerances."""
        gap, noise = compare_pilots(self.run_pilots(name, steps), self.run_pilots(self.reference, steps))
        status: Status = "misses" if gap - noise > slack * self.tolerance else "timed"
        self.rows[name] = replace(self.rows[name], status=status, gap=gap, noise=noise)

    def _accept(self, name: str) -> None:
        """Estimates when a candidate reaches the target, by its longest pilots."""
        pilots_of = self.reference if name in self.equals else name
        length = max((steps for key, steps in self._trained if key == pilots_of), default=self.steps)
        row, low, middle, high = self.rows[name], None, None, None
        assert row.pace is not None
        if pilots := self._trained.get((pilots_of, length), ()):
            low, middle, high = bound_crossing(pilots, self._trained[self.reference, length], self.tolerance)
        longer = self.steps / length
        shrink = SHRINKS ** math.log2(longer)
        steps = self.steps if middle is None else max(1, round(middle * longer * shrink**0.5))
        has_low = low is not None and high is not None and low > pilots[0].curve[0][0]
        self.rows[name] = replace(
            row,
            status="reaches",
            steps=steps,
            low_s=row.pace.compute_seconds(int((low or 0) * longer * shrink)) / MACHINE if has_low else None,
            high_s=MACHINE
            * row.pace.compute_seconds(self.steps if high is None else math.ceil(high * longer)),
            sent_nbytes=row.pace.compute_nbytes(steps),
            loss_bounds=pilots[0].loss_bounds if pilots else (),
        )
