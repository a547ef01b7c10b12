"""``farflung join``: takes part in a run that goes on, as one more replica."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from farflung.cli.options import ENDPOINT, endpoint_of, finish, with_options
from farflung.cli.output import OutputOptions

__all__ = ["Join"]


@dataclass(frozen=True, kw_only=True)
@with_options(ENDPOINT)
class Join(OutputOptions):
    """Join a run that was started with --elastic MIN:MAX, as one more replica."""

    where: tyro.conf.Positional[str]
    """The run's folder, on a machine where it goes on; or HOST:PORT of any of its replicas, and --key."""
    key: Path | None = None
    """The file run.key of the run's folder, or a copy of it: the run's key, and the addresses of its replicas. Keep it
    as you would a password."""
    out: Path | None = None
    """Where to keep the run that is on other machines; a new folder under runs/ when not given."""
    device: str = "cpu"
    """Train on this device of torch's: cpu, cuda, or cuda:0."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        from farflung.cli.progress import Progress
        from farflung.runs import RunOptions, join_later

        options = RunOptions(out=self.out, device=self.device, endpoint=endpoint_of(self))

        def show(rank: int) -> Progress:
            return Progress(quiet=self.quiet or self.json, followed=rank)

        ended = join_later(self.where, show, options, self.key)
        finish(ended, as_json=self.json)
        return 0
