"""``farflung networks``: the profiles of networks and devices there are."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from farflung.cli.tables import print_rows, print_table
from farflung.devices import DEVICES, coding_source
from farflung.network import NETWORKS
from farflung.types import Json

__all__ = ["Networks"]


@dataclass(frozen=True)
class Networks:
    """List the networks and devices that farflung simulate and farflung compare know by name."""

    sources: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Say in full where the figures of each come from."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print them as JSON."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        if self.json:
            print_rows(_rows())
        else:
            columns = ["name", "what", "nodes", "where its figures come from" if self.sources else "in short"]
            print_table(columns, (self._cells(row) for row in _rows()))
        return 0

    def _cells(self, row: dict[str, Json]) -> list[str]:
        cells = ["" if cell is None else str(cell) for cell in row.values()]
        return cells if self.sources else [*cells[:-1], _in_short(cells[-1])]


def _in_short(source: str) -> str:
    """The figures that a source begins with, up to where they are from."""
    figures = re.split(r"(?<!al)\. |: ", source.removeprefix("Our choice: "), maxsplit=1)[0]
    return textwrap.shorten(figures.rstrip("."), 90, placeholder=" ...")


def _rows() -> Iterator[dict[str, Json]]:
    for name in NETWORKS:
        profile = NETWORKS[name]()
        yield {"name": name, "what": "network", "nodes": profile.nodes or "any", "source": profile.source}
    for name, device in DEVICES.items():
        yield {
            "name": name,
            "what": "device",
            "nodes": None,
            "source": f"{device.source} {coding_source(device)}",
        }
