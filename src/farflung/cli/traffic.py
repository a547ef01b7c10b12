"""``farflung traffic``: what the replicas of a run have sent to each other, and what for."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from farflung.report import PLAIN_WIDTH, sent_by_kind, traffic_picture, traffic_table
from farflung.runs import RunFolder

__all__ = ["Traffic"]


@dataclass(frozen=True)
class Traffic:
    """Show who has sent how many bytes to whom in a run that has ended, by what they were for, and draw it.

    Payloads are counted from tensors, in real and in simulated runs alike. Gradients are whatever steps exchange.
    """

    run_folder: tyro.conf.Positional[Path]
    """The folder of a run of farflung train or farflung simulate."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON on stdout and nothing else: for each kind and sender the bytes to each rank. Nothing is drawn."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        files = RunFolder(self.run_folder)
        files.stored_config()
        sent = sent_by_kind(files.events())
        if self.json:
            print(json.dumps(sent))
            return 0
        title = f"payload bytes, {self.run_folder}"
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        console.print(traffic_table(sent, title=title))
        if sent:
            traffic_picture(sent, files.traffic_picture, title=title)
            console.print(f"picture    {files.traffic_picture}", soft_wrap=True, highlight=False)
        return 0
