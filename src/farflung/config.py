"""Settings of a training run, checked where they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from farflung.errors import ConfigError
from farflung.rates import RATES
from farflung.spec import build, text_of
from farflung.types import Json, OptimizerFactory, RateSchedule

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["BUCKET_NBYTES", "ON_NONFINITE", "Training"]

BUCKET_NBYTES = 25 << 20
"""Of a replica's gradient buckets, the first aside; DistributedDataParallel's choice too."""
ON_NONFINITE = ("stop", "skip", "exclude")
"""What ``--on-nonfinite`` may say."""


@dataclass(frozen=True, slots=True)
class Training:
    """How long and with what settings a model trains; equal on all replicas.

    Args:
      steps: updates of the parameters.
      batch_size: samples per replica and step.
      learning_rate: of the optimizer.
      momentum: of SGD and LARS.
      weight_decay: of the optimizer.
      optimizer: one of :mod:`farflung.optimizers` as text, such as ``adamw(betas=(0.9, 0.95))``, or an object that
        makes one.
      clip_norm: largest norm of the gradient that the optimizer steps on; 0: no limit.
      on_nonfinite: what all replicas do at a step where one's loss is NaN or infinite: ``stop`` the run, ``skip`` the
        update, or ``exclude`` that replica from the mean.
      seed: everything random derives from it.
      evaluate_every: steps between evaluations on the test set; 0: at the end only.
      checkpoint_every: steps between checkpoints; 0: at the end only.
      learning_rate_schedule: what becomes of the learning rate: one of :mod:`farflung.rates` as text, such as
        ``cosine(warmup=500)``, or an object of one's own.

    Raises:
      ConfigError: a value out of its range; names the option.
    """

    steps: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str | OptimizerFactory = "sgd"
    clip_norm: float = 0.0
    on_nonfinite: str = "stop"
    seed: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    learning_rate_schedule: str | RateSchedule = "constant"

    def __post_init__(self) -> None:
        least_of = {"steps": 1, "batch_size": 1, "seed": 0, "evaluate_every": 0, "checkpoint_every": 0}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigError(f"--{_option(name)} {getattr(self, name)}: must be {least} or more")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"--learning-rate {self.learning_rate}: must be a number above 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"--momentum {self.momentum}: must be in [0, 1)")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(f"--weight-decay {self.weight_decay}: must be 0 or more")
        if not (self.clip_norm >= 0 and math.isfinite(self.clip_norm)):
            raise ConfigError(f"--clip-norm {self.clip_norm}: must be 0 or more")
        if self.on_nonfinite not in ON_NONFINITE:
            raise ConfigError(f"--on-nonfinite {self.on_nonfinite}: must be one of {', '.join(ON_NONFINITE)}")
        self._optimizer_factory()
        self.make_rates()

    @staticmethod
    def resolve(defaults: Mapping[str, Json], given: Mapping[str, Json]) -> Training:
        """The settings given, the workload's defaults where one is ``None``."""
        chosen = {name: value for name, value in given.items() if value is not None}
        known = {name: value for name, value in defaults.items() if name in Training.__dataclass_fields__}
        return Training(**{**known, **chosen})  # type: ignore[arg-type]

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A fresh optimizer of those parameters that are trained."""
        return self._optimizer_factory().make(
            [parameter for parameter in parameters if parameter.requires_grad],
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def make_rates(self) -> RateSchedule:
        """What becomes of the learning rate."""
        how = self.learning_rate_schedule
        made = build("learning-rate schedule", how, RATES) if isinstance(how, str) else how
        if not isinstance(made, RateSchedule):
            raise ConfigError(f"--learning-rate-schedule {how!r}: neither text nor a RateSchedule")
        return made

    def to_json(self) -> dict[str, Json]:
        """For telemetry and for comparing ranks; objects by :func:`farflung.spec.text_of`."""
        from farflung.optimizers import OPTIMIZERS

        told = {field.name: getattr(self, field.name) for field in fields(self)}
        known: dict[str, Mapping[str, Callable[..., object]]] = {
            "optimizer": OPTIMIZERS,
            "learning_rate_schedule": RATES,
        }
        return {**told, **{name: text_of(told[name], registry) for name, registry in known.items()}}

    def _optimizer_factory(self) -> OptimizerFactory:
        from farflung.optimizers import OPTIMIZERS, SGDSettings  # and torch, which settings do without

        how = self.optimizer
        made = build("optimizer", how, OPTIMIZERS) if isinstance(how, str) else how
        if not isinstance(made, OptimizerFactory):
            raise ConfigError(f"--optimizer {how!r}: neither text nor an OptimizerFactory")
        if isinstance(made, SGDSettings) and made.nesterov and not self.momentum:
            raise ConfigError(f"--optimizer {self.optimizer}: Nesterov's momentum needs a --momentum above 0")
        return made


def _option(name: str) -> str:
    return name.replace("_", "-")
