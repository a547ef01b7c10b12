"""How a coded run is doing, on stderr while it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from farflung.cli.progress import clock_text, stderr_console
from farflung.coded.run import CodedRun
from farflung.telemetry import Event

__all__ = ["Watch"]

_WORDS = {
    "came": "rank {rank} has come{with_partition}",
    "turned_away": "rank {rank} is turned away: {why}",
    "gone": "rank {rank} is gone",
    "leaving": "rank {rank} would like to leave",
    "silent": "rank {rank} is silent",
    "heard": "rank {rank} is heard again",
    "encoded": "all blocks to begin with are made",
    "paused": "waiting: {missing}",
    "goes_on": "training goes on",
    "lost": "partition {partition!r} is lost",
}
"""What is said of an event."""


class Watch:
    """A sink of a coordinator's events: a bar in a terminal, and a line for each event that somebody may care for.

    The bar counts devices, then blocks, then how far the logarithm of the gap has come to that of the tolerance, or how
    many of the most iterates there were, whichever is more: from these the time that is left is estimated.

    Args:
      run: that is watched.
      quiet: shows nothing at all.
    """

    def __init__(self, run: CodedRun, *, quiet: bool) -> None:
        self._settings, self._most, self._quiet = run.settings, run.max_iterations, quiet
        solver: Any = run.learner.minimiser(2)
        self._tolerance: float = solver.tol
        self._console = stderr_console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, disable=quiet or not self._console.is_terminal)
        self._task = self._bar.add_task("waiting for devices", total=self._settings.devices, figures="")
        self._there: dict[int, str] = {}
        self._ordered: set[int] = set()
        self._built: set[int] = set()
        self._first_gap: float | None = None
        self._trains = False

    def __enter__(self) -> Self:
        with suppress(Exception):
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Takes in one event."""
        values: Mapping[str, Any] = event
        with suppress(Exception):
            self._take(values)
            words = _WORDS.get(values["event"])
            if words is not None and not self._quiet:
                with_partition = f" with partition {values['partition']!r}" if values.get("partition") else ""
                line = words.format(**values, with_partition=with_partition)
                self._console.print(
                    f"{clock_text(values['t'])}  {line}", soft_wrap=True, markup=False, highlight=False
                )

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "came":
            self._there[event["rank"]] = event["partition"]
        elif kind == "gone":
            self._there.pop(event["rank"], None)
        elif kind in ("ordered", "built"):
            (self._ordered if kind == "ordered" else self._built).add(event["block"])
        elif kind == "encoded":
            self._trains = True
            self._bar.reset(self._task, total=1.0, description="training")
        if kind == "iterate":
            self._iterate(event)
        elif not self._trains and self._ordered:
            made = len(self._built & self._ordered)
            self._bar.update(
                self._task, description="encoding", total=len(self._ordered), completed=made,
                figures=f"{made} of {len(self._ordered)} blocks",
            )  # fmt: skip
        elif not self._trains:
            partitions = sum(map(bool, self._there.values()))
            self._bar.update(
                self._task, completed=len(self._there),
                figures=f"{len(self._there)} of {self._settings.devices} devices, "
                f"{partitions} of {self._settings.partitions} partitions",
            )  # fmt: skip

    def _iterate(self, event: Mapping[str, Any]) -> None:
        gap, done = event["gap"], event["iterations"] / self._most
        if self._first_gap is None:
            self._first_gap = gap
        way = math.log(self._first_gap / self._tolerance) if self._first_gap > self._tolerance else 0.0
        if way and gap > 0:
            done = max(done, math.log(self._first_gap / gap) / way)
        self._bar.update(
            self._task, completed=min(1.0, done),
            figures=f"iterate {event['iterations']:,}, objective {event['objective']:.6g}, gap {gap:.1e}, "
            f"{len(self._there)} devices",
        )  # fmt: skip
