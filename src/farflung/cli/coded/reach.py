"""How a process of coded training is reached: the options that coordinator and devices share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farflung.coded.meeting import Reach
from farflung.comm.keys import load_keys

__all__ = ["ReachOptions"]


@dataclass(frozen=True, kw_only=True)
class ReachOptions:
    """Options of a process that others reach."""

    interface: str | None = None
    """The address, or the name of the network interface, to listen on; when not given, the one on the way to the
    coordinator."""
    port: str | None = None
    """The port to listen at, or a range such as 7000-7100, for firewalls; when not given, any that is free."""
    advertise: str | None = None
    """HOST or HOST:PORT by which the others reach this process, where that is another address than the one it listens
    at. none where nobody can connect to it."""
    keys: Path | None = None
    """The folder made by farflung keys, with this machine's secret key and the public keys of all; when not given, keys
    are made for the run, and whoever reaches the coordinator can take part."""

    @property
    def reach(self) -> Reach:
        """These, read.

        Raises:
          ConfigError: the keys cannot be used.
        """
        keys = None if self.keys is None else load_keys(self.keys)
        return Reach(self.interface, self.port, self.advertise, keys)
