"""Long work by names, so that several processes may share it: ``python -m benchmarks.NAME.trained NAME...``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from farflung.errors import FarflungError, UnknownName

__all__ = ["in_turn"]

T = TypeVar("T")


def in_turn(kind: str, names: Sequence[str], known: Mapping[str, T], work: Callable[[str, T], object]) -> int:
    """Does what is named, one after the other, and says what cannot be done; the exit code.

    Args:
      kind: what the names are of; where one is not known nothing begins.
      names: what to do.
      known: all that can be done, by name.
      work: does one.
    """
    try:
        for name in names:
            if name not in known:
                raise UnknownName(kind, name, known)
        for name in names:
            work(name, known[name])
    except FarflungError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
