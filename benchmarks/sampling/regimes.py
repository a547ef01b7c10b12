"""What is trained, at which rates, for how long, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.sampling.training import BATCH, METHODS, REPLICAS, Sampled

__all__ = ["COTTONWOOD", "LEARNS", "REGIMES", "STREAMED", "Regime"]

CANDIDATES = 10
"""Batches that are scored in a step."""
STREAM = "rate(16000, least=32, most={most}, backlog={held}, full='drop_oldest')"
"""Ten batches in the time of a step."""
RATES = (0.0005, 0.001, 0.002, 0.004)
"""Of Adam; the paper's is the last."""


@dataclass(frozen=True)
class Regime:
    """Trainings that differ in their method, rate and seed alone.

    Args:
      row: its name in ``expected.toml``.
      workload: its name.
      samples: of the training set.
      steps: of uniform sampling, and of others at most.
      every: steps between two looks.
      minutes: of one processor core for all of its trainings, measured by some hundred steps of each method.
      metric: in :data:`benchmarks.sampling.training.METRICS`.
      tested: samples of the test set that are looked at; 0: all.
      rates: that are tried.
      schedule: of the learning rate.
      learned: the share of learned samples that is to be reached; ``None``: a test score.
      whole: trained to the last step even where the target is reached, so that two rows share their trainings.
      paper: the row of the paper's rule; empty: there is none.
      methods: that are tried; empty: all but ``auto``.
      held: samples that a replica's stream holds for methods that score, of which a tenth is new in each step; 0: all
        samples are at hand.
      pilots: seeds by which rates and the rule are chosen.
      seeds: by which they are judged.
    """

    row: str
    workload: str
    samples: int
    steps: int
    every: int
    minutes: float
    metric: str = "accuracy"
    tested: int = 0
    rates: Sequence[float] = RATES
    schedule: str = "constant"
    learned: float | None = None
    whole: bool = False
    paper: str = ""
    methods: Sequence[str] = ()
    held: int = 0
    pilots: Sequence[int] = (0, 1)
    seeds: Sequence[int] = (2, 3, 4)

    @property
    def rivals(self) -> list[str]:
        """The methods that uniform sampling is compared with."""
        return [*(self.methods or [name for name in METHODS if name not in {"uniform", "auto"}])]

    @property
    def ours(self) -> list[str]:
        """Those that the pilots choose among; ``auto`` alone where it is tried."""
        return ["auto"] if "auto" in self.rivals else [name for name in self.rivals if METHODS[name].ours]

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of rows."""
        return (self.row, self.paper) if self.paper else (self.row,)

    @property
    def canaries(self) -> tuple[str, ...]:
        """Cases of the battery that cover its trainings."""
        return tuple(METHODS[name].canary for name in ("uniform", *self.rivals))

    def training(self, method: str, rate: float, seed: int, **others: Any) -> Sampled:
        """One of its trainings; steps and what stops it may be others."""
        groups = (self.held or self.samples // REPLICAS) // (CANDIDATES * BATCH)
        most = BATCH if method == "uniform" else self.held
        made = Sampled(
            self.workload,
            method,
            METHODS[method].sampler.format(groups=groups),
            rate,
            self.steps,
            self.every,
            self.metric,
            self.tested,
            self.schedule,
            seed=seed,
            stream=STREAM.format(most=most, held=self.held) if self.held else "",
        )
        return replace(made, **others)

    def quickly(self) -> Regime:
        """The same with a few steps of something small."""
        small: dict[str, Any] = {
            "workload": "farflung.workloads.classifiers:fashion_mnist_mlp(data='packaged')",
            "samples": 10_000,
            "steps": 4,
            "every": 1,
            "metric": "accuracy",
            "tested": 100,
            "held": self.held and 640,
            "rates": self.rates[:1],
            "pilots": self.pilots[:1],
            "seeds": self.seeds[:1],
        }
        return replace(self, **small)


COVTYPE, HALVED = "benchmarks.workloads.covtype", "benchmarks.workloads.halved"
COTTONWOOD = Regime(
    "covtype, class 4 against the rest (0.5 %), average precision, chosen rule",
    f"{COVTYPE}:cottonwood",
    464_810,
    10_000,
    50,
    72.0,
    metric="average precision",
)
FASHION = Regime("fashion-mnist, mlp, accuracy, chosen rule", f"{HALVED}:fashion", 60_000, 2500, 25, 22.0)
REGIMES = (
    COTTONWOOD,
    Regime(
        "covtype, class 5 against the rest (1.6 %), average precision, chosen rule",
        f"{COVTYPE}:aspen",
        464_810,
        10_000,
        50,
        72.0,
        metric="average precision",
    ),
    Regime(
        "covtype, 7 classes, MLP 128-64, 6,000 steps, accuracy, chosen rule",
        f"{COVTYPE}:mlp",
        464_810,
        6000,
        50,
        86.0,
        tested=40_000,
    ),
    FASHION,
    replace(
        FASHION,
        row="fashion-mnist, mlp, long tail to 1/100, accuracy, chosen rule",
        workload=f"{HALVED}:fashion_long_tail",
        samples=14_891,
        minutes=22.0,
    ),
    replace(
        FASHION,
        row="fashion-mnist, mlp, cosine rate for both, equal accuracy",
        steps=2400,
        every=2400,
        minutes=43.0,
        schedule="cosine",
    ),
    replace(
        FASHION,
        row="fashion-mnist, mlp, 20 % random labels, auto",
        workload=f"{HALVED}:fashion_noisy",
        steps=2000,
        minutes=35.0,
        methods=(*(name for name in METHODS if name != "uniform"),),
    ),
)
"""Those of both medians."""
STREAMED = replace(
    COTTONWOOD,
    row="covtype, class 4 at one of four devices, streams, average precision, chosen rule",
    paper="covtype, class 4 at one of four devices, streams, average precision, paper's rule",
    steps=6000,
    every=50,
    minutes=60.0,
    rates=RATES[1:],
    methods=("paper", "pool"),
    held=3200,
    pilots=(0,),
)
"""A device that alone sees a rare event, and that could train on a tenth of what it sees."""
CIFAR10 = Regime(
    "cifar10, narrow residual net, test accuracy, chosen rule",
    f"{HALVED}:cifar10",
    20_000,
    6000,
    100,
    230.0,
    rates=RATES[3:],
    whole=True,
    paper="cifar10, narrow residual net, test accuracy, paper's rule",
    methods=("paper", "pool", "two"),
    pilots=(1,),
    seeds=(2, 3),
)
LEARNS = (
    CIFAR10,
    replace(
        CIFAR10,
        row="cifar10, narrow residual net, 90 % of training samples learned, chosen rule",
        paper="cifar10, narrow residual net, 90 % of training samples learned, paper's rule",
        learned=90.0,
        minutes=1.0,
    ),
)
"""A convolutional network that learns nearly all of its training samples; both read the same trainings."""
