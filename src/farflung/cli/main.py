"""The command line: sub-commands are dataclasses, errors are one line, and bad input gives exit code 2."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from farflung._docstrings import read_docstring
from farflung.errors import ConfigError, FarflungError

__all__ = ["COMMANDS", "insert_dashes", "label_options", "main"]


T = TypeVar("T")


class Command(Protocol):
    """Sub-command whose fields are its options."""

    def run(self) -> int:
        """Runs the command and returns the exit code."""
        ...


COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("farflung.cli.train", "Train"),
    "join": ("farflung.cli.join", "Join"),
    "worker": ("farflung.cli.worker", "Worker"),
    "simulate": ("farflung.cli.simulate", "Simulate"),
    "compare": ("farflung.cli.compare", "Compare"),
    "retime": ("farflung.cli.stored", "Retime"),
    "traffic": ("farflung.cli.stored", "Traffic"),
    "trace": ("farflung.cli.stored", "Trace"),
    "report": ("farflung.cli.report", "Report"),
    "watch": ("farflung.cli.report", "Watch"),
    "list": ("farflung.cli.listing", "List"),
    "lab": ("farflung.lab.cli", "RunInLab"),
    "data": ("farflung.cli.fetch", "Data"),
    "calibrate": ("farflung.cli.calibrate", "Calibrate"),
    "probe": ("farflung.cli.probe", "Probe"),
    "doctor": ("farflung.cli.doctor", "Doctor"),
    "keys": ("farflung.cli.keys", "MakeKeys"),
    "coded": ("farflung.coded.cli", "Coded"),
}
"""Module and class of each sub-command; a module is imported only if its command runs."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs ``farflung`` with ``args`` and returns the exit code.

    Without ``args``, this process is the command and has computed nothing yet.
    """
    try:
        words = sys.argv[1:] if args is None else args
        command = _parse(words)
        with _start_fork_server() if args is None and words[0] == "train" else contextlib.nullcontext():
            return command.run()
    except FarflungError as error:
        sys.stdout.flush()
        print(f"farflung: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("farflung: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _start_fork_server() -> AbstractContextManager[None]:
    """Starts the process that forks the workers, if this machine starts them.

    Modules that all workers need are imported first, so that they are imported once.
    """
    from farflung.runs import fork_worker_parent, workers  # noqa: F401
    from farflung.wall import LaunchEnv

    return fork_worker_parent() if LaunchEnv.read() is None else contextlib.nullcontext()


@functools.cache
def _import_command(module: str, name: str) -> Callable[..., Command]:
    command: type[Command] = getattr(import_module(module), name)
    return label_options(command)


def _create_stub(module: str, name: str) -> Callable[..., Command]:
    def run_stub() -> Command:
        raise AssertionError("only what has been imported runs")

    run_stub.__doc__ = read_docstring(module, name)
    return run_stub


def label_options(command: type[T]) -> type[T]:
    """Labels each optional option with the kind of its value, in a command's help, and hides its default.

    A boolean option becomes a pair of flags, so that the command line can unset what a file has set.
    """
    for name, hint in get_type_hints(command, include_extras=True).items():
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if get_origin(plain) in (UnionType, Union) and get_args(plain)[-1] is type(None):
            kind, *words = get_args(plain)[:-1]
            text = "|".join(
                (kind.__name__.upper(), *(word for literal in words for word in get_args(literal)))
            )
            metavar = None if kind is bool else text
            metadata = tyro.conf.arg(metavar=metavar, help_behavior_hint="")
            command.__annotations__[name] = Annotated[hint, tyro.conf.DisallowNone, metadata]
    return command


def insert_dashes(args: Sequence[str]) -> list[str]:
    """Inserts dashes before the command of the nodes: ``lab ... train ...`` is short for
    ``lab ... -- farflung train ...``.
    """
    words = list(args)
    if words[:1] != ["lab"] or "train" not in words:
        return words
    index = words.index("train")
    if "--" in words[:index]:
        return words
    return [*words[:index], "--", sys.executable, "-m", "farflung", *words[index:]]


_TYPES = ConstructorRegistry()
"""Parsers of options of some types."""


@_TYPES.primitive_rule
def _parse_path(option: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """Refuses an empty path, which ``Path`` would read as the current folder."""
    if option.type is not Path:
        return None

    def parse(words: list[str]) -> Path:
        if not words[0]:
            raise ValueError("empty")
        return Path(words[0])

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def _parse(args: Sequence[str]) -> Command:
    words, stderr = insert_dashes(args), io.StringIO()
    # For commands that do not run, the parser gets their purpose and no options.
    chosen = [*COMMANDS] if words[:1] == ["--tyro-print-completion"] else words[:1]
    commands = {
        name: _import_command(*home) if name in chosen else _create_stub(*home)
        for name, home in COMMANDS.items()
    }
    try:
        with contextlib.redirect_stderr(stderr), _TYPES:
            command: Command = tyro.extras.subcommand_cli_from_dict(
                commands,
                prog="farflung",
                description="Train one PyTorch model on many devices that are far apart. --version prints the version.",
                args=words or ["--help"],
                config=(tyro.conf.OmitArgPrefixes,),
            )
            return command
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise ConfigError(f"{_extract_message(stderr.getvalue())}; see farflung --help") from None


def _extract_message(frame: str) -> str:
    """Returns the first paragraph inside the frame that tyro draws around an error, on one line."""
    words: list[str] = []
    for line in frame.splitlines():
        text = line.strip("│ ")
        if line.startswith("╭"):
            continue
        if not text or set(text) <= {"─"}:
            break
        words.append(text)
    return " ".join(words).rstrip(".") or "these options cannot be read"
