"""What coordinator, device and demonstration of coded training share: options, progress, and words for results."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich.filesize import decimal

from farflung.cli.progress import Bar, clock_text
from farflung.coded.run import CodedRun
from farflung.report.tables import duration_words
from farflung.runs.stopping import on_stop
from farflung.telemetry import Event

__all__ = ["CodedProgress", "encoding_words", "stopping", "summary_lines"]

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
"""What is printed for an event."""


class CodedProgress(Bar):
    """A sink of a coordinator's events: a bar, and a line for each event that changes what devices do.

    The bar counts devices, then blocks, then percent: how far the logarithm of the gap has come to that of the
    tolerance, or how many of the most iterates there were, whichever is more.

    Args:
      run: that is shown.
      quiet: shows nothing at all.
    """

    def __init__(self, run: CodedRun, *, quiet: bool) -> None:
        super().__init__("waiting for devices", run.settings.devices, quiet=quiet)
        self._settings, self._most = run.settings, run.max_iterations
        solver: Any = run.learner.minimiser(2)
        self._tolerance: float = solver.tol
        self._partitions: dict[int, str] = {}
        self._ordered: set[int] = set()
        self._built: set[int] = set()
        self._first_gap: float | None = None
        self.trains = False

    def __call__(self, event: Event) -> None:
        """Takes in one event."""
        values: Mapping[str, Any] = event
        with suppress(Exception):
            self._take(values)
            words = _WORDS.get(values["event"])
            if words is not None:
                with_partition = f" with partition {values['partition']!r}" if values.get("partition") else ""
                line = words.format(**values, with_partition=with_partition)
                self.line(f"{clock_text(values['t'])}  {line}", always=True)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "came":
            self._partitions[event["rank"]] = event["partition"]
        elif kind == "gone":
            self._partitions.pop(event["rank"], None)
        elif kind in ("ordered", "built"):
            (self._ordered if kind == "ordered" else self._built).add(event["block"])
        elif kind == "encoded":
            self.trains = True
            self.start("training", 100)
        if kind == "iterate":
            self._iterate(event)
        elif not self.trains and self._ordered:
            if self.state != "encoding":
                self.start("encoding", 0)
            self.total, self.about = len(self._ordered), "blocks"
            self.advance(len(self._built & self._ordered))
        elif not self.trains:
            self.about = (
                f"{sum(map(bool, self._partitions.values()))} of {self._settings.partitions} partitions"
            )
            self.advance(len(self._partitions))

    def _iterate(self, event: Mapping[str, Any]) -> None:
        gap, done = event["gap"], event["iterations"] / self._most
        if self._first_gap is None:
            self._first_gap = gap
        way = math.log(self._first_gap / self._tolerance) if self._first_gap > self._tolerance else 0.0
        if way and gap > 0:
            done = max(done, math.log(self._first_gap / gap) / way)
        self.about = (
            f"iterate {event['iterations']:,}, objective {event['objective']:.6g}, gap {gap:.1e}, "
            f"{len(self._partitions)} devices"
        )
        self.advance(100 * min(1.0, done))


@contextmanager
def stopping(progress: CodedProgress) -> Iterator[Callable[[], bool]]:
    """Gives whether to stop: the first signal asks for it; a second one, and one before training, interrupts."""
    asked = threading.Event()

    def ask() -> None:
        if asked.is_set() or not progress.trains:
            raise KeyboardInterrupt
        asked.set()

    with on_stop(ask):
        yield asked.is_set


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and figures of a summary."""
    how = "converged" if summary["converged"] else "stopped" if summary["interrupted"] else "not converged"
    partitions, classes = summary["partitions"], summary["classes"]
    lines = [
        ("objective", f"{summary['objective']:.10g}"),
        ("gap", f"{summary['gap']:.1e}"),
        ("iterates", f"{summary['iterations']:,}, {how}"),
        ("trained on", f"{summary['samples']:,} samples of {summary['features']:,} features"),
        ("partitions", f"{len(partitions)}: {', '.join(partitions)}"),
        ("classes", f"{len(classes)}"),
        ("devices", f"{summary['devices_came']} came, {summary['devices_gone']} went"),
        ("fallen silent", f"{summary['silences']} times"),
        ("encoding", encoding_words(summary)),
        ("coordinator sent", decimal(sum(summary["bytes_sent"].values()))),
        ("duration", duration_words(summary["duration_s"])),
    ]
    if summary["test_accuracy"] is not None:
        lines.insert(2, ("test accuracy", f"{100 * summary['test_accuracy']:.2f} %"))
    return lines


def encoding_words(summary: Mapping[str, Any]) -> str:
    """What devices gave each other for blocks, and what they would have with an MDS code."""
    rows, columns = (summary["encoding_nbytes"][kind] for kind in ("rows", "columns"))
    under_mds = summary["mds_encoding_nbytes"] - columns
    compared = f" ({100 * rows / under_mds:.0f} % of an MDS code's {decimal(under_mds)})" if under_mds else ""
    return f"rows {decimal(rows)}{compared}, columns {decimal(columns)}"
