"""Which trainings there are, what they cost, and which are left: ``python -m benchmarks.mercury.plan``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.mercury.curves import Ask
from benchmarks.mercury.rows import JOBS
from benchmarks.mercury.watched import SEEN, TRAININGS, Found, Watched

__all__ = ["Asked", "Planned", "main", "minutes", "plan", "scored"]

MOST_HOURS = 24.0
"""Of a processor, for all."""


@dataclass(frozen=True)
class Cost:
    """What an application's trainings take on one processor core with another busy beside it, by some tens of steps.

    Args:
      step_s: seconds of a step.
      score_s: of scoring a sample.
      trained: samples of the training set.
      tested: of the test set.
    """

    step_s: float
    score_s: float
    trained: int
    tested: int


COSTS = {
    "cifar10": Cost(0.024, 0.00018, 50_000, 10_000),
    "speech": Cost(0.044, 0.00024, 4500, 500),
    "aid": Cost(0.049, 0.00042, 8000, 2000),
    "agnews": Cost(0.038, 0.00018, 5000, 7600),
    "fashion": Cost(0.004, 0.00001, 60_000, 10_000),
    "fashion in small batches": Cost(0.003, 0.00001, 60_000, 10_000),
}


def minutes(training: Watched) -> float:
    """Of one processor core."""
    cost = COSTS[training.application]
    step_s = cost.step_s + scored(training) * cost.score_s
    looks_s = training.steps // training.every * (cost.tested + SEEN) * cost.score_s
    return (training.steps * training.replicas * step_s + looks_s) / 60


def scored(training: Watched) -> float:
    """Samples that each replica scores in a step, at most."""
    sampler = training.parts.get("sampler", "uniform")
    if "groups='bacc'" in sampler:
        (most,) = map(int, re.findall(r"max_scored=(\d+)", sampler))
        return min(most, training.what.group(training.mbps, training.replicas))
    found = re.search(r"groups=(\d+)", sampler)
    if found is None:
        return 0
    return (training.samples or COSTS[training.application].trained) / training.replicas / int(found[1])


class Asked:
    """Goes through jobs without a training: what is stored is what it came to, all else is made up.

    A made-up training is best at a rate that is not the published one, so the count is one from above.

    Args:
      stored: the trainings that hold.
      look_up: what one of them came to.
    """

    def __init__(self, stored: list[Watched], look_up: Ask) -> None:
        self._stored, self._look_up = stored, look_up
        self.trainings: list[Watched] = []

    def __call__(self, training: Watched) -> Found:
        if training not in self.trainings:
            self.trainings.append(training)
        return self._look_up(training) if training in self._stored else made_up(training)


def made_up(training: Watched) -> Found:
    """Something that reaches every target."""
    looks = range(training.every, training.steps + 1, training.every)
    rate = training.learning_rate
    curve = [[float(steps), float(steps), 50 - rate, 1 + rate, 50 - rate, 0.0] for steps in looks]
    moved = [[float(since), float(later), 0.5, 0.5] for since in training.ranked for later in (1, 10)]
    return {"curve": curve, "moved": moved}


@dataclass(frozen=True)
class Planned:
    """A job's trainings that no job before it has.

    Args:
      name: of the job.
      trainings: all.
      left: those that are not stored.
    """

    name: str
    trainings: list[Watched]
    left: list[Watched]

    @property
    def minutes(self) -> float:
        """Of all."""
        return sum(map(minutes, self.trainings))

    @property
    def minutes_left(self) -> float:
        """Of those left."""
        return sum(map(minutes, self.left))


def plan(stored: list[Watched], look_up: Ask) -> list[Planned]:
    """Of all jobs, in their order."""
    found, known = [], list[Watched]()
    for name, job in JOBS.items():
        asked = Asked(stored, look_up)
        job.go_through(asked)
        new = [one for one in asked.trainings if one not in known]
        known += new
        found.append(Planned(name, new, [one for one in new if one not in stored]))
    return found


def main() -> None:
    """Prints it."""
    due = TRAININGS.due()
    found = plan([one for one in TRAININGS.stored() if one not in due], TRAININGS.curve)
    table = Table("trainings", "what", title="mercury", title_justify="left")
    for column in ("count", "minutes each", "minutes", "done", "left", "minutes left"):
        table.add_column(column, justify="right")
    for one in found:
        count = len(one.trainings)
        table.add_row(
            one.name,
            JOBS[one.name].what,
            str(count),
            f"{one.minutes / max(1, count):.1f}",
            f"{one.minutes:.0f}",
            str(count - len(one.left)),
            str(len(one.left)),
            f"{one.minutes_left:.0f}",
        )
    Console(width=120).print(table)
    whole, left = sum(one.minutes for one in found), sum(one.minutes_left for one in found)
    print(
        f"{whole / 60:.1f} hours of one processor core in all, {left / 60:.1f} left; {MOST_HOURS:g} at most"
    )


if __name__ == "__main__":
    main()
