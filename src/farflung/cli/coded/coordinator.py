"""``farflung coded coordinator``: brings devices together and trains on what they hold."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from farflung.cli.coded.common import CodedProgress, stopping, summary_lines
from farflung.cli.main import spoken
from farflung.cli.options import ENDPOINT, endpoint_of, given, with_options
from farflung.cli.output import OutputOptions, print_files, print_table, stderr_console
from farflung.coded.coordinator import Settings
from farflung.coded.meeting import Address
from farflung.coded.parts import read_samples
from farflung.coded.record import Folder
from farflung.coded.run import CodedRun, Learner
from farflung.errors import ConfigError
from farflung.report import coded_picture
from farflung.runs import run_folder, settings_of

__all__ = ["Coordinate"]

_SETTINGS = {
    name.removesuffix("_s"): one
    if one.default is None
    else replace(one, about=f"{one.about.rstrip('.')}; {one.default} when not given")
    for name, one in {**settings_of(Settings), **settings_of(Learner)}.items()
    if name not in ("max_condition", "least_s")
}
"""The settings of a run that are options, by name."""


@spoken
@dataclass(frozen=True)
@with_options({**_SETTINGS, **ENDPOINT})
class Coordinate(OutputOptions):
    """Coordinate a run: wait for devices, have their data encoded, and train.

    Prints what to run elsewhere. Ctrl-C stops it after the iterate under way; the same command goes on from there.
    """

    at: str = "127.0.0.1:0"
    """HOST:PORT to be met at: an address of this machine that devices reach; port 0 is any that is free."""
    max_iterations: int = 1000
    """The most iterates; each is a product with the samples and one with their transpose."""
    folder: Path | None = None
    """Keeps the run; one that was stopped there goes on. A new one under runs/ when not given."""
    test: str | None = None
    """Tries the model on these samples at the end, which this process reads: a9a or covtype, for their test sets, or
    FILE.npz."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        if self.max_iterations < 1:
            raise ConfigError(f"--max-iterations {self.max_iterations}: must be 1 or more")
        run = CodedRun(
            settings=self._settings(),
            learner=Learner(**given(self, settings_of(Learner))),
            folder=Folder(self.folder or run_folder("coded")),
            max_iterations=self.max_iterations,
            test=None if self.test is None else read_samples(self.test, test=True),
        )
        address, endpoint = Address.of(self.at), endpoint_of(self)
        with CodedProgress(run, quiet=self.quiet or self.json) as progress, stopping(progress) as stop_asked:
            summary = run.coordinate(
                address,
                endpoint,
                met=lambda at: None if self.quiet else self._say_where(at),
                told=progress,
                stop_asked=stop_asked,
            )
        picture = run.folder.picture
        title = f"Coded training of {len(summary['partitions'])} partitions"  # type: ignore[arg-type]
        coded_picture(run.folder.told(), picture, title=title)
        if self.json:
            print(json.dumps({**summary, "folder": str(run.folder.path)}))
        else:
            print_table(("what", "how much"), summary_lines(summary))
            print_files(picture=picture, model=run.folder.model)
        return 130 if summary["interrupted"] else 0

    def _settings(self) -> Settings:
        said = {
            name: value
            for name in settings_of(Settings)
            if (value := getattr(self, name.removesuffix("_s"), None)) is not None
        }
        for name in ("partitions", "devices"):
            if name not in said:
                raise ConfigError(f"--{name}: give how many {name} training begins with")
        return Settings(**said)

    def _say_where(self, at: Address) -> None:
        """What to run elsewhere."""
        keys = " --keys FOLDER" if endpoint_of(self).keys else ""
        stderr_console().print(
            f"on each device: farflung coded device {at} --data FILE.npz{keys}", soft_wrap=True, markup=False
        )
