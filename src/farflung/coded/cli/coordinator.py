"""``farflung coded coordinator``: gathers devices and trains on their data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from farflung.cli.main import spoken
from farflung.cli.options import ENDPOINT, endpoint_of, given, with_options
from farflung.cli.output import OutputOptions, print_files, print_table, stderr_console
from farflung.cli.progress import Bar, clock_text
from farflung.coded.coordinator import Settings
from farflung.coded.meeting import Address
from farflung.coded.parts import read_samples
from farflung.coded.picture import coded_picture
from farflung.coded.record import Folder
from farflung.coded.run import Learner, coordinate
from farflung.config import settings_of
from farflung.errors import ConfigError
from farflung.report.tables import duration_words
from farflung.runs import run_folder
from farflung.runs.stopping import asked_to_stop
from farflung.telemetry import Event

__all__ = ["CodedProgress", "Coordinate", "encoding_words"]

_SETTINGS = {
    name.removesuffix("_s"): setting
    if setting.default is None
    else replace(setting, about=f"{setting.about.rstrip('.')}; {setting.default} when not given")
    for name, setting in {**settings_of(Settings), **settings_of(Learner)}.items()
    if name != "least_s"
}
"""Settings of a run that are options, by name."""
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
"""Text that is printed for each event."""


@spoken
@dataclass(frozen=True)
@with_options(
    {**_SETTINGS, **{name: entry for name, entry in ENDPOINT.items() if name not in ("interface", "port")}}
)
class Coordinate(OutputOptions):
    """Coordinate a run: wait for devices, have their data encoded, and train.

    Prints the command for devices. Ctrl-C stops it after the current iterate; the same command resumes it.
    """

    at: str = "127.0.0.1:0"
    """HOST:PORT to listen at: an address of this machine that devices reach; port 0 is any free one."""
    max_iterations: int = 1000
    """Maximum number of iterates; each is a product with the samples and one with their transpose."""
    folder: Path | None = None
    """Folder of the run; a stopped run in it is resumed. A new one under runs/ when not given."""
    test: str | None = None
    """Samples on which this process tests the final model: a9a or covtype, for their test sets, or FILE.npz."""

    def run(self) -> int:
        """Runs the command; returns the exit code."""
        if self.max_iterations < 1:
            raise ConfigError(f"--max-iterations {self.max_iterations}: must be 1 or more")
        settings, learner = self._settings(), Learner(**given(self, settings_of(Learner)))
        folder = Folder(self.folder or run_folder("coded"))
        test = None if self.test is None else read_samples(self.test, test=True)
        address, endpoint = Address.of(self.at), endpoint_of(self)
        with (
            CodedProgress(settings, learner, self.max_iterations, quiet=self.quiet or self.json) as progress,
            asked_to_stop(lambda: progress.trains) as stop,
        ):
            summary = coordinate(
                settings,
                learner,
                folder,
                address,
                endpoint,
                max_iterations=self.max_iterations,
                test=test,
                met=lambda at: None if self.quiet else self._say_where(at),
                told=progress,
                stop_asked=stop.is_set,
            )
        picture = folder.picture
        title = f"Coded training of {len(summary['partitions'])} partitions"  # type: ignore[arg-type]
        coded_picture(folder.told(), picture, title=title)
        if self.json:
            print(json.dumps({**summary, "folder": str(folder.path)}))
        else:
            print_table(("what", "how much"), _summary_lines(summary))
            print_files(picture=picture, model=folder.model)
        return 130 if summary["interrupted"] else 0

    def _settings(self) -> Settings:
        values = {
            name: value
            for name in settings_of(Settings)
            if (value := getattr(self, name.removesuffix("_s"), None)) is not None
        }
        for name in ("partitions", "devices"):
            if name not in values:
                raise ConfigError(f"--{name}: give how many {name} training begins with")
        return Settings(**values)

    def _say_where(self, at: Address) -> None:
        keys = " --keys FOLDER" if endpoint_of(self).keys else ""
        stderr_console().print(
            f"on each device: farflung coded device {at} --data FILE.npz{keys}", soft_wrap=True, markup=False
        )


class CodedProgress(Bar):
    """A sink of a coordinator's events: a bar, and a line for each event that changes the work of devices.

    The bar counts devices, then blocks, then percent. The percentage is the larger share of two: of the
    logarithm of the gap on its way to the tolerance, or of the maximum number of iterates.

    Args:
      settings: Settings of the run.
      learner: Settings of the model.
      max_iterations: Maximum number of iterates.
      quiet: True to show nothing.
    """

    def __init__(self, settings: Settings, learner: Learner, most: int, *, quiet: bool) -> None:
        super().__init__("waiting for devices", settings.devices, quiet=quiet)
        self._settings, self._most = settings, most
        solver: Any = learner.minimiser(2)
        self._tolerance: float = solver.tol
        self._partitions: dict[int, str] = {}
        self._ordered: set[int] = set()
        self._built: set[int] = set()
        self._first_gap: float | None = None
        self.trains = False

    def __call__(self, event: Event) -> None:
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
        gap, fraction = event["gap"], event["iterations"] / self._most
        if self._first_gap is None:
            self._first_gap = gap
        log_range = math.log(self._first_gap / self._tolerance) if self._first_gap > self._tolerance else 0.0
        if log_range and gap > 0:
            fraction = max(fraction, math.log(self._first_gap / gap) / log_range)
        self.about = (
            f"iterate {event['iterations']:,}, objective {event['objective']:.6g}, gap {gap:.1e}, "
            f"{len(self._partitions)} devices"
        )
        self.advance(100 * min(1.0, fraction))


def _summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    state = "converged" if summary["converged"] else "stopped" if summary["interrupted"] else "not converged"
    if summary["stalled"]:
        state = "not converged: rounding errors allow no further step; scale the features"
    partitions, classes = summary["partitions"], summary["classes"]
    lines = [
        ("objective", f"{summary['objective']:.10g}"),
        ("gap", f"{summary['gap']:.1e}"),
        ("iterates", f"{summary['iterations']:,}, {state}"),
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
    """Formats the bytes that devices sent each other for blocks, compared with an MDS code."""
    rows, columns = (summary["encoding_nbytes"][kind] for kind in ("rows", "columns"))
    mds_nbytes = summary["mds_encoding_nbytes"] - columns
    note = f" ({100 * rows / mds_nbytes:.0f} % of an MDS code's {decimal(mds_nbytes)})" if mds_nbytes else ""
    return f"rows {decimal(rows)}{note}, columns {decimal(columns)}"
