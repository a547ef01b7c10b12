"""``farflung workloads``: the tasks there are, and whether their data is at hand."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from farflung.cli.tables import print_rows, print_table
from farflung.data import Location, Source
from farflung.data.source import find
from farflung.errors import DataError
from farflung.seeding import generator
from farflung.types import Json, Workload
from farflung.workloads import WORKLOADS, data_of, workload

__all__ = ["Workloads"]


@dataclass(frozen=True)
class Workloads:
    """List the workloads: tasks to train, the settings that suit them, and whether their data is at hand."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print them as JSON."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        found = [_Row(name) for name in sorted(WORKLOADS)]
        if self.json:
            print_rows(row.to_json() for row in found)
        else:
            columns = ["workload", "what", "samples", "parameters", "settings", "data"]
            print_table(columns, (row.cells() for row in found))
        return 0


@dataclass
class _Row:
    """One workload."""

    name: str
    task: Workload = field(init=False)
    source: Source | None = field(init=False)
    location: Location | None = field(init=False, default=None)
    trouble: str = field(init=False, default="")
    samples: tuple[int, int] | None = field(init=False)
    """For training and for testing, in what a run would use; ``None`` where they cannot be counted yet."""

    def __post_init__(self) -> None:
        self.task = workload(self.name)
        self.source = data_of(self.name)
        if self.source is not None:
            try:
                self.location = find(self.source)
            except DataError as error:
                self.trouble = str(error)
        self.samples = self._count()

    @property
    def what(self) -> str:
        return (inspect.getdoc(WORKLOADS[self.name]) or "").split("\n")[0].rstrip(".")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.task.model(generator(0, "model")).parameters())

    @property
    def at_hand(self) -> bool:
        return not self.trouble and (self.source is None or self.location is not None)

    def _count(self) -> tuple[int, int] | None:
        # Only small sets are read for it: official files hold a number that is known.
        if self.source is not None:
            known, found = self.source.samples, self.location
            if found is None:
                return known
            whole = found.kind != "packaged"
            if whole and known is not None:
                return known
        try:
            train, test = self.task.datasets()
        except DataError as error:
            self.trouble = str(error)
            return None
        return len(train), len(test)

    def data(self) -> str:
        """Where the samples come from."""
        if self.source is None:
            return "made up"
        if self.trouble:
            return self.trouble
        if self.location is None:
            return f"absent; {self.source.remedy}"
        return "packaged subset" if self.location.kind == "packaged" else f"in {self.location.folder}"

    def to_json(self) -> dict[str, Json]:
        counts = self.samples
        return {
            "name": self.name,
            "what": self.what,
            "samples": None if counts is None else {"train": counts[0], "test": counts[1]},
            "parameters": self.parameters,
            "defaults": dict(self.task.defaults),
            "data": None if self.source is None else self.source.name,
            "at_hand": self.at_hand,
            "where": self.data(),
        }

    def cells(self) -> list[str]:
        counts = self.samples
        settings = self.task.defaults
        return [
            self.name,
            self.what,
            "?" if counts is None else f"{counts[0]:,} + {counts[1]:,}",
            f"{self.parameters:,}",
            f"batch {settings['batch_size']}, rate {settings['learning_rate']:g}, {settings['steps']:,} steps",
            self.data(),
        ]
