"""``farflung coded device``: takes part in a run with data, or with room only."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.filesize import decimal

from farflung.cli.main import spoken
from farflung.cli.options import ENDPOINT, endpoint_of, with_options
from farflung.cli.output import OutputOptions, print_table, stderr_console
from farflung.coded.blocks import Holding
from farflung.coded.device import Device
from farflung.coded.meeting import Address, take_part
from farflung.coded.parts import Part, read_samples
from farflung.devices import DeviceProfile, device_profile
from farflung.errors import ConfigError
from farflung.runs.stopping import on_stop
from farflung.wall import WallRuntime

__all__ = ["Attend"]


@spoken
@dataclass(frozen=True, kw_only=True)
@with_options(ENDPOINT)
class Attend(OutputOptions):
    """Take part in a run, with data or with room for coded blocks only.

    Ctrl-C asks to leave: the device stays until others hold its unique data. A second Ctrl-C ends it at once.
    If the coordinator is lost, the device keeps its blocks and waits for the coordinator to return.
    """

    address: tyro.conf.Positional[str]
    """HOST:PORT of the coordinator, which prints it."""
    data: str | None = None
    """Data to bring: a9a, covtype, or FILE.npz with arrays x and y; only room when not given."""
    part: str | None = None
    """Part I of K of the rows, as I/K; all rows when not given."""
    seed: int | None = None
    """Seed to shuffle the rows before they are divided, the same on all devices; in order when not given."""
    name: str | None = None
    """Unique name of the data; when not given, the data set and part, or this machine and the file."""
    patience: float = 600.0
    """Time for which a silent or absent coordinator is tried, in seconds."""
    pace: str | None = None
    """Device whose speed is not exceeded: a name (see farflung list devices) or a TOML file."""

    def run(self) -> int:
        """Runs the command; returns the exit code."""
        if not 0 < self.patience < math.inf:
            raise ConfigError(f"--patience {self.patience}: must be a number of seconds above 0")
        address, endpoint, store = Address.of(self.address), endpoint_of(self), self._holding()
        sessions = _Seat(self._tell)
        self._tell(f"looks for a coordinator at {address}, for {self.patience:g} s at most")
        with on_stop(sessions.ask):
            reason = take_part(
                address, store, endpoint, patience_s=self.patience, pace=self._pace(store), met=sessions.take
            )
        if reason:
            raise ConfigError(f"the coordinator at {address} has refused this device: {reason}")
        self._say(store, sessions)
        return 0

    def _holding(self) -> Holding:
        if self.data is None:
            for option in ("part", "seed", "name"):
                if getattr(self, option) is not None:
                    raise ConfigError(f"--{option} requires --data")
            return Holding()
        if self.seed is not None and self.part is None:
            raise ConfigError("--seed requires --part: it shuffles the rows before they are divided")
        part = None if self.part is None else Part.parse(self.part, self.seed)
        return Holding(self.name or self._name(part), *read_samples(self.data, part))

    def _name(self, part: Part | None) -> str:
        assert self.data is not None
        is_file = self.data.endswith(".npz")
        base = (
            f"{platform.node()}:{Path(self.data).name}" if is_file and part is None else Path(self.data).stem
        )
        return base if part is None else f"{base} {part}"

    def _pace(self, holding: Holding) -> DeviceProfile | None:
        """Loads the profile of a product with one vector: per row, two operations for each feature."""
        if self.pace is None:
            return None
        if holding.data is None:
            raise ConfigError(f"--pace {self.pace}: give --data too, which says how long a row is")
        return device_profile(self.pace, forward_flops=2.0 * holding.data.shape[1])

    def _tell(self, words: str) -> None:
        if not (self.quiet or self.json):
            stderr_console().print(words, soft_wrap=True, markup=False)

    def _say(self, holding: Holding, seat: _Seat) -> None:
        summary = seat.summary()
        if self.json:
            print(json.dumps({**summary, "held_nbytes": holding.nbytes}))
            return
        lines = [
            ("rank", ", ".join(map(str, summary["ranks"]))),
            ("rounds answered", f"{summary['rounds']:,}"),
        ]
        lines += [
            (f"sent as {kind}", decimal(nbytes)) for kind, nbytes in sorted(summary["bytes_sent"].items())
        ]
        print_table(("what", "how much"), [*lines, ("held", decimal(holding.nbytes))])


class _Seat:
    """The device's sessions with coordinators, one after the other.

    Args:
      print_line: Function that prints a line.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._met: list[Device] = []
        self._asked = False

    def take(self, device: Device, runtime: WallRuntime) -> None:
        """Adds the device of a new session."""
        del runtime
        self._met.append(device)
        self._tell(f"in, as rank {device.rank}")
        if self._asked:
            device.leave()

    def ask(self) -> None:
        """Asks to leave; without a coordinator, or the second time, raises KeyboardInterrupt."""
        if self._asked or not self._met:
            raise KeyboardInterrupt
        self._asked = True
        self._met[-1].leave()
        self._tell("leaves when others hold what it alone has; again: at once")

    def summary(self) -> dict[str, Any]:
        """Returns the ranks, counts, and bytes by kind of message."""
        return {
            "ranks": [device.rank for device in self._met],
            "rounds": sum(device.rounds for device in self._met),
            "refused": sum(device.refused for device in self._met),
            "bytes_sent": sum((Counter(device.sent) for device in self._met), Counter()),
            "left": self._asked,
        }
