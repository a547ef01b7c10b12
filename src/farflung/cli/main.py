"""The command line: sub-commands are dataclasses, errors are one line, and bad input gives exit code 2."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Annotated, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from farflung._docstrings import read_docstring
from farflung.errors import ConfigError, FarflungError, UnknownName

__all__ = ["COMMANDS", "COMMAND_GROUPS", "insert_dashes", "label_options", "main"]


T = TypeVar("T")

FIRST_OPTIONS = (
    "workload", "recipe", "recipes", "networks", "workers", "steps", "seeds", "target", "out", "network",
)  # fmt: skip
"""Options of most use, which come first in the help of a command."""


class Command(Protocol):
    """Sub-command whose fields are its options."""

    def run(self) -> int:
        """Runs the command and returns the exit code."""
        ...


COMMAND_GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Find out": {
        "list": ("farflung.cli.listing", "List"),
        "plan": ("farflung.cli.plan", "MakePlan"),
        "compare": ("farflung.cli.compare", "Compare"),
        "simulate": ("farflung.cli.simulate", "Simulate"),
        "retime": ("farflung.cli.stored", "Retime"),
        "probe": ("farflung.cli.probe", "Probe"),
        "calibrate": ("farflung.cli.calibrate", "Calibrate"),
    },
    "Train": {
        "train": ("farflung.cli.train", "Train"),
        "join": ("farflung.cli.join", "Join"),
        "worker": ("farflung.cli.worker", "Worker"),
        "lab": ("farflung.lab.cli", "RunInLab"),
        "coded": ("farflung.coded.cli", "Coded"),
    },
    "Look": {
        "watch": ("farflung.cli.report", "Watch"),
        "report": ("farflung.cli.report", "Report"),
        "traffic": ("farflung.cli.stored", "Traffic"),
        "trace": ("farflung.cli.stored", "Trace"),
    },
    "Set up": {
        "doctor": ("farflung.cli.doctor", "Doctor"),
        "keys": ("farflung.cli.keys", "MakeKeys"),
        "data": ("farflung.cli.fetch", "Data"),
    },
}
"""Module and class of each command, in the order of the help; a module is imported only if its command runs."""
COMMANDS = {name: home for group in COMMAND_GROUPS.values() for name, home in group.items()}


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
def _import_command(name: str) -> type[Command]:
    module, kind = COMMANDS[name]
    command: type[Command] = getattr(import_module(module), kind)
    return label_options(command)


def _format_help() -> str:
    """Formats the help of the command: a line for each command, in groups."""
    lines = [
        "usage: farflung COMMAND [OPTIONS]",
        "",
        "Train one PyTorch model on machines that are far apart.",
    ]
    for group, commands in COMMAND_GROUPS.items():
        lines += ["", group]
        for name, home in commands.items():
            summary = read_docstring(*home).partition("\n")[0]
            lines.append(f"  {name:10} {summary.removesuffix('.')}")
    return "\n".join(
        [*lines, "", "farflung COMMAND --help shows its options; farflung --version the version."]
    )


def label_options(command: type[T]) -> type[T]:
    """Labels each optional option with the kind of its value, in a command's help, and hides its default.

    Options of most use come first, and those that a command inherits last. A boolean option becomes a pair of flags, so
    that the command line can unset what a file has set.
    """
    own, fields = command.__annotations__, command.__dataclass_fields__  # type: ignore[attr-defined]
    ordered = [*FIRST_OPTIONS, *own, *fields]
    command.__dataclass_fields__ = {name: fields[name] for name in sorted(fields, key=ordered.index)}  # type: ignore[attr-defined]
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
    name, *words = insert_dashes(args) or ["--help"]
    if name in ("-h", "--help"):
        print(_format_help())
        raise SystemExit(0)
    if name not in COMMANDS:
        raise UnknownName("command", name, COMMANDS)
    command, stderr, prog = _import_command(name), io.StringIO(), f"farflung {name}"
    try:
        with contextlib.redirect_stderr(stderr), _TYPES:
            return tyro.cli(command, prog=prog, args=words, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise _explain_refusal(stderr.getvalue(), prog) from None


def _explain_refusal(frame: str, prog: str) -> ConfigError:
    """Builds the error for a command line that tyro refuses, from the frame that it prints, in Unicode or ASCII."""
    _title, *lines = [line.strip("│ ") for line in frame.splitlines()] or [""]
    blocks = groupby(lines, key=lambda line: bool(line.strip("─╰╯-")))
    message, *others = [" ".join(block) for has_text, block in blocks if has_text] or [
        "these options cannot be read"
    ]
    message = message.rstrip(".")
    if choice := re.match(
        r"invalid choice '(.*)' for argument '([\w-]+)'. Expected one of \((.*)\)", message
    ):
        return UnknownName(choice[2], choice[1], re.findall(r"'(.+?)'", choice[3]))
    message = re.sub(
        r"Error parsing (\S+): no type matching (\S+) could be instantiated from \[(.*)\]",
        r"\1: must be \2, not \3",
        message,
    )
    if similar := re.search(r"Perhaps you meant: (--[\w-]+)", " ".join(others)):
        return ConfigError(f"{message}; did you mean {similar[1]}?")
    return ConfigError(f"{message}; see {prog} --help")
