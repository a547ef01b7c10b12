"""Options that all commands of a run share, and the printing of its result."""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from farflung.cli.output import create_stderr_console, create_stdout_console, print_files, print_json
from farflung.comm import Endpoint
from farflung.config import Setting, list_settings
from farflung.errors import ConfigError, UnknownName
from farflung.files import load_toml, parse_json, prefix_errors, read_text, wrap_read_errors
from farflung.runs import RunConfig, RunOptions, SimulatedConfig

if TYPE_CHECKING:  # these import torch, which help does without
    from farflung.runs import PreparedRun, Run
    from farflung.telemetry import Sink

__all__ = [
    "ENDPOINT",
    "STORAGE_OPTIONS",
    "RunCommand",
    "build_endpoint",
    "collect_options",
    "print_result",
    "read_settings",
    "with_options",
    "with_settings",
]

ENDPOINT = list_settings(Endpoint)
"""Options of a process's connections to its peers."""
STORAGE_OPTIONS = {
    name: option
    for name, option in list_settings(RunOptions).items()
    if name in ("out", "resume", "replay", "trace", "log_to")
}
"""Options of the files that a run keeps, real or simulated."""

T = TypeVar("T")


def with_settings(
    config_class: type[RunConfig], exclude: Collection[str] = ()
) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that adds options for a run's settings to a command, unless it has one of that name.

    Args:
      config_class: Class of the run's settings.
      exclude: Settings without an option.
    """
    return with_options(
        {name: setting for name, setting in config_class.list_settings().items() if name not in exclude}
    )


def with_options(settings: Mapping[str, Setting]) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that adds an option for each setting to a command, unless it has one of that name."""

    def add_options(command: type[T]) -> type[T]:
        for name, setting in settings.items():
            if not hasattr(command, name):
                text = re.sub(r":\w+:`~?([^`]+)`", r"\1", setting.description)
                about = tyro.conf.arg(help=f"{text.rstrip('.')}.")
                kind: Any = setting.kind
                if setting.choices:
                    kind |= Literal[setting.choices]
                command.__annotations__[name] = Annotated[kind | None, about]
                setattr(command, name, None)
        return command

    return add_options


@dataclass(frozen=True)
@with_options(STORAGE_OPTIONS)
class RunCommand:
    """Command that starts a run, real or simulated."""

    config_class: ClassVar[type[RunConfig]] = RunConfig
    ignored_keys: ClassVar[frozenset[str]] = frozenset()
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
        with nullcontext() if self.config is None else prefix_errors(self.config):
            if self.config is not None:
                options, settings = list_settings(type(self)), self.config_class.list_settings()
                allowed = {name: o for name, o in options.items() if name not in ("config", "resume")}
                read = read_settings(self.config, allowed, ignored_keys=self.ignored_keys)
                file_settings = {name: value for name, value in read.items() if name in settings}
                missing = {name: read[name] for name in read.keys() - settings if getattr(self, name) is None}
                command = replace(self, **missing)
            run = command.prepare(file_settings, collect_options(self, self.config_class.list_settings()))
        return command.start(run)

    @abstractmethod
    def prepare(self, *layers: Mapping[str, object]) -> PreparedRun[Any]:
        """Prepares the run, with settings from a file and from the command line."""

    @abstractmethod
    def start(self, run: PreparedRun[Any]) -> int:
        """Executes the run and returns the exit code."""

    def execute(self, run: PreparedRun[Any], begin: Callable[[Sink], Run]) -> Run:
        """Executes the run, shows its progress, and prints its summary.

        Args:
          run: Prepared run.
          begin: Function that executes the run, with a sink for its events.
        """
        from farflung.cli.progress import Progress
        from farflung.report import render_partition_table

        quiet = bool(self.quiet or self.json)
        if run.shares and not quiet:
            create_stderr_console().print(render_partition_table(run.shares, run.config.partition_text))
        with Progress(quiet=quiet, is_simulated=self.config_class is SimulatedConfig) as progress:
            result = begin(progress)
        print_result(result, as_json=bool(self.json), log_to=run.options.log_to)
        return result


def read_settings(
    path: Path, options: Mapping[str, Setting], ignored_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Reads settings from a TOML or JSON file; its keys are names of options with ``-`` or ``_``.

    Args:
      path: TOML file, or JSON if the name ends in ``.json``.
      options: Allowed options.
      ignored_keys: Keys of another command, which are skipped.

    Raises:
      ConfigError: The file cannot be read, or has an unknown key or a bad value; names file, key and expected
        value.
    """
    settings: dict[str, Any] = {}
    with wrap_read_errors(path, "holds no settings"):
        if path.suffix == ".json":
            with wrap_read_errors(path, "not JSON"):
                content: Any = parse_json(read_text(path))
        else:
            content = load_toml(path)
        if not isinstance(content, dict):
            raise ConfigError(f"expected keys and values, found {type(content).__name__}")
        for key, value in content.items():
            name = key.replace("-", "_")
            if name in ignored_keys:
                continue
            if name not in options:
                raise UnknownName("key", key, options)
            if name in settings:
                raise ConfigError(f"{key!r} is there twice, with - and with _")
            settings[name] = options[name].convert(value, key)
    return settings


def collect_options(command: object, settings: Collection[str]) -> dict[str, Any]:
    """Returns the values of the options that are given on a command line."""
    values = {name: getattr(command, name, None) for name in settings}
    return {name: value for name, value in values.items() if value is not None}


def build_endpoint(command: object) -> Endpoint:
    """Builds the endpoint that a command line describes."""
    return Endpoint(**collect_options(command, ENDPOINT))


def print_result(run: Run, *, as_json: bool, log_to: str = "") -> None:
    """Prints the summary of a run, the paths of its files, and where its loggers have their figures."""
    from farflung.loggers import list_viewers

    if as_json:
        print_json({**run.summary, "folder": str(run.folder)})
        return
    create_stdout_console().print(run.build_table())
    telemetry = run.files.get_telemetry_path(min(run.events, default=0))
    viewers = list_viewers(log_to, run.folder)
    print_files(telemetry=telemetry, **viewers, page=f"farflung report {shlex.quote(str(run.folder))}")
