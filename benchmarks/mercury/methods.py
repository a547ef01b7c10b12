"""The methods that are compared, each at its learning rates, and the target that uniform sampling sets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.mercury.applications import APPLICATIONS, CHUNK, MBPS, REPLICAS
from benchmarks.mercury.curves import Ask, Method, Target, at_the_end, smooth
from benchmarks.mercury.watched import Point, Watched

__all__ = [
    "ALONE",
    "MERCURY_RATES",
    "PUBLISHED_RATE",
    "RATES",
    "WITHIN",
    "Reference",
    "adacomm",
    "best_rate",
    "curves_of",
    "for_as_many_samples",
    "grouped",
    "mercury",
    "mercury_at",
    "reference",
    "resharded",
    "seeds_of",
    "uniform",
]

PUBLISHED_RATE = 0.004
RATES = (0.008, 0.004, 0.002, 0.001, 0.0005)
"""Of uniform sampling."""
MERCURY_RATES = (0.004, 0.002, 0.001)
WITHIN = 0.5
"""Points below what uniform sampling comes to: its accuracy goes up and down by as much."""
LOOSER = 1.05
"""Times its training loss."""
ROUNDED_TO = 5
"""Steps between two looks are a multiple of these."""
ROUND = 20
"""Steps of a round of resharding."""
PIECE_NBYTES = 4096
"""Of samples on their way: one each, since the links are as much narrower as the gradients are shorter."""
TAU_0, INTERVALS = 20, 10
"""Of AdaComm: its first period, and how often it would choose another in a run that keeps to that one."""
ALONE = {
    "delayed": {"schedule": "delayed(delay=16, period=16)"},
    "gradiveq": {"reducer": "gradiveq(warm_up=100, sample_steps=50, compress_steps=400)"},
    "topk": {"codec": "error_feedback(topk(density=0.01))", "collective": "all_gather"},
}
"""What saves bytes or waits by itself; a delay of a block hides what is left of the exchange at 10 Mbit/s, 64 steps."""


def uniform(application: str, **others: Any) -> Watched:
    """Synchronous SGD; its arithmetic is the same on all links."""
    return Watched(application, **{"steps": APPLICATIONS[application].steps, **others})


def grouped(most: int, more: str = "", *, chunk: int = CHUNK) -> str:
    """Mercury's sampler: groups as large as there is time for, up to a size."""
    return f"grouped_importance(rule='paper', groups='bacc', chunk={chunk}, max_scored={most}{more})"


def resharded(samples: int, by: str = "importance") -> str:
    """Mercury's sharing."""
    return f"resharding(samples={samples}, every={ROUND}, by={by!r}, piece_nbytes={PIECE_NBYTES})"


def mercury(application: str, *, parts: dict[str, str] | None = None, **others: Any) -> Watched:
    """Mercury on some links, with other members of the recipe where these are given."""
    own = {
        "sampler": grouped(APPLICATIONS[application].most),
        "sharing": resharded(APPLICATIONS[application].moved),
        **(parts or {}),
    }
    return uniform(application, parts=own, **others)


def mercury_at(application: str, mbps: float, replicas: int = REPLICAS) -> float:
    """The links that it is trained on for others: 10 or 200 Mbit/s, whichever has groups of the nearer size."""
    what = APPLICATIONS[application]
    size, low, high = (what.group(one, replicas) for one in (mbps, MBPS[0], MBPS[-1]))
    return MBPS[-1] if abs(size - high) < abs(size - low) else MBPS[0]


def adacomm(application: str, mbps: float) -> Watched:
    """AdaComm as the preset has it, but for the intervals, which are by the links."""
    what = APPLICATIONS[application]
    interval = what.steps / INTERVALS * (1 + what.ratio(mbps) / TAU_0)
    schedule = f"adacomm(sync_every={TAU_0}, interval_s={interval:.6g})"
    return uniform(application, parts={"schedule": schedule}, mbps=mbps)


def seeds_of(application: str, mbps: float = MBPS[0]) -> Sequence[int]:
    """Three where the goal is ten per cent above what is published.

    Args:
      application: which.
      mbps: of the links that it is trained on.
    """
    return (0, 1, 2) if application == "cifar10" and mbps == MBPS[0] else (0,)


def for_as_many_samples(application: str, replicas: int) -> dict[str, Any]:
    """Steps after which so many replicas have trained on as many samples as the usual ones, and how often to look."""
    every = ROUNDED_TO * round(Watched.every * REPLICAS / replicas / ROUNDED_TO)
    steps = every * round(APPLICATIONS[application].steps * REPLICAS / replicas / every)
    return {"steps": steps, "every": every}


def curves_of(ask: Ask, training: Watched, seeds: Sequence[int] = (0,)) -> Method:
    """A training of each seed."""
    each = [replace(training, seed=seed) for seed in seeds]
    return Method(each[0], [one.points(ask(one)) for one in each])


def best_rate(ask: Ask, training: Watched, rates: Sequence[float], target: Target) -> float:
    """The one at which the first seed reaches a target first, or ends best where none does."""

    def order(points: Sequence[Point]) -> tuple[float, float]:
        there = target.reached(points)
        return (math.inf if there is None else there.steps, -at_the_end(points, target.of))

    found = {rate: order(curves_of(ask, replace(training, learning_rate=rate)).curves[0]) for rate in rates}
    return min(found, key=found.__getitem__)


@dataclass(frozen=True)
class Reference:
    """Uniform sampling at the published learning rate, which sets the target for all others.

    Args:
      uniform: its trainings.
    """

    uniform: Method

    @property
    def target(self) -> Target:
        """The best accuracy on its way, each the median of three, in the mean of the seeds, less :data:`WITHIN`."""
        best = [max(smooth([point.accuracy for point in curve])) for curve in self.uniform.curves]
        return Target("accuracy", statistics.fmean(best) - WITHIN)

    @property
    def beside(self) -> dict[str, Target]:
        """Training accuracy and loss."""
        return {
            "training accuracy": Target("train_accuracy", self._at_the_end("train_accuracy") - WITHIN),
            "training loss": Target("loss", LOOSER * self._at_the_end("loss")),
        }

    def _at_the_end(self, of: str) -> float:
        found = [at_the_end(curve, of) for curve in self.uniform.curves]
        return sum(found) / len(found)


def reference(ask: Ask, training: Watched, seeds: Sequence[int] = (0,)) -> Reference:
    """Of a training with uniform sampling."""
    return Reference(curves_of(ask, training, seeds))
