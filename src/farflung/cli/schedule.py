"""``farflung schedule``: what a recipe sends when, as a grid of transfers and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from farflung.cli.output import stdout_console
from farflung.comm import collective_named
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError
from farflung.network import Link, NetworkProfile
from farflung.recipes import Recipe, recipe
from farflung.report import gantt_picture
from farflung.runs import RunOptions, SimulatedConfig, prepared, simulate_prepared
from farflung.sim import Costs, Timeline, timeline
from farflung.telemetry import Event
from farflung.types import Bucket, TensorSpec
from farflung.workloads import Quadratic

__all__ = ["Schedule"]

MOST_STEPS = 200
"""A grid has a column for each."""
BEGINS, MOVES, ENDS, AT_ONCE = "o", "-", ">", "*"


@dataclass(frozen=True)
class Schedule:
    """Show what a recipe sends when: its first steps as a grid, and as bars over simulated time.

    In the grid a row is what starts at a step, a column is a step: o it starts, > its result is due before the step
    ends, * both at the same step.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """The name of a recipe; see farflung list recipes."""
    schedule: str | None = None
    """Instead of the recipe's, e.g. "delayed(delay=3, period=2)"."""
    codec: str | None = None
    """Instead of the recipe's."""
    collective: str | None = None
    """Instead of the recipe's."""
    steps: int = 12
    """How many to show, at most 200."""
    workers: int = 4
    """Replicas in the picture."""
    network: str | None = None
    """In the picture: the name of a network, e.g. four-regions. When not given, links of --latency and --bandwidth."""
    latency: float = 0.05
    """In the picture: one-way latency of each link, in seconds."""
    bandwidth: float = 20e6
    """In the picture: bandwidth of each link, in bit/s."""
    compute: float = 0.1
    """In the picture: seconds that a step computes."""
    mbytes: float = 0.4
    """In the picture: megabytes of a gradient."""
    out: Path = Path("schedule.png")
    """The picture."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        self._check()
        chosen = recipe(self.recipe).but(schedule=self.schedule, codec=self.codec, collective=self.collective)
        console = stdout_console()
        lines, events = grid(chosen, self.steps, self.compute), self._simulate(chosen)
        for line in lines:
            console.print(Text(line), soft_wrap=True)
        where = self.network or f"{self.latency:g} s, {self.bandwidth:g} bit/s"
        title = f"{chosen.name}: {chosen.schedule} on {self.workers} replicas, {where}"
        gantt_picture(events, self.out, title=title, simulated=True)
        console.print(f"picture  {self.out} (simulated)", soft_wrap=True, markup=False)
        return 0

    def _check(self) -> None:
        for name, least in (("steps", 1), ("workers", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be {least} or more")
        if self.steps > MOST_STEPS:
            raise ConfigError(f"--steps {self.steps}: a grid shows at most {MOST_STEPS}")
        for name in ("bandwidth", "compute", "mbytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name} {getattr(self, name):g}: must be above 0")
        if self.out.suffix.lower() != ".png":
            raise ConfigError(f"--out {self.out}: the picture is a PNG, so its name must end in .png")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"--latency {self.latency:g}: must be 0 or more")

    def _simulate(self, chosen: Recipe) -> dict[int, list[Event]]:
        """Trains a quadratic as large as the gradient in virtual time; gives the events of each rank."""
        if collective_named(chosen.collective).by_backend:
            chosen = chosen.but(collective="ring")  # what the backend does has no virtual counterpart
        link = Link(self.latency, self.bandwidth)
        settings = {
            "workload": Quadratic(
                dim=max(1, round(self.mbytes * 1e6 / 4)), samples=max(4, self.workers), groups=1
            ),
            "recipe": chosen,
            "network": NetworkProfile.uniform(link) if self.network is None else self.network,
            "device": DeviceProfile(forward_s=self.compute / 3),
            "workers": self.workers,
            "steps": self.steps,
            "batch_size": 1,
        }
        run = prepared(SimulatedConfig, settings, options=RunOptions(trace=True), scratch=True)
        return simulate_prepared(run, checkpointed=False).events


def grid(chosen: Recipe, steps: int, compute_s: float) -> Sequence[str]:
    """The transfers that start in the first steps, a row for each step at which some do.

    Args:
      chosen: the recipe.
      steps: how many to show.
      compute_s: of a step, for schedules that ask for times; an exchange takes none here.
    """
    schedule = chosen.parts(0).schedule
    played: Timeline = timeline(
        schedule, [Bucket(0, TensorSpec((1,)))], Costs(compute_s / 3, 2 * compute_s / 3), steps
    )
    width = len(str(steps - 1))
    lines = [f"{chosen.name}: {chosen.schedule}, {chosen.collective}, {chosen.codec}"]
    lines.append(" " * 27 + " ".join(f"{step:>{width}}" for step in range(steps)))
    for move in played.moves:
        merge = move.transfer.merge
        row = [_mark(step, move.step, move.transfer.due_step).rjust(width, " ") for step in range(steps)]
        lines.append(
            f"step {move.step:>{width}}, {merge.moves}".ljust(27) + " ".join(row) + f"   {merge.means}"
        )
    lines.append(f"{BEGINS} starts   {MOVES} under way   {ENDS} due   {AT_ONCE} starts and is due")
    return lines


def _mark(step: int, began: int, due: int) -> str:
    if step == began == due:
        return AT_ONCE
    if step == began:
        return BEGINS
    if step == due:
        return ENDS
    return MOVES if began < step < due else "."
