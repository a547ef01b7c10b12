"""Schedule of Pipe-SGD: gradients are applied some steps late, without a wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.engine import Extension, TrainingLoop
from farflung.errors import ConfigError
from farflung.moments import is_predictable
from farflung.options import check_integer
from farflung.schedules.merges import Replace
from farflung.schedules.prediction import WeightPrediction
from farflung.types import Schedule, State, SyncUnit, Transfer

__all__ = ["Pipelined"]


@dataclass(frozen=True, slots=True)
class Pipelined(Schedule):
    r"""Every gradient exchange overlaps with the next steps, and its mean is applied ``width - 1`` steps late.

    .. math:: w_{t+1} = w_t - \eta\, \bar g_{t-K+1}(w_{t-K+1})

    All replicas apply equal means in equal order, so they never differ. The first ``width - 1`` steps after the warm-up
    apply nothing. At the end of a run the exchanges in flight are applied in order. There are two remedies for the
    delay, one at a time: ``predict`` computes each gradient at :math:`w - \eta \sum g` with the local gradients g in
    flight, and ``correction`` applies a mean that was computed at :math:`w'` as
    :math:`\bar g + \lambda\, \bar g \odot \bar g \odot (w - w')`. The page on Pipe-SGD in the documentation has stable
    learning rates.

    Args:
      width: K, width of the pipeline; 1 is synchronous SGD.
      warmup: Number of synchronous steps at the start.
      predict: True to predict weights; ``None`` for width 2 without a correction, if loop and optimizer support it.
      correction: :math:`\lambda`; 0 for no correction.

    Raises:
      ConfigError: an option is out of range, or there is a remedy without a delay, or two.

    References: Li et al. 2018 (Pipe-SGD), whose K is the width; Chen et al. 2022 (SAPipe) for warm-up and weight
    prediction; Zheng et al. 2017 (DC-ASGD) for the correction. Momentum inside the prediction, and skipped updates when
    the warm-up ends, are our choice.
    """

    width: int = 2
    warmup: int = 0
    predict: bool | None = None
    correction: float = 0.0

    def __post_init__(self) -> None:
        check_integer("pipelined", "width", self.width, 1)
        check_integer("pipelined", "warmup", self.warmup, 0)
        correction: object = self.correction
        if isinstance(correction, bool) or not isinstance(correction, int | float):
            raise ConfigError(f"pipelined: correction {correction!r} must be a number")
        if not 0 <= correction < math.inf:
            raise ConfigError(f"pipelined: correction {correction!r} must be 0 or more")
        if self.predict not in (True, False, None):
            raise ConfigError(f"pipelined: predict {self.predict!r} must be True, False or None")
        if self.width == 1 and (self.predict or self.correction):
            raise ConfigError(
                "pipelined: width 1 delays nothing, so there is nothing to predict or correct: use width 2"
            )
        if self.predict and self.correction:
            raise ConfigError(
                "pipelined: predicted weights differ between replicas, so no correction by them would be alike on "
                "all: give predict or correction, not both"
            )

    @property
    @override
    def merges(self) -> tuple[Replace]:
        return (Replace(self.correction),)

    @override
    def build_extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        """Returns weight prediction if requested; by default at width 2 without correction, if supported."""
        is_possible = is_predictable(loop.optimizer)
        if self.predict and not is_possible:
            raise ConfigError(
                "pipelined(predict=True) follows plain SGD, with momentum and weight decay: use --optimizer sgd, or "
                "pipelined(correction=...)"
            )
        is_default = self.predict is None and self.width == 2 and not self.correction and is_possible
        if self.predict or is_default:
            return (WeightPrediction(loop.engine, loop.buckets, loop.optimizer),)
        return ()

    @property
    @override
    def attach_refusal(self) -> str | None:
        return "predicted weights need hold of the forward pass" if self.predict else None

    @property
    @override
    def has_late_results(self) -> bool:
        return self.width > 1

    @property
    @override
    def max_steps_ahead(self) -> int:
        return self.width

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns one transfer for each bucket."""
        del state
        delay = 0 if step < self.warmup else self.width - 1
        merge = Replace(self.correction if delay else 0.0)
        return [Transfer(unit, step + delay, merge) for unit in units]
