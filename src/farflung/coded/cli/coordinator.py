"""``farflung coded coordinator``: gathers devices and trains on their data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from farflung.cli.main import label_options
from farflung.cli.options import ENDPOINT, build_endpoint, collect_options, with_options
from farflung.cli.output import OutputOptions, create_stderr_console, print_files, print_json, print_table
from farflung.cli.progress import Bar, format_clock
from farflung.coded.coordinator import Settings
from farflung.coded.meeting import MAX_PROCESSES, Address
from farflung.coded.parts import read_samples
from farflung.coded.picture import draw_coded_picture
from farflung.coded.record import Folder
from farflung.coded.run import Learner, run_coordinator
from farflung.config import list_settings
from farflung.errors import ConfigError
from farflung.report.tables import format_duration
from farflung.runs import name_run_folder
from farflung.runs.stopping import watch_stop_signals
from farflung.telemetry import Event

__all__ = ["CodedProgress", "Coordinate", "format_encoding"]

_SETTINGS = {
    name.removesuffix("_s"): setting
    if setting.default is None
    else replace(setting, description=f"{setting.description.rstrip('.')}; {setting.default} when not given")
    for name, setting in {**list_settings(Settings), **list_settings(Learner)}.items()
    if name != "min_timeout_s"
}
"""Settings of a run that are options, by name."""
_EVENT_TEXTS = {
    "came": "rank {rank} has joined{with_partition}",
    "turned_away": "rank {rank} is turned away: {why}",
    "gone": "rank {rank} is gone",
    "leaving": "rank {rank} would like to leave",
    "silent": "rank {rank} is silent",
    "heard": "rank {rank} is heard again",
    "encoded": "all blocks to begin with are made",
    "paused": "waiting: {missing}",
    "goes_on": "training continues",
    "lost": "partition {partition!r} is lost",
}
"""Text that is printed for each event."""


@label_options
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
        settings, learner = self._build_settings(), Learner(**collect_options(self, list_settings(Learner)))
        folder = Folder(self.folder or name_run_folder("coded"))
        test = None if self.test is None else read_samples(self.test, test=True)
        address, endpoint = Address.parse(self.at), build_endpoint(self)
        with (
            CodedProgress(settings, learner, self.max_iterations, quiet=self.quiet or self.json) as progress,
            watch_stop_signals(lambda: progress.is_training) as stop,
        ):
            summary = run_coordinator(
                settings,
                learner,
                folder,
                address,
                endpoint,
                max_iterations=self.max_iterations,
                test=test,
                on_ready=lambda at: None if self.quiet else self._print_command(at),
                sink=progress,
                should_stop=stop.is_set,
            )
        picture = folder.picture
        title = f"Coded training of {len(summary['partitions'])} partitions"  # type: ignore[arg-type]
        draw_coded_picture(folder.load_events(), picture, title=title)
        if self.json:
            print_json({**summary, "folder": str(folder.path)})
        else:
            print_table((), _build_summary_rows(summary))
            print_files(picture=picture, model=folder.model_path)
        return 130 if summary["interrupted"] else 0

    def _build_settings(self) -> Settings:
        values = {
            name: value
            for name in list_settings(Settings)
            if (value := getattr(self, name.removesuffix("_s"), None)) is not None
        }
        for name in ("partitions", "devices"):
            if name not in values:
                raise ConfigError(f"--{name}: give how many {name} training begins with")
        if values["devices"] >= MAX_PROCESSES:
            raise ConfigError(f"--devices {values['devices']}: a run has {MAX_PROCESSES - 1} seats")
        return Settings(**values)

    def _print_command(self, at: Address) -> None:
        keys = " --keys FOLDER" if build_endpoint(self).keys else ""
        create_stderr_console().print(
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

    def __init__(self, settings: Settings, learner: Learner, max_iterations: int, *, quiet: bool) -> None:
        super().__init__("waiting for devices", settings.devices, quiet=quiet)
        self._settings, self._max_iterations = settings, max_iterations
        solver: Any = learner.build_solver(2)
        self._tolerance: float = solver.tol
        self._partitions: dict[int, str] = {}
        self._ordered_blocks: set[int] = set()
        self._built_blocks: set[int] = set()
        self._first_gap: float | None = None
        self.is_training = False

    def __call__(self, event: Event) -> None:
        values: Mapping[str, Any] = event
        with suppress(Exception):
            self._handle_event(values)
            words = _EVENT_TEXTS.get(values["event"])
            if words is not None:
                with_partition = f" with partition {values['partition']!r}" if values.get("partition") else ""
                line = words.format(**values, with_partition=with_partition)
                self.print_line(f"{format_clock(values['t'])}  {line}", force=True)

    def _handle_event(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "came":
            self._partitions[event["rank"]] = event["partition"]
        elif kind == "gone":
            self._partitions.pop(event["rank"], None)
        elif kind in ("ordered", "built"):
            (self._ordered_blocks if kind == "ordered" else self._built_blocks).add(event["block"])
        elif kind == "encoded":
            self.is_training = True
            self.start("training", 100)
        if kind == "iterate":
            self._update_iterate(event)
        elif not self.is_training and self._ordered_blocks:
            if self.state != "encoding":
                self.start("encoding", 0)
            self.total, self.detail = len(self._ordered_blocks), "blocks"
            self.advance(len(self._built_blocks & self._ordered_blocks))
        elif not self.is_training:
            self.detail = (
                f"{sum(map(bool, self._partitions.values()))} of {self._settings.partitions} partitions"
            )
            self.advance(len(self._partitions))

    def _update_iterate(self, event: Mapping[str, Any]) -> None:
        gap, fraction = event["gap"], event["iterations"] / self._max_iterations
        if self._first_gap is None:
            self._first_gap = gap
        log_range = math.log(self._first_gap / self._tolerance) if self._first_gap > self._tolerance else 0.0
        if log_range and gap > 0:
            fraction = max(fraction, math.log(self._first_gap / gap) / log_range)
        self.detail = (
            f"iterate {event['iterations']:,}, objective {event['objective']:.6g}, gap {gap:.1e}, "
            f"{len(self._partitions)} devices"
        )
        self.advance(100 * min(1.0, fraction))


def _build_summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
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
        ("devices", f"{summary['devices_came']} joined, {summary['devices_gone']} left"),
        ("fallen silent", f"{summary['silences']} times"),
        ("encoding", format_encoding(summary)),
        ("coordinator sent", decimal(sum(summary["bytes_sent"].values()))),
        ("duration", format_duration(summary["duration_s"])),
    ]
    if summary["test_accuracy"] is not None:
        lines.insert(2, ("test accuracy", f"{100 * summary['test_accuracy']:.2f} %"))
    return lines


def format_encoding(summary: Mapping[str, Any]) -> str:
    """Formats the bytes that devices sent each other for blocks, compared with an MDS code."""
    rows, columns = (summary["encoding_nbytes"][kind] for kind in ("rows", "columns"))
    mds_nbytes = summary["mds_encoding_nbytes"] - columns
    note = f" ({100 * rows / mds_nbytes:.0f} % of an MDS code's {decimal(mds_nbytes)})" if mds_nbytes else ""
    return f"rows {decimal(rows)}{note}, columns {decimal(columns)}"
