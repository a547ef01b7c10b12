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

    All replicas apply equal means in equal order, so they never differ. With A the time of a step's computation and C
    that of an exchange, a step takes :math:`\max(A, C, (A + C) / K)`. If C is dominated by bytes, a width of 2 hides
    all that can be hidden; a larger one helps if it is dominated by latency. Width 1 is synchronous SGD.

    The first ``warmup`` steps are synchronous. After them, or at the start without them, ``width - 1`` steps apply
    nothing, since nothing is due. At the end of a run the exchanges in flight are applied in order.

    An update that is late by :math:`\tau = K - 1` steps is stable for smaller learning rates only. There are two
    remedies, one at a time:

    * ``predict``: each gradient is computed at :math:`w - \eta \sum g` with the local gradients g in flight (including
      SGD's momentum and weight decay), and applied at w. By default a width of 2 does so if possible: in farflung's own
      loop, with plain SGD. It costs a copy of the parameters;
    * ``correction``: the mean, computed at :math:`w'`, is applied as
      :math:`\bar g + \lambda\, \bar g \odot \bar g \odot (w - w')`.

    **Learning rate**: with :math:`\lambda` the curvature of a quadratic, training is stable while :math:`\eta\lambda`
    is below the following bounds. Synchronous SGD allows 2, and 3.8 with momentum 0.9. Predicted weights restore the
    bound of synchronous SGD for the mean; the bound is then the divergence of the replicas' predictions. The analysis
    is ours.

    ========================  ======  ======  ======  ======  ======
    :math:`\tau`              1       5       10      15      20
    ========================  ======  ======  ======  ======  ======
    no momentum               1       0.28    0.15    0.10    0.077
    momentum 0.9              0.10    0.022   0.011   0.0079  0.0061
    no momentum, ``predict``  1       1       1       1       1
    0.9, ``predict``          1       0.14    0.048   0.027   0.019
    ========================  ======  ======  ======  ======  ======

    Each exchange in flight holds the gradient and a copy of it for checkpoints, and with ``correction`` the parameters
    at which it was computed.

    Args:
      width: K, width of the pipeline.
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
