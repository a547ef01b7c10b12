"""Options that all commands of a run share, and the printing of its result."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from farflung.cli.output import print_files, stderr_console, stdout_console
from farflung.comm import Endpoint
from farflung.config import Setting, settings_of, unknown_setting
from farflung.errors import ConfigError
from farflung.files import json_of, naming, read_text, reading, toml_of
from farflung.runs import RunConfig, RunOptions, SimulatedConfig

if TYPE_CHECKING:  # these import torch, which help does without
    from farflung.runs import Prepared, Run
    from farflung.telemetry import Sink

__all__ = [
    "ENDPOINT",
    "KEPT",
    "RunCommand",
    "endpoint_of",
    "finish",
    "given",
    "read_settings",
    "with_options",
    "with_settings",
]

ENDPOINT = settings_of(Endpoint)
"""Options of a process's connections to its peers."""
KEPT = {
    name: option
    for name, option in settings_of(RunOptions).items()
    if name in ("out", "resume", "replay", "trace", "log_to")
}
"""Options of the files that a run keeps, real or simulated."""

T = TypeVar("T")


def with_settings(kind: type[RunConfig], without: Collection[str] = ()) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that adds options for a run's settings to a command, unless it has one of that name.

    Args:
      config_class: Class of the run's settings.
      exclude: Settings without an option.
    """
    return with_options({name: setting for name, setting in kind.settings().items() if name not in without})


def with_options(settings: Mapping[str, Setting]) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that adds an option for each setting to a command, unless it has one of that name."""

    def add_options(command: type[T]) -> type[T]:
        for name, setting in settings.items():
            if not hasattr(command, name):
                text = re.sub(r":\w+:`~?([^`]+)`", r"\1", setting.about)
                about = tyro.conf.arg(help=f"{text.rstrip('.')}.")
                kind: Any = setting.kind
                if setting.words:
                    kind |= Literal[setting.words]
                command.__annotations__[name] = Annotated[kind | None, about]
                setattr(command, name, None)
        return command

    return add_options


@dataclass(frozen=True)
@with_options(KEPT)
class RunCommand:
    """Command that starts a run, real or simulated."""

    kind: ClassVar[type[RunConfig]] = RunConfig
    elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Keys of files that this command ignores, since only the other world's command has them."""

    config: Path | None = None
    """Take settings from this file: TOML with the names of options as keys, or the config.json of a run. Options on
    the command line win over it."""
    json: bool | None = None
    """Print the summary as JSON on stdout and nothing else."""
    quiet: bool | None = None
    """Show no progress."""

    def run(self) -> int:
        """Runs the command and returns the exit code."""
        command, file_settings = self, dict[str, Any]()
        with nullcontext() if self.config is None else naming(self.config):
            if self.config is not None:
                options, settings = settings_of(type(self)), self.kind.settings()
                allowed = {name: o for name, o in options.items() if name not in ("config", "resume")}
                read = read_settings(self.config, allowed, ignored=self.elsewhere)
                file_settings = {name: value for name, value in read.items() if name in settings}
                missing = {name: read[name] for name in read.keys() - settings if getattr(self, name) is None}
                command = replace(self, **missing)
            run = command.prepare(file_settings, given(self, self.kind.settings()))
        return command.start(run)

    @abstractmethod
    def prepare(self, *layers: Mapping[str, object]) -> Prepared[Any]:
        """Prepares the run, with settings from a file and from the command line."""

    @abstractmethod
    def start(self, run: Prepared[Any]) -> int:
        """Executes the run and returns the exit code."""

    def make(self, run: Prepared[Any], begin: Callable[[Sink], Run], *, leads: bool = True) -> Run:
        """Executes the run, shows its progress, and prints its summary.

        Args:
          run: Prepared run.
          begin: Function that executes the run, with a sink for its events.
          is_lead: Whether this process prints anything.
        """
        from farflung.cli.progress import Progress
        from farflung.report import partition_table

        quiet = bool(self.quiet or self.json)
        if run.shares and not quiet:
            stderr_console().print(partition_table(run.shares, run.config.split_text))
        with Progress(quiet=quiet or not leads, simulated=self.kind is SimulatedConfig) as progress:
            result = begin(progress)
        if leads:
            finish(result, as_json=bool(self.json))
        return result


def read_settings(path: Path, known: Mapping[str, Setting], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Reads the settings in a file, whose keys are names of options with ``-`` or ``_``.

    Args:
      path: TOML file, or JSON if the name ends in ``.json``.
      options: Allowed options.
      ignored_keys: Keys of another command, which are skipped.

    Raises:
      ConfigError: The file cannot be read, or has an unknown key or a bad value; names file, key and expected
        value.
    """
    settings: dict[str, Any] = {}
    with reading(path, "holds no settings"):
        if path.suffix == ".json":
            with reading(path, "not JSON"):
                content: Any = json_of(read_text(path))
        else:
            content = toml_of(path)
        if not isinstance(content, dict):
            raise ConfigError(f"expected keys and values, found {type(content).__name__}")
        for key, value in content.items():
            name = key.replace("-", "_")
            if name in ignored:
                continue
            if name not in known:
                raise unknown_setting("key", key, known)
            if name in settings:
                raise ConfigError(f"{key!r} is there twice, with - and with _")
            settings[name] = known[name].read(value, key)
    return settings


def given(command: object, settings: Collection[str]) -> dict[str, Any]:
    """Returns the values of the options that are given on a command line."""
    values = {name: getattr(command, name, None) for name in settings}
    return {name: value for name, value in values.items() if value is not None}


def endpoint_of(command: object) -> Endpoint:
    """Builds the endpoint that a command line describes."""
    return Endpoint(**given(command, ENDPOINT))


def finish(run: Run, *, as_json: bool) -> None:
    """Prints the summary of a run and the paths of its files."""
    if as_json:
        print(json.dumps({**run.summary, "folder": str(run.folder)}))
        return
    stdout_console().print(run.table())
    files: dict[str, Path | str] = {"telemetry": run.files.telemetry(min(run.events, default=0))}
    if run.files.curves.is_dir():
        files["curves"] = f"tensorboard --logdir {run.files.curves}"
    print_files(**files, page=f"farflung report {run.folder}")
