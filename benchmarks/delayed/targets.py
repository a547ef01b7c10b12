"""When delayed updates are as accurate as synchronous SGD: the steps that takes, times the seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import Measured, Simulated, Trainings, Trial, Trials, coding_of
from benchmarks.common.trials import RATES
from benchmarks.delayed.accuracy import CANARIES, TRAININGS, WARM_UP
from benchmarks.delayed.times import DEVICE, NBYTES, REGIONS, SCALE, STEP_S
from farflung.network import find_network

__all__ = ["NETWORKS", "target_row", "to_target"]

Curve: TypeAlias = list[tuple[int, float]]
"""Steps, and test accuracy after them in percent."""
NETWORKS = (REGIONS, "shanghai-boston")
NODES = 4
WITHIN = 1.0
"""Points below synchronous SGD's best."""
METHODS = {
    "synchronous": {"schedule": "synchronous"},
    "ours": {
        "schedule": f"delayed(delay=20, period=2, warmup={WARM_UP})",
        "codec": "error_feedback(chunked_topk)",
    },
}
"""Ours has a delay that covers the latency, and a period and a codec that make up for the bandwidth."""
LENGTHS = {"synchronous": (700, 1000), "ours": (2000, 4000, 6000)}
"""Steps of trainings, in each of which learning rates fall to 0; the one that is there first counts."""


@dataclass(frozen=True)
class Watched:
    """A trial that is evaluated on its way, from half of its steps on, where accuracies come near to their best.

    Args:
      parts, steps, learning_rate: see :class:`benchmarks.common.Trial`.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    steps: int = 1000
    learning_rate: float = 0.02

    @property
    def _trial(self) -> Trial:
        return Trial(self.parts, steps=self.steps, learning_rate=self.learning_rate)

    @property
    def title(self) -> str:
        """What differs between them."""
        return f"{self.steps} steps of {self._trial.title}"

    def train(self) -> Curve:
        """Every twentieth of the steps."""
        return self._trial.curve([self.steps * part // 20 for part in range(10, 21)])


CURVES: Trainings[Watched, Curve] = Trainings(
    Path(__file__).parent / "results" / "curves.jsonl", Watched, lambda training: CANARIES
)


def target_row(network: str) -> str:
    """Its name in ``expected.toml``."""
    return f"time to within 1 point of synchronous SGD's best, {network}"


SEEN = {"synchronous": 4, "ours": WARM_UP + 80}
"""Steps that are simulated; those to come take as long as half of the last of them, where nothing changes any more."""


def _ends(network: str, parts: Mapping[str, str], *, steps: int) -> list[float]:
    """When steps end in virtual time; bytes and bandwidths are divided, and coding takes as long as of all bytes."""
    links = find_network(network).with_nodes(NODES)
    links = links.scale(bandwidth=1 / SCALE, reason=f"of a gradient {SCALE} times smaller")
    run = Simulated(parts, links, STEP_S, NBYTES // SCALE, coding_of(DEVICE, reduced=SCALE))
    run.run(steps)
    return run.ends_s


def _seconds(ends: Sequence[float], steps: int) -> float:
    """Until so many steps have ended."""
    if steps <= len(ends):
        return ends[steps - 1]
    last = min(40, len(ends) - 1)
    return ends[-1] + (steps - len(ends)) * (ends[-1] - ends[-1 - last]) / last


def to_target(quick: bool) -> Mapping[str, Measured]:
    """Seconds of synchronous SGD until it is within a point of its best, over those of delayed updates."""
    ends = {
        network: {
            name: _ends(network, parts, steps=2 if quick else SEEN[name]) for name, parts in METHODS.items()
        }
        for network in NETWORKS
    }
    if quick:
        return {}
    curves, rates = _curves()
    target = max(score for _, score in curves["synchronous"][max(LENGTHS["synchronous"])]) - WITHIN
    there = {
        name: {steps: _reached(one, target) for steps, one in found.items()} for name, found in curves.items()
    }
    rows = {}
    for network, of_network in ends.items():
        times = {
            name: min(
                (_seconds(of_network[name], steps) for steps in found.values() if steps is not None),
                default=math.inf,
            )
            for name, found in there.items()
        }
        config = {
            "workload": Trial().workload,
            "step_s": STEP_S,
            "gradient_bytes": NBYTES,
            "parts": METHODS,
            "best_rate": rates,
            "target": target,
            "curves": curves,
            "steps_to_target": there,
            "seconds": times,
            "seconds_of_the_last_step": {name: one[-1] - one[-2] for name, one in of_network.items()},
            "reduced": f"times are of a gradient {NBYTES} bytes long, accuracies of a small VGG",
        }
        if times["ours"] == math.inf:
            best = max(score for curve in curves["ours"].values() for _, score in curve)
            rows[target_row(network)] = Measured.missed(best, target, config, simulated=True)
        else:
            faster = times["synchronous"] / times["ours"]
            rows[target_row(network)] = Measured(faster, (faster, faster), config, simulated=True)
    return rows


def _curves() -> tuple[dict[str, dict[int, Curve]], dict[str, float]]:
    """Of each method by the steps of the whole training, with the learning rate that is best after 1,000."""
    trials, curves, rates = Trials(TRAININGS, quick=False), {}, {}
    for name, parts in METHODS.items():
        _, rates[name] = trials.best(Trial(parts), RATES, (0,))
        watched = [Watched(parts, steps, rates[name]) for steps in LENGTHS[name]]
        curves[name] = dict(zip(LENGTHS[name], CURVES.curves(watched), strict=True))
    return curves, rates


def _reached(curve: Curve, target: float) -> int | None:
    """Steps until accuracy is there."""
    return next((steps for steps, score in curve if score >= target), None)
