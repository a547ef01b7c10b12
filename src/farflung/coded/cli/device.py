"""``farflung coded device``: takes part in a run with data, or with room only."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.filesize import decimal

from farflung.cli.main import label_options
from farflung.cli.options import ENDPOINT, build_endpoint, with_options
from farflung.cli.output import OutputOptions, create_stderr_console, print_json, print_table
from farflung.coded.blocks import BlockStore
from farflung.coded.device import Device
from farflung.coded.meeting import Address, run_device
from farflung.coded.parts import DataShard, read_samples
from farflung.devices import DeviceProfile, find_device
from farflung.errors import ConfigError
from farflung.runs.stopping import handle_stop_signals
from farflung.wall import WallRuntime

__all__ = ["Attend"]


@label_options
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
        address, endpoint, store = Address.parse(self.address), build_endpoint(self), self._build_store()
        sessions = _DeviceSessions(self._print_line)
        self._print_line(f"looks for a coordinator at {address}, for {self.patience:g} s at most")
        with handle_stop_signals(sessions.request_leave):
            reason = run_device(
                address,
                store,
                endpoint,
                patience_s=self.patience,
                pace=self._load_profile(store),
                on_connect=sessions.add_device,
            )
        if reason:
            raise ConfigError(f"the coordinator at {address} has refused this device: {reason}")
        self._print_summary(store, sessions)
        return 0

    def _build_store(self) -> BlockStore:
        if self.data is None:
            for option in ("part", "seed", "name"):
                if getattr(self, option) is not None:
                    raise ConfigError(f"--{option} requires --data")
            return BlockStore()
        if self.seed is not None and self.part is None:
            raise ConfigError("--seed requires --part: it shuffles the rows before they are divided")
        part = None if self.part is None else DataShard.parse(self.part, self.seed)
        return BlockStore(self.name or self._build_name(part), *read_samples(self.data, part))

    def _build_name(self, part: DataShard | None) -> str:
        assert self.data is not None
        is_file = self.data.endswith(".npz")
        base = (
            f"{platform.node()}:{Path(self.data).name}" if is_file and part is None else Path(self.data).stem
        )
        return base if part is None else f"{base} {part}"

    def _load_profile(self, store: BlockStore) -> DeviceProfile | None:
        """Loads the profile of a product with one vector: per row, two operations for each feature."""
        if self.pace is None:
            return None
        if store.data is None:
            raise ConfigError(f"--pace {self.pace}: give --data too, which says how long a row is")
        return find_device(self.pace, forward_flops=2.0 * store.data.shape[1])

    def _print_line(self, text: str) -> None:
        if not (self.quiet or self.json):
            create_stderr_console().print(text, soft_wrap=True, markup=False)

    def _print_summary(self, store: BlockStore, sessions: _DeviceSessions) -> None:
        summary = sessions.build_summary()
        if self.json:
            print_json({**summary, "held_nbytes": store.nbytes})
            return
        lines = [
            ("rank", ", ".join(map(str, summary["ranks"]))),
            ("rounds answered", f"{summary['rounds']:,}"),
        ]
        lines += [
            (f"sent as {kind}", decimal(nbytes)) for kind, nbytes in sorted(summary["bytes_sent"].items())
        ]
        print_table((), [*lines, ("held", decimal(store.nbytes))])


class _DeviceSessions:
    """The device's sessions with coordinators, one after the other.

    Args:
      print_line: Function that prints a line.
    """

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print_line = print_line
        self._devices: list[Device] = []
        self._has_asked = False

    def add_device(self, device: Device, runtime: WallRuntime) -> None:
        """Adds the device of a new session."""
        del runtime
        self._devices.append(device)
        self._print_line(f"in, as rank {device.rank}")
        if self._has_asked:
            device.leave()

    def request_leave(self) -> None:
        """Asks to leave; without a coordinator, or the second time, raises KeyboardInterrupt."""
        if self._has_asked or not self._devices:
            raise KeyboardInterrupt
        self._has_asked = True
        self._devices[-1].leave()
        self._print_line("leaves once others hold what only it has; again: at once")

    def build_summary(self) -> dict[str, Any]:
        """Returns the ranks, counts, and bytes by kind of message."""
        return {
            "ranks": [device.rank for device in self._devices],
            "rounds": sum(device.num_rounds for device in self._devices),
            "refused": sum(device.num_refused for device in self._devices),
            "bytes_sent": sum((Counter(device.sent_nbytes) for device in self._devices), Counter()),
            "left": self._has_asked,
        }
