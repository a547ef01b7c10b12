"""Watch of a run: whether the times of its steps and its loss are those of its plan."""

from __future__ import annotations

import shlex
from collections import deque
from pathlib import Path
from statistics import fmean

from farflung.errors import ConfigError
from farflung.planning.choice import NUM_TENTHS
from farflung.planning.result import Plan, parse_components
from farflung.report.tables import format_duration
from farflung.runs import RunConfig
from farflung.telemetry import Event, Sink, read_number

__all__ = ["PlanWatch"]

WINDOW = 50
"""Number of steps between comparisons, which are averaged."""
TIME_FACTOR = 1.25
"""Factor between real and simulated times of steps up to which a run is as planned."""


class PlanWatch:
    """Comparison of a run with its plan, from the events of rank 0.

    Args:
      path: File ``plan.json`` of the plan.
      config: Configuration of the run.
      folder: Folder of the run, named in the advice.

    Raises:
      BadInput: The file has no plan, or that of another training.
    """

    def __init__(self, path: Path, config: RunConfig, folder: Path) -> None:
        plan = Plan.load(path)
        planned = {**plan.settings, "steps": plan.steps}
        for name in ("workload", "workers", "steps"):
            if planned.get(name) != getattr(config, name):
                raise ConfigError(
                    f"--plan {path}: of a training with --{name} {planned.get(name)}, and this one has "
                    f"{getattr(config, name)}"
                )
        own = [
            row
            for row in sorted(plan.rows, key=lambda row: row is not plan.choice)
            if parse_components(row.recipe)[0].component_texts == config.recipe.component_texts
        ]
        if not own or own[0].pace is None:
            raise ConfigError(f"--plan {path}: it has no times of recipe {config.recipe.text}")
        self._steps, self._pace, self._loss_bounds = config.steps, own[0].pace, own[0].loss_bounds
        others = [(row.high_s, row.recipe) for row in plan.rows if row.high_s is not None and row not in own]
        self._advice = ""
        if others:
            other = shlex.quote(min(others)[1])
            self._advice = f"; to go on with another: farflung train --resume {folder} --recipe {other}"
        self._window: deque[Event] = deque(maxlen=WINDOW)
        self._is_outside = False

    def wrap(self, sink: Sink) -> Sink:
        """Returns a sink that also gets an event ``plan`` when the run leaves the interval of its plan."""

        def emit(event: Event) -> None:
            sink(event)
            if event["event"] == "step" and event["rank"] == 0:
                deviation = self._add_step(event)
                if deviation and not self._is_outside:
                    text = f"not as planned: {deviation}{self._advice}"
                    sink({"event": "plan", "rank": 0, "step": event["step"], "text": text})
                if deviation is not None:
                    self._is_outside = bool(deviation)

        return emit

    def _add_step(self, event: Event) -> str | None:
        """Returns how the last steps differ from the plan, empty if not at all; ``None`` between comparisons."""
        self._window.append(event)
        step = int(read_number(event, "step")) + 1
        if step % WINDOW or len(self._window) < WINDOW:
            return None
        step_s = fmean(read_number(each, "duration_s") for each in self._window)
        planned_s = (self._pace.compute_seconds(step) - self._pace.compute_seconds(step - WINDOW)) / WINDOW
        if not planned_s / TIME_FACTOR <= step_s <= planned_s * TIME_FACTOR:
            return f"a step takes {format_duration(step_s)} in place of {format_duration(planned_s)}"
        losses = [float(loss) for each in self._window if isinstance(loss := each["mean_loss"], int | float)]
        tenth = step * NUM_TENTHS // self._steps - 1  # the last one that is over, since losses fall
        bound = self._loss_bounds[tenth] if self._loss_bounds and tenth >= 0 else None
        if losses and bound is not None and fmean(losses) > bound:
            return f"the loss is {fmean(losses):.3g} in place of at most {bound:.3g}"
        return ""
