"""Recorder of a loop with :func:`farflung.attach`, for ``farflung plan``: sizes of parameters, times of steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from farflung.errors import Unsupported
from farflung.files import write_json
from farflung.telemetry import Event, read_number

__all__ = ["RECIPE_VARIABLE", "RECORD_VARIABLE", "STEPS_VARIABLE", "LoopRecorder"]

RECIPE_VARIABLE = "FARFLUNG_RECIPE"
"""Environment variable with the recipe that replaces the argument of :func:`farflung.attach`."""
RECORD_VARIABLE, STEPS_VARIABLE = "FARFLUNG_RECORD", "FARFLUNG_RECORD_STEPS"
"""Environment variables with the file to write, and the number of steps after which the process ends."""
_WARM_UP = 3
"""Number of first steps that are not counted, since they allocate."""


class LoopRecorder:
    """Sink that times the steps of a loop that trains alone, without waits, and the gradients of each parameter.

    Args:
      path: File to write.
      steps: Number of steps to count; the process then exits.
      model: Model of the loop.

    Raises:
      Unsupported: The process has recorded another model.
    """

    _has_recorded = False

    def __init__(self, path: Path, steps: int, model: nn.Module) -> None:
        if LoopRecorder._has_recorded:
            raise Unsupported("farflung plan: the script attaches two models, and a plan is for one")
        LoopRecorder._has_recorded = True
        self._path, self._steps = path, steps
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._ready_s: dict[int, float] = {}
        self._durations_s: list[float] = []
        self._backward_s: list[list[float]] = []
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._mark_ready, index))

    @staticmethod
    def from_environment(model: nn.Module) -> LoopRecorder | None:
        """Creates the recorder that the environment asks for, if any."""
        path = os.environ.get(RECORD_VARIABLE)
        return None if not path else LoopRecorder(Path(path), int(os.environ[STEPS_VARIABLE]), model)

    def __call__(self, event: Event) -> None:
        """Counts a completed step.

        Raises:
          SystemExit: All steps are recorded.
        """
        if event["event"] != "step":
            return
        if read_number(event, "step") >= _WARM_UP:
            self._durations_s.append(read_number(event, "duration_s") - read_number(event, "exposed_s"))
            self._backward_s.append(self._split_backward())
        self._ready_s.clear()
        if len(self._durations_s) == self._steps:
            self._write()
            raise SystemExit(0)

    def _mark_ready(self, index: int, parameter: Tensor) -> None:
        del parameter
        self._ready_s[index] = time.perf_counter()

    def _split_backward(self) -> list[float]:
        """Returns the seconds from the gradient of the next parameter to that of each one, in model order."""
        ends_s = [self._ready_s.get(index, 0.0) for index in range(len(self._parameters))]
        previous_s, seconds = min(self._ready_s.values(), default=0.0), list[float]()
        for end_s in reversed(ends_s):
            seconds.append(max(0.0, end_s - previous_s))
            previous_s = max(previous_s, end_s)
        return seconds[::-1]

    def _write(self) -> None:
        median: Callable[..., float] = statistics.median
        backward_s = [median(column) for column in zip(*self._backward_s, strict=True)]
        write_json(
            self._path,
            {
                "step_s": max(0.0, median(self._durations_s) - sum(backward_s)),
                "parameters": [
                    {"shape": [*p.shape], "dtype": str(p.dtype).removeprefix("torch."), "backward_s": seconds}
                    for p, seconds in zip(self._parameters, backward_s, strict=True)
                ],
            },
        )
