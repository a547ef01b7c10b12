"""Settings of a training run, checked where they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from farflung.errors import ConfigError
from farflung.types import Json

__all__ = ["ON_NONFINITE", "OPTIMIZERS", "Training"]

OPTIMIZERS = ("sgd", "adam")
"""What ``--optimizer`` may say."""
ON_NONFINITE = ("stop", "skip", "exclude")
"""What ``--on-nonfinite`` may say."""


@dataclass(frozen=True, slots=True)
class Training:
    """How long and with what settings a model trains; equal on all replicas.

    Args:
      steps: updates of the parameters.
      batch_size: samples per replica and step.
      learning_rate: of the optimizer.
      momentum: of SGD.
      weight_decay: of the optimizer.
      optimizer: ``sgd`` or ``adam``.
      clip_norm: largest norm of the gradient that the optimizer steps on; 0: no limit.
      on_nonfinite: what all replicas do at a step where one's loss is NaN or infinite: ``stop`` the run, ``skip`` the
        update, or ``exclude`` that replica from the mean.
      seed: everything random derives from it.
      evaluate_every: steps between evaluations on the test set; 0: at the end only.
      checkpoint_every: steps between checkpoints; 0: at the end only.

    Raises:
      ConfigError: a value out of its range; names the option.
    """

    steps: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    clip_norm: float = 0.0
    on_nonfinite: str = "stop"
    seed: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("evaluate_every", 0), ("checkpoint_every", 0)):
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
        for name, known in (("optimizer", OPTIMIZERS), ("on_nonfinite", ON_NONFINITE)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"--{_option(name)} {getattr(self, name)}: must be one of {', '.join(known)}"
                )

    @staticmethod
    def resolve(defaults: Mapping[str, Json], given: Mapping[str, Json]) -> Training:
        """The settings given, the workload's defaults where one is ``None``."""
        chosen = {name: value for name, value in given.items() if value is not None}
        known = {name: value for name, value in defaults.items() if name in Training.__dataclass_fields__}
        return Training(**{**known, **chosen})  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Json]:
        """For telemetry and for comparing ranks."""
        return asdict(self)


def _option(name: str) -> str:
    return name.replace("_", "-")
