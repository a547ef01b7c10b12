"""What replicas tell, as curves in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from farflung.extras import need
from farflung.telemetry import Event

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["TensorBoard"]

OF_STEPS = {
    "mean_loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "bytes_sent": "network/bytes_sent",
    "in_flight": "network/exchanges_under_way",
    "duration_s": "seconds/step",
    "compute_s": "seconds/compute",
    "exposed_s": "seconds/exposed_communication",
    "data_s": "seconds/data_wait",
    "scoring_s": "seconds/scoring",
}
"""The curve that a field of ``step`` events belongs to."""
OF_EVALUATIONS = {"accuracy": "test/score", "loss": "test/loss", "duration_s": "seconds/evaluation"}
"""Likewise of ``evaluation`` events."""


class TensorBoard:
    """A sink whose events can be looked at with ``tensorboard --logdir``: rank 0's, a point for each step.

    Times are those of the run's clock, so in a simulated run "relative" is simulated time. A run that goes on takes the
    place of the steps that it does again.

    Args:
      folder: where to; made if it is not there.
      clock: when the run's clock showed 0, in seconds since the epoch, is found from it.

    Raises:
      MissingExtra: tensorboard is not installed.
    """

    def __init__(self, folder: Path | str, *, clock: Callable[[], float] = time.time) -> None:
        need("output for TensorBoard", "tensorboard", extra="tensorboard")
        self._folder, self._clock = folder, clock
        self._writer: SummaryWriter | None = None
        self._zero_s = clock()

    def __call__(self, event: Event) -> None:
        """One event; those of other ranks and kinds are passed over."""
        if event["rank"] != 0:
            return
        if event["event"] == "begin":
            self._begin(int(_number(event, "step") or 0), _number(event, "t") or 0.0)
        elif event["event"] == "step":
            self._add(event, OF_STEPS)
        elif event["event"] == "evaluation":
            self._add(event, OF_EVALUATIONS)

    def _begin(self, step: int, t: float) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=step or None)
        self._zero_s = self._clock() - t

    def _add(self, event: Event, curves: dict[str, str]) -> None:
        step, t = _number(event, "step"), _number(event, "t")
        if self._writer is None or step is None or t is None:
            return
        for name, curve in curves.items():
            value = _number(event, name)
            if value is not None:
                self._writer.add_scalar(curve, value, int(step), self._zero_s + t)

    def close(self) -> None:
        """Everything is in the file afterwards."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(event: Event, name: str) -> float | None:
    value = event.get(name)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value
