"""``farflung produce``: publishes a workload's samples at given rates, for streams to read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from farflung.cli.output import print_table, stderr_console
from farflung.data import (
    FileOutlet,
    KafkaOutlet,
    Outlet,
    Published,
    RateCourse,
    Subset,
    courses,
    in_turn,
    publish,
    rates_in,
)
from farflung.errors import ConfigError
from farflung.runs import RunConfig, asked_to_stop
from farflung.seeding import derive
from farflung.types import Json, Samples

__all__ = ["Produce"]


@dataclass(frozen=True)
class Produce:
    """Publish a workload's training samples at given rates, for the streams kafka and files.

    Each device sends its share over and over, each pass in a new order, as the stream rate(...) would with the same
    seed: sample k of a device that sends S per second is sent k/S seconds after the beginning. Without --seconds and
    --samples it goes on until Ctrl-C.
    """

    workload: str = "fashion-mnist/cnn"
    """Whose training samples; see farflung list workloads."""
    data: str = "auto"
    """Where data comes from: auto, packaged or full, for workloads that offer the choice."""
    workers: int = 2
    """How many devices send, one for each replica."""
    partition: str = "shared"
    """How they share the training set, as for farflung train."""
    rate: str = "10"
    """Samples per second: one number, a list with one for each device, S1, S2, S1' or S2', "printed S1", "trace FILE",
    or pairs of a begin in seconds and a number."""
    servers: str | None = None
    """Publish to Kafka: bootstrap servers, host:port, several with commas."""
    topic: str | None = None
    """The topic there, with {rank} in it one for each device; otherwise device p sends to its partition p."""
    make_topics: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Make topics that are not there, with as many partitions as are needed."""
    properties: Path | None = None
    """A file of further client properties, lines of name=value, such as those for TLS and SASL."""
    folder: Path | None = None
    """Append to files in this folder instead, one for each device."""
    seconds: float | None = None
    """Publish for so long."""
    samples: int | None = None
    """Publish so many samples of each device."""
    deadline: float = 60.0
    """Seconds that Kafka may take to acknowledge a message."""
    seed: int = 0
    """Of the orders, of the partition and of rates that are drawn."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the summary as JSON and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        self._check()
        said = {"workload": self.workload, "data": self.data, "workers": self.workers}
        config = RunConfig.resolve({**said, "partition": self.partition, "seed": self.seed})
        shares = config.make_shares()
        found = courses(rates_in(self.rate), self.workers, derive(self.seed, "rates"))
        train, _ = config.task.datasets()
        sources: list[Samples] = [
            in_turn(
                train if shares is None else Subset(train, shares[rank]),
                rank,
                self.workers,
                shared=shares is None,
                seed=self.seed,
            )
            for rank in range(self.workers)
        ]
        outlet = self._outlet()
        with asked_to_stop() as asked, _Bar(outlet, found, self, quiet=self.quiet or self.json) as bar:
            published = publish(
                outlet,
                found,
                sources,
                seconds=self.seconds,
                samples=self.samples,
                stop_asked=asked.is_set,
                tell=bar,
            )
            stopped = asked.is_set()
        self._say(outlet, found, published, stopped=stopped)
        return 130 if stopped and self._ends else 0

    @property
    def _ends(self) -> bool:
        return self.seconds is not None or self.samples is not None

    def _check(self) -> None:
        if (self.servers is None) == (self.folder is None):
            raise ConfigError("give --servers and --topic for Kafka, or --folder for files")
        if (self.servers is None) != (self.topic is None):
            raise ConfigError("--servers and --topic belong together")
        for name, value in (("seconds", self.seconds), ("deadline", self.deadline)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name} {value}: must be a number of seconds above 0")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"--samples {self.samples}: must be 1 or more")

    def _outlet(self) -> Outlet:
        if self.folder is not None:
            return FileOutlet(self.folder, self.workers)
        assert self.servers is not None
        assert self.topic is not None
        return KafkaOutlet(
            self.servers,
            self.topic,
            self.workers,
            self.properties,
            make=self.make_topics,
            deadline_s=self.deadline,
        )

    def _say(
        self, outlet: Outlet, found: Sequence[RateCourse], published: Published, *, stopped: bool
    ) -> None:
        asked = [
            course.sent(0.0, seconds) / seconds if seconds > 0 else course.at(0.0)
            for course, seconds in zip(found, published.seconds, strict=True)
        ]
        if self.json:
            summary: dict[str, Json] = {
                "to": outlet.name,
                "workload": self.workload,
                "seconds": list(published.seconds),
                "samples": list(published.samples),
                "rates": published.rates,  # type: ignore[dict-item]
                "asked": asked,  # type: ignore[dict-item]
                "stopped": stopped,
            }
            print(json.dumps(summary))
            return
        lines = zip(published.samples, asked, published.rates, strict=True)
        print_table(
            ("device", "samples", "samples/s asked for", "samples/s"),
            [
                (str(rank), f"{count:,}", f"{rate:,.1f}", f"{effective:,.1f}")
                for rank, (count, rate, effective) in enumerate(lines)
            ],
        )


class _Bar:
    """A bar in a terminal, a line at the begin elsewhere."""

    def __init__(self, outlet: Outlet, found: Sequence[RateCourse], asked: Produce, *, quiet: bool) -> None:
        console: Console = stderr_console()
        self._total = _samples(found, asked)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task(outlet.name, total=self._total, rate="")
        if not quiet and not console.is_terminal:
            devices = "device" if len(found) == 1 else "devices"
            console.print(f"publishing from {len(found)} {devices} to {outlet.name}", soft_wrap=True)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, sent: Sequence[int], elapsed_s: float) -> None:
        """Takes in how many samples each device has sent."""
        rate = f"{sum(sent) / elapsed_s:,.0f} samples/s" if elapsed_s > 0 else ""
        self._bar.update(self._task, completed=sum(sent), rate=rate)


def _samples(found: Sequence[RateCourse], asked: Produce) -> float | None:
    """How many there will be in all; ``None`` where there is no end."""
    if not asked._ends:
        return None
    in_time = [math.inf if asked.seconds is None else course.sent(0.0, asked.seconds) for course in found]
    most = math.inf if asked.samples is None else asked.samples
    return sum(min(most, count) for count in in_time)
