"""``farflung simulate``: trains in virtual time, with the real arithmetic on a modelled clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from farflung.cli.options import RunOptions, finish
from farflung.cli.progress import Progress
from farflung.cli.run import RunConfig
from farflung.cli.simulation import SimulatedConfig, asked_to_stop, simulate
from farflung.types import Json

__all__ = ["Simulate"]


@dataclass(frozen=True)
class Simulate(RunOptions):
    """Train in virtual time: as farflung train would, on a network and devices that need not be there.

    The arithmetic is real, and parameters and bytes sent are those of real workers; only the clock is modelled.
    """

    kind: ClassVar[type[RunConfig]] = SimulatedConfig
    elsewhere: ClassVar[frozenset[str]] = frozenset({"encrypt", "interface", "keys", "pace"})

    network: str | None = None
    """What lies between the replicas: a name (farflung networks lists them) or a TOML file; lan-1g when not given."""
    device: str | None = None
    """What each replica computes on: a name (farflung networks lists them) or a TOML file; cpu-core when not given."""
    faults: str | None = None
    """A TOML file that says what goes wrong."""

    def start(self, filed: Mapping[str, Json]) -> int:
        """Makes the run; ``filed`` are its settings from a file."""
        config = SimulatedConfig.resolve(self.stored(), filed, self.given())
        folder = self.folder(config)
        task = config.make_workload()
        shares = config.check(task)
        if folder.resumed:
            config.check_resumable(folder, task)
        folder.create(config, self.replay)
        self.show(config, shares)
        with Progress(quiet=self.quiet or self.json, simulated=True) as progress, asked_to_stop() as asked:
            summary = simulate(config, folder, progress, task, stop_asked=asked.is_set)
        finish(config, folder, summary, shares, as_json=self.json, simulated=True)
        return 130 if asked.is_set() else 0
