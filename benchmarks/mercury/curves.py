"""When a training is as good as another, and what it would have taken on other links."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from benchmarks.mercury.applications import Application
from benchmarks.mercury.watched import Found, Point, Watched

__all__ = ["LAST", "Ask", "Method", "Panel", "Target", "at_the_end", "on_links", "smooth", "times_faster"]

Ask: TypeAlias = Callable[[Watched], Found]
"""What a training came to: trained now, stored, or made up."""
LAST = 3
"""Evaluations whose mean is what a training comes to at its end."""


def smooth(values: Sequence[float]) -> list[float]:
    """The median of each and those beside it; of two at the ends, their mean."""
    return [statistics.median(values[max(0, at - 1) : at + 2]) for at in range(len(values))]


def at_the_end(points: Sequence[Point], of: str) -> float:
    """The mean of a figure over the last evaluations."""
    return statistics.fmean(getattr(point, of) for point in points[-LAST:])


@dataclass(frozen=True)
class Target:
    """A figure that is to be reached.

    Args:
      of: which of a :class:`benchmarks.mercury.watched.Point`.
      value: of it, or better.
    """

    of: str
    value: float

    def reached(self, points: Sequence[Point]) -> Point | None:
        """The first evaluation at which it is reached, as the median of three; ``None``: never."""
        found = zip(points, self._smooth(points), strict=True)
        return next((point for point, value in found if self._short(value) <= 0), None)

    def best(self, points: Sequence[Point]) -> float:
        """The best smoothed figure."""
        return min(self._smooth(points), key=self._short)

    def missed_by(self, points: Sequence[Point]) -> float:
        """How much the best smoothed figure is short of it; 0 where it is reached."""
        return max(0.0, min((self._short(value) for value in self._smooth(points)), default=math.inf))

    def _short(self, value: float) -> float:
        return value - self.value if self.of == "loss" else self.value - value

    def _smooth(self, points: Sequence[Point]) -> list[float]:
        return smooth([getattr(point, self.of) for point in points])


def on_links(
    points: Sequence[Point], what: Application, mbps: float, replicas: int, *, sequential: bool = False
) -> list[Point]:
    """A training in the times of other links, its groups as they were.

    A step takes its computation and its exchange, or what is scored meanwhile where that takes longer. What resharding
    keeps an exchange waiting, at most for one sample, is left out.

    Args:
      points: of the training.
      what: its application.
      mbps: of the links.
      replicas: how many.
      sequential: samples are scored once the exchange is there.
    """
    exchange, seconds, found = what.ratio(mbps, replicas), 0.0, []
    for before, point in pairwise([Point(0, 0.0, 0.0, 0.0, 0.0, 0.0), *points]):
        steps, scoring = point.steps - before.steps, point.scoring - before.scoring
        seconds += steps + (exchange * steps + scoring if sequential else max(exchange * steps, scoring))
        found.append(replace(point, seconds=seconds))
    return found


@dataclass(frozen=True)
class Method:
    """A method's trainings.

    Args:
      training: of the first seed.
      curves: of each seed.
    """

    training: Watched
    curves: list[list[Point]]

    def there(self, target: Target) -> list[Point | None]:
        """Where each seed reaches a target."""
        return [target.reached(points) for points in self.curves]

    def mean_steps(self, target: Target) -> float:
        """To a target, in the mean of the seeds; infinite where one never is there."""
        return statistics.fmean(math.inf if point is None else point.steps for point in self.there(target))

    def best(self, target: Target) -> float:
        """The best smoothed figure of the kind that a target is of, in the mean of the seeds."""
        return statistics.fmean(map(target.best, self.curves))

    def at(self, mbps: float, *, sequential: bool = False) -> Method:
        """In the times of other links; see :func:`on_links`."""
        one = self.training
        return Method(
            one,
            [on_links(curve, one.what, mbps, one.replicas, sequential=sequential) for curve in self.curves],
        )

    def told(self, target: Target) -> dict[str, Any]:
        """Its settings, and where it has reached a target, for the record."""
        there = self.there(target)
        return {
            "parts": self.training.parts,
            "learning_rate": self.training.learning_rate,
            "trained_at_mbps": self.training.mbps,
            "steps": self.training.steps,
            "steps_to_target": [None if point is None else point.steps for point in there],
            "seconds_to_target": [None if point is None else point.seconds for point in there],
            "missed_by": [target.missed_by(curve) for curve in self.curves],
            **{
                f"{of}_at_the_end": [at_the_end(curve, of) for curve in self.curves]
                for of in ("accuracy", "loss", "train_accuracy")
            },
            "scored_per_step": [_scored_per_step(curve[-1], self.training.what) for curve in self.curves],
        }


@dataclass(frozen=True)
class Panel:
    """Curves that are drawn together.

    Args:
      title: of all.
      along: what their accuracy is drawn over.
      curves: by what they are called.
      target: the accuracy that they are compared at.
    """

    title: str
    along: Literal["steps", "seconds"]
    curves: Mapping[str, Sequence[Point]]
    target: Target


def _scored_per_step(last: Point, what: Application) -> float:
    return 3 * what.batch_size * last.scoring / last.steps


def times_faster(theirs: Method, ours: Method, target: Target, of: str = "seconds") -> list[float]:
    """Of each seed that both have, how many times as long the one takes as the other; 0 where ours never is there.

    Where theirs never is, it counts as there at its end, so that the figure is one from below.

    Args:
      theirs: the baseline.
      ours: the other.
      target: that both are to reach.
      of: seconds or steps.
    """
    figures = []
    pairs = zip(theirs.there(target), ours.there(target), theirs.curves, strict=False)
    for before, point, curve in pairs:
        later = curve[-1] if before is None else before
        figures.append(0.0 if point is None else getattr(later, of) / getattr(point, of))
    return figures
