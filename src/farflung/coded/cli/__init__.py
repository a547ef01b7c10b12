"""``farflung coded``: linear models on devices that may vanish at any moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from farflung.coded.cli.coordinator import Coordinate
from farflung.coded.cli.demo import Demo
from farflung.coded.cli.device import Attend

__all__ = ["Attend", "Coded", "Coordinate", "Demo"]


@dataclass(frozen=True)
class Coded:
    """Train linear models on devices that may vanish at any moment."""

    command: (
        Annotated[Coordinate, tyro.conf.subcommand("coordinator", prefix_name=False)]
        | Annotated[Attend, tyro.conf.subcommand("device", prefix_name=False)]
        | Annotated[Demo, tyro.conf.subcommand("demo", prefix_name=False)]
    )

    def run(self) -> int:
        """Runs the command; returns the exit code."""
        return self.command.run()
