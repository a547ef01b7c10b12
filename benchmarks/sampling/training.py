"""Trainings in virtual time that are looked at on their way, and that stop once they are as good as they have to be."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import Trainings
from benchmarks.common.worlds import replicas_in
from benchmarks.workloads.halved import some
from farflung.calibration import count_forward_flops
from farflung.config import Training
from farflung.data import PARTITIONS
from farflung.devices import find_device
from farflung.loop import Replica
from farflung.network import Link, NetworkProfile
from farflung.runs.simulation import limit_to_one_thread
from farflung.sim import VirtualWorld
from farflung.telemetry import Event
from farflung.types import Dataset, Workload
from farflung.workloads import create_workload

__all__ = [
    "BATCH",
    "DEVICE",
    "LATENCY_S",
    "LEARNED_COLUMN",
    "MBPS",
    "METHODS",
    "METRICS",
    "REPLICAS",
    "SCORE_COLUMN",
    "TRAININGS",
    "Found",
    "Looks",
    "Method",
    "Sampled",
    "best",
    "medians",
    "reached",
    "slow",
]

Metric: TypeAlias = Callable[[Tensor, Tensor], float]
"""Of logits and targets."""
Looks: TypeAlias = Sequence[Sequence[float]]
"""Steps, test score in percent, and share of the training samples learned in percent."""
SCORE_COLUMN, LEARNED_COLUMN = 1, 2
Found: TypeAlias = dict[str, list[list[float]]]
"""``looks``, and as ``predicted`` the gain over uniform batches that the sampler predicts, in the mean of its steps."""
REPLICAS, BATCH = 4, 32
MBPS = (10.0, 200.0)
"""Of the slow links; rows of time are of the first."""
LATENCY_S = 2e-3
DEVICE = "raspberry-pi-4"
SEEN, LEARNED = 2000, 0.1
"""Training samples that are looked at, and the loss below which one counts as learned."""


class Method(NamedTuple):
    """A way to draw batches.

    Args:
      sampler: text of the recipe's member, with ``groups`` of ten batches where it takes them.
      canary: the case of the battery that covers it.
      ours: whether it is one of the rules that the pilots choose among.
    """

    sampler: str
    canary: str
    ours: bool = False


METHODS = {
    "uniform": Method("uniform", "synchronous, adam, clipped"),
    "paper": Method(
        "grouped_importance(rule='paper', groups={groups}, chosen=1, chunk=320)", "preset mercury"
    ),
    "pool": Method("grouped_importance(rule='pool', chunk=320)", "importance, pool", ours=True),
    "auto": Method("grouped_importance(rule='auto', chunk=320)", "importance, auto"),
    "two": Method("grouped_importance(rule='two', chunk=320)", "importance, two", ours=True),
    "fill": Method("grouped_importance(rule='fill', chunk=320)", "importance, fill"),
    "half": Method("grouped_importance(rule='half', chunk=320)", "importance, half", ours=True),
}
"""By the names that tables have."""


@dataclass(frozen=True)
class Sampled:
    """One training.

    Args:
      workload: its name.
      method: in :data:`METHODS`.
      sampler: the text of that method's.
      learning_rate: of Adam.
      steps: updates, at most.
      every: steps between two looks.
      metric: in :data:`METRICS`.
      tested: samples of the test set that are looked at; 0: all.
      schedule: of the learning rate.
      target: a test score at which it stops, in percent; ``None``: it goes on.
      learned: a share of learned samples at which it stops, likewise.
      seed: of everything.
      stream: text of the recipe's member; the first replica alone then sees the last class, and looks have the virtual
        time in seconds, of the slow links. Empty: all samples are at hand, and time is not looked at.
    """

    workload: str
    method: str
    sampler: str
    learning_rate: float
    steps: int
    every: int
    metric: str = "accuracy"
    tested: int = 0
    schedule: str = "constant"
    target: float | None = None
    learned: float | None = None
    seed: int = 0
    stream: str = ""

    @property
    def title(self) -> str:
        """What differs between them."""
        until = "".join(f" or {one:g} %" for one in (self.target, self.learned) if one is not None)
        how = f"rate {self.learning_rate:g}, {self.steps} steps{until}, seed {self.seed}"
        return f"{self.workload}, {self.method}, {how}"

    def reached(self, looks: Looks) -> int | None:
        """Steps until it may stop."""
        if self.learned is not None:
            return reached(looks, self.learned, LEARNED_COLUMN)
        return None if self.target is None else reached(looks, self.target)

    def train(self) -> Found:
        """Of the first replica's model, which is all replicas' but for batch norm's statistics."""
        task, looks, predicted = _workload(self.workload), list[list[float]](), list[float]()
        train, test = task.load_datasets()
        world = slow(task, MBPS[0]) if self.stream else VirtualWorld(REPLICAS)
        look = _Look(train, test, METRICS[self.metric], self.tested)

        async def go(replica: Replica) -> None:
            for step in range(1, self.steps + 1):
                await replica.step()
                if step % self.every:
                    continue
                # The looks that all replicas have: one may come here before the first has looked at this step.
                if self.reached(looks[: step // self.every - 1]) is not None:
                    return
                if replica.runtime.comm.rank == 0:
                    seconds = [round(world.clock.time(), 3)] if self.stream else []
                    looks.append([step, *look(replica.model), *seconds])

        def note(event: Event) -> None:
            gain = event.get("gain")
            if event["event"] == "step" and isinstance(gain, float):
                predicted.append(gain)

        with limit_to_one_thread():
            training = Training(
                steps=self.steps,
                batch_size=BATCH,
                learning_rate=self.learning_rate,
                optimizer="adam",
                learning_rate_schedule=self.schedule,
                seed=self.seed,
            )
            if self.stream:
                targets = train.take(torch.arange(len(train)), train=False).targets
                shares = list(targets.argsort(descending=True, stable=True).tensor_split(REPLICAS))
            else:
                shares = PARTITIONS["iid"]().split(train, REPLICAS, seed=self.seed)
            parts = {"sampler": self.sampler, "stream": self.stream or "in_memory"}
            world.run([go(one) for one in replicas_in(world, task, training, parts, note, shares)])
        mean = [[round(statistics.fmean(predicted), 4)]] if predicted else []
        return {"looks": looks, "predicted": mean}


def slow(task: Workload, mbps: float) -> VirtualWorld:
    """Devices that compute and score as a Raspberry Pi 4 does, on links of so many Mbit/s."""
    links = NetworkProfile.create_uniform(Link(LATENCY_S, 1e6 * mbps), REPLICAS)
    return VirtualWorld(
        REPLICAS, device=find_device(DEVICE, forward_flops=count_forward_flops(task)), network=links
    )


_workload = functools.cache(create_workload)
"""The trainings of one process share the samples."""


class _Look:
    """Test score and the share of the training samples that are learned, in percent."""

    def __init__(self, train: Dataset, test: Dataset, metric: Metric, tested: int) -> None:
        self._metric = metric
        self._test = test.take(some(len(test), tested or len(test), "tested"), train=False)
        self._train = train.take(some(len(train), SEEN, "seen"), train=False)

    def __call__(self, model: nn.Module) -> tuple[float, float]:
        model.eval()
        with torch.no_grad():
            score = self._metric(torch.cat([*map(model, self._test.inputs.split(1000))]), self._test.targets)
            losses = F.cross_entropy(model(self._train.inputs), self._train.targets, reduction="none")
        return round(100 * score, 2), round(100 * float((losses < LEARNED).double().mean()), 2)


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """The share of samples that are put into their class."""
    return float((logits.argmax(1) == targets).double().mean())


def average_precision(logits: Tensor, targets: Tensor) -> float:
    """The mean of the precision at each recall, of two classes."""
    there = targets[(logits[:, 1] - logits[:, 0]).argsort(descending=True)].bool()
    precision = there.cumsum(0) / torch.arange(1, len(there) + 1)
    return float(precision[there].double().mean())


METRICS: dict[str, Metric] = {"accuracy": accuracy, "average precision": average_precision}


def medians(looks: Looks, column: int = SCORE_COLUMN) -> list[tuple[int, float]]:
    """Steps and figure of each look that has one before and one after it: the median of these three."""
    figures = [look[column] for look in looks]
    return [
        (int(looks[at][0]), statistics.median(figures[at - 1 : at + 2])) for at in range(1, len(looks) - 1)
    ]


def reached(looks: Looks, target: float, column: int = SCORE_COLUMN) -> int | None:
    """Steps until a figure is reached; looks that come later do not change them."""
    return next((steps for steps, figure in medians(looks, column) if figure >= target), None)


def best(looks: Looks, column: int = SCORE_COLUMN) -> float:
    """The best figure."""
    return max(figure for _, figure in medians(looks, column))


TRAININGS: Trainings[Sampled, Found] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl",
    Sampled,
    lambda training: (METHODS[training.method].canary,),
)
