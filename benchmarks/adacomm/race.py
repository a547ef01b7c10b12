"""Which learning rate a method trains with, and when its training loss is as low as synchronous SGD's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from benchmarks.adacomm.links import STEP_S
from benchmarks.adacomm.watched import Point, Watched

__all__ = [
    "ALLOWED",
    "LONGER",
    "SYNCHRONOUS",
    "Curves",
    "Race",
    "Raced",
    "lowest",
    "on_links",
    "reached",
    "smooth",
]

SYNCHRONOUS = "synchronous"
ALLOWED = 1.05
"""Times the lowest loss of synchronous SGD is as low as that."""
LONGER = 1.5
"""Times the steps of synchronous SGD are those of others; at D/Y 4 they still end sooner from a period of 2 on."""

Curves: TypeAlias = Callable[[Sequence[Watched]], list[list[list[float]]]]
"""What several trainings come to."""


def smooth(points: Sequence[Point]) -> list[float]:
    """The median of each loss and those beside it; infinite where one is no number."""
    losses = [point.loss if math.isfinite(point.loss) else math.inf for point in points]
    return [statistics.median(losses[max(0, at - 1) : at + 2]) for at in range(len(losses))]


def lowest(points: Sequence[Point]) -> float:
    """The lowest smoothed loss."""
    return min(smooth(points), default=math.inf)


def reached(points: Sequence[Point], target: float) -> Point | None:
    """The first point at which the smoothed loss is as low; ``None``: never."""
    return next((point for point, loss in zip(points, smooth(points), strict=True) if loss <= target), None)


def on_links(points: Sequence[Point], times: float) -> list[Point]:
    """A training with a fixed period on links whose exchanges take so many times as long: only its times differ."""
    return [
        replace(point, seconds=STEP_S * point.steps + times * (point.seconds - STEP_S * point.steps))
        for point in points
    ]


@dataclass(frozen=True)
class Raced:
    """A method at its best learning rate.

    Args:
      training: of the first seed.
      curves: of each seed.
    """

    training: Watched
    curves: list[list[Point]]

    @property
    def lowest(self) -> float:
        """The lowest smoothed loss, in the mean of the seeds."""
        return statistics.fmean(map(lowest, self.curves))

    def there(self, target: float) -> list[Point | None]:
        """Where each seed has reached a loss."""
        return [reached(points, target) for points in self.curves]

    def seconds(self, target: float) -> float | None:
        """Until a loss is reached, in the mean of the seeds; ``None``: not all have."""
        found = [None if point is None else point.seconds for point in self.there(target)]
        return None if None in found else statistics.fmean(filter(None, found))


class Race:
    """Trainings that differ in their schedule, each at the learning rate that is best for it.

    Synchronous SGD's is the one with the lowest loss within its steps, and the target is that loss, in the mean of the
    seeds, times :data:`ALLOWED`. It is fixed before any other method is trained. Another method's rate is the one that
    brings it there first, or nearest where none does.

    Rates are searched with the first seed, from that of the training upwards and downwards by factors of 2, for as long
    as that is better.

    Args:
      usual: what they have in common, with the rate that the search for synchronous SGD's begins at; that for others
        begins at synchronous SGD's.
      curves: trains.
      seeds: of each method.
      search: whether rates are searched.
    """

    def __init__(self, usual: Watched, curves: Curves, seeds: Sequence[int], *, search: bool = True) -> None:
        self._curves, self._seeds, self._searches = curves, seeds, search
        self.synchronous = self._seeded(
            self._search(replace(usual, schedule=SYNCHRONOUS), lambda points: (lowest(points),))
        )
        self.target = ALLOWED * self.synchronous.lowest

    def best(
        self, schedules: Sequence[str], *, rate: float | None = None, ratio: float | None = None
    ) -> Raced:
        """That of several schedules which is there first, all at the rate that is best for the first of them.

        Where another than the first is, the rate is searched again with it.

        Args:
          schedules: as text.
          rate: of all, which is not searched then.
          ratio: D/Y; that of synchronous SGD's training when not given.
        """
        theirs = self.synchronous.training
        training = replace(
            theirs,
            schedule=schedules[0],
            learning_rate=rate or theirs.learning_rate,
            ratio=ratio or theirs.ratio,
            steps=round(LONGER * theirs.steps),
        )
        if rate is None:
            training = self._search(training, self._order)
        trainings = [replace(training, schedule=schedule) for schedule in schedules]
        order = [self._order(points) for points in self._trained(trainings)]
        found = trainings[order.index(min(order))]
        if rate is None and found != training:
            found = self._search(found, self._order)
        return self._seeded(found)

    def _order(self, points: Sequence[Point]) -> tuple[float, ...]:
        """The less the better."""
        there = reached(points, self.target)
        return (math.inf if there is None else there.seconds, lowest(points))

    def _search(self, training: Watched, order: Callable[[Sequence[Point]], tuple[float, ...]]) -> Watched:
        found: dict[float, tuple[float, ...]] = {}
        rate = training.learning_rate
        while self._searches:
            near = (rate, rate / 2, rate * 2)
            due = [one for one in near if one not in found]
            curves = self._trained([replace(training, learning_rate=one) for one in due])
            found |= zip(due, map(order, curves), strict=True)
            better = min(near, key=found.__getitem__)
            if better == rate:
                break
            rate = better
        return replace(training, learning_rate=rate)

    def _seeded(self, training: Watched) -> Raced:
        return Raced(training, self._trained([replace(training, seed=seed) for seed in self._seeds]))

    def _trained(self, trainings: Sequence[Watched]) -> list[list[Point]]:
        found = self._curves(trainings)
        return [training.points(curve) for training, curve in zip(trainings, found, strict=True)]
