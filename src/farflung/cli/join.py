"""``farflung join``: adds one more replica to a run that goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from farflung.cli.options import ENDPOINT, build_endpoint, print_result, with_options
from farflung.cli.output import OutputOptions

__all__ = ["Join"]


@dataclass(frozen=True, kw_only=True)
@with_options(ENDPOINT)
class Join(OutputOptions):
    """Join an elastic run as one more replica.

    The run was started with --elastic MIN:MAX.
    """

    run_address: tyro.conf.Positional[str]
    """Folder of the run, on a machine where it goes on; or HOST:PORT of any of its replicas, and --key."""
    key: Path | None = None
    """The file run.key of the run's folder, or a copy of it: the run's key, and the addresses of its replicas. Keep it
    as you would a password."""
    out: Path | None = None
    """Folder to keep the run in if it is on other machines; a new folder under runs/ when not given."""
    device: str = "cpu"
    """Train on this device of torch's: cpu, cuda, or cuda:0."""

    def run(self) -> int:
        from farflung.cli.progress import Progress
        from farflung.runs import RunOptions, join_run

        options = RunOptions(out=self.out, device=self.device, endpoint=build_endpoint(self))

        def create_progress(rank: int) -> Progress:
            return Progress(quiet=self.quiet or self.json, followed_rank=rank)

        run = join_run(self.run_address, create_progress, options, self.key)
        print_result(run, as_json=self.json)
        return 0
