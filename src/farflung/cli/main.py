"""The command line: sub-commands as dataclasses, errors on one line, exit code 2 for bad input."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from farflung.cli.calibrate import Calibrate
from farflung.cli.codecs import Codecs
from farflung.cli.coded import Coded
from farflung.cli.compare import Compare
from farflung.cli.data import Data
from farflung.cli.keys import MakeKeys
from farflung.cli.lab import RunInLab, with_dashes
from farflung.cli.networks import Networks
from farflung.cli.options import spoken
from farflung.cli.produce import Produce
from farflung.cli.recipes import Recipes
from farflung.cli.retime import Retime
from farflung.cli.schedule import Schedule
from farflung.cli.simulate import Simulate
from farflung.cli.traffic import Traffic
from farflung.cli.train import Train
from farflung.cli.workloads import Workloads
from farflung.errors import ConfigError, FarflungError
from farflung.runs import forked_ahead
from farflung.runtime import Seat

__all__ = ["main"]


class Command(Protocol):
    """A sub-command: its fields are its options."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        ...


COMMANDS: dict[str, Callable[..., Command]] = {
    "train": spoken(Train),
    "simulate": spoken(Simulate),
    "compare": spoken(Compare),
    "retime": spoken(Retime),
    "traffic": spoken(Traffic),
    "networks": spoken(Networks),
    "codecs": spoken(Codecs),
    "lab": spoken(RunInLab),
    "recipes": spoken(Recipes),
    "schedule": spoken(Schedule),
    "workloads": spoken(Workloads),
    "data": spoken(Data),
    "produce": spoken(Produce),
    "calibrate": spoken(Calibrate),
    "keys": spoken(MakeKeys),
    "coded": spoken(Coded),
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs ``farflung`` with ``args``; returns the exit code.

    Without them this process is the command: it has computed nothing yet.
    """
    try:
        command = _parse(sys.argv[1:] if args is None else args)
        ahead = args is None and isinstance(command, Train) and Seat.taken() is None
        with forked_ahead() if ahead else contextlib.nullcontext():
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


_TYPES = ConstructorRegistry()
"""How options of some types are read."""


@_TYPES.primitive_rule
def _path(option: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """Refuses an empty path, which ``Path`` takes for the current folder."""
    if option.type is not Path:
        return None

    def made(words: list[str]) -> Path:
        if not words[0]:
            raise ValueError("empty")
        return Path(words[0])

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=made,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def _parse(args: Sequence[str]) -> Command:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _TYPES:
            command: Command = tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="farflung",
                description="Train one PyTorch model on many devices that are far apart. --version prints the version.",
                args=with_dashes(args) or ["--help"],
                config=(tyro.conf.OmitArgPrefixes,),
            )
            return command
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise ConfigError(f"{_first_words(said.getvalue())}; see farflung --help") from None


def _first_words(boxed: str) -> str:
    """The first sentence inside the frame that tyro draws around an error."""
    words: list[str] = []
    for line in boxed.splitlines():
        text = line.strip("│ ")
        if line.startswith("╭"):
            continue
        if not text or set(text) <= {"─"}:
            break
        words.append(text)
    return " ".join(words).rstrip(".") or "these options cannot be read"
