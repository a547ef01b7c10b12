"""``farflung retime``: what a simulated run would have taken elsewhere, without simulating it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farflung.cli.options import finish
from farflung.cli.progress import Progress
from farflung.runs import SimulatedConfig

__all__ = ["Retime"]


@dataclass(frozen=True)
class Retime:
    """Time a simulated run anew on another network or other devices, without its arithmetic.

    What the replicas learned stays as it was, and every time is that of a fresh simulation. A run whose decision log
    holds decisions by time or arrival is refused: it might have learned something else there.
    """

    run_folder: tyro.conf.Positional[Path]
    """The folder of a run of farflung simulate."""
    network: str | None = None
    """Instead of the run's: a name or a TOML file."""
    device: str | None = None
    """Instead of the run's: a name or a TOML file."""
    out: Path | None = None
    """The new run's folder; beside the old one when not given."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the summary as JSON on stdout and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        from farflung.runs import RunFolder, retime

        before = SimulatedConfig.stored_in(RunFolder(self.run_folder))
        network, device = self.network or str(before["network"]), self.device or str(before["device"])
        stored = self.run_folder.resolve()  # which has a name where this one is a dot
        out = self.out or stored.with_name(f"{stored.name}-on-{Path(network).stem}-{Path(device).stem}")
        with Progress(quiet=self.quiet or self.json, simulated=True) as progress:
            run = retime(self.run_folder, network=network, device=device, out=out, show=progress)
        finish(run, as_json=self.json)
        return 0
