"""What each method came to: tuned in trainings of half the length on one seed, judged in whole ones on two others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from benchmarks.presets.language import TRAININGS, Curve, Language
from benchmarks.presets.methods import METHODS, Setting

__all__ = ["JUDGED", "PILOT", "STEPS", "WITHIN", "Course", "course_of", "first_within", "gap"]

STEPS, PILOT, JUDGED = 10_000, 0, (1, 2)
"""Of a whole training; the seed that settings are chosen by, and those of the results."""
WITHIN = 0.05
"""Above the reference's loss is as good as that."""
Train: TypeAlias = Callable[[Language], Curve]


@dataclass(frozen=True)
class Course:
    """A method's trainings.

    Args:
      method: its name.
      setting: the one of its grid with the lowest loss at half the length.
      tried: the losses of all settings there.
      curves: with it, of each seed that is judged.
    """

    method: str
    setting: Setting
    tried: Sequence[float]
    curves: Sequence[Curve]

    @property
    def loss(self) -> float:
        """At the end, mean over the seeds."""
        return statistics.fmean(curve[-1][1] for curve in self.curves)

    def to_json(self) -> dict[str, Any]:
        """For the config of a row."""
        return {**vars(self), "setting": asdict(self.setting)}


def course_of(method: str, *, quick: bool = False, train: Train = TRAININGS.curve) -> Course:
    """Return a method's trainings, stored or made now."""
    grid = METHODS[method]
    if quick:
        return Course(method, grid[0], [], [Language.of(grid[0], STEPS, PILOT).quickly().train()])
    tried = [train(Language.of(setting, STEPS // 2, PILOT))[-1][1] for setting in grid]
    best = grid[tried.index(min(tried))]
    return Course(method, best, tried, [train(Language.of(best, STEPS, seed)) for seed in JUDGED])


def gap(course: Course, reference: Course) -> list[float]:
    """Return for each seed how far the loss at the end is above that of the reference."""
    return [ours[-1][1] - theirs[-1][1] for ours, theirs in zip(course.curves, reference.curves, strict=True)]


def first_within(course: Course, loss: float) -> tuple[int, int] | None:
    """Return the steps and the bytes after which the mean over the seeds is as low as a loss; ``None``: never."""
    for points in zip(*course.curves, strict=True):
        if statistics.fmean(point[1] for point in points) <= loss:
            return points[0][0], points[0][2]
    return None


def all_courses(*, quick: bool = False) -> Mapping[str, Course]:
    """Return those of all methods, the reference first."""
    methods = list(METHODS)[:2] if quick else list(METHODS)
    return dict(zip(methods, map(partial(course_of, quick=quick), methods), strict=True))
