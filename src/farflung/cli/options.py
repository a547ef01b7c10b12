"""What all commands that make a run have in common: its options, and what it says at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from farflung.cli.output import print_files, stderr_console, stdout_console
from farflung.cli.settings import option_types, read_settings
from farflung.comm import Endpoint
from farflung.runs import RunConfig, RunOptions, Setting, settings_of
from farflung.types import Json

if TYPE_CHECKING:  # these import torch, which help does without
    from farflung.runs import Prepared, Run

__all__ = [
    "ENDPOINT",
    "KEPT",
    "RunCommand",
    "endpoint_of",
    "finish",
    "given",
    "with_options",
    "with_settings",
]

ENDPOINT = settings_of(Endpoint)
"""The options of how a process connects to its peers."""
KEPT = {
    name: one
    for name, one in settings_of(RunOptions).items()
    if name in ("out", "resume", "replay", "trace", "log_to")
}
"""The options of what a run keeps and where, in either world."""

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


def with_settings(kind: type[RunConfig], without: Collection[str] = ()) -> Callable[[type[T]], type[T]]:
    """A decorator that gives a command an option for each setting of a run, where it has none of that name.

    Args:
      kind: of the run.
      without: settings that are no options.
    """
    return with_options({name: one for name, one in kind.settings().items() if name not in without})


def with_options(settings: Mapping[str, Setting]) -> Callable[[type[T]], type[T]]:
    """A decorator that gives a command an option for each of some settings, where it has none of that name."""

    def give(command: type[T]) -> type[T]:
        for name, setting in settings.items():
            if not hasattr(command, name):
                words = re.sub(r":\w+:`~?([^`]+)`", r"\1", setting.about)
                about = tyro.conf.arg(help=f"{words.rstrip('.')}.")
                kind: Any = setting.kind
                if setting.words:
                    kind |= Literal[setting.words]
                command.__annotations__[name] = Annotated[kind | None, about]
                setattr(command, name, None)
        return command

    return give


@dataclass(frozen=True)
@with_options(KEPT)
class RunCommand:
    """A command that makes a run, in either world."""

    kind: ClassVar[type[RunConfig]] = RunConfig
    elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Keys of files that the command for the other world has, and this one leaves alone."""

    config: Path | None = None
    """Take settings from this file: TOML with the names of options as keys, or the config.json of a run. Options on
    the command line win over it."""
    json: bool | None = None
    """Print the summary as JSON on stdout and nothing else."""
    quiet: bool | None = None
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        from farflung.runs import Filed

        command, filed = self, dict[str, Json]()
        if self.config is not None:
            known = option_types(type(self), without=("config", "resume"))
            read = read_settings(self.config, known, ignored=self.elsewhere)
            settings = self.kind.settings()
            of_the_run = {name: value for name, value in read.items() if name in settings}
            filed = Filed(self.config, of_the_run)  # type: ignore[arg-type]
            missing = {name: read[name] for name in read.keys() - settings if getattr(self, name) is None}
            command = replace(self, **missing)  # type: ignore[arg-type]
        return command.start(filed)

    def start(self, filed: Mapping[str, Json]) -> int:
        """Makes the run; ``filed`` are its settings from a file."""
        raise NotImplementedError

    def given(self) -> dict[str, Json]:
        """The settings on the command line."""
        return given(self, self.kind.settings())

    def show(self, run: Prepared[C]) -> None:
        """How the training set is split, where it is."""
        from farflung.report import partition_table

        if run.shares and not (self.quiet or self.json):
            stderr_console().print(partition_table(run.shares, run.config.split_text))


def given(command: object, settings: Collection[str]) -> dict[str, Any]:
    """Those of some settings that are on a command line."""
    said = {name: getattr(command, name, None) for name in settings}
    return {name: value for name, value in said.items() if value is not None}


def endpoint_of(command: object) -> Endpoint:
    """How a process connects to its peers, by a command line."""
    return Endpoint(**given(command, ENDPOINT))


def finish(run: Run, *, as_json: bool) -> None:
    """Prints the summary of a run, and where its files are."""
    if as_json:
        print(json.dumps({**run.summary, "folder": str(run.folder)}))
        return
    stdout_console().print(run.table())
    files: dict[str, Path | str] = {"telemetry": run.files.telemetry(min(run.events, default=0))}
    if run.files.curves.is_dir():
        files["curves"] = f"tensorboard --logdir {run.files.curves}"
    print_files(**files, page=f"farflung report {run.folder}")
