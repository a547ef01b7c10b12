"""What each preset came to: its loss by bytes and by time, at the learning rate that was best for it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from benchmarks.presets.language import TRAININGS, Curve, Language
from benchmarks.presets.methods import METHODS, NETWORKS, RATES, REFERENCE
from benchmarks.presets.times import paces

__all__ = ["SEARCHED", "WITHIN", "Course", "Point", "best_rate", "courses_of", "first_at", "lowest", "target"]

WITHIN = 0.05
"""Above synchronous SGD's best loss is as good as that."""
SEARCHED = 500
"""Steps of the trainings by which rates are searched, but for the reference's."""
Train: TypeAlias = Callable[[Language], Curve]


class Point(NamedTuple):
    """An evaluation.

    Args:
      steps: that were through.
      loss: on the test set.
      sent: bytes of all replicas.
      seconds: by network.
    """

    steps: int
    loss: float
    sent: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Course:
    """One training.

    Args:
      preset: its name.
      networks: on which it goes like this.
      learning_rate: that was best.
      tried: losses by learning rate, at the end of the trainings that were searched by.
      points: evaluations.
      not_charged: methods for some of whose coding the device has no rate.
    """

    preset: str
    networks: Sequence[str]
    learning_rate: float
    tried: Mapping[str, float]
    points: Sequence[Point]
    not_charged: Sequence[str] = ()

    @property
    def loss(self) -> float:
        """At the end."""
        return self.points[-1].loss

    def to_json(self) -> dict[str, Any]:
        """For the config of a row."""
        return {**vars(self), "points": [point._asdict() for point in self.points]}


def best_rate(train: Train, preset: str, network: str) -> tuple[float, dict[str, float]]:
    """The rate with the lowest loss at the end, and the losses of all that were tried.

    Rates are tried from the first one on, upwards and downwards or downwards alone, for as long as that is better: the
    reference's in whole trainings, others' in short ones, each with a warm-up and a cosine of its own.
    """
    method = METHODS[preset]
    steps = Language.steps if preset == REFERENCE else SEARCHED

    @functools.cache
    def loss(place: int) -> float:
        return train(Language(preset, RATES[place], network, steps))[-1][1]

    tried: dict[int, float] = {}
    begin = method.begins_at
    if begin is None:
        begin, _ = best_rate(train, REFERENCE, "")
    if not method.searched:
        return begin, {}
    at = RATES.index(begin)
    ways = (0, -1) if method.begins_at is None else (0, -1, 1)
    while True:
        tried |= {at + way: loss(at + way) for way in ways if 0 <= at + way < len(RATES)}
        better = min(tried, key=lambda place: (tried[place], place))
        if better == at:
            return RATES[at], {f"{RATES[place]:g}": tried[place] for place in sorted(tried)}
        at = better


def courses_of(preset: str, *, quick: bool = False, train: Train = TRAININGS.curve) -> list[Course]:
    """One for all networks, or one for each where times decide what is done; trained now unless they are stored.

    Then rates are searched on the first network.
    """
    if quick:
        return [_quick_course(preset)]
    method = METHODS[preset]
    if not method.by_clock:
        rate, tried = best_rate(train, preset, "")
        curve = train(Language(preset, rate))
        by_network = {network: paces(preset, network) for network in NETWORKS}
        points = [
            Point(steps, loss, sent, {name: one.end_s(steps) for name, one in by_network.items()})
            for steps, loss, sent, _ in curve
        ]
        unknown = by_network[NETWORKS[0]].not_charged
        return [Course(preset, NETWORKS, rate, tried, points, unknown)]
    rate, tried = best_rate(train, preset, NETWORKS[0])
    return [
        Course(preset, (network,), rate, tried, _on(network, train(Language(preset, rate, network))))
        for network in NETWORKS
    ]


def _quick_course(preset: str) -> Course:
    """The end of a few steps of something small, on one network, at one rate."""
    network, rate = NETWORKS[0], RATES[0]
    curve = Language(preset, rate, network).quickly().train()
    return Course(preset, (network,), rate, {f"{rate:g}": curve[-1][1]}, _on(network, curve[-1:]))


def _on(network: str, curve: Curve) -> list[Point]:
    return [Point(steps, loss, sent, {network: seconds}) for steps, loss, sent, seconds in curve]


def smooth(points: Sequence[Point]) -> list[float]:
    """The median loss of each evaluation and those beside it."""
    losses = [point.loss for point in points]
    return [statistics.median(losses[max(0, at - 1) : at + 2]) for at in range(len(losses))]


def target(reference: Course, within: float) -> float:
    """So far above the reference's best."""
    return lowest(reference) + within


def first_at(course: Course, target: float) -> Point | None:
    """The first evaluation with that loss; ``None``: there is none."""
    return next(
        (point for point, loss in zip(course.points, smooth(course.points), strict=True) if loss <= target),
        None,
    )


def lowest(course: Course) -> float:
    """The lowest smoothed loss."""
    return min(smooth(course.points))
