"""``farflung networks``: the profiles of networks and devices there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from farflung.cli.tables import print_rows, print_table
from farflung.devices import DEVICES
from farflung.network import NETWORKS
from farflung.types import Json

__all__ = ["Networks"]


@dataclass(frozen=True)
class Networks:
    """List the networks and devices that farflung simulate and farflung compare know by name."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print them as JSON."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        if self.json:
            print_rows(_rows())
        else:
            columns = ["name", "what", "nodes", "where its figures come from"]
            print_table(
                columns, (["" if cell is None else str(cell) for cell in row.values()] for row in _rows())
            )
        return 0


def _rows() -> Iterator[dict[str, Json]]:
    for name in NETWORKS:
        profile = NETWORKS[name]()
        yield {"name": name, "what": "network", "nodes": profile.nodes or "any", "source": profile.source}
    for name, device in DEVICES.items():
        yield {"name": name, "what": "device", "nodes": None, "source": device.source}
